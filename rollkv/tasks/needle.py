"""Finds planted needles: one run for every length and depth of a grid, greedy, on one engine that was loaded for the longest length.

What a found needle shows: attention reached its cells, wherever they lay. What it does not show: that every cell counted as it should;
a damaged tail can pass. Yields rows, prints nothing.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rollkv.engine import Engine, Progress
from rollkv.errors import UsageError
from rollkv.metrics import wilson_interval
from rollkv.pages import pages_for
from rollkv.tasks.answers import Judgement, judge
from rollkv.tasks.generate import Generation, TextModel, TextRequest
from rollkv.tasks.haystack import Haystack, NeedleRequest, build_haystack, make_needle
from rollkv.whole_file import cannot_write

Outcome = Literal[Judgement, "not run"]
Place = Literal["window", "tail", "both"]
Cell = tuple[int, float]  # length in cells, depth in percent


@dataclass(frozen=True)
class NeedleRow:
    """One cell of the grid. None: not known, since it was not run."""

    length_asked: int
    depth_asked: float
    seed: int
    style: str
    needle: str
    question: str
    expected: str
    outcome: Outcome
    answer: str | None = None
    stop_reason: str | None = None
    length: int | None = None  # cells of prompt and reply budget
    prompt_tokens: int | None = None
    reply_tokens: int | None = None
    depth: float | None = None  # where the needle begins, percent of the prompt
    needle_first_cell: int | None = None
    needle_cells: int | None = None
    place: Place | None = None  # where the needle's pages lay when the prompt had been read
    tail_pages: int | None = None  # of each full-attention layer: what every new token streams
    streamed_bytes: int | None = None  # copied from the tail to the device during the whole cell
    ttft_seconds: float | None = None
    decode_seconds: float | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Score:
    """Counts over rows. Only found and missed score."""

    found: int
    missed: int
    cut_off: int
    not_run: int

    @property
    def scored(self) -> int:
        return self.found + self.missed

    def as_dict(self) -> dict[str, object]:
        low, high = wilson_interval(self.found, self.scored)
        return asdict(self) | {"rate_low_95": low, "rate_high_95": high}


def grid(request: NeedleRequest) -> tuple[Cell, ...]:
    """Every length with every depth, short ones first."""
    return tuple((length, depth) for length in sorted(request.lengths) for depth in sorted(request.depths))


def run_cells(
    engine: Engine, model: TextModel, request: NeedleRequest, cells: Iterable[Cell], on_progress: Callable[[Cell], Progress | None]
) -> Iterator[NeedleRow]:
    """Runs the cells in their order. on_progress(cell) gives the callback for the tokens of its prompt.

    Raises UsageError when the engine's context is shorter than a cell, CheckFailed on logits that are not finite.
    """
    for length, depth in cells:
        if length > engine.cache_config.ctx_size:
            raise UsageError(f"--lengths {length} exceeds the context of {engine.cache_config.ctx_size} cells; raise --ctx-size")
        haystack = build_haystack(model, request, length, depth)
        yield _run(engine, model, request, (length, depth), haystack, on_progress((length, depth)))


def not_run(request: NeedleRequest, cell: Cell) -> NeedleRow:
    """The row of a cell that was not reached."""
    needle = make_needle(request, *cell)
    return NeedleRow(*cell, request.seed, request.style, needle.text, needle.question, needle.answer, "not run")


def score(rows: Iterable[Mapping[str, object]]) -> Score:
    """Counts of the outcomes."""
    outcomes = [row["outcome"] for row in rows]
    return Score(*(outcomes.count(name) for name in ("found", "missed", "cut off", "not run")))


def verdict(rows: list[Mapping[str, object]]) -> tuple[bool, str]:
    """(whether every needle that could be judged was found, and one was; what the grid shows, in sentences)."""
    total = score(rows)
    low, _ = wilson_interval(total.found, total.scored)
    lines = [
        f"found {total.found} of {total.scored} needles"
        + (f" (true rate above {100 * low:.0f} % with 95 % confidence)" if total.scored else "")
    ]
    for place in ("tail", "both", "window"):
        part = score(row for row in rows if row["place"] == place)
        if part.scored:
            where = {"tail": "in the streamed tail", "both": "across tail and window", "window": "in the resident window"}[place]
            lines.append(f"{where}: {part.found} of {part.scored}")
    if total.cut_off:
        lines.append(f"{total.cut_off} replies were cut off and do not count; raise --n-predict")
    if total.not_run:
        lines.append(f"{total.not_run} cells were not run")
    if total.scored and not any(row["streamed_bytes"] for row in rows):
        lines.append("nothing was streamed, so this shows the model and not the tail; lower --window or --vram-target")
    return total.missed == 0 and total.found > 0, "\n".join(lines)


def heatmap(rows: Iterable[Mapping[str, object]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """(headers, lines) of a table, depths down and lengths across. Words, so that no colour is needed; * marks a needle in the tail."""
    cells = {(row["length_asked"], row["depth_asked"]): row for row in rows}
    lengths, depths = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))  # type: ignore[type-var]
    words = {"found": "found", "missed": "MISSED", "cut off": "cut off", "not run": "-"}

    def word(row: Mapping[str, object] | None) -> str:
        return "" if row is None else words[str(row["outcome"])] + ("*" if row["place"] in ("tail", "both") else "")

    lines = [[f"{depth:g} %", *(word(cells.get((length, depth))) for length in lengths)] for depth in depths]
    return ("depth", *(str(length) for length in lengths)), lines


def read_finished(path: Path, identity: Mapping[str, object], request: NeedleRequest) -> tuple[dict[Cell, dict[str, object]], int]:
    """(finished rows of this very run by cell, lines that could not be read) of a file of JSON lines, which need not exist.

    Lines of other runs, told apart by any value of `identity` or by another needle, are left alone, as are cells that were not run. Replies are
    judged anew, so that what counts is what the model said. Raises UsageError.
    """
    finished: dict[Cell, dict[str, object]] = {}
    broken = 0
    asked = {cell: not_run(request, cell) for cell in grid(request)}
    try:
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--out {path}: cannot read it: {error}; name a file of JSON lines, or a new one") from error
    for line in filter(str.strip, lines):
        try:
            row = json.loads(line)
            cell = (row["length_asked"], row["depth_asked"])
            if row["outcome"] != "not run" and cell in asked and _is_of(row, identity, asked[cell]):
                finished[cell] = row | {"outcome": judge(row["answer"], row["expected"], row["stop_reason"], row["reply_tokens"])}
        except (ValueError, TypeError, KeyError, RecursionError):  # no JSON, no object, fields that are missing or of another type
            broken += 1
    return finished, broken


def _is_of(row: Mapping[str, object], identity: Mapping[str, object], asked: NeedleRow) -> bool:
    """Whether it stands for that cell of that run. Raises KeyError when it does and has not all fields."""
    wanted = {"needle": asked.needle, "question": asked.question, "expected": asked.expected} | dict(identity)
    if any(row.get(key) != value for key, value in wanted.items()):
        return False
    if missing := asked.as_dict().keys() - row.keys():
        raise KeyError(*missing)
    return True


@contextmanager
def appending(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that appends a line to the file at once and whole, so that an interrupt loses none; without a path it does nothing. A last
    line that a crash broke is ended first. Raises UsageError, OutOfMemoryError when the disk is full."""
    if path is None:
        yield lambda line: None
        return
    try:
        broken = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        stream = path.open("ab", buffering=0)  # what a full disk refused must not be written again when the file is closed
    except OSError as error:
        raise cannot_write(f"--out {path}", error) from error
    with stream:

        def append(line: str) -> None:
            size, rest = path.stat().st_size, line.encode()
            try:
                while rest:
                    rest = rest[stream.write(rest) :]
            except BaseException as error:
                with suppress(OSError):
                    os.truncate(path, size)
                if not isinstance(error, OSError):
                    raise
                raise cannot_write(f"--out {path}", error) from error

        if broken:
            append("\n")
        yield append


