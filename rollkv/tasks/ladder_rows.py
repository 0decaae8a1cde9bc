"""What the rungs of a ladder come to: flat rows beside the ceilings, the fits of both models, the knee and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from rollkv.ladder_fit import Fit, Point, Verdict, deviation, fit_overlap, fit_sum, judge, measured_knee
from rollkv.metrics import upper_quantile
from rollkv.tasks.ceilings import Ceilings, Rates
from rollkv.tasks.ladder import RungResult
from rollkv.tasks.peers import LLAMA_BENCH, PeerResult
from rollkv.units import giga

SPREAD_LIMIT = 0.05


@dataclass(frozen=True)
class Summary:
    """Fits and verdict over the rungs that ran."""

    resident_seconds: float | None
    fits: tuple[Fit, ...]
    knee_bytes: float | None  # largest measured tail up to which all steps are within 15 % of resident
    verdict: Verdict
    ceiling_errors: dict[str, float | None]  # by model: its largest error with resident step and measured link instead of fitted ones

    def as_dict(self) -> dict[str, object]:
        flat: dict[str, object] = {"resident_ms": _milli(self.resident_seconds), "knee_tail_bytes": self.knee_bytes}
        for name in ("sum", "overlap"):
            fit = next((fit for fit in self.fits if fit.model == name), None)
            knee = fit.knee_bytes() if fit else None
            flat |= {
                f"fit_{name}_t0_ms": _milli(fit.t0_seconds) if fit else None,
                f"fit_{name}_link_gbps": giga(fit.link_rate) if fit else None,
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
    if resident is not None and rates.link is not None:
        errors = {fit.model: fit.worst_error(points) for fit in _expected(resident, rates.link)}
    return Summary(resident, fits, measured_knee(points, resident), judge(points, fits, link_measured=rates.link_in is not None), errors)


def resident_seconds(results: Sequence[RungResult]) -> float | None:
    """The median step without a tail; None when no such rung ran."""
    times = [point.seconds for point in _points(results) if point.tail_bytes == 0]
    return median(times) if times else None


def row_dict(result: RungResult, bounds: Ceilings, resident: float | None) -> dict[str, object]:
    """A rung as a flat row, with what the models predict from the resident step and the measured link. Tests have llama-bench's names."""
    rung, climb = result.rung, result.climb
    row: dict[str, object] = dict.fromkeys(ROW_FIELDS)
    row |= {
        "rung": rung.label,
        "depth": rung.depth,
        "fill": climb.fill,
        "outcome": "ran" if result.ran else "does not fit",
        "refusal": result.refusal,
        "tg_test": bench_name("tg", climb.num_steps, rung.depth),
    }
    prefilled = rung.depth if climb.times_depth else climb.num_prompt
    if prefilled is not None:
        row["pp_test"] = bench_name("pp", prefilled, 0 if climb.times_depth else rung.depth)
    if not result.ran:
        return row
    link, seconds, tail, steps = bounds.rates.link_in, result.seconds, result.tail_bytes, result.step_seconds
    on_host = result.peak_device_bytes is None  # no device: neither memory nor link
    predicted: dict[str, float | None] = {"sum": None, "overlap": None}
    if resident is not None and bounds.rates.link is not None:
        predicted = {model.model: model.seconds(tail) for model in _expected(resident, bounds.rates.link)}
    if prefilled is not None:
        row |= {
            "pp_tokens_per_second": prefilled / median(result.prefill_seconds),
            "pp_tokens_per_second_stdev": deviation([prefilled / one for one in result.prefill_seconds]),
            "ttft_seconds": median(result.ttft_seconds) if result.ttft_seconds else None,
            "pp_spread_percent": _hundred(result.prefill_spread),
        }
    return row | {
        "repetitions": len(result.repetitions),
        "steps": climb.num_steps,
        "cells_in_window": result.cells_in_window,
        "cells_in_tail": result.cells_in_tail,
        "tail_bytes": tail,
        "tg_tokens_per_second": 1 / seconds,
        "tg_tokens_per_second_stdev": deviation([1 / median(repetition.step_seconds) for repetition in result.repetitions]),
        "step_ms": _milli(seconds),
        "step_ms_stdev": _milli(deviation(steps)),
        "step_ms_p99": _milli(upper_quantile(np.array(steps), 0.99)),
        "tail_gbps": None if on_host and link is None else giga(tail / seconds),
        "link_percent": _hundred(tail / seconds / link) if link is not None else None,
        "exposed_ms": _milli(max(seconds - resident, 0.0)) if resident is not None else None,
        "predicted_sum_ms": _milli(predicted["sum"]),
        "predicted_overlap_ms": _milli(predicted["overlap"]),
        "roofline_tokens_per_second": bounds.roofline(tail),
        "peak_device_bytes": result.peak_device_bytes,
        "limit_bytes": None if on_host else rung.vram_target or result.planned_bytes,
        "over_limit": over_limit(result),
        "needle_found": result.found,
        "warm_steps": max(repetition.warm_steps for repetition in result.repetitions),
        "settled": all(repetition.settled for repetition in result.repetitions),
        "spread_percent": _hundred(result.spread),
        "spread_flag": _too_wide(result.spread),
        "pp_spread_flag": _too_wide(result.prefill_spread),
    }


