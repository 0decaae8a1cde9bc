"""A decode step's attention: append, a partial state per page, merge (csrc/attn_decode.cu, csrc/attn_decode_mma.cu)."""

from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from rollkv.backend import PageFormat, PageRun, PartStates, Projected
from rollkv.config import KvType, LayerConfig
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.kernels.kv_format import check_projected, check_run, template_arguments
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.workspace import SET_PARTS, merge_sets

_THREADS = 128
_MAX_HEADS = 8  # query heads that one block holds sums for
_MMA_THREADS = 256
_MMA_BLOCKS_PER_SM = 2
_UNIT_BYTES = 16 << 10  # of the tensor-core kernel's ring
_FEW_UNITS = 4  # leaves room for two blocks on a multiprocessor
_MANY_UNITS = {64: 4, 128: 8, 192: 12, 256: 12}  # by head size: a whole page, or what a block can have on cards with 227 KiB a block
_WIDE_ARCHS = ("sm_90", "sm_100", "sm_103")
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
    fits = page.key_dim in _MANY_UNITS and page.page_cells == _MMA_PAGE_CELLS and layer.group >= _MMA_MIN_GROUP
    return "mma" if half and fits else "float32"


@cache
def launch_shape(group: int, num_kv_heads: int, num_pages: int) -> Shape:
    """The float32 kernel. All heads of a group together up to 8; larger groups in chunks as even as can be, side by side so that they share
    K and V in L2."""
    chunks = -(-group // _MAX_HEADS)
    return Shape(_THREADS, -(-group // chunks), chunks, (num_pages * chunks, num_kv_heads, 1))


class RingShape(NamedTuple):
    """Launch constants of the tensor-core kernel; results depend on `heads` alone, and not on what it is. A block serves `heads` query heads of one KV
    head in every grid[2]th page."""

    threads: int
    heads: int
    grid: tuple[int, int, int]  # chunks of heads, KV heads, blocks that share the pages
    units: int  # of the ring
    shared_bytes: int  # dynamic


@cache
def mma_launch_shape(dim: int, group: int, num_kv_heads: int, num_pages: int, num_sms: int, arch: str) -> RingShape:
    """The same division of heads. With many pages two blocks a multiprocessor, each with several pages; where there are fewer blocks than
    multiprocessors a ring that takes as much of a page at once as it can."""
    chunks = -(-group // _MAX_HEADS)
    columns = chunks * num_kv_heads
    blocks = num_sms * (_MMA_BLOCKS_PER_SM if arch.rstrip("a") in _WIDE_ARCHS else 1)
    units = _MANY_UNITS[dim] if columns * num_pages <= num_sms < blocks else _FEW_UNITS
    sharing = min(num_pages, max(blocks // columns, 1))
    return RingShape(_MMA_THREADS, -(-group // chunks), (chunks, num_kv_heads, sharing), units, units * _UNIT_BYTES)


@cache
def spec(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int, heads: int) -> KernelSpec:
    """The float32 kernel for blocks of `heads` query heads."""
    return KernelSpec("attn_decode.cu", f"attn_decode<{template_arguments(key_type, value_type, key_dim, value_dim)}, {heads}>", early=True)


@cache
def mma_spec(dim: int, units: int) -> KernelSpec:
    """The tensor-core kernel with a ring of that many units."""
    return KernelSpec("attn_decode_mma.cu", f"attn_decode_mma<{dim}, {units}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    plain = (
        spec("f16", "f16", 64, 64, 3),
        spec("bf16", "f16", 80, 96, 7),
        spec("f32", "f32", 256, 256, 8),
        spec("f32", "bf16", 16, 32, 1),
    )
    return plain + tuple(mma_spec(dim, units) for dim, many in _MANY_UNITS.items() for units in sorted({_FEW_UNITS, many}))


def attend_step_bytes(num_cells: int, num_parts: int, layer: LayerConfig, page: PageFormat) -> int:
    """Bytes read of num_cells visible cells, and of the product and the partial states of num_parts pages, which are written and read once."""
    cell_bytes = page.page_bytes // page.page_cells
    states = 2 * (num_parts + merge_sets(num_parts)) * (layer.value_dim + 1) * layer.num_heads if num_parts > 1 else 0
    columns = layer.num_heads * (layer.key_dim + layer.value_dim) + layer.num_kv_heads * (layer.key_dim + layer.value_dim)
    return num_cells * cell_bytes + (states + columns) * 4


def attend_step(
    launcher: Launcher,
    projected: Projected,
    position: DeviceArray,
    run: PageRun,
    page: PageFormat,
    scale: float,
    parts: PartStates,
    out: DeviceArray,
    *,
    num_sms: int,
) -> None:
    """Finishes the query, the new cell too if its page is of the run, attends to the pages of the run, and if they are the last merges all parts:
    softmax(scale q K) V over the visible cells.

    projected: one token's; position: i32 [1], its cell; parts: as backend.PartStates says; out: f32 [1, H*Dv]. Call it for all pages in their order, run
    by run. num_sms: multiprocessors of the device, which balances the blocks and changes no result. Reads and writes attend_step_bytes. Raises KernelError on other shapes.
    """
    layer, sets = projected.layer, merge_sets(parts.num_parts)
    operands, turns, eps = check_projected("attend_step", projected, page, 1)
    check_array("attend_step", "position", position, (1,), "i32")
    check_array("attend_step", "parts.out", parts.out, (parts.num_parts + sets, layer.num_heads, layer.value_dim), "f32")
    check_array("attend_step", "parts.lse", parts.lse, (parts.num_parts + sets, layer.num_heads), "f32")
    check_array("attend_step", "out", out, (1, layer.num_heads * layer.value_dim), "f32")
    if parts.arrivals.dtype != "i32" or parts.arrivals.shape[0] < layer.num_heads * (sets + 1):
        raise KernelError(f"attend_step: {parts.arrivals.shape} counters; {sets + 1} for each of {layer.num_heads} heads were wanted, i32")
    pool = check_run("attend_step", run, page)
    first_part = run.first_page - parts.first_page
    if first_part < 0 or run.num_pages < 1 or first_part + run.num_pages > parts.num_parts:
        raise KernelError(
            f"attend_step: pages {run.first_page} to {run.first_page + run.num_pages - 1} from page {parts.first_page} on are not among {parts.num_parts} parts"
        )
    place = (run.num_slots, run.first_slot, run.first_page, first_part, parts.num_parts, SET_PARTS)
    operands = (*operands, position, pool, parts.out, parts.lse, parts.arrivals, out, *map(np.int32, place), *turns)
    window, scale32 = np.int32(layer.sliding_window or 0), np.float32(scale)
    if variant(layer, page) == "mma":
        if not scale > 0:
            raise KernelError(f"attend_step: the scale of the scores must be positive, not {scale}")
        ring = mma_launch_shape(page.key_dim, layer.group, layer.num_kv_heads, run.num_pages, num_sms, launcher.arch)
        heads = np.int32(layer.group), np.int32(ring.heads)
        launcher.launch(
            mma_spec(page.key_dim, ring.units),
            ring.grid,
            ring.threads,
            *operands,
            *heads,
            window,
            eps,
            scale32,
            np.int32(run.num_pages),
            shared_bytes=ring.shared_bytes,
        )
    else:
        shape = launch_shape(layer.group, layer.num_kv_heads, run.num_pages)
        heads = np.int32(layer.group), np.int32(shape.heads)
        kernel = spec(page.key_type, page.value_type, page.key_dim, page.value_dim, shape.heads)
        sizes = np.int32(page.page_cells), np.int32(shape.chunks)
        launcher.launch(kernel, shape.grid, shape.threads, *operands, *heads, window, eps, scale32, *sizes)
