"""Prompts with a needle: a sentence with a random value, planted at a given depth in prose, and a question that asks for the value.

Lengths are counted by the model's own tokenizer on the whole prompt, template included, so prompt and reply fit by construction: the
filler is as long as it can be. The same request gives the same prompts everywhere. Prints nothing, loads nothing.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from rollkv.counts import check_count
from rollkv.errors import UsageError
from rollkv.prose import Draws, endless_paragraphs, paragraphs
from rollkv.sampling import check_seed
from rollkv.tasks.answers import holds
from rollkv.tasks.generate import TextModel, TextRequest, build_prompt

Style = Literal["completion", "chat"]
VALUE_DIGITS = 7
# Beyond the value's own tokens: a completion says it at once, a chat reply may put a sentence in front of it.
REPLY_ROOM: dict[str, int] = {"completion": 8, "chat": 32}
_KEY_SPREAD = 64  # random keys and values differ by fewer tokens than this
_STAND_IN = "#"  # takes the needle's place to find its cells; no sentence begins or ends with it


@dataclass(frozen=True)
class NeedleRequest:
    """A grid of lengths (cells of prompt and reply together) and depths (percent of the filler in front of the needle).

    needle, answer: one's own instead of a random one, both or none; question: the end of the prompt, if the default will not do.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    style: Style = "completion"
    seed: int = 0
    reply_tokens: int | None = None  # None: the answer's tokens and REPLY_ROOM
    needle: str | None = None
    answer: str | None = None
    question: str | None = None


@dataclass(frozen=True)
class Needle:
    """text is planted, question ends the prompt, answer is what the reply must hold."""

    text: str
    question: str
    answer: str


@dataclass(frozen=True)
class Haystack:
    """One prompt. The needle lies in cells first_cell .. end_cell - 1."""

    ids: tuple[int, ...]
    needle: Needle
    reply_tokens: int
    first_cell: int
    end_cell: int

    @property
    def depth(self) -> float:
        """Where the needle begins, in percent of the prompt."""
        return 100 * self.first_cell / len(self.ids)


def check_request(model: TextModel, request: NeedleRequest) -> None:
    """Raises UsageError for a grid that cannot be asked, with the smallest length that can."""
    if request.style not in get_args(Style):
        raise UsageError(f"--style {request.style!r} is not known; choose completion or chat")
    if request.style == "chat" and not model.tokenizer.chat_template:
        raise UsageError("--style chat: the model file carries no chat template; use --style completion")
    check_seed(request.seed)
    if not request.lengths or not request.depths:
        raise UsageError("the grid is empty; give at least one of --lengths and one of --depths")
    check_count(request.reply_tokens, "--n-predict")
    if (request.needle is None) != (request.answer is None):
        raise UsageError("--needle and --answer belong together; give the sentence to plant and the part of it that the reply must hold")
    if request.answer is not None and not request.answer.strip():
        raise UsageError("--answer is empty; give the text that the reply must hold")
    _check_own_needle(request)
    smallest = smallest_length(model, request, request.lengths[0], request.depths[0])
    short = [length for length in request.lengths if length < smallest + _KEY_SPREAD]
    smallest = max([smallest, *(smallest_length(model, request, length, depth) for length in short for depth in request.depths)])
    if short and min(short) < smallest:
        raise UsageError(
            f"--lengths {min(short)}: needle, question and reply alone take {smallest} cells; give lengths of {smallest} or more"
        )


def _check_own_needle(request: NeedleRequest) -> None:
    """Raises UsageError for an answer that a reply could hold without the needle, or not even with it."""
    if request.needle is None or request.answer is None:
        return
    answer, question = request.answer, make_needle(request, request.lengths[0], request.depths[0]).question
    if not holds(request.needle, answer):
        raise UsageError(f"--answer {answer!r} does not stand in --needle as a whole; give words that the sentence holds")
    for place, text in (("filler", "\n\n".join(paragraphs())), ("question", _content(request, "", question))):
        if holds(text, answer):
            raise UsageError(
                f"--answer {answer!r} stands in the {place} too, so a reply proves nothing; give words that only the needle holds"
            )


def make_needle(request: NeedleRequest, length: int, depth: float) -> Needle:
    """The needle of one cell of the grid. Raises UsageError when one's own needle says nothing to ask."""
    if request.needle is None or request.answer is None:
        draws = Draws(f"needle {request.seed} {length} {depth:g}")
        subject = f"passcode of the {draws.key()}"
        answer = draws.digits(VALUE_DIGITS)
        text, opening, question = (
            f"The {subject} is {answer}.",
            f"The {subject} is",
            f"What is the {subject}? Answer with the passcode alone.",
        )
    else:
        text, answer = request.needle.strip(), request.answer.strip()
        opening = text[: text.find(answer)].rstrip() if answer in text else ""
        question = f"Complete this sentence with the words that the text has for it: {opening}"
        if not opening and request.question is None:
            raise UsageError(
                f"--answer {answer!r} does not stand behind other words in --needle, so there is nothing to complete; give --question"
            )
    return Needle(text, request.question or (opening if request.style == "completion" else question), answer)


