"""Embedding rows looked up in a table of any type (csrc/embed.cu)."""

from functools import cache

import numpy as np

from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelSpec
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.quants import FORMATS

_THREADS = 128


@cache
def spec(qtype: str) -> KernelSpec:
    return KernelSpec("embed.cu", f"embed<{qtype}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    return tuple(spec(qtype) for qtype in FORMATS)


def launch_grid(num_tokens: int, spans: int) -> tuple[int, int, int]:
    """Four threads a span of a token's row."""
    return num_tokens, -(-spans * 4 // _THREADS), 1


def embed_bytes(weight: CudaWeight, num_tokens: int) -> int:
    """Bytes read and written: two rows of the table (they lie together) and one of the result, a token."""
    return num_tokens * (weight.columns * 4 + 4 + 2 * weight.nbytes // weight.rows)


def embed(launcher: Launcher, sequence: DeviceArray, position: DeviceArray, table: CudaWeight, out: DeviceArray, *, scale: float) -> None:
    """out[t] = scale * table[sequence[position[0] + t]], a row of NaN for a token outside the table and a cell outside the sequence.

    sequence: i32 (n,); position: i32 (1,); table: (vocab, hidden); out: f32 (T, hidden). Reads and writes embed_bytes. Raises KernelError on other shapes.
    """
    num_tokens = out.shape[0]
    check_array("embed", "sequence", sequence, (sequence.shape[0],), "i32")
    check_array("embed", "position", position, (1,), "i32")
    check_array("embed", "out", out, (num_tokens, table.columns), "f32")
    grid = launch_grid(num_tokens, table.form.spans)
    numbers = map(np.int32, (sequence.shape[0], table.rows, table.columns, table.form.spans))
    launcher.launch(spec(table.qtype), grid, _THREADS, sequence, position, *table.planes, out, np.float32(scale), *numbers)
