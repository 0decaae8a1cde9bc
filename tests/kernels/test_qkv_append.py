"""From projected queries, keys and values to attention: norms and rotation against float64, bytes in the pages equal to the rounded cells, everything
else untouched."""

from typing import Any

import numpy as np
import pytest

from oracle_attention import decode, encode, page_views
from rollkv import reference
from rollkv.backend import PageFormat, PageRun, Projected, RmsNorm
from rollkv.config import DualChunk, LayerConfig, RopeConfig
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import qkv_append, queries
from rollkv.cuda.nvrtc import KernelError
from rollkv.kv_codes import rotate
from rollkv.kv_page import read_cells, write_cells
from rollkv.rope import NUM_BANDS

gpu = pytest.mark.gpu

# num_kv_heads, key_dim, value_dim, key_type, value_type, page_cells
FORMATS = [
    (1, 64, 64, "f16", "f16", 64),
    (3, 64, 64, "f16", "f16", 256),
    (8, 128, 128, "f16", "bf16", 256),
    (2, 80, 96, "f32", "f16", 32),
    (5, 16, 256, "bf16", "f32", 16),
    (4, 192, 128, "bf16", "bf16", 128),
]
# position, tokens
STEPS = [(0, 1), (5, 1), (63, 1), (0, 64), (61, 7), (700, 333)]


