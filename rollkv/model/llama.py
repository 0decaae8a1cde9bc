"""One layer of the llama family: llama, mistral, qwen2 (biases), qwen3 (query/key norms)."""

from rollkv.backend import Array
from rollkv.model.blocks import attention, feed_forward
from rollkv.model.step import Model, Step


def layer(model: Model, step: Step, index: int, hidden: Array) -> None:
    """hidden += attention(norm(hidden)); hidden += feed_forward(norm(hidden)). hidden f32 [T, hidden]."""
    attention(model, step, index, hidden, hidden, add=True)
    feed_forward(model, step, index, hidden, hidden, add=True)
