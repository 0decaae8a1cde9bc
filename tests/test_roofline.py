"""What a step costs, by hand; and against steps that were measured."""

import numpy as np
import pytest

from rollkv.roofline import WAIT_SECONDS, Bandwidths, StepCost, Traffic, piece_seconds, resident_cost, streamed_cost
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
    assert cost.compute == pytest.approx(0.0042 + 4 * WAIT_SECONDS)
    assert cost.link == pytest.approx(4 * (0.003 + 3.3e-6))
    assert cost.fill == pytest.approx(0.003 + 3.3e-6) and cost.drain == pytest.approx(0.002)
    assert cost.stalls == 0, "6 ms of copies fill the ring, 2 ms of weights a layer"
    assert cost.seconds == pytest.approx(cost.link + 0.002) and cost.bound == "link"
    # On a slower device the weights of a layer take 4 ms: two slots of one page are full after 2 of them.
    slow = Bandwidths(1e9, 50e9)
    assert streamed_cost(traffic, slow, 6, 2, 1).stalls == pytest.approx(2 * (0.004 - 0.002 - 6.6e-6))
    assert streamed_cost(traffic, slow, 6, 4, 1).stalls == 0
    # Seven pages go in pieces of three, two and two.
    assert streamed_cost(traffic, rates, 7, 2, 3).fill == pytest.approx(0.003 + 3.3e-6)
    short = streamed_cost(traffic, rates, 1, 2, 1)
    assert short.bound == "device memory" and short.seconds == pytest.approx(0.0042 + 2 * WAIT_SECONDS + 0.001 + 3.3e-6)


def test_layers_of_several_sizes_add_up() -> None:
    small, large = (Traffic(0, (size,) * 3, 8) for size in (MIB, 4 * MIB))
    mixed = Traffic(0, (MIB, 4 * MIB) * 3, 8)
    links = [streamed_cost(traffic, H200, 5, 2, 2).link for traffic in (small, large, mixed)]
    assert links[0] + links[1] == pytest.approx(links[2])


def test_arrays_of_plans_cost_what_each_plan_does() -> None:
    traffic = Traffic(10**9, (MIB, MIB, 2 * MIB), 100)
    tails, slots, pages = np.array([1, 7, 40, 99]), np.array([2, 3, 4, 2]), np.array([1, 4, 16, 16])
    together = streamed_cost(traffic, H200, tails, slots, pages).seconds
    alone = [streamed_cost(traffic, H200, *map(int, plan)).seconds for plan in zip(tails, slots, pages, strict=True)]
    assert together.tolist() == alone


@pytest.mark.parametrize(
    "tail_pages,num_slots,slot_pages,milliseconds",
    [(1, 2, 1, 3.472), (2, 2, 1, 3.765), (2, 2, 2, 3.521), (4, 2, 2, 3.826), (4, 2, 4, 3.595), (8, 4, 2, 6.212), (8, 2, 4, 5.908),
     (8, 2, 8, 5.806), (16, 2, 4, 11.534), (16, 2, 8, 11.399), (16, 2, 16, 11.278), (16, 4, 16, 11.251), (32, 4, 4, 22.836),
     (32, 2, 8, 22.431), (32, 2, 16, 22.236), (32, 4, 16, 22.226)],
)  # fmt: skip
def test_steps_take_what_was_measured(tail_pages: int, num_slots: int, slot_pages: int, milliseconds: float) -> None:
    """Recorded steps of qwen3-8b's shape on an H200, Q8_0, 33 pages of f16 cells, 3.244 ms without a tail: within 3 %."""
    traffic = Traffic(8_040_000_000, (MIB,) * 36, 33)
    rates = Bandwidths(54.9e9, traffic.token_bytes / 3.244e-3)  # what that step made of device memory
    assert 1e3 * streamed_cost(traffic, rates, tail_pages, num_slots, slot_pages).seconds == pytest.approx(milliseconds, rel=0.03)
