"""A decode step's queries in every band and its new cell: the bits that append leaves, which test_qkv_append holds against the host."""

from typing import Any

import numpy as np
import pytest

from rollkv import reference
from rollkv.backend import PageRun, Projected, RmsNorm
from rollkv.config import DualChunk, LayerConfig, PageFormat, RopeConfig
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import prepare_step
from rollkv.cuda.nvrtc import KernelError
from rollkv.rope import query_bands, rotations

gpu = pytest.mark.gpu

# group, num_kv_heads, key_dim, value_dim, key_type, value_type, page_cells, key_rotated, value_rotated
FORMATS = [
    (5, 8, 128, 128, "turbo2", "turbo2", 256, True, True),
    (4, 2, 128, 128, "q8_0", "q4_0", 256, False, False),
    (1, 3, 64, 256, "q4_0", "q8_0", 64, True, True),
    (2, 1, 256, 64, "turbo4", "turbo3", 32, True, True),
    (3, 5, 80, 16, "turbo3", "turbo4", 16, True, True),
    (2, 3, 128, 48, "f16", "turbo3", 64, False, True),
    (7, 2, 64, 128, "f16", "f16", 64, True, True),
]
ROPES = [
    RopeConfig(dim=64, style="halves"),
    RopeConfig(dim=48, style="interleaved", theta=5e5),
    RopeConfig(dim=64, style="halves", dual_chunk=DualChunk(1024, 512, 2048)),
]


@gpu
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r.style} {r.dual_chunk}")
@pytest.mark.parametrize("form", FORMATS)
def test_bits_are_those_of_append(cuda: Any, form: tuple[Any, ...], rope: RopeConfig, normed: bool) -> None:
    """Whatever a launch is not asked for stays as it was, and so does a run without the cell's page."""
    group, page, position = form[0], PageFormat(*form[1:]), 1333
    layer = LayerConfig(group * page.num_kv_heads, page.num_kv_heads, page.key_dim, page.value_dim, rope)
    rng = np.random.default_rng([group, page.key_dim, rope.dim, normed])
    columns = layer.num_heads * page.key_dim, page.num_kv_heads * (page.key_dim + page.value_dim)
    qkv = cuda.upload("qkv", (rng.standard_normal((1, sum(columns))) * 3).astype(np.float32))
    norms = [RmsNorm(cuda.upload("norm", rng.standard_normal(page.key_dim).astype(np.float32)), 1e-6) if normed else None for _ in range(2)]
    table = cuda.upload("table", reference.rope_table(rope, position, 1, 4000).astype(np.float32))
    projected, at = Projected(qkv, layer, *norms, table), cuda.upload("position", np.array([position], np.int32))
    first_page, slots, bands = position // page.page_cells - 1, 4, query_bands(rope)
    before = rng.integers(0, 256, (slots, page.page_bytes), np.uint8)
    appended = cuda.upload("appended", before)
    run = PageRun(appended, slots, 3, first_page, 2)  # the second page lies in slot 0
    q = cuda.upload("q", np.full((bands, columns[0]), np.nan, np.float32))
    cuda.append(projected, at, (run,), page, position, 0, q.rows(1))
    for band in range(1, bands):
        cuda.queries(projected, page, band, q.rows(1, band))
    assert (cuda.read(appended) != before).any()

    for queries, cell, pages in ((True, True, run), (True, False, run), (False, True, run), (False, True, run.part(first_page, 1))):
        pool = cuda.upload("pool", before)
        out = cuda.upload("out", np.full((bands, columns[0]), np.nan, np.float32))
        given = PageRun(pool, slots, pages.first_slot, pages.first_page, pages.num_pages)
        prepare_step.prepare_step(cuda.launcher, projected, at, given, page, out, queries=queries, cell=cell)
        np.testing.assert_array_equal(cuda.read(out), cuda.read(q) if queries else np.nan)
        np.testing.assert_array_equal(cuda.read(pool), cuda.read(appended) if cell and pages is run else before)


@pytest.mark.parametrize(("queries", "cell", "rows"), [(True, True, (120, 136)), (True, False, (120, 120)), (False, True, (0, 16))])
def test_every_row_has_one_block(queries: bool, cell: bool, rows: tuple[int, int]) -> None:
    assert prepare_step.num_rows(40, 8, 3, queries=queries, cell=cell) == rows


def test_bytes_moved_and_wrong_operands() -> None:
    page, rope = PageFormat(2, 128, 64, "turbo2", "q8_0", 256, True), RopeConfig(64, "halves", dual_chunk=DualChunk(1024, 512, 2048))
    layer = LayerConfig(8, 2, 128, 64, rope)
    assert prepare_step.prepare_step_bytes(layer, page, queries=True, cell=False) == 8 * 128 * 4 * 4
    assert prepare_step.prepare_step_bytes(layer, page, queries=False, cell=True) == 2 * (4 * 192 + 34 + 68)
    run = PageRun(DeviceArray(4096, (4, page.page_bytes), "u8"), 4, 0, 0, 3)
    qkv, table = DeviceArray(4096, (1, 8 * 128 + 2 * 192), "f32"), DeviceArray(4096, (rotations(rope), 1, 32, 2), "f32")
    projected, position = Projected(qkv, layer, None, None, table), DeviceArray(4096, (1,), "i32")
    q = DeviceArray(4096, (3, 8 * 128), "f32")
    for wrong, flags, message in ((q.rows(1), (True, True), "q must be"), (q, (False, False), "neither queries nor a cell")):
        with pytest.raises(KernelError, match=message):
            prepare_step.prepare_step(None, projected, position, run, page, wrong, queries=flags[0], cell=flags[1])  # type: ignore[arg-type]
