"""Two variants of a ladder side by side: prefill and decode of each against the tail, a line a rung. Pure functions of rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollkv.cli.markdown import markdown_table, mib, number

Row = Mapping[str, Any]

NEEDLE = {True: "found", False: "MISSED", None: ""}
_RATES = {"pp": "pp_tokens_per_second", "tg": "tg_tokens_per_second"}


def table(variants: Sequence[Sequence[Row]], names: Sequence[str]) -> str:
    """variants: the rows of each. The last column of a phase is the first variant's rate over the second's; what did not run is empty."""
    first, second = ({(row["rung"], row["depth"]): row for row in rows} for rows in variants)
    headers = ["rung", "depth", "tail MiB"]
    for phase in _RATES:
        headers += [*(f"{phase} tok/s, {name}" for name in names), "ratio"]
    headers += [f"needle, {name}" for name in names]
    lines = [_line(key, first.get(key, {}), second.get(key, {})) for key in dict.fromkeys([*first, *second])]
    return markdown_table(headers, lines, {0})


def _line(key: tuple[str, int], first: Row, second: Row) -> list[str]:
    tails = [mib(row.get("tail_bytes"), 1) for row in (first, second)]
    words = [key[0], str(key[1]), " / ".join(dict.fromkeys(filter(None, tails)))]
    for column in _RATES.values():
        rates = [row.get(column) for row in (first, second)]
        words += [number(rate, 1) for rate in rates]
        words.append(number(rates[0] / rates[1], 3) if rates[0] and rates[1] else "")
    return words + [NEEDLE[row.get("needle_found")] for row in (first, second)]
