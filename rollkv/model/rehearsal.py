"""Every kind of step that a run can take, gone through on a backend that issues nothing, so that it learns what to load for them.

Layers that are alike are gone through once. Steps take each power of two up to the ubatch, and the ubatch, or a chunk of dual chunk attention if that is
less: kernels and products are chosen by ranges of rows, and a prompt's last ubatch has any number of them. A single token is taken behind each
power of two of cells, and behind all: its kernels are chosen by ranges of pages.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rollkv.backend import Backend
from rollkv.budget import plan_budget
from rollkv.config import CacheConfig, ModelConfig, SamplingParams
from rollkv.gguf_header import TensorData
from rollkv.kv_cache import KVCache
from rollkv.kv_formats import page_formats, tail_formats
from rollkv.model.forward import choose, enter, forward, logits
from rollkv.model.step import Model, take_workspace
from rollkv.model_config import required_tensors
from rollkv.weights import load_weights
from rollkv.workspace import MAX_FEW_ROWS, SLAB_BYTES, ropes_of, widest_added, widest_input


def rehearse(backend: Backend, config: ModelConfig, cache: CacheConfig, tensors: Mapping[str, TensorData]) -> None:
    """Loads and runs the model on a backend that keeps no memory and computes nothing."""
    rows = min(cache.ubatch, cache.ctx_size)
    backend.reserve_linear(rows, widest_input(config), widest_added(config), SLAB_BYTES)
    weights = load_weights(backend, config, tensors)
    kept = tuple(_different_layers(config, cache, tensors))
    few = replace(config, layers=tuple(config.layers[index] for index in kept))
    page, tail_page = (tuple(formats[index] for index in kept) for formats in (page_formats(config, cache), tail_formats(config, cache)))
    # A tail of other types takes other kernels, a window of one page meets them and all others; else where pages lie makes no difference.
    held = replace(cache, residency="full", window_cells=None, protect_layers=0)
    if page != tail_page:
        held = replace(held, residency="window", window_cells=cache.page_cells)
    pages = KVCache(backend, few, held, plan_budget(few, held, {}, {}), page, tail_page)
    weights = replace(weights, layers=tuple(weights.layers[index] for index in kept))
    model = Model(backend, few, weights, pages, take_workspace(backend, few, cache), ropes_of(few))
    strides = {rope.dual_chunk.stride_cells for rope in ropes_of(few) if rope.dual_chunk is not None}  # beyond which no step reaches
    most = min((rows, *strides))
    steps = [(tokens, 0) for tokens in sorted({most, *(1 << n for n in range(most.bit_length()))})]
    counts = sorted({cache.ctx_size, *(1 << n for n in range(cache.ctx_size.bit_length()))})
    # On both sides of each: a sliding window reaches one page more where its ends lie inside pages.
    steps += [(1, position) for cells in counts for position in (cells - 1, cells) if position < cache.ctx_size]
    # Where the second chunk begins, queries turn more than once.
    steps += [(2, position) for position in sorted(strides) if position + 2 <= cache.ctx_size]
    if page != tail_page and cache.page_cells + 2 <= cache.ctx_size:  # several tokens behind a tail
        steps.append((2, cache.page_cells))
    for tokens, position in steps:
        hidden = forward(model, enter(model, np.zeros(tokens, np.int32), position))
        rows_out = logits(model, hidden.rows(min(tokens, MAX_FEW_ROWS)))
    backend.noise(model.workspace["qkv"], 0, 0)  # of random cells, which are appended as a prompt's are
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)):  # greedy, and all that any other takes
        choose(model, rows_out.rows(1), sampling)


def _different_layers(config: ModelConfig, cache: CacheConfig, tensors: Mapping[str, TensorData]) -> list[int]:
    """The first of all layers that agree in geometry, in the types of their pages, and in the types and shapes of their weights."""
    weights: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for name in required_tensors(config):
        number, _, rest = name.removeprefix("blk.").partition(".")
        weights.setdefault(number, []).append((rest, tensors[name].qtype, tensors[name].shape))
    first: dict[object, int] = {}
    pages = zip(page_formats(config, cache), tail_formats(config, cache), strict=True)
    for index, (layer, formats) in enumerate(zip(config.layers, pages, strict=True)):
        first.setdefault((layer, formats, tuple(weights[str(index)])), index)
    return list(first.values())
