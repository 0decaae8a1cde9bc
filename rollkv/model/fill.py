"""Cells without a prompt: random keys and values, for measuring speed at depths whose prefill would take too long."""

import numpy as np

from rollkv.model.step import Model


def append_random(model: Model, position: int, num_tokens: int, draw: np.random.Generator) -> None:
    """Appends cells position .. position + num_tokens - 1 to every layer; their pages go to the tail as a prompt's would.

    Keys and values are standard normal: about what normalised heads hold, and small enough for every cache type. All layers get the same
    numbers, since drawing them for each would take longer than the prefill that this stands in for.
    """
    backend, workspace, layers = model.backend, model.workspace, model.config.layers
    for name in ("k", "v"):
        columns = workspace[name].shape[1]
        backend.write(workspace[name], draw.standard_normal((num_tokens, columns), np.float32))
    backend.write(workspace["position"], np.array([position], np.int32))
    model.cache.begin_append(position, num_tokens)
    for index, layer in enumerate(layers):
        k = workspace["k"].view((num_tokens, layer.num_kv_heads * layer.key_dim))
        v = workspace["v"].view((num_tokens, layer.num_kv_heads * layer.value_dim))
        model.cache.append(index, k, v, workspace["position"], position)
