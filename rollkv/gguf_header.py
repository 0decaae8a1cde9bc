"""The header of one GGUF file: a bounds-checked pass over a memory map, lazily decoded metadata, tensor views.

Invariant: every offset, count and size of a file is a Python integer and has been compared with the length of the file before it is
used, so a damaged or hostile header ends in one ModelFileError and never in a wrong read, a long wait or a large allocation. Values are
decoded when they are asked for: opening costs one walk over the header, whatever the size of the vocabulary.

Format: GGUF versions 2 and 3, little-endian (docs/gguf.md of ggml). The tables below are compared with package gguf by the tests; that
package is not imported here, because importing it takes longer than opening a model.
"""

import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollkv.errors import ModelFileError, UnsupportedModelError
from rollkv.units import round_up

# Limits far above any real model (262k tokens + 515k merges, a few thousand tensors) that keep a hostile header cheap.
MAX_ENTRIES = 1 << 16  # keys, and tensors, of one file
MAX_STRINGS = 1 << 21  # in all string arrays of one file
MAX_VALUE_BYTES = 64 << 20  # one string or one array
MAX_NAME_BYTES = (1 << 16) - 1


class TensorType(NamedTuple):
    """A tensor encoding: `block` consecutive columns take `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    number: TensorType(name, block, block_bytes)
    for number, name, block, block_bytes in [
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    ]
}  # fmt: skip
SUPPORTED_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16",
    36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0",
}  # fmt: skip

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class TensorData:
    """One tensor of a model file: shape is (rows, columns), columns contiguous; a vector has shape (columns,)."""

    name: str
    qtype: str  # GGUF's name of the type: "F32", "Q4_K", ...; "type 99" for a number that is not known here
    shape: tuple[int, ...]
    raw: np.ndarray  # uint8 [bytes], a view of the memory map; empty if the type is not known
    file: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes in the file. Cheap, also where `raw` is made on demand."""
        return self.raw.nbytes

    def without_bytes(self) -> "TensorData":
        """Name, type and shape, with `raw` empty: what a plan needs, and it holds no memory map."""
        return TensorData(self.name, self.qtype, self.shape, np.empty(0, np.uint8), self.file)


def show(text: object) -> str:
    """`text` fit for one line of an error message: printable and at most 120 characters."""
    line = str(text)
    line = line if line.isprintable() else ascii(line)
    return line if len(line) <= 120 else line[:117] + "..."


class _Entry(NamedTuple):
    """Where the value of a key lies: `length` elements of value type `kind` from byte `start` to `stop`."""

    kind: int
    is_array: bool
    length: int
    start: int
    stop: int


class Metadata(Mapping[str, object]):
    """The keys of one file. Numbers are int, float or bool, arrays of numbers NumPy arrays, arrays of strings list[str].

    A value is decoded at its first use and then kept. Raises ModelFileError for text that is not UTF-8 and for a bool beside 0 and 1.
    """

    def __init__(self, data: mmap.mmap, path: str, entries: dict[str, _Entry]) -> None:
        self._data, self._path, self._entries = data, path, entries
        self._values: dict[str, object] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> object:
        if key not in self._values:
            self._values[key] = self._decode(key, self._entries[key])
        return self._values[key]

    def _decode(self, key: str, entry: _Entry) -> object:
        raw = self._data[entry.start : entry.stop]
        if entry.kind == _STRING:
            strings = self._strings(key, raw, entry.length)
            return strings if entry.is_array else strings[0]
        if entry.kind == _BOOL and raw.translate(None, b"\0\1"):
            raise ModelFileError(f"{self._path}: {show(key)} holds a bool that is neither 0 nor 1; the file is damaged, get it again")
        numbers = np.frombuffer(raw, _NUMBERS[entry.kind])
        return numbers if entry.is_array else numbers[0].item()

    def _strings(self, key: str, raw: bytes, count: int) -> list[str]:
        strings, offset = [], 0
        try:
            for _ in range(count):  # the lengths were checked when the file was opened
                start = offset + 8
                offset = start + _U64.unpack_from(raw, offset)[0]
                strings.append(raw[start:offset].decode())
        except UnicodeDecodeError:
            place = f"{show(key)}[{len(strings)}]" if count > 1 else show(key)
            raise ModelFileError(f"{self._path}: {place} is not valid UTF-8 text; the file is damaged, get it again") from None
        return strings


