"""Metrics against plain loops in Python, and what must never slip through a limit."""

from math import exp, inf, log, nan

import numpy as np
import pytest

from rollkv import counts
from rollkv.errors import UsageError
from rollkv.metrics import Comparison, Limits, RowComparison, equal_bits, measure_slice, top_margin, upper_quantile, wilson_interval
from rollkv.prose import ADJECTIVES, NOUNS, Draws, paragraphs, running_text

LOOSE = Limits(max_kld=1e9, max_nmse=1e9, min_top1=0.0)


def random_pair(seed: int, rows: int = 40, vocab: int = 30, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    reference = rng.normal(size=(rows, vocab), scale=3).astype(np.float32)
    return reference, (reference + rng.normal(size=(rows, vocab), scale=noise)).astype(np.float32)


def add(comparison: RowComparison, positions: np.ndarray, reference: np.ndarray, candidate: np.ndarray) -> None:
    comparison.include(positions, measure_slice(positions, reference, candidate, comparison.noise))


def compared(reference: np.ndarray, candidate: np.ndarray, noise: float = 0.05, step: int = 16) -> Comparison:
    comparison = RowComparison(noise)
    for begin in range(0, len(reference), step):
        end = min(begin + step, len(reference))
        add(comparison, np.arange(begin, end), reference[begin:end], candidate[begin:end])
    return comparison.result()


def probabilities(row: np.ndarray) -> list[float]:
    weights = [exp(float(x) - float(row.max())) for x in row]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("seed", range(3))
def test_every_figure_equals_its_definition(seed):
    reference, candidate = random_pair(seed)
    found = compared(reference, candidate)
    pairs = [(probabilities(r), probabilities(c)) for r, c in zip(reference, candidate, strict=True)]
    kld = sorted(sum(p * log(p / q) for p, q in zip(left, right, strict=True)) for left, right in pairs)
    tv = [sum(abs(p - q) for p, q in zip(left, right, strict=True)) / 2 for left, right in pairs]
    differs = [i for i in range(40) if int(reference[i].argmax()) != int(candidate[i].argmax())]
    margins = {i: sorted(map(float, reference[i]))[-1] - sorted(map(float, reference[i]))[-2] for i in differs}
    squares = [(float(a) - float(b)) ** 2 for a, b in zip(candidate.ravel(), reference.ravel(), strict=True)]
    assert differs, "the noise is large enough to move some top token"
    assert found.kld_mean == pytest.approx(sum(kld) / 40, rel=1e-9)
    assert found.kld_max == found.kld_p999 == pytest.approx(kld[-1], rel=1e-9)
    assert found.tv_mean == pytest.approx(sum(tv) / 40, rel=1e-9)
    assert found.nmse == pytest.approx(sum(squares) / sum(float(x) ** 2 for x in reference.ravel()), rel=1e-9)
    assert found.max_abs == pytest.approx(max(squares) ** 0.5, rel=1e-9)
    assert found.same_top1 == found.full_agreement == 1 - len(differs) / 40
    assert found.real_frac == sum(margin > 0.05 for margin in margins.values()) / 40
    first = found.first_difference
    assert first is not None and first.position == differs[0] and first.margin == pytest.approx(margins[differs[0]])
    assert (first.reference_token, first.candidate_token) == (reference[differs[0]].argmax(), candidate[differs[0]].argmax())
    assert found.bit_equal_rows == 0 and found.first_unequal == 0 and found.rows == found.positions == 40


@pytest.mark.parametrize("step", [1, 7, 40])
def test_slices_do_not_matter(step):
    reference, candidate = random_pair(11)
    candidate[::3] = reference[::3]
    whole, sliced = compared(reference, candidate), compared(reference, candidate, step=step)
    assert sliced.kld_mean == pytest.approx(whole.kld_mean, rel=1e-12) and sliced.nmse == pytest.approx(whole.nmse, rel=1e-12)
    assert (sliced.bit_equal_rows, sliced.first_unequal, sliced.kld_max) == (whole.bit_equal_rows, whole.first_unequal, whole.kld_max)
    assert whole.bit_equal_rows == 14 and whole.first_unequal == 1
    assert sliced.first_difference == whole.first_difference


def test_equal_rows_are_exactly_at_zero():
    reference, _ = random_pair(5)
    found = compared(reference, reference.copy())
    assert found.bit_equal and found.first_unequal is None and found.first_difference is None
    assert (found.max_abs, found.nmse, found.kld_mean, found.kld_max, found.tv_mean, found.real_frac) == (0,) * 6
    assert Limits(bit_equal=True, max_kld=0, max_nmse=0, min_top1=1).broken(found) == ()


def test_one_bit_is_seen():
    reference, _ = random_pair(6)
    candidate = reference.copy()
    candidate[17, 4] = np.nextafter(candidate[17, 4], np.float32(inf))
    found = compared(reference, candidate)
    assert (found.bit_equal_rows, found.first_unequal) == (39, 17)
    (message,) = Limits(bit_equal=True).broken(found)
    assert "1 of 40" in message and "position 17" in message
    assert LOOSE.broken(found) == ()


def test_a_wider_reference_is_not_rounded_first():
    narrow = np.array([[1.0, 2.0], [0.5, 0.25]], np.float32)
    wide = narrow.astype(np.float64)
    assert equal_bits(wide, narrow).tolist() == [True, True] and equal_bits(narrow.astype(np.float16), narrow).tolist() == [True, True]
    wide[1, 0] += 1e-12
    assert equal_bits(wide, narrow).tolist() == [True, False] and equal_bits(narrow, wide).tolist() == [True, False]


def test_the_sign_of_zero_is_a_bit():
    rows = np.zeros((1, 4), np.float32)
    assert not equal_bits(rows, -rows)[0]
    assert compared(rows, -rows).nmse == 0


@pytest.mark.parametrize("side", ["reference", "candidate", "both"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_not_finite_passes_no_limit(side, value):
    reference, _ = random_pair(7)
    candidate = reference.copy()
    for rows in (reference,) * (side != "candidate") + (candidate,) * (side != "reference"):
        rows[20, 3] = value
    found = compared(reference, candidate)
    assert found.not_finite_rows == 1 and not found.bit_equal
    assert found.kld_mean == found.nmse == found.max_abs == found.tv_mean == inf
    for limits in (Limits(), Limits(bit_equal=True), LOOSE):
        assert limits.broken(found)


@pytest.mark.parametrize(
    "name,limits", [("mean KLD", Limits(max_kld=1e-6)), ("NMSE", Limits(max_nmse=1e-6)), ("top token", Limits(min_top1=1.0))]
)
def test_each_limit_is_kept_by_itself(name, limits):
    reference, candidate = random_pair(8)
    (message,) = limits.broken(compared(reference, candidate))
    assert name in message
    assert limits.broken(compared(reference, reference)) == ()


def test_a_difference_within_the_noise_is_no_real_one():
    reference = np.array([[1.0, 0.9, -5.0], [1.0, 0.0, -5.0]], np.float32)
    candidate = reference[:, [1, 0, 2]].copy()
    assert compared(reference, candidate, noise=0.2).real_frac == 0.5
    assert compared(reference, candidate, noise=0.05).real_frac == 1
    assert compared(reference, candidate, noise=2).real_frac == 0


def test_positions_with_a_known_token_only_count_for_the_full_agreement():
    reference, _ = random_pair(9, rows=4)
    comparison = RowComparison(0.05)
    comparison.add_tops(np.array([0, 1]), np.array([5, 6]), np.array([5, 7]))
    add(comparison, np.array([2, 3, 4, 5]), reference, reference)
    found = comparison.result()
    assert (found.rows, found.positions, found.same_top1, found.full_agreement) == (4, 6, 1, 5 / 6)
    first = found.first_difference
    assert first is not None and (first.position, first.reference_token, first.candidate_token, first.margin) == (1, 6, 7, None)


def test_rows_that_do_not_match_are_an_error():
    comparison = RowComparison(0)
    with pytest.raises(ValueError, match="do not match"):
        add(comparison, np.arange(2), np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="no rows"):
        comparison.result()


def test_margin_and_quantile():
    assert top_margin(np.array([1, 5, 3.5])) == 1.5 and top_margin(np.array([2, 2, 0])) == 0 and top_margin(np.array([1])) == inf
    values = np.random.default_rng(1).permutation(10_000).astype(float)
    assert upper_quantile(values, 0.999) == 9989 and upper_quantile(values, 1) == 9999
    assert upper_quantile(np.array([1.0, inf]), 0.5) == 1 and upper_quantile(np.array([3.0]), 0.999) == 3


def test_wilson_interval():
    assert wilson_interval(0, 0) == (0, 1)
    low, high = wilson_interval(10, 10)
    assert low == pytest.approx(10 / (10 + 1.96**2)) and high == pytest.approx(1)
    low, high = wilson_interval(3, 12)
    for bound in (low, high):  # the bounds solve |rate - p| = z sqrt(p (1 - p) / n)
        assert abs(0.25 - bound) == pytest.approx(1.96 * (bound * (1 - bound) / 12) ** 0.5)


# -- numbers and prose ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text,value", [("1", 1), ("4096", 4096), ("4k", 4096), ("1.5K", 1536), (" 1m ", 1 << 20)])
def test_counts(text, value):
    assert counts.parse_count(text, "--tokens") == value


@pytest.mark.parametrize("text", ["", "0", "0k", "-4", "4kk", "1.5", "0.3k", "ten", "4 k", "1e3", "\u0664", "9" * 400, "9" * 13 + "m"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(UsageError, match="--tokens"):
        counts.parse_count(text, "--tokens")


def test_lists():
    assert counts.parse_counts("2k, 1k,2048", "--lengths") == (2048, 1024)
    assert counts.parse_percentages("0,12.5%,100", "--depths") == (0, 12.5, 100)
    for text in ("", "1,,2", "101", "-1", "x", "nan"):
        with pytest.raises(UsageError, match="--depths"):
            counts.parse_percentages(text, "--depths")


def test_prose_holds_no_digit_and_no_word_of_a_key():
    words = set("".join(c if c.isalnum() else " " for c in "\n".join(paragraphs()).lower()).split())
    assert len(words) > 300 and not words & {*ADJECTIVES, *NOUNS, "passcode"}
    assert not any(word.isdigit() for word in words)
    assert len(running_text(20_000)) >= 20_000 and running_text(20_000).startswith(running_text(5_000))
    assert running_text(9_000, seed=1) != running_text(9_000, seed=2)


def test_draws_are_the_same_everywhere():
    first, again = Draws("a"), Draws("a")
    assert [first.below(1000) for _ in range(5)] == [again.below(1000) for _ in range(5)] == [564, 190, 81, 789, 443]
    numbers = {Draws(str(index)).digits(7) for index in range(300)}
    assert len(numbers) > 295 and all(len(set(n)) == len(n) == 7 and n[0] != "0" for n in numbers)
    assert any("0" in number for number in numbers)
