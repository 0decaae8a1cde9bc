"""Decode attention: a partial state per page (csrc/attn_decode.cu, csrc/attn_decode_mma.cu)."""

from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from rollkv.backend import PageFormat, PageRun
from rollkv.config import KvType, LayerConfig
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.kernels.kv_format import check_run, template_arguments
from rollkv.cuda.nvrtc import KernelError, KernelSpec

_THREADS = 128
_MAX_HEADS = 8  # query heads that one block holds sums for
_MMA_BLOCKS = {64: 4, 128: 3, 192: 2, 256: 2}  # head sizes of the tensor-core kernel, and blocks a multiprocessor, as far as registers go
_MMA_PAGE_CELLS = 256
_MMA_MIN_GROUP = 4  # smaller groups are bound by memory in float32 too

Variant = Literal["mma", "float32"]


class Shape(NamedTuple):
    """Launch constants. A block serves `heads` query heads of one KV head, a KV head takes `chunks` blocks a page."""

    threads: int
    heads: int
    chunks: int
    grid: tuple[int, int, int]


def variant(layer: LayerConfig, page: PageFormat) -> Variant:
    """Which kernel serves a layer, by its shape and cache types alone: half cells of the usual head sizes go to the tensor cores, with the
    query and the softmax weights rounded to half; everything else is computed in float32."""
    half = page.key_type == page.value_type == "f16" and page.key_dim == page.value_dim
    fits = page.key_dim in _MMA_BLOCKS and page.page_cells == _MMA_PAGE_CELLS and layer.group >= _MMA_MIN_GROUP
    return "mma" if half and fits else "float32"


@cache
def launch_shape(group: int, num_kv_heads: int, num_pages: int) -> Shape:
    """The float32 kernel. All heads of a group together up to 8; larger groups in chunks as even as can be, side by side so that they share
    K and V in L2."""
    chunks = -(-group // _MAX_HEADS)
    return Shape(_THREADS, -(-group // chunks), chunks, (num_pages * chunks, num_kv_heads, 1))


@cache
def mma_launch_shape(group: int, num_kv_heads: int, num_pages: int) -> Shape:
    """The tensor-core kernel: the same division, in another grid."""
    chunks = -(-group // _MAX_HEADS)
    return Shape(_THREADS, -(-group // chunks), chunks, (chunks, num_kv_heads, num_pages))


@cache
def spec(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int, heads: int) -> KernelSpec:
    """The float32 kernel for blocks of `heads` query heads."""
    return KernelSpec("attn_decode.cu", f"attn_decode<{template_arguments(key_type, value_type, key_dim, value_dim)}, {heads}>", early=True)


@cache
def mma_spec(dim: int) -> KernelSpec:
    """The tensor-core kernel."""
    return KernelSpec("attn_decode_mma.cu", f"attn_decode_mma<{dim}, {_MMA_BLOCKS[dim]}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    plain = (
        spec("f16", "f16", 64, 64, 3),
        spec("bf16", "f16", 80, 96, 7),
        spec("f32", "f32", 256, 256, 8),
        spec("f32", "bf16", 16, 32, 1),
    )
    return plain + tuple(mma_spec(dim) for dim in (64, 128, 256))


def attend_rows_bytes(num_cells: int, num_parts: int, layer: LayerConfig, page: PageFormat) -> int:
    """Bytes read of num_cells visible cells, and written for num_parts partial states."""
    cell_bytes = page.page_bytes // page.page_cells
    return num_cells * cell_bytes + (num_parts * (layer.value_dim + 1) + layer.key_dim) * layer.num_heads * 4


def attend_rows(
    launcher: Launcher,
    q: DeviceArray,
    position: DeviceArray,
    run: PageRun,
    base_page: int,
    layer: LayerConfig,
    page: PageFormat,
    scale: float,
    part_out: DeviceArray,
    part_lse: DeviceArray,
) -> None:
    """Partial states of the pages of `run` at index page - base_page: softmax(scale q K) V and its lse over the visible cells.

    q: f32 [1, H*Dk]; position: i32 [1], the last visible cell; part_out: f32 [parts, H, Dv]; part_lse: f32 [parts, H], natural logarithm.
    Reads and writes attend_rows_bytes. Raises KernelError on other shapes.
    """
    heads_dims = (layer.num_heads, layer.value_dim)
    check_array("attend_rows", "q", q, (1, layer.num_heads * layer.key_dim), "f32")
    check_array("attend_rows", "position", position, (1,), "i32")
    check_array("attend_rows", "part_out", part_out, (part_out.shape[0], *heads_dims), "f32")
    check_array("attend_rows", "part_lse", part_lse, (part_out.shape[0], layer.num_heads), "f32")
    pool = check_run("attend_rows", run, page)
    first_part = run.first_page - base_page
    if first_part < 0 or first_part + run.num_pages > part_out.shape[0]:
        raise KernelError(
            f"attend_rows: pages {run.first_page} to {run.first_page + run.num_pages - 1} from page {base_page} on "
            f"do not fit {part_out.shape[0]} partial states"
        )
    if run.num_pages == 0:
        return
    place = (np.int32(run.num_slots), np.int32(run.first_slot), np.int32(run.first_page), np.int32(first_part))
    window, scale32 = np.int32(layer.sliding_window or 0), np.float32(scale)
    operands = (q, position, pool, part_out, part_lse, *place)
    if variant(layer, page) == "mma":
        if not scale > 0:
            raise KernelError(f"attend_rows: the scale of the scores must be positive, not {scale}")
        shape = mma_launch_shape(layer.group, layer.num_kv_heads, run.num_pages)
        heads = np.int32(layer.group), np.int32(shape.heads)
        launcher.launch(mma_spec(page.key_dim), shape.grid, shape.threads, *operands, *heads, window, scale32)
    else:
        shape = launch_shape(layer.group, layer.num_kv_heads, run.num_pages)
        kernel = spec(page.key_type, page.value_type, page.key_dim, page.value_dim, shape.heads)
        sizes = np.int32(page.page_cells), np.int32(layer.group), np.int32(shape.chunks)
        launcher.launch(kernel, shape.grid, shape.threads, *operands, *sizes, window, scale32)
