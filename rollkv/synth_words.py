"""The vocabulary of synthetic models: every byte, the words of the shipped prose and of needles, and unused tokens up to any size.

A byte-level vocabulary of kind gpt2. Digits have no merges, so a number is one token a digit, with the blank in front of it as a token of
its own; every word is reached from its first letter by merges that append one letter, so any engine cuts text in the same way.
"""

import re
from functools import cache

import numpy as np

from rollkv import prose
from rollkv.synth_shapes import MAX_USED_TOKENS

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # GGUF's token types
_BLANK = "\u0120"  # how this kind of vocabulary spells the byte of a blank
# What people put into needles and questions besides the words of the prose.
_MORE_WORDS = (
    "The secret of is What Answer with alone passcode password number code key word words Complete this sentence that text has for it Read "
    "following story remember belong lion zebra wolf eagle Paris London best thing question answer value magic token box"
)


@cache
def used_tokens() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(tokens that text can become and the two control tokens, by id; merges in order of rank). At most MAX_USED_TOKENS tokens."""
    tokens = dict.fromkeys([BEGIN, END, *_byte_letters()])
    merges: list[str] = []
    words = [*prose.ADJECTIVES, *prose.NOUNS, *_MORE_WORDS.split(), *re.findall(r"[A-Za-z]+", "\n".join(prose.paragraphs()))]
    # Words behind a blank come first: their merges must win over those of the same word at the start of a line.
    for word in dict.fromkeys([*(_BLANK + word for word in words), *(word for word in words if word[0].isupper())]):
        missing = [end for end in range(2, len(word) + 1) if word[:end] not in tokens]
        if len(tokens) + len(missing) > MAX_USED_TOKENS:
            continue
        for end in missing:
            tokens[word[:end]] = None
            merges.append(f"{word[: end - 1]} {word[end - 1]}")
    return tuple(tokens), tuple(merges)


def tokenizer_metadata(vocab: int) -> dict[str, object]:
    """The keys tokenizer.ggml.*, with `vocab` tokens."""
    tokens, merges = used_tokens()
    kinds = np.full(vocab, _UNUSED, np.int32)
    kinds[: len(tokens)], kinds[:2] = _NORMAL, _CONTROL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*tokens, *(f"<|unused_{index}|>" for index in range(len(tokens), vocab))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def _byte_letters() -> list[str]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
