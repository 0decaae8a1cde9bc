r"""How each family of byte-level BPE vocabularies cuts text into words before merging.

A GGUF file names its family in `tokenizer.ggml.pre`. The patterns are those of the families' own tokenizer files (Oniguruma syntax,
Unicode classes); several patterns are applied one after the other, each to the pieces that the ones before it left. What no
alternative matches stays a piece of its own, so nothing is lost. No family's Unicode normalisation is applied: decoding gives
back exactly the text that was encoded, as in llama.cpp.
"""

from dataclasses import dataclass

from rollkv.errors import UnsupportedModelError


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns in order; whole_words: a word that is itself a piece is taken before any merge; adds_bos: the default of the family."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False


DEFAULT = "default"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _BLANKS

# Words as upper-case letters before lower-case ones: "CamelCase" is Camel|Case.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARK = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_MARK}{_UPPER}*{_LOWER}+|{_MARK}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_GPT4O = (
    rf"{_MARK}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_MARK}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)

# Letters with case, as DeepSeek-LLM lists them.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⲲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _ASIAN,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
)


def _unescaped(pattern: str) -> str:
    r"""The pattern with \uXXXX written out, which Oniguruma's default syntax does not read."""
    return "".join(part if i == 0 else chr(int(part[:4], 16)) + part[4:] for i, part in enumerate(pattern.split("\\u")))


def _family(*patterns: str, whole_words: bool = False, adds_bos: bool = False) -> PreTokenizer:
    return PreTokenizer(tuple(_unescaped(pattern) for pattern in patterns), whole_words, adds_bos)


_FAMILIES: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    (("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _family(_LLAMA3, whole_words=True, adds_bos=True)),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _family(_LLAMA3)),
    (("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _family(_QWEN2)),
    (("qwen35",), _family(_QWEN35)),
    (("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _family(_GPT2)),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _family(r"\p{N}", _GPT2)),
    (("deepseek-llm",), _family(*_DEEPSEEK_LLM)),
    (("deepseek-coder",), _family(*_DEEPSEEK_CODER)),
    (("deepseek-v3",), _family(*_DEEPSEEK_V3)),
    (("tekken",), _family(_TEKKEN, whole_words=True, adds_bos=True)),
    (("gpt-4o", "llama4"), _family(_GPT4O)),
    (("falcon",), _family(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ((DEFAULT,), _family(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: family for names, family in _FAMILIES for name in names}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The family called `name`. Raises UnsupportedModelError for a name that is not in the table."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(
            f"the pre-tokenizer {name[:60]!r} is not known, so text would be cut into the wrong tokens; "
            f"choose the one that fits with --pre-tokenizer NAME; known are {known}"
        )
    return PRE_TOKENIZERS[name]
