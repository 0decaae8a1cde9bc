"""Cells without a prompt: random keys and values, for measuring speed at depths whose prefill would take too long."""

import numpy as np

from rollkv import split_mix
from rollkv.backend import Projected
from rollkv.model.forward import enter
from rollkv.model.step import Model
from rollkv.workspace import qkv_columns


def append_random(model: Model, position: int, num_tokens: int, seed: int) -> None:
    """Appends cells position .. position + num_tokens - 1 to every layer; their pages go to the tail as a prompt's would.

    Keys, turned as a prompt's are, and values have mean 0 and deviation 1: about what normalised heads hold, and small enough for every cache
    type. A cell's numbers depend on seed, layer and position alone. Queries, which nobody reads, are random too.
    """
    backend, workspace = model.backend, model.workspace
    step = enter(model, np.zeros(num_tokens, np.int32), position)
    for rope, table in step.tables.items():
        backend.rope_table(rope, step.position_array, workspace["prompt_cells"], table)
    model.cache.begin_append(position, num_tokens)
    for index, layer in enumerate(model.config.layers):
        columns = qkv_columns(layer)
        qkv = workspace["qkv"].view((num_tokens, columns))
        q = workspace["q"].view((num_tokens, layer.num_heads * layer.key_dim))
        backend.noise(qkv, split_mix.word(seed, index), position * columns)
        projected = Projected(qkv, layer, None, None, step.tables[layer.rope])
        model.cache.append(index, projected, step.position_array, position, q)
