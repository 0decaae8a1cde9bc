"""A retrieval circuit set by hand inside otherwise random transformer weights.

It continues text by induction over trigrams (Olsson et al., "In-context learning and induction heads", 2022, for pairs): it looks for the
cell whose three tokens before it are the last three tokens of the text, and emits that cell's token. It must succeed at any depth and
length if, and only if, attention over every cell is right.

Residual stream  columns [0, 32): the token's code, M signs, and a constant in the others; [32 d, 32 d + M): code of the d-th token before,
                 d = 1, 2, 3; from column 128 on: random.
Layer 0          query heads 0 to 2 look d cells back: a constant query, turned back by d, meets a constant key; the score is a sum of
                 cos(f (distance - d)) over 16 rotations f at most, largest at distance d and nowhere near it in 4 million cells.
Match layer      query head 0: query (code, 1 back, 2 back), key (1, 2, 3 back) in the slowest rotations, which hardly turn over the whole
                 context. Its value, the code, is added to the code's own columns with three times its weight.
Everything else  is random, reads the whole stream and writes only from column 128 on, so a fault anywhere reaches the logits, and cannot
                 reach the circuit. Random heads have sharp scores: at any length they attend to a few cells, which differ by query.
RoPE             a base of 1e20 or more leaves few fast rotations and makes the others free of position. It changes no cost.
Sharpness        codes are words of the extended Golay code (24 signs; two codes agree in 16 at most) or, for heads below 96, of the extended
                 Hamming code (16 signs, 12). A full match beats every other cell by MATCH_MARGIN, above ln(cells) by 10 at 4 million.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt

import numpy as np

from rollkv.synth_shapes import CIRCUIT_COLUMNS, SynthShape

BLOCK = 32  # columns of a group of the residual stream
BACKS = (1, 2, 3)
CODE = 8.0  # magnitude of a code in the stream
ANSWER = 24.0  # of what the match adds to it
LOOK_BACK_SHARPNESS = 48.0  # score of one rotation at its peak
MATCH_MARGIN = 26.0
RANDOM_SHARPNESS = 4.0  # standard deviation of the scores of a random head
LOCAL_THETA = 10000.0  # RoPE base of gemma3's sliding layers


@dataclass(frozen=True)
class Patch:
    """Rows of a matrix that are set by hand: float32 [rows, columns] with one magnitude a row, or None for zeros."""

    rows: np.ndarray
    values: np.ndarray | None = None


def code_signs(shape: SynthShape) -> int:
    """M: three codes must fit into the slow rotations of a head."""
    return 24 if shape.head_dim >= 96 else 16


def rope_theta(shape: SynthShape) -> float:
    """RoPE base of the layers that see every cell."""
    return 1e20 if shape.head_dim >= 128 else 1e30


def codewords(signs: int) -> np.ndarray:
    """int8 [codes, signs] of -1 and 1: the extended Golay code (24) or the extended Hamming code (16), all words."""
    if signs == 24:  # cyclic code of x^11 + x^10 + x^6 + x^5 + x^4 + x^2 + 1 over GF(2), and a parity bit
        rows = np.zeros((12, 24), np.int64)
        for row in range(12):
            rows[row, row + np.array([0, 2, 4, 5, 6, 10, 11])] = 1
        rows[:, 23] = rows.sum(axis=1) % 2
    else:  # every polynomial of degree 2 at most over four bits
        bits = np.arange(16)[:, None] >> np.arange(4) & 1
        pairs = [bits[:, i] * bits[:, j] for i in range(4) for j in range(i)]
        rows = np.stack([np.ones(16, np.int64), *bits.T, *pairs])
    messages = np.arange(1 << len(rows))[:, None] >> np.arange(len(rows)) & 1
    return (1 - 2 * (messages @ rows % 2)).astype(np.int8)


def look_back_pairs(shape: SynthShape) -> tuple[np.ndarray, np.ndarray]:
    """(rotation pairs that layer 0 measures distance by, their radians a cell)."""
    theta = LOCAL_THETA if shape.gemma else rope_theta(shape)
    frequencies = theta ** (-2.0 * np.arange(shape.head_dim // 2) / shape.head_dim)
    pairs = np.flatnonzero(frequencies >= 1e-6)
    if len(pairs) > 16:
        pairs = pairs[np.linspace(0, len(pairs) - 1, 16).round().astype(int)]
    return pairs, frequencies[pairs]


def match_pairs(shape: SynthShape) -> np.ndarray:
    """The slowest rotation pairs, as many as hold three codes."""
    return np.arange(shape.head_dim // 2 - 3 * code_signs(shape) // 2, shape.head_dim // 2)


def _elements(shape: SynthShape, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two elements of a head that each pair turns: llama's GGUF order has them side by side."""
    return (2 * pairs, 2 * pairs + 1) if shape.architecture == "llama" else (pairs, pairs + shape.head_dim // 2)


@dataclass(frozen=True)
class _Heads:
    """The circuit's heads in one layer. `elements`: what it uses of a head; elsewhere in the layer these are zero."""

    shape: SynthShape
    elements: np.ndarray
    query_heads: int  # the first ones
    units: int  # elements of a query, in squares of its magnitude
    magnitude: float  # of the elements of queries and keys

    @property
    def kv_heads(self) -> int:
        return -(-self.query_heads // self.shape.group)

    @property
    def projected(self) -> float:
        """What the projections give. With query/key norms, which bring it to `magnitude`, so much that a key's random elements of unit size
        make up a tenth of its square: enough for the random heads beside it, too little to change it from cell to cell."""
        return sqrt(10.0 * self._random_elements / self.units) if self.shape.qk_norm else self.magnitude

    @property
    def _random_elements(self) -> int:
        return self.shape.head_dim - len(self.elements)

    def zero_rows(self, heads: int, own: int) -> Patch:
        """Of a projection: the first `own` heads, and the circuit's elements of the others."""
        rows = np.arange(heads * self.shape.head_dim).reshape(heads, -1)
        return Patch(np.concatenate([rows[:own].ravel(), rows[own:, self.elements].ravel()]))

    def norm_gain(self) -> np.ndarray:
        """Query/key norm weights float32 [head_dim]; 1.05 makes up for the tenth in keys that queries do not have."""
        size = self.shape.head_dim
        out = np.full(size, sqrt(RANDOM_SHARPNESS * sqrt(self._random_elements / size)), np.float32)
        out[self.elements] = self.magnitude * sqrt(1.05 * self.units / size)
        return out


def _look_back(shape: SynthShape) -> _Heads:
    pairs = look_back_pairs(shape)[0]
    elements = np.concatenate(_elements(shape, pairs))
    return _Heads(shape, elements, len(BACKS), len(pairs), sqrt(LOOK_BACK_SHARPNESS / shape.attention_scale))


def _match(shape: SynthShape) -> _Heads:
    loss = 16 if code_signs(shape) == 24 else 8  # of the score, where one of the three codes differs: twice the distance of the code
    elements = np.concatenate(_elements(shape, match_pairs(shape)))
    return _Heads(shape, elements, 1, len(elements), sqrt(MATCH_MARGIN / loss / shape.attention_scale))


def _rows(count: int, columns: int) -> np.ndarray:
    return np.zeros((count, columns), np.float32)


def _look_back_queries(shape: SynthShape) -> list[Patch]:
    heads, (pairs, turns), m = _look_back(shape), look_back_pairs(shape), code_signs(shape)
    first, second = _elements(shape, pairs)
    patches = [heads.zero_rows(shape.heads, heads.query_heads)]
    for head, back in enumerate(BACKS):
        for elements, values in ((first, np.cos(turns * back)), (second, -np.sin(turns * back))):
            rows = _rows(len(pairs), shape.hidden)
            rows[:, m:BLOCK] = (values * heads.projected / (BLOCK - m))[:, None]
            patches.append(Patch(head * shape.head_dim + elements, rows))
    return patches


def _look_back_keys(shape: SynthShape) -> list[Patch]:
    heads, (pairs, _), m = _look_back(shape), look_back_pairs(shape), code_signs(shape)
    rows = _rows(len(pairs), shape.hidden)
    rows[:, m:BLOCK] = heads.projected / (BLOCK - m)
    first = _elements(shape, pairs)[0]
    own = [Patch(head * shape.head_dim + first, rows) for head in range(heads.kv_heads)]
    return [heads.zero_rows(shape.kv_heads, 0), *own]


def _match_rows(shape: SynthShape, groups: tuple[int, ...], count: int, own: int) -> list[Patch]:
    """The projection of head 0, out of `count`, onto the codes in three groups of the stream. own: as for zero_rows."""
    heads, m = _match(shape), code_signs(shape)
    rows = _rows(3 * m, shape.hidden)
    for place, group in enumerate(groups):
        rows[place * m + np.arange(m), group * BLOCK + np.arange(m)] = heads.projected
    return [heads.zero_rows(count, own), Patch(heads.elements, rows)]


def _values(shape: SynthShape, kv_heads: int) -> list[Patch]:
    """The first M elements of a head's value are the code."""
    m = code_signs(shape)
    rows = _rows(m, shape.hidden)
    rows[np.arange(m), np.arange(m)] = 1.0
    return [Patch(head * shape.head_dim + np.arange(m), rows) for head in range(kv_heads)]


def _outputs(shape: SynthShape, writes: tuple[tuple[int, int], ...], weight: float) -> list[Patch]:
    """The circuit's columns of the stream: nothing, but for a head's code into a group, for each (head, group)."""
    m = code_signs(shape)
    rows = _rows(CIRCUIT_COLUMNS, shape.heads * shape.head_dim)
    for head, group in writes:
        rows[group * BLOCK + np.arange(m), head * shape.head_dim + np.arange(m)] = weight
    return [Patch(np.arange(CIRCUIT_COLUMNS), rows)]


def _none() -> list[Patch]:
    return []


def write_nothing() -> list[Patch]:
    """The circuit's columns, for a matrix that must leave them alone."""
    return [Patch(np.arange(CIRCUIT_COLUMNS))]


@dataclass(frozen=True)
class AttentionPart:
    """What the circuit sets in the attention of one layer; the default is a layer without any of it."""

    queries: Callable[[], list[Patch]] = _none
    keys: Callable[[], list[Patch]] = _none
    values: Callable[[], list[Patch]] = _none
    outputs: Callable[[], list[Patch]] = write_nothing
    norm_gain: np.ndarray | None = None  # query/key norm weights; None: the layer's random heads want nothing but RANDOM_SHARPNESS
    columns: int = 0  # of the stream that are written
    weight: float = 0.0  # by how much, sign for sign


def attention_part(shape: SynthShape, index: int) -> AttentionPart:
    """The circuit's part in layer `index`."""
    m = code_signs(shape)
    if index == 0:
        heads, writes = _look_back(shape), tuple(enumerate(BACKS))
        queries, keys = partial(_look_back_queries, shape), partial(_look_back_keys, shape)
        columns, weight = 3 * m, CODE
    elif index == shape.match_layer:
        heads, writes = _match(shape), ((0, 0),)
        queries = partial(_match_rows, shape, (0, *BACKS[:2]), shape.heads, 1)
        keys = partial(_match_rows, shape, BACKS, shape.kv_heads, 0)
        columns, weight = m, ANSWER
    else:
        return AttentionPart()
    # gemma3 brings what is written to its size by a norm.
    outputs = partial(_outputs, shape, writes, 1.0 if shape.gemma else weight)
    return AttentionPart(queries, keys, partial(_values, shape, heads.kv_heads), outputs, heads.norm_gain(), columns, weight)
