"""Block formats: dequantisation against stored values, and the device form against its definition, bit by bit."""

from pathlib import Path

import numpy as np
import pytest

from rollkv import quants
from rollkv.errors import ModelFileError, UnsupportedModelError
from rollkv.quants import (
    FORMATS,
    BlockFormat,
    ByteField,
    CodeField,
    dequantise,
    device_bytes,
    device_form,
    merge_planes,
    raw_bytes,
    split_planes,
)

FIXTURE = np.load(Path(__file__).parent / "fixtures" / "quants.npz")
STORED = [name for name in FORMATS if f"{name}_raw" in FIXTURE]


def shapes(fmt: BlockFormat) -> list[tuple[int, int]]:
    """One block; rows and columns beside tiles, steps and spans; exactly one tile and span."""
    block = fmt.elements
    return [(1, block), (5, 3 * block), (16, fmt.span), (33, 2 * fmt.span + (block if block < fmt.span else 0)), (17, fmt.span * 3)]


def random_bytes(qtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, raw_bytes(qtype, shape), dtype=np.uint8)


def test_stored_values_cover_the_types():
    assert set(FORMATS) - set(STORED) == {"F32"}


@pytest.mark.parametrize("qtype", STORED)
def test_dequantises_as_stored(qtype):
    raw, wanted = FIXTURE[f"{qtype}_raw"], FIXTURE[f"{qtype}_deq"]
    values = dequantise(qtype, raw.reshape(-1), wanted.shape)
    assert values.dtype == np.float32 and np.array_equal(values.view(np.uint32), wanted.view(np.uint32))


def test_dequantises_by_hand():
    scale = np.array([0.5], np.float16).view(np.uint8)
    codes = np.arange(32, dtype=np.int8) - 16
    assert dequantise("Q8_0", np.concatenate([scale, codes.view(np.uint8)]), (32,)).tolist() == (codes * 0.5).tolist()
    nibbles = np.arange(16, dtype=np.uint8) | np.uint8(3 << 4)
    assert dequantise("Q4_0", np.concatenate([scale, nibbles]), (1, 32)).tolist() == [[*((np.arange(16) - 8) * 0.5), *[-2.5] * 16]]
    values = np.array([1.5, -0.0, 3e38], np.float32)
    assert dequantise("F32", values.view(np.uint8), (3,)).tobytes() == values.tobytes()


def test_slices_do_not_show(monkeypatch):
    raw = random_bytes("Q6_K", (7, 512), 1)
    whole = dequantise("Q6_K", raw, (7, 512))
    monkeypatch.setattr(quants, "_SLICE_WEIGHTS", 1024)
    assert dequantise("Q6_K", raw, (7, 512)).tobytes() == whole.tobytes()


@pytest.mark.parametrize("qtype", FORMATS)
def test_fields_cover_every_bit_once(qtype):
    fmt = FORMATS[qtype]
    seen = np.zeros(fmt.nbytes * 8, int)
    for field in fmt.fields:
        if isinstance(field, ByteField):
            seen[field.offset * 8 : (field.offset + field.length) * 8] += 1
        else:
            byte, shift = field.place(np.arange(fmt.elements))
            for bit in range(field.bits):
                np.add.at(seen, byte * 8 + shift + bit, 1)
    assert (seen == 1).all()


