"""Sampling against a plain restatement of its definition, on random rows full of ties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkv.config import SamplingParams
from rollkv.errors import UsageError
from rollkv.sampling import Sampler, candidates, penalize_repeats, top_ids

# Multiples of 1/4 in a short range: exact in float32, and equal values are frequent.
rows = st.lists(st.integers(-20, 20), min_size=1, max_size=40).map(lambda v: np.array(v, dtype=np.float32) / 4)


def brute_force(logits: list[float], params: SamplingParams) -> dict[int, float] | None:
    """Probability of each id by the definition; None when a sum lies so near top_p that rounding decides."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        total = math.fsum(math.exp(logits[i]) for i in ranked)
        kept: list[int] = []
        for i in ranked:
            kept.append(i)
            mass = math.fsum(math.exp(logits[j]) for j in kept) / total
            if abs(mass - params.top_p) < 1e-9:
                return None
            if mass >= params.top_p:
                break
        ranked = kept
    best = logits[ranked[0]]
    ranked = [i for i in ranked if math.exp(logits[i] - best) >= params.min_p]
    weights = {i: math.exp((logits[i] - best) / params.temperature) for i in ranked}
    total = math.fsum(weights.values())
    return {i: w / total for i, w in weights.items()}


@settings(max_examples=400, deadline=None)
@given(
    rows,
    st.integers(0, 45),
    st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0]),
    st.sampled_from([0.1, 0.7, 1.0, 1.9]),
)
def test_candidates_match_the_definition(logits, top_k, top_p, min_p, temperature):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = brute_force(logits.tolist(), params)
    if expected is None:
        return
    ids, probabilities = candidates(logits, params)
    assert ids.tolist() == list(expected)
    np.testing.assert_allclose(probabilities, list(expected.values()), rtol=1e-12)


@settings(max_examples=200, deadline=None)
@given(rows, st.integers(1, 45))
def test_top_ids_rank_by_logit_then_by_id(logits, count):
    expected = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    assert top_ids(logits, count).tolist() == expected


@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.95, 0.9999])
def test_a_wide_nucleus_on_a_real_vocabulary_size_equals_the_full_sort(top_p):
    """Flat rows make the nucleus larger than the first candidates, so the search has to grow."""
    logits = np.random.default_rng(7).normal(size=50_000).astype(np.float32) * 0.5
    ids, probabilities = candidates(logits, SamplingParams(temperature=1.0, top_p=top_p))
    order = np.argsort(-logits, kind="stable")
    mass = np.cumsum(np.exp(logits[order].astype(np.float64)))
    keep = int(np.argmax(mass >= top_p * mass[-1])) + 1
    assert abs(len(ids) - keep) <= 1  # the two sums may round differently at the border
    assert ids.tolist() == order[: len(ids)].tolist()
    assert probabilities.sum() == pytest.approx(1.0)


@settings(max_examples=200, deadline=None)
@given(rows, st.lists(st.integers(0, 39), max_size=30), st.sampled_from([0.5, 1.1, 2.0]), st.integers(0, 12))
def test_greedy_with_repeat_penalty(logits, history, penalty, last):
    history = [i % len(logits) for i in history]
    penalised = [
        v if i not in (history[-last:] if last else []) else v / np.float32(penalty) if v > 0 else v * np.float32(penalty)
        for i, v in enumerate(logits)
    ]
    expected = min(range(len(logits)), key=lambda i: (-penalised[i], i))
    before = logits.copy()
    assert Sampler(SamplingParams(repeat_penalty=penalty, repeat_last=last)).sample(logits, history) == expected
    assert np.array_equal(logits, before), "the caller's logits must not change"


def test_a_repeated_id_is_penalised_once():
    logits = np.array([2.0, -2.0, 1.0], dtype=np.float32)
    assert penalize_repeats(logits, [0, 0, 0, 1, 1], 2.0).tolist() == [1.0, -4.0, 1.0]


def test_greedy_takes_the_lowest_id_of_equals():
    assert Sampler(SamplingParams()).sample(np.array([1, 3, 3, 3], dtype=np.float32)) == 1


def test_draws_follow_the_probabilities():
    """Chi-squared over 20,000 draws: 7 degrees of freedom pass 30 with probability 1e-4, and the seed is fixed."""
    logits = np.random.default_rng(3).normal(size=12).astype(np.float32)
    params = SamplingParams(temperature=1.3, top_k=8, seed=11)
    sampler = Sampler(params)
    ids, probabilities = candidates(logits, params)
    draws = [sampler.sample(logits) for _ in range(20_000)]
    counts = np.array([draws.count(int(i)) for i in ids])
    assert counts.sum() == len(draws), "an id outside the candidates was drawn"
    expected = probabilities * len(draws)
    assert float((((counts - expected) ** 2) / expected).sum()) < 30


def test_the_seed_decides_the_draws():
    def run(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler.sample(np.zeros(1000, dtype=np.float32)) for _ in range(20)]

    assert run(5) == run(5)
    assert run(5) != run(6)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    logits = np.array([-80.0, 90.0, 89.0], dtype=np.float32)
    ids, probabilities = candidates(logits, SamplingParams(temperature=temperature))
    assert ids.tolist() == [1, 2, 0]
    assert np.isfinite(probabilities).all() and probabilities.sum() == pytest.approx(1.0)
    assert probabilities[0] == pytest.approx(1.0 if temperature < 1 else 1 / 3)


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("temperature", -0.1, "--temp"),
        ("temperature", math.nan, "--temp"),
        ("temperature", math.inf, "--temp"),
        ("top_k", -1, "--top-k"),
        ("top_p", 0.0, "--top-p"),
        ("top_p", 1.01, "--top-p"),
        ("top_p", math.nan, "--top-p"),
        ("min_p", -0.01, "--min-p"),
        ("min_p", 1.5, "--min-p"),
        ("repeat_penalty", 0.0, "--repeat-penalty"),
        ("repeat_penalty", math.inf, "--repeat-penalty"),
        ("repeat_last", -1, "--repeat-last"),
        ("seed", -1, "--seed"),
    ],
)
def test_bad_parameters_name_their_option_and_value(field, value, option):
    with pytest.raises(UsageError, match=option) as caught:
        Sampler(SamplingParams(**{field: value}))
    assert str(value) in str(caught.value)
