"""Window and ring together: plans in order of size, each no worse than the one before."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkv.residency import choose, plans_for
from rollkv.units import MIB


def pick(plans: list[tuple[int, int, float]], cap: int) -> tuple[int, int, float] | None:
    """plans: (window, size, seconds)."""
    row = choose(*(np.array(column) for column in zip(*plans, strict=True)), cap)
    return None if row is None else plans[row]


def test_the_choice_by_hand() -> None:
    small, middle, wide, late = (1, 10, 9.0), (1, 14, 7.0), (2, 16, 7.5), (2, 18, 6.0)
    plans = [late, wide, small, middle]
    assert pick(plans, 9) is None
    assert pick(plans, 13) == small and pick(plans, 15) == middle
    assert pick(plans, 17) == middle, "a wider window that is slower is not taken"
    assert pick(plans, 18) == late
    assert pick([(3, 10, 5.0), (2, 12, 4.0)], 20) == (3, 10, 5.0), "nor a faster plan that gives up window"
    assert pick([(1, 10, 5.0), (2, 12, 5.0), (2, 14, 5.0)], 20) == (2, 12, 5.0), "of equals the smaller; a wider window costs nothing"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99), st.integers(1, 9)), min_size=1), st.lists(st.integers(0, 99), min_size=2))
def test_neither_window_nor_speed_falls_as_the_cap_grows(plans: list[tuple[int, int, float]], caps: list[int]) -> None:
    chosen = [pick(plans, cap) for cap in sorted(caps)]
    found = [plan for plan in chosen if plan is not None]
    assert chosen[len(chosen) - len(found) :] == found, "what fits under one cap fits under a larger one"
    for cap, plan in zip(sorted(caps), chosen, strict=True):
        assert (plan is None) == all(size > cap for _, size, _ in plans) and (plan is None or plan[1] <= cap)
    for before, after in zip(found, found[1:], strict=False):
        assert after[0] >= before[0] and after[2] <= before[2]


def test_rings_by_hand() -> None:
    """A context of 41 pages of 1 MiB: windows of 1, 3, 24, 40 and all 41 pages."""
    plans = plans_for(np.array([1, 3, 24, 40, 41]), 41, MIB)
    slots: dict[int, set[int]] = {}
    for window, num_slots, slot_pages in zip(plans.window_pages, plans.num_slots, plans.slot_pages, strict=True):
        slots.setdefault(int(window), set()).add(int(slot_pages))
        assert num_slots in ((2, 4, 8) if slot_pages <= 4 else (2, 4)) if window < 41 else num_slots == 0
    assert slots[1] == {14, 8, 4, 2, 1}, "40 pages in three, five and ten pieces; small ones beside the smallest window alone"
    assert slots[3] == {13, 8, 4} and slots[24] == {9, 6, 4}, "17 pages in two, three and five pieces"
    assert slots[40] == {1} and slots[41] == {0}


def test_large_pages_are_pieces_of_their_own() -> None:
    plans = plans_for(np.array([1, 2]), 9, 32 * MIB)
    assert set(plans.slot_pages.tolist()) == {1}
