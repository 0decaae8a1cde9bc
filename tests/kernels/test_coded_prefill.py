"""Prefill attention to coded pages: the bits of attention to the same pages in f16, however many are unpacked at a time; and what comes out is in the
model's frame. Cells after the newest and slots beside the run's hold NaN."""

from typing import Any

import numpy as np
import pytest

from oracle_attention import attend, make_layer, relative_error
from rollkv import kv_codes
from rollkv.backend import PageRun
from rollkv.config import PageFormat
from rollkv.cuda.kernels import attn_prefill
from rollkv.cuda.nvrtc import KernelError
from rollkv.kv_page import read_cells, write_cells
from rollkv.workspace import state_shape

gpu = pytest.mark.gpu

# group, num_kv_heads, key_dim, value_dim, key_type, value_type, page_cells, key_rotated, value_rotated, position, tokens
CASES = [
    (4, 2, 128, 128, "turbo2", "turbo2", 256, True, True, 700, 70),
    (5, 1, 64, 64, "q8_0", "q4_0", 64, False, False, 300, 65),
    (2, 2, 80, 80, "turbo3", "turbo4", 64, True, True, 131, 30),
    (1, 2, 96, 64, "q4_0", "turbo3", 32, True, True, 61, 40),
    (3, 1, 256, 256, "f16", "turbo4", 64, False, True, 190, 20),
    (2, 1, 16, 128, "turbo4", "f16", 16, True, False, 50, 33),
    (2, 1, 128, 128, "f16", "f16", 64, True, True, 100, 17),
]


@gpu
@pytest.mark.parametrize("case", CASES)
def test_pages_are_attended_as_f16_pages(cuda: Any, case: tuple[Any, ...]) -> None:
    group, position, num_tokens = case[0], *case[-2:]
    page = PageFormat(*case[1:-2])
    layer = make_layer(group * page.num_kv_heads, page.num_kv_heads, page.key_dim, page.value_dim)
    rng, num_cells, scale = np.random.default_rng([1, *case[1:4], position]), position + num_tokens, 1 / np.sqrt(page.key_dim)
    num_pages = -(-num_cells // page.page_cells)
    slots, first_slot = num_pages + 1, 2
    coded, halves = (np.full((slots, one.page_bytes), 0xFF, np.uint8) for one in (page, page.unpacked))
    keys, values = [], []
    for number in range(num_pages):
        count, slot = min(page.page_cells, num_cells - number * page.page_cells), (first_slot + number) % slots
        cells = [rng.standard_normal((count, page.num_kv_heads, dim)).astype(np.float32) for dim in (page.key_dim, page.value_dim)]
        write_cells(coded[slot], page, 0, *cells)
        rounded = [x[:, :count].swapaxes(0, 1).astype(np.float16) for x in read_cells(coded[slot], page)]
        write_cells(halves[slot], page.unpacked, 0, *(x.astype(np.float32) for x in rounded))
        keys.append(rounded[0])
        values.append(rounded[1])
    q = (rng.standard_normal((num_tokens, layer.num_heads * page.key_dim)) * 2).astype(np.float32)
    at, queries = cuda.upload("position", np.array([position], np.int32)), cuda.upload("q", q)

    def run(pool: np.ndarray, form: PageFormat, scratch_pages: int, cut: int) -> np.ndarray:
        state = cuda.upload("state", np.full(state_shape(num_tokens, layer), np.nan, np.float32))
        out = cuda.upload("out", np.full((num_tokens, layer.num_heads * page.value_dim), np.nan, np.float32))
        scratch = cuda.upload("scratch", np.full(scratch_pages * page.unpacked.page_bytes + 48, 0xFF, np.uint8))
        whole = PageRun(cuda.upload("pool", pool), slots, first_slot, 0, num_pages)
        for part in (whole.part(0, cut), whole.part(cut, num_pages - cut)):
            if part.num_pages:
                last = part.first_page + part.num_pages == num_pages
                cuda.attend_tile(queries, at, part, layer, form, scale, state, scratch, last=last, out=out)
        return np.asarray(cuda.read(out))

    wanted = run(halves, page.unpacked, 0, 0)
    for scratch_pages, cut in ((1, 0), (2, 1), (num_pages + 2, 0)):
        np.testing.assert_array_equal(run(coded, page, scratch_pages, cut), wanted)

    def oracle(half: bool) -> np.ndarray:
        exact, _ = attend(
            q.reshape(num_tokens, -1, page.key_dim).astype(np.float64), np.concatenate(keys).astype(np.float64),
            np.concatenate(values).astype(np.float64), position, scale, half=half)  # fmt: skip
        return kv_codes.turn_back(exact) if page.value_rotated else exact

    limit = 3e-6
    if attn_prefill.variant(page.unpacked, cuda.launcher.arch) != "float32":
        limit += 2 * relative_error(oracle(True), oracle(False))
    assert relative_error(wanted.reshape(num_tokens, layer.num_heads, -1), oracle(False)) < limit


@gpu
def test_scratch_without_room_for_a_page_is_refused(cuda: Any) -> None:
    page = PageFormat(1, 64, 64, "q8_0", "q8_0", 64)
    pool, x = cuda.empty("pool", (1, page.page_bytes), "u8"), cuda.empty("x", (2, 2 * 72), "f32")
    scratch = cuda.empty("scratch", (page.unpacked.page_bytes - 1,), "u8")
    q, at, layer = x.view((2, 2 * 64)), cuda.empty("position", (1,), "i32"), make_layer(2, 1, 64, 64)
    with pytest.raises(KernelError, match="hold no page of 16384"):
        cuda.attend_tile(q, at, PageRun(pool, 1, 0, 0, 1), layer, page, 1.0, x, scratch, last=True, out=q)
