"""One token at a time: a step is recorded as a graph and replayed until the pages that it touches change.

Position and sequence live in device memory, and a step that chooses the next token moves both on, so a recorded step is right for every
position within the same pages and can be replayed before the host knows what it chose. A step that begins or completes a page runs
directly: it moves pages that the recorded one does not.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollkv.backend import Array
from rollkv.config import SamplingParams
from rollkv.errors import DeviceError
from rollkv.model.forward import choose, forward, logits, step_at
from rollkv.model.step import Model
from rollkv.pages import StepPages


@dataclass(frozen=True)
class _Recorded:
    """A graph, the pages that it is right for, how it chooses, and the tail bytes that one replay copies in."""

    pages: tuple[StepPages, ...]
    sampling: SamplingParams | None
    graph: Any
    copied_in_bytes: int


class Decoder:
    """The decode steps of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._last: tuple[StepPages, ...] | None = None
        self._recorded: _Recorded | None = None

    def step(self, position: int, sampling: SamplingParams | None = None) -> Array:
        """Appends the token that the sequence holds at cell `position`, where the device's position must stand; then, given how, chooses the
        next. Returns the logits behind the token, f32 [1, vocab]."""
        model, cache = self._model, self._model.cache
        step = step_at(model, 1, position)
        pages = cache.plan(position, 1)

        def run() -> None:
            row = logits(model, forward(model, step))
            if sampling is not None:
                choose(model, row, sampling)

        # The first step over these pages runs directly: it loads what recording must not load. So does one that cannot stage the next, the last of
        # the context: a recorded step takes the ring as it leaves it.
        repeats = pages == self._last and not any(layer.completed for layer in pages) and position + 1 < cache.ctx_size
        if repeats and model.backend.can_record and self._recorded_for(pages, sampling) is None:
            self._record(pages, sampling, run)
        recorded = self._recorded_for(pages, sampling)
        if recorded is not None and cache.is_staged(pages):
            cache.settle()  # a step over these pages that ran directly, as the first of a sequence does, leaves copies on their way
            model.backend.replay(recorded.graph)
            cache.end_replay(recorded.copied_in_bytes)
        else:
            run()
        self._last = pages
        return model.workspace["logits"].rows(1)

    def close(self) -> None:
        """Forgets the recorded step."""
        if self._recorded is not None:
            self._model.backend.release(self._recorded.graph)
        self._recorded = self._last = None

    def _recorded_for(self, pages: tuple[StepPages, ...], sampling: SamplingParams | None) -> _Recorded | None:
        recorded = self._recorded
        return recorded if recorded is not None and (recorded.pages, recorded.sampling) == (pages, sampling) else None

    def _record(self, pages: tuple[StepPages, ...], sampling: SamplingParams | None, run: Callable[[], None]) -> None:
        cache, backend = self._model.cache, self._model.backend
        self.close()
        before = cache.copied_in_bytes
        cache.settle()

        def isolated() -> None:
            with cache.isolated():
                run()

        try:
            graph = backend.capture(isolated)
            self._recorded = _Recorded(pages, sampling, graph, cache.copied_in_bytes - before)
        except BaseException:
            with suppress(DeviceError):  # a device that is lost fails here too, and what failed first is what matters
                cache.forget_step()
            raise
        finally:
            cache.uncount_copies(before)
