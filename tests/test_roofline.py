"""What a step costs, by hand; and against steps that were measured."""

import numpy as np
import pytest

from rollkv.roofline import (
    ARRIVAL_SECONDS,
    LAUNCH_SECONDS,
    WAIT_SECONDS,
    Bandwidths,
    StepCost,
    Traffic,
    piece_seconds,
    resident_cost,
    streamed_cost,
)
from rollkv.units import MIB

H200 = Bandwidths(54.9e9, 4.3e12)


@pytest.mark.parametrize("mib,gbps", [(64, 54.5), (16, 53.9), (4, 52.5), (2, 50.5), (1, 47), (0.25, 13)])
def test_pieces_take_what_was_measured(mib: float, gbps: float) -> None:
    """Copies from pinned memory on an H200."""
    assert mib * MIB / piece_seconds(mib * MIB, 54.9e9) == pytest.approx(gbps * 1e9, rel=0.01)


def test_a_resident_step_by_hand() -> None:
    traffic = Traffic(fixed_bytes=7_000, page_bytes=(100, 100, 50), total_pages=12)
    assert traffic.token_bytes == 10_000
    cost = resident_cost(traffic, Bandwidths(1.0, 1e6))
    assert cost == StepCost(0.01) and cost.seconds == 0.01 and cost.bound == "device memory"


def test_a_streamed_step_by_hand() -> None:
    """Two layers, ten pages of 1 MB each, six of them in the tail, in pieces of three: link 1 GB/s, device memory 100 GB/s."""
    traffic, rates = Traffic(400_000_000, (1_000_000, 1_000_000), 10), Bandwidths(1e9, 100e9)
    cost = streamed_cost(traffic, rates, 6, 2, 3)
    assert cost.compute == pytest.approx(0.0042 + 4 * (ARRIVAL_SECONDS + WAIT_SECONDS) + 2 * LAUNCH_SECONDS)
    assert cost.link == pytest.approx(4 * (0.003 + 3.3e-6))
    assert cost.drain == pytest.approx(0.002)
    assert cost.stalls == 0, "6 ms of copies fill the ring, 2 ms of weights a layer"
    assert cost.seconds == pytest.approx(cost.link + 0.002) and cost.bound == "link"
    # On a slower device the weights of a layer take 4 ms: two slots of one page are full after 2 of them.
    slow = Bandwidths(1e9, 50e9)
    assert streamed_cost(traffic, slow, 6, 2, 1).stalls == pytest.approx(2 * (0.004 - 0.002 - 6.6e-6))
    assert streamed_cost(traffic, slow, 6, 4, 1).stalls == 0
    short = streamed_cost(traffic, rates, 1, 4, 1)
    assert short.bound == "device memory" and short.seconds == pytest.approx(0.0042 + 2 * (ARRIVAL_SECONDS + WAIT_SECONDS / 2))


def test_layers_of_several_sizes_add_up() -> None:
    """A slot for two of the large pages holds eight of the small ones."""
    small, large = (Traffic(0, (size,) * 3, 32) for size in (MIB, 4 * MIB))
    mixed = streamed_cost(Traffic(0, (MIB, 4 * MIB) * 3, 32), H200, 21, 2, 2)
    alone = [streamed_cost(small, H200, 21, 2, 8), streamed_cost(large, H200, 21, 2, 2)]
    assert mixed.link == pytest.approx(sum(cost.link for cost in alone))
    assert mixed.compute == pytest.approx(sum(cost.compute for cost in alone))


def test_a_tail_of_its_own_type_is_read_and_copied_in_it() -> None:
    alike = Traffic(1_000_000, (1_000_000,) * 4, 100)
    narrow = Traffic(1_000_000, (1_000_000,) * 4, 100, (250_000,) * 4)
    assert alike.with_tail(40) == alike.token_bytes == narrow.token_bytes == narrow.with_tail(0)
    assert narrow.with_tail(40) == 1_000_000 + 4 * (60 * 1_000_000 + 40 * 250_000)
    assert streamed_cost(narrow, H200, 40, 2, 8).link == streamed_cost(Traffic(0, (250_000,) * 4, 100), H200, 40, 2, 8).link


def test_arrays_of_plans_cost_what_each_plan_does() -> None:
    traffic = Traffic(10**9, (MIB, MIB, 2 * MIB), 100)
    tails, slots, pages = np.array([1, 7, 40, 99]), np.array([2, 3, 4, 2]), np.array([1, 4, 16, 16])
    together = streamed_cost(traffic, H200, tails, slots, pages).seconds
    alone = [streamed_cost(traffic, H200, *map(int, plan)).seconds for plan in zip(tails, slots, pages, strict=True)]
    assert together.tolist() == alone


@pytest.mark.parametrize(
    "tail_pages,num_slots,slot_pages,milliseconds",
    [(1, 2, 1, 3.191), (1, 4, 1, 3.096), (1, 8, 1, 3.042), (2, 2, 2, 3.222), (2, 4, 2, 3.108), (2, 8, 2, 3.067), (3, 4, 3, 3.136), (3, 8, 3, 3.071),
     (4, 4, 2, 3.503), (4, 8, 2, 3.365), (4, 2, 4, 3.303), (4, 4, 4, 3.180), (4, 8, 4, 3.136), (5, 4, 5, 3.635), (8, 4, 4, 5.800), (8, 4, 8, 5.659),
     (16, 4, 8, 11.216), (16, 4, 16, 11.108), (32, 4, 8, 22.370), (32, 2, 16, 22.126), (32, 4, 16, 22.088)],
)  # fmt: skip
def test_steps_take_what_was_measured(tail_pages: int, num_slots: int, slot_pages: int, milliseconds: float) -> None:
    """Recorded steps of qwen3-8b's shape on an H200, Q8_0, 33 pages of f16 cells, 2.957 ms without a tail: within 4 %."""
    traffic = Traffic(8_040_000_000, (MIB,) * 36, 33)
    rates = Bandwidths(54.9e9, traffic.token_bytes / 2.957e-3)  # what that step made of device memory
    assert 1e3 * streamed_cost(traffic, rates, tail_pages, num_slots, slot_pages).seconds == pytest.approx(milliseconds, rel=0.04)
