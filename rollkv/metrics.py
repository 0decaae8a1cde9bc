"""How far two sets of logits are apart, row by row, in float64. Pure functions and one accumulator; knows no model and no file.

Memory is that of the slice at hand plus one number a row (the 99.9 % quantile needs them all), whatever the vocabulary. A row that is
not finite on either side counts as infinitely far away: no average, maximum or limit can lose it.
"""

from dataclasses import dataclass
from math import inf, isfinite, log, sqrt

import numpy as np


@dataclass(frozen=True)
class Difference:
    """The first position whose top token differs. margin: the reference's top-1 logit minus its top-2; None where only the token is known."""

    position: int
    reference_token: int
    candidate_token: int
    margin: float | None


@dataclass(frozen=True)
class Comparison:
    """A candidate against a reference. Logits in the model's own unit, divergences in nats, fractions from 0 to 1."""

    rows: int  # positions whose logits were compared
    bit_equal_rows: int
    not_finite_rows: int  # on either side
    first_unequal: int | None  # position of the first row with another bit
    max_abs: float  # largest difference of one logit
    nmse: float  # squared differences over squared reference logits, all rows together
    kld_mean: float  # KL divergence of the candidate from the reference: sum of p ln(p / q), p the reference
    kld_p999: float
    kld_max: float
    tv_mean: float  # total variation: half the sum of |p - q|
    same_top1: float  # of the compared rows
    real_frac: float  # of the compared rows: the top token differs although the reference's margin exceeds `noise`
    noise: float
    positions: int  # positions whose top token is known on both sides; at least `rows`
    full_agreement: float  # of those: the same top token
    first_difference: Difference | None

    @property
    def bit_equal(self) -> bool:
        """Every row finite and equal to the last bit."""
        return self.bit_equal_rows == self.rows and self.not_finite_rows == 0


@dataclass(frozen=True)
class SliceFigures:
    """What one slice of rows comes to, before slices are summed up."""

    equal: np.ndarray  # bool [R]: the same bits
    finite: np.ndarray  # bool [R]: on both sides
    same_top1: np.ndarray  # bool [R]
    kld: np.ndarray  # float64 [R]
    real: int  # rows whose top token differs beyond the noise
    first_difference: Difference | None
    max_abs: float
    squared: float
    power: float
    tv: float


def measure_slice(positions: np.ndarray, reference: np.ndarray, candidate: np.ndarray, noise: float) -> SliceFigures:
    """Logits [R, V] of both sides at `positions` int [R]. Keeps no state, so slices may be measured side by side."""
    if reference.shape != candidate.shape or len(positions) != len(reference):
        raise ValueError(f"{len(positions)} positions, reference {reference.shape}, candidate {candidate.shape}: the rows do not match")
    equal = equal_bits(reference, candidate)
    finite, unequal = np.isfinite(reference).all(1), ~equal
    finite[unequal] &= np.isfinite(candidate[unequal]).all(1)
    kld = np.where(finite, 0.0, inf)
    max_abs = squared = tv = 0.0
    if (apart := finite & unequal).any():
        figures = [measure_row(reference[index], candidate[index]) for index in np.flatnonzero(apart)]
        max_abs = max(row.max_abs for row in figures)
        squared, tv = sum(row.squared for row in figures), sum(row.tv for row in figures)
        kld[apart] = [row.kld for row in figures]
    tops, others = reference.argmax(1), candidate.argmax(1)
    same = (tops == others) & finite
    margins = {int(index): top_margin(reference[index]) if finite[index] else None for index in np.flatnonzero(~same)}
    first = next((Difference(int(positions[i]), int(tops[i]), int(others[i]), margin) for i, margin in margins.items()), None)
    real = sum(margin is None or margin > noise for margin in margins.values())
    return SliceFigures(equal, finite, same, kld, real, first, max_abs, squared, _power(reference, finite), tv)


@dataclass(frozen=True)
class RowFigures:
    """What one row comes to: the largest difference, the sum of squared ones, divergence and total variation."""

    max_abs: float
    squared: float
    kld: float
    tv: float


def measure_row(want: np.ndarray, got: np.ndarray) -> RowFigures:
    """Finite logits [V] of the reference and of a candidate.

    With p = e^a / A and q = e^b / B the divergence is (sum of e^a (a - b)) / A + ln(B / A): two exponentials an element. Row by row, for two megabytes stay in
    the cache and whole slices do not: 262,144 logits take 2 to 4 ms where slices of them took 49. Few calls, for threads wait for each other at each.
    """
    a, b = want.astype(np.float64), got.astype(np.float64)
    difference = a - b
    max_abs, squared = max(float(difference.max()), -float(difference.min())), float(np.einsum("v,v->", difference, difference))
    a -= a.max()
    b -= b.max()
    np.subtract(a, b, out=difference)
    p, q = np.exp(a, out=a), np.exp(b, out=b)
    p_sum, q_sum = float(p.sum()), float(q.sum())
    kld = float(np.einsum("v,v->", p, difference)) / p_sum + log(q_sum / p_sum)
    p /= p_sum
    q /= q_sum
    tv = float(np.abs(np.subtract(p, q, out=p), out=p).sum()) / 2
    return RowFigures(max_abs, squared, max(kld, 0.0), tv)  # rounding may leave a divergence of nearly equal rows a hair below zero


def _power(rows: np.ndarray, finite: np.ndarray) -> float:
    """Sum of squares of the finite rows; row by row, for a megabyte stays in the cache and ten do not."""
    exact = (row.astype(np.float64) for row, counts in zip(rows, finite, strict=True) if counts)
    return sum(float(np.einsum("v,v->", row, row)) for row in exact)  # BLAS would start threads of its own in every thread


