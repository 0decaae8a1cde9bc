"""Which page is where: exhaustive over small windows, ubatches and starts, against a plain simulation of slots."""

import itertools

import pytest

from rollkv.pages import FullLayout, Place, SlidingLayout, fresh_pages, pages_for, sliding_ring_pages

CELLS = 4


def cuts(total: int, ubatch: int, starts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Steps (position, tokens): the first few of odd sizes, then whole ubatches."""
    steps, position = [], 0
    for size in itertools.chain(starts, itertools.repeat(ubatch)):
        if position >= total:
            return steps
        size = min(size, ubatch, total - position)
        steps.append((position, size))
        position += size
    return steps


@pytest.mark.parametrize("window", [1, 2, 3, 5, 9, 20])
@pytest.mark.parametrize("ubatch", [1, 3, 4, 9, 16])
@pytest.mark.parametrize("starts", [(), (1,), (3, 2), (5, 1, 1)])
def test_every_page_is_where_the_layout_says(window: int, ubatch: int, starts: tuple[int, ...]) -> None:
    total_cells = 47
    total = pages_for(total_cells, CELLS)
    layout = FullLayout(CELLS, min(window, total), total)
    slots: dict[int, dict[int, set[int]]] = {}  # window slot -> {page: cells}
    tail: dict[int, set[int]] = {}
    for position, tokens in cuts(total_cells, ubatch, starts):
        step = layout.step(position, tokens)
        new = {cell // CELLS for cell in range(position, position + tokens)}
        fresh: dict[int, set[int]] = {}
        if step.carried_page is not None:
            fresh[step.carried_page] = slots[step.carried_page % layout.window_pages].pop(step.carried_page)
            assert step.carried_page == step.first_page
        assert {p for s in step.appended for p in range(s.first_page, s.end_page)} == new
        for segment in step.appended:
            for page in range(segment.first_page, segment.end_page):
                cells = {c for c in range(position, position + tokens) if c // CELLS == page}
                if segment.place is Place.FRESH:
                    assert page - step.first_page < fresh_pages(ubatch, CELLS, layout.window_pages)
                    fresh.setdefault(page, set()).update(cells)
                else:
                    slot = slots.setdefault(page % layout.window_pages, {})
                    if page not in slot:
                        slot.clear()
                    slot.setdefault(page, set()).update(cells)
        seen: list[int] = []
        for segment in step.visible:
            for page in range(segment.first_page, segment.end_page):
                where = {Place.TAIL: tail, Place.FRESH: fresh, Place.WINDOW: slots.get(page % layout.window_pages, {})}[segment.place]
                assert where[page] == {c for c in range(page * CELLS, (page + 1) * CELLS) if c < position + tokens}
                seen.append(page)
        assert seen == list(range(step.last_page + 1))
        for segment in step.completed:
            for page in range(segment.first_page, segment.end_page):
                source = fresh if segment.place is Place.FRESH else slots[page % layout.window_pages]
                assert len(source[page]) == CELLS and page < layout.tail_pages
                tail[page] = source[page]
    if layout.window_pages == total:
        assert not tail, "a run that never spills copies nothing"


@pytest.mark.parametrize("sliding", [1, 3, 4, 8, 11])
@pytest.mark.parametrize("ubatch", [1, 3, 8])
@pytest.mark.parametrize("starts", [(), (1,), (2, 1)])
def test_sliding_ring_holds_every_visible_cell(sliding: int, ubatch: int, starts: tuple[int, ...]) -> None:
    layout = SlidingLayout(CELLS, sliding_ring_pages(sliding, ubatch, CELLS), sliding)
    slots: dict[int, int] = {}
    for position, tokens in cuts(61, ubatch, starts):
        step = layout.step(position, tokens)
        assert step.completed == () and step.carried_page is None
        for segment in step.appended:
            for page in range(segment.first_page, segment.end_page):
                slots[page % layout.ring_pages] = page
        (segment,) = step.visible
        assert segment.first_page * CELLS <= max(position - sliding + 1, 0) and segment.end_page == step.last_page + 1
        for page in range(segment.first_page, segment.end_page):
            assert slots[page % layout.ring_pages] == page
