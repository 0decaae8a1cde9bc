"""Text to token ids and back, from the metadata of a GGUF file.

A text goes through three steps. Added tokens are cut out first: user-defined ones always, control ones only where the caller says that
the text may hold them. The rest is split and merged: byte-level BPE by package `tokenizers`, SentencePiece vocabularies by
`score_merge`. Last, begin-of-text is put in front, exactly once, where it is wanted.

Invariants: control tokens written in a user's text are text; decode(encode(text)) is text, but for SentencePiece's own letter for a
blank, U+2581, which comes back as a blank; a stream of ids never shows half a character.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from tokenizers import Regex
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from rollkv.errors import ModelFileError, UsageError
from rollkv.pretokenizers import DEFAULT, KNOWN_NAMES, PRE_TOKENIZERS, PreTokenizer, find_pre_tokenizer
from rollkv.score_merge import Memo, ScoreMerger
from rollkv.vocabulary import BYTE_ALPHABET, SPACE, TokenType, Vocabulary, read_vocabulary, split_merges

# A Unicode noncharacter, which no text has a use for: it breaks up control tokens in text that goes through a chat template.
_BREAK = "\ufdd0"
_BREAKS = re.compile(f"{_BREAK}({_BREAK}?)")


class Tokenizer:
    """Immutable once built; see `from_metadata`.

    vocab_size: number of tokens. bos_id, eos_id: None where the file names none. add_bos: whether the file wants begin-of-text before a
    text. stop_ids: end-of-text, end-of-turn and end-of-message ids of the file and the known end markers in its vocabulary.
    chat_template: the Jinja source, not yet looked at. warnings: one line each, for the user.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, object], pre_tokenizer: str | None) -> None:
        self._vocabulary = vocabulary
        warnings = list(vocabulary.warnings)
        family: PreTokenizer | None = None
        if vocabulary.model == "gpt2":
            family = _family(metadata, pre_tokenizer, warnings)
        elif pre_tokenizer is not None:
            raise UsageError(f"--pre-tokenizer {pre_tokenizer}: a vocabulary of model llama has no pre-tokenizer; leave the option out")
        self.vocab_size = len(vocabulary.pieces)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        self.add_bos = _wants_bos(metadata, vocabulary, family)
        if self.bos_id is None and self.add_bos:
            warnings.append("the vocabulary usually wants a begin-of-text token, but the file names none; none is added")
            self.add_bos = False
        if metadata.get("tokenizer.ggml.add_eos_token") is True:
            warnings.append("the file asks for an end-of-text token behind a text; it is not added, because the text is to be continued")
        template = metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None
        if template is not None and self.chat_template is None:
            warnings.append("tokenizer.chat_template is not text; the file is used as if it had no chat template")
        self.warnings = tuple(warnings)
        # SentencePiece puts a blank before the first word, so that it is the same piece as in the middle of a text.
        self._space_prefix = vocabulary.model == "llama" and metadata.get("tokenizer.ggml.add_space_prefix", True) is True
        user_defined = vocabulary.ids_of_types(TokenType.USER_DEFINED)
        marked = vocabulary.ids_of_types(TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN)
        self._plain_cutter = _Cutter(self._escaped(user_defined))
        self._special_cutter = _Cutter(self._escaped(marked))
        self._control_cutter = _Cutter(vocabulary.ids_of_types(TokenType.CONTROL, TokenType.UNKNOWN))
        self._words: _ByteLevelWords | _ScoredWords = _ScoredWords(vocabulary) if family is None else _ByteLevelWords(vocabulary, family)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], *, pre_tokenizer: str | None = None) -> "Tokenizer":
        """The tokenizer of a GGUF file. pre_tokenizer names a family in place of the file's `tokenizer.ggml.pre`.

        A file without that key is read as "default", with a warning. Raises ModelFileError for a damaged vocabulary,
        UnsupportedModelError for an unknown tokenizer model or pre-tokenizer.
        """
        return cls(read_vocabulary(metadata), metadata, pre_tokenizer)

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Ids of a text. add_bos: begin-of-text in front, or as the file wishes. parse_special: control tokens in the text are tokens;
        begin-of-text is then not added to a text that begins with it.

        Raises UsageError for a text that is not valid Unicode or has a character the vocabulary cannot spell.
        """
        _check_unicode(text)
        wants_bos = self.add_bos if add_bos is None else add_bos
        if wants_bos and self.bos_id is None:
            raise UsageError("a begin-of-text token is wanted, but the model file names none; encode without it")
        ids = self._encode(text, self._special_cutter if parse_special else self._plain_cutter)
        if not wants_bos:
            return ids
        first = 0
        while parse_special and first < len(ids) and ids[first] == self.bos_id:
            first += 1
        return [self.bos_id, *ids[first:]] if self.bos_id is not None else ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what a chat template wrote: control tokens are tokens, except in text that went through `shield`.

        Exactly one begin-of-text where the file wants it; where it does not, the template's output is left as it is.
        """
        return self.encode(text, parse_special=True)

    def shield(self, text: str) -> str:
        """The text with its control tokens broken up by noncharacters, which `encode_rendered` takes out again.

        For user text on its way through a chat template: the template's own control tokens stay tokens, those in the text are text.
        """
        text = text.replace(_BREAK, _BREAK * 2)
        parts = (part if isinstance(part, str) else self._shielded(part) for part in self._control_cutter.cut(text))
        return "".join(parts)

    def decode(self, ids: Iterable[int], *, skip_control: bool = True) -> str:
        """The text of a whole sequence, begun by its first id: the blank that `encode` put before the first word is taken off again.

        skip_control leaves control tokens out. Bytes that are not UTF-8 become U+FFFD. Raises UsageError for an id out of range.
        """
        stream = DetokenizeStream(self, self._space_prefix, skip_control)
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream(self, *, continues: bool = True, skip_control: bool = True) -> "DetokenizeStream":
        """Text of ids that come one by one. continues: they go on where a prompt ended, so that a blank at the start is text (" Paris"
        behind "The capital is"). Otherwise the ids begin a text of their own, as the answer in a chat, and the blank that SentencePiece
        puts before a first word is taken off."""
        return DetokenizeStream(self, self._space_prefix and not continues, skip_control)

    def piece(self, token: int) -> str:
        """The token for people: its text, control tokens as they are spelt; bytes that are not UTF-8 by themselves as \\xNN."""
        return self.piece_bytes(token).decode("utf-8", "backslashreplace")

    def quoted(self, token: int) -> str:
        """The token for people, in quotation marks and in one line: as Python escapes text, and bytes that are not UTF-8 by themselves as \\xNN."""
        text = repr(self.piece_bytes(token).decode("utf-8", "surrogateescape"))
        return re.sub(r"\\(?:\\|udc(..))", lambda escape: f"\\x{escape[1]}" if escape[1] else escape[0], text)

    def piece_bytes(self, token: int) -> bytes:
        """The bytes the token stands for; a control token's spelling. Raises UsageError for an id out of range."""
        self._check_id(token)
        return self._vocabulary.piece_bytes(token)

    def is_control(self, token: int) -> bool:
        """Whether the token is a marker rather than text."""
        self._check_id(token)
        return self._vocabulary.type_of(token) in (TokenType.CONTROL, TokenType.UNKNOWN)

    def is_added(self, token: int) -> bool:
        """Whether the token is cut out of text before anything else, rather than merged from characters."""
        return self.is_control(token) or self._vocabulary.type_of(token) == TokenType.USER_DEFINED

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise UsageError(f"token id {token} is outside the vocabulary; wanted an id from 0 to {self.vocab_size - 1}")

    def _shielded(self, token: int) -> str:
        piece = self._vocabulary.pieces[token]
        return piece[0] + _BREAK + piece[1:]

    def _escaped(self, ids: Mapping[str, int]) -> dict[str, int]:
        """Added tokens as they are spelt in the text that they are cut out of."""
        return {piece.replace(" ", SPACE) if self._vocabulary.model == "llama" else piece: token for piece, token in ids.items()}

    def _encode(self, text: str, cutter: "_Cutter") -> list[int]:
        out: list[int] = []
        encode_words = self._words.encoder()
        begins = self._space_prefix
        for part in cutter.cut(text.replace(" ", SPACE) if self._vocabulary.model == "llama" else text):
            if isinstance(part, int):
                out.append(part)
                begins = begins and part == self.bos_id
                continue
            if cutter is self._special_cutter:
                part = _BREAKS.sub(r"\1", part)
            out += encode_words(SPACE + part if begins and part else part)
            begins = False
        return out


