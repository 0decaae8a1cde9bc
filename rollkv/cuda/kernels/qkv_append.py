"""From a layer's product to its attention: norms, rotation, new cells into their pages (csrc/qkv_append.cu)."""

from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.backend import PageRun, Projected
from rollkv.config import KvType, LayerConfig, PageFormat
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.kernels.kv_format import check_projected, check_run, template_arguments
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.rope import rotations

_WARPS = 8  # of a block, a head each


class Shape(NamedTuple):
    """Launch constants."""

    threads: int
    grid: tuple[int, int, int]


@cache
def launch_shape(num_tokens: int, num_heads: int, num_kv_heads: int) -> Shape:
    """A block column a token, a warp a head of queries, keys or values."""
    return Shape(_WARPS * 32, (num_tokens, -(-(num_heads + 2 * num_kv_heads) // _WARPS), 1))


@cache
def spec(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int) -> KernelSpec:
    return KernelSpec("qkv_append.cu", f"qkv_append<{template_arguments(key_type, value_type, key_dim, value_dim)}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    return (
        spec("f16", "f16", 128, 128),
        spec("f32", "bf16", 80, 64),
        spec("bf16", "f32", 16, 256),
        spec("q8_0", "q4_0", 128, 128),
        spec("turbo4", "turbo3", 256, 80),
        spec("turbo2", "turbo2", 128, 128),
    )


def qkv_append_bytes(num_tokens: int, layer: LayerConfig, page: PageFormat) -> int:
    """Bytes read (f32) and written (queries in f32, cells in the cache's types) for num_tokens tokens."""
    cells = page.num_kv_heads * 4 * (page.key_dim + page.value_dim) + page.page_bytes // page.page_cells
    return num_tokens * (layer.num_heads * layer.key_dim * 8 + cells)


def qkv_append(
    launcher: Launcher,
    projected: Projected,
    position: DeviceArray,
    runs: tuple[PageRun, ...],
    page: PageFormat,
    first_position: int,
    band: int,
    q: DeviceArray,
) -> None:
    """Finishes `projected` as backend.Projected says: queries, as for pages of that band, into q, f32 [T, H*Dk], cells position[0] + t into the pages of
    `runs`, rounded to nearest, ties to even, or coded as by kv_codes.encode; all in the frame of the pages.

    position: i32 [1], the cell of row 0, which is first_position. The runs lie in order and cover all cells. One launch a run. Reads and
    writes qkv_append_bytes. Raises KernelError on other shapes, or when the runs leave a cell out.
    """
    layer, num_tokens = projected.layer, projected.qkv.shape[0]
    operands, turns, eps = check_projected("qkv_append", projected, page, num_tokens)
    tables = projected.table.rows(1, band), projected.table.rows(1, rotations(layer.rope) - 1)
    check_array("qkv_append", "q", q, (num_tokens, layer.num_heads * layer.key_dim), "f32")
    check_array("qkv_append", "position", position, (1,), "i32")
    _check_cover(runs, page, first_position, num_tokens)
    shape = launch_shape(num_tokens, layer.num_heads, page.num_kv_heads)
    kernel = spec(page.key_type, page.value_type, page.key_dim, page.value_dim)
    heads = (
        *map(np.int32, (layer.num_heads, page.num_kv_heads, page.page_cells)),
        *turns,
        *map(np.int32, (page.key_rotated, page.value_rotated)),
    )
    for run in runs:
        launcher.launch(
            kernel,
            shape.grid,
            shape.threads,
            *operands,
            *tables,
            position,
            check_run("qkv_append", run, page),
            q,
            *map(np.int32, (run.num_slots, run.first_slot, run.first_page, run.num_pages)),
            *heads,
            eps,
        )


def _check_cover(runs: tuple[PageRun, ...], page: PageFormat, first_position: int, num_tokens: int) -> None:
    """The runs follow each other without a gap and hold every new cell."""
    if num_tokens < 1 or not runs:
        raise KernelError(f"qkv_append: {num_tokens} cells into {len(runs)} runs of pages; both must be at least 1")
    for before, after in zip(runs, runs[1:], strict=False):
        if after.first_page != before.first_page + before.num_pages:
            raise KernelError(
                f"qkv_append: a run that begins with page {after.first_page} follows one that ends before page {before.first_page + before.num_pages}"
            )
    first, end = runs[0].first_page * page.page_cells, (runs[-1].first_page + runs[-1].num_pages) * page.page_cells
    if first_position < first or first_position + num_tokens > end:
        raise KernelError(
            f"qkv_append: cells {first_position} to {first_position + num_tokens - 1} do not lie in the runs' cells {first} to {end - 1}"
        )
