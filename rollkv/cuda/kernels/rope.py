"""Rotary position embedding: the table of a step's angles, and the rotation of heads in place (csrc/rope.cu)."""

from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.config import RopeConfig
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.rope import rope_frequencies

_THREADS = 128
_STYLES = {"interleaved": "Interleaved", "halves": "Halves"}


class Shape(NamedTuple):
    """Launch constants of rope: threads a block, blocks a row, pairs a thread."""

    threads: int
    blocks: int
    pairs: int


@cache
def launch_shape(num_heads: int, head_dim: int, rope_dim: int) -> Shape:
    """Two pairs a thread where 16-byte loads stay aligned: rope_dim and head_dim multiples of 4."""
    pairs = 2 if rope_dim % 4 == 0 and head_dim % 4 == 0 else 1
    return Shape(_THREADS, -(-num_heads * (rope_dim // 2 // pairs) // _THREADS), pairs)


@cache
def table_spec() -> KernelSpec:
    return KernelSpec("rope.cu", f"rope_table<{_THREADS}>")


@cache
def spec(style: str, pairs: int) -> KernelSpec:
    """pairs: turned by one thread, 1 or 2."""
    return KernelSpec("rope.cu", f"rope<{_STYLES[style]}, {pairs}, {_THREADS}>")


def instances() -> tuple[KernelSpec, ...]:
    return (table_spec(), *(spec(style, pairs) for style in _STYLES for pairs in (1, 2)))


def table_constants(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """(frequencies float64 [dim/2] in half turns a position, magnitude): in half turns the kernel's sincospi reduces exactly."""
    frequencies, magnitude = rope_frequencies(rope)
    return frequencies / np.pi, magnitude


def rope_bytes(rows: int, num_heads: int, rope_dim: int) -> int:
    """Bytes read and written by the rotation of x f32 [rows, num_heads * D] and its table."""
    return rows * (2 * num_heads * rope_dim * 4 + rope_dim * 4)


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
    launcher.launch(table_spec(), grid, _THREADS, position, frequency, out, np.int64(entries), np.int32(pairs), np.float64(magnitude))


def rope(launcher: Launcher, x: DeviceArray, table: DeviceArray, *, num_heads: int, style: str) -> None:
    """Rotates the first dim columns of every head in place.

    x: f32 [T, num_heads * D]; table: f32 [T, dim/2, 2]; style: "interleaved" pairs (2i, 2i+1), "halves" pairs (i, i + dim/2). Moves
    rope_bytes(T, num_heads, dim). Raises KernelError on other shapes.
    """
    rows, pairs = x.shape[0], table.shape[1]
    check_array("rope", "table", table, (rows, pairs, 2), "f32")
    head_dim = x.shape[1] // num_heads
    if x.dtype != "f32" or x.shape[1] != num_heads * head_dim or 2 * pairs > head_dim:
        raise KernelError(f"rope: x must be f32 with {num_heads} heads of at least {2 * pairs} columns, not {x.dtype} {list(x.shape)}")
    shape = launch_shape(num_heads, head_dim, 2 * pairs)
    grid = (rows, shape.blocks, 1)
    launcher.launch(spec(style, shape.pairs), grid, shape.threads, x, table, np.int32(num_heads), np.int32(head_dim), np.int32(pairs))
