"""A ladder as text: a Markdown table of the rungs between the ceilings and the fits; depths as llama-bench shows them. Pure functions of rows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollkv.cli import ladder_compare
from rollkv.cli.markdown import markdown_table, mib, number

if TYPE_CHECKING:
    from rollkv.config import ModelConfig
    from rollkv.tasks.ceilings import Ceilings
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.ladder_rows import Summary

Row = Mapping[str, Any]


def page(
    model: "TextModel",
    kv: str,
    rows: Sequence[Row],
    bounds: "Ceilings",
    variants: "Mapping[str, ModelConfig]",
    summaries: "Mapping[str, Summary]",
) -> str:
    """Title with the cache types in words, ceilings, the table that compares the variants if there are several, and for each of them its rungs and fits.
    rows: those of row_dict, peer_row and record. summaries: by variant, for rungs at one depth; none: lines of depths, beside the ceilings at the
    largest."""
    from rollkv.dual_chunk import short_words

    words = f"{kv}, {' and '.join(map(short_words, variants.values()))}"
    depths = dict.fromkeys(row["depth"] for row in rows)
    if not rows:
        title = f"{model.path.name}, {words}"
    elif summaries:
        title = f"{model.path.name}{_machine(rows)}, {words}: {rows[0]['depth']} {_cells(rows)} before decode"
    else:
        title = f"{model.path.name}{_machine(rows)}, {words}: behind {', '.join(map(str, depths))} {_cells(rows)}; ceilings at the largest depth"
    parts = [title, ceilings_line(bounds)]
    if not rows:
        return "\n\n".join(parts) + "\n"
    if len(variants) > 1:
        parts.append(ladder_compare.table([rows_of(config, rows, peers=False) for config in variants.values()], list(variants)))
    for variant, config in variants.items():
        parts += [f"{variant}:"] if variant else []
        parts += _variant(rows_of(config, rows), summaries.get(variant))
    return "\n\n".join(part for part in parts if part) + "\n"


def rows_of(config: "ModelConfig", rows: Sequence[Row], *, peers: bool = True) -> list[Row]:
    """The rungs that computed it, and the peers beside them."""
    from rollkv.dual_chunk import facts

    wanted = facts(config)
    return [row for row in rows if (peers and row["line"] == "peer") or all(row[name] == value for name, value in wanted.items())]


def ceilings_line(bounds: "Ceilings") -> str:
    """Rates of the machine and bytes of a token, in one line."""
    from rollkv.units import format_rate, format_size

    rates = bounds.rates
    traffic = f"{format_size(bounds.token_bytes)} a token ({format_size(bounds.weight_bytes)} weights, {format_size(bounds.kv_bytes)} KV)"
    given = "" if rates.link_given is None else f"; link reckoned with {format_rate(rates.link_given)} (given)"
    if rates.link_in is None or rates.link_out is None or rates.link_both is None or rates.hbm is None:
        return f"ceilings: not measured{given}; {traffic}"
    return (
        f"ceilings: link {format_rate(rates.link_in)} in, {format_rate(rates.link_out)} out, {format_rate(rates.link_both)} both at once "
        f"({rates.pcie.words}){given}; device memory {format_rate(rates.hbm)}; {traffic}; resident at most {bounds.roofline(0.0):.1f} tok/s"
    )


def _variant(rows: Sequence[Row], summary: "Summary | None") -> list[str]:
    if summary is None:
        table = markdown_table(_DEPTH_HEADERS, [line for row in rows for line in _depth_lines(row)], {0, 1, len(_DEPTH_HEADERS) - 1})
    else:
        table = markdown_table(_RUNG_HEADERS, [_rung_line(row) for row in rows], {0, len(_RUNG_HEADERS) - 1})
    return [table, "\n".join(_notes(rows)), "" if summary is None else "\n".join(_fit_lines(summary))]


def _machine(rows: Sequence[Row]) -> str:
    ran = next((row for row in rows if row["backend"] is not None), None)
    return "" if ran is None else f", {ran['gpu'] or ran['backend']}"


def _cells(rows: Sequence[Row]) -> str:
    return "RANDOM cells (--fill random)" if any(row["fill"] == "random" for row in rows) else "cells"


# -- rungs of a ladder ---------------------------------------------------------------------------------------------------------

_RUNG_HEADERS = (
    "rung", "resident", "in tail", "tail MiB", "pp tok/s", "tg tok/s", "ms/token", "stdev", "p99", "link GB/s", "of link", "exposed ms", "sum ms",
    "overlap ms", "peak MiB", "limit MiB", "needle", "ttft s", "notes",
)  # fmt: skip


def _rung_line(row: Row) -> tuple[str, ...]:
    return (
        row["rung"],
        number(row["cells_in_window"], 0),
        number(row["cells_in_tail"], 0),
        mib(row["tail_bytes"], 1),
        number(row["pp_tokens_per_second"], 1),
        number(row["tg_tokens_per_second"], 1),
        *(number(row[name], 3) for name in ("step_ms", "step_ms_stdev", "step_ms_p99")),
        number(row["tail_gbps"], 2),
        number(row["link_percent"], 0, " %"),
        *(number(row[name], 2) for name in ("exposed_ms", "predicted_sum_ms", "predicted_overlap_ms")),
        mib(row["peak_device_bytes"], 0),
        mib(row["limit_bytes"], 0),
        ladder_compare.NEEDLE[row["needle_found"]],
        number(row["ttft_seconds"], 3),
        ", ".join(_flags(row)),
    )


# -- depths --------------------------------------------------------------------------------------------------------------------

_DEPTH_HEADERS = ("rung", "test", "tok/s", "+/-", "resident", "in tail", "link GB/s", "of link", "peak MiB", "limit MiB", "notes")


def _depth_lines(row: Row) -> list[tuple[str, ...]]:
    notes = ", ".join(_flags(row))
    tail = (number(row["cells_in_window"], 0), number(row["cells_in_tail"], 0), number(row["tail_gbps"], 2))
    cache = (*tail, number(row["link_percent"], 0, " %"), mib(row["peak_device_bytes"], 0), mib(row["limit_bytes"], 0), notes)
    lines = []
    for kind, rest in (("pp", ("",) * len(cache)), ("tg", cache)):
        if row[f"{kind}_test"] is not None:
            rate = (number(row[f"{kind}_tokens_per_second"], 2), number(row[f"{kind}_tokens_per_second_stdev"], 2))
            lines.append((row["rung"], row[f"{kind}_test"], *rate, *rest))
    return lines


# -- notes and fits ------------------------------------------------------------------------------------------------------------


def _flags(row: Row) -> list[str]:
    if row["outcome"] == "failed":
        return [row["refusal"].replace("|", "/")]
    if row["outcome"] != "ran":
        return [row["outcome"]]
    if row["peer"] is not None:
        return [f"build {row['peer_build']}"]
    words = [f"spread {row['spread_percent']:.0f} %"] if row["spread_flag"] else []
    words += [f"pp spread {row['pp_spread_percent']:.0f} %"] if row["pp_spread_flag"] else []
    words += [] if row["settled"] else ["not settled"]
    if row["over_limit"]:
        words.append("OVER CAP" if row["vram_target_bytes"] is not None else "over plan")
    return words


def _notes(rows: Sequence[Row]) -> list[str]:
    """What the words of the last column mean, where they stand, and what is empty."""
    ran = [row for row in rows if row["line"] != "peer" and row["outcome"] == "ran"]
    words = " ".join(flag for row in ran for flag in _flags(row))
    notes = ["spread: the repetitions' median steps, or their prefills (pp), differ by more than 5 %"] if "spread" in words else []
    notes += ["not settled: no two warm-up steps in a row came within 2 %"] if "not settled" in words else []
    if any(row["needle_found"] is False for row in ran):
        notes.append("MISSED: the reply does not hold the number that stands at the beginning of the prompt")
    if any(row["fill"] == "random" for row in ran):
        notes.append("random cells: keys and values are drawn, not computed, so nothing is known of needle and ttft")
    if any(row["peak_device_bytes"] is None for row in ran):
        notes.append("no device: nothing is known of peak memory and link, so columns that need them are empty")
    if ran and all(row["line"] == "rung" and row["exposed_ms"] is None for row in ran):
        notes.append("no rung without a tail ran, so exposed time and predictions are not known")
    return notes


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
        lines.append(
            f"knee: the largest measured tail up to which all steps are within 15 % of resident is {format_size(int(summary.knee_bytes))}"
        )
    return [*lines, f"verdict: {summary.verdict.words}"]
