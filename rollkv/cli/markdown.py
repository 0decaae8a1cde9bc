"""Markdown tables, and the cells that stand in them. Pure functions."""

from collections.abc import Sequence

from rollkv.units import MIB


def number(value: float | None, digits: int, unit: str = "") -> str:
    """Empty where it is not known."""
    return "" if value is None else f"{value:.{digits}f}{unit}"


def mib(num_bytes: float | None, digits: int) -> str:
    """In MiB; empty where it is not known."""
    return "" if num_bytes is None else f"{num_bytes / MIB:.{digits}f}"


def markdown_table(headers: Sequence[str], lines: Sequence[Sequence[str]], left: set[int]) -> str:
    """A Markdown table that reads as plain text too: numbers to the right, the columns of `left` to the left."""
    widths = [max(len(line[index]) for line in (headers, *lines)) for index in range(len(headers))]

    def shown(line: Sequence[str]) -> str:
        words = (
            word.ljust(width) if index in left else word.rjust(width) for index, (word, width) in enumerate(zip(line, widths, strict=True))
        )
        return f"| {' | '.join(words)} |"

    rule = (("-" * width) if index in left else "-" * (width - 1) + ":" for index, width in enumerate(widths))
    return "\n".join((shown(headers), f"| {' | '.join(rule)} |", *map(shown, lines)))
