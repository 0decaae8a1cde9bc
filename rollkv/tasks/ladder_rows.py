"""What the rungs of a ladder come to: flat rows beside the ceilings, the fits of both models, the knee and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from rollkv.ladder_fit import Fit, Point, Verdict, deviation, fit_overlap, fit_sum, judge, measured_knee
from rollkv.metrics import upper_quantile
from rollkv.tasks.ceilings import Ceilings, Rates
from rollkv.tasks.ladder import RungResult

SPREAD_LIMIT = 0.05


@dataclass(frozen=True)
class Summary:
    """Fits and verdict over the rungs that ran."""

    resident_seconds: float | None
    fits: tuple[Fit, ...]
    knee_bytes: float | None  # largest measured tail within 15 % of resident
    verdict: Verdict
    ceiling_errors: dict[str, float | None]  # by model: its largest error with resident step and measured link instead of fitted ones

    def as_dict(self) -> dict[str, object]:
        flat: dict[str, object] = {"resident_ms": _milli(self.resident_seconds), "knee_tail_bytes": self.knee_bytes}
        for name in ("sum", "overlap"):
            fit = next((fit for fit in self.fits if fit.model == name), None)
            knee = fit.knee_bytes() if fit else None
            flat |= {
                f"fit_{name}_t0_ms": _milli(fit.t0_seconds) if fit else None,
                f"fit_{name}_link_gbps": _giga(fit.link_rate) if fit else None,
                f"fit_{name}_knee_bytes": knee,
                f"ceiling_{name}_error_percent": _hundred(self.ceiling_errors[name]),
            }
        return flat | {
            "verdict": self.verdict.model,
            "verdict_error_percent": _hundred(self.verdict.error),
            "verdict_words": self.verdict.words,
        }


def summarise(results: Sequence[RungResult], rates: Rates) -> Summary:
    """Fits link rate and t0 to the rungs that ran. The resident step is the median of the rungs without a tail."""
    points = _points(results)
    fits = tuple(fit for fit in (fit_sum(points), fit_overlap(points)) if fit is not None)
    resident = resident_seconds(results)
    errors: dict[str, float | None] = {"sum": None, "overlap": None}
    if resident is not None and rates.link_in is not None:
        expected = (Fit("sum", resident, rates.link_in), Fit("overlap", resident, rates.link_in))
        errors = {fit.model: fit.worst_error(points) for fit in expected}
    return Summary(resident, fits, measured_knee(points, resident), judge(points, fits), errors)


def resident_seconds(results: Sequence[RungResult]) -> float | None:
    """The median step without a tail; None when no such rung ran."""
    times = [point.seconds for point in _points(results) if point.tail_bytes == 0]
    return median(times) if times else None


def row_dict(result: RungResult, bounds: Ceilings, resident: float | None, depth: int) -> dict[str, object]:
    """A rung as a flat row, with what the models predict from the resident step and the measured link."""
    row: dict[str, object] = dict.fromkeys(ROW_FIELDS)
    row |= {"rung": result.rung.label, "depth": depth, "outcome": "ran" if result.ran else "does not fit", "refusal": result.refusal}
    if not result.ran:
        return row
    link, seconds, tail = bounds.rates.link_in, result.seconds, result.tail_bytes
    steps = [step for times in result.step_seconds for step in times]
    predicted = {
        name: Fit(name, resident, link).seconds(tail) if resident is not None and link is not None else None  # type: ignore[arg-type]
        for name in ("sum", "overlap")
    }
    return row | {
        "repetitions": len(result.step_seconds),
        "steps": len(result.step_seconds[0]),
        "cells_in_window": result.cells_in_window,
        "cells_in_tail": result.cells_in_tail,
        "tail_bytes": tail,
        "pp_tokens_per_second": depth / median(result.prefill_seconds),
        "ttft_seconds": median(result.ttft_seconds),
        "tg_tokens_per_second": 1 / seconds,
        "step_ms": _milli(seconds),
        "step_ms_stdev": _milli(deviation(steps)),
        "step_ms_p99": _milli(upper_quantile(np.array(steps), 0.99)),
        "tail_gbps": _giga(tail / seconds),
        "link_percent": _hundred(tail / seconds / link) if link is not None else None,
        "exposed_ms": _milli(max(seconds - resident, 0.0)) if resident is not None else None,
        "predicted_sum_ms": _milli(predicted["sum"]),
        "predicted_overlap_ms": _milli(predicted["overlap"]),
        "roofline_tokens_per_second": bounds.roofline(tail),
        "peak_device_bytes": result.peak_device_bytes,
        "limit_bytes": result.rung.vram_target or result.planned_bytes,
        "over_limit": over_limit(result),
        "warm_steps": max(count for count, _ in result.warm_steps),
        "settled": all(settled for _, settled in result.warm_steps),
        "spread_percent": _hundred(result.spread),
        "spread_flag": result.spread is not None and result.spread > SPREAD_LIMIT,
    }


ROW_FIELDS = (
    "rung", "depth", "outcome", "refusal", "repetitions", "steps", "cells_in_window", "cells_in_tail", "tail_bytes", "pp_tokens_per_second",
    "ttft_seconds", "tg_tokens_per_second", "step_ms", "step_ms_stdev", "step_ms_p99", "tail_gbps", "link_percent", "exposed_ms",
    "predicted_sum_ms", "predicted_overlap_ms", "roofline_tokens_per_second", "peak_device_bytes", "limit_bytes", "over_limit", "warm_steps",
    "settled", "spread_percent", "spread_flag",
)  # fmt: skip


def over_limit(result: RungResult) -> bool | None:
    """Whether the process held more than its cap, or its plan where it had no cap; None where it cannot be known."""
    limit = result.rung.vram_target or result.planned_bytes
    return None if result.peak_device_bytes is None or limit is None else result.peak_device_bytes > limit


def _points(results: Sequence[RungResult]) -> list[Point]:
    return [Point(result.tail_bytes, result.seconds) for result in results if result.ran]


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _giga(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9


def _hundred(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction
