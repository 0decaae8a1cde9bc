"""Cells without a prompt: random keys and values, for measuring speed at depths whose prefill would take too long."""

import numpy as np

from rollkv.backend import Projected
from rollkv.model.forward import enter
from rollkv.model.step import Model
from rollkv.workspace import qkv_columns


def append_random(model: Model, position: int, num_tokens: int, draw: np.random.Generator) -> None:
    """Appends cells position .. position + num_tokens - 1 to every layer; their pages go to the tail as a prompt's would.

    Keys, turned as a prompt's are, and values are standard normal: about what normalised heads hold, and small enough for every cache type. All layers get the same
    numbers, since drawing them for each would take longer than the prefill that this stands in for.
    """
    backend, workspace, layers = model.backend, model.workspace, model.config.layers
    step = enter(model, np.zeros(num_tokens, np.int32), position)
    for rope, table in step.tables.items():
        backend.rope_table(rope, step.position_array, table)
    columns = max(qkv_columns(layer) for layer in layers)
    backend.write(workspace["qkv"], draw.standard_normal((num_tokens, columns), np.float32))
    model.cache.begin_append(position, num_tokens)
    for index, layer in enumerate(layers):
        qkv = workspace["qkv"].view((num_tokens, qkv_columns(layer)))
        q = workspace["q"].view((num_tokens, layer.num_heads * layer.key_dim))
        projected = Projected(qkv, q, layer, None, None, step.tables[layer.rope])
        model.cache.append(index, projected, step.position_array, position)
