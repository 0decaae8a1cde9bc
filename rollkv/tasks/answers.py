"""When a reply holds the value that was asked for. Pure functions of text."""

import re
import unicodedata
from typing import Literal

Judgement = Literal["found", "missed", "cut off"]

_SEPARATORS = ",.'’_ "
_GROUPED = re.compile(rf"(?<!\d)(?<!\d[.,])\d{{1,3}}([{_SEPARATORS}])\d{{3}}(?:\1\d{{3}})*(?!\d)")
_BETWEEN_DIGITS = re.compile(rf"(?<=\d)[{_SEPARATORS}](?=\d|\Z)")


def judge(answer: str, value: str, stop_reason: str | None, room: int) -> Judgement:
    """Whether `answer` holds the value, whole: neither part of a longer word or number, nor in other digits.

    Case, width of characters, blanks and separators between groups of three digits do not matter. A reply that ran out of tokens while it
    could still have become the value, or before it left its thoughts, is cut off: it says nothing about the needle. A blank one could only where
    the value need not have fitted: room is the tokens that the reply might take, and a value is no more of them than its characters.
    """
    out_of_tokens = stop_reason == "length"
    text, wanted = _normalised(answer), _normalised(value)
    for said, sought in ((text, wanted), (_joined(text), _joined(wanted))):
        for match in re.finditer(rf"(?<![\w])(?<!\d[.,]){re.escape(sought)}(?!\w|[.,]\d)", said):
            if not (out_of_tokens and match.end() == len(said)):
                return "found"
    begun = any(_begins(said, sought) for said in (text, _bare(text)) for sought in (wanted, _bare(wanted)))
    thinking = "<think>" in text and "</think>" not in text
    too_short = not text and room <= len(value)
    return "cut off" if out_of_tokens and (begun or thinking or too_short) else "missed"


def holds(text: str, value: str) -> bool:
    """Whether a text that is complete would be judged to hold the value."""
    return judge(text, value, None, 0) == "found"


def _begins(text: str, wanted: str) -> bool:
    """Whether the value, or a beginning of it, stands at the end of the text."""
    return any(re.search(rf"(?<!\w){re.escape(wanted[:count])}\Z", text) for count in range(1, len(wanted) + 1))


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _joined(text: str) -> str:
    """Numbers in groups of three as one: "4,821,736", "4.821.736" and "4 821 736" become "4821736"; "2024 479" stays two numbers."""
    return _GROUPED.sub(lambda match: match[0].replace(match[1], ""), text)


def _bare(text: str) -> str:
    """Without separators behind digits, since a number that is not at its end may still become one in groups."""
    return _BETWEEN_DIGITS.sub("", text)
