"""The tables of a step's rotary angles (csrc/rope_table.cu)."""

from functools import cache

import numpy as np

from rollkv.config import RopeConfig
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelSpec
from rollkv.rope import rope_frequencies, rotations

_THREADS = 128


@cache
def spec() -> KernelSpec:
    """Not early, as a step's first kernel: what begins behind it finds all that earlier steps did (csrc/common.cuh)."""
    return KernelSpec("rope_table.cu", f"rope_table<{_THREADS}>")


def instances() -> tuple[KernelSpec, ...]:
    return (spec(),)


def table_constants(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """(frequencies float64 [dim/2] in half turns a position, magnitude): in half turns the kernel's sincospi reduces exactly."""
    frequencies, magnitude = rope_frequencies(rope)
    return frequencies / np.pi, magnitude


def rope_table_bytes(rows: int, rope: RopeConfig) -> int:
    """Bytes written."""
    return rotations(rope) * rows * rope.dim * 4


def rope_table(
    launcher: Launcher,
    rope: RopeConfig,
    position: DeviceArray,
    prompt_cells: DeviceArray,
    frequency: DeviceArray,
    out: DeviceArray,
    *,
    magnitude: float,
) -> None:
    """out[r][t] = magnitude * (cos, sin) of place * frequency, as backend.Backend.rope_table says.

    position, prompt_cells: i32 [1]; frequency, magnitude: of table_constants(rope), the float64 frequencies as u8 [dim/2 * 8]; out: f32
    [rotations(rope), T, dim/2, 2]. Writes rope_table_bytes(T, rope). Raises KernelError on other shapes.
    """
    tables, (rows, pairs) = rotations(rope), out.shape[1:3]
    check_array("rope_table", "position", position, (1,), "i32")
    check_array("rope_table", "prompt_cells", prompt_cells, (1,), "i32")
    check_array("rope_table", "frequency", frequency, (pairs * 8,), "u8")
    check_array("rope_table", "out", out, (tables, rows, pairs, 2), "f32")
    entries, chunk = rows * pairs, rope.dual_chunk
    chunks = (0, 0, 0) if chunk is None else (chunk.stride_cells, chunk.chunk_cells, chunk.original_context)
    grid = (-(-entries // _THREADS), tables, 1)
    sizes = np.int64(entries), np.int32(pairs), np.float64(magnitude), *map(np.int32, chunks)
    launcher.launch(spec(), grid, _THREADS, position, prompt_cells, frequency, out, *sizes)
