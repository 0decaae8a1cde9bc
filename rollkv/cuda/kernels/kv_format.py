"""What the kernels over KV pages have in common: template arguments from a PageFormat, and the checks of a PageRun and of what goes into pages."""

from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from rollkv.backend import PageFormat, PageRun, PartStates, Projected
from rollkv.config import KvType, LayerConfig
from rollkv.cuda.device import DeviceArray, Pointer, check_array
from rollkv.cuda.nvrtc import KernelError
from rollkv.kv_types import KV_TYPES
from rollkv.rope import rotations

PAGE_CELLS = (16, 32, 64, 128, 256)
MAX_HEAD_DIM = 256
MERGED_WITHIN = 16  # parts of a decode step up to which its attention kernels merge them themselves: kMergedWithin of csrc/attn_merge.cuh
_ELEMENTS: dict[str, str] = {
    "f32": "float", "f16": "Half", "bf16": "Bf16", "q8_0": "Q8_0", "q4_0": "Q4_0", "turbo4": "Turbo4", "turbo3": "Turbo3", "turbo2": "Turbo2"
}  # fmt: skip


@cache
def template_arguments(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int) -> str:
    """ "Half, Turbo4, 128, 128" for C++. Raises KernelError for head sizes that the kernels do not have."""
    for dim, kind in ((key_dim, KV_TYPES[key_type]), (value_dim, KV_TYPES[value_type])):
        if dim % 16 or not 16 <= dim <= MAX_HEAD_DIM:
            raise KernelError(f"a head of {dim} elements has no attention kernel; a multiple of 16 up to {MAX_HEAD_DIM} has one")
        if dim % kind.divisor:
            raise KernelError(f"a head of {dim} elements cannot be held as {kind.name}; a multiple of {kind.divisor} can")
    return f"{element(key_type)}, {element(value_type)}, {key_dim}, {value_dim}"


@cache
def plain_arguments(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int) -> str:
    """The same for kernels that read elements as they are. Raises KernelError for coded types too."""
    if KV_TYPES[key_type].coded or KV_TYPES[value_type].coded:
        raise KernelError(f"pages of {key_type} keys and {value_type} values are coded; this kernel reads f32, f16 and bf16")
    return template_arguments(key_type, value_type, key_dim, value_dim)


def element(kind: KvType) -> str:
    """The C++ tag of a type."""
    return _ELEMENTS[kind]


def check_run(kernel: str, run: PageRun, page: PageFormat) -> DeviceArray:
    """The run's pool. Raises KernelError when pool, slots or page size do not fit together."""
    pool = cast(DeviceArray, run.pool)
    if pool.dtype != "u8" or len(pool.shape) != 2 or pool.shape[0] < run.num_slots or pool.shape[1] != page.page_bytes:
        wanted = f"u8 [{run.num_slots}, {page.page_bytes}]"
        raise KernelError(f"{kernel}: the pool must be {wanted}, not {pool.dtype} {list(pool.shape)}")
    if page.page_cells not in PAGE_CELLS:
        raise KernelError(f"{kernel}: pages of {page.page_cells} cells have no kernel; {', '.join(map(str, PAGE_CELLS))} have one")
    if not (0 <= run.first_slot < run.num_slots and 0 <= run.num_pages <= run.num_slots and run.first_page >= 0):
        raise KernelError(f"{kernel}: a run of {run.num_pages} pages from slot {run.first_slot} on does not fit {run.num_slots} slots")
    return pool


class StepRuns(NamedTuple):
    """The pages of one or two runs that follow each other, among the parts of a step."""

    pools: tuple[DeviceArray, DeviceArray]  # of the first run and of the last
    first_part: int
    num_pages: int


def check_step(
    kernel: str, position: DeviceArray, runs: tuple[PageRun, ...], layer: LayerConfig, page: PageFormat, parts: PartStates, out: DeviceArray
) -> StepRuns:
    """Where the pages of a call of attend_step stand. Raises KernelError on states and outputs of other shapes, and on runs that do not follow each other or are
    not among the parts."""
    num_parts = parts.num_parts
    check_array(kernel, "position", position, (1,), "i32")
    check_array(kernel, "parts.out", parts.out, (num_parts, layer.num_heads, layer.value_dim), "f32")
    check_array(kernel, "parts.lse", parts.lse, (num_parts, layer.num_heads), "f32")
    check_array(kernel, "parts.arrivals", parts.arrivals, (layer.num_heads,), "i32")
    check_array(kernel, "out", out, (1, layer.num_heads * layer.value_dim), "f32")
    run, last = runs[0], runs[-1]
    pools = check_run(kernel, run, page), check_run(kernel, last, page)
    if len(runs) > 2 or (len(runs) == 2 and last.first_page != run.first_page + run.num_pages):
        raise KernelError(f"{kernel}: {len(runs)} runs of pages; one was wanted, or two that follow each other")
    first_part, num_pages = run.first_page - parts.first_page, last.first_page + last.num_pages - run.first_page
    if first_part < 0 or min(run.num_pages, last.num_pages) < 1 or first_part + num_pages > num_parts:
        raise KernelError(
            f"{kernel}: pages {run.first_page} to {run.first_page + num_pages - 1} from page {parts.first_page} on are not among {num_parts} parts"
        )
    return StepRuns(pools, first_part, num_pages)


def check_projected(
    kernel: str, projected: Projected, page: PageFormat, num_tokens: int
) -> tuple[tuple[Any, ...], tuple[np.int32, np.int32], np.float32]:
    """Kernel arguments: (product, norms of queries and keys), (pairs of the tables of angles, whether they are interleaved), eps of the norms. Raises
    KernelError on shapes that do not belong to num_tokens tokens of the layer."""
    layer, table = projected.layer, projected.table
    pairs = table.shape[2]
    columns = layer.num_heads * page.key_dim + page.num_kv_heads * (page.key_dim + page.value_dim)
    check_array(kernel, "qkv", projected.qkv, (num_tokens, columns), "f32")
    check_array(kernel, "table", table, (rotations(layer.rope), num_tokens, pairs, 2), "f32")
    if 2 * pairs > page.key_dim:
        raise KernelError(f"{kernel}: {pairs} pairs do not fit heads of {page.key_dim} columns")
    norms = [norm for norm in (projected.q_norm, projected.k_norm) if norm is not None]
    for norm in norms:
        check_array(kernel, "norm", norm.weight, (page.key_dim,), "f32")
    pointers = (Pointer(0 if norm is None else norm.weight.ptr) for norm in (projected.q_norm, projected.k_norm))
    turns = np.int32(pairs), np.int32(layer.rope.style == "interleaved")
    return (projected.qkv, *pointers), turns, np.float32(norms[0].eps if norms else 0.0)
