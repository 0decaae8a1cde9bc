"""The CUDA engine with cells below 16 bits: against itself with other windows, bit for bit, and against the host engine of the same types."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engines
from rollkv.engine import Engine

pytestmark = pytest.mark.gpu

PAGE, TOKENS = 64, [(37 * index * index + 11 * index) % 250 for index in range(800)]
# Heads of 64; of 16, and of 32 beside sliding windows.
MODELS = {"tiny": "synth:tiny:F16", "llama": engines.FIXTURES / "llama.gguf", "gemma3": engines.FIXTURES / "gemma3.gguf"}
TYPES: list[tuple[str, dict[str, Any]]] = [
    ("tiny", {"kv": "turbo2"}),
    ("tiny", {"kv": "q8_0", "value_kv": "q4_0"}),
    ("tiny", {"kv": "q4_0", "value_kv": "turbo3", "rotate": True}),
    ("tiny", {"kv": "turbo4", "value_kv": "f16", "protect": 1}),
    ("llama", {"kv": "turbo3", "value_kv": "turbo4"}),
    ("gemma3", {"kv": "f16", "value_kv": "q8_0"}),
    ("gemma3", {"kv": "turbo4"}),
]
TAILS: list[tuple[str, dict[str, Any]]] = [
    ("tiny", {"kv": "f16", "tail_kv": "q8_0"}),
    ("tiny", {"kv": "q8_0", "tail_kv": "turbo3"}),
    ("gemma3", {"kv": "f16", "tail_kv": "f16", "tail_value_kv": "turbo4"}),
]
ids = {"ids": lambda value: value if isinstance(value, str) else " ".join(map(str, value.values()))}


def rows_of(engine: Engine, tokens: list[int], prompt: int) -> np.ndarray:
    """Logits behind every token: a prefill, then one decode step each."""
    with engine:
        rows = list(engine.logit_rows(tokens[:prompt]))
        rows += [engine.decode(token)[None] for token in tokens[prompt:]]
    return np.concatenate(rows)


@pytest.mark.parametrize(("model", "types"), TYPES, **ids)
def test_every_window_gives_the_resident_bits(model: str, types: dict[str, Any], load_cuda: Callable[..., Engine]) -> None:
    options = {"page_cells": PAGE, "ubatch": 200, **types}
    resident = rows_of(load_cuda(MODELS[model], engines.cache(800, **options)), TOKENS, 700)
    assert np.isfinite(resident).all()
    for pages in (1, 5):
        windowed = rows_of(load_cuda(MODELS[model], engines.cache(800, window=pages * PAGE, **options)), TOKENS, 700)
        np.testing.assert_array_equal(windowed, resident, err_msg=f"window of {pages} pages")


@pytest.mark.parametrize("prompt", [150, 10])
@pytest.mark.parametrize(("model", "types"), TYPES + TAILS, **ids)
def test_cuda_agrees_with_the_host(model: str, types: dict[str, Any], prompt: int, load_cuda: Callable[..., Engine]) -> None:
    """As far as f16 arithmetic goes, and a third of what the types lose: where an element lies close to the border of two levels, the two may choose
    different ones. With noise as small as f16's rounding in every product the host engine differs from itself by half as much."""
    config = engines.cache(160, page_cells=PAGE, ubatch=160, window=PAGE, **types)
    host = rows_of(engines.host_engine(MODELS[model], config), TOKENS[:160], prompt)
    exact = rows_of(engines.host_engine(MODELS[model], engines.cache(160, page_cells=PAGE, ubatch=160)), TOKENS[:160], prompt)
    got = rows_of(load_cuda(MODELS[model], config), TOKENS[:160], prompt)
    assert engines.nmse(got, host) <= 3e-3 + 0.3 * engines.nmse(host, exact)
