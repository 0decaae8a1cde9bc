"""Pages in the types of a tail: the bytes that the host makes of the same page, and those that a new cell of the same values gets."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollkv.backend import PageRun
from rollkv.config import PageFormat
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import reencode_pages
from rollkv.cuda.nvrtc import KernelError
from rollkv.kv_page import read_cells, reencode_cells, write_cells

gpu = pytest.mark.gpu

# num_kv_heads, key_dim, value_dim, page_cells, types of keys and values before and after
CASES = [
    (8, 128, 128, 256, ("f16", "f16"), ("turbo2", "turbo2")),
    (2, 128, 64, 64, ("f16", "f16"), ("q8_0", "turbo4")),
    (1, 64, 128, 32, ("f16", "q8_0"), ("turbo3", "q4_0")),
    (3, 256, 96, 16, ("q8_0", "turbo4"), ("turbo4", "turbo2")),
    (2, 80, 16, 128, ("turbo4", "f16"), ("turbo2", "turbo3")),
    (2, 192, 256, 64, ("turbo3", "q4_0"), ("turbo2", "turbo3")),
    (1, 96, 128, 256, ("f16", "f16"), ("q4_0", "f16")),
    (2, 128, 80, 32, ("q8_0", "turbo3"), ("q8_0", "turbo2")),
]


def random_page(rng: np.random.Generator, page: PageFormat) -> np.ndarray:
    """Cells of all magnitudes, and zeros."""
    raw = np.empty(page.page_bytes, np.uint8)
    shapes = ((page.page_cells, page.num_kv_heads, dim) for dim in (page.key_dim, page.value_dim))
    keys, values = ((rng.standard_normal(s) * 10.0 ** rng.uniform(-6, 4, (*s[:2], 1))).astype(np.float32) for s in shapes)
    keys[1, 0], values[2, 0, :7] = 0, 0
    write_cells(raw, page, 0, keys, values)
    return raw


def formats(case: tuple[Any, ...]) -> tuple[PageFormat, PageFormat]:
    heads, key_dim, value_dim, cells, before, after = case
    return PageFormat(heads, key_dim, value_dim, *before, cells, True, True), PageFormat(
        heads, key_dim, value_dim, *after, cells, True, True
    )


@gpu
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_host(cuda: Any, case: tuple[Any, ...]) -> None:
    page, other = formats(case)
    rng = np.random.default_rng([1, page.key_dim, page.page_cells])
    raw = np.stack([random_page(rng, page) for _ in range(4)])
    target = rng.integers(0, 256, (5, other.page_bytes), np.uint8)
    source_run, target_run = PageRun(cuda.upload("source", raw), 4, 2, 9, 3), PageRun(cuda.upload("target", target), 5, 3, 9, 3)
    reencode_pages.reencode_pages(cuda.launcher, source_run, page, target_run, other)
    for number in range(3):
        reencode_cells(raw[(2 + number) % 4], page, target[(3 + number) % 5], other)
    np.testing.assert_array_equal(cuda.read(target_run.pool), target)


@gpu
def test_an_infinity_is_seen_in_its_whole_group(cuda: Any) -> None:
    page, other = formats((1, 128, 64, 32, ("f16", "f16"), ("turbo3", "q4_0")))
    raw = random_page(np.random.default_rng(2), page)
    keys, values = (x.swapaxes(0, 1).astype(np.float32) for x in read_cells(raw, page))
    keys[5, 0, 17], values[6, 0, 40], values[7, 0, 3] = np.inf, np.nan, -np.inf
    write_cells(raw, page, 0, keys, values)
    runs = [PageRun(cuda.upload("pool", np.zeros((1, n), np.uint8)), 1, 0, 0, 1) for n in (page.page_bytes, other.page_bytes)]
    cuda.write(runs[0].pool, raw)
    reencode_pages.reencode_pages(cuda.launcher, runs[0], page, runs[1], other)
    coded_keys, coded_values = read_cells(cuda.read(runs[1].pool)[0], other)
    assert np.argwhere(np.isnan(coded_keys[0])).tolist() == [[5, d] for d in range(128)]
    assert np.argwhere(np.isnan(coded_values[0])).tolist() == [[6, d] for d in range(32, 64)] + [[7, d] for d in range(32)]


@pytest.mark.parametrize(("pages", "heads", "cells"), [(1, 1, 16), (3, 2, 256), (7, 8, 64)])
def test_every_row_has_one_warp(pages: int, heads: int, cells: int) -> None:
    shape = reencode_pages.launch_shape(pages, heads, cells)
    assert shape.grid == (pages, 2 * heads, cells // 16) and shape.threads == 256


def test_bytes_moved_and_wrong_shapes() -> None:
    page, other = PageFormat(2, 128, 128, "f16", "f16", 256, True), PageFormat(2, 128, 128, "turbo2", "f16", 256, True)
    assert reencode_pages.reencode_pages_bytes(3, page, other) == 3 * 2 * 256 * (3 * 256 + 34)
    source, target = (PageRun(DeviceArray(4096, (4, one.page_bytes), "u8"), 4, 0, 0, 3) for one in (page, other))
    for wrong, run in (
        (replace(other, key_rotated=False), target),
        (replace(other, page_cells=128), target),
        (replace(other, value_dim=64), target),
        (other, target.part(0, 2)),
    ):
        with pytest.raises(KernelError, match="do not become"):
            reencode_pages.reencode_pages(None, source, page, run, wrong)  # type: ignore[arg-type]
