"""Sampling against a plain restatement of its definition, on random rows full of ties."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkv import split_mix
from rollkv.config import SamplingParams
from rollkv.errors import UsageError
from rollkv.host_backend import HostBackend
from rollkv.sampling import WEIGHT_BITS, candidates, check_sampling, choose, mass_to_reach, penalize_repeats, sharpness, top_ids, weights

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
    ids, token_weights = candidates(logits, params)
    assert ids.tolist() == sorted(expected)
    np.testing.assert_allclose(token_weights / token_weights.sum(), [expected[i] for i in ids], atol=2e-12)


@settings(max_examples=200, deadline=None)
@given(rows, st.integers(1, 45))
def test_top_ids_rank_by_logit_then_by_id(logits, count):
    expected = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    assert top_ids(logits, count).tolist() == expected


@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.95, 0.9999])
def test_a_wide_nucleus_on_a_real_vocabulary_size_equals_the_full_sort(top_p):
    """Flat rows make the nucleus larger than the first candidates, so the search has to grow."""
    logits = np.random.default_rng(7).normal(size=50_000).astype(np.float32) * 0.5
    ids, _ = candidates(logits, SamplingParams(temperature=1.0, top_p=top_p))
    order = np.argsort(-logits, kind="stable")
    mass = np.cumsum(np.exp(logits[order].astype(np.float64)))
    keep = int(np.argmax(mass >= top_p * mass[-1])) + 1
    assert abs(len(ids) - keep) <= 1  # the two sums may round differently at the border
    assert ids.tolist() == sorted(order[: len(ids)].tolist())


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
    assert choose(logits, history, SamplingParams(repeat_penalty=penalty, repeat_last=last), 0) == expected
    assert np.array_equal(logits, before), "the caller's logits must not change"


def test_a_repeated_id_is_penalised_once():
    logits = np.array([2.0, -2.0, 1.0], dtype=np.float32)
    assert penalize_repeats(logits, [0, 0, 0, 1, 1], 2.0).tolist() == [1.0, -4.0, 1.0]


def test_penalties_stay_finite():
    logits = np.array([3e38, -3e38, 1.0], dtype=np.float32)
    assert np.isfinite(penalize_repeats(logits, [0, 1], 1e-20)).all() and np.isfinite(penalize_repeats(logits, [0, 1], 1e20)).all()


def test_greedy_takes_the_lowest_id_of_equals():
    assert choose(np.array([1, 3, 3, 3], dtype=np.float32), (), SamplingParams(), 0) == 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 17.0])
def test_weights_are_exponentials_to_half_a_unit(temperature):
    logits = np.concatenate([np.random.default_rng(5).uniform(-40, 9, 20_000), [9, -1e30, -3e38]]).astype(np.float32)
    exact = np.exp((logits.astype(np.float64) - 9) / temperature) * 2.0**WEIGHT_BITS
    found = weights(logits, np.float32(9), sharpness(temperature))
    assert found.dtype == np.uint64 and found[-3] == 1 << WEIGHT_BITS
    assert np.abs(found - exact).max() < 1  # half from the polynomial at most, half from rounding


@pytest.mark.parametrize("top_p", [1e-300, 0.1, 0.95, 1 - 2**-53, 1.0])
def test_the_mass_to_reach_is_there(top_p):
    for total in (1, 2, 1 << 40, (1 << 53) + 1, (1 << 58) - 1):
        assert 1 <= mass_to_reach(total, top_p) <= total


def test_draws_follow_the_probabilities():
    """Chi-squared over 20,000 positions: 7 degrees of freedom pass 30 with probability 1e-4, and the seed is fixed."""
    logits = np.random.default_rng(3).normal(size=12).astype(np.float32)
    params = SamplingParams(temperature=1.3, top_k=8, seed=11)
    ids, token_weights = candidates(logits, params)
    draws = [choose(logits, (), params, position) for position in range(20_000)]
    counts = np.array([draws.count(int(i)) for i in ids])
    assert counts.sum() == len(draws), "an id outside the candidates was drawn"
    expected = token_weights / token_weights.sum() * len(draws)
    assert float((((counts - expected) ** 2) / expected).sum()) < 30


def test_seed_and_position_decide_a_draw_and_nothing_else_does():
    logits = np.zeros(1000, dtype=np.float32)

    def run(seed: int, positions: range) -> list[int]:
        return [choose(logits, (), SamplingParams(temperature=1.0, seed=seed), position) for position in positions]

    assert run(5, range(20)) == run(5, range(20)) == run(5, range(10)) + run(5, range(10, 20))
    assert run(5, range(20)) != run(6, range(20)) and len(set(run(5, range(20)))) > 10
    assert run(5, range(7, 8)) == [split_mix.word(5, 7) * 1000 >> 64]  # equal weights: the word, scaled


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    logits = np.array([-80.0, 90.0, 89.0], dtype=np.float32)
    ids, token_weights = candidates(logits, SamplingParams(temperature=temperature))
    assert ids.tolist() == [0, 1, 2]
    one = 1 << WEIGHT_BITS
    assert token_weights.tolist() == ([0, one, 0] if temperature < 1 else [one] * 3)


def test_the_host_backend_chooses():
    """Stores the id behind the sequence while there is room, counts what is not finite, moves on by one cell."""
    logits = np.random.default_rng(8).normal(size=(1, 50)).astype(np.float32)
    backend, params = HostBackend(precision=np.float64), SamplingParams(temperature=2.0, repeat_penalty=3.0, repeat_last=2, seed=4)
    sequence, position, outcome = (backend.upload("", np.array(v, np.int32)) for v in ([7, 7, 7, -1, -1, -1], [2], [-1, -1]))
    row, scratch, ids = backend.upload("", logits), backend.empty("", (1,), "u8"), [7, 7, 7]
    for cell in range(2, 6):
        backend.choose(row, params, sequence, position, outcome, scratch)
        ids.append(choose(logits[0], ids, params, cell))
        assert backend.read(outcome).tolist() == [ids[-1], 0] and backend.read(position).tolist() == [cell + 1]
    assert backend.read(sequence).tolist() == ids[:6]

    for value in (np.nan, np.inf, -np.inf):
        logits[0, 3:5] = value
        backend.write(row, logits)
        backend.write(position, np.array([0], np.int32))
        backend.choose(row, params, sequence, position, outcome, scratch)
        assert backend.read(outcome).tolist() == [0, 2] and backend.read(sequence)[1] == 0


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
        ("repeat_penalty", 1e-31, "--repeat-penalty"),
        ("repeat_penalty", math.inf, "--repeat-penalty"),
        ("repeat_last", -1, "--repeat-last"),
        ("seed", -1, "--seed"),
        ("seed", 1 << 64, "--seed"),
    ],
)
def test_bad_parameters_name_their_option_and_value(field, value, option):
    with pytest.raises(UsageError, match=option) as caught:
        check_sampling(SamplingParams(**{field: value}))
    assert str(value) in str(caught.value)
