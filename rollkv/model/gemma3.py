"""One layer of gemma3: as the llama family, with a norm behind attention and feed-forward too. Which layers slide is in the configuration."""

from rollkv.backend import Array
from rollkv.model.blocks import attention, feed_forward
from rollkv.model.step import Model, Step


def layer(model: Model, step: Step, index: int, hidden: Array) -> None:
    """hidden += norm(attention(norm(hidden))); hidden += norm(feed_forward(norm(hidden))). hidden f32 [T, hidden]."""
    backend, weights, branch = model.backend, model.weights.layers[index], model.workspace["branch"].rows(step.num_tokens)
    attention(model, step, index, hidden, branch, add=False)
    backend.add(hidden, branch, weights.post_attention_norm)
    feed_forward(model, step, index, hidden, branch, add=False)
    backend.add(hidden, branch, weights.post_ffw_norm)
