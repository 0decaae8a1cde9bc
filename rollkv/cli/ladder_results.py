"""How a ladder ends: its rows in the form that was asked for, the picture, and what the check found wrong."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollkv.cli import ladder_text, results
from rollkv.errors import OutOfMemoryError

if TYPE_CHECKING:
    from rollkv.tasks.ceilings import Ceilings, Rates
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.ladder import Climb, RungResult
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
    interrupted: bool,
) -> None:
    """Prints and draws. bounds: ceilings by depth; found: in the order of the runs. Raises CheckFailed and, when no rung ran though nobody
    interrupted, OutOfMemoryError."""
    from rollkv.tasks import record
    from rollkv.tasks.ladder import RungResult
    from rollkv.tasks.ladder_rows import lost_needles, summarise

    ours = [result for result in found if isinstance(result, RungResult)]
    if not interrupted and not any(result.ran for result in ours):
        raise OutOfMemoryError(f"no rung fits; the first: {ours[0].refusal}")
    summary = summarise(ours, rates) if climb.num_prompt is None else None
    source = record.source_facts("ladder") | record.model_facts(model.path).as_dict()
    time = {"utc_time": record.utc_time()}
    rows = [source | row | time for row in _rows(climb, bounds, rates, found, None if summary is None else summary.resident_seconds)]
    deepest = bounds[max(bounds)]
    facts = deepest.as_dict() | ({} if summary is None else summary.as_dict()) | {"interrupted": interrupted}
    if output == "csv":
        text = _csv(rows)
    elif summary is None:
        text = ladder_text.depths(model, rows, deepest)
    else:
        text = ladder_text.ladder(model, rows, deepest, summary)
    ran = [row for row in rows if row["line"] == "rung" and row["outcome"] == "ran"]
    if plot is not None and summary is not None and ran:
        from rollkv import ladder_plot

        cells = f"{ran[0]['depth']} {'random ' if climb.fill == 'random' else ''}cells"
        title = f"{model.path.name}, {cells} before decode; {summary.verdict.words}"
        ladder_plot.draw(ran, summary.fits, deepest.roofline, plot, title)
    last = [source | {"line": "summary", "depth": max(bounds)} | facts | time] if output == "jsonl" else []
    failure = None if interrupted else _failure(rows, lost_needles(ours))
    results.finish("text" if output in ("md", "csv") else output, text, [*rows, *last], facts, failure)


def _rows(
    climb: "Climb",
    bounds: "Mapping[int, Ceilings]",
    rates: "Rates",
    found: "Sequence[RungResult | PeerResult]",
    resident: float | None,
) -> list[dict[str, Any]]:
    """Flat rows of the same columns."""
    from rollkv.tasks import record
    from rollkv.tasks.ladder import RungResult
    from rollkv.tasks.ladder_rows import peer_row, row_dict

    nothing = record.machine_facts(None, rates.link_in)
    line = "rung" if climb.num_prompt is None else "depth"
    rows: list[dict[str, Any]] = []
    for result in found:
        if isinstance(result, RungResult):
            rung, ceilings = result.rung, bounds[result.rung.depth]
            asked, machine = record.cache_facts(rung.cache, rung.vram_target), result.machine or nothing
            rows.append({"line": line} | asked | machine | ceilings.as_dict() | row_dict(result, ceilings, resident))
        else:
            ceilings = bounds[max(test.depth for test in result.tests)]
            asked = dict.fromkeys(record.cache_facts(climb.rungs[0].cache, None))  # its own affair
            rows.append({"line": "peer"} | asked | nothing | ceilings.as_dict() | peer_row(result))
    return rows


def _failure(rows: Sequence[Mapping[str, Any]], lost: Sequence[str]) -> str | None:
    """What is wrong, in one line."""
    over = [row["rung"] for row in rows if row["over_limit"] and row["vram_target_bytes"] is not None]
    found = [f"{len(over)} rungs hold more device memory than their cap: {', '.join(over)}"] if over else []
    found += [f"{len(lost)} rungs miss a needle that a resident one found: {', '.join(lost)}"] if lost else []
    return "; ".join(found) or None


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """All columns of the rows, unknown values empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
