"""Speed against the size of the tail, or against the depth: one run a rung.

The weights are loaded once; for every rung the cache is planned anew, with a window, a cap, a context or rotations of its own. A repetition fills the
cache to the rung's depth and decodes. A step's time runs from one chosen token to the next on the host's clock; the tail is what the cache
says was copied in during the measured steps, not what was planned. Yields results, prints nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import numpy as np

from rollkv.engine import Engine, Progress
from rollkv.errors import OutOfMemoryError
from rollkv.ladder_fit import Fit, agree, place_rungs
from rollkv.pages import pages_for
from rollkv.tasks.ladder import MAX_WARM_STEPS, Climb, Prompt, Repetition, Rung, RungResult, in_variants, largest_tail, tail_rungs

MIN_WARM_STEPS = 4  # a step is recorded in the second and replayed from the third on
WARM_WITHIN = 0.02

Open = Callable[[Rung], AbstractContextManager[Engine]]
PromptFor = Callable[[int, int], Prompt]  # (depth, repetition)
ProgressFor = Callable[[Rung], Progress | None]
Describe = Callable[[Engine], dict[str, object]]


def run_climb(
    climb: Climb,
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
                    engine.replan(rung.cache, rung.vram_target, rung.config)
                result = _measure(engine, rung, climb, prompt_for, progress_for(rung), describe, clock)
            except OutOfMemoryError as error:
                result = RungResult(rung, climb, refusal=str(error))
            if climb.reload:
                engine = None
                loaded.close()
            yield result
            if place:
                t0 = result.seconds if result.ran else None
                tails = place_rungs(place, largest_tail(first.config, first.cache), Fit("overlap", t0, link_rate).knee_bytes())
                placed = tail_rungs(first.config, first.cache, first.depth, tails)
                todo.extend(in_variants([other for other in placed if other.cache.residency == "window"], climb.variants))
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
    ids = engine.reply(reply[0])
    warm_steps, settled = _settle(ids, reply, clock)
    seconds, copied = [], []
    for _ in range(climb.num_steps):
        before = engine.copied_bytes[0]
        seconds.append(_step(ids, reply, clock))
        copied.append(engine.copied_bytes[0] - before)
    position, device_bytes = engine.position, _device_bytes(engine)
    while len(reply) < prompt.reply_tokens:
        _step(ids, reply, clock)
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
    _settle(engine.reply(prompt.ids[0]), [], clock)


def _settle(ids: Iterator[int], reply: list[int], clock: Callable[[], float]) -> tuple[int, bool]:
    """Steps until two in a row agree. (steps, whether they did)."""
    last = 0.0
    for count in range(1, MAX_WARM_STEPS + 1):
        seconds = _step(ids, reply, clock)
        if count >= MIN_WARM_STEPS and agree(last, seconds, WARM_WITHIN):
            return count, True
        last = seconds
    return MAX_WARM_STEPS, False


def _step(ids: Iterator[int], reply: list[int], clock: Callable[[], float]) -> float:
    """Appends the next token to the reply; seconds."""
    begin = clock()
    reply.append(next(ids))
    return clock() - begin


def _device_bytes(engine: Engine) -> int | None:
    use = engine.backend.device_use()
    return None if use is None else use.used_bytes


def _tell(on_progress: Progress | None, done: int, climb: Climb) -> None:
    if on_progress is not None:
        on_progress(done, 1 + climb.repetitions)
