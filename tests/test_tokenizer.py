"""Tokenizer: stored ids of two reference tokenizers, a plain priority queue as oracle of score merging, and vocabularies with faults."""

import heapq
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from rollkv.errors import ModelFileError, UnsupportedModelError, UsageError
from rollkv.gguf_file import open_gguf
from rollkv.pretokenizers import PRE_TOKENIZERS
from rollkv.score_merge import Memo, ScoreMerger
from rollkv.tokenizer import Tokenizer
from rollkv.vocabulary import BYTE_ALPHABET, TokenType

FIXTURES = Path(__file__).parent / "fixtures"
REAL_MODELS = Path(os.environ.get("ROLLKV_MODELS", Path.home() / ".cache/rollkv/models"))
STORED = json.loads((FIXTURES / "tokenizers.json").read_text())
NAMES = [name for name in STORED if (FIXTURES / f"{name}.gguf").exists()]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (int(kind) for kind in TokenType)
LETTER = {value: letter for letter, value in BYTE_ALPHABET.items()}


def byte_level(words=(), *, added=(), **changes):
    """Metadata of a small gpt2 vocabulary: all bytes, `words` built letter by letter, and (piece, type) pairs."""
    pieces, merges = list(BYTE_ALPHABET), []
    for word in words:
        letters = "".join(LETTER[value] for value in word.encode())
        for end in range(2, len(letters) + 1):
            if letters[:end] not in pieces:
                pieces.append(letters[:end])
                merges.append(f"{letters[: end - 1]} {letters[end - 1]}")
    types = [NORMAL] * len(pieces) + [kind for _, kind in added]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*pieces, *(piece for piece, _ in added)],
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": merges or ["a b"],
    }
    if not merges:
        metadata["tokenizer.ggml.tokens"].append("ab")
        metadata["tokenizer.ggml.token_type"] = np.array([*types, NORMAL], dtype=np.int32)
    return changed(metadata, changes)


def scored(words=("▁", "a", "b", "▁a", "ab"), *, added=(), byte_values=range(256), **changes):
    """Metadata of a small llama vocabulary: <unk>, <s>, </s>, bytes, words by falling score, and (piece, type) pairs."""
    rows = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    rows += [(f"<0x{value:02X}>", BYTE, 0.0) for value in byte_values]
    rows += [(word, NORMAL, -float(rank)) for rank, word in enumerate(words)]
    rows += [(piece, kind, -1000.0) for piece, kind in added]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [row[0] for row in rows],
        "tokenizer.ggml.token_type": np.array([row[1] for row in rows], dtype=np.int32),
        "tokenizer.ggml.scores": np.array([row[2] for row in rows], dtype=np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return changed(metadata, changes)


def changed(metadata, changes):
    """Keys of tokenizer.ggml set, or taken out where the value is None."""
    for name, value in changes.items():
        metadata[f"tokenizer.ggml.{name}"] = value
    return {key: value for key, value in metadata.items() if value is not None}


def build(metadata, **options):
    return Tokenizer.from_metadata(metadata, **options)


def pieces(tokenizer, text, **options):
    return [tokenizer.piece(token) for token in tokenizer.encode(text, **{"add_bos": False, **options})]


# -- stored ids ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_stored_ids(name):
    with open_gguf(FIXTURES / f"{name}.gguf") as file:
        tokenizer = build(file.metadata)
    for row in STORED[name]:
        ids = tokenizer.encode(row["text"], add_bos=False)
        assert ids == row["ids"], row["text"]
        assert tokenizer.decode(ids) == row["text"]


def test_all_core_families_have_stored_ids():
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma3"} <= set(NAMES)


# -- merging by score ------------------------------------------------------------------------------------------------------------
def plain_merge(text, ids, scores):
    """SentencePiece's rule with nothing clever about it: one queue of (score, position)."""
    symbols = list(text)
    following, previous = [*range(1, len(text)), -1], list(range(-1, len(text) - 1))
    queue = []

    def add(left, right):
        if left >= 0 and right >= 0 and symbols[left] + symbols[right] in ids:
            piece = symbols[left] + symbols[right]
            heapq.heappush(queue, (-scores[ids[piece]], left, right, len(piece)))

    for position in range(len(text) - 1):
        add(position, position + 1)
    while queue:
        _, left, right, size = heapq.heappop(queue)
        if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != size:
            continue
        symbols[left], symbols[right] = symbols[left] + symbols[right], ""
        following[left] = following[right]
        if following[right] >= 0:
            previous[following[right]] = left
        add(previous[left], left)
        add(left, following[left])
    return [ids[symbol] for symbol in symbols if symbol]


def random_vocabulary(rng, *, ties):
    letters = "ab▁c"[: rng.choice([1, 2, 3, 4])]
    words = dict.fromkeys(letters)
    for _ in range(rng.randint(2, 25)):
        if rng.random() < 0.5:
            words["".join(rng.choice(letters) for _ in range(rng.randint(2, 7)))] = None
        else:
            words[rng.choice(list(words)) + rng.choice(list(words))] = None
    scores = [-float(rank) for rank in range(len(words))]
    if rng.random() < 0.5:
        rng.shuffle(scores)
    if ties:
        scores = [float(int(score) // 3) for score in scores]
    return letters, {word: token for token, word in enumerate(words)}, np.array(scores, dtype=np.float32)


@pytest.mark.parametrize("ties", [False, True])
def test_score_merging_equals_a_plain_queue(ties):
    rng = random.Random(11 + ties)
    for _ in range(200):
        letters, ids, scores = random_vocabulary(rng, ties=ties)
        merger = ScoreMerger(ids, list(ids), scores, {}, None, "▁")
        for _ in range(10):
            text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 60)))
            assert merger.encode(text, Memo()) == plain_merge(text, ids, scores), (text, ids, scores)


