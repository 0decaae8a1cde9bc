"""Speed against the size of the tail, or against the depth: one run a rung.

The weights are loaded once; for every rung the cache is planned anew, with a window, a cap or a context of its own. A repetition fills the
cache to the rung's depth and decodes. A step's time runs from one chosen token to the next on the host's clock; the tail is what the cache
says was copied in during the measured steps, not what was planned. Yields results, prints nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from rollkv.config import CacheConfig, ModelConfig
from rollkv.engine import Engine, Progress
from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.ladder_fit import Fit, agree, place_rungs, relative_spread
from rollkv.pages import pages_for
from rollkv.units import format_size

MIN_WARM_STEPS, MAX_WARM_STEPS = 4, 16  # a step is recorded in the second and replayed from the third on
WARM_WITHIN = 0.02
REPLY_TOKENS = 24  # room for the answer to a needle: seven digits, and some words in front of them


@dataclass(frozen=True)
class Rung:
    """One configuration to plan. depth: cells in the cache before the first step."""

    label: str
    cache: CacheConfig
    depth: int
    vram_target: int | None = None  # bytes


@dataclass(frozen=True)
class Climb:
    """What every rung does, and the rungs; behind the first, which is resident, num_placed - 1 more may be placed."""

    rungs: tuple[Rung, ...]
    num_steps: int
    repetitions: int
    fill: Literal["prompt", "random"] = "prompt"
    num_prompt: int | None = None  # tokens behind the depth whose prefill is timed; None: the prefill of the depth itself is
    num_placed: int = 0
    reload: bool = False  # load the weights for every rung, so that the device is free between them

    @property
    def times_depth(self) -> bool:
        """Whether the prefill that is timed is that of the depth."""
        return self.num_prompt is None and self.fill == "prompt"


@dataclass(frozen=True)
class Prompt:
    """What one repetition reads: ids for depth and prefill, or at least one. found: whether the reply to them, of reply_tokens ids, holds
    what they ask for; None where they ask for nothing."""

    ids: tuple[int, ...]
    reply_tokens: int = 0
    found: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True)
class Repetition:
    """What one repetition measured."""

    prefill_seconds: float | None
    ttft_seconds: float | None
    warm_steps: int
    settled: bool  # whether the last two of them agreed
    step_seconds: tuple[float, ...]
    copied_bytes: tuple[int, ...]  # from the tail to the device, by step
    position: int  # behind the last step
    device_bytes: int | None
    found: bool | None


@dataclass(frozen=True)
class RungResult:
    """What was measured. Without repetitions: `refusal` says why it does not fit."""

    rung: Rung
    climb: Climb
    refusal: str | None = None
    repetitions: tuple[Repetition, ...] = ()
    cells_in_window: int | None = None
    cells_in_tail: int | None = None
    planned_bytes: int | None = None
    machine: dict[str, object] | None = None

    @property
    def ran(self) -> bool:
        return bool(self.repetitions)

    @property
    def step_seconds(self) -> list[float]:
        """Of all repetitions."""
        return [step for repetition in self.repetitions for step in repetition.step_seconds]

    @property
    def seconds(self) -> float:
        """The median step of all repetitions."""
        return median(self.step_seconds)

    @property
    def tail_bytes(self) -> float:
        """Copied in by the median step."""
        return float(median([size for repetition in self.repetitions for size in repetition.copied_bytes]))

    @property
    def prefill_seconds(self) -> list[float]:
        """One a repetition; none where none was timed."""
        return [rep.prefill_seconds for rep in self.repetitions if rep.prefill_seconds is not None]

    @property
    def ttft_seconds(self) -> list[float]:
        return [rep.ttft_seconds for rep in self.repetitions if rep.ttft_seconds is not None]

    @property
    def peak_device_bytes(self) -> int | None:
        return max((rep.device_bytes for rep in self.repetitions if rep.device_bytes is not None), default=None)

    @property
    def found(self) -> bool | None:
        """Whether every needle was found; None without any."""
        asked = [rep.found for rep in self.repetitions if rep.found is not None]
        return all(asked) if asked else None

    @property
    def spread(self) -> float | None:
        """Of the repetitions' median steps."""
        return relative_spread([median(rep.step_seconds) for rep in self.repetitions])

    @property
    def prefill_spread(self) -> float | None:
        return relative_spread(self.prefill_seconds)


