"""The picture of a ladder: decode and prefill against the tail, with the curves of both models and the ceiling."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollkv.errors import UsageError
from rollkv.ladder_fit import Fit
from rollkv.units import MIB

_CURVE_POINTS = 200
_STYLES = {"sum": ("#c8553d", "--"), "overlap": ("#4c9f70", "-")}


def draw(rows: Sequence[Mapping[str, Any]], fits: Sequence[Fit], ceiling: Callable[[float], float | None], path: Path, title: str) -> None:
    """rows: those of the rungs that ran, with tail_bytes, tg_tokens_per_second and pp_tokens_per_second, None where no prefill was timed:
    then decode is drawn alone. fits: the curves to draw. ceiling(tail bytes): new tokens a second at best, None if not known.
    plots.check has been asked before. Raises UsageError when the file cannot be written."""
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: row["tail_bytes"])
    tails = [row["tail_bytes"] / MIB for row in rows]
    largest = max((row["tail_bytes"] for row in rows), default=0)
    xs = [largest * index / _CURVE_POINTS for index in range(_CURVE_POINTS + 1)]
    with_prefill = all(row["pp_tokens_per_second"] is not None for row in rows)
    figure = Figure(figsize=(10 if with_prefill else 6, 4.5), layout="constrained")
    decode, *prefill = figure.subplots(1, 2 if with_prefill else 1, squeeze=False)[0]
    decode.plot(tails, [row["tg_tokens_per_second"] for row in rows], "o", color="black", label="measured")
    for fit in fits:
        colour, line = _STYLES[fit.model]
        shown = [(x / MIB, 1 / fit.seconds(x)) for x in xs if fit.seconds(x) > 0]
        decode.plot([x for x, _ in shown], [y for _, y in shown], line, color=colour, label=f"{fit.model} model, fitted")
    best = [(x / MIB, rate) for x in xs if (rate := ceiling(x)) is not None]
    if best:
        decode.plot([x for x, _ in best], [y for _, y in best], ":", color="grey", label="ceiling")
    for axes in prefill:
        axes.plot(tails, [row["pp_tokens_per_second"] for row in rows], "o-", color="black")
    for axes, name in zip((decode, *prefill), ("decode", "prefill"), strict=False):
        axes.set_xlabel("tail, MiB")
        axes.set_ylabel(f"{name}, tokens a second")
        axes.set_ylim(0, 1.05 * axes.dataLim.ymax)
        axes.grid(alpha=0.3)
    decode.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot write it: {error.strerror or error}; name another place") from error
