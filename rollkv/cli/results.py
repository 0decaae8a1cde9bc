"""How the measuring commands end: rows on stdout in the form that was asked for, and exit code 1 when a check failed."""

from collections.abc import Mapping, Sequence

import typer

from rollkv.errors import CheckFailed, UsageError

FORMS = ("text", "json", "jsonl")


def check_form(output: str) -> None:
    """Raises UsageError for a form that is not known."""
    if output not in FORMS:
        raise UsageError(f"-o {output!r} is not known; choose {', '.join(FORMS[:-1])} or {FORMS[-1]}")


def finish(output: str, text: str, rows: Sequence[Mapping[str, object]], summary: Mapping[str, object], failure: str | None) -> None:
    """Prints `text`, or one JSON object with the summary and the rows, or the rows as JSON lines. failure: what the check found wrong.

    Raises CheckFailed with `failure`. In form json the object says it itself, since a second object on stdout would make both unreadable.
    """
    from rollkv import report
    from rollkv.tasks.record import json_line

    if output == "json":
        fault = {} if failure is None else {"error": failure, "kind": CheckFailed.__name__, "exit_code": CheckFailed.exit_code}
        report.write_json({"passed": failure is None, **fault, **summary, "rows": list(rows)})
        if failure is not None:
            report.note(f"error: {failure}")
            raise typer.Exit(CheckFailed.exit_code)
        return
    report.write_text(text if output == "text" else "".join(map(json_line, rows)))
    if failure is not None:
        raise CheckFailed(failure)