@pytest.mark.parametrize("ties", [False, True])
def test_long_words_equal_a_plain_queue(ties):
    rng = random.Random(23 + ties)
    for _ in range(25):
        letters, ids, scores = random_vocabulary(rng, ties=ties)
        letters = letters.replace("▁", "") or "▁"
        unit = "".join(rng.choice(letters) for _ in range(rng.randint(1, 5)))
        text = (unit * 5000)[: rng.randint(4096, 5000)] + "".join(rng.choice(letters) for _ in range(rng.randint(0, 900)))
        merger = ScoreMerger(ids, list(ids), scores, {}, None, "▁")
        assert merger.encode(text, Memo()) == plain_merge(text, ids, scores), (unit, ids, scores)


def test_a_word_may_be_merged_over_a_blank_inside_a_piece():
    tokenizer = build(scored(("▁", "a", "b", "a▁", "a▁b"), add_space_prefix=False))
    assert pieces(tokenizer, "a b a") == ["a b", " ", "a"]


def test_characters_outside_the_vocabulary():
    tokenizer = build(scored(add_space_prefix=False))
    assert pieces(tokenizer, "aé") == ["a", "\\xc3", "\\xa9"]
    assert tokenizer.decode(tokenizer.encode("aéb\U0010ffff")) == "aéb\U0010ffff"
    without_bytes = build(scored(byte_values=(), add_space_prefix=False, unknown_token_id=0))
    assert pieces(without_bytes, "aéb") == ["a", "<unk>", "b"]
    with pytest.raises(UsageError, match=r"U\+00E9"):
        build(scored(byte_values=(), add_space_prefix=False)).encode("aé")


