"""Attention of a decode step and of prefill against the float64 oracle; equal bits however pages and queries are divided into launches.

Cells after the newest, cells that have left the sliding window and unused slots hold NaN, outputs and partial states begin as NaN. The newest cell
is NaN too before a decode step, which appends it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from oracle_attention import Cache, attend, check_parts, decode, divisions, make_cache, make_layer, page_views, relative_error
from rollkv import reference
from rollkv.backend import PageFormat, PageRun, PartStates, Projected, RmsNorm, Stream
from rollkv.config import LayerConfig, RopeConfig
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import attn_decode, attn_merge, attn_prefill
from rollkv.cuda.nvrtc import ARCHS, KernelError, arch_name
from rollkv.rope import query_bands
from rollkv.workspace import state_shape

gpu = pytest.mark.gpu
SCORE_ERROR = 3e-5  # where scores reach some hundred: float32 holds them to 3e-5, and a weight is the exponential of one
FLOAT_ERROR = 3e-6  # relative, of float32 arithmetic over some hundred cells; the oracle works with the cells as stored

# group, num_kv_heads, key_dim, value_dim, key_type, value_type, page_cells, cells, sliding_window, places
DECODE = [
    (1, 1, 64, 64, "f16", "f16", 64, 1, None, "ring"),
    (3, 3, 64, 64, "f16", "f16", 64, 63, None, "ring"),
    (4, 1, 128, 128, "f16", "f16", 64, 64, None, "two"),
    (5, 2, 128, 128, "bf16", "bf16", 64, 65, None, "two"),
    (8, 1, 256, 256, "bf16", "f16", 64, 333, None, "shuffled"),
    (16, 2, 128, 128, "f16", "f16", 64, 333, None, "shuffled"),
    (11, 1, 96, 80, "f32", "bf16", 32, 173, None, "shuffled"),
    (2, 8, 80, 96, "f16", "f32", 16, 93, None, "ring"),
    (1, 2, 16, 32, "f32", "f32", 128, 653, None, "two"),
    (4, 1, 192, 128, "f16", "f16", 64, 200, None, "shuffled"),
    (4, 1, 256, 256, "f16", "f16", 64, 400, 130, "ring"),
    (3, 2, 64, 64, "f16", "f16", 32, 97, 32, "shuffled"),
    (5, 1, 128, 128, "f32", "f16", 64, 64, 64, "two"),
    (8, 1, 128, 128, "f16", "f16", 256, 1293, None, "shuffled"),
    (5, 2, 128, 128, "f16", "f16", 256, 255, None, "ring"),
    (5, 2, 128, 128, "f16", "f16", 256, 256, None, "two"),
    (4, 1, 256, 256, "f16", "f16", 256, 700, 300, "two"),
    (6, 1, 64, 64, "f16", "f16", 256, 257, None, "two"),
    (4, 2, 64, 64, "f16", "f16", 256, 1293, 1, "ring"),
    (13, 1, 128, 128, "f16", "f16", 256, 600, None, "two"),
    (7, 1, 192, 192, "f16", "f16", 256, 300, 90, "shuffled"),
    (3, 1, 192, 192, "bf16", "bf16", 256, 300, None, "ring"),
    (4, 2, 64, 64, "f16", "f16", 256, 16 * 256, None, "two"),  # from here on as many parts as a block merges, and more
    (5, 2, 128, 128, "f16", "f16", 256, 16 * 256 + 1, None, "shuffled"),
    (8, 1, 256, 256, "f16", "f16", 256, 9000, None, "two"),
    (9, 1, 192, 192, "f16", "f16", 256, 9000, 5000, "ring"),
    (5, 1, 64, 64, "f16", "f16", 256, 12000, None, "two"),
    (8, 1, 128, 128, "f16", "f16", 256, 11000, None, "shuffled"),
    (4, 1, 192, 192, "f16", "f16", 256, 10500, None, "two"),
    (12, 1, 256, 256, "f16", "f16", 256, 11009, 10800, "ring"),
    (3, 2, 64, 64, "f16", "f16", 16, 16 * 47, None, "two"),
    (12, 1, 80, 96, "bf16", "f32", 16, 16 * 300 + 7, None, "shuffled"),
]
# ..., cells already there (position), tokens, sliding_window, places
PREFILL = [
    (1, 1, 64, 64, "f16", "f16", 64, 0, 2, None, "ring"),
    (3, 1, 64, 64, "f16", "f16", 64, 0, 130, None, "ring"),
    (5, 2, 128, 128, "f16", "f16", 64, 100, 65, None, "two"),
    (4, 1, 128, 128, "bf16", "bf16", 64, 37, 100, None, "two"),
    (2, 1, 256, 256, "f16", "f16", 64, 63, 70, None, "shuffled"),
    (1, 2, 256, 256, "f32", "f32", 32, 5, 40, None, "shuffled"),
    (2, 1, 192, 128, "bf16", "f16", 64, 70, 33, None, "two"),
    (3, 1, 80, 96, "f32", "bf16", 16, 21, 50, None, "shuffled"),
    (1, 3, 16, 32, "f16", "f32", 32, 90, 67, None, "ring"),
    (2, 1, 64, 64, "f16", "f16", 32, 120, 80, 50, "ring"),
    (1, 1, 256, 256, "f16", "f16", 64, 200, 40, 33, "two"),
    (2, 1, 128, 128, "f32", "f32", 64, 190, 70, 1, "two"),
    (2, 2, 128, 128, "f16", "f16", 256, 500, 70, None, "two"),
    (1, 1, 96, 96, "f16", "f16", 256, 250, 12, None, "ring"),
    (1, 1, 80, 80, "f16", "f16", 64, 250, 12, 100, "ring"),
    (1, 1, 64, 64, "f16", "f16", 64, 90, 1, None, "two"),
    (1, 2, 192, 192, "f16", "f16", 64, 90, 140, 64, "shuffled"),
    (1, 1, 256, 256, "f16", "f16", 256, 300, 150, None, "two"),
    (4, 2, 128, 128, "f16", "f16", 256, 0, 300, None, "ring"),
    (5, 1, 128, 128, "f16", "f16", 256, 1000, 200, None, "shuffled"),
    (2, 1, 128, 128, "f16", "f16", 256, 700, 260, 300, "two"),
    (2, 2, 128, 128, "f16", "f16", 128, 100, 60, 7, "ring"),
    (1, 1, 128, 128, "f16", "f16", 256, 256, 256, 128, "two"),
    (3, 1, 64, 64, "f16", "f16", 256, 513, 129, None, "shuffled"),
    (2, 1, 64, 64, "f16", "f16", 256, 600, 200, 100, "ring"),
    (1, 2, 192, 192, "f16", "f16", 256, 300, 150, None, "two"),
    (2, 1, 192, 192, "f16", "f16", 128, 430, 90, 200, "two"),
    (2, 1, 256, 256, "f16", "f16", 256, 900, 140, 333, "shuffled"),
    (1, 1, 256, 256, "f16", "f16", 128, 90, 200, None, "ring"),
    (1, 1, 256, 256, "f16", "f16", 256, 1023, 1, 255, "two"),
]


NO_ROTATION = DeviceArray(4096, (1, 1, 0, 2), "f32")  # a table without pairs


def poisoned(cuda: Any, label: str, shape: tuple[int, ...]) -> Any:
    return cuda.upload(label, np.full(shape, np.nan, np.float32))


def project(cuda: Any, q: np.ndarray, cache: Cache, layer: LayerConfig) -> Projected:
    """A product that gives these queries, f32 [1, H*Dk], and the cache's last cell as they are: no norm, no rotation."""
    k, v = (x[-1].astype(np.float32).reshape(1, -1) for x in (cache.keys, cache.values))
    return Projected(cuda.upload("qkv", np.concatenate([q, k, v], axis=1)), layer, None, None, NO_ROTATION)


