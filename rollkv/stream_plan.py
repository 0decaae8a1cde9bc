"""The copy schedule of one step: which run of tail pages goes through which slot of the staging ring, and when its copy may be issued.

Three orderings keep it right, and kv_cache.py (the first) and staging_ring.py (all) turn each into one event:
  written before copied    the write-through of a page ends before the page is copied in (it ended in an earlier step)
  copied before read       attention over a piece waits for the piece's *filled* event
  read before reused       a piece's copy waits for the *free* event of the piece that its slot held before

A piece is copied as soon as its slot is free, whatever layers it and the slot's last piece belong to: so the copy stream runs ahead of compute
by as many pieces as there are slots, across layers and, while decoding, into the next step, whose pieces take the same slots.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RingShape:
    """The staging ring: num_slots slots of slot_pages pages, of the layer whose pages are the largest."""

    num_slots: int
    slot_pages: int


@dataclass(frozen=True)
class Piece:
    """One copy: pages first_page .. first_page + num_pages - 1 of a layer's tail into one slot."""

    layer: int
    first_page: int
    num_pages: int
    slot: int


def plan_pieces(
    layer_tails: Mapping[int, int], ring: RingShape, spare_slots: int = 0, slot_pages: Mapping[int, int] | None = None
) -> tuple[Piece, ...]:
    """Pieces of one step in the order of their use. layer_tails: tail pages by layer, in layer order. slot_pages: by layer, how many a slot holds; None:
    as many of each, ring.slot_pages.

    A layer's pieces fill their slots but for the last, so that those in neighbouring slots lie in the ring as one run of pages. spare_slots: further
    ones, numbered behind the ring's, that a layer has during its attention alone. Then every layer begins in the ring, which is filled while the
    layer before still computes, and goes on in these.
    """
    held = slot_pages or dict.fromkeys(layer_tails, ring.slot_pages)
    sizes = [(layer, begin, min(held[layer], tail - begin)) for layer, tail in layer_tails.items() for begin in range(0, tail, held[layer])]
    slots = _turns(len(sizes), ring.num_slots)
    if spare_slots:
        slots = (_spared(begin // held[layer], ring.num_slots, spare_slots) for layer, begin, _ in sizes)
    return tuple(Piece(*size, slot) for size, slot in zip(sizes, slots, strict=True))


def _spared(index: int, num_slots: int, spare_slots: int) -> int:
    """The slot of a layer's piece."""
    return index if index < num_slots else num_slots + (index - num_slots) % spare_slots


def _turns(count: int, num_slots: int) -> Iterator[int]:
    """Slots of a step's pieces, so that a piece and the next in its slot are as far apart as can be, also where the next step begins again: the
    pieces of an incomplete last turn take the middle slots."""
    whole = count - count % num_slots
    first = 0 if whole == 0 else (num_slots - count % num_slots) // 2
    return (index % num_slots if index < whole else first + index - whole for index in range(count))
