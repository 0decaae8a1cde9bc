"""Block formats of quantised weights: dequantisation (the oracle) and the form they take on the device.

On the device a matrix keeps every bit of its file form, in another order. Rows are padded to tiles of 16 and columns to spans (64
columns, or the 256 of a super-block) with zero bytes, whose scale of zero makes them vanish. Every field of the block becomes a plane:

* codes, b bits a weight: `[tile][span][chunk][lane of 32][16 bytes]` (fewer bytes where a lane's share of a span is smaller). A lane
  holds the weights that a tensor-core fragment wants from it: lane (g, t) = g * 4 + t has, in every step of 64 columns, eight quads
  (s, m, h), numbered (s * 2 + m) * 2 + h: columns 32 s + 16 m + 4 t + i, i = 0 to 3, of row g + 8 h. Up to 8 bits a word packs 8 / b quads,
  quad number q at bit b * (q mod 8/b) of its bytes, i from the lowest byte on; of 16 bits, a quad is two words.
* scales and the like: `[tile][span][g][h][block of the span][bytes]`, unchanged bytes.

The kernels therefore load 16 bytes a lane, contiguous over the warp, and need at most one shift and one logical operation per four weights.
Planes start at multiples of 256 bytes within one allocation.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from rollkv.errors import ModelFileError, UnsupportedModelError
from rollkv.units import round_up

TILE_ROWS = 16
STEP_COLUMNS = 64
PLANE_ALIGNMENT = 256
_SLICE_WEIGHTS = 1 << 20  # weights dequantised at a time: temporaries stay below 64 MB


@dataclass(frozen=True)
class CodeField:
    """Packed integers, one per weight. Weight e of a block has its bits at byte e // span * run + e % run, shifted by (e % span) // run * bits,
    where span = run * 8 / bits: `run` neighbouring weights lie in neighbouring bytes. From 8 bits on, weights simply follow each other."""

    name: str
    offset: int  # bytes from the start of the block
    bits: int
    run: int = 0

    def place(self, e: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(byte within the block, shift) of weights e."""
        if self.bits >= 8:
            return self.offset + e * (self.bits // 8), np.zeros_like(e)
        span = self.run * 8 // self.bits
        return self.offset + e // span * self.run + e % self.run, e % span // self.run * self.bits


@dataclass(frozen=True)
class ByteField:
    """Scales, minima and the like: bytes that are moved as they are."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True)
class BlockFormat:
    """One type of GGUF. `elements` weights take `nbytes` bytes, all of them covered by the fields."""

    name: str
    elements: int
    nbytes: int
    codes: tuple[CodeField, ...]
    metas: tuple[ByteField, ...] = ()

    @property
    def span(self) -> int:
        """Columns that a warp handles together: whole blocks and whole steps."""
        return max(self.elements, STEP_COLUMNS)

    @property
    def fields(self) -> tuple[CodeField | ByteField, ...]:
        """In the order of the planes."""
        return (*self.codes, *self.metas)


def _formats() -> dict[str, BlockFormat]:
    c, m = CodeField, ByteField
    formats = (
        BlockFormat("F32", 1, 4, (c("high", 2, 16), c("low", 0, 16))),
        BlockFormat("F16", 1, 2, (c("bits", 0, 16),)),
        BlockFormat("BF16", 1, 2, (c("bits", 0, 16),)),
        BlockFormat("Q8_0", 32, 34, (c("qs", 2, 8),), (m("d", 0, 2),)),
        BlockFormat("Q4_0", 32, 18, (c("qs", 2, 4, 16),), (m("d", 0, 2),)),
        BlockFormat("Q4_1", 32, 20, (c("qs", 4, 4, 16),), (m("dm", 0, 4),)),
        BlockFormat("Q5_0", 32, 22, (c("qs", 6, 4, 16), c("qh", 2, 1, 1)), (m("d", 0, 2),)),
        BlockFormat("Q5_1", 32, 24, (c("qs", 8, 4, 16), c("qh", 4, 1, 1)), (m("dm", 0, 4),)),
        BlockFormat("Q2_K", 256, 84, (c("qs", 16, 2, 32),), (m("scales", 0, 16), m("dm", 80, 4))),
        BlockFormat("Q3_K", 256, 110, (c("qs", 32, 2, 32), c("hmask", 0, 1, 32)), (m("scales", 96, 12), m("d", 108, 2))),
        BlockFormat("Q4_K", 256, 144, (c("qs", 16, 4, 32),), (m("dm_scales", 0, 16),)),
        BlockFormat("Q5_K", 256, 176, (c("qs", 48, 4, 32), c("qh", 16, 1, 32)), (m("dm_scales", 0, 16),)),
        BlockFormat("Q6_K", 256, 210, (c("ql", 0, 4, 64), c("qh", 128, 2, 32)), (m("scales", 192, 16), m("d", 208, 2))),
        BlockFormat("IQ4_NL", 32, 18, (c("qs", 2, 4, 16),), (m("d", 0, 2),)),
        BlockFormat("IQ4_XS", 256, 136, (c("qs", 8, 4, 16),), (m("d_scales", 0, 8),)),
    )
    return {f.name: f for f in formats}


FORMATS: MappingProxyType[str, BlockFormat] = MappingProxyType(_formats())


def block_format(qtype: str) -> BlockFormat:
    """Raises UnsupportedModelError for a type that no kernel knows."""
    if qtype not in FORMATS:
        raise UnsupportedModelError(f"weights of type {qtype} are not supported; use a file whose tensors are {', '.join(FORMATS)}")
    return FORMATS[qtype]


def raw_bytes(qtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in the file. Raises ModelFileError when the columns are no whole blocks."""
    fmt = block_format(qtype)
    if shape[-1] % fmt.elements:
        raise ModelFileError(
            f"rows of {shape[-1]} weights are no whole blocks of {qtype}; a multiple of {fmt.elements} was wanted; the file is damaged"
        )
    return math.prod(shape) // fmt.elements * fmt.nbytes


def _raw_blocks(qtype: str, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [rows, blocks of a row, block bytes], a view of raw."""
    wanted = raw_bytes(qtype, shape)
    if raw.dtype != np.uint8 or raw.size != wanted:
        raise ModelFileError(
            f"a tensor of type {qtype} and shape {shape} has {raw.nbytes} bytes; {wanted} were wanted; the file is damaged"
        )
    fmt = FORMATS[qtype]
    return raw.reshape(math.prod(shape[:-1]), shape[-1] // fmt.elements, fmt.nbytes)


def dequantise(qtype: str, raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """float32 [shape] from uint8 [bytes], by the dequantisers of package gguf: the definition that every kernel is compared with.

    Raises UnsupportedModelError (type), ModelFileError (size). Memory beyond the result stays bounded.
    """
    blocks = _raw_blocks(qtype, raw, shape)
    if qtype == "F32":  # a start that has only vectors to convert need not wait for the package
        return np.ascontiguousarray(blocks).view("<f4").reshape(shape).copy()
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows, columns = blocks.shape[0], shape[-1]
    out = np.empty((rows, columns), np.float32)
    step = max(1, _SLICE_WEIGHTS // max(1, columns))
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale gives inf or NaN, which the run reports by layer
        for first in range(0, rows, step):
            part = np.ascontiguousarray(blocks[first : first + step]).reshape(-1, raw_bytes(qtype, (columns,)))
            out[first : first + step] = dequantize(part, GGMLQuantizationType[qtype])
    return out.reshape(shape)


@dataclass(frozen=True)
class Plane:
    """Where one field of the blocks lies in the device form of a matrix."""

    field: CodeField | ByteField
    offset: int  # bytes, a multiple of PLANE_ALIGNMENT
    nbytes: int


@dataclass(frozen=True)
class DeviceForm:
    """The device form of a matrix [rows, columns] of one type."""

    format: BlockFormat
    rows: int
    columns: int
    tiles: int
    spans: int  # of a row
    planes: tuple[Plane, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation, padding included."""
        last = self.planes[-1]
        return round_up(last.offset + last.nbytes, PLANE_ALIGNMENT)


def span_bytes(fmt: BlockFormat, field: CodeField | ByteField) -> int:
    """Bytes of a field in one span of one tile."""
    if isinstance(field, CodeField):
        return TILE_ROWS * fmt.span * field.bits // 8
    return TILE_ROWS * (fmt.span // max(fmt.elements, 1)) * field.length


def device_form(qtype: str, shape: tuple[int, ...]) -> DeviceForm:
    """Sizes and offsets of the planes; a vector counts as one row. Raises UnsupportedModelError, ModelFileError."""
    fmt = block_format(qtype)
    raw_bytes(qtype, shape)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    tiles, spans = -(-rows // TILE_ROWS), -(-columns // fmt.span)
    planes, offset = [], 0
    for field in fmt.fields:
        nbytes = tiles * spans * span_bytes(fmt, field)
        planes.append(Plane(field, offset, nbytes))
        offset = round_up(offset + nbytes, PLANE_ALIGNMENT)
    return DeviceForm(fmt, rows, columns, tiles, spans, tuple(planes))


def device_bytes(qtype: str, shape: tuple[int, ...]) -> int:
    """Exact bytes of a matrix on the device. Raises UnsupportedModelError, ModelFileError."""
    return device_form(qtype, shape).nbytes


def can_stack(upper_type: str, upper_shape: tuple[int, ...], lower_type: str, lower_shape: tuple[int, ...]) -> bool:
    """Whether two matrices (rows, columns), one above the other, are one on the device: the upper one's tiles, then the lower one's."""
    return upper_type == lower_type and upper_shape[1] == lower_shape[1] and upper_shape[0] % TILE_ROWS == 0


def split_planes(qtype: str, raw: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """The planes of the device form, uint8 each: the reference of csrc/repack.cu."""
    form = device_form(qtype, shape)
    blocks = _raw_blocks(qtype, raw, shape)
    fmt = form.format
    padded = np.zeros((form.tiles * TILE_ROWS, form.spans * (fmt.span // fmt.elements), fmt.nbytes), np.uint8)
    padded[: blocks.shape[0], : blocks.shape[1]] = blocks
    return tuple(_split_codes(form, f, padded) if isinstance(f, CodeField) else _split_bytes(form, f, padded) for f in fmt.fields)


def merge_planes(qtype: str, planes: tuple[np.ndarray, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of split_planes: uint8 [bytes] as in the file."""
    form = device_form(qtype, shape)
    fmt = form.format
    padded = np.zeros((form.tiles * TILE_ROWS, form.spans * (fmt.span // fmt.elements), fmt.nbytes), np.uint8)
    for field, plane in zip(fmt.fields, planes, strict=True):
        if isinstance(field, CodeField):
            _merge_codes(form, field, plane, padded)
        else:
            _merge_bytes(form, field, plane, padded)
    return np.ascontiguousarray(padded[: form.rows, : form.columns // fmt.elements]).reshape(-1)


def _split_bytes(form: DeviceForm, field: ByteField, padded: np.ndarray) -> np.ndarray:
    fmt = form.format
    part = padded[..., field.offset : field.offset + field.length]
    part = part.reshape(form.tiles, 2, 8, form.spans, fmt.span // fmt.elements, field.length)
    return np.ascontiguousarray(part.transpose(0, 3, 2, 1, 4, 5)).reshape(-1)


def _merge_bytes(form: DeviceForm, field: ByteField, plane: np.ndarray, padded: np.ndarray) -> None:
    fmt = form.format
    part = plane.reshape(form.tiles, form.spans, 8, 2, fmt.span // fmt.elements, field.length).transpose(0, 3, 2, 1, 4, 5)
    padded[..., field.offset : field.offset + field.length] = part.reshape(*padded.shape[:2], field.length)


# Axes of a plane of codes: rows are (tile, h, g); columns are (span, step, s, m, t, i).
_TO_LANES = (0, 3, 4, 2, 7, 5, 6, 1, 8)  # (tile, h, g, span, step, s, m, t, i) -> (tile, span, step, g, t, s, m, h, i)
_FROM_LANES = tuple(int(i) for i in np.argsort(_TO_LANES))


def _word_shape(form: DeviceForm, bits: int) -> tuple[int, int, int, int]:
    """(spans of all tiles, chunks, lanes, words of a chunk)."""
    words = bits * (form.format.span // STEP_COLUMNS)
    chunk = min(4, words)
    return form.tiles * form.spans, words // chunk, 32, chunk


def _code_bits(bits: int) -> np.ndarray:
    """Where the codes of one word lie, in lanes' order: [quads that share the word, codes of one of them]."""
    width = max(8, bits)
    return (np.arange(width // bits, dtype=np.uint32) * bits)[:, None] + np.arange(0, 32, width, dtype=np.uint32)


def _split_codes(form: DeviceForm, field: CodeField, padded: np.ndarray) -> np.ndarray:
    fmt, bits = form.format, field.bits
    byte, shift = field.place(np.arange(fmt.elements))
    codes = padded[..., byte].astype(np.uint32)
    if bits == 16:
        codes |= padded[..., byte + 1].astype(np.uint32) << 8
    codes = (codes >> shift.astype(np.uint32)) & np.uint32((1 << bits) - 1)
    codes = codes.reshape(form.tiles, 2, 8, form.spans, fmt.span // STEP_COLUMNS, 2, 2, 4, 4).transpose(_TO_LANES)
    at = _code_bits(bits)
    words = np.bitwise_or.reduce(codes.reshape(-1, bits, *at.shape) << at, axis=(2, 3))
    spans, chunks, lanes, chunk = _word_shape(form, bits)
    words = words.reshape(spans, -1, lanes, bits).transpose(0, 2, 1, 3).reshape(spans, lanes, chunks, chunk).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1)


def _merge_codes(form: DeviceForm, field: CodeField, plane: np.ndarray, padded: np.ndarray) -> None:
    fmt, bits = form.format, field.bits
    spans, chunks, lanes, chunk = _word_shape(form, bits)
    steps = fmt.span // STEP_COLUMNS
    words = np.ascontiguousarray(plane).view(np.uint32).reshape(spans, chunks, lanes, chunk).transpose(0, 2, 1, 3)
    words = words.reshape(spans, lanes, steps, bits).transpose(0, 2, 1, 3)
    codes = (words[..., None, None] >> _code_bits(bits)) & np.uint32((1 << bits) - 1)
    codes = codes.reshape(form.tiles, form.spans, steps, 8, 4, 2, 2, 2, 4).transpose(_FROM_LANES)
    codes = codes.reshape(*padded.shape[:2], fmt.elements)
    byte, shift = field.place(np.arange(fmt.elements))
    for e in range(fmt.elements):
        padded[..., byte[e]] |= (codes[..., e] << np.uint32(shift[e])).astype(np.uint8)
        if bits == 16:
            padded[..., byte[e] + 1] |= (codes[..., e] >> np.uint32(8)).astype(np.uint8)
