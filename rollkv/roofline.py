"""What a decode step costs at the limit of link and device memory: a model small enough to check by hand, by which window and staging ring are
chosen and speeds predicted. Nothing that is computed depends on it.

A step reads every weight and every cached cell once from device memory. Meanwhile the tail crosses the link piece by piece:

  step    = max(compute, link + stalls + drain)
  compute = bytes of weights and cells / rate of device memory, and what pieces cost though they have long arrived: ARRIVAL_SECONDS each,
            WAIT_SECONDS for those that one wait serves (half of the slots), LAUNCH_SECONDS for those of a layer but its last, which goes with the window
  link    = over all pieces: max(PIECE_FLOOR_SECONDS, PIECE_LATENCY_SECONDS + bytes / rate of the link)
  stalls  = over all layers: what copies do not fill of the time of its last attention, of the window, which holds a slot meanwhile, with the other
            slots; and of the time between two attentions, that of a layer's weights, with what is left of all slots
  drain   = what is computed behind the last piece: a layer's weights
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollkv.pages import pages_for

# Copies from pinned memory on an H200 (PCIe 5 x16, 54.9 GB/s in large pieces): 52.5 GB/s in pieces of 4 MiB, 50.5 of 2, 47 of 1; 13 of 0.25.
PIECE_LATENCY_SECONDS = 3.3e-6
PIECE_FLOOR_SECONDS = 20e-6
# In a recorded step on the same card 36 layers took 2.96 ms without a tail; with one piece of 1 MiB each 3.19 through two slots, 3.10 through four
# and 3.04 through eight; with two of 2 MiB 3.50 through four.
ARRIVAL_SECONDS, WAIT_SECONDS, LAUNCH_SECONDS = 1.5e-6, 5e-6, 7e-6


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second, and where each figure comes from: "measured", "given" or "assumed"."""

    link: float  # pinned host memory to device, in large pieces
    hbm: float  # device memory
    link_origin: str = "assumed"
    hbm_origin: str = "assumed"

    def with_link(self, rate: float) -> "Bandwidths":
        """The same with a rate of the link that was given."""
        return replace(self, link=rate, link_origin="given")

    def as_dict(self) -> dict[str, object]:
        return {
            "link_gbps": self.link / 1e9,
            "link_origin": self.link_origin,
            "hbm_gbps": self.hbm / 1e9,
            "hbm_origin": self.hbm_origin,
        }


# A card of PCIe 4 x16 of which nothing is known.
ASSUMED = Bandwidths(link=25e9, hbm=1000e9)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a decode step behind a full context moves."""

    fixed_bytes: int  # weights, and cells of sliding-window layers: always on the device
    page_bytes: tuple[int, ...]  # of one page of each full-attention layer, in the window
    total_pages: int  # of the context
    other_tail_bytes: tuple[int, ...] | None = None  # of one of its pages in the tail; None: as many

    @property
    def tail_page_bytes(self) -> tuple[int, ...]:
        return self.other_tail_bytes or self.page_bytes

    @property
    def token_bytes(self) -> int:
        """Read from device memory without a tail."""
        return self.fixed_bytes + self.total_pages * sum(self.page_bytes)

    def with_tail(self, tail_pages: Any) -> Any:
        """Read from device memory, with so many pages of every full-attention layer in the tail, which are read from the ring."""
        return self.token_bytes - tail_pages * (sum(self.page_bytes) - sum(self.tail_page_bytes))


@dataclass(frozen=True)
class StepCost:
    """The terms of one step in seconds: numbers, or arrays with an entry for each of many plans."""

    compute: Any
    link: Any = 0.0
    stalls: Any = 0.0
    drain: Any = 0.0

    @property
    def beside_compute(self) -> Any:
        """If what is computed beside them took no time."""
        return self.link + self.stalls + self.drain

    @property
    def seconds(self) -> Any:
        return np.maximum(self.compute, self.beside_compute)

    @property
    def bound(self) -> str:
        """What a single step waits for."""
        return "link" if self.beside_compute > self.compute else "device memory"

    def as_dict(self) -> dict[str, object]:
        return {
            "tokens_per_second": 1 / self.seconds,
            "bound": self.bound,
            **{f"{name}_ms": 1e3 * getattr(self, name) for name in ("compute", "link", "stalls", "drain")},
        }


def pieces_of(tail_pages: Any, slot_pages: Any, largest_page_bytes: int, page_bytes: int) -> Any:
    """Of a layer's tail, whose pages have page_bytes: slots hold slot_pages of the largest ones, and more of smaller ones."""
    return pages_for(tail_pages, slot_pages * largest_page_bytes // page_bytes)


def piece_seconds(piece_bytes: Any, link_rate: float) -> Any:
    """How long one copy keeps the link busy, in a row of copies."""
    return np.maximum(PIECE_FLOOR_SECONDS, PIECE_LATENCY_SECONDS + piece_bytes / link_rate)


def resident_cost(traffic: Traffic, rates: Bandwidths) -> StepCost:
    """A step that copies nothing."""
    return StepCost(traffic.token_bytes / rates.hbm)


def streamed_cost(traffic: Traffic, rates: Bandwidths, tail_pages: Any, num_slots: Any, slot_pages: Any) -> StepCost:
    """A step of which tail_pages pages of every full-attention layer, at least one, pass through a ring of num_slots slots of slot_pages of the largest pages.
    Each of the three is a number, or an array of plans."""
    elsewhere = traffic.fixed_bytes / len(traffic.page_bytes) / rates.hbm
    link = stalls = pieces = 0.0
    for (page_bytes, window_page_bytes), layers in Counter(zip(traffic.tail_page_bytes, traffic.page_bytes, strict=True)).items():
        count = pieces_of(tail_pages, slot_pages, max(traffic.tail_page_bytes), page_bytes)
        piece = piece_seconds(tail_pages * page_bytes / count, rates.link)
        link = link + layers * count * piece
        last = (traffic.total_pages - tail_pages) * window_page_bytes / rates.hbm
        ahead = (num_slots - 1) * piece - last  # copies that fit in beside the last attention and are left for afterwards
        stalls = stalls + layers * (np.maximum(-ahead, 0.0) + np.maximum(elsewhere - piece - np.maximum(ahead, 0.0), 0.0))
        arrivals = count * (ARRIVAL_SECONDS + WAIT_SECONDS / np.maximum(num_slots // 2, 1)) + (count - 1) * LAUNCH_SECONDS
        pieces = pieces + layers * arrivals
    return StepCost(traffic.with_tail(tail_pages) / rates.hbm + pieces, link, stalls, elsewhere)
