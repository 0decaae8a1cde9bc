"""Before a decode step's attention to coded or rotated pages: its queries in every band, and its new cell (csrc/prepare_step.cu)."""

from functools import cache

import numpy as np

from rollkv.backend import PageRun, Projected
from rollkv.config import KvType, LayerConfig, PageFormat
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.kernels.kv_format import check_projected, check_run, template_arguments
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.rope import query_bands, rotations

_THREADS = 32  # a warp a row, a block a warp: rows are few, and each is as late as its own latencies


@cache
def num_rows(num_heads: int, num_kv_heads: int, bands: int, *, queries: bool, cell: bool) -> tuple[int, int]:
    """Blocks of a launch: (those of queries, all)."""
    query_rows = bands * num_heads * queries
    return query_rows, query_rows + 2 * num_kv_heads * cell


@cache
def spec(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int) -> KernelSpec:
    return KernelSpec("prepare_step.cu", f"prepare_step<{template_arguments(key_type, value_type, key_dim, value_dim)}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    return (
        spec("q8_0", "q4_0", 128, 128),
        spec("turbo4", "turbo3", 256, 128),
        spec("turbo2", "turbo4", 80, 64),
        spec("turbo3", "turbo2", 16, 192),
        spec("f16", "f16", 128, 128),
    )


def prepare_step_bytes(layer: LayerConfig, page: PageFormat, *, queries: bool, cell: bool) -> int:
    """Bytes read (f32) and written (queries in f32, a cell in the cache's types)."""
    read_queries, floats = layer.num_heads * layer.key_dim * queries, layer.num_kv_heads * (layer.key_dim + layer.value_dim) * cell
    return 4 * (read_queries * (1 + query_bands(layer.rope)) + floats) + page.page_bytes // page.page_cells * cell


def prepare_step(
    launcher: Launcher,
    projected: Projected,
    position: DeviceArray,
    run: PageRun,
    page: PageFormat,
    q: DeviceArray,
    *,
    queries: bool,
    cell: bool,
) -> None:
    """What qkv_append does for a single token, in equal bits, with its queries as for every band of pages.

    queries: into q, f32 [B, H*Dk], band by band; cell: the key and the value of cell position[0], i32 [1], into its page, if that is of the run. Reads and writes
    prepare_step_bytes. Raises KernelError on other shapes.
    """
    layer, bands = projected.layer, query_bands(projected.layer.rope)
    operands, turns, eps = check_projected("prepare_step", projected, page, 1)
    check_array("prepare_step", "position", position, (1,), "i32")
    check_array("prepare_step", "q", q, (bands, layer.num_heads * layer.key_dim), "f32")
    query_rows, rows = num_rows(layer.num_heads, page.num_kv_heads, bands, queries=queries, cell=cell)
    if rows == 0:
        raise KernelError("prepare_step: neither queries nor a cell are wanted")
    launcher.launch(
        spec(page.key_type, page.value_type, page.key_dim, page.value_dim),
        (rows, 1, 1),
        _THREADS,
        *operands,
        projected.table,
        projected.table.rows(1, rotations(layer.rope) - 1),
        position,
        check_run("prepare_step", run, page),
        q,
        *map(np.int32, (run.num_slots, run.first_slot, run.first_page, run.num_pages)),
        *map(np.int32, (query_rows, layer.num_heads, page.num_kv_heads, page.page_cells)),
        *turns,
        *map(np.int32, (page.key_rotated, page.value_rotated)),
        eps,
    )