@pytest.mark.parametrize("qtype", FORMATS)
def test_planes_hold_everything(qtype):
    for seed, shape in enumerate(shapes(FORMATS[qtype])):
        raw, form = random_bytes(qtype, shape, seed), device_form(qtype, shape)
        planes = split_planes(qtype, raw, shape)
        assert [plane.size for plane in planes] == [plane.nbytes for plane in form.planes]
        assert np.array_equal(merge_planes(qtype, planes, shape), raw)
        ends = [plane.offset + plane.nbytes for plane in form.planes]
        assert all(plane.offset % 256 == 0 for plane in form.planes)
        assert all(0 <= after.offset - end < 256 for end, after in zip(ends, form.planes[1:], strict=False))
        assert device_bytes(qtype, shape) == -(-ends[-1] // 256) * 256


def code_in_file(blocks: np.ndarray, fmt: BlockFormat, field: CodeField, row: int, column: int) -> int:
    """The code of one weight, read from the blocks of a file; 0 in the padding."""
    if row >= blocks.shape[0] or column // fmt.elements >= blocks.shape[1]:
        return 0
    e = column % fmt.elements
    block = blocks[row, column // fmt.elements]
    if field.bits == 16:
        return int(block[field.offset]) | int(block[field.offset + 1]) << 8
    if field.bits == 8:
        return int(block[field.offset + e])
    span = field.run * 8 // field.bits
    return int(block[field.offset + e // span * field.run + e % field.run]) >> (e % span // field.run * field.bits) & (
        (1 << field.bits) - 1
    )


@pytest.mark.parametrize("qtype", FORMATS)
def test_lanes_hold_what_the_fragment_wants(qtype):
    """The layout in quants.py's words, written out with loops for the last tile and span of a matrix that fills neither."""
    fmt, rows = FORMATS[qtype], 21
    columns = fmt.span * 2 - (fmt.elements if fmt.elements < fmt.span else 0)
    blocks = random_bytes(qtype, (rows, columns), 3).reshape(rows, -1, fmt.nbytes)
    steps = fmt.span // 64
    for field, plane in zip(fmt.fields, split_planes(qtype, blocks.reshape(-1), (rows, columns)), strict=True):
        share = plane.reshape(2, 2, -1)[1, 1]
        if isinstance(field, ByteField):
            wanted = np.zeros((8, 2, fmt.span // fmt.elements, field.length), np.uint8)
            for g, h, b in np.ndindex(wanted.shape[:3]):
                row, block = 16 + g + 8 * h, fmt.span // fmt.elements + b
                if row < rows and block < blocks.shape[1]:
                    wanted[g, h, b] = blocks[row, block, field.offset : field.offset + field.length]
            assert np.array_equal(share, wanted.reshape(-1))
            continue
        words = field.bits * steps
        chunk = min(4, words)
        lanes = share.view(np.uint32).reshape(words // chunk, 32, chunk).transpose(1, 0, 2).reshape(32, words)
        for lane, step, s, m, h, i in np.ndindex(32, steps, 2, 2, 2, 4):
            (g, t), quad = divmod(lane, 4), (s * 2 + m) * 2 + h
            column = fmt.span + 64 * step + 32 * s + 16 * m + 4 * t + i
            if field.bits == 16:
                word, bit = quad * 2 + i // 2, 16 * (i % 2)
            else:
                per_word = 8 // field.bits
                word, bit = quad // per_word, quad % per_word * field.bits + 8 * i
            found = int(lanes[lane, step * field.bits + word]) >> bit & ((1 << field.bits) - 1)
            assert found == code_in_file(blocks, fmt, field, 16 + g + 8 * int(h), int(column))


@pytest.mark.parametrize("qtype", FORMATS)
def test_whole_tiles_take_no_more_than_the_file(qtype):
    assert device_bytes(qtype, (4096, 4096)) == raw_bytes(qtype, (4096, 4096))


def test_vectors_are_one_row():
    assert device_form("F32", (100,)).rows == 1 and device_bytes("F32", (100,)) == 16 * 128 * 4


def test_refusals():
    with pytest.raises(UnsupportedModelError, match="IQ1_S .* not supported"):
        device_bytes("IQ1_S", (16, 256))
    with pytest.raises(UnsupportedModelError, match="Q8_K"):
        dequantise("Q8_K", np.zeros(292, np.uint8), (256,))
    with pytest.raises(ModelFileError, match="rows of 100 weights .* multiple of 32"):
        device_bytes("Q8_0", (4, 100))
    with pytest.raises(ModelFileError, match="143 bytes; 144 were wanted"):
        dequantise("Q4_K", np.zeros(143, np.uint8), (1, 256))
    with pytest.raises(ModelFileError, match="bytes"):
        split_planes("F16", np.zeros(7, np.uint8), (2, 2))