def context_size(depth: int, num_steps: int, num_prompt: int | None = None) -> int:
    """Cells of depth, timed prefill, warm-up, measured steps and the reply to a needle."""
    return depth + (num_prompt or 0) + max(MAX_WARM_STEPS + num_steps, REPLY_TOKENS)


def resident_rung(cache: CacheConfig, depth: int) -> Rung:
    return Rung("resident", replace(cache, residency="full", window_cells=None), depth)


def tail_rungs(config: ModelConfig, cache: CacheConfig, depth: int, tails: Sequence[float]) -> tuple[Rung, ...]:
    """A rung for every size of the tail in bytes, to the nearest whole page and each once. Raises UsageError for a tail that the context
    does not have, or a model that has none."""
    total, page_bytes = pages_for(cache.ctx_size, cache.page_cells), tail_page_bytes(config, cache)
    rungs: dict[int, Rung] = {}
    for tail in tails:
        pages = round(tail / page_bytes)
        if pages >= total:
            raise UsageError(
                f"a tail of {format_size(int(tail))} is more than a context of {cache.ctx_size} cells can have, "
                f"{format_size((total - 1) * page_bytes)}; lower --tail or raise --depth"
            )
        windowed = replace(cache, residency="window", window_cells=(total - pages) * cache.page_cells)
        rungs[pages] = Rung(f"tail {format_size(pages * page_bytes)}", windowed, depth) if pages else resident_rung(cache, depth)
    return tuple(rungs.values())


def cap_rung(cache: CacheConfig, depth: int, cap: int) -> Rung:
    """Whatever fits under a cap in bytes stays resident."""
    return Rung(f"cap {format_size(cap)}", replace(cache, residency="auto", window_cells=None), depth, cap)


def tail_page_bytes(config: ModelConfig, cache: CacheConfig) -> int:
    """Bytes of one page of all full-attention layers. Raises UsageError when there are none."""
    size = sum(cache.page_format(layer).page_bytes for layer in config.layers if layer.sliding_window is None)
    if not size:
        raise UsageError("all layers of this model have sliding windows, so nothing is ever streamed; there is no ladder to climb")
    return size


def largest_tail(config: ModelConfig, cache: CacheConfig) -> int:
    """Bytes of the tail beside a window of one page."""
    return (pages_for(cache.ctx_size, cache.page_cells) - 1) * tail_page_bytes(config, cache)


# -- the climb -----------------------------------------------------------------------------------------------------------------

Open = Callable[[Rung], AbstractContextManager[Engine]]
PromptFor = Callable[[int, int], Prompt]  # (depth, repetition)
ProgressFor = Callable[[Rung], Progress | None]
Describe = Callable[[Engine], dict[str, object]]


