"""Attention of a decode step to coded pages, and to halves in their frame, against the float64 oracle over decoded cells; equal bits however pages are divided
into launches and wherever they lie.

Cells after the newest, cells that have left the sliding window and unused slots hold NaN as far as their type can: codes that are all ones, scales that
are no numbers. Outputs and partial states begin as NaN.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle_attention import Cache, attend, attend_bands, check_parts, divisions, make_cache, make_layer, relative_error
from rollkv.backend import PageRun, PartStates, Projected
from rollkv.config import DualChunk, LayerConfig, PageFormat, RopeConfig
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import attn_decode_coded, attn_merge, prepare_step
from rollkv.cuda.kernels.kv_format import MERGED_WITHIN
from rollkv.cuda.nvrtc import ARCHS, KernelError, compile_cubin, find_csrc
from rollkv.rope import bands
from test_attention import FLOAT_ERROR, StepMemory, merge

gpu = pytest.mark.gpu
NUM_SMS = 132

# group, num_kv_heads, key_dim, value_dim, key_type, value_type, page_cells, cells, sliding_window, places
CASES = [
    (5, 2, 128, 128, "q8_0", "q8_0", 256, 1, None, "ring"),
    (5, 2, 128, 128, "q4_0", "q4_0", 256, 255, None, "ring"),
    (5, 2, 128, 128, "turbo4", "turbo4", 256, 256, None, "two"),
    (5, 2, 128, 128, "turbo3", "turbo3", 256, 257, None, "two"),
    (5, 2, 128, 128, "turbo2", "turbo2", 256, 1293, None, "shuffled"),
    (8, 1, 128, 128, "f16", "f16", 256, 700, None, "two"),
    (8, 1, 256, 256, "turbo4", "turbo3", 256, 700, 300, "two"),
    (4, 1, 256, 256, "turbo2", "q8_0", 256, 513, None, "ring"),
    (16, 1, 64, 64, "turbo3", "turbo2", 256, 600, None, "two"),
    (13, 1, 64, 64, "q8_0", "q4_0", 256, 300, 90, "shuffled"),
    (7, 2, 64, 64, "turbo2", "turbo4", 256, 300, 1, "ring"),
    (3, 1, 128, 128, "f16", "turbo3", 256, 520, 256, "two"),
    (4, 1, 128, 128, "turbo2", "f16", 256, 520, 257, "two"),
    (2, 1, 128, 64, "q4_0", "turbo2", 256, 400, None, "ring"),
    (3, 2, 80, 112, "turbo3", "turbo2", 64, 333, None, "shuffled"),
    (11, 1, 96, 80, "turbo4", "turbo3", 32, 173, 60, "shuffled"),
    (2, 3, 32, 160, "q8_0", "q8_0", 16, 93, None, "ring"),
    (1, 2, 16, 32, "turbo2", "q4_0", 128, 653, None, "two"),
    (4, 1, 192, 96, "turbo2", "turbo4", 64, 400, 130, "ring"),
    (6, 1, 112, 48, "f16", "f16", 32, 97, 32, "shuffled"),
    (5, 1, 48, 16, "turbo3", "turbo3", 16, 64, 64, "two"),
    (4, 2, 128, 128, "q8_0", "q8_0", 256, 16 * 256, None, "two"),  # from here on as many parts as a block merges, and more
    (5, 2, 128, 128, "turbo4", "turbo4", 256, 16 * 256 + 1, None, "shuffled"),
    (8, 8, 128, 128, "turbo3", "turbo3", 256, 8200, None, "two"),  # and more blocks than the form for some holds
    (5, 8, 128, 128, "turbo2", "turbo2", 256, 9000, None, "shuffled"),
    (5, 8, 128, 128, "turbo4", "turbo4", 256, 8300, 4000, "ring"),
    (4, 8, 128, 128, "q4_0", "q4_0", 256, 8193, None, "two"),
    (4, 8, 64, 64, "q8_0", "turbo2", 256, 8193, None, "two"),
    (9, 4, 256, 256, "q4_0", "turbo3", 256, 9000, 8000, "ring"),
    (4, 8, 128, 128, "f16", "f16", 256, 8193, None, "two"),
    (3, 8, 128, 128, "turbo4", "f16", 256, 8400, None, "shuffled"),
    (12, 2, 80, 96, "turbo2", "turbo3", 16, 16 * 300 + 7, None, "shuffled"),
]


def page_of(case: tuple[Any, ...]) -> PageFormat:
    _, kv_heads, key_dim, value_dim, key_type, value_type, page_cells = case[:7]
    return PageFormat(kv_heads, key_dim, value_dim, key_type, value_type, page_cells, True, True)


def step(
    cuda: Any,
    cache: Cache,
    q: np.ndarray,
    layer: LayerConfig,
    scale: float,
    cuts: tuple[int, ...] = (),
    *,
    first_page: int = 0,
    repeats: int = 1,
    together: int = 1,
    num_sms: int = NUM_SMS,
    form: attn_decode_coded.Form | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out [H, Dv], part_out, part_lse) of a step whose newest cell is the cache's last; a launch takes so many runs together. q f32 [bands, H*Dk]."""
    pools = [cuda.upload(f"pool {i}", x) for i, x in enumerate(cache.pools)]
    memory = StepMemory(cuda, layer, first_page, cache.num_pages - first_page)
    position = cuda.upload("position", np.array([cache.keys.shape[0] - 1], np.int32))
    cuda.write(memory.q, q)
    for runs in cache.launches(pools, cuts, first_page, together) * repeats:
        attn_decode_coded.attend_coded(
            cuda.launcher, position, runs, layer, cache.page, scale, memory.parts, memory.out, num_sms=num_sms, form=form
        )
    for after, before in zip(pools, cache.pools, strict=True):
        np.testing.assert_array_equal(cuda.read(after), before)
    return memory.read()


