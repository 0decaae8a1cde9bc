"""Every tensor of a synthetic model: which weights are random and of what size, and what the circuit sets in them.

Invariant: every column of the residual stream reaches the next matrix at unit size, at any depth and in any shape, because the sizes are
followed through the layers and the norm weights make up for them. All layers together triple the square of the random columns, so
each has its visible share in the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from rollkv.synth_blocks import RANDOM_SHARE
from rollkv.synth_circuit import (
    ANSWER,
    BLOCK,
    CODE,
    RANDOM_SHARPNESS,
    AttentionPart,
    Patch,
    attention_part,
    code_signs,
    write_nothing,
)
from rollkv.synth_shapes import CIRCUIT_COLUMNS, SynthShape

RANDOM_PART = 0.3  # gemma3's circuit layers: the random part of the square of what attention writes, in units of the circuit's part
ATTENDED = 0.7  # root mean square of what a random head of unit values puts out
FFN_INPUT = 0.5  # deviation of gate and up
FFN_PRODUCT = 0.15  # root mean square of activation(gate) * up
BIAS = 0.3  # deviation of qwen2's biases
TOP_LOGIT = 20.0  # of a token that was found
LOGIT_NOISE = 0.5  # deviation of what the random columns add to every logit

Draw = Callable[[str], np.random.Generator]


@dataclass(frozen=True)
class TensorPlan:
    """How to make one tensor: a matrix of random weights with patches on top, or a vector."""

    shape: tuple[int, ...]
    deviation: float = 0.0
    vector: np.ndarray | None = None  # float32
    patches: Callable[[], list[Patch]] = list
    table_magnitude: float = 0.0  # above zero: the rows are tokens, see synth_blocks.table_head


@dataclass(frozen=True)
class Stream:
    """Mean square of the residual stream's columns, group by group, at some depth."""

    shape: SynthShape
    code: float = CODE**2
    back: float = 0.0
    rest: float = (CODE * RANDOM_SHARE) ** 2

    @property
    def rms(self) -> float:
        """What the next norm divides by."""
        m, n = code_signs(self.shape), self.shape.hidden
        return sqrt((m * self.code + (BLOCK - m) * CODE**2 + 3 * m * self.back + (n - CIRCUIT_COLUMNS) * self.rest) / n)

    def gains(self, *, constant: bool = False) -> np.ndarray:
        """Norm weights float32 [hidden] that bring every column to unit size; the constant is shown to layer 0 alone."""
        out = np.zeros(self.shape.hidden, np.float32)
        m = code_signs(self.shape)
        out[:m] = self.rms / sqrt(self.code)
        out[m:BLOCK] = self.rms / CODE if constant else 0.0
        out[BLOCK:CIRCUIT_COLUMNS] = self.rms / CODE
        out[CIRCUIT_COLUMNS:] = self.rms / sqrt(self.rest)
        return out


