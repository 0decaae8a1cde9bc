"""The arithmetic of a ladder: where its rungs lie, what two models predict for a step, and what the measured rungs say about them.

A rung is a point (tail bytes that every new token streams, seconds of a step). Two models:
  sum      t0 + tail / link      copies and compute one after the other
  overlap  max(t0, tail / link)  copies beside compute
t0 is the step with everything resident. Fits minimise the squares of relative errors, since times of a ladder span an order of magnitude.
Pure functions; knows no engine and no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median, stdev
from typing import Literal

KNEE = 0.15  # a step this much longer than the resident one still counts as equal
TELLS_APART = 0.02  # models whose largest errors differ by less are not told apart
HOLDS_WITHIN = 0.15  # a model whose largest error exceeds this does not hold

ModelName = Literal["sum", "overlap"]


@dataclass(frozen=True)
class Point:
    """One rung. seconds > 0."""

    tail_bytes: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A model with its parameters. None: the rungs do not show it (no rung is bound by it); it then counts as no time at all."""

    model: ModelName
    t0_seconds: float | None
    link_rate: float | None  # bytes a second

    def seconds(self, tail_bytes: float) -> float:
        """Predicted time of a step."""
        copy = tail_bytes / self.link_rate if self.link_rate else 0.0
        t0 = self.t0_seconds or 0.0
        return t0 + copy if self.model == "sum" else max(t0, copy)

    def worst_error(self, points: Sequence[Point]) -> float:
        """The largest error, as a fraction of the measured time. `points` is not empty."""
        return max(abs(self.seconds(point.tail_bytes) - point.seconds) / point.seconds for point in points)

    def knee_bytes(self) -> float | None:
        """The tail at which a step takes 1 + KNEE times t0; None where a parameter is not known."""
        if self.t0_seconds is None or self.link_rate is None:
            return None
        return (KNEE if self.model == "sum" else 1 + KNEE) * self.t0_seconds * self.link_rate

    def _squares(self, points: Sequence[Point]) -> float:
        return sum(((self.seconds(point.tail_bytes) - point.seconds) / point.seconds) ** 2 for point in points)


@dataclass(frozen=True)
class Verdict:
    """Which model describes the rungs, and its largest error as a fraction."""

    model: Literal["sum", "overlap", "neither", "undecided"]
    error: float | None
    words: str


def place_rungs(count: int, largest_bytes: float, knee_bytes: float | None) -> tuple[float, ...]:
    """`count` tails from 0 to largest_bytes, rising. With a knee inside: up to it in even steps (it is one of them), then by a constant
    factor, so that rungs stand close where the curve bends. Without, or with fewer than three rungs: in even steps.

    Raises ValueError for less than one rung.
    """
    if count < 1:
        raise ValueError(f"{count} rungs")
    if count == 1:
        return (0.0,)
    if knee_bytes is None or not 0 < knee_bytes < largest_bytes or count == 2:
        return tuple(largest_bytes * index / (count - 1) for index in range(count))
    below = (count - 1) // 2
    above = count - 1 - below
    rising = [knee_bytes * index / below for index in range(below + 1)]
    return (*rising, *(knee_bytes * (largest_bytes / knee_bytes) ** (index / above) for index in range(1, above + 1)))


def fit_sum(points: Sequence[Point]) -> Fit | None:
    """Weighted linear regression; neither parameter below zero. None with fewer than two different tails."""
    if len({point.tail_bytes for point in points}) < 2:
        return None
    # Rows (1 / t, x / t) against 1: the normal equations of t0 and the slope.
    ones = [1 / point.seconds for point in points]
    tails = [point.tail_bytes / point.seconds for point in points]
    aa, ab, bb = _dot(ones, ones), _dot(ones, tails), _dot(tails, tails)
    a, b = sum(ones), sum(tails)
    determinant = aa * bb - ab * ab
    t0, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if slope <= 0:
        return Fit("sum", a / aa, None)
    if t0 <= 0:
        return Fit("sum", None, bb / b)
    return Fit("sum", t0, 1 / slope)


def fit_overlap(points: Sequence[Point]) -> Fit | None:
    """The exact least-squares fit of max(t0, tail / link). None with fewer than two different tails.

    The maximum parts the rungs, by their tails, into flat and rising ones. Either no rung lies on the bend and each part is fitted alone,
    or one does and a single parameter remains: all partings and all bends are tried, the best by its own squares is taken.
    """
    if len({point.tail_bytes for point in points}) < 2:
        return None
    ordered = sorted(points, key=lambda point: point.tail_bytes)
    fits = []
    for split in range(len(ordered) + 1):
        flat, rising = ordered[:split], [point for point in ordered[split:] if point.tail_bytes > 0]
        t0 = _scale([1 / point.seconds for point in flat])
        slope = _scale([point.tail_bytes / point.seconds for point in rising])
        fits.append(Fit("overlap", t0, 1 / slope if slope else None))
    for bend in {point.tail_bytes for point in ordered if point.tail_bytes > 0}:
        scale = _scale([max(1.0, point.tail_bytes / bend) / point.seconds for point in ordered])
        assert scale is not None
        fits.append(Fit("overlap", scale, bend / scale))
    return min(fits, key=lambda fit: fit._squares(points))


def measured_knee(points: Sequence[Point], resident_seconds: float | None) -> float | None:
    """The largest tail up to which every step is within KNEE of the resident one; None without a resident step or such a rung."""
    if resident_seconds is None:
        return None
    slow = min((point.tail_bytes for point in points if point.seconds > (1 + KNEE) * resident_seconds), default=inf)
    return max((point.tail_bytes for point in points if point.tail_bytes < slow), default=None)


def judge(points: Sequence[Point], fits: Sequence[Fit], *, link_measured: bool) -> Verdict:
    """Compares the largest errors of the fitted models. Two parameters fit any two rungs, so three different tails are asked for; and without
    a measured link nothing is copied over one, whatever the times look like."""
    if not link_measured:
        return Verdict("undecided", None, "undecided: no link was measured, and both models are about one")
    if len({point.tail_bytes for point in points}) < 3 or len(fits) < 2:
        return Verdict("undecided", None, "undecided: at least three rungs with different tails are needed")
    errors = sorted((fit.worst_error(points), fit.model) for fit in fits)
    (error, model), (other_error, other) = errors[0], errors[1]
    if error > HOLDS_WITHIN:
        return Verdict(
            "neither", error, f"neither model holds: {model} is off by up to {_percent(error)}, {other} by {_percent(other_error)}"
        )
    if other_error - error < TELLS_APART:
        near = f"{_percent(error)} ({model}) and {_percent(other_error)} ({other})"
        return Verdict("undecided", other_error, f"undecided: the models' largest errors are {near}; longer tails tell them apart")
    return Verdict(model, error, f"the {model} model holds within {_percent(error)}; {other} is off by up to {_percent(other_error)}")


def relative_spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median; None for fewer than two values."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample; None for fewer than two values."""
    return stdev(values) if len(values) > 1 else None


def agree(first: float, second: float, within: float) -> bool:
    """Whether two times differ by no more than `within` of the shorter one."""
    return abs(first - second) <= within * min(first, second)


def _scale(ratios: list[float]) -> float | None:
    """The factor that brings the ratios nearest to 1; None without any."""
    return sum(ratios) / _dot(ratios, ratios) if ratios else None


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