# -- blanks at the start ---------------------------------------------------------------------------------------------------------
def test_space_prefix_once_and_by_the_key():
    tokenizer = build(scored(added=[("[X]", USER_DEFINED)]))
    assert pieces(tokenizer, "ab") == [" a", "b"]
    assert pieces(tokenizer, "") == []
    assert pieces(tokenizer, "ab[X]ab") == [" a", "b", "[X]", "ab"], "none after a marker"
    assert pieces(tokenizer, "[X]ab") == ["[X]", "ab"]
    assert pieces(tokenizer, "<s>ab", parse_special=True) == ["<s>", " a", "b"], "begin-of-text does not count"
    assert pieces(build(scored(add_space_prefix=False)), "ab") == ["ab"]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", ["ab", " ab", "  ab  ", "", " ", "\n a", "[X] a", "é", "a\u0301 b", "🙂 a", "a [X]  b"])
def test_round_trip_with_and_without_space_prefix(prefix, text):
    tokenizer = build(scored(added=[("[X]", USER_DEFINED)], add_space_prefix=prefix))
    for add_bos in (False, True):
        assert tokenizer.decode(tokenizer.encode(text, add_bos=add_bos)) == text


def test_stream_keeps_the_blank_of_a_continuation_only():
    tokenizer = build(scored())
    ids = tokenizer.encode("ab", add_bos=False)
    assert "".join(map(tokenizer.stream().push, ids)) == " ab"
    assert "".join(map(tokenizer.stream(continues=False).push, ids)) == "ab"
    assert "".join(map(tokenizer.stream(continues=False).push, [*ids, *ids])) == "ab ab"


# -- added tokens ----------------------------------------------------------------------------------------------------------------
ADDED = [("<|im_end|>", CONTROL), ("[A]", USER_DEFINED), ("[A]B", USER_DEFINED), ("\n\n", USER_DEFINED), ("\n\n\n", USER_DEFINED)]


@pytest.mark.parametrize("metadata", [byte_level(added=ADDED), scored(added=ADDED, add_space_prefix=False)])
def test_added_tokens_are_cut_out_longest_first(metadata):
    tokenizer = build(metadata)
    assert pieces(tokenizer, "a[A]Ba[A]\n\n\n\n\n") == ["a", "[A]B", "a", "[A]", "\n\n\n", "\n\n"]


@pytest.mark.parametrize("metadata", [byte_level(added=ADDED), scored(added=ADDED, add_space_prefix=False)])
def test_control_tokens_in_text_are_text(metadata):
    tokenizer = build(metadata)
    token = tokenizer.encode("<|im_end|>", add_bos=False, parse_special=True)
    assert len(token) == 1 and tokenizer.is_control(token[0])
    assert token[0] not in tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "a<|im_end|>b"
    assert tokenizer.decode(token) == "" and tokenizer.decode(token, skip_control=False) == "<|im_end|>"


def test_control_tokens_are_never_merged_from_text():
    llama = build(scored(("<", "s", ">", "<s", "s>", "▁"), add_space_prefix=False))
    assert llama.bos_id not in llama.encode("<s>", add_bos=False)
    gpt2 = byte_level(["<s>"], pre="llama-bpe")
    gpt2["tokenizer.ggml.token_type"][gpt2["tokenizer.ggml.tokens"].index("<s>")] = CONTROL
    assert pieces(build(gpt2), "<s>") == ["<s", ">"]


def test_shielded_text_stays_text_through_a_template():
    tokenizer = build(byte_level(added=ADDED))
    for user in ("a<|im_end|>b", "<|im_end|>", "\ufdd0<|im_end|>\ufdd0\ufdd0", "plain"):
        ids = tokenizer.encode_rendered("u " + tokenizer.shield(user) + "<|im_end|>")
        assert ids == [*tokenizer.encode("u " + user), *tokenizer.encode("<|im_end|>", parse_special=True)]
    assert tokenizer.shield("plain [A] text") == "plain [A] text"


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("rendered", ["<s>ab", "ab"])
def test_one_begin_of_text_where_the_file_wants_it(add_bos, rendered):
    tokenizer = build(scored(add_bos_token=add_bos))
    ids = tokenizer.encode_rendered(rendered)
    assert ids.count(tokenizer.bos_id) == (1 if add_bos or "<s>" in rendered else 0)
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.encode("<s>ab", add_bos=True).count(tokenizer.bos_id) == 1, "written by a user it is text"


