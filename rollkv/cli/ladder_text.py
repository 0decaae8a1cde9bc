"""A ladder as text: a Markdown table of the rungs between the ceilings and the fits. Pure functions of rows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollkv.tasks.ceilings import Ceilings
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.ladder_rows import Summary


def markdown(model: "TextModel", rows: Sequence[Mapping[str, Any]], bounds: "Ceilings", summary: "Summary", depth: int) -> str:
    """rows: those of row_dict and record, one a rung."""
    ran = next((row for row in rows if row["outcome"] == "ran"), None)
    machine = "" if ran is None else f", {ran['gpu'] or ran['backend']}"
    parts = [
        f"{model.path.name}{machine}: {depth} cells before decode, one load a rung",
        ceilings_line(bounds),
        _table(_HEADERS, [_line(row) for row in rows]),
        "\n".join(_notes(rows)),
        "\n".join(_fit_lines(summary)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_HEADERS = (
    "rung", "resident", "in tail", "tail MiB", "pp tok/s", "tg tok/s", "ms/token", "stdev", "p99", "link GB/s", "of link", "exposed ms", "sum ms",
    "overlap ms", "peak MiB", "limit MiB", "ttft s", "notes",
)  # fmt: skip


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    from rollkv.units import MIB

    if row["outcome"] != "ran":
        return (row["rung"], *[""] * (len(_HEADERS) - 2), "does not fit")
    peak, limit = (None if row[name] is None else row[name] / MIB for name in ("peak_device_bytes", "limit_bytes"))
    return (
        row["rung"],
        str(row["cells_in_window"]),
        str(row["cells_in_tail"]),
        f"{row['tail_bytes'] / MIB:.1f}",
        _number(row["pp_tokens_per_second"], 1),
        _number(row["tg_tokens_per_second"], 1),
        *(_number(row[name], 3) for name in ("step_ms", "step_ms_stdev", "step_ms_p99")),
        _number(row["tail_gbps"], 2),
        _number(row["link_percent"], 0, " %"),
        *(_number(row[name], 2) for name in ("exposed_ms", "predicted_sum_ms", "predicted_overlap_ms")),
        _number(peak, 0),
        _number(limit, 0),
        _number(row["ttft_seconds"], 3),
        ", ".join(_flags(row)),
    )


def _flags(row: Mapping[str, Any]) -> list[str]:
    words = [f"spread {row['spread_percent']:.0f} %"] if row["spread_flag"] else []
    words += [] if row["settled"] else ["not settled"]
    if row["over_limit"]:
        words.append("OVER CAP" if row["vram_target_bytes"] is not None else "over plan")
    return words


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the words of the last column mean, where they stand, and what is empty."""
    words = " ".join(flag for row in rows if row["outcome"] == "ran" for flag in _flags(row))
    notes = ["spread: the repetitions' median steps differ by more than 5 %"] if "spread" in words else []
    notes += ["not settled: no two warm-up steps in a row came within 2 %"] if "not settled" in words else []
    if any(row["outcome"] == "ran" and row["peak_device_bytes"] is None for row in rows):
        notes.append("no device: nothing is known of peak memory and link, so columns that need them are empty")
    if any(row["outcome"] == "ran" for row in rows) and all(row["exposed_ms"] is None for row in rows):
        notes.append("no rung without a tail ran, so exposed time and predictions are not known")
    return notes


def ceilings_line(bounds: "Ceilings") -> str:
    """Rates of the machine and bytes of a token, in one line."""
    from rollkv.units import format_rate, format_size

    rates = bounds.rates
    traffic = f"{format_size(bounds.token_bytes)} a token ({format_size(bounds.weight_bytes)} weights, {format_size(bounds.kv_bytes)} KV)"
    if rates.link_in is None or rates.link_out is None or rates.link_both is None or rates.hbm is None:
        return f"ceilings: not measured; {traffic}"
    return (
        f"ceilings: link {format_rate(rates.link_in)} in, {format_rate(rates.link_out)} out, {format_rate(rates.link_both)} both at once; "
        f"device memory {format_rate(rates.hbm)}; {traffic}; resident at most {bounds.roofline(0.0):.1f} tok/s"
    )


def _fit_lines(summary: "Summary") -> list[str]:
    from rollkv.units import format_rate, format_size

    lines = []
    for fit in summary.fits:
        t0 = "t0 not seen" if fit.t0_seconds is None else f"t0 {1e3 * fit.t0_seconds:.3f} ms"
        link = "link not seen" if fit.link_rate is None else f"link {format_rate(fit.link_rate)}"
        knee = "" if fit.knee_bytes() is None else f", knee at {format_size(int(fit.knee_bytes() or 0))}"
        lines.append(f"fit of the {fit.model} model: {t0}, {link}{knee}")
    for name, error in summary.ceiling_errors.items():
        if error is not None:
            lines.append(f"{name} model from the resident step and the measured link: off by up to {100 * error:.1f} %")
    if summary.knee_bytes is not None:
        lines.append(f"knee: the largest measured tail within 15 % of resident is {format_size(int(summary.knee_bytes))}")
    return [*lines, f"verdict: {summary.verdict.words}"]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table that reads as plain text too: numbers to the right, first and last column to the left."""
    widths = [max(len(line[index]) for line in (headers, *lines)) for index in range(len(headers))]
    left = {0, len(headers) - 1}

    def shown(line: Sequence[str]) -> str:
        words = (
            word.ljust(width) if index in left else word.rjust(width) for index, (word, width) in enumerate(zip(line, widths, strict=True))
        )
        return f"| {' | '.join(words)} |"

    rule = (("-" * width) if index in left else "-" * (width - 1) + ":" for index, width in enumerate(widths))
    return "\n".join((shown(headers), f"| {' | '.join(rule)} |", *map(shown, lines)))
