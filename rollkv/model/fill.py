"""Cells without a prompt: random keys and values, for measuring speed at depths whose prefill would take too long."""

import numpy as np

from rollkv.backend import Projected
from rollkv.config import LayerConfig
from rollkv.model.forward import enter
from rollkv.model.step import Model
from rollkv.workspace import qkv_columns


def append_random(model: Model, position: int, num_tokens: int, draw: np.random.Generator) -> None:
    """Appends cells position .. position + num_tokens - 1 to every layer; their pages go to the tail as a prompt's would.

    Keys, turned as a prompt's are, and values are standard normal: about what normalised heads hold, and small enough for every cache type.
    All layers get the same numbers, since drawing them for each would take longer than the prefill that this stands in for; queries, which nobody
    reads, are zero.
    """
    backend, workspace, layers = model.backend, model.workspace, model.config.layers
    step = enter(model, np.zeros(num_tokens, np.int32), position)
    for rope, table in step.tables.items():
        backend.rope_table(rope, step.position_array, workspace["prompt_cells"], table)
    drawn = draw.standard_normal((num_tokens, max(_kv_columns(layer) for layer in layers)), np.float32)
    written: tuple[int, int] | None = None
    model.cache.begin_append(position, num_tokens)
    for index, layer in enumerate(layers):
        qkv = workspace["qkv"].view((num_tokens, qkv_columns(layer)))
        q = workspace["q"].view((num_tokens, layer.num_heads * layer.key_dim))
        if written != (q.shape[1], qkv.shape[1]):  # layers of one geometry share what was written for the first
            written = q.shape[1], qkv.shape[1]
            values: np.ndarray = np.zeros(qkv.shape, np.float32)
            values[:, q.shape[1] :] = drawn[:, : _kv_columns(layer)]
            backend.write(qkv, values)
        projected = Projected(qkv, layer, None, None, step.tables[layer.rope])
        model.cache.append(index, projected, step.position_array, position, q)


def _kv_columns(layer: LayerConfig) -> int:
    return layer.num_kv_heads * (layer.key_dim + layer.value_dim)
