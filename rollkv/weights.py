"""GGUF tensors to backend weights: which tensors are loaded as one, and every byte they take."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rollkv.backend import Array, Backend, Loadable, RmsNorm, Stack, Weight
from rollkv.config import ModelConfig
from rollkv.gguf_header import TensorData
from rollkv.model_config import required_tensors
from rollkv.quants import can_stack, device_bytes


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices [rows, columns] multiply as x W^T; vectors are f32."""

    attn_norm: RmsNorm
    attn_qkv: Stack
    attn_output: Stack
    ffn_norm: RmsNorm
    ffn_gate_up: Stack
    ffn_down: Stack
    attn_qkv_bias: Array | None = None
    attn_q_norm: RmsNorm | None = None
    attn_k_norm: RmsNorm | None = None
    post_attention_norm: RmsNorm | None = None
    post_ffw_norm: RmsNorm | None = None


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a dense decoder. `output` is token_embd where the file ties them."""

    token_embd: Weight
    output_norm: RmsNorm
    output: Stack
    layers: tuple[LayerWeights, ...]


_NORMS = ("attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
_STACKS = ("attn_qkv", "attn_output", "ffn_gate_up", "ffn_down")
# Fields that several tensors of a layer make together.
_TOGETHER = {
    "attn_q.weight": "attn_qkv", "attn_k.weight": "attn_qkv", "attn_v.weight": "attn_qkv",
    "attn_q.bias": "attn_qkv_bias", "attn_k.bias": "attn_qkv_bias", "attn_v.bias": "attn_qkv_bias",
    "ffn_gate.weight": "ffn_gate_up", "ffn_up.weight": "ffn_gate_up",
}  # fmt: skip


def weight_bytes(config: ModelConfig, tensors: Mapping[str, TensorData]) -> dict[str, int]:
    """Device bytes of everything that load_weights takes, by the name of its first tensor."""
    parts = [part for field in _fields(config, tensors).values() for part in field]
    return {
        part.name: device_bytes(part.qtype, part.shape) if len(part.shape) == 2 else 4 * part.shape[0] for part in parts
    }  # vectors are f32


def load_weights(
    backend: Backend, config: ModelConfig, tensors: Mapping[str, TensorData], on_progress: Callable[[int, int], None] | None = None
) -> ModelWeights:
    """Loads every tensor that the forward pass reads, each once; on_progress(done bytes, all bytes) after each part."""
    parts = [(name, part) for name, field in _fields(config, tensors).items() for part in field]
    total, done = sum(part.nbytes for _, part in parts), 0
    loaded: dict[str, tuple[Any, ...]] = {}
    with closing(backend.load(part for _, part in parts)) as operands:  # whose threads must have ended when an interrupt frees the memory
        for (name, part), operand in zip(parts, operands, strict=True):
            loaded[name] = (*loaded.get(name, ()), operand)
            done += part.nbytes
            if on_progress is not None:
                on_progress(done, total)

    def norm(name: str) -> RmsNorm | None:
        return RmsNorm(loaded[name][0], config.rms_norm_eps) if name in loaded else None

    def layer(index: int) -> LayerWeights:
        found: dict[str, Any] = {name: norm(f"blk.{index}.{name}") for name in _NORMS}
        found |= {name: loaded[f"blk.{index}.{name}"] for name in _STACKS}
        return LayerWeights(attn_qkv_bias=loaded.get(f"blk.{index}.attn_qkv_bias", (None,))[0], **found)

    output_norm, token_embd = norm("output_norm"), loaded["token_embd"]
    assert output_norm is not None
    return ModelWeights(token_embd[0], output_norm, loaded.get("output", token_embd), tuple(map(layer, range(config.num_layers))))


def _fields(config: ModelConfig, tensors: Mapping[str, TensorData]) -> dict[str, tuple[Loadable, ...]]:
    """ "blk.3.attn_qkv" -> what is loaded for it, in loading order."""
    fields: dict[str, list[TensorData]] = {}
    for tensor in (tensors[name] for name in required_tensors(config)):  # model_config has seen that they are all there
        block = f"blk.{tensor.name.split('.')[1]}." if tensor.name.startswith("blk.") else ""
        rest = tensor.name.removeprefix(block)
        fields.setdefault(block + _TOGETHER.get(rest, rest.removesuffix(".weight")), []).append(tensor)
    return {name: _parts(name, members) for name, members in fields.items()}


def _parts(field: str, tensors: list[TensorData]) -> tuple[Loadable, ...]:
    """As few as can be. Files mix types within a layer; such matrices stay apart."""
    if len(tensors[0].shape) == 1:
        return (Loadable(tuple(tensors)),)
    groups = [[tensors[0]]]
    for tensor in tensors[1:]:
        upper = groups[-1][-1]
        if can_stack(upper.qtype, upper.shape, tensor.qtype, tensor.shape):
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
    # A pair is read by turns, so that its lower half must be whole tiles too: its rows are those of the upper.
    return tuple(Loadable(tuple(group), paired=field.endswith("ffn_gate_up") and len(group) == 2) for group in groups)