class DetokenizeStream:
    """Text behind a stream of ids. The concatenation of all that push and finish return is the text; no part ends inside a character."""

    def __init__(self, tokenizer: Tokenizer, strip_space: bool, skip_control: bool) -> None:
        self._tokenizer = tokenizer
        self._at_start = strip_space
        self._skip_control = skip_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is complete with this token; "" while a character is not."""
        data = self._tokenizer.piece_bytes(token)
        if self._at_start and token != self._tokenizer.bos_id:
            self._at_start = False
            if data.startswith(b" ") and not self._tokenizer.is_added(token):
                data = data[1:]
        if self._skip_control and self._tokenizer.is_control(token):
            return ""
        return self._utf8.decode(data)

    def finish(self) -> str:
        """U+FFFD if the ids ended inside a character, else ""."""
        return self._utf8.decode(b"", final=True)


class _Cutter:
    """Cuts added tokens out of text, at each place the longest one that stands there."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._root: dict = {}
        for piece, token in ids.items():
            node = self._root
            for char in piece:
                node = node.setdefault(char, {})
            node[""] = token
        # Where a token may begin: its first character and, unless that is a token itself, one of the characters that go on.
        starts = [
            re.escape(char) if "" in node else f"{re.escape(char)}(?=[{re.escape(''.join(sorted(node)))}])"
            for char, node in sorted(self._root.items())
        ]
        self._start = re.compile("|".join(starts)) if starts else None

    def cut(self, text: str) -> Iterator[int | str]:
        """The tokens and the pieces of text between them, in order; no piece is empty."""
        begin = place = 0
        while self._start is not None and (match := self._start.search(text, place)):
            place = match.start()
            token, end = self._longest(text, place)
            if token is None:
                place += 1
                continue
            if begin < place:
                yield text[begin:place]
            yield token
            begin = place = end
        if begin < len(text):
            yield text[begin:]

    def _longest(self, text: str, place: int) -> tuple[int | None, int]:
        """The id of the longest token that begins at `place`, and where it ends; None if there is none."""
        node, token, end = self._root, None, place
        for at in range(place, len(text)):
            if text[at] not in node:
                break
            node = node[text[at]]
            if "" in node:
                token, end = node[""], at + 1
        return token, end


