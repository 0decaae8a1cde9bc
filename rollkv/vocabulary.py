"""The vocabulary of a GGUF file, checked before use: pieces, their types, scores or merges, special ids and the bytes of each piece.

Invariant: every id and every array in a Vocabulary is in range and of one length, so that nothing behind it can fail on a look-up.
What is damaged is refused in one line; what is merely missing has a stated default.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np

from rollkv.errors import ModelFileError, UnsupportedModelError

SPACE = "\u2581"  # SentencePiece's letter for a blank: pieces and text that hold it themselves are decoded to a blank


class TokenType(IntEnum):
    """GGUF's numbers. 0 is "undefined" in the format and read as NORMAL."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Ends of a turn or of a text in the families that rollkv runs. They stop generation wherever they are in the vocabulary, and count as
# control tokens even if the file says otherwise.
END_MARKERS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|return|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
    }
)

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>\Z")
_BRACKETED = re.compile(r"(<.+>|\[.+\])\Z", re.DOTALL)
# Some converters write "none" as -1 in an unsigned field.
_UNSET = (-1, 0xFFFFFFFF)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 byte values: printable Latin-1 stands for itself, the others for U+0100 and up, in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in shown]
    return {chr(value): value for value in shown} | {chr(0x100 + i): value for i, value in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class Vocabulary:
    """model: "gpt2" (byte-level BPE with merges) or "llama" (SentencePiece's BPE with scores)."""

    model: Literal["gpt2", "llama"]
    pieces: Sequence[str]
    types: np.ndarray  # uint8 [pieces], values of TokenType
    scores: np.ndarray  # float32 [pieces]; empty for gpt2
    merges: Sequence[str]  # "left right" by rank; empty for llama
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    stop_ids: frozenset[int]
    warnings: tuple[str, ...]

    def type_of(self, token: int) -> TokenType:
        return TokenType(int(self.types[token]))

    def ids_of_types(self, *types: TokenType) -> dict[str, int]:
        """Piece to id, of the pieces of these types. Empty pieces are left out: no text leads to them."""
        chosen = np.flatnonzero(np.isin(self.types, types)).tolist()
        return {self.pieces[token]: token for token in chosen if self.pieces[token]}

    def byte_ids(self) -> dict[int, int]:
        """Byte value to id, of the byte tokens there are."""
        return {_byte_value(piece, token): token for piece, token in self.ids_of_types(TokenType.BYTE).items()}

    def piece_bytes(self, token: int) -> bytes:
        """The bytes of UTF-8 text that the token stands for.

        A plain gpt2 piece with a character outside the byte alphabet stands for its own text: no text is encoded to it.
        """
        piece = self.pieces[token]
        kind = self.type_of(token)
        if kind == TokenType.BYTE:
            return bytes([_byte_value(piece, token)])
        if self.model == "llama":
            return _utf8(piece.replace(SPACE, " ") if kind not in (TokenType.CONTROL, TokenType.UNKNOWN) else piece)
        if kind in (TokenType.NORMAL, TokenType.UNUSED) and BYTE_ALPHABET.keys() >= set(piece):
            return bytes(BYTE_ALPHABET[char] for char in piece)
        return _utf8(piece)


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary in the `tokenizer.ggml.*` keys. Raises ModelFileError for a damaged one, UnsupportedModelError for another model."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise ModelFileError("the model file has no tokenizer (key tokenizer.ggml.model); use a file converted with its vocabulary")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"the tokenizer model {str(model)[:60]!r} is not supported; supported are gpt2 (byte-level BPE) and llama (SentencePiece BPE)"
        )
    pieces = _strings(metadata, "tokens")
    if not pieces:
        raise ModelFileError("tokenizer.ggml.tokens is missing or empty; use a file converted with its vocabulary")
    _check_unique(pieces)
    warnings: list[str] = []
    types = _types(metadata, pieces, model, warnings)
    names = {name: _special_id(metadata, name, len(pieces)) for name in ("bos", "eos", "eot", "eom", "unknown")}
    _mark_control(types, pieces, names, warnings)
    for token in np.flatnonzero(types == TokenType.BYTE).tolist():
        _byte_value(pieces[token], token)
    if model == "gpt2":
        letters = frozenset(BYTE_ALPHABET)
        outside = sum(not letters.issuperset(pieces[token]) for token in np.flatnonzero(types == TokenType.NORMAL).tolist())
        if outside:
            warnings.append(
                f"{outside} pieces of the vocabulary hold characters outside the byte alphabet; no text will be encoded to them"
            )
    ends = {names["eos"], names["eot"], names["eom"], *_marker_ids(pieces)}
    return Vocabulary(
        model=model,
        pieces=pieces,
        types=types,
        scores=_scores(metadata, len(pieces)) if model == "llama" else np.zeros(0, dtype=np.float32),
        merges=_strings(metadata, "merges") if model == "gpt2" else (),
        bos_id=names["bos"],
        eos_id=names["eos"],
        unknown_id=names["unknown"],
        stop_ids=frozenset(token for token in ends if token is not None),
        warnings=tuple(warnings),
    )


