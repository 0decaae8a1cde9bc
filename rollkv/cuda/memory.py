"""Memory of a run: device slabs with an account by label, and host pages in pinned chunks.

Device memory is taken in slabs of whole 2 MiB, the driver's own granule, and handed out in order; a reserved slab is used before a new
one is taken. Nothing is handed back before `close`, which gives back all, so use is flat once everything is allocated. No managed memory.
"""

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rollkv.cuda.driver import DriverCalls, DriverError, DriverMemoryError
from rollkv.errors import OutOfMemoryError
from rollkv.units import MIB, format_size, round_up
from rollkv.workspace import ALIGNMENT, GRANULE_BYTES

HOST_CHUNK_BYTES = 256 * MIB
SLOT_BYTES = 8 * MIB  # of a pinned slot: a copy of 8 MiB reaches 97 % of the link's rate
NUM_SLOTS = 12  # 8 threads fill them: 31 GB/s out of the page cache; 23 with 8 slots and 6 threads
NOTE_BYTES, NUM_NOTES = 64, 8
PAGEABLE_GBPS = 9  # a copy by one thread, docs/performance.md
_SMALLEST_SLOT_BYTES = MIB // 4
_SMALLEST_CHUNK_BYTES = 4 * MIB
_TOUCH_BYTES = 16 * MIB  # that one thread touches at a time
_TOUCH_THREADS = 4  # 1 thread has pages made at 1.9 GB/s, 4 at 4.8, 8 at 5.4
# Statuses with which drivers refuse to pin, besides lack of memory: invalid value, operating system, not supported, unknown. Driver
# calls leave no error behind that would have to be cleared; all others mean that the device is lost and are raised.
_CANNOT_PIN = (1, 304, 801, 999)


@dataclass
class _Slab:
    """One device allocation, used up to `used`."""

    address: int
    size: int
    used: int = 0


class DeviceMemory:
    """Allocations on the current device. `accounts` holds the bytes handed out by label."""

    def __init__(self, calls: DriverCalls, cap_bytes: int | None, used_bytes: Callable[[], int]):
        self.accounts: dict[str, int] = {}
        self.cap_bytes = cap_bytes
        self._calls = calls
        self._used_bytes = used_bytes
        self._slabs: list[_Slab] = []

    @property
    def slab_bytes(self) -> int:
        """Bytes taken from the device, handed out or not."""
        return sum(slab.size for slab in self._slabs)

    def reserve(self, num_bytes: int) -> None:
        """Takes a slab of num_bytes that later allocations live in. Raises OutOfMemoryError."""
        self._grow("the reserved arena", num_bytes)

    def take(self, label: str, num_bytes: int) -> int:
        """Address of num_bytes, aligned to 256, from the first slab with room. Raises OutOfMemoryError naming label and sizes."""
        size = round_up(max(num_bytes, 1), ALIGNMENT)
        slab = next((slab for slab in self._slabs if slab.size - slab.used >= size), None) or self._grow(label, size)
        address = slab.address + slab.used
        slab.used += size
        self.accounts[label] = self.accounts.get(label, 0) + num_bytes
        return address

    @contextmanager
    def borrowed(self, label: str, num_bytes: int) -> Iterator[int]:
        """Address of num_bytes that go back at the end of the block. Raises OutOfMemoryError."""
        slab = self._grow(label, num_bytes)
        try:
            yield slab.address
        finally:
            self._slabs.remove(slab)
            self._calls.bindings.cuMemFree(slab.address)

    def close(self) -> None:
        """Frees everything; a new start may follow. May be called twice, also after the device has failed."""
        while self._slabs:
            self._calls.bindings.cuMemFree(self._slabs.pop().address)
        self.accounts.clear()

    def _grow(self, label: str, num_bytes: int) -> _Slab:
        size = round_up(num_bytes, GRANULE_BYTES)
        if self.cap_bytes is not None and self._used_bytes() + size > self.cap_bytes:
            raise OutOfMemoryError(self._message(label, num_bytes))
        address = self._calls.unless_out_of_memory("cuMemAlloc", size, what=label)
        if address is None:
            raise OutOfMemoryError(self._message(label, num_bytes))
        slab = _Slab(int(address), size)
        self._slabs.append(slab)
        return slab

    def _message(self, label: str, num_bytes: int) -> str:
        free, total = self._calls("cuMemGetInfo")
        cap = "no cap" if self.cap_bytes is None else f"cap {format_size(self.cap_bytes)}"
        return (
            f"device memory is too small: {label} needs {format_size(num_bytes)}; this process holds {format_size(self._used_bytes())} "
            f"({cap}), {format_size(int(free))} of {format_size(int(total))} are free; lower --ctx-size, --ubatch or --vram-target, or free memory"
        )


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


@dataclass(frozen=True)
class Slots:
    """Equal pieces of pinned memory, and small ones behind them for what the host reads behind the device."""

    addresses: tuple[int, ...]
    slot_bytes: int
    notes: tuple[int, ...]  # addresses of NOTE_BYTES each


