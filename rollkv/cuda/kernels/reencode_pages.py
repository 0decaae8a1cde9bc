"""Pages of one type to pages of another (csrc/reencode_pages.cu)."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.backend import PageRun
from rollkv.config import KvType, PageFormat
from rollkv.cuda.device import Launcher
from rollkv.cuda.kernels.kv_format import check_run, element, template_arguments
from rollkv.cuda.nvrtc import KernelError, KernelSpec

_WARPS, _CELLS = 8, 16  # of a block


class Shape(NamedTuple):
    """Launch constants."""

    threads: int
    grid: tuple[int, int, int]


@cache
def launch_shape(num_pages: int, num_kv_heads: int, page_cells: int) -> Shape:
    """A block column a page and a head of keys or values, whose cells are divided."""
    return Shape(_WARPS * 32, (num_pages, 2 * num_kv_heads, page_cells // _CELLS))


@cache
def spec(source: PageFormat, target: PageFormat) -> KernelSpec:
    arguments = template_arguments(target.key_type, target.value_type, target.key_dim, target.value_dim)
    return KernelSpec(
        "reencode_pages.cu", f"reencode_pages<{element(source.key_type)}, {element(source.value_type)}, {arguments}>", early=True
    )


def instances() -> tuple[KernelSpec, ...]:
    def page(key_type: KvType, value_type: KvType, dim: int) -> PageFormat:
        return PageFormat(1, dim, dim, key_type, value_type, 256)

    return (
        spec(page("f16", "f16", 128), page("q8_0", "turbo2", 128)),
        spec(page("f16", "q8_0", 256), page("turbo4", "turbo3", 256)),
        spec(page("q8_0", "turbo4", 64), page("q4_0", "turbo4", 64)),
        spec(page("f16", "turbo4", 80), page("turbo3", "turbo2", 80)),
    )


def reencode_pages_bytes(num_pages: int, source: PageFormat, target: PageFormat) -> int:
    """Bytes read and written."""
    return num_pages * (source.page_bytes + target.page_bytes)


def reencode_pages(launcher: Launcher, source: PageRun, source_page: PageFormat, target: PageRun, target_page: PageFormat) -> None:
    """The source's pages, in their order, in the types of the target's format into the slots of the target, encoded as new cells of the same values
    would be; a side whose type stays is copied.

    Both formats have the same heads, cells and sizes, and both are rotated or neither is. Reads and writes reencode_pages_bytes. Raises KernelError on
    other shapes.
    """
    if (
        replace(source_page, key_type=target_page.key_type, value_type=target_page.value_type) != target_page
        or source.num_pages != target.num_pages
    ):
        raise KernelError(f"reencode_pages: {source.num_pages} pages {source_page} do not become {target.num_pages} pages {target_page}")
    shape = launch_shape(source.num_pages, source_page.num_kv_heads, source_page.page_cells)
    launcher.launch(
        spec(source_page, target_page),
        shape.grid,
        shape.threads,
        check_run("reencode_pages", source, source_page),
        check_run("reencode_pages", target, target_page),
        *map(np.int32, (source.num_slots, source.first_slot, target.num_slots, target.first_slot)),
        *map(np.int32, (source_page.num_kv_heads, source_page.page_cells)),
    )
