"""Synthetic models: weights of a known shape made on the fly, with a circuit that must find a needle, and a vocabulary of their own.

A SynthFile stands in for an open GGUF file. Invariant: it is a pure function of its shape, type and seed, bit for bit, on the host, on a
device and written to a file. A tensor's bytes are made when they are asked for, and only the last tensor's are kept; a matrix can also be
made piece by piece, as noise (synth_noise.py) and what is set by hand on top of it.

Prompts that work: a sentence with a value, somewhere in a text, and its beginning again at the end, up to the value, without a blank behind:
"... The secret of zebra42 is 7316. ... The secret of zebra42 is". The next token is always the one that followed the same three tokens
before, so (1) the last three tokens of the question must stand nowhere else ("4", "2", " is" here; a word of the prose or of a needle's
key is one token, other words are a token a letter), and (2) no three tokens of the value's way (" is", " ", "7"; " ", "7", "3"; ...) may
stand twice with different sequels: digits that do not repeat, and no second number behind the same word, are enough.
"""

import shutil
import struct
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.gguf_file import GgufFile, open_gguf
from rollkv.gguf_header import TENSOR_TYPES, TensorData
from rollkv.quants import raw_bytes
from rollkv.synth_blocks import encode_rows, table_head
from rollkv.synth_circuit import BLOCK, LOCAL_THETA, code_signs, codewords, rope_theta
from rollkv.synth_noise import Noise
from rollkv.synth_plan import TensorPlan, plan_tensors
from rollkv.synth_shapes import SynthShape, is_spec, parse_spec
from rollkv.synth_words import tokenizer_metadata, used_tokens
from rollkv.units import format_size, round_up
from rollkv.whole_file import check_place, whole_file

ALIGNMENT = 32
_FILE_TYPES = {"F16": 1, "Q8_0": 7, "Q4_K": 14}