def assert_close(out: np.ndarray, page: PageFormat, *oracle: Any, lse: np.ndarray | None = None) -> None:
    """out [T, H*Dv] against attend(*oracle): within twice the error that rounding queries, weights, and values of q8_0 and q4_0 to half makes."""
    q, keys, values, *rest = oracle
    exact, exact_lse = attend(*oracle)
    if page.value_type in ("q8_0", "q4_0"):
        values = values.astype(np.float16).astype(np.float64)
    rounded, rounded_lse = attend(q, keys, values, *rest, half=True)
    assert relative_error(out.reshape(exact.shape), exact) < FLOAT_ERROR + 2 * relative_error(rounded, exact)
    lse_limit = 1e-5 + 2 * float(np.abs(rounded_lse - exact_lse).max())
    assert lse is None or np.abs(lse.reshape(exact_lse.shape) - exact_lse).max() < lse_limit


@gpu
@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_the_oracle_and_every_division_into_launches(cuda: Any, case: tuple[Any, ...]) -> None:
    group, kv_heads, key_dim, value_dim, _, _, page_cells, cells, window, places = case
    page, layer = page_of(case), make_layer(group * kv_heads, kv_heads, key_dim, value_dim, window)
    rng = np.random.default_rng([2, group, cells, key_dim])
    cache = make_cache(rng, page, cells, places=places, first_visible=max(cells - window, 0) if window else 0)
    q = (rng.standard_normal((1, layer.num_heads * key_dim)) * 3).astype(np.float32)
    scale = 1 / np.sqrt(key_dim)
    out, part_out, part_lse = step(cuda, cache, q, layer, scale)

    exact_q = q.reshape(1, layer.num_heads, key_dim).astype(np.float64)
    if cache.num_pages <= MERGED_WITHIN:
        assert_close(out, page, exact_q, cache.keys, cache.values, cells - 1, scale, window)
    check_parts(cache, part_out, part_lse, exact_q, scale, window, lambda out, *oracle, lse: assert_close(out, page, *oracle, lse=lse))
    for cuts in divisions(cache.num_pages):
        num_sms = 7 if len(cuts) % 2 else NUM_SMS  # blocks that walk many pages, or one
        again = step(cuda, cache, q, layer, scale, cuts, repeats=2, together=1 + len(cuts) % 2, num_sms=num_sms)
        for x, y in zip((out, part_out, part_lse), again, strict=True):
            np.testing.assert_array_equal(x, y)


