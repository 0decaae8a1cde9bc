"""Window and staging ring, chosen together: of what fits under a cap the plan whose decode step roofline.py expects to be shortest.

A large ring lets the link run in large pieces, but takes pages from the window; which pays more depends on the tail. Neither may a larger cap
ever give a smaller window or a slower step. So plans stand in one order, by size, that no cap changes, and the choice walks along it as far as
the cap reaches: a plan takes the place of the one before when neither its window is smaller nor its step longer.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollkv.pages import pages_for
from rollkv.units import MIB

# 1.1 GiB of tail in a step: 22.2 ms in pieces of 16 MiB, 22.4 of 8, 22.8 of 4 (22.0 at 54.9 GB/s). 288 MiB: 5.81 of 8, 5.90 of 4, 6.21 of 2.
LARGEST_PIECE_BYTES, SMALL_PIECE_BYTES = 16 * MIB, 4 * MIB
# Four slots of large pieces, eight of small ones, where waits count: 36 MiB of tail cost 0.23, 0.14 and 0.08 ms through two, four and eight slots, 144 MiB
# 0.35, 0.22 and 0.18 (six: 0.17); 1.1 GiB take 22.1 ms through two or four.
NUM_SLOTS, NUM_SMALL_SLOTS = (2, 4), 8


@dataclass(frozen=True)
class Plans:
    """Ways to keep a context, one a row: int64 arrays of one length. Rows with a window of all pages have no ring (0 slots)."""

    window_pages: np.ndarray
    num_slots: np.ndarray
    slot_pages: np.ndarray


def plans_for(windows: np.ndarray, total_pages: int, page_bytes: int) -> Plans:
    """Every window (pages, int64, ascending) beside every staging ring worth a thought: slots for equal pieces of a layer's tail, of at most
    16 MiB, 8, or 4; smaller ones only beside the smallest window, so that what fits is not refused. page_bytes: of the largest page."""
    tails: Any = total_pages - windows
    largest = max(1, LARGEST_PIECE_BYTES // page_bytes)
    rows = []
    for slot_pages in (largest >> halvings for halvings in range(largest.bit_length())):
        pieces: Any = pages_for(tails, np.maximum(pages_for(tails, slot_pages), 1))
        wanted = (pieces * page_bytes >= SMALL_PIECE_BYTES) | (pieces == tails) | (windows == windows[0])
        small = wanted & (pieces * page_bytes <= SMALL_PIECE_BYTES)
        rows += [(windows[wanted], num_slots * (tails[wanted] > 0), pieces[wanted]) for num_slots in NUM_SLOTS]
        rows.append((windows[small], NUM_SMALL_SLOTS * (tails[small] > 0), pieces[small]))
    return Plans(*(np.concatenate(column) for column in zip(*rows, strict=True)))


def choose(window_pages: np.ndarray, size_bytes: np.ndarray, seconds: np.ndarray, cap_bytes: int) -> int | None:
    """The row of the plan for this cap; None when none fits. See the module."""
    order = np.lexsort((seconds, size_bytes))
    chosen, window, step = None, 0, np.inf
    for row in order[: np.searchsorted(size_bytes[order], cap_bytes, "right")].tolist():
        if window_pages[row] >= window and seconds[row] <= step and (window_pages[row] > window or seconds[row] < step):
            chosen, window, step = row, window_pages[row], seconds[row]
    return chosen