class _Planner:
    """Walks through the layers, keeping the size of the stream. `plans` is complete behind the constructor."""

    def __init__(self, shape: SynthShape, draw: Draw) -> None:
        self.shape, self.draw = shape, draw
        self.plans: dict[str, TensorPlan] = {}
        self.stream = Stream(shape)
        self.written = sqrt(self.stream.rest / shape.layers)  # by a sublayer, in every random column
        scale = sqrt(shape.hidden) if shape.gemma else 1.0
        table = (shape.vocab, shape.hidden)
        self.plans["token_embd.weight"] = TensorPlan(table, CODE / scale * RANDOM_SHARE, table_magnitude=CODE / scale)
        for index in range(shape.layers):
            self._attention(index, f"blk.{index}.")
            self._feed_forward(f"blk.{index}.")
        self._vector("output_norm.weight", self._output_gains(CODE / scale if shape.tied else CODE))
        if not shape.tied:
            self.plans["output.weight"] = TensorPlan(table, CODE * RANDOM_SHARE, table_magnitude=CODE)

    def _vector(self, name: str, values: np.ndarray) -> None:
        self.plans[name] = TensorPlan(values.shape, vector=values.astype(np.float32))

    def _attention(self, index: int, prefix: str) -> None:
        shape, size, part = self.shape, self.shape.head_dim, attention_part(self.shape, index)
        self._vector(prefix + "attn_norm.weight", self.stream.gains(constant=index == 0))
        spread = 1.0 if shape.qk_norm else sqrt(RANDOM_SHARPNESS)
        for name, heads, deviation, patches in [
            ("attn_q", shape.heads, spread, part.queries),
            ("attn_k", shape.kv_heads, spread, part.keys),
            ("attn_v", shape.kv_heads, 1.0, part.values),
        ]:
            self.plans[f"{prefix}{name}.weight"] = TensorPlan((heads * size, shape.hidden), deviation / sqrt(shape.hidden), patches=patches)
            if shape.architecture == "qwen2":
                bias = BIAS * self.draw(f"{prefix}{name}.bias").standard_normal(heads * size)
                for patch in patches():
                    bias[patch.rows] = 0.0
                self._vector(f"{prefix}{name}.bias", bias)
        if shape.qk_norm:
            gain = np.full(size, sqrt(RANDOM_SHARPNESS)) if part.norm_gain is None else part.norm_gain
            self._vector(prefix + "attn_q_norm.weight", gain)
            self._vector(prefix + "attn_k_norm.weight", gain)
        random = self._random_size(part)
        deviation = random / ATTENDED / sqrt(shape.heads * size)
        self.plans[prefix + "attn_output.weight"] = TensorPlan((shape.hidden, shape.heads * size), deviation, patches=part.outputs)
        if shape.gemma:
            self._post_norm(prefix + "post_attention_norm.weight", part, random)
        back = CODE**2 if index == 0 else self.stream.back
        code = CODE**2 + ANSWER**2 if index == shape.match_layer else self.stream.code
        self.stream = replace(self.stream, code=code, back=back, rest=self.stream.rest + self.written**2)

    def _random_size(self, part: AttentionPart) -> float:
        """Size of the random columns of what a sublayer gives. Where a norm follows, it must leave the circuit's columns, which are 1, nearly
        the whole, lest the norm's divisor vary with the random ones."""
        if not self.shape.gemma:
            return self.written
        return sqrt(RANDOM_PART * part.columns / (self.shape.hidden - CIRCUIT_COLUMNS)) if part.columns else 1.0

    def _post_norm(self, name: str, part: AttentionPart, random: float) -> None:
        """gemma3's norm behind a sublayer that gives `part.columns` columns of size 1 and the random ones of size `random`."""
        rms = sqrt((part.columns + (self.shape.hidden - CIRCUIT_COLUMNS) * random**2) / self.shape.hidden)
        out = np.full(self.shape.hidden, self.written * rms / random)
        out[:CIRCUIT_COLUMNS] = part.weight * rms
        self._vector(name, out)

    def _feed_forward(self, prefix: str) -> None:
        shape = self.shape
        self._vector(prefix + "ffn_norm.weight", self.stream.gains())
        for name in ("gate", "up"):
            self.plans[f"{prefix}ffn_{name}.weight"] = TensorPlan((shape.ffn, shape.hidden), FFN_INPUT / sqrt(shape.hidden))
        random = self._random_size(AttentionPart())
        deviation = random / FFN_PRODUCT / sqrt(shape.ffn)
        self.plans[prefix + "ffn_down.weight"] = TensorPlan((shape.hidden, shape.ffn), deviation, patches=write_nothing)
        if shape.gemma:
            self._post_norm(prefix + "post_ffw_norm.weight", AttentionPart(), random)
        self.stream = replace(self.stream, rest=self.stream.rest + self.written**2)

    def _output_gains(self, magnitude: float) -> np.ndarray:
        """Codes to logits of TOP_LOGIT, the random columns to LOGIT_NOISE; random signs, so that a tied matrix does not favour the last token."""
        shape, m, rms = self.shape, code_signs(self.shape), self.stream.rms
        rest = shape.hidden - CIRCUIT_COLUMNS
        out = np.zeros(shape.hidden)
        out[:m] = TOP_LOGIT * rms / (m * ANSWER * magnitude)
        out[CIRCUIT_COLUMNS:] = LOGIT_NOISE * rms / (sqrt(rest * self.stream.rest) * magnitude * RANDOM_SHARE)
        out[CIRCUIT_COLUMNS:] *= self.draw("output_norm.weight").permutation(np.resize([1.0, -1.0], rest))
        return out


def plan_tensors(shape: SynthShape, draw: Draw) -> dict[str, TensorPlan]:
    """Every tensor of the model under its GGUF name. `draw(name)` gives random numbers that depend on the seed and the name alone."""
    return _Planner(shape, draw).plans
