"""The picture of a ladder: decode and prefill against the tail, with the curves of both models and the ceiling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkv.ladder_fit import Fit
from rollkv.plots import save
from rollkv.units import MIB

_CURVE_POINTS = 200
# Tails that differ by more than this factor stand on a logarithmic axis: on a linear one the knee would lie within its first mark.
_WIDE = 32
_MARKERS = (("o", "black"), ("s", "#3b6fb5"))  # of two variants at most
_STYLES = {"sum": ("#c8553d", "--"), "overlap": ("#4c9f70", "-")}


@dataclass(frozen=True)
class Series:
    """One variant. rows: those of the rungs that ran, with tail_bytes, tg_tokens_per_second and pp_tokens_per_second, None where no prefill was
    timed. fits: the curves to draw."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    fits: Sequence[Fit]


def draw(series: Sequence[Series], ceiling: Callable[[float], float | None], path: Path, title: str) -> None:
    """Where no prefill was timed decode is drawn alone. ceiling(tail bytes): new tokens a second at best, None if not known.
    plots.check has been asked before. Raises as plots.save."""
    from matplotlib.figure import Figure

    rows = [row for one in series for row in one.rows]
    spilled = [row["tail_bytes"] for row in rows if row["tail_bytes"]]
    largest, smallest = max(spilled, default=0), min(spilled, default=0)
    wide = largest > _WIDE * smallest
    xs = [largest * index / _CURVE_POINTS for index in range(_CURVE_POINTS + 1)]
    if wide:
        xs = [smallest * index / _CURVE_POINTS for index in range(_CURVE_POINTS)]
        xs += [smallest * (largest / smallest) ** (index / _CURVE_POINTS) for index in range(_CURVE_POINTS + 1)]
    with_prefill = all(row["pp_tokens_per_second"] is not None for row in rows)
    figure = Figure(figsize=(10 if with_prefill else 6, 4.5), layout="constrained")
    decode, *prefill = figure.subplots(1, 2 if with_prefill else 1, squeeze=False)[0]
    for one, (marker, colour) in zip(series, _MARKERS, strict=False):
        points = sorted(one.rows, key=lambda row: row["tail_bytes"])
        tails = [row["tail_bytes"] / MIB for row in points]
        rates = [row["tg_tokens_per_second"] for row in points]
        decode.plot(tails, rates, marker, color=colour, fillstyle="none", label=f"measured, {one.name}")
        for fit in one.fits:
            fit_colour, line = _STYLES[fit.model]
            shown = [(x / MIB, 1 / fit.seconds(x)) for x in xs if fit.seconds(x) > 0]
            own = f", {one.name}" if len(series) > 1 else ""
            label = f"{fit.model} model, fitted{own}"
            decode.plot([x for x, _ in shown], [y for _, y in shown], line, color=colour if own else fit_colour, label=label)
        for axes in prefill:
            axes.plot(tails, [row["pp_tokens_per_second"] for row in points], f"{marker}-", color=colour, label=one.name)
    best = [(x / MIB, rate) for x in xs if (rate := ceiling(x)) is not None]
    if best:
        decode.plot([x for x, _ in best], [y for _, y in best], ":", color="grey", label="ceiling")
    for axes, name in zip((decode, *prefill), ("decode", "prefill"), strict=False):
        axes.set_xlabel("tail, MiB")
        axes.set_ylabel(f"{name}, tokens a second")
        if wide:
            axes.set_xscale("symlog", linthresh=smallest / MIB)
        if not wide or axes is not decode:
            axes.set_ylim(0, 1.05 * axes.dataLim.ymax)
        axes.grid(alpha=0.3)
    if wide:
        decode.set_yscale("log")
    for axes in (decode, *prefill):
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    save(figure, path)