@gpu
def test_a_step_from_a_later_page_on(cuda: Any) -> None:
    """A sliding layer's runs begin where the window does; the parts are counted from there."""
    page, layer = PageFormat(2, 64, 64, "turbo3", "q4_0", 32), make_layer(6, 2, 64, 64, 70)
    cache = make_cache(np.random.default_rng(3), page, 203, places="two", first_visible=133)
    q = np.random.default_rng(4).standard_normal((1, 6 * 64)).astype(np.float32)
    out, _, _ = step(cuda, cache, q, layer, 0.125, (5,), first_page=133 // 32)
    assert_close(out, page, q.reshape(1, 6, 64).astype(np.float64), cache.keys, cache.values, 202, 0.125, 70)


@gpu
@pytest.mark.parametrize(
    ("key_type", "value_type", "cells"), [("q8_0", "turbo2", 9300), ("turbo4", "turbo4", 9300), ("turbo2", "turbo3", 2000)]
)
def test_where_pages_lie_changes_no_bit(cuda: Any, key_type: Any, value_type: Any, cells: int) -> None:
    page, layer = PageFormat(2, 128, 128, key_type, value_type, 256), make_layer(8, 2, 128, 128)
    q = np.random.default_rng([9, cells]).standard_normal((1, 8 * 128)).astype(np.float32)
    first, *others = (
        step(cuda, make_cache(np.random.default_rng(10), page, cells, places=places), q, layer, 0.1, cuts, together=together)
        for places, cuts, together in (("ring", (), 1), ("two", (), 1), ("shuffled", (), 1), ("two", (3, 4, 30), 1), ("shuffled", (), 2))
    )
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_array_equal(x, y)


@gpu
@pytest.mark.parametrize(("key_type", "value_type", "cells"), [("turbo2", "q8_0", 3000), ("q4_0", "turbo4", 4096), ("turbo3", "f16", 300)])
def test_merging_in_a_kernel_of_its_own_gives_the_same(cuda: Any, key_type: Any, value_type: Any, cells: int) -> None:
    page, layer = PageFormat(2, 64, 128, key_type, value_type, 256), make_layer(10, 2, 64, 128)
    cache = make_cache(np.random.default_rng(16), page, cells)
    q = np.random.default_rng(17).standard_normal((1, 10 * 64)).astype(np.float32)
    out, part_out, part_lse = step(cuda, cache, q, layer, 0.1)
    assert relative_error(merge(cuda, layer, part_out, part_lse).reshape(out.shape), out) < FLOAT_ERROR


@gpu
@pytest.mark.parametrize("shape", [(1, 2, 8, 2), (2, 2, 8, 2), (2, 4, 8, 1, False, True), (4, 1, 4, 2), (8, 1, 16, 1)])
@pytest.mark.parametrize(
    ("types", "dims", "page_cells"),
    [
        (("q8_0", "q8_0"), (128, 128), 256),
        (("q4_0", "q4_0"), (128, 128), 256),
        (("turbo4", "turbo4"), (128, 128), 256),
        (("turbo3", "turbo3"), (128, 128), 256),
        (("turbo2", "turbo2"), (128, 128), 256),
        (("turbo3", "turbo3"), (80, 80), 256),
        (("turbo2", "turbo2"), (96, 96), 256),
        (("turbo2", "q8_0"), (128, 64), 256),
        (("f16", "turbo4"), (64, 64), 256),
        (("turbo3", "f16"), (96, 112), 128),
        (("turbo4", "turbo2"), (80, 256), 256),
    ],
)
def test_forms(cuda: Any, types: tuple[Any, Any], dims: tuple[int, int], page_cells: int, shape: tuple[int, ...]) -> None:
    """Also those that no step of a few thousand cells is given."""
    form = attn_decode_coded.Form(*shape)
    if form.warps * 32 > page_cells:
        pytest.skip("a warp takes 32 cells")
    page, layer = PageFormat(2, *dims, *types, page_cells, True, True), make_layer(10, 2, *dims, 3000)
    cache = make_cache(np.random.default_rng(30), page, 20 * page_cells + 77, places="two")
    q = (np.random.default_rng(31).standard_normal((1, 10 * dims[0])) * 2).astype(np.float32)
    _, part_out, part_lse = step(cuda, cache, q, layer, 0.1, form=form, num_sms=1)
    oracle = q.reshape(1, 10, -1).astype(np.float64), cache.keys, cache.values, cache.keys.shape[0] - 1, 0.1, 3000
    assert_close(merge(cuda, layer, part_out, part_lse), page, *oracle)
    again = step(cuda, cache, q, layer, 0.1, (3, 4), form=form, num_sms=7)
    np.testing.assert_array_equal(part_out, again[1])
    np.testing.assert_array_equal(part_lse, again[2])


@gpu
@pytest.mark.parametrize(("key_type", "value_type"), [("turbo2", "turbo2"), ("turbo4", "q8_0"), ("q8_0", "turbo3")])
def test_every_page_meets_the_queries_of_its_band(cuda: Any, key_type: Any, value_type: Any) -> None:
    """Also in a block that walks pages of all three bands."""
    page, cells = PageFormat(2, 128, 128, key_type, value_type, 256), 3000
    rope = RopeConfig(128, "halves", dual_chunk=DualChunk(1024, 256, 512))
    layer = replace(make_layer(8, 2, 128, 128), rope=rope)
    cache = make_cache(np.random.default_rng(20), page, cells, places="two")
    q = (np.random.default_rng(21).standard_normal((3, 8 * 128)) * 3).astype(np.float32)
    found = [step(cuda, cache, q, layer, 0.09, cuts, num_sms=n) for cuts, n in (((), 1), ((), NUM_SMS), ((3, 7), 2))]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0][0], other[0])
    seen_as = bands(rope, 256, cache.num_pages - 1)
    values = cache.values.astype(np.float16).astype(np.float64) if value_type == "q8_0" else cache.values
    oracle = [q[i].reshape(1, 8, 128).astype(np.float64) for i in range(3)], cache.keys, cells - 1, 0.09
    borders = (seen_as.previous_page * 256, seen_as.own_page * 256)
    exact = attend_bands(oracle[0], oracle[1], cache.values, *oracle[2:], borders)
    rounded = attend_bands(oracle[0], oracle[1], values, *oracle[2:], borders, half=True)
    assert relative_error(found[0][0][None], exact) < FLOAT_ERROR + 2 * relative_error(rounded, exact)


@gpu
@pytest.mark.parametrize(("key_type", "value_type"), [("turbo4", "turbo2"), ("q8_0", "q4_0"), ("f16", "turbo3")])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_what_is_not_a_number_is_not_hidden(cuda: Any, key_type: Any, value_type: Any, side: str) -> None:
    """A group that holds one reaches its heads' results through the merge, and no other head's; of values, its elements alone."""
    page, layer = PageFormat(2, 64, 64, key_type, value_type, 256), make_layer(8, 2, 64, 64)
    rng, cells = np.random.default_rng(12), 2500
    keys, values = (rng.standard_normal((cells, 2, 64)).astype(np.float32) for _ in range(2))
    (keys if side == "keys" else values)[800, 1, 40] = np.nan
    cache = make_cache(rng, page, cells, given=(keys, values))
    q = np.random.default_rng(13).standard_normal((1, 8 * 64)).astype(np.float32)
    out, _, _ = step(cuda, cache, q, layer, 0.125)
    group = {"q8_0": 32, "q4_0": 32}.get(value_type, 64)
    hit = slice(0, 64) if side == "keys" else slice(40 // group * group, (40 // group + 1) * group)
    want = np.zeros((8, 64), bool)
    want[4:, hit] = True
    np.testing.assert_array_equal(np.isnan(out), want)


@gpu
@pytest.mark.parametrize(
    ("key_type", "value_type", "cells"), [("turbo2", "turbo2", 700), ("turbo4", "q4_0", 9000), ("q8_0", "turbo3", 256)]
)
@pytest.mark.parametrize("recorded", [False, True])
def test_what_the_kernel_before_writes_is_read_behind_it(cuda: Any, key_type: Any, value_type: Any, cells: int, recorded: bool) -> None:
    """prepare_step writes the queries and the newest cell, whose place holds another cell before, and attention begins while it runs."""
    page, layer = PageFormat(4, 128, 128, key_type, value_type, 256, True, True), make_layer(16, 4, 128, 128)
    rng = np.random.default_rng([14, cells])
    cache = make_cache(rng, page, cells, places="ring")
    qkv = cuda.upload("qkv", rng.standard_normal((1, (16 + 8) * 128)).astype(np.float32))
    table = cuda.upload("table", np.tile(np.array([1, 0], np.float32), (1, 1, 64, 1)))
    projected, position = Projected(qkv, layer, None, None, table), cuda.upload("position", np.array([cells - 1], np.int32))
    pool, memory = cuda.upload("pool", cache.pools[0]), StepMemory(cuda, layer, 0, cache.num_pages)
    run = cache.runs([pool])[0]

    def prepare() -> None:
        prepare_step.prepare_step(cuda.launcher, projected, position, run, page, memory.q, queries=True, cell=True)

    def attention() -> None:
        states = memory.parts, memory.out
        attn_decode_coded.attend_coded(cuda.launcher, position, (run,), layer, page, 0.1, *states, num_sms=NUM_SMS)
        if cache.num_pages > MERGED_WITHIN:
            attn_merge.merge_parts(cuda.launcher, memory.parts.out, memory.parts.lse, cache.num_pages, layer, memory.out)

    def both() -> None:
        prepare()
        attention()

    prepare()
    cuda.synchronize()
    attention()
    want = cuda.read(memory.out)
    assert np.isfinite(want).all()
    graph = cuda.capture(both) if recorded else None
    for _ in range(20):
        for array in (memory.q, memory.out):
            cuda.write(array, np.full(array.shape, np.nan, np.float32))
        cuda.write(pool, cache.pools[0])
        if graph is None:
            both()
        else:
            cuda.replay(graph)
        np.testing.assert_array_equal(cuda.read(memory.out), want)


# -- without a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_parts", [1, 16, 17, 100, 512, 4096])
def test_every_page_has_a_team_and_blocks_fit(num_parts: int, arch: str) -> None:
    for case in CASES:
        page, group = page_of(case), case[0]
        form = attn_decode_coded.choose_form(page, group, 3, num_parts, arch)
        assert form.few == (num_parts <= MERGED_WITHIN) and (form.teams == 1 or not form.few)
        assert form.warps * form.teams <= 32 and max(page.page_cells, 32) % (32 * form.warps) == 0
        for num_pages in {1, num_parts // 2 + 1, num_parts}:
            shape = attn_decode_coded.launch_shape(page, group, 3, num_pages, form, NUM_SMS)
            chunks, kv_heads, columns = shape.grid
            assert kv_heads == page.num_kv_heads and chunks * shape.heads >= group > (chunks - 1) * shape.heads
            assert shape.shared_bytes <= {"sm_80": 163, "sm_90a": 227, "sm_100a": 227}.get(arch, 99) << 10
            if form.few:
                assert columns == num_pages, "one page a block"
            else:
                rounds = -(-num_pages * chunks * kv_heads // (NUM_SMS * form.blocks * form.teams))
                assert -(-num_pages // (columns * form.teams)) <= rounds and (columns - 1) * form.teams < num_pages


def test_the_source_and_the_launch_agree_on_shared_memory(tmp_path: Path) -> None:
    """The compiler compares them."""
    names = {"f16": "Half", "q8_0": "Q8_0", "q4_0": "Q4_0", "turbo4": "Turbo4", "turbo3": "Turbo3", "turbo2": "Turbo2"}
    text = ['#include "attn_decode_coded.cu"', "__global__ void nothing() {}"]
    for (key, value), (key_dim, value_dim), page_cells in product(product(names, repeat=2), ((128, 128), (64, 256), (192, 96)), (32, 256)):
        page = PageFormat(8, key_dim, value_dim, key, value, page_cells, True, True)  # type: ignore[arg-type]
        for warps, teams, table in ((1, 2, False), (2, 8, True), (8, 1, False)):
            cells = page_cells // warps
            if cells < 32:
                continue
            tiles = f"{value_dim // 16} / parts_of(Slots<{names[value]}, {value_dim}, 8>::kCount, {value_dim // 16})"
            layout = (
                f"Layout<{names[key]}, {names[value]}, {key_dim}, {value_dim}, ({tiles}), {cells}, {warps}, {teams}, {str(table).lower()}>"
            )
            want = attn_decode_coded.shared_bytes(page, attn_decode_coded.Form(warps, teams, 8, 1, table=table), 3)
            text.append(f"static_assert({layout}::kQueries + 3 * {layout}::kBand == {want});")
    (tmp_path / "agreement.cu").write_text("\n".join(text))
    for source in find_csrc().iterdir():
        (tmp_path / source.name).symlink_to(source)
    compile_cubin("agreement.cu", ("nothing",), "sm_90a", tmp_path)


class NoLauncher:
    arch = "sm_90a"

    def launch(self, *_: object, **__: object) -> None:
        raise AssertionError("launched")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": DeviceArray(4096, (3, 8 * 128), "f32")}, r"q must be f32 \[1, 1024\]"),
        ({"position": DeviceArray(4096, (1,), "f32")}, "position must be i32"),
        ({"out": DeviceArray(4096, (8, 128), "f32")}, "out must be f32"),
        ({"scale": 0.0}, "scale of the scores must be positive, not 0"),
        ({"page": PageFormat(2, 128, 128, "bf16", "q8_0", 256)}, "f16 and coded types were wanted"),
        ({"page": PageFormat(2, 128, 128, "q8_0", "q8_0", 48)}, "48 cells have no kernel"),
        ({"first_page": 5}, "pages 5 to 7 from page 0 on are not among 4 parts"),
    ],
)
def test_wrong_operands_are_refused(change: dict[str, Any], message: str) -> None:
    layer = make_layer(8, 2, 128, 128)
    given: dict[str, Any] = {
        "q": DeviceArray(4096, (1, 8 * 128), "f32"),
        "position": DeviceArray(4096, (1,), "i32"),
        "out": DeviceArray(4096, (1, 8 * 128), "f32"),
        "scale": 0.1,
        "page": PageFormat(2, 128, 128, "q8_0", "turbo2", 256),
        "first_page": 0,
    } | change
    page = given["page"]
    run = PageRun(DeviceArray(4096, (4, page.page_bytes), "u8"), 4, 0, given["first_page"], 3)
    states = DeviceArray(4096, (4, 8, 128), "f32"), DeviceArray(4096, (4, 8), "f32"), DeviceArray(4096, (8,), "i32"), given["q"]
    with pytest.raises(KernelError, match=message):
        attn_decode_coded.attend_coded(
            NoLauncher(),  # type: ignore[arg-type]
            given["position"],
            (run,),
            layer,
            page,
            given["scale"],
            PartStates(0, 4, *states),
            given["out"],
            num_sms=NUM_SMS,
        )


def test_which_pages_are_this_kernels() -> None:
    def serves(*form: Any) -> bool:
        return attn_decode_coded.serves(PageFormat(1, 64, 64, *form))

    assert serves("turbo2", "f16", 256) and serves("q8_0", "q8_0", 16) and serves("f16", "f16", 256, True, True)
    assert not serves("f16", "f16", 256) and not serves("bf16", "f32", 256)


def test_bytes_moved() -> None:
    """34 bytes of turbo2 and 136 of q8_0 a cell and head; states twice, and queries and result once."""
    page, layer = PageFormat(2, 128, 128, "turbo2", "q8_0", 256), make_layer(8, 2, 128, 128)
    assert attn_decode_coded.attend_coded_bytes(1000, 4, layer, page) == 1000 * 2 * 170 + 4 * (2 * 4 * 129 * 8 + 8 * 256)
    assert attn_decode_coded.attend_coded_bytes(200, 1, layer, page) == 200 * 2 * 170 + 4 * 8 * 256