class RowComparison:
    """Accumulates a Comparison from slices in the order of their positions. noise: a margin up to this many logits counts as a tie."""

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self._kld: list[np.ndarray] = []  # float64 [R] a slice
        self._rows = self._equal = self._not_finite = self._same = self._real = 0
        self._positions = self._agreed = 0
        self._first_unequal: int | None = None
        self._first: Difference | None = None
        self._max_abs = self._squared = self._power = self._tv = 0.0

    def include(self, positions: np.ndarray, found: SliceFigures) -> None:
        """The figures of a slice at `positions` int [R]."""
        self._rows += len(positions)
        self._positions += len(positions)
        self._equal += int(found.equal.sum())
        self._not_finite += int((~found.finite).sum())
        self._same += int(found.same_top1.sum())
        self._agreed += int(found.same_top1.sum())
        self._real += found.real
        if self._first_unequal is None and not found.equal.all():
            self._first_unequal = int(positions[np.argmin(found.equal)])
        self._kld.append(found.kld)
        self._max_abs = max(self._max_abs, found.max_abs)
        self._squared += found.squared
        self._power += found.power
        self._tv += found.tv
        if found.first_difference is not None:
            self._differ(found.first_difference)

    def add_tops(self, positions: np.ndarray, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Top tokens, int [R] each, at positions whose logits are not known. Beside `include`."""
        self._positions += len(positions)
        self._agreed += int((reference == candidate).sum())
        for index in np.flatnonzero(reference != candidate)[:1]:
            self._differ(Difference(int(positions[index]), int(reference[index]), int(candidate[index]), None))

    def result(self) -> Comparison:
        """Raises ValueError when nothing was added."""
        if not self._rows:
            raise ValueError("no rows were compared")
        kld = np.concatenate(self._kld)
        broken = inf if self._not_finite else 0.0
        return Comparison(
            rows=self._rows,
            bit_equal_rows=self._equal,
            not_finite_rows=self._not_finite,
            first_unequal=self._first_unequal,
            max_abs=self._max_abs + broken,
            nmse=(self._squared / self._power if self._power else inf if self._squared else 0.0) + broken,
            kld_mean=float(kld.mean()),
            kld_p999=upper_quantile(kld, 0.999),
            kld_max=float(kld.max()),
            tv_mean=self._tv / self._rows + broken,
            same_top1=self._same / self._rows,
            real_frac=self._real / self._rows,
            noise=self.noise,
            positions=self._positions,
            full_agreement=self._agreed / self._positions,
            first_difference=self._first,
        )

    def _differ(self, difference: Difference) -> None:
        if self._first is None or difference.position < self._first.position:
            self._first = difference


def equal_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool [R]: rows that hold the same bits, once both are of a type that keeps every value of either: float32, or float64 if one is."""
    wide = max(a.dtype.itemsize, b.dtype.itemsize) > 4
    left, right = (np.ascontiguousarray(x, np.float64 if wide else np.float32).view(np.uint64 if wide else np.uint32) for x in (a, b))
    equal: np.ndarray = (left == right).all(1)
    return equal


def top_margin(row: np.ndarray) -> float:
    """Largest logit minus the second largest of [V]; infinite where there is only one."""
    if len(row) < 2:
        return inf
    second, first = np.partition(row.astype(np.float64), -2)[-2:]
    return float(first - second)


def upper_quantile(values: np.ndarray, fraction: float) -> float:
    """The smallest of the values that at least `fraction` of them do not exceed: never below the truth, and safe with infinities."""
    return float(np.sort(values)[max(int(np.ceil(fraction * len(values))) - 1, 0)])


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Bounds of a true rate at 95 % confidence (Wilson's score interval, 1927); (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    rate, spread = successes / trials, z * z / trials
    centre = rate + spread / 2
    half = z * sqrt(rate * (1 - rate) / trials + spread / (4 * trials))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))


@dataclass(frozen=True)
class Limits:
    """What a comparison must keep. None: not asked."""

    bit_equal: bool = False
    max_kld: float | None = None  # of the mean KL divergence, in nats
    max_nmse: float | None = None
    min_top1: float | None = None  # of the fraction with the same top token, over every known position

    def broken(self, found: Comparison) -> tuple[str, ...]:
        """What is not kept, in words; empty when all is well. A value that is not finite keeps no limit."""
        wrong = []
        if found.not_finite_rows:
            wrong.append(f"{found.not_finite_rows} of {found.rows} rows are not finite")
        if self.bit_equal and not found.bit_equal:
            wrong.append(
                f"{found.rows - found.bit_equal_rows} of {found.rows} rows differ in their bits, the first at position {found.first_unequal}"
            )
        for name, value, limit in (("mean KLD", found.kld_mean, self.max_kld), ("NMSE", found.nmse, self.max_nmse)):
            if limit is not None and not (isfinite(value) and value <= limit):
                wrong.append(f"{name} {value:.3g} exceeds {limit:g}")
        if self.min_top1 is not None and not found.full_agreement >= self.min_top1:
            wrong.append(f"the top token is the same at {found.full_agreement:.4f} of the positions, below {self.min_top1:g}")
        return tuple(wrong)

    def words(self) -> str:
        """The limits in one line."""
        terms = ["bit equality"] if self.bit_equal else []
        terms += [f"mean KLD <= {self.max_kld:g}"] if self.max_kld is not None else []
        terms += [f"NMSE <= {self.max_nmse:g}"] if self.max_nmse is not None else []
        terms += [f"same top token >= {self.min_top1:g}"] if self.min_top1 is not None else []
        return ", ".join(terms) or "finite rows"
