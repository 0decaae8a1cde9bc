"""A decode step's attention: append, a partial state per page, merge (csrc/attn_decode.cu, csrc/attn_decode_mma.cu)."""

from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from rollkv.backend import PageFormat, PageRun, PartStates, Projected
from rollkv.config import KvType, LayerConfig
from rollkv.cuda.device import DeviceArray, Launcher
from rollkv.cuda.kernels.kv_format import MERGED_WITHIN, check_projected, check_step, plain_arguments
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.rope import bands, rotations

_THREADS = 128
_MAX_HEADS = 8  # query heads that one block holds sums for
# Forms of the tensor-core kernel by head size: warps, buffers of 4 loads a lane, blocks that a multiprocessor must have room for. Few pages are bound by
# latency and load as much of a page at once as registers hold; many are bound by memory, and smaller blocks even out what it does. At 8,192 cells of 8 x 128
# (256 blocks) the second takes 13.4 us and the third 15.7, at 13,312 (416 blocks) 20.4 and 18.9.
_FEW_PAGES = {64: (8, 4, 1), 128: (8, 8, 1), 192: (8, 8, 1), 256: (8, 8, 1)}
_SOME_PAGES = {64: (8, 4, 2), 128: (8, 4, 2), 192: (8, 8, 1), 256: (8, 8, 1)}
_MANY_PAGES = dict.fromkeys(_FEW_PAGES, (4, 4, 4))
_SOME_BLOCKS = 256  # an H200 runs 264 at once in the second form
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
    fits = page.key_dim in _FEW_PAGES and page.page_cells == _MMA_PAGE_CELLS and layer.group >= _MMA_MIN_GROUP
    return "mma" if half and fits else "float32"


@cache
def launch_shape(group: int, num_kv_heads: int, num_pages: int) -> Shape:
    """The float32 kernel. All heads of a group together up to 8; larger groups in chunks as even as can be, side by side so that they share
    K and V in L2."""
    chunks = -(-group // _MAX_HEADS)
    return Shape(_THREADS, -(-group // chunks), chunks, (num_pages * chunks, num_kv_heads, 1))


class MmaShape(NamedTuple):
    """Launch constants of the tensor-core kernel, whose results depend on them, so they follow from the model and the parts of a step alone."""

    warps: int
    buffers: int
    blocks: int  # a multiprocessor
    heads: int  # of a block
    chunks: int


@cache
def mma_shape(dim: int, group: int, num_kv_heads: int, num_parts: int) -> MmaShape:
    """For a step over num_parts pages: the same division of heads. The form changes behind powers of two of pages, where rehearsals look for kernels."""
    chunks = -(-group // _MAX_HEADS)
    blocks = chunks * num_kv_heads * (1 << (num_parts - 1).bit_length())
    forms = _FEW_PAGES if num_parts <= MERGED_WITHIN else _SOME_PAGES if blocks <= _SOME_BLOCKS else _MANY_PAGES
    return MmaShape(*forms[dim], -(-group // chunks), chunks)


@cache
def spec(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int, heads: int) -> KernelSpec:
    """The float32 kernel for blocks of `heads` query heads."""
    return KernelSpec("attn_decode.cu", f"attn_decode<{plain_arguments(key_type, value_type, key_dim, value_dim)}, {heads}>", early=True)


@cache
def mma_spec(dim: int, warps: int, buffers: int, blocks: int) -> KernelSpec:
    """The tensor-core kernel in one of its forms."""
    return KernelSpec("attn_decode_mma.cu", f"attn_decode_mma<{dim}, {warps}, {buffers}, {blocks}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    plain = (
        spec("f16", "f16", 64, 64, 3),
        spec("bf16", "f16", 80, 96, 7),
        spec("f32", "f32", 256, 256, 8),
        spec("f32", "bf16", 16, 32, 1),
    )
    forms = {(dim, *form[dim]) for form in (_FEW_PAGES, _SOME_PAGES, _MANY_PAGES) for dim in form}
    return plain + tuple(mma_spec(*form) for form in sorted(forms))


def attend_step_bytes(num_cells: int, num_parts: int, layer: LayerConfig, page: PageFormat) -> int:
    """Bytes read of num_cells visible cells and the product, and written; partial states are written and read once."""
    cell_bytes = page.page_bytes // page.page_cells
    states = 2 * num_parts * (layer.value_dim + 1) * layer.num_heads if num_parts > 1 else 0
    columns = (layer.num_heads + layer.num_kv_heads) * (layer.key_dim + layer.value_dim)
    return num_cells * cell_bytes + (states + columns) * 4


def attend_step(
    launcher: Launcher,
    projected: Projected,
    position: DeviceArray,
    runs: tuple[PageRun, ...],
    page: PageFormat,
    scale: float,
    parts: PartStates,
    out: DeviceArray,
) -> None:
    """Finishes the query, the new cell too if its page is of the runs, attends to the pages of the runs, and if they are the last of up to MERGED_WITHIN
    merges all parts: softmax(scale q K) V over the visible cells.

    projected: one token's; position: i32 [1], its cell; runs: one, or two that follow each other; parts: as backend.PartStates says; out: f32 [1, H*Dv].
    Call it for all pages in their order. Reads and writes attend_step_bytes. Raises KernelError on other shapes.
    """
    layer, num_parts = projected.layer, parts.num_parts
    operands, turns, eps = check_projected("attend_step", projected, page, 1)
    pools, first_part, num_pages = check_step("attend_step", position, runs, layer, page, parts, out)
    run, last = runs[0], runs[-1]
    seen_as = bands(layer.rope, page.page_cells, parts.first_page + num_parts - 1)
    place = (run.num_slots, run.first_slot, run.num_pages, last.num_slots, last.first_slot, run.first_page, first_part, num_parts)
    tables = projected.table, projected.table.rows(1, rotations(layer.rope) - 1)
    borders = seen_as.previous_page, seen_as.own_page
    operands = (*operands, *tables, position, *pools, parts.out, parts.lse, parts.arrivals, out, *map(np.int32, place + borders), *turns)
    window, scale32 = np.int32(layer.sliding_window or 0), np.float32(scale)
    if variant(layer, page) == "mma":
        if not scale > 0:
            raise KernelError(f"attend_step: the scale of the scores must be positive, not {scale}")
        ours = mma_shape(page.key_dim, layer.group, layer.num_kv_heads, num_parts)
        kernel = mma_spec(page.key_dim, ours.warps, ours.buffers, ours.blocks)
        grid, heads = (ours.chunks, layer.num_kv_heads, num_pages), (np.int32(layer.group), np.int32(ours.heads))
        launcher.launch(kernel, grid, ours.warps * 32, *operands, *heads, window, eps, scale32)
    else:
        shape = launch_shape(layer.group, layer.num_kv_heads, num_pages)
        heads = np.int32(layer.group), np.int32(shape.heads)
        kernel = spec(page.key_type, page.value_type, page.key_dim, page.value_dim, shape.heads)
        sizes = np.int32(page.page_cells), np.int32(shape.chunks)
        launcher.launch(kernel, shape.grid, shape.threads, *operands, *heads, window, eps, scale32, *sizes)
