"""Writes small GGUF files byte by byte: sound ones, and a collection of damaged or foreign ones with the error each must give.

The writer knows nothing of the reader: it takes lengths, types and offsets as they are told, right or wrong.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollkv.errors import ModelFileError, UnsupportedModelError

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 8, 2, 1, 16

Info = tuple[str, tuple[int, ...], int, int]  # name, dimensions (columns first), type number, offset


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: object) -> bytes:
    """A typed value: kind, then the bytes."""
    body = text(value) if kind == STRING else struct.pack("<" + FORMATS[kind], value)  # type: ignore[arg-type]
    return struct.pack("<I", kind) + body


def array(kind: int, values: Sequence[object], claimed: int | None = None) -> bytes:
    body = b"".join(scalar(kind, value)[4:] for value in values)
    return struct.pack("<IIQ", ARRAY, kind, len(values) if claimed is None else claimed) + body


def header(keys: list[tuple[str, bytes]], infos: list[Info], version: int = 3, counts: tuple[int, int] | None = None) -> bytes:
    num_tensors, num_keys = counts or (len(infos), len(keys))
    parts = [b"GGUF", struct.pack("<IQQ", version, num_tensors, num_keys)]
    parts += [text(key) + value for key, value in keys]
    parts += [text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset) for name, dims, kind, offset in infos]
    return b"".join(parts)


def padded(raw: bytes, alignment: int) -> bytes:
    return raw + bytes(-len(raw) % alignment)


def tiny_keys(architecture: str = "llama") -> dict[str, bytes]:
    """The metadata of a sound model of one layer."""
    return {
        "general.architecture": scalar(STRING, architecture),
        "general.name": scalar(STRING, "tiny"),
        f"{architecture}.block_count": scalar(U32, 1),
        f"{architecture}.context_length": scalar(U32, 128),
        f"{architecture}.embedding_length": scalar(U32, HIDDEN),
        f"{architecture}.feed_forward_length": scalar(U32, FFN),
        f"{architecture}.attention.head_count": scalar(U32, HEADS),
        f"{architecture}.attention.head_count_kv": scalar(U32, KV_HEADS),
        f"{architecture}.attention.layer_norm_rms_epsilon": scalar(F32, 1e-5),
        "tokenizer.ggml.tokens": array(STRING, [f"t{i}" for i in range(VOCAB)]),
        "tokenizer.ggml.scores": array(F32, [float(-i) for i in range(VOCAB)]),
    }


def tiny_tensors(num_layers: int = 1, kv_heads: tuple[int, ...] = (KV_HEADS,)) -> dict[str, np.ndarray]:
    """float32 tensors of that model, (rows, columns), random but always the same."""
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(num_layers):
        kv = kv_heads[i % len(kv_heads)] * HEAD_DIM
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,), "attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM), "ffn_norm": (HIDDEN,), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def model(
    keys: Mapping[str, bytes | None] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    infos: Mapping[str, Callable[[Info], Info]] | None = None,
    base: tuple[dict[str, bytes], dict[str, np.ndarray]] | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """The sound tiny model with changes: keys and tensors added, replaced, or dropped with None; infos bent as told."""
    base_keys, base_tensors = base or (tiny_keys(), tiny_tensors())
    merged_keys = {key: value for key, value in {**base_keys, **(keys or {})}.items() if value is not None}
    merged = {name: value for name, value in {**base_tensors, **(tensors or {})}.items() if value is not None}
    told, data = [], b""
    for name, values in merged.items():
        info: Info = (name, values.shape[::-1], 0, len(data))
        told.append((infos or {}).get(name, lambda same: same)(info))
        data = padded(data + values.astype("<f4").tobytes(), alignment)
    return padded(header(list(merged_keys.items()), told, version), alignment) + data


@dataclass(frozen=True)
class Damage:
    """One bad file: how to make it in a folder, and what must be said of it."""

    name: str
    make: Callable[[Path], Path]
    message: str  # a regular expression
    error: type[ModelFileError] = ModelFileError


def shard_set(folder: Path, stem: str = "set", count: int = 3) -> list[Path]:
    """The sound tiny model in `count` files; metadata in the first, as llama.cpp's splitter writes it."""
    tensors = list(tiny_tensors().items())
    paths = []
    for index in range(count):
        keys = tiny_keys() if index == 0 else {}
        keys |= {
            "split.no": scalar(U16, index),
            "split.count": scalar(U16, count),
            "split.tensors.count": scalar(I32, len(tensors)),
        }
        path = folder / f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"
        path.write_bytes(model(base=(keys, dict(tensors[index::count]))))
        paths.append(path)
    return paths