def peer_row(result: PeerResult) -> dict[str, object]:
    """A peer's run as a row of the same columns; its rates are means of its repetitions."""
    row: dict[str, object] = dict.fromkeys(ROW_FIELDS)
    for test in result.tests:
        for kind, count, rate in (("pp", test.num_prompt, result.prefill), ("tg", test.num_steps, result.decode)):
            if count:
                row[f"{kind}_test"] = bench_name(kind, count, test.depth)
                row[f"{kind}_tokens_per_second"] = rate.mean if rate is not None else None
                row[f"{kind}_tokens_per_second_stdev"] = rate.deviation if rate is not None else None
    return row | {
        "rung": f"{LLAMA_BENCH} {result.setup.label}",
        "depth": max(test.depth for test in result.tests),
        "outcome": "ran" if result.failure is None else "failed",
        "refusal": result.failure,
        "repetitions": result.repetitions,
        "step_ms": _milli(1 / result.decode.mean) if result.decode is not None else None,
        "peer": LLAMA_BENCH,
        "peer_build": result.build,
        "peer_arguments": " ".join(result.arguments),
    }


ROW_FIELDS = (
    "rung", "depth", "fill", "outcome", "refusal", "repetitions", "steps", "cells_in_window", "cells_in_tail", "tail_bytes", "pp_test",
    "pp_tokens_per_second", "pp_tokens_per_second_stdev", "ttft_seconds", "tg_test", "tg_tokens_per_second", "tg_tokens_per_second_stdev",
    "step_ms", "step_ms_stdev", "step_ms_p99", "tail_gbps", "link_percent", "exposed_ms", "predicted_sum_ms", "predicted_overlap_ms",
    "roofline_tokens_per_second", "peak_device_bytes", "limit_bytes", "over_limit", "needle_found", "warm_steps", "settled",
    "spread_percent", "spread_flag", "pp_spread_percent", "pp_spread_flag", "peer", "peer_build", "peer_arguments",
)  # fmt: skip


def bench_name(kind: str, count: int, depth: int) -> str:
    """ "pp512", or "tg64 @ d4096" behind cells."""
    return f"{kind}{count}" + (f" @ d{depth}" if depth else "")


def lost_needles(results: Sequence[RungResult]) -> list[str]:
    """Names of the rungs that missed a needle which a rung of their variant without a tail found. A repetition reads the same prompt on every
    rung, so each is compared with itself: the same prompts must give the same replies, unless cells change their type when they leave the window."""
    found = {place for result in results if result.ran and not result.tail_bytes for place in _needles(result, found=True)}
    return [result.rung.name for result in results if not result.rung.cache.recodes and found & _needles(result, found=False)]


def _needles(result: RungResult, *, found: bool) -> set[tuple[str, int, int]]:
    """(variant, depth, repetition) of the needles that were found, or missed."""
    rung = result.rung
    return {(rung.variant, rung.depth, number) for number, repetition in enumerate(result.repetitions) if repetition.found is found}


def over_limit(result: RungResult) -> bool | None:
    """Whether the process held more than its cap, or its plan where it had no cap; None where it cannot be known."""
    limit = result.rung.vram_target or result.planned_bytes
    return None if result.peak_device_bytes is None or limit is None else result.peak_device_bytes > limit


def _expected(resident: float, link: float) -> tuple[Fit, Fit]:
    """Both models with measured parameters instead of fitted ones."""
    return Fit("sum", resident, link), Fit("overlap", resident, link)


def _too_wide(spread: float | None) -> bool:
    return spread is not None and spread > SPREAD_LIMIT


def _points(results: Sequence[RungResult]) -> list[Point]:
    return [Point(result.tail_bytes, result.seconds) for result in results if result.ran]


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _hundred(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction
