"""Finding stop strings in a text that arrives in pieces.

What comes out does not depend on how the text was cut into pieces: the match that is complete first counts, and of several that end
together the longest. Text that may still become part of a match is held back until that is decided.
"""

from collections.abc import Sequence

from rollkv.errors import UsageError


class StopStrings:
    """push() pieces and take what may be shown; `matched` is the stop string once one was found, after which nothing more comes."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Raises UsageError for an empty stop string, which would match everywhere."""
        if "" in strings:
            raise UsageError("--stop '': an empty string would stop before the first token; give at least one character")
        self._strings = tuple(dict.fromkeys(strings))
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The text that can be shown now: never a character of a stop string, never one that may still belong to one."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        ends = [(found + len(string), found, string) for string in self._strings if (found := text.find(string)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            self._held = ""
            return text[:start]
        keep = max((_open_length(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _open_length(text: str, string: str) -> int:
    """Length of the longest end of `text` with which `string` begins, short of all of it."""
    for length in range(min(len(string) - 1, len(text)), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
