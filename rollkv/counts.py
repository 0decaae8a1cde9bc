"""Lists as people write them: numbers of tokens and cells (4096, 4k is 4 x 1024, 1m is 1024 x 1024), percentages, sizes and ranges of them."""

import re
from operator import index
from typing import SupportsIndex

from rollkv.errors import UsageError
from rollkv.units import MIB, parse_size, unit_bytes

_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
LARGEST_COUNT = 1 << 40  # beyond any cache; all arithmetic with it is exact and ends
_COUNT = re.compile(r"([0-9]{1,13}(?:\.[0-9]+)?)([km]?)\Z", re.IGNORECASE)
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)%?\Z")
_UNIT = re.compile(r"[A-Za-z]+\Z")
_NOTHING = re.compile(r"0+(?:\.0+)?\s*([A-Za-z]*)\Z")


def parse_count(text: str, option: str) -> int:
    """A whole number above zero from "4096", "4k" or "1.5k". Raises UsageError."""
    match = _COUNT.match(text.strip())
    value = float(match[1]) * _FACTORS[match[2].lower()] if match else 0.0
    if value < 1 or value != int(value):
        raise UsageError(f"{option}: {text!r} is not a number of tokens; write a whole number above zero, such as 4096 or 4k (4 x 1024)")
    check_count(int(value), option)
    return int(value)


def check_count(value: object, option: str) -> None:
    """Raises UsageError for a number of tokens, cells or runs below 1, or larger than any could be. None: not given."""
    if value is None:
        return
    number = check_whole(value, option)
    if number < 1:
        raise UsageError(f"{option} {number}: the value must be 1 or more")
    if number > LARGEST_COUNT:
        raise UsageError(f"{option} {number}: the value must be at most {LARGEST_COUNT}; give less")


def check_whole(value: object, option: str) -> int:
    """The number. Raises UsageError for a text or a fraction, which a program may give."""
    if not isinstance(value, SupportsIndex):
        raise UsageError(f"{option} {value!r}: the value must be a whole number")
    return index(value)


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Several, with commas between them; each once, in the order given. Raises UsageError."""
    return tuple(dict.fromkeys(parse_count(word, option) for word in split_list(text, option)))


def parse_depths(text: str, option: str) -> tuple[int, ...]:
    """As parse_counts, and 0 is a depth too. Raises UsageError."""
    return tuple(dict.fromkeys(0 if word == "0" else parse_count(word, option) for word in split_list(text, option)))


def parse_percentages(text: str, option: str) -> tuple[float, ...]:
    """Numbers from 0 to 100, with commas between them; each once, in the order given. Raises UsageError."""
    return tuple(dict.fromkeys(parse_percentage(word, option) for word in split_list(text, option)))


def parse_percentage(text: str, option: str) -> float:
    """A number from 0 to 100, with or without the sign. Raises UsageError."""
    match = _PERCENT.match(text.strip())
    if match is None or float(match[1]) > 100:
        raise UsageError(f"{option}: {text!r} is not a percentage; write a number from 0 to 100")
    return float(match[1])


def parse_sizes(text: str, option: str, steps: int, *, zero: bool = False) -> tuple[int, ...]:
    """Bytes from "6,5,4GiB", or `steps` of them from "4..6GiB" in the order it is written in; a bare number takes the unit of the last
    one, MiB without any. Raises UsageError, also for a size of nothing unless `zero`."""
    if not is_range(text):
        return parse_size_list(text, option, zero=zero)
    words = [word.strip() for word in text.split("..")]
    if len(words) != 2 or not all(words):
        raise UsageError(f"{option}: cannot read the range {text!r}; write it as 4..6GiB")
    first, last = _sizes(words, option, zero)
    return spread_evenly(first, last, steps)


def parse_size_list(text: str, option: str, *, zero: bool = False) -> tuple[int, ...]:
    """As parse_sizes, of a list alone."""
    return _sizes(split_list(text, option), option, zero)


def _sizes(words: list[str], option: str, zero: bool) -> tuple[int, ...]:
    unit = _UNIT.search(words[-1])
    bare = (unit_bytes(unit[0]) if unit else None) or MIB  # a last word in no known unit is refused as it is read
    return tuple(0 if zero and _is_nothing(word) else parse_size(word, option, bare_unit=bare) for word in words)


def is_range(text: str) -> bool:
    """Whether it is written as LO..HI."""
    return ".." in text


def spread_evenly(first: int, last: int, count: int) -> tuple[int, ...]:
    """`count` whole numbers from first to last, both included; one: first alone. Raises ValueError for less than one."""
    if count < 1:
        raise ValueError(f"{count} values")
    return tuple(round(first + (last - first) * index / max(count - 1, 1)) for index in range(count))


def _is_nothing(word: str) -> bool:
    """Whether it is 0, alone or in a known unit."""
    match = _NOTHING.match(word)
    return match is not None and (not match[1] or unit_bytes(match[1]) is not None)


def split_list(text: str, option: str) -> list[str]:
    """The words between commas, without blanks. Raises UsageError when one is empty."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{option}: {text!r} has an empty entry; write values with single commas between them")
    return words
