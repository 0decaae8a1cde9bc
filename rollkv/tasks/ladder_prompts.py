"""What the rungs of a ladder read: prose with a needle at its beginning, where the tail is; or prose alone. Prints nothing."""

from collections.abc import Callable, Sequence

from rollkv.errors import UsageError
from rollkv.prose import Draws, running_text
from rollkv.tasks.answers import judge
from rollkv.tasks.generate import TextModel
from rollkv.tasks.haystack import NeedleRequest, build_haystack, smallest_length
from rollkv.tasks.ladder import REPLY_TOKENS, Prompt

_AT_THE_BEGINNING = 0.0  # percent: in the oldest page, which is the first to leave the window


def needle_prompt(model: TextModel, num_tokens: int, repetition: int) -> Prompt:
    """Exactly num_tokens ids that end with a question for the needle; every repetition has a needle and an order of the prose of its own.
    Raises UsageError when they are too few."""
    length = num_tokens + REPLY_TOKENS
    request = NeedleRequest((length,), (_AT_THE_BEGINNING,), seed=repetition, reply_tokens=REPLY_TOKENS)
    smallest = smallest_length(model, request, length, _AT_THE_BEGINNING) - REPLY_TOKENS
    if smallest > num_tokens:
        raise UsageError(f"--depth {num_tokens}: needle and question alone take {smallest} cells; give a depth of {smallest} or more")
    haystack = build_haystack(model, request, length, _AT_THE_BEGINNING)
    # The longest prompt may be some tokens short: line breaks behind the token that begins every text make it whole.
    ids, line_break = list(haystack.ids), model.tokenizer.encode("\n", add_bos=False)[:1]
    begin = len(model.tokenizer.encode(""))
    ids[begin:begin] = line_break * (num_tokens - len(ids))

    def found(reply: Sequence[int]) -> bool:
        stream, text = model.tokenizer.stream(), ""
        for token in reply[:REPLY_TOKENS]:
            if token in model.tokenizer.stop_ids:
                return judge(text + stream.finish(), haystack.needle.answer, "stop_token", REPLY_TOKENS) == "found"
            text += stream.push(token)
        return judge(text + stream.finish(), haystack.needle.answer, "length", REPLY_TOKENS) == "found"

    return Prompt(tuple(ids), REPLY_TOKENS, found)


def prose_prompt(encode: Callable[[str], Sequence[int]], num_tokens: int, repetition: int) -> Prompt:
    """num_tokens ids of prose, at least one, behind a heading of the repetition's own."""
    draws, characters = Draws(f"ladder {repetition}"), 8 * num_tokens + 64
    heading = f"{draws.key()} {draws.digits(7)}\n\n"
    while len(ids := encode(heading + running_text(characters, repetition))) < num_tokens:
        characters *= 2
    return Prompt(tuple(ids[: max(num_tokens, 1)]))
