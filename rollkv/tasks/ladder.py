"""Speed against the size of the tail: one run a rung.

Every rung loads the model anew with a window or a cap of its own, reads prompts of the same length and decodes the same number of tokens.
A step's time runs from one chosen token to the next on the host's clock; the tail is what the cache says was copied in during the measured
steps, not what was planned. Yields results, prints nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from rollkv.config import CacheConfig, ModelConfig
from rollkv.engine import Engine, Progress
from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.ladder_fit import Fit, agree, place_rungs, relative_spread
from rollkv.pages import pages_for
from rollkv.prose import Draws, running_text
from rollkv.units import format_size

MIN_WARM_STEPS, MAX_WARM_STEPS = 4, 16  # a step is recorded in the second and replayed from the third on
WARM_WITHIN = 0.02


@dataclass(frozen=True)
class Rung:
    """One configuration to load."""

    label: str
    cache: CacheConfig
    vram_target: int | None = None  # bytes


@dataclass(frozen=True)
class Climb:
    """What every rung does, and the rungs; or their number, of which the first is resident and the others are placed behind it."""

    depth: int
    num_steps: int
    repetitions: int
    rungs: tuple[Rung, ...] = ()
    num_placed: int = 0


@dataclass(frozen=True)
class RungResult:
    """What was measured. Without runs: `refusal` says why it does not fit."""

    rung: Rung
    refusal: str | None = None
    prefill_seconds: tuple[float, ...] = ()  # one a repetition, like the next three
    ttft_seconds: tuple[float, ...] = ()
    step_seconds: tuple[tuple[float, ...], ...] = ()
    warm_steps: tuple[tuple[int, bool], ...] = ()  # (steps, whether the last two agreed)
    tail_bytes: float = 0.0  # copied in by the median step
    cells_in_window: int | None = None
    cells_in_tail: int | None = None
    peak_device_bytes: int | None = None
    planned_bytes: int | None = None
    machine: dict[str, object] | None = None

    @property
    def ran(self) -> bool:
        return bool(self.step_seconds)

    @property
    def seconds(self) -> float:
        """The median step of all repetitions."""
        return median([step for steps in self.step_seconds for step in steps])

    @property
    def spread(self) -> float | None:
        """Of the repetitions' median steps."""
        return relative_spread([median(steps) for steps in self.step_seconds])


def context_size(depth: int, num_steps: int) -> int:
    """Cells of prompt, warm-up and measured steps."""
    return depth + MAX_WARM_STEPS + num_steps


def resident_rung(cache: CacheConfig) -> Rung:
    return Rung("resident", replace(cache, residency="full", window_cells=None))


def tail_rungs(config: ModelConfig, cache: CacheConfig, tails: Sequence[float]) -> tuple[Rung, ...]:
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
        rungs[pages] = Rung(f"tail {format_size(pages * page_bytes)}", windowed) if pages else resident_rung(cache)
    return tuple(rungs.values())


def cap_rungs(cache: CacheConfig, caps: Sequence[int]) -> tuple[Rung, ...]:
    """A rung for every cap in bytes, each once."""
    auto = replace(cache, residency="auto", window_cells=None)
    return tuple(Rung(f"cap {format_size(cap)}", auto, cap) for cap in dict.fromkeys(caps))


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
Prompt = Callable[[int], list[int]]
ProgressFor = Callable[[str], Progress | None]
Describe = Callable[[Engine], dict[str, object]]


def prompt_ids(encode: Callable[[str], Sequence[int]], num_tokens: int, repetition: int) -> list[int]:
    """num_tokens ids of prose behind a heading of the repetition's own."""
    draws, characters = Draws(f"ladder {repetition}"), 8 * num_tokens + 64
    heading = f"{draws.key()} {draws.digits(7)}\n\n"
    while len(ids := encode(heading + running_text(characters, repetition))) < num_tokens:
        characters *= 2
    return list(ids[:num_tokens])