def slots_bytes(slot_bytes: int) -> int:
    """Pinned memory of slots of this size and the notes behind them."""
    return NUM_SLOTS * slot_bytes + NUM_NOTES * NOTE_BYTES


class PinnedMemory:
    """Pinned host memory of a run, and pageable memory in its place where the system refuses to pin more."""

    def __init__(self, calls: DriverCalls, chunk_bytes: int, warn: Callable[[str], None]):
        self._calls = calls
        self._chunk_bytes = chunk_bytes
        self._warn = warn
        self._pinned: list[tuple[int, mmap.mmap]] = []
        self._pageable: list[np.ndarray] = []
        self._slots: Slots | None = None
        self._warned = False

    @property
    def pinned_bytes(self) -> int:
        """Of pages and slots."""
        return sum(len(memory) for _, memory in self._pinned)

    def pages(self, label: str, num_pages: int, page_bytes: int) -> HostPages:
        """Memory of num_pages pages: pinned chunks of about chunk_bytes, smaller ones where these cannot be had, and at last pageable
        memory, which is said aloud. Raises OutOfMemoryError when the host has none of it."""
        self.slots()  # first: pages that took all that can be pinned would leave none to load weights through
        chunks: list[HostChunk] = []
        done, at_once = 0, max(1, self._chunk_bytes // page_bytes)
        while done < num_pages and at_once > 0:
            count = min(at_once, num_pages - done)
            address = self._pin(count * page_bytes)
            if address is not None:
                chunks.append(HostChunk(address, done, count, pinned=True))
                done += count
            elif count * page_bytes <= _SMALLEST_CHUNK_BYTES:
                break
            else:
                at_once = count // 2
        if done < num_pages:
            chunks.append(self._pageable_chunk(label, done, num_pages - done, page_bytes))
        return HostPages(page_bytes, num_pages, tuple(chunks))

    @property
    def has_pageable(self) -> bool:
        """Whether some pages had to do without pinned memory."""
        return bool(self._pageable)

    def slots(self) -> Slots:
        """What copies of pageable memory and notes pass through: made on first use, smaller where memory is short. Raises OutOfMemoryError
        when none can be had."""
        size = SLOT_BYTES
        while self._slots is None:
            address = self._pin(slots_bytes(size))
            if address is not None:
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
        """Frees what `pages` gave; the slots stay. No copy may be under way."""
        slots = None if self._slots is None else self._slots.addresses[0]
        for pinned in [pinned for pinned in self._pinned if pinned[0] != slots]:
            self._unpin(*pinned)
        self._pageable.clear()

    def close(self) -> None:
        """Frees everything; a new start may follow. May be called twice. No copy may be under way."""
        self._slots = None
        self.free_pages()

    def _unpin(self, address: int, memory: mmap.mmap) -> None:
        self._pinned.remove((address, memory))
        self._calls.bindings.cuMemHostUnregister(address)
        memory.close()

    def _pin(self, num_bytes: int) -> int | None:
        """Memory of the operating system's, touched by several threads and then registered: twice as fast as cuMemHostAlloc, which makes its
        pages on one (4.2 against 2.1 GB/s)."""
        try:
            memory = mmap.mmap(-1, num_bytes)
        except OSError:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            _touch(address, num_bytes)
            self._calls("cuMemHostRegister", address, num_bytes, 0)
        except (DriverError, DriverMemoryError) as error:
            memory.close()
            if isinstance(error, DriverError) and error.status not in _CANNOT_PIN:
                raise
            return None
        self._pinned.append((address, memory))
        return address

    def _pageable_chunk(self, label: str, first_page: int, num_pages: int, page_bytes: int) -> HostChunk:
        num_bytes = num_pages * page_bytes
        try:
            memory = np.empty(num_bytes, np.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(f"host memory is too small: {label} needs another {format_size(num_bytes)}; lower --ctx-size") from error
        self._pageable.append(memory)
        if not self._warned:
            self._warned = True
            self._warn(
                f"only {format_size(self.pinned_bytes)} of host memory can be pinned: {format_size(num_bytes)} of {label}, and what follows it, "
                f"pass through a pinned buffer, which one CPU thread fills at about {PAGEABLE_GBPS} GB/s however fast the link is (55 on PCIe 5 x16), "
                "and decode steps are issued one by one; free host memory or raise the container's limit"
            )
        return HostChunk(memory.ctypes.data, first_page, num_pages, pinned=False)


def _touch(address: int, num_bytes: int) -> None:
    """Has the system make the pages now."""
    parts = [(address + offset, 0, min(_TOUCH_BYTES, num_bytes - offset)) for offset in range(0, num_bytes, _TOUCH_BYTES)]
    with ThreadPoolExecutor(_TOUCH_THREADS) as threads:
        for done in [threads.submit(ctypes.memset, *part) for part in parts]:
            done.result()
