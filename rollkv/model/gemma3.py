"""One layer of gemma3: as the llama family, with a norm behind attention and feed-forward too. Which layers slide is in the configuration."""

from rollkv.backend import Array
from rollkv.model.blocks import attention, feed_forward
from rollkv.model.step import Model, Step


def layer(model: Model, step: Step, index: int, hidden: Array, normed: Array) -> None:
    """hidden += norm(attention(norm(hidden))); hidden += norm(feed_forward(norm(hidden))). f32 [T, hidden]; normed is scratch."""
    backend, weights, eps = model.backend, model.weights.layers[index], model.config.rms_norm_eps
    assert weights.post_attention_norm is not None and weights.post_ffw_norm is not None
    backend.rms_norm(hidden, weights.attn_norm, eps, normed)
    attention(model, step, index, normed, normed)
    backend.rms_norm(normed, weights.post_attention_norm, eps, normed)
    backend.add(hidden, normed)
    backend.rms_norm(hidden, weights.ffn_norm, eps, normed)
    feed_forward(model, step, weights, normed, normed)
    backend.rms_norm(normed, weights.post_ffw_norm, eps, normed)
    backend.add(hidden, normed)
