"""GGUF tensors to backend weights: which matrices are loaded as one, and every byte they take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from rollkv.backend import Array, Backend, RmsNorm, Stack, Weight
from rollkv.config import ModelConfig
from rollkv.gguf_header import TensorData
from rollkv.model_config import required_tensors
from rollkv.quants import can_stack, dequantise, device_bytes


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices [rows, columns] multiply as x W^T; vectors are f32."""

    attn_norm: RmsNorm
    attn_qkv: Stack
    attn_qkv_bias: Array | None
    attn_q_norm: RmsNorm | None
    attn_k_norm: RmsNorm | None
    attn_output: Stack
    post_attention_norm: RmsNorm | None
    ffn_norm: RmsNorm
    ffn_gate_up: Stack
    ffn_down: Stack
    post_ffw_norm: RmsNorm | None


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a dense decoder. `output` is token_embd where the file ties them."""

    token_embd: Weight
    output_norm: RmsNorm
    output: Stack
    layers: tuple[LayerWeights, ...]


# What is loaded as one, in the order of a layer; of each the tensors that the model has.
_QKV = ("attn_q.weight", "attn_k.weight", "attn_v.weight")
_QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_GATE_UP = ("ffn_gate.weight", "ffn_up.weight")
_UNITS = (
    ("attn_norm.weight",), _QKV, _QKV_BIAS, ("attn_q_norm.weight",), ("attn_k_norm.weight",), ("attn_output.weight",),
    ("post_attention_norm.weight",), ("ffn_norm.weight",), _GATE_UP, ("ffn_down.weight",), ("post_ffw_norm.weight",),
)  # fmt: skip


def used_tensors(config: ModelConfig, tensors: Mapping[str, TensorData]) -> list[TensorData]:
    """The tensors that loading will take, each once; model_config has seen that they are all there."""
    return [tensors[name] for name in required_tensors(config)]


def weight_bytes(config: ModelConfig, tensors: Mapping[str, TensorData]) -> dict[str, int]:
    """Device bytes of everything that load_weights takes, by name."""
    sizes: dict[str, int] = {}
    for unit in _units(config, tensors):
        if len(unit[0].shape) == 1:
            sizes[unit[0].name] = 4 * sum(tensor.shape[0] for tensor in unit)  # vectors are f32
        else:
            for part in stacked(unit):
                sizes[part[0].name] = device_bytes(part[0].qtype, (sum(tensor.shape[0] for tensor in part), part[0].shape[1]))
    return sizes


def load_weights(
    backend: Backend, config: ModelConfig, tensors: Mapping[str, TensorData], on_progress: Callable[[int, int], None] | None = None
) -> ModelWeights:
    """Loads every used tensor; on_progress(done bytes, all bytes) after each part."""
    units = _units(config, tensors)
    sizes = [sum(tensor.nbytes for tensor in unit) for unit in units]
    stacks: dict[str, Stack] = {}
    vectors: dict[str, Array] = {}
    for unit, done in zip(units, accumulate(sizes), strict=True):
        name = unit[0].name
        if len(unit[0].shape) == 2:
            stacks[name] = backend.load_stack(unit, paired=name.endswith(_GATE_UP[0]))
        else:
            vectors[name] = backend.upload(name, np.concatenate([dequantise(t.qtype, t.raw, t.shape) for t in unit]))
        if on_progress is not None:
            on_progress(done, sum(sizes))

    def norm(name: str) -> RmsNorm | None:
        return RmsNorm(vectors[name], config.rms_norm_eps) if name in vectors else None
