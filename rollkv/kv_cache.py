"""The KV cache: device pools, the host tail, and the order of everything that touches them.

`begin_step` plans a step; for every layer the model then calls `enter_layer`, `append` and goes through `walk` (behind `begin_append`: `append` alone),
or with a single token goes through `append_and_walk`.
Of the three orderings of stream_plan.py this is where pages are written before they are copied: `_written[layer]` is recorded behind a layer's last
write-through, and copies of its tail wait for it. The other two are those of staging_ring.py.
A window slot is overwritten only after the write-through of the page it held (again `_written[layer]`), a fresh pool only after the
write-through of the layer that used it before. Where the tail has types of its own, COMPUTE encodes pages anew into an outgoing pool, and that is what is
written through.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rollkv.backend import Array, Backend, PageRun, Projected, Stream
from rollkv.budget import Budget
from rollkv.config import CacheConfig, LayerConfig, ModelConfig, PageFormat
from rollkv.pages import FullLayout, Place, Segment, SlidingLayout, StepPages, sliding_ring_pages
from rollkv.rope import Bands, bands
from rollkv.staging_ring import StagingRing


@dataclass(frozen=True)
class _Pool:
    """Slots of one layer's window, or of a pool that layers take turns with."""

    array: Array  # u8 [num_slots, page_bytes]
    num_slots: int

    def run(self, first_slot: int, first_page: int, num_pages: int) -> PageRun:
        return PageRun(self.array, self.num_slots, first_slot % self.num_slots, first_page, num_pages)


