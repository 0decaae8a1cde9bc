"""Weights of any type to f16, for products with many rows (csrc/dequantise.cu)."""

from functools import cache

import numpy as np

from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.quants import FORMATS, TILE_ROWS

_THREADS = 256
_MAX_GRID_Y = 65535
_SPANS_PER_BLOCK = _THREADS // 32


@cache
def spec(qtype: str) -> KernelSpec:
    return KernelSpec("dequantise.cu", f"dequantise<{qtype}>")


def instances() -> tuple[KernelSpec, ...]:
    return tuple(spec(qtype) for qtype in FORMATS)


def launch_grid(num_rows: int, spans: int) -> tuple[int, int, int]:
    """A block takes 8 spans of one tile. Tiles beyond 65,535 (a million rows) need a second call."""
    return -(-spans // _SPANS_PER_BLOCK), -(-num_rows // TILE_ROWS), 1


def dequantise_bytes(weight: CudaWeight, num_rows: int) -> int:
    """Bytes read and written for rows of a weight."""
    return num_rows * weight.columns * 2 + weight.nbytes * num_rows // weight.rows


def dequantise(launcher: Launcher, weight: CudaWeight, out: DeviceArray, *, first_row: int) -> None:
    """out[r] = f16(weight[first_row + r]), saturating finite values at +-65504.

    out: f16 (num_rows, columns); first_row: a multiple of 16. Reads and writes dequantise_bytes. Raises KernelError on other shapes.
    """
    num_rows = out.shape[0]
    check_array("dequantise", "out", out, (num_rows, weight.columns), "f16")
    grid = launch_grid(num_rows, weight.form.spans)
    if first_row % TILE_ROWS or not 0 < first_row + num_rows <= weight.rows or grid[1] > _MAX_GRID_Y:
        raise KernelError(
            f"dequantise: rows {first_row} to {first_row + num_rows} of {weight.rows}; whole tiles of {TILE_ROWS}, up to a million rows, were wanted"
        )
    numbers = map(np.int32, (first_row // TILE_ROWS, num_rows, weight.columns, weight.form.spans))
    launcher.launch(spec(weight.qtype), grid, _THREADS, *weight.planes, out, *numbers)