def run_climb(
    climb: Climb,
    config: ModelConfig,
    link_rate: float | None,
    open_engine: Open,
    prompt_for: PromptFor,
    progress_for: ProgressFor,
    describe: Describe,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[RungResult]:
    """Runs the rungs in their order. A rung that does not fit is a result too.

    Placed rungs stand around the knee that the overlap model expects behind the resident step and the measured link; without either they
    are spread evenly. Raises CheckFailed on logits that are not finite, and what open_engine raises beside OutOfMemoryError.
    """
    first, todo = climb.rungs[0], deque(climb.rungs)
    place = climb.num_placed
    with ExitStack() as loaded:
        engine: Engine | None = None
        while todo:
            rung = todo.popleft()
            try:
                if engine is None:
                    engine = loaded.enter_context(open_engine(rung))
                else:
                    engine.replan(rung.cache, rung.vram_target)
                result = _measure(engine, rung, climb, prompt_for, progress_for(rung), describe, clock)
            except OutOfMemoryError as error:
                result = RungResult(rung, climb, refusal=str(error))
            if climb.reload:
                engine = None
                loaded.close()
            yield result
            if place:
                t0 = result.seconds if result.ran else None
                tails = place_rungs(place, largest_tail(config, first.cache), Fit("overlap", t0, link_rate).knee_bytes())
                placed = tail_rungs(config, first.cache, first.depth, tails)
                todo.extend(other for other in placed if other.cache.residency == "window")
                place = 0


def _measure(
    engine: Engine,
    rung: Rung,
    climb: Climb,
    prompt_for: PromptFor,
    on_progress: Progress | None,
    describe: Describe,
    clock: Callable[[], float],
) -> RungResult:
    repetitions = []
    _warm_up(engine, climb, prompt_for(rung.depth, climb.repetitions), clock)
    _tell(on_progress, 1, climb)
    for number in range(climb.repetitions):
        repetitions.append(_repeat(engine, rung, climb, prompt_for(rung.depth, number), number, clock))
        _tell(on_progress, 2 + number, climb)
    position, cells = repetitions[-1].position, engine.budget.page_cells
    tail = max(pages_for(position, cells) - engine.budget.window_pages, 0) * cells
    return RungResult(
        rung,
        climb,
        repetitions=tuple(repetitions),
        cells_in_window=position - tail,
        cells_in_tail=tail,
        planned_bytes=engine.budget.total_bytes,
        machine=describe(engine),
    )


def _repeat(engine: Engine, rung: Rung, climb: Climb, prompt: Prompt, number: int, clock: Callable[[], float]) -> Repetition:
    prefill_seconds = None
    if climb.num_prompt is not None:
        _fill(engine, rung, climb, prompt, number)
        begin = clock()
        engine.prefill(prompt.ids[rung.depth : rung.depth + climb.num_prompt])
        prefill_seconds = clock() - begin
    begin = clock()
    row = _fill(engine, rung, climb, prompt, number)
    filled = clock() - begin
    reply = [prompt.ids[0] if row is None else int(row.argmax())]
    chosen = clock() - begin
    warm_steps, settled = _settle(engine, reply, clock)
    seconds, copied = [], []
    for _ in range(climb.num_steps):
        before = engine.copied_bytes[0]
        seconds.append(_step(engine, reply, clock))
        copied.append(engine.copied_bytes[0] - before)
    position, device_bytes = engine.position, _device_bytes(engine)
    while len(reply) < prompt.reply_tokens:
        _step(engine, reply, clock)
    return Repetition(
        prefill_seconds=filled if climb.times_depth else prefill_seconds,
        ttft_seconds=chosen if climb.times_depth else None,
        warm_steps=warm_steps,
        settled=settled,
        step_seconds=tuple(seconds),
        copied_bytes=tuple(copied),
        position=position,
        device_bytes=device_bytes,
        found=None if prompt.found is None else prompt.found(reply),
    )


def _fill(engine: Engine, rung: Rung, climb: Climb, prompt: Prompt, seed: int) -> np.ndarray | None:
    """A fresh sequence of rung.depth cells; the logits behind them, None where they mean nothing."""
    engine.reset()
    if climb.fill == "prompt" and rung.depth:
        return engine.prefill(prompt.ids[: rung.depth])
    engine.fill_random(rung.depth, seed)
    return None


def _warm_up(engine: Engine, climb: Climb, prompt: Prompt, clock: Callable[[], float]) -> None:
    """Loads and compiles what first use loads: a ubatch, where prefill is timed, and some steps, which do not count."""
    engine.reset()
    if climb.num_prompt is not None or climb.times_depth:
        engine.prefill(prompt.ids[: climb.num_prompt or engine.cache_config.ubatch])
    _settle(engine, [prompt.ids[0]], clock)


def _settle(engine: Engine, reply: list[int], clock: Callable[[], float]) -> tuple[int, bool]:
    """Steps until two in a row agree. (steps, whether they did)."""
    last = 0.0
    for count in range(1, MAX_WARM_STEPS + 1):
        seconds = _step(engine, reply, clock)
        if count >= MIN_WARM_STEPS and agree(last, seconds, WARM_WITHIN):
            return count, True
        last = seconds
    return MAX_WARM_STEPS, False


def _step(engine: Engine, reply: list[int], clock: Callable[[], float]) -> float:
    """Appends the next token to the reply; seconds."""
    begin = clock()
    reply.append(int(np.argmax(engine.decode(reply[-1]))))
    return clock() - begin


def _device_bytes(engine: Engine) -> int | None:
    use = engine.backend.device_use()
    return None if use is None else use.used_bytes


def _tell(on_progress: Progress | None, done: int, climb: Climb) -> None:
    if on_progress is not None:
        on_progress(done, 1 + climb.repetitions)
