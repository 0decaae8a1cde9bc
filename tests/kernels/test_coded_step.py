"""A decode step over coded and rotated pages as the model asks for it: query and cell finished, every page met by its band's query, all parts merged, and the
result in the model's frame; a tail may be of other types than the window. What must not be read holds NaN."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracle_attention import attend_bands, make_layer, relative_error
from rollkv import kv_codes, reference
from rollkv.backend import PageRun, PartStates, Projected, RmsNorm
from rollkv.config import DualChunk, LayerConfig, PageFormat, RopeConfig
from rollkv.kv_page import read_cells, write_cells
from rollkv.rope import NUM_BANDS, bands, query_bands
from test_attention import FLOAT_ERROR

pytestmark = pytest.mark.gpu

# group, num_kv_heads, key_dim, value_dim, page_cells, types of the window, types of the tail's pages, rotated keys and values, pages of a chunk, cells
STEPS = [
    (4, 2, 128, 128, 256, ("turbo2", "turbo2"), ("turbo2", "turbo2"), (True, True), 0, 700),
    (5, 1, 128, 128, 256, ("q8_0", "q4_0"), ("q8_0", "q4_0"), (False, False), 1, 900),
    (1, 3, 64, 128, 64, ("turbo4", "turbo3"), ("turbo4", "turbo3"), (True, True), 0, 64 * 18 + 5),
    (9, 1, 80, 96, 32, ("turbo3", "q8_0"), ("turbo3", "q8_0"), (True, True), 2, 173),
    (3, 2, 64, 64, 16, ("f16", "f16"), ("q4_0", "turbo2"), (False, True), 0, 93),
    (4, 1, 128, 128, 256, ("f16", "f16"), ("turbo3", "turbo4"), (True, True), 2, 1600),
    (4, 1, 128, 128, 256, ("f16", "f16"), ("q8_0", "q8_0"), (False, False), 0, 16 * 256 + 300),
    (2, 1, 256, 256, 64, ("q8_0", "f16"), ("turbo2", "q4_0"), (True, True), 0, 65),
    (8, 1, 128, 64, 128, ("turbo2", "turbo4"), ("turbo2", "turbo4"), (True, True), 0, 100),
]


def held(page: PageFormat, pool: np.ndarray, runs: list[tuple[int, int]], cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values, float64 [cells, Hkv, D] in the frame of the pages, of the pages that lie in slots `runs` (page, slot)."""
    sides = [read_cells(pool[slot], page) for _, slot in runs]
    counts = [min(page.page_cells, cells - number * page.page_cells) for number, _ in runs]
    keys, values = (
        np.concatenate([side[part][:, :count].swapaxes(0, 1) for side, count in zip(sides, counts, strict=True)]).astype(np.float64)
        for part in (0, 1)
    )
    return keys, values


