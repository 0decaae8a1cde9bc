"""Stop strings against a plain search over the whole text, however the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkv.errors import UsageError
from rollkv.stop_strings import StopStrings

letters = st.text(alphabet="ab\u00e9", max_size=24)


def first_match(text: str, strings: list[str]) -> tuple[str, str | None]:
    """What is shown, and the match: the one complete first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        for string in sorted(strings, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


@settings(max_examples=500, deadline=None)
@given(letters, st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 24), max_size=12))
def test_result_does_not_depend_on_the_pieces(text, strings, cuts):
    stops = StopStrings(strings)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = "".join(stops.push(text[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)) + stops.finish()
    assert (shown, stops.matched) == first_match(text, strings)


@settings(max_examples=200, deadline=None)
@given(letters, st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=3))
def test_nothing_is_held_longer_than_needed(text, strings):
    """After each character, what is held back is a true beginning of some stop string, or nothing."""
    stops, shown = StopStrings(strings), ""
    for count, character in enumerate(text, 1):
        shown += stops.push(character)
        if stops.matched is not None:
            break
        held = text[:count].removeprefix(shown)
        assert shown + held == text[:count]
        assert held == "" or any(string.startswith(held) and string != held for string in strings)


def test_nothing_comes_after_a_match():
    stops = StopStrings(["END"])
    assert stops.push("abEN") == "ab"
    assert stops.push("Dmore") == ""
    assert stops.matched == "END"
    assert stops.push("and more") + stops.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="--stop"):
        StopStrings(["x", ""])
