"""The copy schedule as data: every tail page once, in order, in a slot that is large enough."""

import pytest

from rollkv.stream_plan import RingShape, plan_pieces


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("slot_pages", [1, 3, 16])
@pytest.mark.parametrize("first_slot", [0, 1])
def test_pieces_cover_every_tail_once(slots: int, slot_pages: int, first_slot: int) -> None:
    for tails in ({0: 0}, {0: 1}, {0: 7, 1: 7}, {2: 16, 5: 3, 6: 0, 9: 33}):
        pieces = plan_pieces(tails, RingShape(slots, slot_pages), first_slot % slots)
        walked: dict[int, list[int]] = {layer: [] for layer in tails}
        for number, piece in enumerate(pieces):
            assert piece.slot == (first_slot + number) % slots
            assert 1 <= piece.num_pages <= slot_pages
            walked[piece.layer] += range(piece.first_page, piece.first_page + piece.num_pages)
        assert walked == {layer: list(range(tail)) for layer, tail in tails.items()}
        assert [piece.layer for piece in pieces] == sorted(piece.layer for piece in pieces)


def test_pieces_of_a_layer_are_as_few_and_as_even_as_can_be() -> None:
    sizes = [piece.num_pages for piece in plan_pieces({0: 33}, RingShape(4, 16))]
    assert sizes == [11, 11, 11]
    assert [piece.num_pages for piece in plan_pieces({0: 17}, RingShape(4, 16))] == [9, 8]
