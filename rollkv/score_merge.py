"""Merging by score, as SentencePiece's BPE model and llama.cpp do it, for vocabularies with a score per piece and no merge list.

A text starts as single characters. Again and again the two neighbours whose concatenation is the piece of the highest score become
that piece; among equal scores the leftmost pair goes first. Merges cannot reach over a place that no piece spans, so the text is split
into words there first, and equal words are merged once.

Invariant: the result is that of a plain priority queue of (score, position); the time is O(n log n) whatever the text.
"""

import re
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

# Words up to this length are merged once per text.
_CACHED_WORD = 64
# In longer words a merge that happens at one symbol in _FREQUENT or more is done at all places at once, with NumPy: a text of one
# million equal letters takes 0.5 s instead of 2.5 s.
_LONG_WORD = 4096
_FREQUENT = 16
_NO_PIECE = -1
_GONE = -2


@dataclass(frozen=True)
class Memo:
    """What merging has found so far, for the parts of one text: ids of short words, and pairs (left * size + right -> id or _NO_PIECE)."""

    words: dict[str, list[int]] = field(default_factory=dict)
    pairs: dict[int, int] = field(default_factory=dict)


class ScoreMerger:
    """Turns text into piece ids. `blank` is the character that stands for a blank in text and pieces.

    ids: the pieces that merging may make, by text. pieces: text by id. scores: float [pieces]. byte_ids: id of each byte value that
    has a token; these spell a character that is no piece. unknown_id stands for a character that cannot be spelt either.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        pieces: Sequence[str],
        scores: np.ndarray,
        byte_ids: Mapping[int, int],
        unknown_id: int | None,
        blank: str,
    ) -> None:
        self._ids = ids
        self._pieces = pieces
        self._costs: list[float] = (-scores.astype(np.float64)).tolist()
        # A character outside the vocabulary is the symbol len(pieces) + its code point; all symbols are below _size - 2,
        # so that a pair with _NO_PIECE or _GONE on its right has a key of its own.
        self._size = len(pieces) + 0x110000 + 2
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        # A blank starts a word unless some piece holds a blank behind the character before it.
        inside = set(re.findall(f"([^{blank}\n]){blank}", "\n".join(ids)))
        self._word_start = re.compile(f"(?<=[^{re.escape(''.join(sorted(inside)))}{blank}])(?={blank})")

    def encode(self, text: str, memo: Memo) -> list[int]:
        """Ids of the text. Raises KeyError(character) for one that has no piece, no byte tokens and no unknown token."""
        out: list[int] = []
        words, pairs = memo.words, memo.pairs
        outside = len(self._pieces)
        for word in self._word_start.split(text):
            ids = words.get(word)
            if ids is None:
                symbols = [self._ids.get(char, outside + ord(char)) for char in word]
                if len(symbols) >= _LONG_WORD:
                    symbols = self._merge_frequent(symbols, pairs)
                ids = self._spell(self._merge(symbols, pairs))
                if len(word) <= _CACHED_WORD:
                    words[word] = ids
            out += ids
        return out

    def _merge(self, symbols: list[int], pairs: dict[int, int]) -> list[int]:
        """The symbols that are left when nothing can be merged any more.

        `buckets` holds the positions of candidate pairs by cost, in increasing order, `queue` is a heap of those costs, and `heads` says
        where each bucket goes on. A merged symbol stands at its first character. A candidate whose symbols have changed since is known
        by its cost and passed over.
        """
        num, size, costs = len(symbols), self._size, self._costs
        buckets: dict[float, list[int]] = {}
        for position in range(num - 1):
            left, right = symbols[position], symbols[position + 1]
            made = pairs.get(left * size + right)
            if made is None:
                made = self._make(pairs, left, right)
            if made >= 0:
                buckets.setdefault(costs[made], []).append(position)
        queue = sorted(buckets)
        heads = dict.fromkeys(buckets, 0)
        symbols = [*symbols, _GONE]  # the last stands behind the last symbol and, as index -1, before the first
        following = [*range(1, num + 1), num]
        previous = list(range(-1, num))
        while queue:
            cost = queue[0]
            bucket = buckets[cost]
            while (head := heads[cost]) < len(bucket):
                position = bucket[head]
                heads[cost] = head + 1
                gone = following[position]
                merged = pairs.get(symbols[position] * size + symbols[gone], _NO_PIECE)
                if merged < 0 or costs[merged] != cost:
                    continue
                symbols[position] = merged
                symbols[gone] = _GONE
                after = following[position] = following[gone]
                previous[after] = position
                for place in (previous[position], position):
                    left, right = symbols[place], symbols[following[place]]
                    made = pairs.get(left * size + right)
                    if made is None:
                        made = self._make(pairs, left, right)
                    if made >= 0:
                        self._add_candidate(place, costs[made], buckets, heads, queue)
                if queue[0] != cost:
                    break
            else:
                heappop(queue)
                del buckets[cost], heads[cost]
        return [symbol for symbol in symbols if symbol != _GONE]

    def _make(self, pairs: dict[int, int], left: int, right: int) -> int:
        """What two symbols make, remembered in `pairs`."""
        num = len(self._pieces)
        made = self._ids.get(self._pieces[left] + self._pieces[right], _NO_PIECE) if 0 <= left < num and 0 <= right < num else _NO_PIECE
        pairs[left * self._size + right] = made
        return made

    @staticmethod
    def _add_candidate(place: int, cost: float, buckets: dict[float, list[int]], heads: dict[float, int], queue: list[float]) -> None:
        bucket = buckets.get(cost)
        if bucket is None:
            buckets[cost] = [place]
            heads[cost] = 0
            heappush(queue, cost)
        elif bucket[-1] <= place:
            bucket.append(place)
        else:
            insort(bucket, place, lo=heads[cost])

    def _merge_frequent(self, symbols: list[int], pairs: dict[int, int]) -> list[int]:
        """The first merges of a long word, as long as the best candidate is a frequent one.

        A round merges the candidates of the best cost from left to right. That equals one merge after the other as long as no pair
        that stands beside a merged symbol, before or after its right neighbour merges too, is as good as the round's: then the round
        is left undone, for _merge.
        """
        row = np.array(symbols, dtype=np.int64)
        while len(row) >= _LONG_WORD:
            made, cost = self._neighbours(row[:-1], row[1:], pairs)
            best = cost.min()
            hits = np.flatnonzero(cost == best)
            if np.isinf(best) or len(hits) * _FREQUENT < len(row):
                break
            # Of overlapping candidates the first, third, fifth ... are taken.
            first_of_chain = np.flatnonzero(np.diff(hits, prepend=-2) != 1)
            rank = np.arange(len(hits))
            taken = hits[(rank - np.repeat(first_of_chain, np.diff(first_of_chain, append=len(hits)))) % 2 == 0]
            merged = row.copy()
            merged[taken] = made[taken]
            kept = np.ones(len(row), dtype=bool)
            kept[taken + 1] = False
            with_right = taken[taken + 2 < len(row)]
            _, transient = self._neighbours(merged[with_right], row[with_right + 2], pairs)
            is_new = np.zeros(len(row), dtype=bool)
            is_new[taken] = True
            new_row, is_new = merged[kept], is_new[kept]
            _, lasting = self._neighbours(new_row[:-1], new_row[1:], pairs)
            beside = is_new[:-1] | is_new[1:]
            if (transient <= best).any() or (lasting[beside] <= best).any():
                break
            row = new_row
        return row.tolist()

    def _neighbours(self, left: np.ndarray, right: np.ndarray, pairs: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """What the symbols left[i] and right[i] make (int64 [n], _NO_PIECE for nothing) and its cost (float64 [n], infinity for nothing)."""
        keys, which = np.unique(left * self._size + right, return_inverse=True)
        made = np.array([self._make(pairs, *divmod(key, self._size)) for key in keys.tolist()], dtype=np.int64)
        cost = np.array([self._costs[piece] if piece >= 0 else np.inf for piece in made.tolist()])
        return made[which], cost[which]

    def _spell(self, symbols: list[int]) -> list[int]:
        """The ids of symbols; a character outside the vocabulary becomes its UTF-8 bytes, or the unknown token."""
        outside = len(self._pieces)
        if not symbols or max(symbols) < outside:
            return symbols
        out: list[int] = []
        for symbol in symbols:
            if symbol < outside:
                out.append(symbol)
                continue
            char = chr(symbol - outside)
            spelling = [self._byte_ids.get(value, _NO_PIECE) for value in char.encode()]
            if _NO_PIECE not in spelling:
                out += spelling
            elif self._unknown_id is not None:
                out.append(self._unknown_id)
            else:
                raise KeyError(char)
        return out
