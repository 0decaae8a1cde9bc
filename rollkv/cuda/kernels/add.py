"""The residual addition x += y (csrc/add.cu)."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

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
    return KernelSpec("add.cu", f"add<{width}, {_THREADS}>")


def instances() -> tuple[KernelSpec, ...]:
    return spec(1), spec(4)


def add_bytes(rows: int, columns: int) -> int:
    """Bytes read and written for x f32 [rows, columns]."""
    return 3 * rows * columns * 4


def add(launcher: Launcher, x: DeviceArray, y: DeviceArray) -> None:
    """x += y. x, y: f32, one shape. Reads and writes add_bytes. Raises KernelError on other shapes."""
    check_array("add", "x", x, x.shape, "f32")
    check_array("add", "y", y, x.shape, "f32")
    count = math.prod(x.shape)
    shape = launch_shape(count)
    launcher.launch(spec(shape.width), (shape.blocks, 1, 1), shape.threads, x, y, np.int64(count))
