"""The table of a step's rotary angles (csrc/rope_table.cu)."""

from functools import cache

import numpy as np

from rollkv.config import RopeConfig
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelSpec
from rollkv.rope import rope_frequencies

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


def rope_table_bytes(rows: int, rope_dim: int) -> int:
    """Bytes written."""
    return rows * rope_dim * 4


def rope_table(launcher: Launcher, position: DeviceArray, frequency: DeviceArray, out: DeviceArray, *, magnitude: float) -> None:
    """out[t] = magnitude * (cos, sin) of (position[0] + t) * frequency.

    position: i32 [1]; frequency, magnitude: of table_constants(rope), the float64 frequencies as u8 [dim/2 * 8]; out: f32 [T, dim/2, 2].
    Writes rope_table_bytes(T, dim). Raises KernelError on other shapes.
    """
    rows, pairs, _ = out.shape
    check_array("rope_table", "position", position, (1,), "i32")
    check_array("rope_table", "frequency", frequency, (pairs * 8,), "u8")
    check_array("rope_table", "out", out, (rows, pairs, 2), "f32")
    entries = rows * pairs
    grid = (-(-entries // _THREADS), 1, 1)
    launcher.launch(spec(), grid, _THREADS, position, frequency, out, np.int64(entries), np.int32(pairs), np.float64(magnitude))
