"""The residual stream: x += y, or x += norm(y) (csrc/add.cu)."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.backend import RmsNorm
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelSpec

_THREADS = 256


class Shape(NamedTuple):
    """Launch constants: threads a block, blocks, elements a thread."""

    threads: int
    blocks: int
    width: int


@cache
def launch_shape(count: int) -> Shape:
    """16-byte loads where the count allows them."""
    width = 4 if count % 4 == 0 else 1
    return Shape(_THREADS, -(-count // (_THREADS * width)), width)


@cache
def spec(width: int) -> KernelSpec:
    return KernelSpec("add.cu", f"add<{width}, {_THREADS}>", early=True)


@cache
def norm_shape(rows: int, columns: int) -> Shape:
    """A block a row; its number of threads depends on the row's length alone, and so do its bits. Decode has a single row: as many threads as have
    something to load, for the latency of one block is all it costs."""
    return Shape(256 if columns <= 2048 else 1024, rows, 4 if columns % 4 == 0 else 1)


@cache
def norm_spec(width: int, threads: int) -> KernelSpec:
    return KernelSpec("add.cu", f"add_norm<{width}, {threads}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    return (*map(spec, (1, 4)), *(norm_spec(width, threads) for width in (1, 4) for threads in (256, 1024)))


def add_bytes(rows: int, columns: int) -> int:
    """Bytes read and written for x f32 [rows, columns]; a norm reads y a second time, out of the caches."""
    return 3 * rows * columns * 4


def add(launcher: Launcher, x: DeviceArray, y: DeviceArray, norm: RmsNorm | None = None) -> None:
    """x += y, or x += y / sqrt(mean(y^2) + eps) * weight row by row. x, y: f32, one shape, [T, n] with a norm; norm.weight: f32 [n].

    Reads and writes add_bytes. Raises KernelError on other shapes.
    """
    check_array("add", "x", x, x.shape, "f32")
    check_array("add", "y", y, x.shape, "f32")
    if norm is None:
        count = math.prod(x.shape)
        shape = launch_shape(count)
        launcher.launch(spec(shape.width), (shape.blocks, 1, 1), shape.threads, x, y, np.int64(count))
        return
    rows, columns = x.shape
    check_array("add", "norm", norm.weight, (columns,), "f32")
    shape = norm_shape(rows, columns)
    kernel = norm_spec(shape.width, shape.threads)
    launcher.launch(kernel, (shape.blocks, 1, 1), shape.threads, x, y, norm.weight, np.int32(columns), np.float32(norm.eps))