class SynthTensor(TensorData):
    """One tensor of a synthetic model. `raw` is made at every use; `nbytes` says how large it is without making it."""

    def __init__(self, file: "SynthFile", name: str, plan: TensorPlan) -> None:
        qtype = "F32" if plan.vector is not None else file.shape.qtype
        fields = {"name": name, "qtype": qtype, "shape": plan.shape, "file": str(file.path), "_owner": file, "_plan": plan}
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    @property
    def raw(self) -> np.ndarray:  # type: ignore[override]
        """uint8 [bytes], read-only; the caller's alone, or the last that the file made."""
        owner: SynthFile = self.__dict__["_owner"]
        return owner.make(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of `raw`."""
        return raw_bytes(self.qtype, self.shape)

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.shape[0]

    @cached_property
    def noise(self) -> Noise:
        """The random part of a matrix. Block i of the noise is block i of the file."""
        owner, plan = self.__dict__["_owner"], self.__dict__["_plan"]
        return Noise(self.qtype, plan.deviation, owner.noise_seed(self.name))

    def by_hand(self, first_row: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """What lies over the noise in these rows of a matrix: (int64 [n] their numbers, rising; uint8 [n, width] their first bytes)."""
        owner, plan = self.__dict__["_owner"], self.__dict__["_plan"]
        if plan.table_magnitude:
            rows = np.arange(first_row, first_row + num_rows)
            return rows, table_head(self.qtype, owner.token_signs[rows], plan.table_magnitude)
        patches = [(patch, (patch.rows >= first_row) & (patch.rows < first_row + num_rows)) for patch in plan.patches()]
        patches = [(patch, inside) for patch, inside in patches if inside.any()]
        rows = np.unique(np.concatenate([np.zeros(0, np.int64), *(patch.rows[inside] for patch, inside in patches)]))
        out = np.zeros((len(rows), self.row_bytes), np.uint8)
        for patch, inside in patches:  # a later one wins
            to = np.searchsorted(rows, patch.rows[inside])
            out[to] = 0 if patch.values is None else encode_rows(self.qtype, patch.values[inside])
        return rows, out


class SynthFile(GgufFile):
    """A synthetic model under the interface of an open GGUF file. `size_bytes` counts the tensors."""

    def __init__(self, shape: SynthShape) -> None:
        self.shape = shape
        self.path = Path(shape.spec)
        self.shards = (self.path,)
        self.metadata: Mapping[str, object] = _metadata(shape)
        self._plans = plan_tensors(shape, self._draw)
        self.tensors: dict[str, TensorData] = {name: SynthTensor(self, name, plan) for name, plan in self._plans.items()}
        self.size_bytes = sum(raw_bytes(tensor.qtype, tensor.shape) for tensor in self.tensors.values())
        self._maps = []
        self._last: tuple[str, np.ndarray] | None = None

    def make(self, name: str) -> np.ndarray:
        """The bytes of a tensor, uint8 [bytes], read-only. Raises KeyError for a name that the model does not have."""
        last = self._last  # read once: threads that load ask for different tensors at the same time
        if last is not None and last[0] == name:
            return last[1]
        self._last = last = None  # its memory can be had before the next is made
        made = self._make(name)
        made.flags.writeable = False
        self._last = (name, made)
        return made

    def __enter__(self) -> "SynthFile":
        return self

    def close(self) -> None:
        """Frees the last tensor. May be called twice."""
        super().close()
        self._last = None

    def noise_seed(self, name: str) -> int:
        """64 bits that depend on the model's seed and the tensor's name alone."""
        return int(self._draw(name).bit_generator.random_raw())  # type: ignore[attr-defined]

    @cached_property
    def token_signs(self) -> np.ndarray:
        """int8 [vocab, 32]: a token's code, then the constant. Tokens that no text becomes have no code, so that none is ever chosen."""
        signs, used = code_signs(self.shape), len(used_tokens()[0])
        codes = codewords(signs)
        out = np.zeros((self.shape.vocab, BLOCK), np.int8)
        out[:, signs:] = 1
        out[:used, :signs] = codes[self._draw("codes").permutation(len(codes))[:used]]
        return out

    def _draw(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.shape.seed, zlib.crc32(name.encode())])))

    def _make(self, name: str) -> np.ndarray:
        tensor, vector = self.tensors[name], self._plans[name].vector
        if vector is not None:
            return vector.astype("<f4").view(np.uint8)
        assert isinstance(tensor, SynthTensor)
        noise = tensor.noise
        out = noise.make(tensor.nbytes // noise.block_bytes)
        rows, values = tensor.by_hand(0, tensor.shape[0])
        out.reshape(tensor.shape[0], -1)[rows, : values.shape[1]] = values
        return out


def open_synth(spec: str) -> SynthFile:
    """The model that `synth:NAME[:QTYPE][,key=value...]` describes; takes well under a second. Raises UsageError."""
    return SynthFile(parse_spec(spec))


def open_model(path: str | Path) -> GgufFile:
    """open_synth for `synth:...`, open_gguf for everything else, with their errors."""
    return open_synth(str(path)) if is_spec(path) else open_gguf(path)


def write_gguf(file: GgufFile, out: Path) -> int:
    """Writes an open model as one GGUF file of version 3 and returns its bytes. A run that is cut short leaves no file of that name.

    Raises UsageError when `out` exists or cannot be written, OutOfMemoryError when its disk has too little room.
    """
    header, data_start = _header(file)
    total = data_start + sum(round_up(raw_bytes(tensor.qtype, tensor.shape), ALIGNMENT) for tensor in file.tensors.values())
    check_place(out, str(out))
    if out.exists():
        raise UsageError(f"{out}: the file is there already; remove it, or give another name")
    if (room := shutil.disk_usage(out.parent).free) < total:
        raise OutOfMemoryError(
            f"{out}: the model takes {format_size(total)}, the disk has room for {format_size(room)}; give another place"
        )
    with whole_file(out, str(out)) as stream:
        stream.write(header.ljust(data_start, b"\0"))
        for tensor in file.tensors.values():
            raw = tensor.raw
            stream.write(np.ascontiguousarray(raw).data)
            stream.write(bytes(-len(raw) % ALIGNMENT))
    return total


def _header(file: GgufFile) -> tuple[bytes, int]:
    """(everything in front of the data, where the data begins)."""
    numbers = {kind.name: number for number, kind in TENSOR_TYPES.items()}
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(file.tensors), len(file.metadata))]
    parts += [_string(key) + _value(value) for key, value in file.metadata.items()]
    offset = 0
    for tensor in file.tensors.values():
        dims = tensor.shape[::-1]
        parts.append(_string(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, numbers[tensor.qtype], offset))
        offset += round_up(raw_bytes(tensor.qtype, tensor.shape), ALIGNMENT)
    header = b"".join(parts)
    return header, round_up(len(header), ALIGNMENT)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    """A value of metadata with its type in front: bool, unsigned or float of 32 bits, text, or an array of text, int32 or float32."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    array = np.asarray(value)
    kind = {"int32": 5, "float32": 6}[array.dtype.name]
    return struct.pack("<IIQ", 9, kind, len(array)) + array.tobytes()


def _metadata(shape: SynthShape) -> dict[str, object]:
    """As a file would hold it: numbers that are float32 there are rounded to it here."""
    prefix = shape.architecture
    keys: dict[str, object] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": float(np.float32(shape.rms_norm_eps)),
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": float(np.float32(rope_theta(shape))),
    }
    if shape.gemma:
        keys |= {"attention.sliding_window": shape.sliding_window, "rope.freq_base_swa": LOCAL_THETA}
    if (dual := shape.dual_chunk) is not None:
        keys |= {"attention.dual_chunk.chunk_size": dual.chunk_cells, "attention.dual_chunk.local_size": dual.local_cells}
        keys["attention.dual_chunk.original_context_length"] = dual.original_context
    return {
        "general.architecture": prefix,
        "general.type": "model",
        "general.name": shape.spec,
        "general.file_type": _FILE_TYPES[shape.qtype],
        "general.quantization_version": 2,
        **{f"{prefix}.{key}": value for key, value in keys.items()},
        **tokenizer_metadata(shape.vocab),
    }