def special_values(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Random numbers of all magnitudes, with ties, subnormals, overflow, signed zeros and infinities among them."""
    x = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-9, 6, shape)).astype(np.float32)
    hard = np.array([0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504, 65519.99, 65520, 65536, 6e-8, 2**-25, 3 * 2**-26,
                     -(2**-24), np.inf, -np.inf, 3.4e38, 1e-40], np.float32)  # fmt: skip
    flat = x.reshape(-1)
    flat[rng.integers(0, flat.size, hard.size)] = hard
    return x


@gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("step", STEPS)
def test_cells_are_rounded_to_nearest_and_nothing_else_changes(cuda: Any, form: tuple[Any, ...], step: tuple[int, int]) -> None:
    heads, key_dim, value_dim, key_type, value_type, cells = form
    position, num_tokens = step
    page = PageFormat(heads, key_dim, value_dim, key_type, value_type, cells)
    rng = np.random.default_rng([1, *step, key_dim])
    k, v = special_values(rng, (num_tokens, heads * key_dim)), special_values(rng, (num_tokens, heads * value_dim))
    first, last = position // cells, (position + num_tokens - 1) // cells
    split = (first + last + 1) // 2  # first run: pages first .. split - 1, second: split .. last; either may be missing
    slots = [last - first + 2, last - first + 3]
    starts = [int(rng.integers(0, n)) for n in slots]
    before = [rng.integers(0, 256, (n, page.page_bytes), np.uint8) for n in slots]
    pools = [cuda.upload(f"pool {i}", x) for i, x in enumerate(before)]
    spans = [(first, split - first), (split, last + 1 - split)]
    runs = tuple(PageRun(pools[i], slots[i], starts[i], *span) for i, span in enumerate(spans) if span[1])
    place = {}
    for i, (page0, count) in enumerate(spans):
        place.update({page0 + j: (i, (starts[i] + j) % slots[i]) for j in range(count)})

    with np.errstate(over="ignore"):
        coded_k = encode(k.reshape(num_tokens, heads, key_dim), key_type)
        coded_v = encode(v.reshape(num_tokens, heads, value_dim), value_type)
    expected = [x.copy() for x in before]
    for t in range(num_tokens):
        pool, slot = place[(position + t) // cells]
        keys, values = page_views(expected[pool][slot], page)
        keys[:, (position + t) % cells], values[:, (position + t) % cells] = coded_k[t], coded_v[t]

    at = cuda.upload("position", np.array([position], np.int32))
    q = special_values(rng, (num_tokens, 2 * heads * key_dim))
    layer = LayerConfig(2 * heads, heads, key_dim, value_dim, RopeConfig(dim=16, style="halves"))
    qkv, out = cuda.upload("qkv", np.concatenate([q, k, v], axis=1)), cuda.upload("q", np.full_like(q, np.nan))
    cuda.append(Projected(qkv, layer, None, None, at.view((1, num_tokens, 0, 2), "f32")), at, runs, page, position, 0, out)  # nothing turns
    np.testing.assert_array_equal(cuda.read(out), q)
    for pool, wanted in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(cuda.read(pool), wanted)


# num_kv_heads, key_dim, value_dim, key_type, value_type, page_cells, key_rotated, value_rotated
CODED = [
    (8, 128, 128, "turbo2", "turbo2", 256, True, True),
    (2, 128, 128, "q8_0", "q4_0", 256, False, False),
    (3, 64, 256, "q4_0", "q8_0", 64, True, True),
    (1, 256, 64, "turbo4", "turbo3", 32, True, True),
    (5, 80, 16, "turbo3", "turbo4", 16, True, True),
    (2, 96, 192, "turbo3", "turbo2", 128, True, True),
    (3, 128, 48, "f16", "turbo3", 64, False, True),
    (2, 16, 128, "f16", "f16", 64, True, True),
    (1, 192, 96, "q8_0", "f16", 128, False, True),
]


@gpu
@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("step", [(63, 1), (61, 70)])
def test_cells_are_coded_as_on_the_host(cuda: Any, form: tuple[Any, ...], step: tuple[int, int]) -> None:
    """Byte for byte, in the frame of the page, as the queries are."""
    position, num_tokens = step
    page = PageFormat(*form)
    rng, cells, heads = np.random.default_rng([3, *step, page.key_dim, page.value_dim]), page.page_cells, page.num_kv_heads
    k, v = (np.clip(special_values(rng, (num_tokens, heads * dim)), -1e30, 1e30) for dim in (page.key_dim, page.value_dim))
    k[0], v[-1] = 0, -0.0
    first, last = position // cells, (position + num_tokens - 1) // cells
    slots, start = last - first + 2, int(rng.integers(0, last - first + 2))
    before = rng.integers(0, 256, (slots, page.page_bytes), np.uint8)
    pool, at = cuda.upload("pool", before), cuda.upload("position", np.array([position], np.int32))
    q = rng.standard_normal((num_tokens, 2 * heads * page.key_dim)).astype(np.float32)
    layer = LayerConfig(2 * heads, heads, page.key_dim, page.value_dim, RopeConfig(dim=16, style="halves"))
    qkv, out, alone = cuda.upload("qkv", np.concatenate([q, k, v], axis=1)), *(cuda.upload("q", np.full_like(q, np.nan)) for _ in range(2))
    projected = Projected(qkv, layer, None, None, at.view((1, num_tokens, 0, 2), "f32"))  # nothing turns
    cuda.append(projected, at, (PageRun(pool, slots, start, first, last + 1 - first),), page, position, 0, out)
    cuda.queries(projected, page, 0, alone)

    def in_frame(x: np.ndarray, dim: int, rotated: bool) -> np.ndarray:
        x = x.reshape(num_tokens, -1, dim)
        with np.errstate(over="ignore", invalid="ignore"):
            return rotate(x) if rotated else x

    keys, values = in_frame(k, page.key_dim, page.key_rotated), in_frame(v, page.value_dim, page.value_rotated)
    for t in range(num_tokens):
        number, cell = divmod(position + t, cells)
        with np.errstate(over="ignore"):
            write_cells(before[(start + number - first) % slots], page, cell, keys[t : t + 1], values[t : t + 1])
    np.testing.assert_array_equal(cuda.read(pool), before)
    np.testing.assert_array_equal(cuda.read(out), in_frame(q, page.key_dim, page.key_rotated).reshape(q.shape))
    np.testing.assert_array_equal(cuda.read(alone), cuda.read(out))


@gpu
@pytest.mark.parametrize(("kind", "group"), [("q8_0", 32), ("q4_0", 32), ("turbo4", 128), ("turbo3", 128), ("turbo2", 128)])
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen_in_its_whole_group(cuda: Any, kind: Any, group: int, wrong: float) -> None:
    page = PageFormat(1, 256, 256, kind, kind, 16, group == 128, group == 128)
    x = np.random.default_rng(4).standard_normal((3, 256)).astype(np.float32)
    v = x.copy()
    v[1, 150] = wrong
    pool, at = cuda.upload("pool", np.zeros((1, page.page_bytes), np.uint8)), cuda.upload("position", np.zeros(1, np.int32))
    qkv, out = cuda.upload("qkv", np.concatenate([x, x, v], axis=1)), cuda.upload("q", x)
    projected = Projected(qkv, LayerConfig(1, 1, 256, 256, RopeConfig(16, "halves")), None, None, at.view((1, 3, 0, 2), "f32"))
    cuda.append(projected, at, (PageRun(pool, 1, 0, 0, 1),), page, 0, 0, out)
    keys, values = read_cells(cuda.read(pool)[0], page)
    assert np.isfinite(keys).all()
    first = 150 // group * group
    assert np.argwhere(np.isnan(values[0])).tolist() == [[1, d] for d in range(first, first + group)]


ROPES = [
    RopeConfig(dim=64, style="halves"),
    RopeConfig(dim=64, style="interleaved", theta=5e5),
    RopeConfig(dim=48, style="halves", theta=1e6),
    RopeConfig(dim=6, style="interleaved", theta=100.0),
    RopeConfig(dim=64, style="halves", dual_chunk=DualChunk(160, 60, 900)),
]


@gpu
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r.style} {r.dim} {r.dual_chunk}")
@pytest.mark.parametrize(("num_tokens", "key_dim", "value_dim"), [(1, 64, 64), (23, 80, 96), (300, 128, 64)])
def test_norm_and_rotation(cuda: Any, num_tokens: int, key_dim: int, value_dim: int, rope: RopeConfig, normed: bool) -> None:
    """In float32 pages, so that nothing hides behind rounding; limits as in test_elementwise. Of every band, with the cells or alone, in equal bits."""
    rng, heads, kv_heads = np.random.default_rng([num_tokens, key_dim, rope.dim, normed]), 6, 3
    page = PageFormat(kv_heads, key_dim, value_dim, "f32", "f32", 256)
    layer = LayerConfig(heads, kv_heads, key_dim, value_dim, rope)
    q, k, v = (
        rng.standard_normal((num_tokens, n)).astype(np.float32) * 3 for n in (heads * key_dim, kv_heads * key_dim, kv_heads * value_dim)
    )
    weights = [rng.standard_normal(key_dim).astype(np.float32) for _ in range(2)]
    table = reference.rope_table(rope, 1000, num_tokens).astype(np.float32)

    def finished(x: np.ndarray, count: int, weight: np.ndarray, angles: np.ndarray, kind: type) -> np.ndarray:
        x = reference.rms_norm(x.astype(kind), weight.astype(kind), 1e-6) if normed else x.astype(kind)
        return reference.rope(x, count, angles.astype(kind), rope.style)

    norms = [RmsNorm(cuda.upload("norm", weight), 1e-6) if normed else None for weight in weights]
    projected = Projected(cuda.upload("qkv", np.concatenate([q, k, v], axis=1)), layer, *norms, cuda.upload("table", table))
    at = cuda.upload("position", np.array([200], np.int32))
    for band in range(NUM_BANDS if rope.dual_chunk else 1):
        pool = cuda.upload("pool", np.full((3, page.page_bytes), 0xFF, np.uint8))
        out, alone = (cuda.upload("q", np.full_like(q, np.nan)) for _ in range(2))
        cuda.append(projected, at, (PageRun(pool, 3, 1, 0, 2),), page, 200, band, out)
        cuda.queries(projected, page, band, alone)
        np.testing.assert_array_equal(cuda.read(alone), cuda.read(out))
        raw = cuda.read(pool)
        keys, values = (np.concatenate([decode(page_views(raw[slot], page)[part], "f32") for slot in (1, 2)], axis=1) for part in (0, 1))
        got_k = keys[:, 200 : 200 + num_tokens].swapaxes(0, 1).reshape(num_tokens, -1)
        for got, *operands in ((cuda.read(out), q, heads, weights[0], table[band]), (got_k, k, kv_heads, weights[1], table[-1])):
            exact, plain = finished(*operands, np.float64), finished(*operands, np.float32)
            limit = 2 * np.abs(plain - exact).max() + np.finfo(np.float32).eps * np.abs(exact).max()
            assert np.abs(got - exact).max() <= limit
        np.testing.assert_array_equal(values[:, 200 : 200 + num_tokens].swapaxes(0, 1).reshape(num_tokens, -1), v)


class NoLauncher:
    """Fails the test when something is launched."""

    def launch(self, *args: Any, **kwargs: Any) -> None:
        pytest.fail("launched in spite of wrong operands")


PAGE = PageFormat(2, 64, 64, "f16", "f16", 32)


def run_of(first_page: int, num_pages: int, slots: int = 8) -> PageRun:
    return PageRun(DeviceArray(4096, (slots, PAGE.page_bytes), "u8"), slots, 0, first_page, num_pages)


@pytest.mark.parametrize(
    ("runs", "position", "message"),
    [
        ((run_of(0, 1),), 30, "do not lie"),
        ((run_of(1, 1),), 30, "do not lie"),
        ((), 0, "at least 1"),
        ((run_of(0, 1), run_of(2, 1)), 30, "follows one"),
        ((run_of(0, 9),), 30, "does not fit 8 slots"),
    ],
)
def test_runs_that_leave_a_cell_out_are_refused(runs: tuple[PageRun, ...], position: int, message: str) -> None:
    qkv, q, table = (DeviceArray(4096, shape, "f32") for shape in ((4, 512), (4, 256), (1, 4, 32, 2)))
    projected = Projected(qkv, LayerConfig(4, 2, 64, 64, RopeConfig(dim=64, style="halves")), None, None, table)
    with pytest.raises(KernelError, match=message):
        qkv_append.qkv_append(NoLauncher(), projected, DeviceArray(4096, (1,), "i32"), runs, PAGE, position, 0, q)  # type: ignore[arg-type]


def test_wrong_queries_are_refused() -> None:
    layer = LayerConfig(4, 2, 64, 64, RopeConfig(dim=64, style="halves"))
    qkv, q, table = (DeviceArray(4096, shape, "f32") for shape in ((4, 512), (4, 256), (1, 4, 32, 2)))
    for wrong, message in (
        ({"table": DeviceArray(4096, (4, 4, 32, 2), "f32")}, "table must be"),
        ({"table": DeviceArray(4096, (1, 4, 33, 2), "f32")}, "33 pairs and 512 columns do not fit"),
        ({"qkv": DeviceArray(4096, (4, 255), "f32")}, "255 columns do not fit 4 heads"),
        ({"qkv": qkv.rows(3), "table": DeviceArray(4096, (1, 3, 32, 2), "f32")}, "q must be"),
        ({"q_norm": RmsNorm(q, 1e-6)}, "norm must be"),
    ):
        operands = {"qkv": qkv, "layer": layer, "q_norm": None, "k_norm": None, "table": table} | wrong
        with pytest.raises(KernelError, match=message):
            queries.queries(NoLauncher(), Projected(**operands), PAGE, 0, q)  # type: ignore[arg-type]


def test_every_head_has_one_warp() -> None:
    for tokens, heads, kv_heads in [(1, 1, 1), (7, 9, 3), (4096, 32, 8)]:
        shape = qkv_append.launch_shape(tokens, heads, kv_heads)
        warps = shape.grid[1] * shape.threads // 32
        assert shape.grid[0] == tokens and heads + 2 * kv_heads <= warps < heads + 2 * kv_heads + 8
        shape = queries.launch_shape(tokens, heads)
        assert shape.grid[0] == tokens and heads <= shape.grid[1] * shape.threads // 32 < heads + 8


def test_bytes_moved() -> None:
    layer = LayerConfig(4, 2, 64, 64, RopeConfig(dim=64, style="halves"))
    assert qkv_append.qkv_append_bytes(3, layer, PAGE) == 3 * (4 * 64 * 8 + 2 * 64 * 2 * (4 + 2))
    assert queries.queries_bytes(3, 4, 64) == 3 * 4 * 64 * 8
