"""What the engine refuses, and how a run that goes wrong says where."""

import gc
from dataclasses import replace

import numpy as np
import pytest

import engines
from rollkv.config import SamplingParams
from rollkv.errors import CheckFailed, OutOfMemoryError, UsageError
from rollkv.host_backend import HostBackend, HostWeight
from rollkv.startup import load, plan

TOKENS = list(range(40))


def test_values_that_are_not_finite_name_layer_and_step() -> None:
    with engines.host_engine("qwen3", engines.cache(64, window=16)) as engine:
        layers = list(engine._model.weights.layers)
        spoilt = np.full_like(layers[1].ffn_down[0].values, np.inf)
        layers[1] = replace(layers[1], ffn_down=(HostWeight("blk.1.ffn_down.weight", spoilt),))
        engine._model = replace(engine._model, weights=replace(engine._model.weights, layers=tuple(layers)))
        with (
            np.errstate(all="ignore"),
            pytest.raises(CheckFailed, match=r"behind layer 1 in the step of cells 0 to 39;.*--cache-type-k f32"),
        ):
            engine.prefill(TOKENS)


def test_prompt_and_new_tokens_must_fit() -> None:
    with engines.host_engine("llama", engines.cache(48)) as engine:
        with pytest.raises(UsageError, match="40 tokens and 9 new ones exceed the context of 48"):
            next(engine.generate_ids(TOKENS, 9))
        assert len(list(engine.generate_ids(TOKENS, 8))) == 8
        with pytest.raises(UsageError, match="exceed the context of 48"):
            engine.decode(1), engine.decode(1)
        with pytest.raises(UsageError, match="no tokens"):
            engine.prefill([])
        with pytest.raises(UsageError, match="512 is outside the vocabulary of 512"):
            engine.prefill([512])


def test_stop_tokens_end_a_run_and_say_so() -> None:
    want = engines.fixture("llama")["greedy"].tolist()
    prompt = engines.fixture("llama")["tokens"][:32].tolist()
    with engines.host_engine("llama", engines.cache(64)) as engine:
        stop = want[5]
        assert list(engine.generate_ids(prompt, 24, stop_ids=frozenset({stop}))) == want[: want.index(stop)]
        assert engine.stats.stop_reason == "stop_token" and engine.stats.stop_token == stop


def test_the_same_seed_draws_the_same_tokens_in_any_window() -> None:
    runs = []
    for window in (None, 16, 32):
        with engines.host_engine("gemma3", engines.cache(96, window=window)) as engine:
            runs.append(list(engine.generate_ids(TOKENS, 50, SamplingParams(temperature=0.9, top_k=40, seed=3))))
    assert runs[0] == runs[1] == runs[2] and len(set(runs[0])) > 5


def test_a_cap_below_the_minimum_is_refused_before_anything_loads() -> None:
    path = engines.FIXTURES / "llama.gguf"
    with pytest.raises(OutOfMemoryError, match=r"--vram-target 100\.0 MiB is too small.*at least.*context"):
        load(path, engines.cache(160), vram_target=100 << 20, backend="host")
    with pytest.raises(OutOfMemoryError, match="too small"):
        plan(path, engines.cache(160), vram_target=100 << 20)


def test_plan_and_engine_agree() -> None:
    """Device memory comes in granules of 2 MiB, so a cap must be further below the resident run than that."""
    path = engines.FIXTURES / "gemma3.gguf"
    config = engines.cache(65536, page_cells=64, kv="f16")
    resident = plan(path, config).total_bytes
    capped = plan(path, replace(config, residency="auto"), vram_target=resident - (4 << 20))
    assert capped.spills and capped.total_bytes <= resident - (4 << 20)
    with load(path, replace(config, residency="auto"), vram_target=resident - (4 << 20), backend="host") as engine:
        assert engine.budget == capped


def test_a_dropped_engine_gives_everything_back() -> None:
    """Nobody closed it, and nobody can any more."""

    class Watched(HostBackend):
        closed = 0

        def close(self) -> None:
            super().close()
            self.closed += 1

    backend = Watched()
    engine = engines.host_engine("llama", engines.cache(32), backend=backend)
    engine.prefill([1, 2, 3])
    assert backend.closed == 0
    del engine
    gc.collect()
    assert backend.closed == 1
