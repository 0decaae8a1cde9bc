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

# Letters with case, as DeepSeek-LLM lists them: fewer than Unicode has by now.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _ASIAN,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
)


def _family(*patterns: str, whole_words: bool = False, adds_bos: bool = False) -> PreTokenizer:
    return PreTokenizer(patterns, whole_words, adds_bos)


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
KNOWN_NAMES = ", ".join(sorted(PRE_TOKENIZERS))


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The family called `name`. Raises UnsupportedModelError for a name that is not in the table."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the pre-tokenizer {name[:60]!r} is not known, so text would be cut into the wrong tokens; "
            f"choose the one that fits with --pre-tokenizer NAME; known are {KNOWN_NAMES}"
        )
    return PRE_TOKENIZERS[name]
