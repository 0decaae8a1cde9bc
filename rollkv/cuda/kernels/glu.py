"""Gated linear unit: activation(gate) * up (csrc/glu.cu)."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelSpec

_THREADS = 256
_ACTIVATIONS = {"silu": "Silu", "gelu_tanh": "GeluTanh"}


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
def spec(activation: str, width: int) -> KernelSpec:
    return KernelSpec("glu.cu", f"glu<{_ACTIVATIONS[activation]}, {width}, {_THREADS}>")


def instances() -> tuple[KernelSpec, ...]:
    return tuple(spec(activation, width) for activation in _ACTIVATIONS for width in (1, 4))


def glu_bytes(rows: int, columns: int) -> int:
    """Bytes read and written for gate f32 [rows, columns]."""
    return 3 * rows * columns * 4


def glu(launcher: Launcher, gate: DeviceArray, up: DeviceArray, out: DeviceArray, *, activation: str) -> None:
    """out = activation(gate) * up, activation "silu" or "gelu_tanh".

    gate, up, out: f32, one shape; out may be gate. Reads and writes glu_bytes. Raises KernelError on other shapes.
    """
    check_array("glu", "gate", gate, gate.shape, "f32")
    check_array("glu", "up", up, gate.shape, "f32")
    check_array("glu", "out", out, gate.shape, "f32")
    count = math.prod(gate.shape)
    shape = launch_shape(count)
    launcher.launch(spec(activation, shape.width), (shape.blocks, 1, 1), shape.threads, gate, up, out, np.int64(count))
