"""The copy schedule of one step: which run of tail pages goes through which slot of the staging ring, and when its copy may be issued.

Three orderings keep it right, and kv_cache.py turns each into one event:
  written before copied    the write-through of a page ends before the page is copied in (it ended in an earlier step)
  copied before read       attention over a piece waits for the piece's *filled* event
  read before reused       the copy of piece i + num_slots waits for the *free* event of piece i, which uses the same slot

The copy of piece i + num_slots is issued right behind the attention over piece i, whatever layers the two belong to: so the copy stream
runs ahead of compute by num_slots pieces, across layers.
"""

from dataclasses import dataclass

from rollkv.pages import pages_for


@dataclass(frozen=True)
class RingShape:
    """The staging ring: num_slots slots of slot_pages pages."""

    num_slots: int
    slot_pages: int


@dataclass(frozen=True)
class Piece:
    """One copy: pages first_page .. first_page + num_pages - 1 of a layer's tail into one slot."""

    layer: int
    first_page: int
    num_pages: int
    slot: int


def plan_pieces(layer_tails: dict[int, int], ring: RingShape, first_slot: int = 0) -> tuple[Piece, ...]:
    """Pieces of one step in the order of their use. layer_tails: tail pages by layer, in layer order; first_slot: where the last step ended.

    A layer's tail is cut into as few pieces as the slots allow, of sizes that differ by at most one page: equal pieces keep the link even.
    """
    pieces: list[Piece] = []
    for layer, tail in layer_tails.items():
        count = pages_for(tail, ring.slot_pages)
        begin = 0
        for index in range(count):
            size = tail // count + (1 if index < tail % count else 0)
            pieces.append(Piece(layer, begin, size, (first_slot + len(pieces)) % ring.num_slots))
            begin += size
    return tuple(pieces)