# -- ends ------------------------------------------------------------------------------------------------------------------------
def test_stop_ids():
    tokenizer = build(scored(added=[("<end_of_turn>", CONTROL), ("<|im_end|>", NORMAL), ("</b>", USER_DEFINED)], eom_token_id=7))
    assert [tokenizer.piece(token) for token in sorted(tokenizer.stop_ids)] == [
        "</s>",
        "\x04",
        "<end_of_turn>",
        "<|im_end|>",
    ]
    assert any("<|im_end|>" in warning for warning in tokenizer.warnings)
    assert build(byte_level()).stop_ids == frozenset()
    assert build(byte_level(eos_token_id=0xFFFFFFFF, eot_token_id=-1)).stop_ids == frozenset()
    assert build(byte_level(eos_token_id=0)).stop_ids == {0}


# -- streams ---------------------------------------------------------------------------------------------------------------------
def test_streams_never_split_a_character():
    tokenizer = build(byte_level(["ab"]))
    text = "aé日🙂b"
    stream = tokenizer.stream()
    parts = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(parts) == text and stream.finish() == "" and all("\ufffd" not in part for part in parts)
    for cut, rest in ((1, "a"), (2, "a\ufffd"), (3, "aé"), (5, "aé\ufffd"), (7, "aé日\ufffd"), (9, "aé日\ufffd")):
        assert tokenizer.decode(tokenizer.encode(text)[:cut]) == rest


def test_streams_of_any_bytes_equal_python():
    tokenizer = build(byte_level())
    rng = random.Random(5)
    for _ in range(300):
        data = bytes(rng.choice([rng.randrange(256), 0xF0, 0x9F, 0x99, 0x82, 0x41]) for _ in range(rng.randint(0, 12)))
        ids = [tokenizer.encode(chr(0x41))[0] if value == 0x41 else list(BYTE_ALPHABET.values()).index(value) for value in data]
        assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


# -- pre-tokenizers --------------------------------------------------------------------------------------------------------------
TEXTS = [
    "it's WE'LL don't 1234567890 x2 1.5e10",
    "  leading,  trailing \n\n\t tabs\r\n \r x ",
    "Grüße aus München, naïve café e\u0301 ñ",
    "日本語のテキストと中文 한국어 ไทย हिन्दी العربية",
    "🙂🚀👩‍👩‍👧 \u00a0\u3000 ½ ² Ⅷ ٣",
    "def f(x):\n    return x**2  # CamelCase snake_case",
    "\x00\x01\x7f\x80\uffff\U0010ffff",
]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_family_loses_nothing(name):
    tokenizer = build(byte_level(["the", " the", "ing", "12", "123", "  "], pre=name), pre_tokenizer=None)
    for text in [*TEXTS, "".join(TEXTS)]:
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("smollm", "it's 12  x", ["it", "'s", " ", "1", "2", " ", " x"]),
        ("llama-bpe", "IT'S 1234 x\n\n y", ["IT", "'S", " ", "123", "4", " x", "\n\n", " y"]),
        ("qwen2", "it'S 12!\n x", ["it", "'S", " ", "1", "2", "!\n", " x"]),
        ("deepseek-r1-qwen", "12", ["1", "2"]),
        ("qwen35", "e\u0301x", ["e\u0301x"]),
        ("qwen2", "e\u0301x", ["e", "\u0301x"]),
        ("tekken", "CamelCase ABc 12 a/\n", ["Camel", "Case", " ABc", " ", "1", "2", " a", "/\n"]),
        ("deepseek-llm", "ab日本12\n", ["ab", "日本", "1", "2", "\n"]),
        ("deepseek-v3", "ab 1234(x日本", ["ab", " ", "123", "4", "(x", "日本"]),
        ("default", "a-b 12345", ["a", "-", "b", " ", "123", "45"]),
        ("gpt-4o", "It's 1234", ["It's", " ", "123", "4"]),
    ],
)
def test_words_of_a_family(name, text, words):
    """Every word is a piece of the vocabulary, and so is every pair of neighbours: only the cuts keep them apart."""
    joined = [left + right for left, right in zip(words, words[1:], strict=False)]
    tokenizer = build(byte_level([*dict.fromkeys([*words, *joined, text])], pre=name))
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text
    assert [tokenizer.piece(token) for token in tokenizer.encode(text, add_bos=False)] == words


