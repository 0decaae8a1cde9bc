"""Coded pages to f16 pages: every element as the host reads it, rounded to half; from any slots, and nothing beside them is written."""

from typing import Any

import numpy as np
import pytest

from rollkv.backend import PageRun
from rollkv.config import PageFormat
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import unpack_pages
from rollkv.cuda.nvrtc import KernelError
from rollkv.kv_page import read_cells

gpu = pytest.mark.gpu

# num_kv_heads, key_dim, value_dim, key_type, value_type, page_cells
FORMATS = [
    (8, 128, 128, "turbo2", "turbo2", 256),
    (2, 128, 128, "q8_0", "q4_0", 256),
    (1, 128, 64, "turbo4", "turbo3", 64),
    (3, 80, 96, "turbo3", "turbo4", 32),
    (2, 256, 16, "turbo3", "turbo2", 16),
    (1, 16, 256, "turbo4", "q8_0", 16),
    (2, 96, 48, "q4_0", "turbo3", 128),
    (2, 192, 192, "f16", "turbo4", 256),
    (5, 64, 32, "turbo2", "f16", 64),
]


@gpu
@pytest.mark.parametrize("form", FORMATS)
def test_elements_are_those_of_the_host(cuda: Any, form: tuple[Any, ...]) -> None:
    """Of random bytes: every code, and scales of all kinds, infinite ones and NaN among them."""
    page, slots, first_slot, num_pages = PageFormat(*form), 5, 3, 4  # of which one slot is not of the run
    raw = np.random.default_rng([1, *form[:3]]).integers(0, 256, (slots, page.page_bytes), np.uint8)
    out = cuda.upload("out", np.full((num_pages + 1, page.unpacked.page_bytes), 0xA5, np.uint8))
    unpack_pages.unpack_pages(cuda.launcher, PageRun(cuda.upload("pool", raw), slots, first_slot, 7, num_pages), page, out.rows(num_pages))
    got = cuda.read(out)
    assert (got[num_pages] == 0xA5).all()
    for number in range(num_pages):
        with np.errstate(over="ignore"):
            wanted = [x.astype(np.float16) for x in read_cells(raw[(first_slot + number) % slots], page)]
        for x, y in zip(read_cells(got[number], page.unpacked), wanted, strict=True):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_array_equal(np.signbit(x[y == 0]), np.signbit(y[y == 0]))


@pytest.mark.parametrize(("pages", "heads", "cells", "dim"), [(1, 1, 16, 16), (3, 2, 256, 128), (7, 8, 256, 256), (2, 1, 32, 80)])
def test_every_eight_has_one_thread(pages: int, heads: int, cells: int, dim: int) -> None:
    shape = unpack_pages.launch_shape(pages, heads, cells, dim)
    eights = shape.grid[2] * shape.threads * 4
    assert shape.grid[:2] == (pages, 2 * heads) and cells * dim // 8 <= eights < cells * dim // 8 + 1024


def test_bytes_moved_and_wrong_shapes() -> None:
    page = PageFormat(2, 128, 128, "turbo2", "q8_0", 256)
    assert unpack_pages.unpack_pages_bytes(3, page) == 3 * 2 * 256 * (34 + 136 + 2 * 256)
    run = PageRun(DeviceArray(4096, (4, page.page_bytes), "u8"), 4, 0, 0, 3)
    with pytest.raises(KernelError, match="out must be u8"):
        unpack_pages.unpack_pages(None, run, page, DeviceArray(4096, (2, page.unpacked.page_bytes), "u8"))  # type: ignore[arg-type]
    wrong = PageRun(DeviceArray(4096, (4, 64), "u8"), 4, 0, 0, 3)
    with pytest.raises(KernelError, match="the pool must be u8"):
        unpack_pages.unpack_pages(None, wrong, page, DeviceArray(4096, (3, page.unpacked.page_bytes), "u8"))  # type: ignore[arg-type]
