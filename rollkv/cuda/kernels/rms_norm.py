"""Root-mean-square norm over runs of columns (csrc/rms_norm.cu)."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelError, KernelSpec

_WARP_COLUMNS = 512  # up to here one warp a run: head sizes of query and key norms
_RUNS_A_BLOCK = 8


class Shape(NamedTuple):
    """Launch constants: threads a run, runs a block, columns a load."""

    threads: int
    runs: int
    width: int


@cache
def launch_shape(columns: int) -> Shape:
    """Depends on the run's length alone, so that its bits do not depend on the number of runs."""
    width = 4 if columns % 4 == 0 else 1
    if columns <= _WARP_COLUMNS:
        return Shape(32, _RUNS_A_BLOCK, width)
    # Decode has a single row: as many threads as have something to load, for the latency of one block is all it costs.
    return Shape(256 if columns <= 2048 else 1024, 1, width)


@cache
def spec(columns: int) -> KernelSpec:
    return _spec(launch_shape(columns))


@cache
def _spec(shape: Shape) -> KernelSpec:
    return KernelSpec("rms_norm.cu", f"rms_norm<{shape.threads}, {shape.runs}, {shape.width}>")


def instances() -> tuple[KernelSpec, ...]:
    """Every instance that spec() can name."""
    return tuple(dict.fromkeys(spec(columns) for columns in (512, 511, 2048, 2047, 4096, 4095)))


def rms_norm_bytes(rows: int, columns: int) -> int:
    """Bytes read and written for x f32 [rows, columns]."""
    return 2 * rows * columns * 4


def rms_norm(launcher: Launcher, x: DeviceArray, weight: DeviceArray, out: DeviceArray, *, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight over every run of n columns.

    weight: f32 [n]; x, out: f32 [T, m*n]; out may be x. Reads and writes rms_norm_bytes(T, m*n). Raises KernelError on other shapes.
    """
    columns = weight.shape[0]
    check_array("rms_norm", "weight", weight, (columns,), "f32")
    check_array("rms_norm", "out", out, x.shape, "f32")
    if x.dtype != "f32" or x.shape[-1] % columns:
        raise KernelError(f"rms_norm: x must be f32 with rows of a multiple of {columns} columns, not {x.dtype} {list(x.shape)}")
    runs = math.prod(x.shape) // columns
    shape = launch_shape(columns)
    grid = (-(-runs // shape.runs), 1, 1)
    launcher.launch(_spec(shape), grid, shape.threads * shape.runs, x, weight, out, np.int64(runs), np.int32(columns), np.float32(eps))
