"""One token at a time: a step is recorded as a graph and replayed until the pages that it touches change.

Positions and tokens live in device memory, so a recorded step is right for every position within the same pages. A step that begins or
completes a page runs directly: it moves pages that the recorded one does not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollkv.backend import Array
from rollkv.model.forward import enter, forward, logits
from rollkv.model.step import Model
from rollkv.pages import StepPages


@dataclass(frozen=True)
class _Recorded:
    """A graph, the pages that it is right for, and the tail bytes that one replay copies in."""

    pages: tuple[StepPages, ...]
    graph: Any
    copied_in_bytes: int


class Decoder:
    """The decode steps of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._last: tuple[StepPages, ...] | None = None
        self._recorded: _Recorded | None = None

    def step(self, token: np.ndarray, position: int) -> Array:
        """Appends the token (int32 [1]) at cell `position`; returns its logits, f32 [1, vocab]."""
        model, cache = self._model, self._model.cache
        step = enter(model, token, position)
        pages = cache.plan(position, 1)

        def run() -> None:
            logits(model, forward(model, step))

        # The first step over these pages runs directly: it loads what recording must not load.
        repeats = pages == self._last and not any(layer.completed for layer in pages)
        if repeats and model.backend.can_record and (self._recorded is None or self._recorded.pages != pages):
            self._record(pages, run)
        if self._recorded is not None and self._recorded.pages == pages:
            model.backend.replay(self._recorded.graph)
            cache.mark_ring_busy()
            cache.copied_in_bytes += self._recorded.copied_in_bytes
        else:
            run()
        self._last = pages
        return model.workspace["logits"].rows(1)

    def close(self) -> None:
        """Forgets the recorded step."""
        if self._recorded is not None:
            self._model.backend.release(self._recorded.graph)
        self._recorded = self._last = None

    def _record(self, pages: tuple[StepPages, ...], run: Callable[[], None]) -> None:
        cache, backend = self._model.cache, self._model.backend
        self.close()
        before = cache.copied_in_bytes
        cache.settle()

        def isolated() -> None:
            with cache.isolated():
                run()

        graph = backend.capture(isolated)
        self._recorded = _Recorded(pages, graph, cache.copied_in_bytes - before)
        cache.copied_in_bytes = before