def _run(
    engine: Engine, model: TextModel, request: NeedleRequest, cell: Cell, haystack: Haystack, on_progress: Progress | None
) -> NeedleRow:
    copied = engine.copied_bytes[0]
    text_request = TextRequest(prompt_ids=haystack.ids, num_tokens=haystack.reply_tokens)
    generation = Generation(engine, model.tokenizer, haystack.ids, text_request, on_progress)
    for _ in generation:
        pass
    page_cells = engine.budget.page_cells
    tail_pages = max(pages_for(len(haystack.ids), page_cells) - engine.budget.window_pages, 0)
    first_page, last_page = haystack.first_cell // page_cells, (haystack.end_cell - 1) // page_cells
    needle = haystack.needle
    return NeedleRow(
        *cell,
        seed=request.seed,
        style=request.style,
        needle=needle.text,
        question=needle.question,
        expected=needle.answer,
        outcome=judge(generation.text, needle.answer, generation.stop_reason, haystack.reply_tokens),
        answer=generation.text,
        stop_reason=generation.stop_reason,
        length=len(haystack.ids) + haystack.reply_tokens,
        prompt_tokens=len(haystack.ids),
        reply_tokens=haystack.reply_tokens,
        depth=round(haystack.depth, 3),
        needle_first_cell=haystack.first_cell,
        needle_cells=haystack.end_cell - haystack.first_cell,
        place="tail" if last_page < tail_pages else "window" if first_page >= tail_pages else "both",
        tail_pages=tail_pages,
        streamed_bytes=engine.copied_bytes[0] - copied,
        ttft_seconds=engine.stats.ttft_seconds,
        decode_seconds=engine.stats.decode_seconds,
    )