class KVCache:
    """KV of every layer of one sequence. Cells are appended in order; nothing is ever dropped."""

    def __init__(
        self,
        backend: Backend,
        config: ModelConfig,
        cache: CacheConfig,
        budget: Budget,
        formats: tuple[PageFormat, ...],
        tail_formats: tuple[PageFormat, ...],
        spare: Array | None = None,
    ) -> None:
        """formats, tail_formats: of each layer's pages in the window, and in tail and staging ring (kv_formats.py). spare: device memory that nobody else
        uses from `enter_layer` to the end of a layer's attention."""
        self._backend = backend
        self.formats, self._tail_formats = formats, tail_formats
        self._layouts = tuple(_layout(layer, cache, budget) for layer in config.layers)
        self._ropes = tuple(layer.rope for layer in config.layers)
        full = [index for index, layout in enumerate(self._layouts) if isinstance(layout, FullLayout)]
        self._turn = {layer: number % 2 for number, layer in enumerate(full)}  # which fresh pool a layer uses
        self._windows = tuple(
            _pool(backend, f"resident window, layer {index}", _slots(layout), page.page_bytes)
            for index, (layout, page) in enumerate(zip(self._layouts, self.formats, strict=True))
        )
        self.ctx_size = cache.ctx_size
        self._tails: dict[int, Any] = {
            index: backend.host_pages(f"KV tail, layer {index}", layout.tail_pages, tail_formats[index].page_bytes)
            for index, layout in enumerate(self._layouts)
            if isinstance(layout, FullLayout) and layout.tail_pages
        }
        self._written: dict[int, Any] = {}
        of_tails = {index: tail_formats[index] for index in full}
        self._ring = StagingRing(backend, budget.ring, of_tails, self._tails, self._written, spare) if budget.ring else None
        largest = max((formats[index].page_bytes for index in full), default=0)
        in_tail = max((page.page_bytes for page in of_tails.values()), default=0)
        self._fresh, self._fresh_slots = _two_pools(backend, "fresh pages", budget.fresh_slots, largest), budget.fresh_slots
        self._outgoing = _two_pools(backend, "outgoing pages", budget.outgoing_slots, in_tail)
        self._outgoing_slots = budget.outgoing_slots
        self._fresh_free: list[Any] = [None, None]
        self._outgoing_free: list[Any] = [None, None]
        self._steps: tuple[StepPages, ...] = ()
        self.copied_out_bytes = 0

    @property
    def copied_in_bytes(self) -> int:
        return self._ring.copied_bytes if self._ring is not None else 0

    def plan(self, position: int, num_tokens: int) -> tuple[StepPages, ...]:
        """What a step that appends cells position .. position + num_tokens - 1 does to the pages of every layer. Changes nothing."""
        # Layers are alike but for a few kinds: computed for each of 36 this took 0.7 ms of every decode step.
        steps = {layout: layout.step(position, num_tokens) for layout in dict.fromkeys(self._layouts)}
        return tuple(steps[layout] for layout in self._layouts)

    def begin_append(self, position: int, num_tokens: int) -> None:
        """Plans a step that appends cells position .. position + num_tokens - 1 and attends to nothing: no page is copied in."""
        self._steps = self.plan(position, num_tokens)
        if self._ring is not None:
            self._ring.begin_nothing()

    def begin_step(self, position: int, num_tokens: int) -> None:
        """Plans the step that appends cells position .. position + num_tokens - 1, and starts the first copies. Behind those of a single token the
        copies of the next begin, unless this one completes a page, which the next may find in the tail."""
        self._steps = self.plan(position, num_tokens)
        if self._ring is None:
            return
        if num_tokens > 1:
            self._ring.begin_many(self._steps)
        else:
            goes_on = position + 1 < self.ctx_size and not any(step.completed for step in self._steps)
            self._ring.begin(self._steps, self.plan(position + 1, 1) if goes_on else None)

    def is_staged(self, pages: tuple[StepPages, ...]) -> bool:
        """Whether the ring holds what the end of a step leaves there for a next step over these pages."""
        return self._ring is None or self._ring.is_staged(pages)

    def forget(self) -> None:
        """The sequence ends, wherever a step was broken off. No copy may be under way."""
        self._written.clear()
        self._fresh_free, self._outgoing_free = [None, None], [None, None]
        if self._ring is not None:
            self._ring.forget()

    def step_pages(self, layer: int) -> StepPages:
        """What the current step does to the pages of a layer."""
        return self._steps[layer]

    def enter_layer(self, layer: int) -> None:
        """Before the first work of a layer is issued: the spare memory is the cache's from here on."""
        if self._ring is not None:
            self._ring.lend(layer)

    def append(self, layer: int, projected: Projected, position: Array, first_position: int, q: Array) -> int:
        """Stores the new cells of a layer, and starts the write-through of the pages that they complete. Finishes queries into q, f32 [T, H*Dk], for
        the first band that is walked, which is returned. position i32 [1] holds first_position on the device."""
        step = self._steps[layer]
        self._make_room(layer, step)
        runs = tuple(self._run(layer, segment) for segment in step.appended)
        band = self._bands(layer).of(step.visible[0].first_page)
        self._backend.append(projected, position, runs, self.formats[layer], first_position, band, q)
        self._write_through(layer, step)
        return band

    def append_and_walk(self, layer: int) -> Iterator[tuple[tuple[PageRun, ...], PageFormat]]:
        """Around a single token's attention, which appends it: the runs as `walk` gives them, but the last staged piece together with the window, which
        one launch serves if they are of one format. The last run holds the page that takes the new cell, for that page is the newest and a single cell
        never passes through fresh slots. Take all of them."""
        step = self._steps[layer]
        self._make_room(layer, step)
        window = self._run(layer, step.visible[-1])
        joined = False
        for run, last in self._ring.pieces(layer) if self._ring is not None else ():
            joined = last and not self._is_recoded(layer)
            yield (run, window) if joined else (run,), self._tail_formats[layer]
        if not joined:
            yield (window,), self.formats[layer]
        self._write_through(layer, step)

    def walk(self, layer: int) -> Iterator[tuple[PageRun, PageFormat, int, bool]]:
        """The runs that attention walks, old to new, the staged tail first, each with its format, its band and whether it is the last. Several pieces make
        a run, or two where a band ends. Slots are given back when the walk moves on: issue the attention over a run before asking for the next."""
        seen_as, step = self._bands(layer), self._steps[layer]
        assert seen_as.of(step.first_page) == 0, "the queries of a step lie in one chunk"
        for run, page, last in self._places(layer):
            parts = seen_as.split(run.first_page, run.num_pages)
            for band, *pages in parts:
                yield run.part(*pages), page, band, last and band == parts[-1][0]

    def _places(self, layer: int) -> Iterator[tuple[PageRun, PageFormat, bool]]:
        """The runs by where they are, each with its format and whether it is the last."""
        visible = self._steps[layer].visible
        for segment in visible:
            if segment.place is Place.TAIL:
                assert self._ring is not None
                yield from ((run, self._tail_formats[layer], False) for run in self._ring.runs(layer))
            else:
                yield self._run(layer, segment), self.formats[layer], segment is visible[-1]

    def _make_room(self, layer: int, step: StepPages) -> None:
        """Orders COMPUTE behind what still reads the slots that the new cells go to."""
        if layer in self._written:
            self._backend.wait(Stream.COMPUTE, self._written[layer])
        if step.appended[0].place is Place.FRESH and self._fresh_free[self._turn[layer]] is not None:
            self._backend.wait(Stream.COMPUTE, self._fresh_free[self._turn[layer]])
        if step.carried_page is not None:
            window, fresh = self._windows[layer], self._fresh_pool(layer)
            self._backend.copy_page(window.array, step.carried_page % window.num_slots, fresh.array, 0)

    # -- a step that can be recorded ---------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Orders COMPUTE behind every copy so far, since a recorded step waits for nothing outside it: before one is recorded and before each replay,
        where as a rule nothing is left to wait for."""
        pools = (event for event in (*self._fresh_free, *self._outgoing_free) if event is not None)
        for event in (*self._written.values(), *pools):
            self._backend.wait(Stream.COMPUTE, event)
        self._written.clear()
        self._fresh_free, self._outgoing_free = [None, None], [None, None]
        if self._ring is not None:
            self._ring.settle()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Around one step behind `settle`, as StagingRing.isolated."""
        with self._ring.isolated() if self._ring is not None else nullcontext():
            yield

    def forget_step(self) -> None:
        """Behind a step that was not recorded to its end: nothing of it has happened, and what was staged before it is copied again."""
        if self._ring is not None:
            self._ring.forget_step()

    def end_replay(self, copied_bytes: int) -> None:
        """Behind the replay of a recorded step, which copied so much in."""
        if self._ring is not None:
            self._ring.end_replay(copied_bytes)

    def uncount_copies(self, before: int) -> None:
        """What was copied in since copied_in_bytes had this value was recorded and not done."""
        if self._ring is not None:
            self._ring.copied_bytes = before

    # -- copies ----------------------------------------------------------------------------------------------------------------
    def _write_through(self, layer: int, step: StepPages) -> None:
        if not step.completed:
            return
        runs = tuple(self._run(layer, segment) for segment in step.completed)
        if self._is_recoded(layer):
            runs = (self._recoded(layer, runs),)
        self._backend.wait(Stream.COPY_OUT, self._backend.record(Stream.COMPUTE))
        for run in runs:
            self._backend.copy_out(run, self._tails[layer])
            self.copied_out_bytes += run.num_pages * self._tail_formats[layer].page_bytes
        self._written[layer] = self._backend.record(Stream.COPY_OUT)
        if self._is_recoded(layer):
            self._outgoing_free[self._turn[layer]] = self._written[layer]
        elif step.completed[0].place is Place.FRESH:
            self._fresh_free[self._turn[layer]] = self._written[layer]

    def _recoded(self, layer: int, runs: tuple[PageRun, ...]) -> PageRun:
        """The pages of runs that follow each other as the tail is to have them, in the outgoing pool whose turn it is."""
        if self._outgoing_free[self._turn[layer]] is not None:
            self._backend.wait(Stream.COMPUTE, self._outgoing_free[self._turn[layer]])
        page, tail_page = self.formats[layer], self._tail_formats[layer]
        pool = _Pool(self._outgoing[self._turn[layer]].view((self._outgoing_slots, tail_page.page_bytes)), self._outgoing_slots)
        target = pool.run(0, runs[0].first_page, sum(run.num_pages for run in runs))
        for run in runs:
            self._backend.reencode(run, page, target.part(run.first_page, run.num_pages), tail_page)
        return target

    # -- where pages lie -------------------------------------------------------------------------------------------------------
    def _is_recoded(self, layer: int) -> bool:
        """Whether the layer's tail has types of its own."""
        return self.formats[layer] != self._tail_formats[layer]

    def _bands(self, layer: int) -> Bands:
        return bands(self._ropes[layer], self.formats[layer].page_cells, self._steps[layer].last_page)

    def _run(self, layer: int, segment: Segment) -> PageRun:
        if segment.place is Place.FRESH:
            return self._fresh_pool(layer).run(segment.first_page - self._steps[layer].first_page, segment.first_page, segment.num_pages)
        return self._windows[layer].run(segment.first_page, segment.first_page, segment.num_pages)

    def _fresh_pool(self, layer: int) -> _Pool:
        """Layers take turns with two pools, so that one layer's write-through runs beside the next layer's append."""
        return _Pool(self._fresh[self._turn[layer]].view((self._fresh_slots, self.formats[layer].page_bytes)), self._fresh_slots)


def _layout(layer: LayerConfig, cache: CacheConfig, budget: Budget) -> FullLayout | SlidingLayout:
    if layer.sliding_window is None:
        return FullLayout(cache.page_cells, budget.window_pages, budget.total_pages)
    ring = sliding_ring_pages(layer.sliding_window, min(cache.ubatch, cache.ctx_size), cache.page_cells)
    return SlidingLayout(cache.page_cells, min(ring, budget.total_pages), layer.sliding_window)


def _slots(layout: FullLayout | SlidingLayout) -> int:
    return layout.window_pages if isinstance(layout, FullLayout) else layout.ring_pages


def _pool(backend: Backend, label: str, slots: int, page_bytes: int) -> _Pool:
    return _Pool(backend.empty(label, (slots, page_bytes), "u8"), slots)


def _two_pools(backend: Backend, label: str, slots: int, page_bytes: int) -> list[Array]:
    """Bytes that layers take turns with; none without slots."""
    return [backend.empty(label, (slots * page_bytes,), "u8") for _ in range(2)] if slots else []
