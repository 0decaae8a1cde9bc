"""A step's queries for another band of pages: norm and turn (csrc/queries.cu)."""

from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.backend import PageFormat, Projected
from rollkv.cuda.device import DeviceArray, Launcher, Pointer, check_array
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.rope import rotations

_WARPS = 8  # of a block, a head each


class Shape(NamedTuple):
    """Launch constants."""

    threads: int
    grid: tuple[int, int, int]


@cache
def launch_shape(num_tokens: int, num_heads: int) -> Shape:
    """A block column a token, a warp a head."""
    return Shape(_WARPS * 32, (num_tokens, -(-num_heads // _WARPS), 1))


@cache
def spec(key_dim: int) -> KernelSpec:
    return KernelSpec("queries.cu", f"queries<{key_dim}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    return spec(16), spec(80), spec(128), spec(256)


def queries_bytes(num_tokens: int, num_heads: int, key_dim: int) -> int:
    """Bytes read and written."""
    return 8 * num_tokens * num_heads * key_dim


def queries(launcher: Launcher, projected: Projected, page: PageFormat, band: int, q: DeviceArray) -> None:
    """Norms the queries of `projected` and turns them as for pages of that band into q, f32 [T, H*Dk], in their frame: in the bits of qkv_append.

    Reads and writes queries_bytes. Raises KernelError on other shapes.
    """
    layer, norm = projected.layer, projected.q_norm
    num_tokens, columns = projected.qkv.shape
    tables, pairs, dim = rotations(layer.rope), projected.table.shape[2], layer.key_dim
    check_array("queries", "table", projected.table, (tables, num_tokens, pairs, 2), "f32")
    check_array("queries", "q", q, (num_tokens, layer.num_heads * dim), "f32")
    if 2 * pairs > dim or columns < layer.num_heads * dim:
        raise KernelError(f"queries: {pairs} pairs and {columns} columns do not fit {layer.num_heads} heads of {dim} columns")
    if norm is not None:
        check_array("queries", "norm", norm.weight, (dim,), "f32")
    shape = launch_shape(num_tokens, layer.num_heads)
    sizes = map(np.int32, (columns, layer.num_heads, pairs, layer.rope.style == "interleaved", page.key_rotated))
    weight, eps = (Pointer(0), 0.0) if norm is None else (Pointer(norm.weight.ptr), norm.eps)
    launcher.launch(spec(dim), shape.grid, shape.threads, projected.qkv, weight, projected.table.rows(1, band), q, *sizes, np.float32(eps))