def run_climb(
    climb: Climb,
    config: ModelConfig,
    cache: CacheConfig,
    link_rate: float | None,
    open_engine: Open,
    prompt: Prompt,
    progress_for: ProgressFor,
    describe: Describe,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[RungResult]:
    """Runs the rungs in their order. prompt(repetition) gives ids, climb.depth of them. A rung that does not fit is a result too.

    Placed rungs stand around the knee that the overlap model expects behind the resident step and the measured link; without either they
    are spread evenly. Raises CheckFailed on logits that are not finite, and what open_engine raises beside OutOfMemoryError.
    """
    todo = deque(climb.rungs or (resident_rung(cache),))
    place = climb.num_placed
    while todo:
        rung = todo.popleft()
        try:
            with open_engine(rung) as engine:
                result = _measure(engine, rung, climb, prompt, progress_for(rung.label), describe, clock)
        except OutOfMemoryError as error:
            result = RungResult(rung, refusal=str(error))
        yield result
        if place:
            t0 = result.seconds if result.ran else None
            tails = place_rungs(place, largest_tail(config, cache), Fit("overlap", t0, link_rate).knee_bytes())
            todo.extend(other for other in tail_rungs(config, cache, tails) if other.cache.residency == "window")
            place = 0


def _measure(
    engine: Engine,
    rung: Rung,
    climb: Climb,
    prompt: Prompt,
    on_progress: Progress | None,
    describe: Describe,
    clock: Callable[[], float],
) -> RungResult:
    prefills, ttfts, steps, warm, copied, used = [], [], [], [], [], []
    runs = 1 + climb.repetitions
    _warm_up(engine, prompt(climb.repetitions)[: engine.cache_config.ubatch], clock)
    _tell(on_progress, 1, runs)
    for repetition in range(climb.repetitions):
        ids = prompt(repetition)
        engine.reset()
        begin = clock()
        row = engine.prefill(ids)
        prefills.append(clock() - begin)
        token = int(row.argmax())
        ttfts.append(clock() - begin)
        token, count, settled = _settle(engine, token, clock)
        warm.append((count, settled))
        times = []
        for _ in range(climb.num_steps):
            before = engine.copied_bytes[0]
            token, seconds = _step(engine, token, clock)
            times.append(seconds)
            copied.append(float(engine.copied_bytes[0] - before))
        steps.append(tuple(times))
        used.append(_device_bytes(engine))
        _tell(on_progress, 2 + repetition, runs)
    known = [size for size in used if size is not None]
    cells = engine.budget.page_cells
    tail = max(pages_for(engine.position, cells) - engine.budget.window_pages, 0) * cells
    return RungResult(
        rung,
        prefill_seconds=tuple(prefills),
        ttft_seconds=tuple(ttfts),
        step_seconds=tuple(steps),
        warm_steps=tuple(warm),
        tail_bytes=median(copied),
        cells_in_window=engine.position - tail,
        cells_in_tail=tail,
        peak_device_bytes=max(known) if known else None,
        planned_bytes=engine.budget.total_bytes,
        machine=describe(engine),
    )


def _warm_up(engine: Engine, ids: list[int], clock: Callable[[], float]) -> None:
    """Loads and compiles what first use loads: a ubatch and some steps, which do not count."""
    engine.reset()
    _settle(engine, int(engine.prefill(ids).argmax()), clock)


def _settle(engine: Engine, token: int, clock: Callable[[], float]) -> tuple[int, int, bool]:
    """Steps until two in a row agree. (next token, steps, whether they did)."""
    last = 0.0
    for count in range(1, MAX_WARM_STEPS + 1):
        token, seconds = _step(engine, token, clock)
        if count >= MIN_WARM_STEPS and agree(last, seconds, WARM_WITHIN):
            return token, count, True
        last = seconds
    return token, MAX_WARM_STEPS, False


def _step(engine: Engine, token: int, clock: Callable[[], float]) -> tuple[int, float]:
    begin = clock()
    token = int(np.argmax(engine.decode(token)))
    return token, clock() - begin


def _device_bytes(engine: Engine) -> int | None:
    use = engine.backend.device_use()
    return None if use is None else use.used_bytes


def _tell(on_progress: Progress | None, done: int, total: int) -> None:
    if on_progress is not None:
        on_progress(done, total)
