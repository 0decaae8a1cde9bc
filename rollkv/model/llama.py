"""One layer of the llama family: llama, mistral, qwen2 (biases), qwen3 (query/key norms)."""

from rollkv.backend import Array
from rollkv.model.blocks import attention, feed_forward
from rollkv.model.step import Model, Step


def layer(model: Model, step: Step, index: int, hidden: Array, normed: Array) -> None:
    """hidden += attention(norm(hidden)); hidden += feed_forward(norm(hidden)). hidden, normed f32 [T, hidden]; normed is scratch."""
    backend, weights, eps = model.backend, model.weights.layers[index], model.config.rms_norm_eps
    backend.rms_norm(hidden, weights.attn_norm, eps, normed)
    attention(model, step, index, normed, normed)
    backend.add(hidden, normed)
    backend.rms_norm(hidden, weights.ffn_norm, eps, normed)
    feed_forward(model, step, weights, normed, normed)
    backend.add(hidden, normed)