def _file(content: bytes, name: str = "bad.gguf") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content)
        return path

    return make


def _bent(tensor: str, change: Callable[[Info], Info]) -> Callable[[Path], Path]:
    return _file(model(infos={tensor: change}))


def _with(**keys: bytes | None) -> Callable[[Path], Path]:
    """Key names with __ for the dots."""
    return _file(model({key.replace("__", "."): value for key, value in keys.items()}))


def _folder(models: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for index in range(models):
            (folder / f"model{index}.gguf").write_bytes(model())
        return folder

    return make


def _broken_set(change: Callable[[list[Path]], Path]) -> Callable[[Path], Path]:
    return lambda folder: change(shard_set(folder))


def _drop_second(paths: list[Path]) -> Path:
    paths[1].unlink()
    return paths[2]


def _foreign_second(paths: list[Path]) -> Path:
    paths[1].write_bytes(model())
    return paths[0]


def _swapped(paths: list[Path]) -> Path:
    second = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    paths[2].write_bytes(second)
    return paths[0]


def _other_count(paths: list[Path]) -> Path:
    keys = {"split.no": scalar(U16, 1), "split.count": scalar(U16, 3), "split.tensors.count": scalar(I32, 99)}
    paths[1].write_bytes(model(base=(keys, {"odd.weight": np.zeros((2, 32), np.float32)})))
    return paths[0]


def _same_tensor_twice(paths: list[Path]) -> Path:
    keys = {"split.no": scalar(U16, 1), "split.count": scalar(U16, 3), "split.tensors.count": scalar(I32, 11)}
    paths[1].write_bytes(model(base=(keys, tiny_tensors())))
    return paths[0]


def _renamed(paths: list[Path]) -> Path:
    return paths[1].rename(paths[1].with_name("whole.gguf"))


def _hole(folder: Path) -> Path:
    """A file that claims 2^26 strings and has room for them: 2 GiB of zeros, a hole on disk."""
    path = folder / "bad.gguf"
    with path.open("wb") as file:
        file.write(header([("big", struct.pack("<IIQ", ARRAY, STRING, 1 << 26))], [], counts=(0, 1)))
        file.truncate(1 << 31)
    return path


SOUND = model()
DATA_START = len(padded(header(list(tiny_keys().items()), [(n, t.shape[::-1], 0, 0) for n, t in tiny_tensors().items()]), 32))
Q8_0, Q4_K = 8, 12

DAMAGED = [
    # not a GGUF file, or none that is supported
    Damage("missing", lambda folder: folder / "absent.gguf", "no such file"),
    Damage("missing beside others", lambda folder: _folder(2)(folder) / "absent.gguf", r"no such file; its directory has model0\.gguf"),
    Damage("directory with models", _folder(2), r"a directory; name one of its files: model0\.gguf, model1\.gguf"),
    Damage("empty directory", _folder(0), r"a directory without a \.gguf file"),
    Damage("name too long", lambda folder: folder / ("x" * 400 + ".gguf"), "cannot be read: File name too long"),
    Damage("NUL in the name", lambda folder: folder / "a\0b.gguf", "cannot be read: embedded null byte"),
    Damage("empty file", _file(b""), "the file is empty"),
    Damage("magic only", _file(b"GGUF"), "only 4 bytes long"),
    Damage("magic and version only", _file(SOUND[:8]), "only 8 bytes long"),
    Damage("HTML page", _file(b"<!DOCTYPE html><html><body>Sign in</body></html>"), "not a GGUF file: it looks like an HTML page"),
    Damage("JSON error", _file(b'{"error": "not found"}'), "looks like JSON text"),
    Damage("Git LFS pointer", _file(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "a Git LFS pointer"),
    Damage("zip archive", _file(b"PK\x03\x04" + bytes(60)), "a zip archive or a PyTorch checkpoint"),
    Damage("gzip", _file(b"\x1f\x8b\x08" + bytes(60)), "compressed with gzip"),
    Damage("safetensors", _file(struct.pack("<Q", 40) + b'{"a":1}' + bytes(40)), "safetensors"),
    Damage("GGML file", _file(b"tjgg" + bytes(60)), "from before GGUF"),
    Damage("zeros", _file(bytes(4096)), "begins with zeros"),
    Damage("other bytes", _file(b"\x89PNG\r\n\x1a\n" + bytes(60)), "begins with"),
    Damage("version 1", _file(model(version=1)), "version 1 is not supported", UnsupportedModelError),
    Damage("version 4", _file(model(version=4)), "version 4 is not supported", UnsupportedModelError),
    Damage("big-endian", _file(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64)), "big-endian", UnsupportedModelError),
    Damage("projector", _file(model({"general.type": scalar(STRING, "mmproj")})), r"projector \(mmproj\)", UnsupportedModelError),
    Damage("clip", _file(model({"general.architecture": scalar(STRING, "clip")})), r"projector \(mmproj\)", UnsupportedModelError),
    Damage("imatrix", _file(header([("general.type", scalar(STRING, "imatrix"))], [])), "importance matrix", UnsupportedModelError),
    Damage("LoRA adapter", _with(general__type=scalar(STRING, "adapter")), "LoRA adapter", UnsupportedModelError),
    Damage("other architecture", _with(general__architecture=scalar(STRING, "mamba")), "mamba is not supported", UnsupportedModelError),
    Damage("no architecture", _with(general__architecture=None), "general.architecture is missing"),
    Damage("architecture a number", _with(general__architecture=scalar(U32, 7)), "general.architecture is missing or is no text"),
    # counts and lengths
    Damage("key count wraps", _file(header([], [], counts=(0, 1 << 63)) + bytes(64)), "the key count is 9223372036854775808"),
    Damage("tensor count wraps", _file(header([], [], counts=((1 << 64) - 1, 0)) + bytes(64)), "the tensor count is 18446744073709551615"),
    Damage("key count off by one", _file(header(list(tiny_keys().items()), [], counts=(0, 12))), "cut short"),
    Damage("string of 2^62 bytes", _with(odd=struct.pack("<IQ", STRING, 1 << 62)), "text of odd ends at byte 461168601842738"),
    Damage(
        "key of 2^62 bytes", _file(SOUND[:24] + struct.pack("<Q", 1 << 62) + SOUND[32:]), "the name of key 0 claims 4611686018427387904"
    ),
    Damage("array of 2^62 strings", _with(odd=array(STRING, [], 1 << 62)), "odd claims 4611686018427387904 strings"),
    Damage("array of 2^61 floats", _with(odd=array(F32, [], 1 << 62)), "the value of odd at byte .* takes 18446744073709551616 bytes"),
    Damage("string array past the end", _with(odd=array(STRING, ["a"], 20)), "odd"),
    Damage("2^26 strings in a hole", _hole, "big has 67108864 strings", UnsupportedModelError),
    Damage("array of arrays", _with(odd=struct.pack("<IIQ", ARRAY, ARRAY, 1) * 3000), "odd is an array of arrays", UnsupportedModelError),
    Damage("unknown value type", _with(odd=struct.pack("<I", 99)), "odd at byte .* has the unknown value type 99"),
    Damage("unknown element type", _with(odd=struct.pack("<IIQ", ARRAY, 99, 1)), "unknown value type 99"),
    Damage("key twice", _file(header([("a.b", scalar(U8, 1))] * 2, []) + bytes(40)), "the key a.b is there twice"),
    Damage("key not UTF-8", _file(header([], [], counts=(0, 1)) + text(b"\xff\xfe") + scalar(U8, 1)), "not valid UTF-8"),
    Damage("name not UTF-8", _with(general__name=scalar(STRING, b"\xff")), "general.name is not valid UTF-8"),
    Damage("token not UTF-8", _with(tokenizer__ggml__tokens=array(STRING, ["a", b"\xc3"])), r"tokens\[1\] is not valid UTF-8"),
    Damage("bool of 2", _with(llama__attention__causal=struct.pack("<IB", BOOL, 2)), "neither 0 nor 1"),
    # alignment
    *(
        Damage(f"alignment {value}", _with(general__alignment=scalar(U32, value)), f"general.alignment is {value}, a power of two")
        for value in (0, 1, 3, 4, 48, 1 << 17, 1 << 30)
    ),
    Damage("alignment signed", _with(general__alignment=scalar(I32, 32)), "not a 32-bit unsigned integer"),
    Damage("alignment text", _with(general__alignment=scalar(STRING, "32")), "not a 32-bit unsigned integer"),
    Damage("alignment array", _with(general__alignment=array(U32, [32])), "not a 32-bit unsigned integer"),
    # tensors
    Damage("tensor twice", _bent("output_norm.weight", lambda i: ("token_embd.weight", *i[1:])), "token_embd.weight is there twice"),
    Damage("zero dimension", _bent("token_embd.weight", lambda i: (i[0], (32, 0), *i[2:])), r"impossible shape \(32, 0\)"),
    Damage("no dimension", _bent("token_embd.weight", lambda i: (i[0], (), *i[2:])), "has 0 dimensions"),
    Damage("five dimensions", _bent("token_embd.weight", lambda i: (i[0], (32, 8, 1, 1, 1), *i[2:])), "has 5 dimensions"),
    Damage(
        "dimensions that wrap", _bent("token_embd.weight", lambda i: (i[0], (1 << 32, 1 << 32), *i[2:])), r"of 737869762\d+ bytes present"
    ),
    Damage(
        "Q8_0 of 33 columns", _bent("token_embd.weight", lambda i: (i[0], (33, 2), Q8_0, i[3])), "33 columns, Q8_0 needs a multiple of 32"
    ),
    Damage("Q4_K of 128 columns", _bent("token_embd.weight", lambda i: (i[0], (128, 2), Q4_K, i[3])), "128 columns, Q4_K needs a .* 256"),
    Damage("misaligned tensor", _bent("output_norm.weight", lambda i: (*i[:3], i[3] + 4)), "not aligned to 32 bytes"),
    Damage("overlapping tensors", _bent("output_norm.weight", lambda i: (*i[:3], 32)), "token_embd.weight and output_norm.weight overlap"),
    Damage("offset past the end", _bent("output_norm.weight", lambda i: (*i[:3], 1 << 40)), r"\d+ of 1099511\d+ bytes present"),
    Damage("offset that wraps", _bent("output_norm.weight", lambda i: (*i[:3], (1 << 64) - 32)), "bytes present"),
    Damage("cut in the header", _file(SOUND[: DATA_START // 2]), "cut short"),
    Damage("cut in the data", _file(SOUND[: len(SOUND) // 2]), f"cut short, {len(SOUND) // 2} of {len(SOUND)} bytes present"),
    Damage("last byte missing", _file(SOUND[:-1]), f"cut short, {len(SOUND) - 1} of {len(SOUND)} bytes present"),
    Damage(
        "unknown type on a needed tensor",
        _bent("token_embd.weight", lambda i: (*i[:2], 250, i[3])),
        "has type 250, supported are F32, F16",
        UnsupportedModelError,
    ),
    Damage(
        "IQ1_S on a needed tensor",
        _bent("token_embd.weight", lambda i: (i[0], (256, 8), 19, i[3])),
        r"has type IQ1_S \(19\), supported are F32, F16",
        UnsupportedModelError,
    ),
    Damage("tensor missing", _file(model(tensors={"blk.0.ffn_up.weight": None})), "blk.0.ffn_up.weight is missing"),
    Damage(
        "tensor of another shape",
        _file(model(tensors={"blk.0.ffn_up.weight": np.zeros((40, 32), np.float32)})),
        r"blk.0.ffn_up.weight has the shape \(40, 32\), \(48, 32\)",
    ),
    # sets
    Damage("part missing", _broken_set(_drop_second), "of the 3 files of the set, missing: set-00002-of-00003.gguf"),
    Damage("part foreign", _broken_set(_foreign_second), "named as part 2 of 3, but the file says nothing of a set"),
    Damage("parts swapped", _broken_set(_swapped), r"named as part 2 of 3, but the file has split.no 2 \(from 0\)"),
    Damage("parts disagree", _broken_set(_other_count), "split.tensors.count is 99, but 11 in"),
    Damage("tensor in two parts", _broken_set(_same_tensor_twice), r"is in .*set-00001-of-00003.gguf too"),
    Damage("part renamed", _broken_set(_renamed), "named as a whole model, but the file has split.no 1"),
    Damage("part 3 of 2", _file(SOUND, "x-00003-of-00002.gguf"), "named as part 3 of 2"),
]
