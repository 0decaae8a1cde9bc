"""Which page of a layer's KV cache is where: integers only, no device.

A *full-attention* layer has a resident window of `window_pages` slots used as a ring (page p lives in slot p mod window_pages) and a tail in
host memory that holds page p at index p. A *sliding-window* layer has a ring of its own that is large enough for the model's window and one
ubatch; it never spills. In a step the new cells of pages that will not be resident afterwards go to *fresh* slots, which live only until
the layer is done: so the ubatch may be larger than the resident window.
"""

from dataclasses import dataclass
from enum import Enum


class Place(Enum):
    WINDOW = "window"
    TAIL = "tail"
    FRESH = "fresh"


@dataclass(frozen=True)
class Segment:
    """Pages first_page .. first_page + num_pages - 1 of one layer, all of one place, old to new."""

    place: Place
    first_page: int
    num_pages: int

    @property
    def end_page(self) -> int:
        return self.first_page + self.num_pages


@dataclass(frozen=True)
class StepPages:
    """What one step does to the pages of one kind of layer."""

    first_page: int  # first page that receives a cell
    last_page: int  # last page that receives a cell; the newest page after the step
    visible: tuple[Segment, ...]  # what attention walks, old to new, without gaps
    appended: tuple[Segment, ...]  # where the new cells go; covers first_page .. last_page
    carried_page: int | None  # a partly filled page that moves from its window slot to fresh slot 0 before the append
    completed: tuple[Segment, ...]  # pages that become full and will leave the window one day: copied to the tail now

    @property
    def tail_pages(self) -> int:
        """Pages read from the tail."""
        return sum(s.num_pages for s in self.visible if s.place is Place.TAIL)


def pages_for(num_cells: int, page_cells: int) -> int:
    """Pages that hold num_cells cells."""
    return -(-num_cells // page_cells)


def fresh_pages(ubatch: int, page_cells: int, window_pages: int) -> int:
    """Fresh slots that the largest step can need: pages that a ubatch touches beyond the resident window."""
    return max(pages_for(ubatch - 1, page_cells) + 1 - window_pages, 0)


def sliding_ring_pages(sliding_window: int, ubatch: int, page_cells: int) -> int:
    """Slots that hold every cell visible to some query of a ubatch, wherever the ubatch begins within a page."""
    return pages_for(sliding_window - 1 + ubatch - 1, page_cells) + 1


@dataclass(frozen=True)
class FullLayout:
    """Full-attention layers: window, fresh slots and tail."""

    page_cells: int
    window_pages: int
    total_pages: int  # pages of the whole context

    @property
    def tail_pages(self) -> int:
        """Pages that leave the window before the context is full; 0: nothing spills, nothing is copied out."""
        return max(self.total_pages - self.window_pages, 0)

    def step(self, position: int, num_tokens: int) -> StepPages:
        """Cells position .. position + num_tokens - 1 are appended."""
        cells = self.page_cells
        first, last = position // cells, (position + num_tokens - 1) // cells
        resident = max(0, last + 1 - self.window_pages)  # first page that is in the window after the step
        old = min(first, resident)  # pages below are read from the tail
        spilled = resident > first  # some new pages pass through fresh slots
        visible = _segments((Place.TAIL, 0, old), (Place.FRESH, old, resident), (Place.WINDOW, max(old, resident), last + 1))
        appended = _segments((Place.FRESH, first, resident), (Place.WINDOW, max(first, resident), last + 1))
        full = min((position + num_tokens) // cells, self.tail_pages)  # pages below are full and will be needed in the tail
        completed = _segments((Place.FRESH, first, min(resident, full)), (Place.WINDOW, max(first, resident), full))
        return StepPages(first, last, visible, appended, first if spilled and position % cells else None, completed)


@dataclass(frozen=True)
class SlidingLayout:
    """Sliding-window layers: one ring, never spilled."""

    page_cells: int
    ring_pages: int
    sliding_window: int

    def step(self, position: int, num_tokens: int) -> StepPages:
        """As FullLayout.step; pages before the first query's sliding window are not visible."""
        cells = self.page_cells
        first, last = position // cells, (position + num_tokens - 1) // cells
        oldest = max(0, position - self.sliding_window + 1) // cells
        return StepPages(first, last, _segments((Place.WINDOW, oldest, last + 1)), _segments((Place.WINDOW, first, last + 1)), None, ())


def _segments(*spans: tuple[Place, int, int]) -> tuple[Segment, ...]:
    return tuple(Segment(place, begin, end - begin) for place, begin, end in spans if end > begin)