class _ScoredWords:
    """Plain text of a llama vocabulary. Control, byte and user-defined tokens are never made by merging."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = vocabulary.ids_of_types(TokenType.NORMAL, TokenType.UNUSED)
        self._merger = ScoreMerger(ids, vocabulary.pieces, vocabulary.scores, vocabulary.byte_ids(), vocabulary.unknown_id, SPACE)

    def encoder(self) -> Callable[[str], list[int]]:
        """Encodes the parts of one text."""
        return partial(self._encode, Memo())

    def _encode(self, memo: Memo, text: str) -> list[int]:
        try:
            return self._merger.encode(text, memo)
        except KeyError as error:
            raise _unspeakable(error.args[0]) from None


class _ByteLevelWords:
    """Plain text of a gpt2 vocabulary."""

    def __init__(self, vocabulary: Vocabulary, family: PreTokenizer) -> None:
        ids = vocabulary.ids_of_types(TokenType.NORMAL, TokenType.UNUSED)
        merges = split_merges(vocabulary, ids)
        if not merges:
            raise ModelFileError("tokenizer.ggml.merges is missing or empty; a vocabulary of model gpt2 cannot be used without it")
        self._bpe = BpeTokenizer(BPE(vocab=ids, merges=merges, ignore_merges=family.whole_words))
        splits = [Split(Regex(pattern), "isolated") for pattern in family.patterns]
        self._bpe.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
        self._present = bytes(value for letter, value in BYTE_ALPHABET.items() if letter in ids)

    def encoder(self) -> Callable[[str], list[int]]:
        """Encodes the parts of one text."""
        return self._encode

    def _encode(self, text: str) -> list[int]:
        absent = text.encode().translate(None, self._present) if len(self._present) < 256 else b""
        if absent:
            raise _unspeakable(next(char for char in text if char.encode().translate(None, self._present)))
        return self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _unspeakable(char: str) -> UsageError:
    return UsageError(f"the vocabulary has no token for the character {char!a} (U+{ord(char):04X}); take it out of the text")


def _family(metadata: Mapping[str, object], override: str | None, warnings: list[str]) -> PreTokenizer:
    if override is not None and override not in PRE_TOKENIZERS:
        raise UsageError(f"--pre-tokenizer {override[:60]!r} is not known; known are {KNOWN_NAMES}")
    name = metadata.get("tokenizer.ggml.pre") if override is None else override
    if name is None:
        warnings.append(
            f"the model file does not name its pre-tokenizer; {DEFAULT!r} is used, which may cut numbers and words in the wrong places: "
            "name the right one with --pre-tokenizer"
        )
        name = DEFAULT
    return find_pre_tokenizer(str(name))


def _wants_bos(metadata: Mapping[str, object], vocabulary: Vocabulary, family: PreTokenizer | None) -> bool:
    wish = metadata.get("tokenizer.ggml.add_bos_token")
    if wish is True and vocabulary.bos_id is None:
        raise ModelFileError("tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing; the file is damaged")
    if isinstance(wish, bool):
        return wish
    return family is None or family.adds_bos


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text is not valid Unicode: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}; give text in UTF-8"
        ) from None
