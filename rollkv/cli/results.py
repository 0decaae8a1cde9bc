"""How the measuring commands run and end: what was measured is printed, whatever ends the run; exit code 1 when a check failed."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TypeVar

import typer

from rollkv.errors import CheckFailed, Interrupted, RollkvError

FORMS = ("text", "json", "jsonl")
Result = TypeVar("Result")


def collect(results: Generator[Result, None, None]) -> tuple[list[Result], RollkvError | None]:
    """(all results, or those in front of an interrupt or an error; what ended them early). An error before the first result is raised."""
    found: list[Result] = []
    with closing(results):
        try:
            for result in results:
                found.append(result)
        except KeyboardInterrupt:
            return found, Interrupted("interrupted")
        except RollkvError as error:
            if not found:
                raise
            return found, error
    return found, None


def finish(
    output: str,
    text: str,
    rows: Sequence[Mapping[str, object]],
    summary: Mapping[str, object],
    failure: str | None,
    cut_short: RollkvError | None = None,
    draw: Callable[[], None] = lambda: None,
    *,
    judged: bool = True,
) -> None:
    """Prints `text`, or one JSON object with the summary and the rows, or the rows as JSON lines; then draws, so that a picture that fails takes
    no figure with it. failure: what the check found wrong; cut_short: what ended the run early; judged: whether anything was checked. `passed` is null
    where nothing is wrong so far and not all was seen, or nothing was judged.

    Raises cut_short, else CheckFailed with `failure`, else what `draw` raises. In form json the object says it itself, and only the exit code
    is left: a second object on stdout would make both unreadable.
    """
    from rollkv import report
    from rollkv.tasks.record import json_line

    error = cut_short or (None if failure is None else CheckFailed(failure))
    if output == "json":
        passed = False if failure is not None else True if judged and cut_short is None else None
        fault = {} if error is None else {"error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code}
        report.write_json({"passed": passed, "interrupted": isinstance(cut_short, Interrupted), **fault, **summary, "rows": list(rows)})
    else:
        report.write_text(text if output == "text" else "".join(map(json_line, rows)))
    try:
        draw()
    except RollkvError as undrawn:
        if error is not None:
            report.note(f"error: {undrawn}")
        error = error or undrawn
    if error is not None and output == "json":
        report.note(f"error: {error}")
        raise typer.Exit(error.exit_code)
    if error is not None:
        raise error
