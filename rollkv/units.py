"""Sizes and rates as people write them. Sizes print in MiB and GiB (2^20, 2^30), rates in GB/s (1e9)."""

import re

from rollkv.errors import UsageError

MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
}
_LARGEST_SIZE = 1 << 62  # beyond any memory; all arithmetic with it is exact
_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


def unit_bytes(unit: str) -> int | None:
    """Bytes of "GiB", "G", "GB" and their like, in any case; None: no unit."""
    return _UNITS.get(unit.lower())


def parse_size(text: str, option: str, *, bare_unit: int = MIB) -> int:
    """Bytes from "6GiB" or "6G" (2^30), "6GB" (1e9), "512MiB", or a bare number counted in `bare_unit` bytes.

    Raises UsageError on anything else, zero and more than any memory included.
    """
    match = _SIZE.match(text)
    unit = bare_unit if match and not match[2] else unit_bytes(match[2]) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"{option}: cannot read the size {text!r}; write a number of MiB, or a number with MiB, GiB, MB or GB, such as 6GiB"
        )
    size = int(float(match[1]) * unit)
    if size <= 0:
        raise UsageError(f"{option}: {text!r} is no memory at all; write a size above zero, such as 6GiB")
    if size > _LARGEST_SIZE:
        raise UsageError(f"{option}: {text!r} is more than any memory; write a size such as 6GiB")
    return size


def format_size(num_bytes: int) -> str:
    """ "518.0 MiB" below 1 GiB, "12.34 GiB" from there on; exact bytes below 1 KiB."""
    if abs(num_bytes) < 1 << 10:
        return f"{num_bytes} B"
    if abs(num_bytes) < 1 << 20:
        return f"{num_bytes / (1 << 10):.1f} KiB"
    if abs(num_bytes) < GIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def format_need(num_bytes: int) -> str:
    """format_size, rounded up: a size that is enough when it is given back as an option."""
    if num_bytes < 1 << 10:
        return format_size(num_bytes)
    unit, digits = next(pair for pair in ((GIB, 100), (MIB, 10), (1 << 10, 10)) if num_bytes >= pair[0])
    return format_size(-(-num_bytes * digits // unit) * unit // digits)


def format_rate(bytes_per_second: float) -> str:
    """ "54.9 GB/s" (1e9 bytes)."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def giga(bytes_per_second: float | None) -> float | None:
    """In 1e9 bytes a second; None stays None, not known."""
    return None if bytes_per_second is None else bytes_per_second / 1e9


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
