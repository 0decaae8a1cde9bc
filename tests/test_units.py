"""Sizes as people write them, both ways."""

import random

import pytest

from rollkv.errors import UsageError
from rollkv.units import GIB, MIB, format_need, format_rate, format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", 512 * MIB),
        ("6GiB", 6 * GIB),
        ("6G", 6 * GIB),
        ("6g", 6 * GIB),
        ("6GB", 6 * 10**9),
        ("6000M", 6000 * MIB),
        ("6000MB", 6 * 10**9),
        ("1.5 GiB", GIB + GIB // 2),
        (" 2 kib ", 2048),
        ("0.5", MIB // 2),
        ("1TiB", 1024 * GIB),
        ("1tb", 10**12),
        ("100B", 100),
    ],
)
def test_sizes_that_people_write(text, expected):
    assert parse_size(text, "--vram-target") == expected


def test_a_bare_number_counts_in_the_unit_asked_for():
    assert parse_size("7", "x", bare_unit=1) == 7
    assert parse_size("7", "x", bare_unit=GIB) == 7 * GIB


@pytest.mark.parametrize(
    "text", ["", " ", "-5", "6XiB", "GiB", "6GiB6", "1e3", "0x10", "6,5GiB", "nan", "inf", "6 Gi B", "\u0666GiB", "1.GiB"]
)
def test_unreadable_sizes_are_refused_with_option_and_value(text):
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--vram-target")
    assert "--vram-target" in str(caught.value) and repr(text) in str(caught.value) and "GiB" in str(caught.value)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000 + "GiB", "999999999TiB"])
def test_more_than_any_memory_is_refused(text):
    with pytest.raises(UsageError, match="--vram-target"):
        parse_size(text, "--vram-target")


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0M", "0.1B"])
def test_no_memory_at_all_is_refused(text):
    with pytest.raises(UsageError, match="above zero"):
        parse_size(text, "--vram-target")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (MIB, "1.0 MiB"),
        (518 * MIB, "518.0 MiB"),
        (GIB, "1.00 GiB"),
        (12 * GIB + GIB // 4, "12.25 GiB"),
    ],
)
def test_sizes_as_they_are_printed(size, expected):
    assert format_size(size) == expected


def test_printed_sizes_can_be_read_back():
    generator = random.Random(4)
    for _ in range(300):
        size = generator.randrange(1, 1 << generator.randrange(1, 45))
        again = parse_size(format_size(size), "x")
        assert abs(again - size) <= max(size * 0.05, 1), (size, format_size(size))


def test_what_is_needed_is_enough_when_it_is_read_back():
    generator = random.Random(5)
    for _ in range(300):
        size = generator.randrange(1, 1 << generator.randrange(1, 45))
        again = parse_size(format_need(size), "x")
        assert size <= again <= size * 1.11 + 1, (size, format_need(size))
    assert format_need(GIB) == format_size(GIB) and format_need(GIB + 1) == "1.01 GiB" and format_need(GIB - 1) == "1.00 GiB"


def test_rates_are_decimal():
    assert format_rate(54.9e9) == "54.9 GB/s"


def test_round_up():
    for value in range(40):
        for multiple in range(1, 9):
            rounded = round_up(value, multiple)
            assert rounded >= value > rounded - multiple and rounded % multiple == 0