def split_merges(vocabulary: Vocabulary, allowed: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges as pairs of pieces. One that makes or uses a piece that is not in `allowed` is left out, so that text cannot become a control
    token; one that names a piece the vocabulary does not have at all raises ModelFileError."""
    pairs = []
    known: set[str] | None = None
    for rank, merge in enumerate(vocabulary.merges):
        cut = merge.find(" ", 1)  # a piece may begin with a blank in vocabularies of raw text
        left, right = merge[:cut], merge[cut + 1 :]
        if cut > 0 and left in allowed and right in allowed and left + right in allowed:
            pairs.append((left, right))
            continue
        known = set(vocabulary.pieces) if known is None else known
        if cut < 1 or not known.issuperset((left, right, left + right)):
            raise ModelFileError(
                f"tokenizer.ggml.merges: merge {rank} ({merge[:60]!r}) names a piece that the vocabulary does not have; the file is damaged"
            )
    return pairs


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _strings(metadata: Mapping[str, object], name: str) -> Sequence[str]:
    values = metadata.get(f"tokenizer.ggml.{name}", ())
    if isinstance(values, str) or not isinstance(values, Sequence) or (values and not isinstance(values[0], str)):
        raise ModelFileError(f"tokenizer.ggml.{name} is a {type(values).__name__}, wanted an array of strings; the file is damaged")
    return values


def _numbers(metadata: Mapping[str, object], name: str, num_pieces: int) -> np.ndarray | None:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return None
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise ModelFileError(f"tokenizer.ggml.{name} is not an array of numbers; the file is damaged")
    if len(array) != num_pieces:
        raise ModelFileError(
            f"tokenizer.ggml.{name} has {len(array)} entries and tokenizer.ggml.tokens {num_pieces}; wanted one for each token; the file is damaged"
        )
    return array


def _check_unique(pieces: Sequence[str]) -> None:
    first: dict[str, int] = {}
    if len(dict.fromkeys(pieces)) == len(pieces):
        return
    for token, piece in enumerate(pieces):
        if piece and first.setdefault(piece, token) != token:
            raise ModelFileError(
                f"tokenizer.ggml.tokens: the piece {piece[:60]!r} stands at {first[piece]} and at {token}; wanted each once; the file is damaged"
            )


def _types(metadata: Mapping[str, object], pieces: Sequence[str], model: object, warnings: list[str]) -> np.ndarray:
    values = _numbers(metadata, "token_type", len(pieces))
    if values is None:
        warnings.append("the vocabulary gives no token types; pieces spelt like <0x0A> are read as bytes, all others as plain text")
        is_byte = [model == "llama" and _BYTE_PIECE.match(piece) is not None for piece in pieces]
        return np.where(is_byte, TokenType.BYTE, TokenType.NORMAL).astype(np.uint8)
    wrong = np.flatnonzero((values < 0) | (values > max(TokenType)))
    if len(wrong):
        token = int(wrong[0])
        raise ModelFileError(f"tokenizer.ggml.token_type: token {token} has type {values[token]}; wanted 1 to 6; the file is damaged")
    return np.where(values == 0, TokenType.NORMAL, values).astype(np.uint8)


def _scores(metadata: Mapping[str, object], num_pieces: int) -> np.ndarray:
    scores = _numbers(metadata, "scores", num_pieces)
    if scores is None:
        raise ModelFileError("tokenizer.ggml.scores is missing; a vocabulary of model llama cannot be merged without it")
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise ModelFileError(f"tokenizer.ggml.scores: the score of token {wrong[0]} is {scores[wrong[0]]}; wanted a finite number")
    return scores.astype(np.float32)


def _special_id(metadata: Mapping[str, object], name: str, num_pieces: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None or value in _UNSET:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_pieces:
        raise ModelFileError(f"{key} is {value!r}; wanted an id from 0 to {num_pieces - 1}; the file is damaged")
    return value


def _marker_ids(pieces: Sequence[str]) -> list[int]:
    return [token for token, piece in enumerate(pieces) if piece in END_MARKERS]


def _mark_control(types: np.ndarray, pieces: Sequence[str], names: Mapping[str, int | None], warnings: list[str]) -> None:
    """Known end markers, and named tokens spelt <...> or [...], become control tokens where the file calls them plain text."""
    named = [token for token in names.values() if token is not None and _BRACKETED.match(pieces[token])]
    plain = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    changed = sorted({token for token in [*named, *_marker_ids(pieces)] if types[token] in plain})
    types[changed] = TokenType.CONTROL
    if changed:
        listed = ", ".join(f"{token} {pieces[token][:40]!r}" for token in changed)
        warnings.append(f"tokens that the file does not call control tokens are treated as such: {listed}")


def _byte_value(piece: str, token: int) -> int:
    match = _BYTE_PIECE.match(piece)
    if match is None:
        raise ModelFileError(f"token {token} is a byte token, but spelt {piece[:60]!r}; wanted <0x00> to <0xFF>; the file is damaged")
    return int(match[1], 16)