class Header:
    """The header of one file, read front to back. `metadata` and `tensors` are complete once the constructor returns."""

    def __init__(self, path: Path) -> None:
        self.path = show(path)
        self.data = _map(path)
        self.size = len(self.data)
        self.pos = 8
        self._check_version()
        num_tensors = self._count("the tensor count", 32)  # an empty name, one dimension, a type and an offset
        num_keys = self._count("the key count", 13)  # an empty key, a type and one byte
        self.metadata = Metadata(self.data, self.path, self._read_keys(num_keys))
        self.alignment = self._alignment()
        self.tensors = self._read_tensors(num_tensors)

    def damaged(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}; the file is damaged, get it again")

    def _check_version(self) -> None:
        if self.size < 24:
            raise ModelFileError(f"{self.path}: only {self.size} bytes long, which is less than a GGUF header; get the file again")
        version = _U32.unpack_from(self.data, 4)[0]
        if version in (2, 3):
            return
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if 1 <= swapped < 1 << 16 <= version:
            raise UnsupportedModelError(f"{self.path}: a big-endian GGUF file (version {swapped}); convert the model as little-endian")
        raise UnsupportedModelError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3 are; convert the model again")

    def _take(self, size: int, what: str) -> int:
        """Position of the next `size` bytes, which exist."""
        start = self.pos
        if size > self.size - start:
            raise self.damaged(f"the header is cut short: {what} at byte {start} takes {size} bytes, {self.size - start} are left")
        self.pos = start + size
        return start

    def _u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self._take(8, what))[0])

    def _count(self, what: str, least_bytes: int) -> int:
        count = self._u64(what)
        if count * least_bytes > self.size:
            raise self.damaged(f"{what} is {count}, more than a file of {self.size} bytes can hold")
        if count > MAX_ENTRIES:
            raise UnsupportedModelError(f"{self.path}: {what} is {count}, at most {MAX_ENTRIES} are supported; check that it is a model")
        return count

    def _name(self, what: str) -> str:
        length = self._u64(what)
        if length > MAX_NAME_BYTES:
            raise self.damaged(f"{what} claims {length} bytes, at most {MAX_NAME_BYTES} are allowed")
        start = self._take(length, what)
        try:
            return self.data[start : self.pos].decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{what} at byte {start} is not valid UTF-8 text") from None

    def _read_keys(self, count: int) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        num_strings = 0
        for index in range(count):
            key = self._name(f"the name of key {index}")
            if key in entries:
                raise self.damaged(f"the key {show(key)} is there twice")
            entry = entries[key] = self._read_entry(key)
            num_strings += entry.length if entry.kind == _STRING else 0
            if num_strings > MAX_STRINGS:
                raise UnsupportedModelError(f"{self.path}: more than {MAX_STRINGS} strings up to {show(key)}; check that it is a model")
        return entries

    def _read_entry(self, key: str) -> _Entry:
        name = show(key)
        kind, count = self._u32(f"the type of {name}"), 1
        is_array = kind == _ARRAY
        if is_array:
            kind = self._u32(f"the element type of {name}")
            count = self._u64(f"the length of {name}")
            if kind == _ARRAY:
                raise UnsupportedModelError(f"{self.path}: {name} is an array of arrays, which no supported model has; convert it again")
        if kind == _STRING:
            start = self.pos
            if count * 8 > self.size - start:
                raise self.damaged(f"{name} claims {count} strings, {self.size - start} bytes are left")
            if count > MAX_STRINGS:
                raise UnsupportedModelError(f"{self.path}: {name} has {count} strings, at most {MAX_STRINGS} are supported")
            self._skip_strings(name, count)
        elif kind in _NUMBERS:
            start = self._take(count * np.dtype(_NUMBERS[kind]).itemsize, f"the value of {name}")
        else:
            raise self.damaged(f"{name} at byte {self.pos} has the unknown value type {kind}")
        if self.pos - start > MAX_VALUE_BYTES:
            raise UnsupportedModelError(
                f"{self.path}: the value of {name} has {self.pos - start} bytes, at most {MAX_VALUE_BYTES} are supported"
            )
        return _Entry(kind, is_array, count, start, self.pos)

    def _skip_strings(self, name: str, count: int) -> None:
        data, last, pos = self.data, self.size - 8, self.pos
        read_length = _U64.unpack_from
        for index in range(count):  # the hot loop of opening: one turn for every token and merge of the vocabulary
            if pos > last:
                raise self.damaged(f"the header is cut short: string {index} of {count} of {name} at byte {pos} is past the end")
            pos += 8 + read_length(data, pos)[0]
        if pos > self.size:
            raise self.damaged(f"the header is cut short: the text of {name} ends at byte {pos} of {self.size}")
        self.pos = pos

    def _alignment(self) -> int:
        entry = self.metadata._entries.get("general.alignment")
        if entry is None:
            return 32
        if entry.kind != _UINT32 or entry.is_array:
            raise self.damaged("general.alignment is not a 32-bit unsigned integer")
        alignment = self.metadata["general.alignment"]
        assert isinstance(alignment, int)
        if not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment is {alignment}, a power of two from 8 to 65536 was expected")
        return alignment

    def _read_tensors(self, count: int) -> dict[str, TensorData]:
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(count):
            name = self._name(f"the name of tensor {index}")
            shown = show(name)
            if name in infos:
                raise self.damaged(f"the tensor {shown} is there twice")
            num_dims = self._u32(f"the number of dimensions of {shown}")
            if not 1 <= num_dims <= 4:
                raise self.damaged(f"the tensor {shown} has {num_dims} dimensions, 1 to 4 were expected")
            dims = tuple(self._u64(f"a dimension of {shown}") for _ in range(num_dims))
            if 0 in dims:
                raise self.damaged(f"the tensor {shown} has the impossible shape {dims}")
            infos[name] = (dims, self._u32(f"the type of {shown}"), self._u64(f"the offset of {shown}"))
        return self._place(infos, round_up(self.pos, self.alignment))

    def _place(self, infos: dict[str, tuple[tuple[int, ...], int, int]], data_start: int) -> dict[str, TensorData]:
        """Views of the tensors, after a check that each lies inside the file, aligned, on bytes of its own."""
        spans: dict[str, tuple[int, int]] = {}
        for name, (dims, number, offset) in infos.items():
            if offset % self.alignment:
                raise self.damaged(f"the tensor {show(name)} at offset {offset} is not aligned to {self.alignment} bytes")
            spans[name] = (data_start + offset, data_start + offset + self._num_bytes(name, dims, number))
        needed, last = max(((stop, name) for name, (_, stop) in spans.items()), default=(0, ""))
        if needed > self.size:
            raise ModelFileError(
                f"{self.path}: cut short, {self.size} of {needed} bytes present (the tensor {show(last)} ends there); get the file again"
            )
        end, before = 0, ""
        for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
            if start < end:
                raise self.damaged(f"the tensors {show(before)} and {show(name)} overlap at byte {start}")
            end, before = max(stop, start + 1), name
        content = np.frombuffer(self.data, np.uint8)
        return {
            name: TensorData(name, _type_name(number), dims[::-1], content[spans[name][0] : spans[name][1]], self.path)
            for name, (dims, number, _) in infos.items()
        }

    def _num_bytes(self, name: str, dims: tuple[int, ...], number: int) -> int:
        if number not in TENSOR_TYPES:
            return 0
        type_name, block, block_bytes = TENSOR_TYPES[number]
        if dims[0] % block:
            raise self.damaged(f"the tensor {show(name)} has rows of {dims[0]} columns, {type_name} needs a multiple of {block}")
        num_bytes = dims[0] // block * block_bytes
        for dim in dims[1:]:
            num_bytes *= dim
        return num_bytes