def layer_of(case: tuple[Any, ...]) -> LayerConfig:
    group, kv_heads, key_dim, value_dim, page_cells, *_, chunk_pages, _ = case
    stride = page_cells * chunk_pages
    chunk = DualChunk(stride + stride // 3, stride // 3, stride // 2) if chunk_pages else None
    rope = RopeConfig(key_dim, "halves", theta=500.0, dual_chunk=chunk)
    return replace(make_layer(group * kv_heads, kv_heads, key_dim, value_dim), rope=rope)


@pytest.mark.parametrize("case", STEPS)
def test_a_step_equals_the_oracle_and_every_division_into_launches(cuda: Any, case: tuple[Any, ...]) -> None:
    _, kv_heads, key_dim, value_dim, page_cells, window_types, tail_types, rotated, _, cells = case
    window, tail = (PageFormat(kv_heads, key_dim, value_dim, *types, page_cells, *rotated) for types in (window_types, tail_types))
    layer, scale, newest = layer_of(case), 1 / np.sqrt(key_dim), cells - 1
    rng, num_pages = np.random.default_rng([1, cells, key_dim, value_dim]), -(-cells // page_cells)
    tail_pages = num_pages // 2
    # Two pools: the tail's pages from slot 1 on, with a slot beside them; the window's begin in its last slot.
    places = [
        [(n, n + 1) for n in range(tail_pages)],
        [(tail_pages + n, (n - 1) % (num_pages - tail_pages)) for n in range(num_pages - tail_pages)],
    ]
    pools = [
        np.full((tail_pages + 2, tail.page_bytes), 0xFF, np.uint8),
        np.full((num_pages - tail_pages, window.page_bytes), 0xFF, np.uint8),
    ]
    for page, pool, where in zip((tail, window), pools, places, strict=True):
        for number, slot in where:
            count = min(page_cells, newest - number * page_cells)
            cells_of = [rng.standard_normal((count, kv_heads, dim)).astype(np.float32) for dim in (key_dim, value_dim)]
            if count:
                write_cells(pool[slot], page, 0, *cells_of)

    columns = layer.num_heads * key_dim
    qkv = (rng.standard_normal((1, columns + kv_heads * (key_dim + value_dim))) * 1.5).astype(np.float32)
    norms = [RmsNorm(cuda.upload("norm", rng.uniform(0.5, 1.5, key_dim).astype(np.float32)), 1e-6) for _ in range(2)]
    table = cuda.upload("table", reference.rope_table(layer.rope, newest, 1, 2 * cells).astype(np.float32))
    projected, at = Projected(cuda.upload("qkv", qkv), layer, *norms, table), cuda.upload("position", np.array([newest], np.int32))

    appended, queries = cuda.upload("appended", pools[1]), cuda.upload("q", np.full((query_bands(layer.rope), columns), np.nan, np.float32))
    last = PageRun(appended, len(pools[1]), places[1][-1][1], num_pages - 1, 1)
    cuda.append(projected, at, (last,), window, newest, 0, queries.rows(1))
    for band in range(1, query_bands(layer.rope)):
        cuda.queries(projected, window, band, queries.rows(1, band))

    def attended(cut: int, together: bool) -> tuple[np.ndarray, ...]:
        """With the tail's launches ended at page `cut`, and its last one together with the window's, if the formats allow."""
        shapes = (num_pages, layer.num_heads, value_dim), (num_pages, layer.num_heads), (1, layer.num_heads * value_dim), queries.shape
        part_out, part_lse, out, q = (cuda.upload("state", np.full(shape, np.nan, np.float32)) for shape in shapes)
        arrivals, on_device = cuda.upload("arrivals", np.zeros(layer.num_heads, np.int32)), [cuda.upload("pool", x) for x in pools]
        parts = PartStates(0, num_pages, part_out, part_lse, arrivals, q)
        old = PageRun(on_device[0], len(pools[0]), 1, 0, tail_pages)
        new = PageRun(on_device[1], len(pools[1]), places[1][0][1], tail_pages, num_pages - tail_pages)
        calls = [((run,), tail) for run in (old.part(0, cut), old.part(cut, tail_pages - cut)) if run.num_pages]
        if together and calls and tail == window:
            calls[-1] = ((calls[-1][0][0], new), window)
        else:
            calls.append(((new,), window))
        for runs, page in calls:
            cuda.attend_step(projected, at, runs, page, scale, parts, out)
        np.testing.assert_array_equal(cuda.read(on_device[1]), cuda.read(appended))
        np.testing.assert_array_equal(cuda.read(on_device[0]), pools[0])
        assert (cuda.read(arrivals) == 0).all()
        return cuda.read(out), cuda.read(part_out), cuda.read(part_lse)

    first, *others = (
        attended(cut, together) for cut, together in ((0, False), (0, True), (tail_pages // 3, False), (tail_pages // 2, True))
    )
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)

    sides = [
        held(page, pool, where, cells)
        for page, pool, where in zip((tail, window), (pools[0], cuda.read(appended)), places, strict=True)
        if where
    ]
    keys, values = (np.concatenate(parts) for parts in zip(*sides, strict=True))
    found = cuda.read(queries).astype(np.float64).reshape(-1, 1, layer.num_heads, key_dim)
    turned = [found[band % len(found)] for band in range(NUM_BANDS)]  # without chunks all are of one band
    seen_as = bands(layer.rope, page_cells, num_pages - 1)
    borders = seen_as.previous_page * page_cells, seen_as.own_page * page_cells

    def oracle(half: bool) -> np.ndarray:
        out = attend_bands(
            turned, keys, values.astype(np.float16).astype(np.float64) if half else values, newest, scale, borders, half=half
        )
        return kv_codes.turn_back(out) if window.value_rotated else out

    exact = oracle(False)
    assert relative_error(first[0].reshape(exact.shape), exact) < FLOAT_ERROR + 2 * relative_error(oracle(True), exact)
