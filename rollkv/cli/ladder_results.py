"""How a ladder ends: its rows in the form that was asked for, the picture, and what the check found wrong."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollkv.cli import ladder_text, results
from rollkv.errors import Interrupted, OutOfMemoryError, RollkvError

if TYPE_CHECKING:
    from rollkv.tasks.ceilings import Ceilings, Rates
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.ladder import Climb, RungResult
    from rollkv.tasks.ladder_rows import Summary
    from rollkv.tasks.peers import PeerResult

FORMS = ("md", "json", "jsonl", "csv")


def finish(
    model: "TextModel",
    climb: "Climb",
    bounds: "Mapping[int, Ceilings]",
    rates: "Rates",
    found: "Sequence[RungResult | PeerResult]",
    plot: Path | None,
    output: str,
    cut_short: RollkvError | None,
) -> None:
    """Prints, then draws. bounds: ceilings by depth; found: in the order of the runs; cut_short: what ended them early. Raises it, CheckFailed
    and, when no rung ran though all were tried, OutOfMemoryError."""
    from rollkv import dual_chunk
    from rollkv.kv_formats import kv_words
    from rollkv.tasks import record
    from rollkv.tasks.ladder import RungResult
    from rollkv.tasks.ladder_rows import summarise

    ours = [result for result in found if isinstance(result, RungResult)]
    if cut_short is None and not any(result.ran for result in ours):
        raise OutOfMemoryError(f"no rung fits; the first: {ours[0].refusal}")
    by_variant = {variant: [result for result in ours if result.rung.variant == variant] for variant in climb.variants}
    summaries = {} if climb.num_prompt is not None else {variant: summarise(results, rates) for variant, results in by_variant.items()}
    source = record.source_facts("ladder") | record.model_facts(model.path).as_dict()
    time = {"utc_time": record.utc_time()}
    rows = [source | row | time for row in _rows(climb, bounds, rates, found, summaries)]
    deepest = bounds[max(bounds)]
    positions = {variant: dual_chunk.facts(config) for variant, config in climb.variants.items()}
    ends = [facts | (summaries[variant].as_dict() if summaries else {}) for variant, facts in positions.items()]
    facts = deepest.as_dict() | (ends[0] if len(ends) == 1 else {"variants": ends})
    if output == "csv":
        text = _csv(rows)
    else:
        text = ladder_text.page(model, kv_words(climb.rungs[0].cache), rows, deepest, climb.variants, summaries) + (
            f"\ncut short: {cut_short}\n" if cut_short else ""
        )
    last: list[dict[str, Any]] = []
    if output == "jsonl":
        shared = deepest.as_dict() | {"interrupted": isinstance(cut_short, Interrupted)}
        last = [source | {"line": "summary", "depth": max(bounds)} | shared | end | time for end in ends]

    def draw() -> None:
        if plot is not None and summaries:
            _draw(model, climb, rows, summaries, deepest, plot)

    results.finish("text" if output in ("md", "csv") else output, text, [*rows, *last], facts, _failure(ours), cut_short, draw)


def _draw(
    model: "TextModel",
    climb: "Climb",
    rows: Sequence[Mapping[str, Any]],
    summaries: "Mapping[str, Summary]",
    bounds: "Ceilings",
    path: Path,
) -> None:
    """Nothing is drawn where no rung ran."""
    from rollkv import ladder_plot
    from rollkv.dual_chunk import short_words
    from rollkv.kv_formats import kv_words

    ran = [row for row in rows if row["line"] == "rung" and row["outcome"] == "ran"]
    if not ran:
        return
    series = [
        ladder_plot.Series(short_words(config), ladder_text.rows_of(config, ran), summaries[variant].fits)
        for variant, config in climb.variants.items()
    ]
    cells = f"{ran[0]['depth']} {'random ' if climb.fill == 'random' else ''}cells"
    verdicts = [f"{variant}: " * bool(variant) + summary.verdict.words for variant, summary in summaries.items()]
    ladder_plot.draw(
        series, bounds.roofline, path, "\n".join((f"{model.path.name}, {kv_words(climb.rungs[0].cache)}, {cells} before decode", *verdicts))
    )


def _rows(
    climb: "Climb",
    bounds: "Mapping[int, Ceilings]",
    rates: "Rates",
    found: "Sequence[RungResult | PeerResult]",
    summaries: "Mapping[str, Summary]",
) -> list[dict[str, Any]]:
    """Flat rows of the same columns."""
    from rollkv import dual_chunk
    from rollkv.tasks import record
    from rollkv.tasks.ladder import RungResult
    from rollkv.tasks.ladder_rows import peer_row, row_dict

    nothing = record.machine_facts(None, rates.link_in)
    line = "rung" if climb.num_prompt is None else "depth"
    rows: list[dict[str, Any]] = []
    for result in found:
        if isinstance(result, RungResult):
            rung, ceilings = result.rung, bounds[result.rung.depth]
            asked = record.cache_facts(rung.cache, rung.vram_target) | dual_chunk.facts(rung.config)
            resident = summaries[rung.variant].resident_seconds if summaries else None
            row = row_dict(result, ceilings, resident)
            rows.append({"line": line} | asked | (result.machine or nothing) | ceilings.as_dict() | row)
        else:
            ceilings = bounds[max(test.depth for test in result.tests)]
            asked = dict.fromkeys(record.cache_facts(climb.rungs[0].cache, None)) | dual_chunk.facts(None)  # its own affair
            rows.append({"line": "peer"} | asked | nothing | ceilings.as_dict() | peer_row(result))
    return rows


def _failure(results: "Sequence[RungResult]") -> str | None:
    """What is wrong, in one line."""
    from rollkv.tasks.ladder_rows import lost_needles, over_limit

    over = [result.rung.name for result in results if over_limit(result) and result.rung.vram_target is not None]
    found = [f"{len(over)} rungs hold more device memory than their cap: {', '.join(over)}"] if over else []
    lost = lost_needles(results)
    found += [f"{len(lost)} rungs miss a needle that a resident one found: {', '.join(lost)}"] if lost else []
    return "; ".join(found) or None


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """All columns of the rows, unknown values empty; nothing at all without rows."""
    if not rows:
        return ""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
