"""New cells into their pages, rounded to the cache's types (csrc/kv_append.cu)."""

from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.backend import PageFormat, PageRun
from rollkv.config import DTYPE_BYTES, KvType
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.kernels.kv_format import check_run, template_arguments
from rollkv.cuda.nvrtc import KernelError, KernelSpec

_THREADS = 128


class Shape(NamedTuple):
    """Launch constants."""

    threads: int
    grid: tuple[int, int, int]


@cache
def launch_shape(num_tokens: int, num_kv_heads: int, key_dim: int, value_dim: int) -> Shape:
    """A block column a token; a thread moves 8 elements."""
    vectors = num_kv_heads * (key_dim + value_dim) // 8
    return Shape(_THREADS, (num_tokens, -(-vectors // _THREADS), 1))


@cache
def spec(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int) -> KernelSpec:
    return KernelSpec("kv_append.cu", f"kv_append<{template_arguments(key_type, value_type, key_dim, value_dim)}>")


def instances() -> tuple[KernelSpec, ...]:
    return spec("f16", "f16", 128, 128), spec("f32", "bf16", 80, 64), spec("bf16", "f32", 16, 256)


def append_bytes(num_tokens: int, page: PageFormat) -> int:
    """Bytes read (f32) and written (the cache's types) for num_tokens cells."""
    key_bytes, value_bytes = DTYPE_BYTES[page.key_type], DTYPE_BYTES[page.value_type]
    return num_tokens * page.num_kv_heads * (page.key_dim * (4 + key_bytes) + page.value_dim * (4 + value_bytes))


def append(
    launcher: Launcher,
    k: DeviceArray,
    v: DeviceArray,
    position: DeviceArray,
    runs: tuple[PageRun, ...],
    page: PageFormat,
    first_position: int,
) -> None:
    """Cells position[0] + t of k and v into the pages of `runs`, rounded to nearest, ties to even.

    k: f32 [T, Hkv*Dk]; v: f32 [T, Hkv*Dv]; position: i32 [1], the cell of row 0, which is first_position. The runs lie in order and cover
    all cells. One launch a run. Reads and writes append_bytes. Raises KernelError on other shapes, or when the runs leave a cell out.
    """
    num_tokens = k.shape[0]
    check_array("append", "k", k, (num_tokens, page.num_kv_heads * page.key_dim), "f32")
    check_array("append", "v", v, (num_tokens, page.num_kv_heads * page.value_dim), "f32")
    check_array("append", "position", position, (1,), "i32")
    _check_cover(runs, page, first_position, num_tokens)
    shape = launch_shape(num_tokens, page.num_kv_heads, page.key_dim, page.value_dim)
    kernel = spec(page.key_type, page.value_type, page.key_dim, page.value_dim)
    for run in runs:
        launcher.launch(
            kernel,
            shape.grid,
            shape.threads,
            k,
            v,
            position,
            check_run("append", run, page),
            np.int32(run.num_slots),
            np.int32(run.first_slot),
            np.int32(run.first_page),
            np.int32(run.num_pages),
            np.int32(page.num_kv_heads),
            np.int32(page.page_cells),
        )


def _check_cover(runs: tuple[PageRun, ...], page: PageFormat, first_position: int, num_tokens: int) -> None:
    """The runs follow each other without a gap and hold every new cell."""
    if num_tokens < 1 or not runs:
        raise KernelError(f"append: {num_tokens} cells into {len(runs)} runs of pages; both must be at least 1")
    for before, after in zip(runs, runs[1:], strict=False):
        if after.first_page != before.first_page + before.num_pages:
            raise KernelError(
                f"append: a run that begins with page {after.first_page} follows one that ends before page {before.first_page + before.num_pages}"
            )
    first, end = runs[0].first_page * page.page_cells, (runs[-1].first_page + runs[-1].num_pages) * page.page_cells
    if first_position < first or first_position + num_tokens > end:
        raise KernelError(
            f"append: cells {first_position} to {first_position + num_tokens - 1} do not lie in the runs' cells {first} to {end - 1}"
        )
