"""The copy schedule as data: every tail page once, in order, in a slot that is large enough."""

import pytest

from rollkv.stream_plan import RingShape, plan_pieces


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("slot_pages", [1, 3, 16])
def test_pieces_cover_every_tail_once(slots: int, slot_pages: int) -> None:
    for tails in ({0: 0}, {0: 1}, {0: 7, 1: 7}, {2: 16, 5: 3, 6: 0, 9: 33}):
        pieces = plan_pieces(tails, RingShape(slots, slot_pages))
        walked: dict[int, list[int]] = {layer: [] for layer in tails}
        for piece in pieces:
            assert 0 <= piece.slot < slots and 1 <= piece.num_pages <= slot_pages
            walked[piece.layer] += range(piece.first_page, piece.first_page + piece.num_pages)
        assert walked == {layer: list(range(tail)) for layer, tail in tails.items()}
        assert [piece.layer for piece in pieces] == sorted(piece.layer for piece in pieces)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 13, 36])
def test_a_slot_is_taken_again_as_late_as_can_be(slots: int, count: int) -> None:
    """Within a step and where the next begins: whole turns are num_slots apart, an incomplete one costs at most half of that."""
    turns = [piece.slot for piece in plan_pieces(dict.fromkeys(range(count), 1), RingShape(slots, 1))] * 2
    apart = [min(later for later in range(1, len(turns) - at) if turns[at + later] == turns[at]) for at in range(count)]
    assert turns[: min(count, slots)] == list(range(min(count, slots))), "the first pieces fill the ring"
    assert min(apart) >= (count if count < slots else slots if count % slots == 0 else (slots + count % slots) // 2)


def test_pieces_of_a_layer_fill_their_slots_but_for_the_last() -> None:
    for tail, sizes in ((33, [16, 16, 1]), (17, [16, 1]), (32, [16, 16]), (5, [5])):
        assert [piece.num_pages for piece in plan_pieces({0: tail}, RingShape(4, 16))] == sizes


def test_a_slot_holds_more_of_the_smaller_pages() -> None:
    pieces = plan_pieces({0: 9, 3: 9}, RingShape(2, 2), slot_pages={0: 2, 3: 7})
    assert [(piece.layer, piece.num_pages) for piece in pieces] == [(0, 2)] * 4 + [(0, 1), (3, 7), (3, 2)]
    spared = plan_pieces({3: 30}, RingShape(2, 2), 2, {3: 7})
    assert [piece.slot for piece in spared] == [0, 1, 2, 3, 2]
