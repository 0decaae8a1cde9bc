"""The append kernel: bytes in the pages equal to the rounded cells, everything else untouched."""

from typing import Any

import numpy as np
import pytest

from oracle_attention import encode, page_views
from rollkv.backend import PageFormat, PageRun
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import kv_append
from rollkv.cuda.nvrtc import KernelError

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
    cuda.append(cuda.upload("k", k), cuda.upload("v", v), at, runs, page, position)
    for pool, wanted in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(cuda.read(pool), wanted)


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
    k = DeviceArray(4096, (4, 128), "f32")
    with pytest.raises(KernelError, match=message):
        kv_append.append(NoLauncher(), k, k, DeviceArray(4096, (1,), "i32"), runs, PAGE, position)  # type: ignore[arg-type]


def test_every_element_has_one_thread() -> None:
    for tokens, heads, key_dim, value_dim in [(1, 1, 16, 16), (7, 3, 64, 80), (4096, 8, 128, 256)]:
        shape = kv_append.launch_shape(tokens, heads, key_dim, value_dim)
        needed = heads * (key_dim + value_dim) // 8
        assert shape.grid[0] == tokens and needed <= shape.grid[1] * shape.threads < needed + shape.threads


def test_bytes_moved() -> None:
    assert kv_append.append_bytes(3, PAGE) == 3 * 2 * 64 * 2 * (4 + 2)
