"""Numbers of tokens and cells, and lists of them, as people write them: 4096, 4k (4 x 1024), 1m (1024 x 1024); percentages."""

import re

from rollkv.errors import UsageError

_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([km]?)\Z", re.IGNORECASE)
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)%?\Z")


def parse_count(text: str, option: str) -> int:
    """A whole number above zero from "4096", "4k" or "1.5k". Raises UsageError."""
    match = _COUNT.match(text.strip())
    value = float(match[1]) * _FACTORS[match[2].lower()] if match else 0.0
    if value < 1 or value != int(value):
        raise UsageError(f"{option}: {text!r} is not a number of tokens; write a whole number above zero, such as 4096 or 4k (4 x 1024)")
    return int(value)


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Several, with commas between them; each once, in the order given. Raises UsageError."""
    return tuple(dict.fromkeys(parse_count(word, option) for word in split_list(text, option)))


def parse_percentages(text: str, option: str) -> tuple[float, ...]:
    """Numbers from 0 to 100, with commas between them; each once, in the order given. Raises UsageError."""
    return tuple(dict.fromkeys(parse_percentage(word, option) for word in split_list(text, option)))


def parse_percentage(text: str, option: str) -> float:
    """A number from 0 to 100, with or without the sign. Raises UsageError."""
    match = _PERCENT.match(text.strip())
    if match is None or float(match[1]) > 100:
        raise UsageError(f"{option}: {text!r} is not a percentage; write a number from 0 to 100")
    return float(match[1])


def split_list(text: str, option: str) -> list[str]:
    """The words between commas, without blanks. Raises UsageError when one is empty."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{option}: {text!r} has an empty entry; write values with single commas between them")
    return words
