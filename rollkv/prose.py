"""Plain prose that ships with the package, as filler and as test text, and words for things that the prose never mentions.

Everything is a pure function of its arguments: the same seed gives the same words on every machine and in every version of Python.
"""

import hashlib
from collections.abc import Iterator
from importlib import resources

ADJECTIVES = (
    "amber", "bronze", "copper", "crimson", "crystal", "emerald", "golden", "indigo", "ivory", "jade", "lunar", "marble",
    "purple", "scarlet", "silver", "velvet",
)  # fmt: skip
NOUNS = (
    "anchor", "beacon", "cactus", "castle", "compass", "dragon", "falcon", "harbor", "lantern", "magnet", "meteor", "panther",
    "rocket", "temple", "tiger", "violin",
)  # fmt: skip


def paragraphs() -> tuple[str, ...]:
    """The shipped paragraphs, in their order."""
    text = resources.files("rollkv").joinpath("texts/river.txt").read_text(encoding="utf-8")
    return tuple(part.strip() for part in text.split("\n\n") if part.strip())


def endless_paragraphs(seed: int) -> Iterator[str]:
    """The paragraphs again and again, each pass in an order of its own."""
    parts, turn = paragraphs(), 0
    while True:
        draws = Draws(f"paragraphs {seed} {turn}")
        order = list(parts)
        for last in range(len(order) - 1, 0, -1):
            other = draws.below(last + 1)
            order[last], order[other] = order[other], order[last]
        yield from order
        turn += 1


def running_text(num_characters: int, seed: int = 0) -> str:
    """At least num_characters of prose, ending with a whole paragraph."""
    parts: list[str] = []
    length = 0
    for part in endless_paragraphs(seed):
        parts.append(part)
        length += len(part) + 2
        if length >= num_characters + 2:
            break
    return "\n\n".join(parts)


class Draws:
    """Random whole numbers from a name: SHA-256 in counter mode, so that they never change with a library."""

    def __init__(self, name: str) -> None:
        self._name, self._count = name, 0

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1; its bias is below limit / 2^128."""
        digest = hashlib.sha256(f"{self._name}/{self._count}".encode()).digest()
        self._count += 1
        return int.from_bytes(digest[:16], "big") % limit

    def key(self) -> str:
        """An adjective and a noun, such as "amber falcon"; neither stands anywhere in the prose."""
        return f"{ADJECTIVES[self.below(len(ADJECTIVES))]} {NOUNS[self.below(len(NOUNS))]}"

    def digits(self, count: int) -> str:
        """A number of `count` (at most 9) different digits that does not begin with 0. No digit repeats, so that what follows a digit is
        never ambiguous for a model that looks at a few tokens only."""
        pool, chosen = list("123456789"), []
        for place in range(count):
            chosen.append(pool.pop(self.below(len(pool))))
            if place == 0:
                pool.append("0")
        return "".join(chosen)
