"""Coded pages to f16 pages (csrc/unpack_pages.cu)."""

from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.backend import PageRun
from rollkv.config import KvType, PageFormat
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.kernels.kv_format import check_run, template_arguments
from rollkv.cuda.nvrtc import KernelSpec

_THREADS, _UNITS = 256, 4  # of a block; eights of elements a thread


class Shape(NamedTuple):
    """Launch constants."""

    threads: int
    grid: tuple[int, int, int]


@cache
def launch_shape(num_pages: int, num_kv_heads: int, page_cells: int, widest_dim: int) -> Shape:
    """A block column a page and a head of keys or values, whose cells are divided."""
    return Shape(_THREADS, (num_pages, 2 * num_kv_heads, -(-page_cells * widest_dim // (8 * _THREADS * _UNITS))))


@cache
def spec(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int) -> KernelSpec:
    return KernelSpec("unpack_pages.cu", f"unpack_pages<{template_arguments(key_type, value_type, key_dim, value_dim)}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    return (
        spec("q8_0", "q4_0", 128, 128),
        spec("turbo4", "turbo3", 256, 128),
        spec("turbo2", "turbo4", 80, 64),
        spec("f16", "turbo2", 128, 128),
    )


def unpack_pages_bytes(num_pages: int, page: PageFormat) -> int:
    """Bytes read and written."""
    return num_pages * (page.page_bytes + page.unpacked.page_bytes)


def unpack_pages(launcher: Launcher, run: PageRun, page: PageFormat, out: DeviceArray) -> None:
    """The run's pages in f16, one behind the other in their order, every element rounded to nearest, ties to even; in the frame that they are in.

    page: of coded or f16 cells; out: u8 [num_pages, page.unpacked.page_bytes]. Reads and writes unpack_pages_bytes. Raises KernelError on other shapes.
    """
    pool = check_run("unpack_pages", run, page)
    check_array("unpack_pages", "out", out, (run.num_pages, page.unpacked.page_bytes), "u8")
    shape = launch_shape(run.num_pages, page.num_kv_heads, page.page_cells, max(page.key_dim, page.value_dim))
    kernel = spec(page.key_type, page.value_type, page.key_dim, page.value_dim)
    sizes = map(np.int32, (run.num_slots, run.first_slot, page.num_kv_heads, page.page_cells))
    launcher.launch(kernel, shape.grid, shape.threads, pool, out, *sizes)