@dataclass
class StepMemory:
    """Everything that a step writes, poisoned, and read back."""

    cuda: Any
    layer: LayerConfig
    first_page: int
    num_parts: int

    def __post_init__(self) -> None:
        layer = self.layer
        self.part_out = poisoned(self.cuda, "part_out", (self.num_parts + 1, layer.num_heads, layer.value_dim))
        self.part_lse = poisoned(self.cuda, "part_lse", (self.num_parts + 1, layer.num_heads))
        self.arrivals = self.cuda.upload("arrivals", np.zeros(layer.num_heads, np.int32))
        self.out = poisoned(self.cuda, "out", (1, layer.num_heads * layer.value_dim))
        self.q = poisoned(self.cuda, "queries", (query_bands(layer.rope), layer.num_heads * layer.key_dim))

    @property
    def parts(self) -> PartStates:
        return PartStates(
            self.first_page, self.num_parts, self.part_out.rows(self.num_parts), self.part_lse.rows(self.num_parts), self.arrivals, self.q
        )

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(out [H, Dv], part_out, part_lse), behind a look at what must be as it was."""
        part_out, part_lse = self.cuda.read(self.part_out), self.cuda.read(self.part_lse)
        assert np.isnan(part_out[self.num_parts]).all() and np.isnan(part_lse[self.num_parts]).all()
        assert (self.cuda.read(self.arrivals) == 0).all()
        return self.cuda.read(self.out).reshape(self.layer.num_heads, -1), part_out[: self.num_parts], part_lse[: self.num_parts]


def merge(cuda: Any, layer: LayerConfig, part_out: np.ndarray, part_lse: np.ndarray) -> np.ndarray:
    """[1, H*Dv] of all states [parts, H, Dv], [parts, H], by the kernel that merges alone."""
    out = poisoned(cuda, "merged", (1, layer.num_heads * layer.value_dim))
    attn_merge.merge_parts(cuda.launcher, cuda.upload("part_out", part_out), cuda.upload("part_lse", part_lse), len(part_out), layer, out)
    return cuda.read(out)


def run_step(
    cuda: Any,
    cache: Cache,
    q: np.ndarray,
    layer: LayerConfig,
    scale: float,
    cuts: tuple[int, ...] = (),
    first_page: int = 0,
    repeats: int = 1,
    together: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out [H, Dv], part_out, part_lse) of a step that appends the cache's last cell; a launch takes so many runs together. The pages must hold exactly
    the cache's cells then."""
    newest = cache.keys.shape[0] - 1
    pool, slot = cache.places[newest // cache.page.page_cells]
    before = [x.copy() for x in cache.pools]
    for cells in page_views(before[pool][slot], cache.page):
        cells[:, newest % cache.page.page_cells] = 0xFF
    pools = [cuda.upload(f"pool {i}", x) for i, x in enumerate(before)]
    memory = StepMemory(cuda, layer, first_page, cache.num_pages - first_page)
    position = cuda.upload("position", np.array([newest], np.int32))
    projected = project(cuda, q, cache, layer)
    for runs in cache.launches(pools, cuts, first_page, together) * repeats:
        cuda.attend_step(projected, position, runs, cache.page, scale, memory.parts, memory.out)
    for after, wanted in zip(pools, cache.pools, strict=True):
        np.testing.assert_array_equal(cuda.read(after), wanted)
    return memory.read()


def assert_close(out: np.ndarray, variant: str, *oracle: Any, lse: np.ndarray | None = None, float_error: float = FLOAT_ERROR) -> None:
    """out [T, H*Dv] against attend(*oracle): as exact as float32, or where queries and weights are rounded to half, within twice the error
    that this rounding alone makes."""
    exact, exact_lse = attend(*oracle)
    limit, lse_limit = float_error, 1e-5
    if variant != "float32":
        rounded, rounded_lse = attend(*oracle, half=True)
        limit += 2 * relative_error(rounded, exact)
        lse_limit += 2 * float(np.abs(rounded_lse - exact_lse).max())
    assert relative_error(out.reshape(exact.shape), exact) < limit
    assert lse is None or np.abs(lse.reshape(exact_lse.shape) - exact_lse).max() < lse_limit


@gpu
@pytest.mark.parametrize("case", DECODE)
def test_a_step_equals_the_oracle_and_every_division_into_launches(cuda: Any, case: tuple[Any, ...]) -> None:
    group, kv_heads, key_dim, value_dim, key_type, value_type, page_cells, cells, window, places = case
    page = PageFormat(kv_heads, key_dim, value_dim, key_type, value_type, page_cells)
    layer = make_layer(group * kv_heads, kv_heads, key_dim, value_dim, window)
    rng = np.random.default_rng([2, group, cells, key_dim])
    cache = make_cache(rng, page, cells, places=places, first_visible=max(cells - window, 0) if window else 0)
    q = (rng.standard_normal((1, layer.num_heads * key_dim)) * 3).astype(np.float32)
    scale = 1 / np.sqrt(key_dim)
    out, part_out, part_lse = run_step(cuda, cache, q, layer, scale)

    exact_q = q.reshape(1, layer.num_heads, key_dim).astype(np.float64)
    kernel = attn_decode.variant(layer, page)
    assert_close(out, kernel, exact_q, cache.keys, cache.values, cells - 1, scale, window)
    check_parts(cache, part_out, part_lse, exact_q, scale, window, lambda out, *oracle, lse: assert_close(out, kernel, *oracle, lse=lse))
    for cuts in divisions(cache.num_pages):
        again = run_step(cuda, cache, q, layer, scale, cuts, repeats=2, together=1 + len(cuts) % 2)
        for x, y in zip((out, part_out, part_lse), again, strict=True):
            np.testing.assert_array_equal(x, y)


@gpu
def test_a_step_from_a_later_page_on(cuda: Any) -> None:
    """A sliding layer's runs begin where the window does; the parts are counted from there."""
    page, layer = PageFormat(2, 64, 64, "f16", "f16", 32), make_layer(6, 2, 64, 64, 70)
    rng = np.random.default_rng(3)
    cache = make_cache(rng, page, 203, places="two", first_visible=133)
    q = rng.standard_normal((1, 6 * 64)).astype(np.float32)
    out, _, _ = run_step(cuda, cache, q, layer, 0.125, (5,), first_page=133 // 32)
    assert_close(out, "float32", q.reshape(1, 6, 64).astype(np.float64), cache.keys, cache.values, 202, 0.125, 70)


@gpu
@pytest.mark.parametrize(("group", "dim", "cells"), [(2, 64, 9300), (4, 128, 9300), (12, 256, 5000)])
def test_where_pages_lie_changes_no_bit(cuda: Any, group: int, dim: int, cells: int) -> None:
    page, layer = PageFormat(2, dim, dim, "f16", "f16", 256), make_layer(2 * group, 2, dim, dim)
    q = np.random.default_rng([9, dim]).standard_normal((1, 2 * group * dim)).astype(np.float32)
    first, *others = (
        run_step(cuda, make_cache(np.random.default_rng(10), page, cells, places=places), q, layer, 0.1, cuts, together=together)
        for places, cuts, together in (
            ("ring", (), 1),
            ("two", (), 1),
            ("shuffled", (), 1),
            ("two", (3, 4, 30), 1),
            ("two", (), 2),
            ("shuffled", (), 2),
        )
    )
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


@gpu
@pytest.mark.parametrize("style", ["halves", "interleaved"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("group", "key_dim", "value_dim", "key_type", "value_type", "rope_dim"),
    [
        (4, 64, 64, "f16", "f16", 64),
        (8, 128, 128, "f16", "f16", 128),
        (5, 128, 128, "f16", "f16", 96),
        (13, 192, 192, "f16", "f16", 192),
        (16, 256, 256, "f16", "f16", 256),
        (2, 80, 96, "bf16", "f32", 6),
        (11, 96, 80, "f32", "bf16", 96),
        (3, 64, 64, "f16", "f16", 64),
    ],
)
def test_a_step_finishes_its_rows_as_append_does(
    cuda: Any, group: int, key_dim: int, value_dim: int, key_type: str, value_type: str, rope_dim: int, normed: bool, style: Any
) -> None:
    """The same bytes in the page as `append` leaves, and the same attention as over queries that `append` finished."""
    rng, kv_heads, position = np.random.default_rng([11, group, key_dim, normed]), 2, 700
    page = PageFormat(kv_heads, key_dim, value_dim, key_type, value_type, 256)  # type: ignore[arg-type]
    layer = replace(make_layer(group * kv_heads, kv_heads, key_dim, value_dim), rope=RopeConfig(rope_dim, style))
    cache = make_cache(rng, page, position, places="ring")
    qkv = (rng.standard_normal((1, layer.num_heads * key_dim + kv_heads * (key_dim + value_dim))) * 2).astype(np.float32)
    norms = [RmsNorm(cuda.upload("norm", rng.standard_normal(key_dim).astype(np.float32)), 1e-6) if normed else None for _ in range(2)]
    table = cuda.upload("table", reference.rope_table(layer.rope, position, 1).astype(np.float32))
    projected = Projected(cuda.upload("qkv", qkv), layer, *norms, table)
    at, q = cuda.upload("position", np.array([position], np.int32)), poisoned(cuda, "q", (1, layer.num_heads * key_dim))

    appended, stepped = (cuda.upload("pool", cache.pools[0]) for _ in range(2))
    run = cache.runs([appended])[0]
    cuda.append(projected, at, (run,), page, position, 0, q)
    memory = StepMemory(cuda, layer, 0, run.num_pages)
    cuda.attend_step(projected, at, (replace(run, pool=stepped),), page, 0.1, memory.parts, memory.out)
    np.testing.assert_array_equal(cuda.read(stepped), cuda.read(appended))

    # Queries that `append` finished, and the key as it stored it, pass a step without norm and rotation as they are.
    slot, cell = cache.places[-1][1], position % page.page_cells
    key = decode(page_views(cuda.read(appended)[slot], page)[0][:, cell], key_type).astype(np.float32).reshape(1, -1)
    finished = cuda.upload("qkv", np.concatenate([cuda.read(q), key, qkv[:, -kv_heads * value_dim :]], axis=1))
    plain = StepMemory(cuda, layer, 0, run.num_pages)
    cuda.attend_step(Projected(finished, layer, None, None, NO_ROTATION), at, (run,), page, 0.1, plain.parts, plain.out)
    for x, y in zip(memory.read(), plain.read(), strict=True):
        np.testing.assert_array_equal(x, y)


@gpu
@pytest.mark.parametrize(("num_parts", "value_dim"), [(1, 64), (16, 80), (17, 256), (100, 128), (1025, 16)])
def test_merge(cuda: Any, num_parts: int, value_dim: int) -> None:
    """Against float64; empty parts are the identity whatever they hold; head 0 is empty everywhere; a NaN is not hidden."""
    layer = make_layer(5, 5, 64, value_dim)
    rng = np.random.default_rng([4, num_parts])
    part_out = rng.standard_normal((num_parts, 5, value_dim)).astype(np.float32)
    part_lse = (rng.standard_normal((num_parts, 5)) * 20 + 300).astype(np.float32)
    part_lse[rng.random((num_parts, 5)) < 0.3] = -np.inf
    part_lse[num_parts // 2] = 310
    part_lse[:, 0] = -np.inf
    part_out[np.isinf(part_lse)] = np.nan
    part_lse[num_parts - 1, 4] = np.nan
    merged = merge(cuda, layer, part_out, part_lse).reshape(5, value_dim)
    weights = np.exp(part_lse[:, 1:4].astype(np.float64) - part_lse[:, 1:4].max(axis=0))
    states = np.where(weights[..., None] > 0, part_out[:, 1:4], 0).astype(np.float64)
    exact = (weights[..., None] * states).sum(axis=0) / weights.sum(axis=0)[:, None]
    assert relative_error(merged[1:4], exact) < FLOAT_ERROR
    assert (merged[0] == 0).all()
    assert np.isnan(merged[4]).all()


@gpu
@pytest.mark.parametrize(
    ("group", "dim", "page_cells", "cells"),
    [(4, 64, 256, 3000), (5, 128, 256, 4096), (13, 256, 256, 300), (3, 64, 16, 250), (11, 96, 32, 512), (4, 192, 256, 2)],
)
def test_merging_in_a_kernel_of_its_own_gives_the_same(cuda: Any, group: int, dim: int, page_cells: int, cells: int) -> None:
    page, layer = PageFormat(2, dim, dim, "f16", "f16", page_cells), make_layer(2 * group, 2, dim, dim)  # type: ignore[arg-type]
    cache = make_cache(np.random.default_rng(16), page, cells)
    q = np.random.default_rng([17, dim]).standard_normal((1, 2 * group * dim)).astype(np.float32)
    out, part_out, part_lse = run_step(cuda, cache, q, layer, 0.1)
    if cache.num_pages == 1:  # the state is the result
        part_out, part_lse = out[None], np.zeros((1, 2 * group), np.float32)
    assert relative_error(merge(cuda, layer, part_out, part_lse).reshape(out.shape), out) < FLOAT_ERROR


@gpu
def test_what_is_not_a_number_is_not_hidden(cuda: Any) -> None:
    """One NaN among the values of an old cell reaches its head's result through the merge, and no other head's."""
    page, layer = PageFormat(2, 64, 64, "f16", "f16", 256), make_layer(8, 2, 64, 64)
    cache = make_cache(np.random.default_rng(12), page, 5000)
    pool, slot = cache.places[3]
    page_views(cache.pools[pool][slot], page)[1][1, 17, :2] = 0xFF
    q = np.random.default_rng(13).standard_normal((1, 8 * 64)).astype(np.float32)
    out, _, _ = run_step(cuda, cache, q, layer, 0.125)
    assert np.isnan(out[4:, 0]).all() and np.isfinite(out[:4]).all() and np.isfinite(out[:, 1:]).all()


@gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_pages_that_a_copy_brings_are_whole_when_a_launch_begins(cuda: Any, recorded: bool) -> None:
    """Old cells are read before the kernels before have ended, but never before the copy that the launch was told to wait for."""
    page, layer = PageFormat(4, 128, 128, "f16", "f16", 256), make_layer(16, 4, 128, 128)
    cache = make_cache(np.random.default_rng(14), page, 40 * 256, places="ring")
    q = np.random.default_rng(15).standard_normal((1, 16 * 128)).astype(np.float32)
    want, _, _ = run_step(cuda, cache, q, layer, 0.1)
    slots = cache.pools[0].shape[0]
    order = [slot for _, slot in cache.places]
    host = cuda.host_pages("tail", 40, page.page_bytes)
    filled = cuda.upload("filled", cache.pools[0][order])
    cuda.copy_out(PageRun(filled, 40, 0, 0, 40), host)
    cuda.synchronize()
    pool = cuda.empty("pool", (slots, page.page_bytes), "u8")
    projected, position = project(cuda, q, cache, layer), cuda.upload("position", np.array([cache.keys.shape[0] - 1], np.int32))
    memory = StepMemory(cuda, layer, 0, 40)

    def step() -> None:
        cuda.wait(Stream.COPY_IN, cuda.record(Stream.COMPUTE))
        staged = []
        for first in range(0, 39, 13):
            run = PageRun(pool, slots, first, first, 13)
            cuda.copy_in(run, host)
            staged.append((run, cuda.record(Stream.COPY_IN)))
        for run, event in staged:
            cuda.wait(Stream.COMPUTE, event)
            window = (PageRun(filled, 40, 39, 39, 1),) if run is staged[-1][0] else ()
            cuda.attend_step(projected, position, (run, *window), page, 0.1, memory.parts, memory.out)

    step()
    graph = cuda.capture(step) if recorded else None
    for _ in range(5):
        cuda.write(pool, np.full(pool.shape, 0xFF, np.uint8))
        if graph is None:
            step()
        else:
            cuda.replay(graph)
        np.testing.assert_array_equal(memory.read()[0], want)
    cuda.synchronize()


def run_prefill(
    cuda: Any, cache: Cache, pools: list[Any], q: np.ndarray, position: int, layer: LayerConfig, scale: float, cuts: tuple[int, ...]
) -> np.ndarray:
    """out [T, H*Dv] of queries at position on, over the cache's pages that hold cells up to the last query's."""
    num_tokens = q.shape[0]
    rows, columns = state_shape(num_tokens, layer)
    guarded = poisoned(cuda, "state", (rows + 8, columns))
    state = guarded.rows(rows)
    out = poisoned(cuda, "out", (num_tokens, layer.num_heads * layer.value_dim))
    at, queries = cuda.upload("position", np.array([position], np.int32)), cuda.upload("q", q)
    scratch = cuda.empty("unpacked", (cache.page.unpacked.page_bytes,), "u8")
    runs = cache.runs(pools, cuts)
    for i, run in enumerate(runs):
        last = i + 1 == len(runs)
        cuda.attend_tile(queries, at, run, layer, cache.page, scale, state, scratch, last=last, out=out)
    assert np.isnan(cuda.read(guarded)[rows:]).all(), "state was written behind its end"
    return cuda.read(out)


@gpu
@pytest.mark.parametrize("case", PREFILL)
def test_prefill_equals_the_oracle_and_every_division_of_pages_and_queries(cuda: Any, case: tuple[Any, ...]) -> None:
    group, kv_heads, key_dim, value_dim, key_type, value_type, page_cells, position, num_tokens, window, places = case
    page = PageFormat(kv_heads, key_dim, value_dim, key_type, value_type, page_cells)
    layer = make_layer(group * kv_heads, kv_heads, key_dim, value_dim, window)
    rng = np.random.default_rng([5, group, position, num_tokens, key_dim])
    first_visible = max(position - window + 1, 0) if window else 0
    cache = make_cache(rng, page, position + num_tokens, places=places, first_visible=first_visible)
    q = (rng.standard_normal((num_tokens, layer.num_heads * key_dim)) * 3).astype(np.float32)
    scale = 1 / np.sqrt(key_dim)
    pools = [cuda.upload(f"pool {i}", x) for i, x in enumerate(cache.pools)]
    out = run_prefill(cuda, cache, pools, q, position, layer, scale, ())
    shaped = q.reshape(num_tokens, layer.num_heads, key_dim).astype(np.float64)
    assert_close(out, attn_prefill.variant(page, cuda.launcher.arch), shaped, cache.keys, cache.values, position, scale, window)

    for cuts in {tuple(range(1, cache.num_pages)), (cache.num_pages // 2,), tuple(range(1, cache.num_pages, 3))}:
        np.testing.assert_array_equal(run_prefill(cuda, cache, pools, q, position, layer, scale, cuts), out)
    a, b = num_tokens // 3, num_tokens * 5 // 8
    calls = [(0, a), (a, b), (b, num_tokens)]
    rows = [run_prefill(cuda, cache, pools, q[x:y], position + x, layer, scale, (1,)) for x, y in calls if y > x]
    np.testing.assert_array_equal(np.concatenate(rows), out)


@gpu
@pytest.mark.parametrize("form", [(2, 64, 64, "f16", "f16", 256), (1, 256, 256, "f32", "f16", 64)])
def test_large_scores(cuda: Any, form: tuple[Any, ...]) -> None:
    """Scores of some hundred, with a maximum that moves from block to block: no overflow, and the same as the oracle."""
    page = PageFormat(*form)
    layer = make_layer(4 * page.num_kv_heads, page.num_kv_heads, page.key_dim, page.value_dim)
    rng = np.random.default_rng(6)
    cache = make_cache(rng, page, 400, places="two", seed_scale=8.0)
    q = (rng.standard_normal((20, layer.num_heads * page.key_dim)) * 4).astype(np.float32)
    exact_q = q.reshape(20, layer.num_heads, -1).astype(np.float64)
    pools = [cuda.upload(f"pool {i}", x) for i, x in enumerate(cache.pools)]
    scale = 1 / np.sqrt(page.key_dim)
    out = run_prefill(cuda, cache, pools, q, 380, layer, scale, ())
    assert_close(
        out, attn_prefill.variant(page, cuda.launcher.arch), exact_q, cache.keys, cache.values, 380, scale, float_error=SCORE_ERROR
    )
    out, _, _ = run_step(cuda, cache, q[19:], layer, scale)
    assert_close(out, attn_decode.variant(layer, page), exact_q[19:], cache.keys, cache.values, 399, scale, float_error=SCORE_ERROR)


@gpu
def test_decode_past_two_to_the_31_bytes(cuda: Any) -> None:
    """Pages in the last slots of a pool of more than 2^32 bytes: offsets are 64 bits wide."""
    page, layer = PageFormat(8, 128, 128, "f16", "f16", 256), make_layer(8, 8, 128, 128)
    slots = (1 << 32) // page.page_bytes + 3
    free = cuda.free_bytes()
    if free < slots * page.page_bytes + (1 << 30):
        pytest.skip(f"a pool of {slots * page.page_bytes} bytes does not fit {free} bytes of free device memory")
    rng = np.random.default_rng(7)
    cache = make_cache(rng, page, 600, places="ring")
    pool = cuda.empty("large pool", (slots, page.page_bytes), "u8")
    for number, (_, slot) in enumerate(cache.places):
        target = pool.view((1, page.page_bytes), "u8", (slots - 3 + number) * page.page_bytes)
        cuda.write(target, cache.pools[0][slot])
    moved = Cache(page, cache.keys, cache.values, (np.empty((slots, 0), np.uint8),), tuple((0, slots - 3 + i) for i in range(3)))
    q = rng.standard_normal((1, 1024)).astype(np.float32)
    memory = StepMemory(cuda, layer, 0, 3)
    position = cuda.upload("position", np.array([599], np.int32))
    cuda.attend_step(project(cuda, q, moved, layer), position, (moved.runs([pool])[0],), page, 0.09, memory.parts, memory.out)
    out, _, _ = memory.read()
    oracle = (q.reshape(1, 8, 128).astype(np.float64), cache.keys, cache.values, 599, 0.09)
    assert_close(out, attn_decode.variant(layer, page), *oracle)
    assert_close(run_prefill(cuda, moved, [pool], q, 599, layer, 0.09, (1, 2)), attn_prefill.variant(page, cuda.launcher.arch), *oracle)


# ---- without a GPU ----------------------------------------------------------------------------------------------------------------


def test_every_head_has_one_block_in_decode() -> None:
    for group in range(1, 40):
        shape = attn_decode.launch_shape(group, 3, 7)
        assert shape.heads <= 8 and shape.heads * (shape.chunks - 1) < group <= shape.heads * shape.chunks
        assert shape.grid == (7 * shape.chunks, 3, 1)
        for dim in (64, 128, 192, 256):
            shapes = [attn_decode.mma_shape(dim, group, 8, parts) for parts in (1, 16, 17, 1000)]
            assert {(ours.heads, ours.chunks) for ours in shapes} == {(shape.heads, shape.chunks)}
            assert [ours.warps for ours in shapes][::3] == [8, 4] and shapes[0] == shapes[1]


def test_states_are_whole_groups_of_rows() -> None:
    layer = make_layer(6, 2, 64, 80)
    assert [state_shape(rows, layer) for rows in (1, 7, 8, 9, 4095)] == [(rows, 6 * 88) for rows in (8, 8, 8, 16, 4096)]


def test_merge_covers_all_columns() -> None:
    for value_dim in range(16, 257, 16):
        grid = attn_merge.launch_shape(6, value_dim).grid
        assert grid[0] == 6 and value_dim <= grid[1] * 32 < value_dim + 32


def test_prefill_fits_the_shared_memory_of_every_card() -> None:
    for key_dim in range(16, 257, 16):
        for value_dim in range(16, 257, 16):
            shape = attn_prefill.launch_shape(key_dim, value_dim, 8, 100)
            assert shape.shared_bytes <= 99 << 10 and shape.grid[0] == -(-100 // shape.rows) * 8
    for arch in ARCHS:
        for dim in (64, 80, 96, 128, 192, 256):
            shape, tile = attn_prefill.mma_launch_shape(dim, arch, 8, 100), attn_prefill.mma_tile(dim, arch)
            assert shape.shared_bytes <= 99 << 10 and shape.grid[0] == -(-100 // shape.rows) * 8
            assert 64 % tile.cells == 0 and tile.cells * dim // 8 % shape.threads == 0 and 0 <= tile.shared_columns <= dim
    for dim in (64, 128, 192, 256):
        shape = attn_prefill.wgmma_launch_shape(dim, 8, 300)
        assert shape.shared_bytes <= 227 << 10 and shape.grid[0] == 3 * 8  # what sm_90 gives a block


@pytest.mark.parametrize(
    ("form", "group", "decode", "portable", "hopper"),
    [
        (("f16", "f16", 128, 128, 256), 5, "mma", "mma", "wgmma"),
        (("f16", "f16", 128, 128, 64), 5, "float32", "mma", "mma"),
        (("f16", "f16", 128, 128, 256), 3, "float32", "mma", "wgmma"),
        (("f16", "f16", 80, 80, 256), 8, "float32", "mma", "mma"),
        (("f16", "f16", 256, 256, 64), 4, "float32", "mma", "wgmma"),
        (("f16", "f16", 256, 256, 32), 4, "float32", "float32", "float32"),
        (("f16", "f16", 192, 128, 256), 4, "float32", "float32", "float32"),
        (("bf16", "bf16", 128, 128, 256), 8, "float32", "float32", "float32"),
        (("f16", "f32", 64, 64, 256), 8, "float32", "float32", "float32"),
        (("f16", "f16", 112, 112, 256), 8, "float32", "float32", "float32"),
    ],
)
def test_the_kernel_follows_from_the_configuration(form: tuple[Any, ...], group: int, decode: str, portable: str, hopper: str) -> None:
    key_type, value_type, key_dim, value_dim, cells = form
    page, layer = PageFormat(2, key_dim, value_dim, key_type, value_type, cells), make_layer(2 * group, 2, key_dim, value_dim)
    assert attn_decode.variant(layer, page) == decode
    assert attn_prefill.variant(page, arch_name(9, 0)) == hopper
    for arch in (arch_name(8, 6), arch_name(12, 0), arch_name(9, 0, portable=True)):
        assert attn_prefill.variant(page, arch) == portable


class NoLauncher:
    """Fails the test when something is launched."""

    def launch(self, *args: Any, **kwargs: Any) -> None:
        pytest.fail("launched in spite of wrong operands")


def test_wrong_shapes_are_refused() -> None:
    page, layer = PageFormat(2, 64, 64, "f16", "f16", 32), make_layer(6, 2, 64, 64)
    cache = make_cache(np.random.default_rng(8), page, 100)
    pools = [DeviceArray(4096, x.shape, "u8") for x in cache.pools]
    run = cache.runs(pools)[0]
    position, q = DeviceArray(4096, (1,), "i32"), DeviceArray(4096, (1, 384), "f32")
    projected = Projected(DeviceArray(4096, (1, 640), "f32"), layer, None, None, DeviceArray(4096, (1, 1, 32, 2), "f32"))
    outs, lses, arrivals = DeviceArray(4096, (4, 6, 64), "f32"), DeviceArray(4096, (4, 6), "f32"), DeviceArray(4096, (6,), "i32")
    parts = PartStates(0, 4, outs, lses, arrivals, q)
    state = DeviceArray(4096, state_shape(1, layer), "f32")
    launcher: Any = NoLauncher()
    for wrong, message in (
        ({"parts": replace(parts, first_page=1)}, "are not among 4 parts"),
        ({"runs": (run, run)}, "2 runs of pages; one was wanted, or two that follow"),
        ({"runs": (run, replace(run, first_page=4), replace(run, first_page=8))}, "3 runs of pages"),
        ({"runs": (run, replace(run, first_page=4))}, "pages 0 to 7 from page 0 on are not among 4"),
        ({"parts": replace(parts, lse=outs)}, "parts.lse must be"),
        ({"parts": replace(parts, num_parts=5)}, "parts.out must be"),
        ({"parts": replace(parts, arrivals=arrivals.rows(5))}, "parts.arrivals must be"),
        ({"projected": replace(projected, qkv=q)}, "qkv must be"),
        ({"projected": replace(projected, table=DeviceArray(4096, (1, 1, 33, 2), "f32"))}, "33 pairs do not fit"),
        ({"out": outs}, "out must be"),
    ):
        operands = {
            "projected": projected,
            "position": position,
            "runs": (run,),
            "page": page,
            "scale": 1.0,
            "parts": parts,
            "out": q,
        } | wrong
        with pytest.raises(KernelError, match=message):
            attn_decode.attend_step(launcher, **operands)
    with pytest.raises(KernelError, match="state must be"):
        unpadded = DeviceArray(4096, (1, 6 * 72), "f32")
        attn_prefill.attend_tile(launcher, q, position, run, layer, page, 1.0, unpadded, q)
    with pytest.raises(KernelError, match="the pool must be"):
        attn_prefill.attend_tile(launcher, q, position, run, layer, PageFormat(2, 64, 64, "f16", "f16", 64), 1.0, state, q)
    with pytest.raises(KernelError, match="multiple of 16"):
        attn_prefill.spec("f16", "f16", 72, 64)