def test_unknown_and_missing_pre_tokenizer():
    with pytest.raises(UnsupportedModelError, match="'made-up'.*--pre-tokenizer.*qwen2"):
        build(byte_level(pre="made-up"))
    assert pieces(build(byte_level(["12"], pre="made-up"), pre_tokenizer="qwen2"), "12") == ["1", "2"]
    with pytest.raises(UsageError, match="--pre-tokenizer 'made-up' is not known.*qwen2"):
        build(byte_level(["12"]), pre_tokenizer="made-up")
    missing = build(byte_level(["1234"], pre=None))
    assert pieces(missing, "1234") == pieces(build(byte_level(["1234"], pre="default")), "1234") == ["123", "4"]
    assert any("'default'" in warning and "--pre-tokenizer" in warning for warning in missing.warnings)
    with pytest.raises(UsageError, match="--pre-tokenizer"):
        build(scored(), pre_tokenizer="qwen2")


def test_begin_of_text_by_key_or_by_family():
    assert build(byte_level(pre="llama-bpe", bos_token_id=3)).add_bos
    assert not build(byte_level(pre="llama-bpe", bos_token_id=3, add_bos_token=False)).add_bos
    assert not build(byte_level(pre="qwen2", bos_token_id=3)).add_bos
    assert build(byte_level(pre="qwen2", bos_token_id=3, add_bos_token=True)).encode("a")[0] == 3
    without = build(scored(bos_token_id=None))
    assert not without.add_bos and any("begin-of-text" in warning for warning in without.warnings)
    with pytest.raises(UsageError, match="begin-of-text"):
        without.encode("a", add_bos=True)


# -- faults ----------------------------------------------------------------------------------------------------------------------
def with_piece(metadata, token, piece):
    metadata["tokenizer.ggml.tokens"][token] = piece
    return metadata


