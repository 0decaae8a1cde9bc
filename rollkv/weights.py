"""GGUF tensors to backend weights, under their GGUF names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollkv.backend import Array, Backend, Weight
from rollkv.config import ModelConfig
from rollkv.gguf_header import TensorData
from rollkv.model_config import required_tensors


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices [rows, columns] multiply as x W^T; vectors are f32."""

    attn_norm: Array
    attn_q: Weight
    attn_k: Weight
    attn_v: Weight
    attn_output: Weight
    ffn_norm: Array
    ffn_gate: Weight
    ffn_up: Weight
    ffn_down: Weight
    attn_q_bias: Array | None = None
    attn_k_bias: Array | None = None
    attn_v_bias: Array | None = None
    attn_q_norm: Array | None = None
    attn_k_norm: Array | None = None
    post_attention_norm: Array | None = None
    post_ffw_norm: Array | None = None


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a dense decoder. `output` is token_embd where the file ties them."""

    token_embd: Weight
    output_norm: Array
    output: Weight
    layers: tuple[LayerWeights, ...]


def used_tensors(config: ModelConfig, tensors: Mapping[str, TensorData]) -> list[TensorData]:
    """The tensors that loading will take, each once, in loading order; model_config has seen that they are all there."""
    return [tensors[name] for name in required_tensors(config)]


def load_weights(
    backend: Backend, config: ModelConfig, tensors: Mapping[str, TensorData], on_progress: Callable[[int, int], None] | None = None
) -> ModelWeights:
    """Loads every used tensor; on_progress(done bytes, all bytes) after each."""
    used = used_tensors(config, tensors)
    total, done = sum(tensor.nbytes for tensor in used), 0
    loaded: dict[str, Any] = {}
    for tensor, operand in zip(used, backend.load_tensors(used), strict=True):
        loaded[tensor.name] = operand
        done += tensor.nbytes
        if on_progress is not None:
            on_progress(done, total)
    layers = tuple(_layer(index, loaded) for index in range(config.num_layers))
    token_embd = loaded["token_embd.weight"]
    return ModelWeights(token_embd, loaded["output_norm.weight"], loaded.get("output.weight", token_embd), layers)


_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "ffn_norm")
_BIASES = ("attn_q", "attn_k", "attn_v")
_OPTIONAL_NORMS = ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")


def _layer(index: int, loaded: Mapping[str, Any]) -> LayerWeights:
    found = {name: loaded[f"blk.{index}.{name}.weight"] for name in (*_MATRICES, *_NORMS)}
    found |= {f"{name}_bias": loaded.get(f"blk.{index}.{name}.bias") for name in _BIASES}
    found |= {name: loaded.get(f"blk.{index}.{name}.weight") for name in _OPTIONAL_NORMS}
    return LayerWeights(**found)
