"""Host memory of a run: the pages of the tail in pinned chunks, and pinned slots.

Memory is made by threads (page_maker.py) from when it is asked for. It is pinned by whoever needs it first, chunk by chunk as it is made: a thread
that pinned beside the copies of weights would hold these up, 9 ms a call, and halve their rate.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import lcm
from mmap import PAGESIZE
from time import perf_counter

from rollkv.backend import TailMade
from rollkv.cuda.driver import DriverCalls, DriverError, DriverMemoryError
from rollkv.errors import OutOfMemoryError
from rollkv.page_maker import Area, PageMaker
from rollkv.units import MIB, format_need, format_size

HOST_CHUNK_BYTES = 256 * MIB
SLOT_BYTES = 8 * MIB  # of a pinned slot: a copy of 8 MiB reaches 97 % of the link's rate
NUM_SLOTS = 12  # 8 threads fill them: 31 GB/s out of the page cache; 23 with 8 slots and 6 threads
NOTE_BYTES, NUM_NOTES = 64, 8
PAGEABLE_GBPS = 9  # a copy by one thread, docs/performance.md
_SMALLEST_SLOT_BYTES = MIB // 4
_SMALLEST_CHUNK_BYTES = 4 * MIB
# Statuses with which drivers refuse to pin, besides lack of memory: invalid value, operating system, not supported, unknown. Driver
# calls leave no error behind that would have to be cleared; all others mean that the device is lost and are raised.
_CANNOT_PIN = (1, 304, 801, 999)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class HostChunk:
    """Consecutive host memory of pages first_page .. first_page + num_pages - 1."""

    address: int
    first_page: int
    num_pages: int
    pinned: bool


@dataclass(frozen=True)
class HostPages:
    """Tail memory: page i lies in the chunk that holds it; no page is cut."""

    page_bytes: int
    num_pages: int
    chunks: tuple[HostChunk, ...]
    first_pages: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_pages", tuple(chunk.first_page for chunk in self.chunks))

    def stretches(self, first_page: int, num_pages: int) -> Iterator[tuple[int, int, bool]]:
        """(address, pages, pinned) of the pieces of memory that hold these pages, in order. Raises IndexError outside."""
        if first_page < 0 or num_pages < 0 or first_page + num_pages > self.num_pages:
            raise IndexError(f"pages {first_page} to {first_page + num_pages - 1} of {self.num_pages}")
        end = first_page + num_pages
        while first_page < end:
            chunk = self.chunks[bisect_right(self.first_pages, first_page) - 1]
            inside = first_page - chunk.first_page
            count = min(end - first_page, chunk.num_pages - inside)
            yield chunk.address + inside * self.page_bytes, count, chunk.pinned
            first_page += count


AwaitPages = Callable[[], HostPages]  # waits until they can be used


@dataclass(frozen=True)
class Slots:
    """Equal pieces of pinned memory, and small ones behind them for what the host reads behind the device."""

    addresses: tuple[int, ...]
    slot_bytes: int
    notes: tuple[int, ...]  # addresses of NOTE_BYTES each


def slots_bytes(slot_bytes: int) -> int:
    """Pinned memory of slots of this size and the notes behind them."""
    return NUM_SLOTS * slot_bytes + NUM_NOTES * NOTE_BYTES


@dataclass
class _Asked:
    """Pages that are being made, and the chunks of them that can be used."""

    label: str
    num_pages: int
    page_bytes: int
    area: Area
    chunk_pages: int  # that are pinned at once; 0: no more can be pinned
    least_pages: int  # that chunks are multiples of, so that no two share a page of the system
    chunks: list[HostChunk] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def done_pages(self) -> int:
        return sum(chunk.num_pages for chunk in self.chunks)

    def add_chunk(self, num_pages: int, *, pinned: bool) -> None:
        done = self.done_pages
        self.chunks.append(HostChunk(self.area.address + done * self.page_bytes, done, num_pages, pinned))


class PinnedMemory:
    """Pinned host memory of a run, and pageable memory in its place where the system refuses to pin more.

    node: the NUMA node that it should be of. on_progress(bytes that can be used, all bytes) is told of tail pages while somebody waits for them.
    """

    def __init__(
        self,
        calls: DriverCalls,
        chunk_bytes: int,
        warn: Callable[[str], None],
        *,
        node: int | None = None,
        on_progress: Progress = lambda done, total: None,
        clock: Callable[[], float] = perf_counter,
    ):
        self.made: TailMade | None = None
        self.has_pageable = False  # whether some pages had to do without pinned memory
        self._calls = calls
        self._chunk_bytes = chunk_bytes
        self._warn = warn
        self._on_progress = on_progress
        self._clock = clock
        self._maker = PageMaker(node, clock)
        self._areas: list[Area] = []
        self._pinned: list[tuple[int, int]] = []  # addresses and bytes
        self._waiting: deque[_Asked] = deque()
        self._begun = 0.0
        self._slots: Slots | None = None
        self._slot_area: Area | None = None
        self._warned = False

    @property
    def pinned_bytes(self) -> int:
        """Of pages and slots."""
        return sum(num_bytes for _, num_bytes in self._pinned)

    def pages(self, label: str, num_pages: int, page_bytes: int) -> AwaitPages:
        """Memory of num_pages pages, which is made from now on. What is given back waits for all that was asked for so far: pinned chunks of about
        chunk_bytes, smaller ones where these cannot be had, and at last pageable memory, which is said aloud; it raises DeviceError when the
        device is lost. Raises OutOfMemoryError when the host has no such memory."""
        self.slots()  # first: pages that took all that can be pinned would leave none to load weights through
        if not self._waiting:
            self._begun = self._clock()
        try:
            area = self._maker.begin(num_pages * page_bytes)
        except OSError as error:
            raise OutOfMemoryError(
                f"host memory is too small: {label} needs another {format_need(num_pages * page_bytes)}; lower --ctx-size"
            ) from error
        self._areas.append(area)
        least = lcm(page_bytes, PAGESIZE) // page_bytes
        asked = _Asked(label, num_pages, page_bytes, area, max(self._chunk_bytes // page_bytes // least, 1) * least, least)
        self._waiting.append(asked)
        found: list[HostPages] = []

        def await_pages() -> HostPages:
            if not found:
                self.settle()
                found.append(HostPages(page_bytes, num_pages, tuple(asked.chunks)))
            return found[0]

        return await_pages

    def settle(self) -> None:
        """Waits until all pages that were asked for can be used. Raises DeviceError; may be interrupted, and called again then."""
        if not self._waiting:
            return
        begin, total = self._clock(), sum(asked.num_bytes for asked in self._waiting)
        done = 0
        while self._waiting:
            asked = self._waiting[0]
            while asked.done_pages < asked.num_pages:
                self._add_chunk(asked)
                self._on_progress(done + asked.done_pages * asked.page_bytes, total)
            done += asked.num_bytes
            self._waiting.popleft()
        end = self._clock()
        idle = max(begin - self._maker.last_made, 0.0)  # between what the threads did and what was done here
        self.made = TailMade(total, end - self._begun - idle, end - begin)

    def slots(self) -> Slots:
        """What copies of pageable memory and notes pass through: made on first use, smaller where memory is short. Raises OutOfMemoryError
        when none can be had."""
        size = SLOT_BYTES
        while self._slots is None:
            if (address := self._pinned_area(slots_bytes(size))) is not None:
                behind = address + NUM_SLOTS * size
                notes = tuple(behind + index * NOTE_BYTES for index in range(NUM_NOTES))
                self._slots = Slots(tuple(address + index * size for index in range(NUM_SLOTS)), size, notes)
            elif size <= _SMALLEST_SLOT_BYTES:
                raise OutOfMemoryError(
                    f"not even {format_size(NUM_SLOTS * size)} of host memory can be pinned; free host memory, or raise the container's limit"
                )
            else:
                size //= 2
        return self._slots

    def free_pages(self) -> None:
        """Frees what `pages` gave, made or not; the slots stay. No copy may be under way."""
        self._maker.stop()
        self._waiting.clear()
        self.made, self.has_pageable = None, False
        slots = None if self._slot_area is None else self._slot_area.address
        for address, num_bytes in [pinned for pinned in self._pinned if pinned[0] != slots]:
            self._unpin(address, num_bytes)
        while self._areas:
            self._areas.pop().close()

    def close(self) -> None:
        """Frees everything; a new start may follow. May be called twice. No copy may be under way."""
        if self._slot_area is not None:
            self._areas.append(self._slot_area)
        self._slots = self._slot_area = None
        self.free_pages()

    def _pinned_area(self, num_bytes: int) -> int | None:
        """Address of memory that is pinned as a whole, kept for `close` as that of the slots; None where it cannot be had."""
        try:
            area = self._maker.begin(num_bytes)
        except OSError:
            return None
        self._slot_area = area
        self._maker.wait(area, num_bytes)
        if self._pin(area.address, num_bytes):
            return area.address
        self._slot_area = None
        area.close()
        return None

    def _add_chunk(self, asked: _Asked) -> None:
        """The next pages of what was asked for, when they are made; or fewer of them, or none but a smaller size to try."""
        count = asked.num_pages - asked.done_pages
        if asked.chunk_pages == 0:
            self._maker.wait(asked.area, asked.num_bytes)
            asked.add_chunk(count, pinned=False)
            self.has_pageable = True
            self._warn_of_pageable(asked.label, count * asked.page_bytes)
            return
        count = min(asked.chunk_pages, count)
        num_bytes, first = count * asked.page_bytes, asked.done_pages * asked.page_bytes
        self._maker.wait(asked.area, first + num_bytes)
        if self._pin(asked.area.address + first, num_bytes):
            asked.add_chunk(count, pinned=True)
        elif num_bytes <= _SMALLEST_CHUNK_BYTES:
            asked.chunk_pages = 0
        else:
            asked.chunk_pages = count // 2 // asked.least_pages * asked.least_pages

    def _pin(self, address: int, num_bytes: int) -> bool:
        """Whether the driver pins this memory, or has done so before an interrupt. Raises DeviceError when the device is lost."""
        if (address, num_bytes) in self._pinned:
            return True
        try:
            self._calls("cuMemHostRegister", address, num_bytes, 0)
        except (DriverError, DriverMemoryError) as error:
            if isinstance(error, DriverError) and error.status not in _CANNOT_PIN:
                raise
            return False
        self._pinned.append((address, num_bytes))
        return True

    def _unpin(self, address: int, num_bytes: int) -> None:
        self._pinned.remove((address, num_bytes))
        self._calls.bindings.cuMemHostUnregister(address)

    def _warn_of_pageable(self, label: str, num_bytes: int) -> None:
        if self._warned:
            return
        self._warned = True
        self._warn(
            f"only {format_size(self.pinned_bytes)} of host memory can be pinned: {format_size(num_bytes)} of {label}, and what follows it, "
            f"pass through a pinned buffer, which one CPU thread fills at about {PAGEABLE_GBPS} GB/s however fast the link is (55 on PCIe 5 x16), "
            "and decode steps are issued one by one; free host memory or raise the container's limit"
        )
