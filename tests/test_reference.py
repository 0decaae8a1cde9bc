"""The oracle against hand values and brute force."""

import math

import numpy as np
import pytest

from rollkv import reference
from rollkv.config import RopeConfig
from rollkv.rope import rope_frequencies


def softmax_attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, window: int | None, scale: float) -> np.ndarray:
    """One query and one head at a time. q [T, H, Dk], keys [Hkv, N, Dk], values [Hkv, N, Dv]."""
    out = np.empty((*q.shape[:2], values.shape[2]))
    for t, h in np.ndindex(*q.shape[:2]):
        kv = h // (q.shape[1] // keys.shape[0])
        last = position + t + 1
        first = 0 if window is None else max(0, last - window)
        scores = np.array([scale * float(q[t, h] @ keys[kv, n]) for n in range(first, last)])
        weights = np.exp(scores - scores.max())
        out[t, h] = (weights / weights.sum()) @ values[kv, first:last]
    return out


@pytest.mark.parametrize("window", [None, 5, 1])
@pytest.mark.parametrize("heads,kv_heads", [(4, 2), (3, 1), (2, 2)])
def test_pages_in_order_are_the_whole_attention(window: int | None, heads: int, kv_heads: int) -> None:
    rng = np.random.default_rng(heads * 10 + (window or 0))
    page, tokens, position = 4, 6, 9
    cells = position + tokens
    q = rng.standard_normal((tokens, heads, 16))
    keys, values = np.full((kv_heads, 16, 16), np.nan), np.full((kv_heads, 16, 32), np.nan)
    keys[:, :cells], values[:, :cells] = rng.standard_normal((kv_heads, cells, 16)), rng.standard_normal((kv_heads, cells, 32))
    want = softmax_attention(q, keys, values, position, window, 0.25)
    parts = []
    for first in range(0, 16, page):
        seen = reference.visible_cells(position, tokens, first, page, window)
        parts.append(reference.attend_page(q, keys[:, first : first + page], values[:, first : first + page], seen, 0.25))
    state = (np.zeros_like(want), np.zeros((tokens, heads)), np.full((tokens, heads), -np.inf))
    for part in parts:
        state = reference.advance_state(state, part)
    np.testing.assert_allclose(state[0] / state[1][..., None], want, rtol=1e-12)
    with np.errstate(divide="ignore", invalid="ignore"):
        outs = np.stack([np.where(total[..., None] > 0, out / total[..., None], 0) for out, total, _ in parts])
        lses = np.stack([np.where(total > 0, maximum + np.log(total), -np.inf) for _, total, maximum in parts])
    merged, _ = reference.merge_states(outs.reshape(len(parts), -1, 32), lses.reshape(len(parts), -1))
    np.testing.assert_allclose(merged.reshape(want.shape), want, rtol=1e-12)


def test_empty_states_are_the_identity() -> None:
    rng = np.random.default_rng(1)
    out, lse = rng.standard_normal((1, 3, 8)), rng.standard_normal((1, 3))
    empty = np.zeros_like(out), np.full_like(lse, -np.inf)
    merged, merged_lse = reference.merge_states(np.concatenate([empty[0], out, empty[0]]), np.concatenate([empty[1], lse, empty[1]]))
    np.testing.assert_array_equal(merged, out[0])
    np.testing.assert_allclose(merged_lse, lse[0], rtol=1e-15)
    nothing, nothing_lse = reference.merge_states(np.concatenate([empty[0]] * 2), np.concatenate([empty[1]] * 2))
    assert (nothing == 0).all() and (nothing_lse == -np.inf).all()


@pytest.mark.parametrize("style", ["interleaved", "halves"])
def test_rope_turns_pairs_by_their_angle(style: str) -> None:
    rope = RopeConfig(dim=4, style=style, theta=100.0)  # type: ignore[arg-type]
    table = reference.rope_table(rope, 3, 1)[0]
    x = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])  # head of 6, the last two do not turn
    turned = reference.rope(x, 1, table, style)[0]
    pairs = [(0, 1), (2, 3)] if style == "interleaved" else [(0, 2), (1, 3)]
    for (a, b), angle in zip(pairs, (3.0, 0.3), strict=True):
        assert turned[a] == pytest.approx(x[0, a] * math.cos(angle) - x[0, b] * math.sin(angle))
        assert turned[b] == pytest.approx(x[0, a] * math.sin(angle) + x[0, b] * math.cos(angle))
    assert turned[4:].tolist() == [5.0, 6.0]


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    plain, _ = rope_frequencies(RopeConfig(dim=64, style="halves", theta=1e6))
    yarn, magnitude = rope_frequencies(RopeConfig(dim=64, style="halves", theta=1e6, scaling="yarn", factor=4.0, original_context=32768))
    np.testing.assert_array_equal(yarn[:10], plain[:10])  # more than 32 turns in 32,768 cells: pair 10 still turns 69 times
    np.testing.assert_allclose(yarn[-8:], plain[-8:] / 4, rtol=1e-15)
    assert magnitude == pytest.approx(1 + 0.1 * math.log(4))
    assert ((yarn <= plain) & (yarn >= plain / 4)).all()


def test_linear_scaling_and_factors_divide() -> None:
    plain, _ = rope_frequencies(RopeConfig(dim=8, style="halves"))
    linear, _ = rope_frequencies(RopeConfig(dim=8, style="halves", scaling="linear", factor=8.0))
    factors, _ = rope_frequencies(RopeConfig(dim=8, style="halves", frequency_factors=(1.0, 2.0, 4.0, 8.0)))
    np.testing.assert_array_equal(linear, plain / 8)
    np.testing.assert_array_equal(factors, plain / [1, 2, 4, 8])


def test_norm_and_activations_by_hand() -> None:
    x = np.array([[3.0, 4.0, 6.0, 8.0]])
    got = reference.rms_norm(x, np.array([1.0, 2.0]), 0.0)
    np.testing.assert_allclose(got, [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5), 6 / math.sqrt(50), 16 / math.sqrt(50)]])
    gate, up = np.array([-800.0, 0.0, 1.0, 800.0]), np.array([1.0, 2.0, 3.0, 2.0])
    np.testing.assert_allclose(reference.glu(gate, up, "silu"), [0, 0, 3 / (1 + math.exp(-1)), 1600])
    gelu = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))
    np.testing.assert_allclose(reference.glu(gate, up, "gelu_tanh"), [0, 0, 3 * gelu, 1600])


def test_few_rows_do_not_see_each_other() -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((16, 96), np.float32), rng.standard_normal((40, 96), np.float32)
    whole = reference.linear(x, weight, None)
    for row in range(16):
        np.testing.assert_array_equal(reference.linear(x[row : row + 1], weight, None)[0], whole[row])


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 3e38, np.inf, np.nan], np.float32)
    bits = reference.to_bf16_bits(values)
    back = reference.from_bf16_bits(bits)
    assert back[:4].tolist() == [1.0, 1.0, 1.015625, -2.5]
    assert back[5] == np.inf and np.isnan(back[6])
