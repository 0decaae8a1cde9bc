"""Attention with dual chunk attention against the float64 oracle: every page meets the queries of its band, in a decode step and in prefill.

What must not be read holds NaN, as in test_attention.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracle_attention import attend_bands, decode, make_cache, make_layer, page_views, relative_error
from rollkv import reference
from rollkv.backend import PageFormat, PageRun, Projected
from rollkv.config import DualChunk, RopeConfig
from rollkv.cuda.kernels import attn_decode, attn_prefill
from rollkv.rope import NUM_BANDS, bands
from rollkv.workspace import state_shape
from test_attention import FLOAT_ERROR, StepMemory, poisoned

pytestmark = pytest.mark.gpu

# group, num_kv_heads, key_dim, value_dim, key_type, value_type, page_cells, pages of a chunk, cells
STEPS = [
    (4, 2, 128, 128, "f16", "f16", 256, 1, (256, 257, 513, 700, 1024)),
    (5, 2, 128, 128, "f16", "f16", 256, 2, (512, 513, 1024, 1025, 1600, 16 * 256 + 1)),
    (8, 1, 64, 64, "f16", "f16", 256, 3, (1537, 20 * 256)),
    (4, 2, 256, 256, "f16", "f16", 256, 1, (600, 1025)),
    (13, 1, 192, 192, "f16", "f16", 256, 1, (769,)),
    (5, 8, 128, 128, "f16", "f16", 256, 7, (12_000,)),
    (3, 2, 64, 64, "f16", "f16", 256, 1, (257, 800)),
    (2, 2, 80, 96, "bf16", "f32", 16, 2, (32, 33, 64, 65, 90, 300)),
    (11, 1, 96, 80, "f32", "bf16", 32, 1, (31, 33, 64, 100)),
]


def rope_of(key_dim: int, style: Any, page_cells: int, chunk_pages: int) -> RopeConfig:
    stride = page_cells * chunk_pages
    return RopeConfig(key_dim, style, theta=500.0, dual_chunk=DualChunk(stride + stride // 3, stride // 3, stride // 2))


def check(out: np.ndarray, kernel: str, *oracle: Any) -> None:
    exact = attend_bands(*oracle)
    rounding = relative_error(attend_bands(*oracle, half=True), exact) if kernel != "float32" else 0.0
    assert relative_error(out.reshape(exact.shape), exact) < FLOAT_ERROR + 2 * rounding


@pytest.mark.parametrize("style", ["halves", "interleaved"])
@pytest.mark.parametrize("case", STEPS)
def test_a_step_turns_its_query_for_every_page(cuda: Any, case: tuple[Any, ...], style: Any) -> None:
    """Also where the new cell is the first of its chunk; and in equal bits however the pages are divided into launches."""
    group, kv_heads, key_dim, value_dim, key_type, value_type, page_cells, chunk_pages, lengths = case
    page, rope = (
        PageFormat(kv_heads, key_dim, value_dim, key_type, value_type, page_cells),
        rope_of(key_dim, style, page_cells, chunk_pages),
    )
    layer, scale = replace(make_layer(group * kv_heads, kv_heads, key_dim, value_dim), rope=rope), 1 / np.sqrt(key_dim)
    for cells in lengths:
        rng = np.random.default_rng([1, cells, key_dim])
        cache = make_cache(rng, page, cells, places="two")
        newest_pool, newest_slot = cache.places[-1]
        before = [pool.copy() for pool in cache.pools]
        for rows in page_views(before[newest_pool][newest_slot], page):
            rows[:, (cells - 1) % page_cells] = 0xFF
        qkv = rng.standard_normal((1, (group + 1) * kv_heads * key_dim + kv_heads * value_dim)).astype(np.float32)
        table = reference.rope_table(rope, cells - 1, 1, 2 * cells).astype(np.float32)
        projected = Projected(cuda.upload("qkv", qkv), layer, None, None, cuda.upload("table", table))
        position = cuda.upload("position", np.array([cells - 1], np.int32))
        found = []
        for cuts, together in (((), 1), ((), 2), (tuple(range(1, cache.num_pages, 2)), 2), ((1, 2, 5), 1)):
            pools = [cuda.upload("pool", pool) for pool in before]
            memory, runs = StepMemory(cuda, layer, 0, cache.num_pages), cache.runs(pools, cuts)
            for first in range(0, len(runs), together):
                some = tuple(runs[first : first + together])
                cuda.attend_step(projected, position, some, page, scale, memory.parts, memory.out)
            found.append((memory.read()[0], cuda.read(pools[newest_pool])))
        for out, stored in found[1:]:
            np.testing.assert_array_equal(out, found[0][0])
            np.testing.assert_array_equal(stored, found[0][1])

        out, stored = found[0]
        columns = group * kv_heads * key_dim
        row = (cells - 1) % page_cells
        new_key, new_value = (
            decode(raw[:, row], kind) for raw, kind in zip(page_views(stored[newest_slot], page), (key_type, value_type), strict=True)
        )
        key = reference.rope(
            qkv[:, columns : columns + kv_heads * key_dim].astype(np.float64), kv_heads, table[-1].astype(np.float64), style
        )
        ulp = {"f32": 2**-22, "f16": 2**-10, "bf16": 2**-7}
        np.testing.assert_allclose(new_key.reshape(1, -1), key, rtol=ulp[key_type], atol=ulp[key_type])
        np.testing.assert_allclose(new_value.reshape(-1), qkv[0, -kv_heads * value_dim :], rtol=ulp[value_type], atol=ulp[value_type])
        keys, values = np.concatenate([cache.keys[:-1], new_key[None]]), np.concatenate([cache.values[:-1], new_value[None]])
        turned = [
            reference.rope(qkv[:, :columns].astype(np.float64), group * kv_heads, table[band].astype(np.float64), style)
            for band in range(NUM_BANDS)
        ]
        own = (cells - 1) // (page_cells * chunk_pages) * page_cells * chunk_pages
        borders = max(own - page_cells * chunk_pages, 0), own
        shaped = [q.reshape(1, -1, key_dim) for q in turned]
        check(out, attn_decode.variant(layer, page), shaped, keys, values, cells - 1, scale, borders)


# ..., pages of a chunk, cells already there, tokens
PREFILL = [
    (4, 1, 128, 128, "f16", "f16", 256, 1, 512, 256),
    (2, 2, 128, 128, "f16", "f16", 256, 2, 1500, 36),
    (2, 1, 64, 64, "f16", "f16", 256, 1, 800, 130),
    (1, 1, 256, 256, "f16", "f16", 256, 1, 256, 100),
    (3, 1, 96, 96, "f16", "f16", 64, 2, 300, 70),
    (2, 1, 80, 96, "f32", "bf16", 16, 3, 192, 48),
]


@pytest.mark.parametrize("case", PREFILL)
def test_prefill_turns_its_queries_where_a_band_ends(cuda: Any, case: tuple[Any, ...]) -> None:
    """As the model does it: the state goes from run to run, and the queries are made anew in their array between two launches."""
    group, kv_heads, key_dim, value_dim, key_type, value_type, page_cells, chunk_pages, first, num_tokens = case
    page, rope = (
        PageFormat(kv_heads, key_dim, value_dim, key_type, value_type, page_cells),
        rope_of(key_dim, "halves", page_cells, chunk_pages),
    )
    layer, scale = replace(make_layer(group * kv_heads, kv_heads, key_dim, value_dim), rope=rope), 1 / np.sqrt(key_dim)
    rng = np.random.default_rng([2, first, key_dim])
    cells = first + num_tokens
    cache = make_cache(rng, page, cells, places="shuffled")
    qkv = rng.standard_normal((num_tokens, (group + 1) * kv_heads * key_dim + kv_heads * value_dim)).astype(np.float32) * 2
    table = reference.rope_table(rope, first, num_tokens, 2 * cells).astype(np.float32)
    projected = Projected(cuda.upload("qkv", qkv), layer, None, None, cuda.upload("table", table))
    at, pools = cuda.upload("position", np.array([first], np.int32)), [cuda.upload("pool", pool) for pool in cache.pools]
    state = poisoned(cuda, "state", state_shape(num_tokens, layer))
    scratch = cuda.empty("unpacked", (page.unpacked.page_bytes,), "u8")
    seen = bands(rope, page_cells, (cells - 1) // page_cells)

    def attended(cuts: tuple[int, ...]) -> np.ndarray:
        q, out = (
            poisoned(cuda, "q", (num_tokens, layer.num_heads * key_dim)),
            poisoned(cuda, "out", (num_tokens, layer.num_heads * value_dim)),
        )
        runs: list[tuple[int, PageRun]] = []
        for run in cache.runs(pools, cuts):
            runs += [(band, run.part(*pages)) for band, *pages in seen.split(run.first_page, run.num_pages)]
        turned = None
        for number, (band, run) in enumerate(runs):
            if band != turned:
                cuda.queries(projected, page, band, q)
                turned = band
            last = number + 1 == len(runs)
            cuda.attend_tile(q, at, run, layer, page, scale, state, scratch, last=last, out=out)
        return cuda.read(out)

    out = attended(())
    np.testing.assert_array_equal(attended(tuple(range(1, cache.num_pages))), out)
    columns, borders = layer.num_heads * key_dim, (seen.previous_page * page_cells, seen.own_page * page_cells)
    turned = [
        reference.rope(qkv[:, :columns].astype(np.float64), layer.num_heads, table[band].astype(np.float64), "halves")
        for band in range(NUM_BANDS)
    ]
    shaped = [q.reshape(num_tokens, -1, key_dim) for q in turned]
    check(out, attn_prefill.variant(page, cuda.launcher.arch), shaped, cache.keys, cache.values, first, scale, borders)