def build_haystack(model: TextModel, request: NeedleRequest, length: int, depth: float) -> Haystack:
    """The longest prompt that leaves room for the reply within `length` cells. Call check_request first."""
    needle = make_needle(request, length, depth)
    reply = _reply_tokens(model, request, needle)
    filler = _Filler(request.seed)

    def content(planted: str, num_words: int) -> str:
        return _content(request, filler.around(planted, num_words, depth), needle.question)

    def prompt(planted: str, num_words: int) -> list[int]:
        return _encode(model, request, content(planted, num_words))

    def plain(num_words: int) -> int:
        return len(model.tokenizer.encode(content(needle.text, num_words)))

    target = length - reply
    # Rendering a template is slow, so its text alone is fitted first; the count that decides is that of the whole prompt.
    smallest = len(prompt(needle.text, 0))
    guess = _largest(plain, target - (smallest - plain(0)), plain(0))
    num_words = _largest(lambda n: len(prompt(needle.text, n)), target, smallest, guess)
    ids, other = prompt(needle.text, num_words), prompt(_STAND_IN, num_words)
    first = _common(ids, other)
    end = len(ids) - _common(ids[::-1], other[::-1])
    return Haystack(tuple(ids), needle, reply, first, max(end, first + 1))


def smallest_length(model: TextModel, request: NeedleRequest, length: int, depth: float) -> int:
    """Cells that the prompt without filler and the reply take. Raises UsageError."""
    needle = make_needle(request, length, depth)
    return len(_encode(model, request, _content(request, needle.text, needle.question))) + _reply_tokens(model, request, needle)


def _reply_tokens(model: TextModel, request: NeedleRequest, needle: Needle) -> int:
    if request.reply_tokens is not None:
        return request.reply_tokens
    return len(model.tokenizer.encode(" " + needle.answer, add_bos=False)) + REPLY_ROOM[request.style]


def _content(request: NeedleRequest, text: str, question: str) -> str:
    opening = (
        "Read the following text. One sentence in it does not belong to the story; remember it.\n\n" if request.style == "chat" else ""
    )
    return f"{opening}{text}\n\n{question}"


def _encode(model: TextModel, request: NeedleRequest, content: str) -> list[int]:
    return build_prompt(model, TextRequest(prompt=content, chat=request.style == "chat"))


class _Filler:
    """Endless prose, word by word. Text is only ever parted in front of a sentence."""

    def __init__(self, seed: int) -> None:
        self._paragraphs = endless_paragraphs(seed)
        self._words: list[str] = []  # each with the blank or line breaks in front of it
        self._starts: list[int] = [0]  # words that begin a sentence

    def around(self, planted: str, num_words: int, depth: float) -> str:
        """The first num_words words with `planted` in front of the sentence that is nearest to depth percent of them."""
        while len(self._words) < num_words:
            self._grow()
        wanted = num_words * depth / 100
        split = min((start for start in self._starts if start <= num_words), key=lambda start: abs(start - wanted))
        parts = ("".join(self._words[:split]).strip(), planted, "".join(self._words[split:num_words]).strip())
        return " ".join(part for part in parts if part)

    def _grow(self) -> None:
        for index, word in enumerate(next(self._paragraphs).split()):
            self._words.append(word if not self._words else f"\n\n{word}" if index == 0 else f" {word}")
            if word.endswith("."):
                self._starts.append(len(self._words))


def _largest(count: Callable[[int], int], target: int, of_none: int, guess: int | None = None) -> int:
    """n with count(n) <= target < count(n + 1), for a count that grows with n, and count(0) = of_none <= target.

    Follows the slope from `guess`, since a call may take a second; a dozen calls without an answer turn to halving.
    """
    low, counted, slope = 0, of_none, 1.0
    high: int | None = None
    for step in itertools.count():
        if high is not None and high - low <= 1:
            break
        tried = guess if guess and step == 0 else low + max(1, int((target - counted) / slope))
        if high is not None:
            tried = min(tried, high - 1) if step < 12 else (low + high) // 2
        found = count(tried)
        slope = max((found - counted) / (tried - low), 0.5)
        if found <= target:
            low, counted = tried, found
        else:
            high = tried
    return low


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common beginning."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
