"""The shapes that synthetic models have, and the words that ask for one: `synth:NAME[:QTYPE][,key=value...]`.

Sizes are those of the public models of the same name, so memory, bytes a token and arithmetic are theirs. Invariant: a SynthShape that
`parse_spec` returns can be built, and the retrieval circuit of synth_circuit.py fits into it.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rollkv.config import DualChunk
from rollkv.errors import UsageError
from rollkv.units import round_up

PREFIX = "synth:"
MAX_USED_TOKENS = 2048  # tokens that text can become: as many as there are codes of 16 signs, see synth_circuit.py
CIRCUIT_COLUMNS = 128  # of the residual stream
MAX_CONTEXT = 1 << 22  # up to here the rotations of the matching head stay below 0.2 rad
Architecture = Literal["llama", "qwen2", "qwen3", "gemma3"]
QType = Literal["Q8_0", "Q4_K", "F16"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
QTYPES: dict[QType, int] = {"Q8_0": 32, "Q4_K": 256, "F16": 32}  # columns come in multiples of this


@dataclass(frozen=True)
class SynthShape:
    """Dimensions of one model. `sliding_window` matters for gemma3 alone, whose layers slide but for every sixth."""

    name: str
    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rms_norm_eps: float = 1e-6
    tied: bool = False  # the output matrix is the embedding
    sliding_window: int = 1024
    dual_chunk: DualChunk | None = None  # what the file says of it
    qtype: QType = "Q8_0"
    seed: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def gemma(self) -> bool:
        return self.architecture == "gemma3"

    @property
    def qk_norm(self) -> bool:
        return self.architecture in ("qwen3", "gemma3")

    @property
    def match_layer(self) -> int:
        """The layer that looks for the longest match: the first behind layer 0 that attends to every cell."""
        return 5 if self.gemma else 1

    @property
    def attention_scale(self) -> float:
        """Multiplies q . k. The gemma3 of 62 layers divides by the root of another size."""
        return float((self.hidden // self.heads if self.gemma and self.layers == 62 else self.head_dim) ** -0.5)

    @property
    def spec(self) -> str:
        """The words that make this very shape again."""
        base = SHAPES[self.name]
        changed = [f"{key}={getattr(self, key)}" for key in KEYS if getattr(self, key) != getattr(_based(base, self.architecture), key)]
        if self.architecture != base.architecture:
            changed.insert(0, f"architecture={self.architecture}")
        return ",".join([f"{PREFIX}{self.name}:{self.qtype}", *changed])


KEYS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "seed")

SHAPES: dict[str, SynthShape] = {
    shape.name: shape
    for shape in (
        SynthShape("qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 40960),
        SynthShape(
            "qwen2.5-14b-1m", "qwen2", 48, 5120, 40, 8, 128, 13824, 152064, 1010000, 1e-5, dual_chunk=DualChunk(262144, 8192, 262144)
        ),
        SynthShape("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 1e-5),
        SynthShape("llama-3.2-1b", "llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, 1e-5, tied=True),
        SynthShape("gemma-3-4b", "gemma3", 34, 2560, 8, 4, 256, 10240, 262208, 131072, tied=True),
        SynthShape("tiny", "llama", 3, 256, 4, 2, 64, 256, MAX_USED_TOKENS, 65536, sliding_window=64),
    )
}


def is_spec(path: object) -> bool:
    """Whether a path names a synthetic model instead of a file."""
    return str(path).startswith(PREFIX)


def parse_spec(text: str) -> SynthShape:
    """The shape that `synth:NAME[:QTYPE][,key=value...]` asks for; the prefix may be left out.

    Raises UsageError for unknown names and keys, listing those that are known, and for shapes that cannot be.
    """
    head, *options = text.removeprefix(PREFIX).split(",")
    name, colon, qtype = head.partition(":")
    if name not in SHAPES:
        raise UsageError(f"{text}: the shape {name!r} is not known; known are {', '.join(SHAPES)}")
    qtype = qtype.upper() if colon else "Q8_0"
    if qtype not in QTYPES:
        raise UsageError(f"{text}: the weight type {qtype!r} is not known for synthetic models; known are {', '.join(QTYPES)}")
    values: dict[str, Any] = {"qtype": qtype}
    for option in options:
        key, equals, value = option.partition("=")
        key = key.replace("-", "_")
        if key not in (*KEYS, "architecture") or not equals:
            raise UsageError(f"{text}: {option!r} is no option; write key=value with the keys architecture, {', '.join(KEYS)}")
        if key in values:
            raise UsageError(f"{text}: {key} is given twice; give it once")
        values[key] = _value(text, key, value)
    shape = replace(_based(SHAPES[name], values.pop("architecture", SHAPES[name].architecture)), **values)
    _check(text, shape)
    return shape


def _value(text: str, key: str, value: str) -> int | str:
    if key == "architecture":
        if value not in ARCHITECTURES:
            raise UsageError(f"{text}: the architecture {value!r} is not known for synthetic models; known are {', '.join(ARCHITECTURES)}")
        return value
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise UsageError(f"{text}: {key}={value} is no whole number from 0 to 999,999,999; write one")
    return int(value)


def _based(base: SynthShape, architecture: Architecture) -> SynthShape:
    """A named shape in another layout: gemma3 needs a sixth layer, and ties its matrices."""
    if architecture == base.architecture:
        return base
    gemma = architecture == "gemma3"
    return replace(base, architecture=architecture, layers=max(base.layers, 6) if gemma else base.layers, tied=gemma or base.tied)


def _check(text: str, shape: SynthShape) -> None:
    block = QTYPES[shape.qtype]
    smallest_hidden = round_up(CIRCUIT_COLUMNS + 64, block)
    for key, low, high in [
        ("layers", shape.match_layer + 1, 1024),
        ("hidden", smallest_hidden, 1 << 16),
        ("heads", 3, 1 << 10),
        ("kv_heads", 1, shape.heads),
        ("head_dim", 64, 256),
        ("ffn", block, 1 << 18),
        ("vocab", MAX_USED_TOKENS, 1 << 20),
        ("context", 1, MAX_CONTEXT),
    ]:
        value = getattr(shape, key)
        if not low <= value <= high:
            raise UsageError(f"{text}: {key}={value} cannot be built for {shape.architecture} in {shape.qtype}; give {low} to {high}")
    if shape.heads % shape.kv_heads:
        raise UsageError(f"{text}: {shape.heads} heads are no multiple of {shape.kv_heads} kv_heads; give a divisor of heads")
    if shape.head_dim % 16:
        raise UsageError(f"{text}: head_dim={shape.head_dim} is no multiple of 16; give one from 64 to 256")
    for what, columns in [("hidden", shape.hidden), ("ffn", shape.ffn), ("heads x head_dim", shape.heads * shape.head_dim)]:
        if columns % block:
            raise UsageError(
                f"{text}: {what} is {columns}, but {shape.qtype} comes in blocks of {block} columns; give a multiple of {block}"
            )
