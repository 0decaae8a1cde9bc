"""The staging ring: slots on the device through which the tail passes, piece by piece, on its way to attention.

Two of the orderings of stream_plan.py are kept here:
  copied before read       a piece is handed out when COMPUTE waits for its copy, or for one that ends later
  read before reused       a slot's next copy waits for the event recorded when the walk moved past the piece
and of the third, written before copied, the second half: a copy waits for its layer's last write-through, which kv_cache.py records.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollkv.backend import Array, Backend, PageRun, Stream
from rollkv.config import PageFormat
from rollkv.pages import StepPages
from rollkv.stream_plan import Piece, RingShape, plan_pieces

# Many rows pay for a launch of attention with their state, some 40 us for 4,096 of 32 x 128, so a run is long; but its first page waits for the copy of its last.
LARGEST_RUN_BYTES = 64 << 20


class StagingRing:
    """Takes the tails of all layers in the order in which steps walk them. copied_bytes: what has been copied in."""

    def __init__(
        self,
        backend: Backend,
        shape: RingShape,
        formats: Mapping[int, PageFormat],
        tails: Mapping[int, Any],
        written: Mapping[int, Any],
        spare: Array | None = None,
    ) -> None:
        """formats: of tail pages, by layer, for all that may have some. tails: host pages, by layer. written: by layer, the event behind its last
        write-through, as it stands when a copy is issued. spare: device memory that nobody else uses from `lend` to the end of a layer's attention;
        steps of many tokens stage pages there too."""
        largest = max(page.page_bytes for page in formats.values())
        slot_bytes = self._slot_bytes = shape.slot_pages * largest
        self._backend, self._shape, self._formats, self._tails, self._written = backend, shape, formats, tails, written
        self._ring = backend.empty("staging ring", (shape.num_slots * slot_bytes,), "u8")
        # Slots are as large for every layer: one whose pages are smaller has more of them in a slot.
        self._slot_pages = {layer: slot_bytes // page.page_bytes for layer, page in formats.items()}
        self._spare, self._spare_slots = spare, spare.nbytes // slot_bytes if spare is not None else 0
        self._slot_free: dict[int, Any] = {}
        self._planned: dict[tuple[int, ...], tuple[Piece, ...]] = {}  # the pieces last planned for a single token, by the layers' tails
        self._lending = False  # whether the step's pieces go on in the spare slots
        self._lent_to: int | None = None  # the layer that has them
        self._walked: deque[Piece] = deque()  # pieces that the step has yet to walk
        self._queue: deque[Piece] = deque()  # pieces to copy: those of the step that are not on their way, then the next step's
        # By slot, in the order of their copies: pieces to be walked, and the end of their copies; None once COMPUTE is ordered behind it.
        self._staged: dict[int, tuple[Piece, Any]] = {}
        self.copied_bytes = 0

    # -- steps -----------------------------------------------------------------------------------------------------------------
    def begin(self, steps: tuple[StepPages, ...], following: tuple[StepPages, ...] | None = None) -> None:
        """A step of a single token, which walks these pages, layer by layer: starts its first copies. Behind them those of the following step begin, as
        far as slots get free, if it is given."""
        self._lending, self._lent_to = False, None
        self._take(self._pieces(steps))
        if following is not None:
            self._queue += self._first_pieces(following)
        self._issue_copies()

    def begin_many(self, steps: tuple[StepPages, ...]) -> None:
        """A step of many tokens, which may have the spare memory."""
        self._lending, self._lent_to = self._spare_slots > 0, None
        self._take(self._many_pieces(steps) if self._lending else self._pieces(steps))
        self._issue_copies()

    def begin_nothing(self) -> None:
        """A step that walks no tail."""
        self._take(())

    def is_staged(self, steps: tuple[StepPages, ...]) -> bool:
        """Whether the ring holds what the end of a step leaves there for a next step over these pages."""
        return not self._walked and tuple(piece for piece, _ in self._staged.values()) == self._first_pieces(steps)

    def forget(self) -> None:
        """The sequence ends, wherever a step was broken off. No copy may be under way."""
        for pending in (self._slot_free, self._staged, self._walked, self._queue):
            pending.clear()
        self._lent_to = None

    def lend(self, layer: int) -> None:
        """Before the first work of a layer is issued: the spare memory is the ring's from here on, behind all that COMPUTE has been told to do."""
        if self._lending and any(self._is_spare(piece) for piece in self._walked if piece.layer == layer):
            own = self._shape.num_slots
            self._slot_free.update(dict.fromkeys(range(own, own + self._spare_slots), self._backend.record(Stream.COMPUTE)))
            self._lent_to = layer
            self._issue_copies()

    def pieces(self, layer: int) -> Iterator[tuple[PageRun, bool]]:
        """A layer's tail as it is staged, piece by piece, each run with whether it is the last. Slots are given back when the walk moves on: issue what
        reads a run before asking for the next."""
        return self._through(layer, lambda first: 1)

    def runs(self, layer: int) -> Iterator[PageRun]:
        """The same for many rows, several pieces at once where they lie behind each other."""
        return (run for run, _ in self._through(layer, self._pieces_at_once))

    # -- a step that can be recorded ---------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Orders COMPUTE behind the copies of the pieces that are staged, for a recorded step does not wait for them. No slot is busy any more: its
        reader lies before all that COMPUTE does from here on."""
        self._await_staged()
        self._slot_free.clear()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Around one step behind `settle`: its copies begin behind COMPUTE and have ended when COMPUTE goes on. So have the first copies of the next
        step, which therefore takes the ring as this one does."""
        self._backend.wait(Stream.COPY_IN, self._backend.record(Stream.COMPUTE))
        yield
        self._backend.wait(Stream.COMPUTE, self._backend.record(Stream.COPY_IN))
        self._staged = {slot: (piece, None) for slot, (piece, _) in self._staged.items()}
        self._slot_free.clear()

    def forget_step(self) -> None:
        """Behind a step that was not recorded to its end: nothing of it has happened, and what was staged before it is copied again."""
        self._walked.clear()
        self._queue.clear()
        self._staged.clear()
        self._mark_busy()

    def end_replay(self, copied_bytes: int) -> None:
        """Behind the replay of a recorded step, which copied so much in."""
        self._mark_busy()
        self.copied_bytes += copied_bytes

    def _mark_busy(self) -> None:
        """Slots are free again when COMPUTE has come this far."""
        self._slot_free = dict.fromkeys(range(self._shape.num_slots), self._backend.record(Stream.COMPUTE))

    # -- pieces ----------------------------------------------------------------------------------------------------------------
    def _pieces(self, steps: tuple[StepPages, ...]) -> tuple[Piece, ...]:
        tails = tuple(steps[layer].tail_pages for layer in self._formats)
        if tails not in self._planned:  # every step asks for the same, thousands of pieces in a long context
            self._planned = {tails: plan_pieces(dict(zip(self._formats, tails, strict=True)), self._shape, slot_pages=self._slot_pages)}
        return self._planned[tails]

    def _many_pieces(self, steps: tuple[StepPages, ...]) -> tuple[Piece, ...]:
        """Of a step that has the spare slots."""
        tails = {layer: steps[layer].tail_pages for layer in self._formats}
        return plan_pieces(tails, self._shape, self._spare_slots, self._slot_pages)

    def _first_pieces(self, steps: tuple[StepPages, ...]) -> tuple[Piece, ...]:
        """Those that the ring holds before a step begins: the first ones fill it."""
        return self._pieces(steps)[: self._shape.num_slots]

    def _pieces_at_once(self, first: Piece) -> int:
        """How many pieces many rows walk in one launch from this one on: half of what takes turns; all of the ring where it does not."""
        if self._is_spare(first):
            return max(min(self._spare_slots // 2, LARGEST_RUN_BYTES // self._slot_bytes), 1)
        return self._shape.num_slots if self._lending else max(self._shape.num_slots // 2, 1)

    def _is_spare(self, piece: Piece) -> bool:
        return piece.slot >= self._shape.num_slots

    def _follows(self, piece: Piece, other: Piece) -> bool:
        """Whether the other piece lies right behind this one, in the layer and in the ring or the spare slots."""
        own = self._shape.num_slots
        behind = own + (piece.slot + 1 - own) % self._spare_slots if self._is_spare(piece) else (piece.slot + 1) % own
        full = piece.num_pages * self._formats[piece.layer].page_bytes == self._slot_bytes
        return other.layer == piece.layer and full and other.slot == behind

    def _run(self, pieces: list[Piece]) -> PageRun:
        """Where pieces that lie behind each other are, in the ring or in the spare slots."""
        first, held, page_bytes = pieces[0], self._slot_pages[pieces[0].layer], self._formats[pieces[0].layer].page_bytes
        array, num_slots, slot = self._ring, self._shape.num_slots, first.slot
        if self._is_spare(first):
            assert self._spare is not None
            array, num_slots, slot = self._spare, self._spare_slots, first.slot - num_slots
        if held * page_bytes < self._slot_bytes:  # slots do not follow each other without a gap
            array, num_slots, slot = array.rows(self._slot_bytes, slot * self._slot_bytes), 1, 0
        pool = array.view((num_slots * held, page_bytes))
        return PageRun(pool, num_slots * held, slot * held, first.first_page, sum(piece.num_pages for piece in pieces))

    # -- copies ----------------------------------------------------------------------------------------------------------------
    def _take(self, pieces: tuple[Piece, ...]) -> None:
        """A step walks these pieces. What the step before staged stays if it is the first of them."""
        staged = [piece for piece, _ in self._staged.values()]
        if staged != list(pieces[: len(staged)]):
            self._await_staged()  # later work may write to the pages that these copies read
            self._staged.clear()
        self._walked, self._queue = deque(pieces), deque(pieces[len(self._staged) :])

    def _through(self, layer: int, at_once: Callable[[Piece], int]) -> Iterator[tuple[PageRun, bool]]:
        """A layer's tail, up to so many pieces at once, each run with whether it is the last."""
        while self._walked and self._walked[0].layer == layer:
            together = [self._walked.popleft()]
            while len(together) < at_once(together[0]) and self._walked and self._follows(together[-1], self._walked[0]):
                together.append(self._walked.popleft())
            self._await_pieces(together)
            yield self._run(together), not (self._walked and self._walked[0].layer == layer)
            free = self._backend.record(Stream.COMPUTE)
            for piece in together:
                del self._staged[piece.slot]
                self._slot_free[piece.slot] = free
            self._issue_copies()

    def _await_staged(self) -> None:
        for slot, (piece, filled) in self._staged.items():
            if filled is not None:
                self._backend.wait(Stream.COMPUTE, filled)
                self._staged[slot] = piece, None

    def _await_pieces(self, pieces: list[Piece]) -> None:
        """Orders COMPUTE behind the copies of pieces, and of those that follow in half a ring, if it is not yet: a wait costs 5 us of a recorded step,
        and where the link is not the limit they are there."""
        if self._staged[pieces[-1].slot][1] is None:
            return
        coming = [other for other, filled in self._staged.values() if filled is not None and (other in pieces or other in self._walked)]
        together = coming[: max(self._shape.num_slots // 2, len(pieces))]
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
            self._backend.copy_in(self._run([piece]), self._tails[piece.layer])
            self._staged[piece.slot] = piece, self._backend.record(Stream.COPY_IN)
            self.copied_bytes += piece.num_pages * self._formats[piece.layer].page_bytes