FAULTS = {
    "no tokenizer": ({}, "tokenizer.ggml.model"),
    "no tokens": (scored(tokens=None), "tokenizer.ggml.tokens"),
    "tokens are numbers": (scored(tokens=np.zeros(3)), "tokenizer.ggml.tokens"),
    "tokens are one text": (scored(tokens="abc"), "tokenizer.ggml.tokens"),
    "scores missing": (scored(scores=None), "tokenizer.ggml.scores"),
    "scores too short": (scored(scores=np.zeros(7)), "7 entries"),
    "types too long": (scored(token_type=np.ones(9999, dtype=np.int32)), "9999 entries"),
    "type 9": (scored(token_type=np.full(264, 9)), "type 9"),
    "score not a number": (scored(scores=np.full(264, np.nan)), "nan"),
    "byte spelt with a minus": (with_piece(scored(), 3, "<0x-1>"), "'<0x-1>'"),
    "byte spelt too long": (with_piece(scored(), 3, "<0x100>"), "'<0x100>'"),
    "byte twice": (with_piece(scored(), 3, "<0x41>"), "<0x41>"),
    "bos outside": (scored(bos_token_id=264), "264"),
    "eos negative": (scored(eos_token_id=-7), "-7"),
    "eot is text": (scored(eot_token_id="x"), "'x'"),
    "bos wanted, not named": (scored(bos_token_id=None, add_bos_token=True), "bos_token_id"),
    "merge of unknown pieces": (byte_level(merges=["a b", "q zz"]), "merge 1 ('q zz')"),
    "merge without a blank": (byte_level(merges=["a b", "abc"]), "merge 1 ('abc')"),
    "merge making nothing known": (byte_level(merges=["q x"]), "merge 0 ('q x')"),
    "no merges": (byte_level(merges=[]), "tokenizer.ggml.merges"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_vocabularies_are_refused_in_one_line(fault):
    metadata, told = FAULTS[fault]
    with pytest.raises(ModelFileError) as caught:
        build(metadata)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_other_tokenizer_models_are_named():
    with pytest.raises(UnsupportedModelError, match="'bert'.*gpt2.*llama"):
        build(scored(model="bert"))


def test_missing_bytes_are_refused_where_they_are_needed():
    metadata = with_piece(byte_level(["ab"]), BYTE_ALPHABET[LETTER[0xC3]], "gone")
    metadata["tokenizer.ggml.tokens"][list(BYTE_ALPHABET).index(LETTER[0xC3])] = "gone2"
    tokenizer = build(metadata)
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"
    with pytest.raises(UsageError, match=r"U\+00E9"):
        tokenizer.encode("ab é")


def test_raw_characters_in_a_byte_level_vocabulary():
    tokenizer = build(byte_level(["ab"], added=[("日 本", NORMAL), ("", NORMAL)]))
    token = tokenizer.vocab_size - 2
    assert tokenizer.decode([token]) == tokenizer.piece(token) == "日 本"
    assert token not in tokenizer.encode("日 本") and tokenizer.decode(tokenizer.encode("日 本")) == "日 本"
    assert tokenizer.decode([token + 1]) == ""
    assert any("byte alphabet" in warning for warning in tokenizer.warnings)


def test_missing_types_have_a_stated_default():
    tokenizer = build(scored(token_type=None, add_space_prefix=False))
    assert pieces(tokenizer, "aé") == ["a", "\\xc3", "\\xa9"]
    assert tokenizer.is_control(1) and any("token types" in warning for warning in tokenizer.warnings)


@pytest.mark.parametrize(
    "text,quoted",
    [("é", [r"'\xc3'", r"'\xa9'"]), ("\x10\n", [r"'\x10'", r"'\n'"]), ("\\", [r"'\\'"]), ("'", ['"\'"']), (" a", ["' '", "'a'"])],
)
def test_a_quoted_token_is_escaped_in_one_way(text, quoted):
    tokenizer = build(byte_level())
    assert [tokenizer.quoted(token) for token in tokenizer.encode(text, add_bos=False)] == quoted


def test_what_looks_like_an_escape_stays_in_a_quoted_token():
    tokenizer = build(byte_level(added=[(r"\udc98", USER_DEFINED)]))
    (token,) = tokenizer.encode(r"\udc98", add_bos=False)
    assert tokenizer.quoted(token) == r"'\\udc98'"


def test_ids_out_of_range_and_text_that_is_no_unicode():
    tokenizer = build(scored())
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match=str(token)):
            tokenizer.decode([token])
        with pytest.raises(UsageError, match=str(token)):
            tokenizer.piece(token)
    with pytest.raises(UsageError, match="character 2.*DC80"):
        tokenizer.encode("ab\udc80")


# -- real vocabularies -----------------------------------------------------------------------------------------------------------
REAL_TEXTS = [*TEXTS[:-1], "a" * 5000, " " * 333, "\n" * 77, "x = 1\n" * 40 + "\t\t\ty", "<|im_end|><end_of_turn><bos></s><b>"]


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"])
def test_real_vocabularies_round_trip(name):
    if not (REAL_MODELS / name).exists():
        pytest.skip(f"{name} is not in {REAL_MODELS}")
    with open_gguf(REAL_MODELS / name) as file:
        tokenizer = build(file.metadata)
    for text in REAL_TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids[1:]) & tokenizer.stop_ids
    assert len(tokenizer.encode("The quick brown fox jumps over the lazy dog.", add_bos=False)) == 10
