"""The KV cache: device pools, the host tail, and the order of everything that touches them.

`begin_step` plans a step; for every layer the model then calls `enter_layer`, `append` and goes through `walk` (behind `begin_append`: `append` alone),
or with a single token goes through `append_and_walk`.
Streams and the three orderings of stream_plan.py are kept here and only here:
  written before copied    copies of a layer's tail wait for `_written[layer]`, recorded behind its last write-through
  copied before read       a piece is handed out when COMPUTE waits for its copy, or for one that ends later
  read before reused       a slot's next copy waits for the event recorded when the walk moved past the piece
A window slot is overwritten only after the write-through of the page it held (again `_written[layer]`), a fresh pool only after the
write-through of the layer that used it before. Where the tail has types of its own, COMPUTE encodes pages anew into an outgoing pool, and that is what is
written through.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollkv.backend import Array, Backend, PageRun, Projected, Stream
from rollkv.budget import Budget
from rollkv.config import CacheConfig, LayerConfig, ModelConfig, PageFormat
from rollkv.pages import FullLayout, Place, Segment, SlidingLayout, StepPages, sliding_ring_pages
from rollkv.rope import Bands, bands
from rollkv.stream_plan import Piece, plan_pieces

# Many rows pay for a launch of attention with their state, 49 us for 4,096, so a run is long; but its first page waits for the copy of its last.
LARGEST_RUN_BYTES = 64 << 20


@dataclass(frozen=True)
class _Pool:
    """Slots of one layer's window (or of a shared ring)."""

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
        uses from `enter_layer` to the end of a layer's attention; steps of many tokens stage pages there too."""
        self._backend = backend
        self.formats, self._tail_formats = formats, tail_formats
        self._layouts = tuple(_layout(layer, cache, budget) for layer in config.layers)
        self._ropes = tuple(layer.rope for layer in config.layers)
        self._full = [index for index, layout in enumerate(self._layouts) if isinstance(layout, FullLayout)]
        self._turn = {layer: number % 2 for number, layer in enumerate(self._full)}  # which fresh pool a layer uses
        self._windows = tuple(
            _pool(backend, f"resident window, layer {index}", _slots(layout), page.page_bytes)
            for index, (layout, page) in enumerate(zip(self._layouts, self.formats, strict=True))
        )
        self._ring_shape = budget.ring
        self.ctx_size = cache.ctx_size
        largest = max((formats[index].page_bytes for index in self._full), default=0)
        in_tail = max((tail_formats[index].page_bytes for index in self._full), default=0)
        self._ring = (
            backend.empty("staging ring", (budget.ring.num_slots * budget.ring.slot_pages * in_tail,), "u8") if budget.ring else None
        )
        slot_bytes = self._slot_bytes = budget.ring.slot_pages * in_tail if budget.ring else 0
        # Slots are as large for every layer: one whose pages are smaller has more of them in a slot.
        self._slot_pages = {index: slot_bytes // tail_formats[index].page_bytes for index in self._full}
        self._spare, self._spare_slots = spare, spare.nbytes // slot_bytes if spare is not None and slot_bytes else 0
        self._fresh, self._fresh_slots = _two_pools(backend, "fresh pages", budget.fresh_slots, largest), budget.fresh_slots
        self._outgoing = _two_pools(backend, "outgoing pages", budget.outgoing_slots, in_tail)
        self._outgoing_slots = budget.outgoing_slots
        self._tails: dict[int, Any] = {
            index: backend.host_pages(f"KV tail, layer {index}", layout.tail_pages, tail_formats[index].page_bytes)
            for index, layout in enumerate(self._layouts)
            if isinstance(layout, FullLayout) and layout.tail_pages
        }
        self._written: dict[int, Any] = {}
        self._fresh_free: list[Any] = [None, None]
        self._outgoing_free: list[Any] = [None, None]
        self._slot_free: dict[int, Any] = {}
        self._steps: tuple[StepPages, ...] = ()
        self._planned: dict[tuple[int, ...], tuple[Piece, ...]] = {}  # the pieces last planned for a single token, by the layers' tails
        self._lending = False  # whether the step's pieces go on in the spare slots
        self._lent_to: int | None = None  # the layer that has them
        self._walked: deque[Piece] = deque()  # pieces that the step has yet to walk
        self._queue: deque[Piece] = deque()  # pieces to copy: those of the step that are not on their way, then the next step's
        # By slot, in the order of their copies: pieces to be walked, and the end of their copies; None once COMPUTE is ordered behind it.
        self._staged: dict[int, tuple[Piece, Any]] = {}
        self.copied_in_bytes = 0
        self.copied_out_bytes = 0

    def plan(self, position: int, num_tokens: int) -> tuple[StepPages, ...]:
        """What a step that appends cells position .. position + num_tokens - 1 does to the pages of every layer. Changes nothing."""
        # Layers are alike but for a few kinds: computed for each of 36 this took 0.7 ms of every decode step.
        steps = {layout: layout.step(position, num_tokens) for layout in dict.fromkeys(self._layouts)}
        return tuple(steps[layout] for layout in self._layouts)

    def begin_append(self, position: int, num_tokens: int) -> None:
        """Plans a step that appends cells position .. position + num_tokens - 1 and attends to nothing: no page is copied in."""
        self._steps = self.plan(position, num_tokens)
        self._begin(())

    def begin_step(self, position: int, num_tokens: int) -> None:
        """Plans the step that appends cells position .. position + num_tokens - 1, and starts the first copies. Behind those of a single token the
        copies of the next begin, as far as slots get free; unless this one completes a page, which the next may find in the tail."""
        self._steps = self.plan(position, num_tokens)
        self._lending, self._lent_to = num_tokens > 1 and self._spare_slots > 0, None
        self._begin(self._many_pieces(self._steps) if self._lending else self._pieces(self._steps))
        if num_tokens == 1 and position + 1 < self.ctx_size and not any(step.completed for step in self._steps):
            self._queue += self._first_pieces(self.plan(position + 1, 1))
        self._issue_copies()

    def is_staged(self, pages: tuple[StepPages, ...]) -> bool:
        """Whether the ring holds what the end of a step leaves there for a next step over these pages."""
        return not self._walked and tuple(piece for piece, _ in self._staged.values()) == self._first_pieces(pages)

    def forget(self) -> None:
        """The sequence ends, wherever a step was broken off. No copy may be under way."""
        for pending in (self._written, self._slot_free, self._staged, self._walked, self._queue):
            pending.clear()
        self._fresh_free, self._outgoing_free = [None, None], [None, None]
        self._lent_to = None

    def step_pages(self, layer: int) -> StepPages:
        """What the current step does to the pages of a layer."""
        return self._steps[layer]

    def enter_layer(self, layer: int) -> None:
        """Before the first work of a layer is issued: the spare memory is the ring's from here on, behind all that COMPUTE has been told to do."""
        if self._lending and any(self._is_spare(piece) for piece in self._walked if piece.layer == layer):
            assert self._ring_shape is not None
            own = self._ring_shape.num_slots
            self._slot_free.update(dict.fromkeys(range(own, own + self._spare_slots), self._backend.record(Stream.COMPUTE)))
            self._lent_to = layer
            self._issue_copies()

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
        for run, last in self._through_ring(layer, lambda first: 1):
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
                yield from ((run, self._tail_formats[layer], False) for run, _ in self._through_ring(layer, self._pieces_at_once))
            else:
                yield self._run(layer, segment), self.formats[layer], segment is visible[-1]

    def _pieces_at_once(self, first: Piece) -> int:
        """How many pieces many rows walk in one launch from this one on: half of what takes turns; all of the ring where it does not."""
        assert self._ring_shape is not None
        if self._is_spare(first):
            return max(min(self._spare_slots // 2, LARGEST_RUN_BYTES // self._slot_bytes), 1)
        return self._ring_shape.num_slots if self._lending else max(self._ring_shape.num_slots // 2, 1)

    def _is_spare(self, piece: Piece) -> bool:
        assert self._ring_shape is not None
        return piece.slot >= self._ring_shape.num_slots

    def _through_ring(self, layer: int, at_once: Callable[[Piece], int]) -> Iterator[tuple[PageRun, bool]]:
        """A layer's tail as it is staged, up to so many pieces at once where they lie behind each other, each run with whether it is the last."""
        while self._walked and self._walked[0].layer == layer:
            together = [self._walked.popleft()]
            while len(together) < at_once(together[0]) and self._walked and self._follows(together[-1], self._walked[0]):
                together.append(self._walked.popleft())
            self._await_pieces(together)
            yield self._ring_run(together), not (self._walked and self._walked[0].layer == layer)
            free = self._backend.record(Stream.COMPUTE)
            for piece in together:
                del self._staged[piece.slot]
                self._slot_free[piece.slot] = free
            self._issue_copies()

    def _follows(self, piece: Piece, other: Piece) -> bool:
        """Whether the other piece lies right behind this one, in the layer and in the ring or the spare slots."""
        assert self._ring_shape is not None
        own = self._ring_shape.num_slots
        behind = own + (piece.slot + 1 - own) % self._spare_slots if self._is_spare(piece) else (piece.slot + 1) % own
        full = piece.num_pages * self._tail_formats[piece.layer].page_bytes == self._slot_bytes
        return other.layer == piece.layer and full and other.slot == behind

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
        self._await_staged()
        self._written.clear()
        self._slot_free.clear()
        self._fresh_free, self._outgoing_free = [None, None], [None, None]

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Around one step behind `settle`: its copies begin behind COMPUTE and have ended when COMPUTE goes on. So have the first copies of the next
        step, which therefore takes the ring as this one does."""
        copies = self._ring_shape is not None
        if copies:
            self._backend.wait(Stream.COPY_IN, self._backend.record(Stream.COMPUTE))
        yield
        if copies:
            self._backend.wait(Stream.COMPUTE, self._backend.record(Stream.COPY_IN))
            self._staged = {slot: (piece, None) for slot, (piece, _) in self._staged.items()}
        self._slot_free.clear()

    def _await_staged(self) -> None:
        """Orders COMPUTE behind the copies of the pieces that are staged, for a recorded step does not wait for them."""
        for slot, (piece, filled) in self._staged.items():
            if filled is not None:
                self._backend.wait(Stream.COMPUTE, filled)
                self._staged[slot] = piece, None

    def forget_step(self) -> None:
        """Behind a step that was not recorded to its end: nothing of it has happened, and what was staged before it is copied again."""
        self._walked.clear()
        self._queue.clear()
        self._staged.clear()
        self.mark_ring_busy()

    def mark_ring_busy(self) -> None:
        """Behind the replay of a recorded step: slots are free again when COMPUTE has come this far."""
        if self._ring_shape:
            self._slot_free = dict.fromkeys(range(self._ring_shape.num_slots), self._backend.record(Stream.COMPUTE))

    # -- copies ----------------------------------------------------------------------------------------------------------------
    def _begin(self, pieces: tuple[Piece, ...]) -> None:
        """A step walks these pieces. What the step before staged stays if it is the first of them."""
        staged = [piece for piece, _ in self._staged.values()]
        if staged != list(pieces[: len(staged)]):
            self._await_staged()  # later work may write to the pages that these copies read
            self._staged.clear()
        self._walked, self._queue = deque(pieces), deque(pieces[len(self._staged) :])

    def _await_pieces(self, pieces: list[Piece]) -> None:
        """Orders COMPUTE behind the copies of pieces, and of those that follow in half a ring, if it is not yet: a wait costs 5 us of a recorded step,
        and where the link is not the limit they are there."""
        assert self._ring_shape is not None
        if self._staged[pieces[-1].slot][1] is None:
            return
        coming = [other for other, filled in self._staged.values() if filled is not None and (other in pieces or other in self._walked)]
        together = coming[: max(self._ring_shape.num_slots // 2, len(pieces))]
        self._backend.wait(Stream.COMPUTE, self._staged[together[-1].slot][1])  # copies end in their order
        self._staged.update({other.slot: (other, None) for other in together})

    def _issue_copies(self) -> None:
        """Issues copies in their order as long as slots are free."""
        while self._queue and self._queue[0].slot not in self._staged:
            if self._is_spare(self._queue[0]) and self._queue[0].layer != self._lent_to:
                return
            piece = self._queue.popleft()
            if piece.slot in self._slot_free:
                self._backend.wait(Stream.COPY_IN, self._slot_free[piece.slot])
            if piece.layer in self._written:
                self._backend.wait(Stream.COPY_IN, self._written[piece.layer])
            self._backend.copy_in(self._ring_run([piece]), self._tails[piece.layer])
            self._staged[piece.slot] = piece, self._backend.record(Stream.COPY_IN)
            self.copied_in_bytes += piece.num_pages * self._tail_formats[piece.layer].page_bytes

    def _pieces(self, steps: tuple[StepPages, ...]) -> tuple[Piece, ...]:
        if self._ring_shape is None:
            return ()
        tails = tuple(steps[index].tail_pages for index in self._full)
        if tails not in self._planned:  # every step asks for the same, thousands of pieces in a long context
            self._planned = {tails: plan_pieces(dict(zip(self._full, tails, strict=True)), self._ring_shape, slot_pages=self._slot_pages)}
        return self._planned[tails]

    def _many_pieces(self, steps: tuple[StepPages, ...]) -> tuple[Piece, ...]:
        """Of a step that has the spare slots."""
        assert self._ring_shape is not None
        tails = {index: steps[index].tail_pages for index in self._full}
        return plan_pieces(tails, self._ring_shape, self._spare_slots, self._slot_pages)

    def _first_pieces(self, steps: tuple[StepPages, ...]) -> tuple[Piece, ...]:
        """Those that the ring holds before a step begins: the first ones fill it."""
        return self._pieces(steps)[: self._ring_shape.num_slots] if self._ring_shape else ()

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

    def _ring_run(self, pieces: list[Piece]) -> PageRun:
        """Where pieces that lie behind each other are, in the ring or in the spare slots."""
        assert self._ring is not None and self._ring_shape is not None
        first, held, page_bytes = pieces[0], self._slot_pages[pieces[0].layer], self._tail_formats[pieces[0].layer].page_bytes
        array, num_slots, slot = self._ring, self._ring_shape.num_slots, first.slot
        if self._is_spare(first):
            assert self._spare is not None
            array, num_slots, slot = self._spare, self._spare_slots, first.slot - num_slots
        if held * page_bytes < self._slot_bytes:  # slots do not follow each other without a gap
            array, num_slots, slot = array.rows(self._slot_bytes, slot * self._slot_bytes), 1, 0
        pool = _Pool(array.view((num_slots * held, page_bytes)), num_slots * held)
        return pool.run(slot * held, first.first_page, sum(piece.num_pages for piece in pieces))


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
