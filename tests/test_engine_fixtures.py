"""The host engine against logits and greedy continuations that another engine computed."""

import numpy as np
import pytest

import engines


@pytest.mark.parametrize("model", engines.MODELS)
def test_logits_equal_the_stored_ones(model: str) -> None:
    want = engines.fixture(model)
    with engines.host_engine(model, engines.cache(160)) as engine:
        got = engine.logits(want["tokens"].tolist())
    assert got.shape == want["logits"].shape
    assert engines.nmse(got, want["logits"]) <= 1e-8
    assert np.abs(got - want["logits"]).max() < 1e-3


@pytest.mark.parametrize("model", engines.MODELS)
def test_greedy_continuation_equals_the_stored_one(model: str) -> None:
    want = engines.fixture(model)
    with engines.host_engine(model, engines.cache(32 + 24)) as engine:
        assert list(engine.generate_ids(want["tokens"][:32].tolist(), 24)) == want["greedy"].tolist()
        assert engine.stats.stop_reason == "length" and engine.stats.generated_tokens == 24


@pytest.mark.parametrize("model", engines.MODELS)
def test_float64_is_closer_than_float32_noise(model: str) -> None:
    """The oracle in double precision agrees to what the stored float32 logits themselves can hold."""
    want = engines.fixture(model)
    with engines.host_engine(model, engines.cache(160), precision=np.float64) as engine:
        assert engines.nmse(engine.logits(want["tokens"].tolist()), want["logits"]) <= 1e-9


@pytest.mark.parametrize("kv", ["f16", "bf16"])
def test_sixteen_bit_kv_stays_near(kv: str) -> None:
    want = engines.fixture("qwen3")
    with engines.host_engine("qwen3", engines.cache(160, kv=kv)) as engine:  # type: ignore[arg-type]
        error = engines.nmse(engine.logits(want["tokens"].tolist()), want["logits"])
    assert 0 < error < {"f16": 1e-5, "bf16": 1e-3}[kv]


def test_a_prompt_of_one_token_is_a_prompt() -> None:
    want = engines.fixture("llama")
    with engines.host_engine("llama", engines.cache(8)) as engine:
        row = engine.prefill(want["tokens"][:1].tolist())
    np.testing.assert_allclose(row, want["logits"][0], atol=1e-3)