def _type_name(number: int) -> str:
    return TENSOR_TYPES[number].name if number in TENSOR_TYPES else f"type {number}"


def _map(path: Path) -> mmap.mmap:
    """A read-only map of a regular file that begins with the letters GGUF."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            models = _models_in(path)
            raise ModelFileError(
                f"{show(path)}: a directory{f'; name one of its files: {models}' if models else ' without a .gguf file; name a model file'}"
            )
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise ModelFileError(f"{show(path)}: not a regular file; name a .gguf file")
        if status.st_size == 0:
            raise ModelFileError(f"{show(path)}: the file is empty; get it again")
        with open(path, "rb") as file:
            head = file.read(512)
            if head[:4] != b"GGUF":
                raise ModelFileError(f"{show(path)}: not a GGUF file: {_looks_like(head)}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        models = _models_in(path.parent)
        raise ModelFileError(f"{show(path)}: no such file; {f'its directory has {models}' if models else 'check the path'}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or a file emptied since stat
        raise ModelFileError(f"{show(path)}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _models_in(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".gguf"))
    except OSError:
        return ""
    return ", ".join(show(name) for name in names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _looks_like(head: bytes) -> str:
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")) or b"<html" in text:
        return "it looks like an HTML page, so the download did not reach the model; get it again"
    for start, what in [
        (b"version https://git-lfs", "it is a Git LFS pointer; fetch the file itself with git lfs pull"),
        (b"PK\x03\x04", "it is a zip archive or a PyTorch checkpoint; convert the model to GGUF"),
        (b"\x1f\x8b", "it is compressed with gzip; unpack it"),
        (b"\x00\x00\x00\x00", "it begins with zeros, as an unfinished download does; get it again"),
    ]:
        if head.startswith(start):
            return what
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "it is a GGML file from before GGUF; convert the model again"
    if head[8:10] == b'{"':
        return "it looks like a safetensors file; convert the model to GGUF"
    if text.startswith(b"{"):
        return "it looks like JSON text, perhaps the error message of a server; get the model again"
    return f"it begins with {show(head[:4])} where b'GGUF' was expected"
