"""Cells in the bytes of a page: where they lie, that they come back, and pages encoded anew."""

import numpy as np
import pytest

from rollkv import kv_codes
from rollkv.config import PageFormat
from rollkv.kv_page import read_cells, reencode_cells, write_cells
from rollkv.kv_types import KV_TYPES

PAIRS = [("f16", "f16"), ("bf16", "f32"), ("q8_0", "turbo3"), ("turbo2", "q4_0"), ("f16", "turbo4"), ("turbo3", "turbo3")]


def page_of(key: str, value: str, rotated: bool = False) -> PageFormat:
    return PageFormat(3, 64, 96, key, value, 32, rotated, rotated)  # type: ignore[arg-type]


def cells(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng()
    return rng.standard_normal((count, 3, 64)).astype(np.float32), rng.standard_normal((count, 3, 96)).astype(np.float32)


def test_a_coded_page_by_hand() -> None:
    """A head's words of all cells, four cells by turns, then its scales likewise, then the next head; values behind keys."""
    page, raw = page_of("q8_0", "turbo2"), np.full(page_of("q8_0", "turbo2").page_bytes, 0xFF, np.uint8)
    keys, values = np.zeros((1, 3, 64), np.float32), np.zeros((1, 3, 96), np.float32)
    keys[0, 1, 33] = 127.0  # second group: scale 1
    values[0, 2] = -0.75
    write_cells(raw, page, 5, keys, values)  # the second cell of the second four
    head = 32 * (64 + 2 * 2)
    codes = raw[head:][: 32 * 64].reshape(8, 16, 4, 4)  # fours of cells, words, cells, bytes
    assert codes[1, 8, 1].tolist() == [128, 255, 128, 128] and (np.delete(codes[1], 1, axis=1) == 0xFF).all()
    scales = raw[head + 32 * 64 :][: 32 * 4].view(np.float16).reshape(8, 2, 4)
    assert scales[1, :, 1].tolist() == [0, 1] and np.isnan(scales).sum() == 62, "no other cell is touched"
    values_begin, head = 3 * head, 32 * (24 + 3 * 2)
    assert page.key_bytes == values_begin and page.page_bytes == values_begin + 3 * head
    codes = raw[values_begin + 2 * head :][: 32 * 24].view("<u4").reshape(8, 6, 4)
    scales = raw[values_begin + 2 * head + 32 * 24 :][: 32 * 6].view(np.float16).reshape(8, 3, 4)
    assert codes[1, :, 1].tolist() == [0] * 6 and scales[1, :, 1].tolist() == [0.5] * 3, "-1 / 0.99 is nearer to -1.5 than to -0.5"


@pytest.mark.parametrize("key,value", PAIRS)
def test_what_is_written_is_read(key: str, value: str) -> None:
    page = page_of(key, value)
    raw = np.full(page.page_bytes, 0xFF, np.uint8)
    keys, values = cells(32)
    for begin, end in ((7, 20), (0, 7), (20, 30)):
        write_cells(raw, page, begin, keys[begin:end], values[begin:end])
    for got, want, name in zip(read_cells(raw, page), (keys, values), (key, value), strict=True):
        got = got.swapaxes(0, 1).astype(np.float32)
        assert np.isnan(got[30:]).all(), "what was not written is NaN in every type"
        if KV_TYPES[name].coded:
            np.testing.assert_array_equal(got[:30], kv_codes.decode(*kv_codes.encode(want[:30], name), name, want.shape[-1]))
        else:
            np.testing.assert_allclose(got[:30], want[:30], rtol=2**-8 if name == "bf16" else 2**-11, atol=2**-25)


@pytest.mark.parametrize(
    "source,target",
    [(("f16", "f16"), ("q8_0", "turbo3")), (("q8_0", "turbo4"), ("q4_0", "turbo4")), (("f16", "turbo3"), ("f16", "turbo2"))],
)
def test_pages_are_encoded_anew(source: tuple[str, str], target: tuple[str, str]) -> None:
    """As their cells are read; what keeps its type keeps its bytes."""
    page, other = page_of(*source, rotated=True), page_of(*target, rotated=True)
    raw, got = np.zeros(page.page_bytes, np.uint8), np.full(other.page_bytes, 0xFF, np.uint8)
    write_cells(raw, page, 0, *cells(32))
    reencode_cells(raw, page, got, other)
    want = np.zeros(other.page_bytes, np.uint8)
    write_cells(want, other, 0, *(x.swapaxes(0, 1).astype(np.float32) for x in read_cells(raw, page)))
    sides = ((np.s_[: other.key_bytes], np.s_[: page.key_bytes]), (np.s_[other.key_bytes :], np.s_[page.key_bytes :]))
    for (ours, theirs), name, other_name in zip(sides, source, target, strict=True):
        np.testing.assert_array_equal(got[ours], raw[theirs] if name == other_name else want[ours])
