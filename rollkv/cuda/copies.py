"""Events, and copies of pages between window, staging ring and tail.

A copy takes as few calls as memory allows: a run is cut where the ring of slots wraps and where one host chunk ends. Pinned memory is
copied asynchronously. Pageable memory passes through pinned slots: the way in reads host memory at the call, the way out returns when the
bytes have arrived, so what a later call reads is always whole.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rollkv.backend import PageRun, Stream
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.driver import DriverCalls
from rollkv.cuda.pinned import NOTE_BYTES, HostPages, PinnedMemory

_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING: cheaper to record


class Event:
    """A point in a stream. Its handle goes back to the pool when the last reference is gone; waits issued before stay valid, because
    the driver takes the event's state when a wait is issued."""

    __slots__ = ("_pool", "handle")

    def __init__(self, handle: Any, pool: list[Any]):
        self.handle = handle
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(self.handle)


class Events:
    """Records and waits on the streams of one device. Events are reused, so the steady state creates none."""

    def __init__(self, calls: DriverCalls, streams: dict[Stream, Any]):
        self._calls = calls
        self._streams = streams
        self._free: list[Any] = []
        self._free_timed: list[Any] = []
        self._made: list[Any] = []

    def record(self, stream: Stream) -> Event:
        return self._record(stream, self._free, _DISABLE_TIMING)

    def record_timed(self, stream: Stream) -> Event:
        """An event that elapsed_ms can read."""
        return self._record(stream, self._free_timed, 0)

    def wait(self, stream: Stream, event: Event) -> None:
        self._calls("cuStreamWaitEvent", self._streams[stream], event.handle, 0)

    def synchronize(self, event: Event) -> None:
        self._calls("cuEventSynchronize", event.handle)

    def elapsed_ms(self, begin: Event, end: Event) -> float:
        """Device time between two timed events; waits for the second."""
        self.synchronize(end)
        return float(self._calls("cuEventElapsedTime", begin.handle, end.handle))

    def close(self) -> None:
        """Destroys all events, those still referenced included. May be called twice."""
        while self._made:
            self._calls.bindings.cuEventDestroy(self._made.pop())
        self._free.clear()
        self._free_timed.clear()

    def _record(self, stream: Stream, pool: list[Any], flags: int) -> Event:
        if pool:
            handle = pool.pop()
        else:
            handle = self._calls("cuEventCreate", flags)
            self._made.append(handle)
        event = Event(handle, pool)
        self._calls("cuEventRecord", handle, self._streams[stream])
        return event


@dataclass(frozen=True)
class Piece:
    """One contiguous copy: bytes at `host` and at `device`."""

    device: int
    host: int
    num_bytes: int
    pinned: bool


def pieces(run: PageRun, host: HostPages) -> Iterator[Piece]:
    """The fewest contiguous copies that move a run. Raises ValueError when run and host disagree about the size of a page."""
    pool = run.pool
    assert isinstance(pool, DeviceArray)
    if pool.shape[-1] != host.page_bytes or not 0 <= run.num_pages <= run.num_slots <= pool.shape[0]:
        raise ValueError(
            f"{run.num_pages} pages in {run.num_slots} slots of a pool {pool.shape} against host pages of {host.page_bytes} bytes"
        )
    done = 0
    while done < run.num_pages:
        slot = (run.first_slot + done) % run.num_slots
        count = min(run.num_pages - done, run.num_slots - slot)
        device = pool.ptr + slot * host.page_bytes
        for address, num_pages, pinned in host.stretches(run.first_page + done, count):
            yield Piece(device, address, num_pages * host.page_bytes, pinned)
            device += num_pages * host.page_bytes
        done += count


class SlotRing:
    """Pinned slots by turns. A slot that was taken is taken again once `busy_until` was said of it and that event has passed."""

    def __init__(self, events: Events, memory: PinnedMemory):
        self._events = events
        self._memory = memory
        self._busy: dict[int, Event | None] = {}  # None: in the taker's hands
        self._turn = 0

    @property
    def slot_bytes(self) -> int:
        return self._memory.slots().slot_bytes

    def take(self) -> tuple[int, int]:
        """(number, address) of the next slot, when the copy that used it last has ended."""
        addresses = self._memory.slots().addresses
        slot, self._turn = self._turn, (self._turn + 1) % len(addresses)
        if slot in self._busy:
            event = self._busy[slot]
            if event is None:
                raise ValueError(f"all {len(addresses)} pinned slots are taken")
            self._events.synchronize(event)
        self._busy[slot] = None
        return slot, addresses[slot]

    def busy_until(self, slot: int, event: Event) -> None:
        """Gives a slot back; what was issued before `event` may still use it."""
        self._busy[slot] = event


class Copies:
    """Page copies of one device."""

    def __init__(self, calls: DriverCalls, streams: dict[Stream, Any], events: Events, slots: SlotRing):
        self._calls = calls
        self._streams = streams
        self._events = events
        self._slots = slots

    def copy_in(self, run: PageRun, host: HostPages) -> None:
        """COPY_IN: pages from the tail into the run's slots."""
        stream = self._streams[Stream.COPY_IN]
        for piece in pieces(run, host):
            if piece.pinned:
                self._calls("cuMemcpyHtoDAsync", piece.device, piece.host, piece.num_bytes, stream)
            else:
                self._staged_in(piece.device, piece.host, piece.num_bytes, Stream.COPY_IN)

    def copy_out(self, run: PageRun, host: HostPages) -> None:
        """COPY_OUT: pages from the run's slots to the tail."""
        stream = self._streams[Stream.COPY_OUT]
        for piece in pieces(run, host):
            if piece.pinned:
                self._calls("cuMemcpyDtoHAsync", piece.host, piece.device, piece.num_bytes, stream)
            else:
                self._staged_out(piece.device, piece.host, piece.num_bytes, Stream.COPY_OUT)

    def copy_page(self, source: DeviceArray, source_slot: int, target: DeviceArray, target_slot: int) -> None:
        """COMPUTE: one page between pools u8 [slots, page_bytes]."""
        page_bytes = source.shape[-1]
        if target.shape[-1] != page_bytes or not (0 <= source_slot < source.shape[0] and 0 <= target_slot < target.shape[0]):
            raise ValueError(f"slot {source_slot} of {source.shape} to slot {target_slot} of {target.shape}")
        to, at = target.ptr + target_slot * page_bytes, source.ptr + source_slot * page_bytes
        self._calls("cuMemcpyDtoDAsync", to, at, page_bytes, self._streams[Stream.COMPUTE])

    def upload(self, device: int, host: int, num_bytes: int) -> None:
        """COMPUTE: any host memory to the device through the stage. The host memory may change when the call returns."""
        self._staged_in(device, host, num_bytes, Stream.COMPUTE)

    def download(self, device: int, host: int, num_bytes: int) -> None:
        """Device memory to any host memory, behind all COMPUTE work so far; returns when it is there."""
        self._staged_out(device, host, num_bytes, Stream.COMPUTE)

    def _staged_in(self, device: int, host: int, num_bytes: int, stream: Stream) -> None:
        for offset, count in self._parts(num_bytes):
            slot, address = self._slots.take()
            ctypes.memmove(address, host + offset, count)
            self._calls("cuMemcpyHtoDAsync", device + offset, address, count, self._streams[stream])
            self._slots.busy_until(slot, self._events.record(stream))

    def _staged_out(self, device: int, host: int, num_bytes: int, stream: Stream) -> None:
        """Copies one part while the part before it moves on to its place."""
        waiting: tuple[Event, int, int, int] | None = None  # event, target, source, bytes
        for offset, count in self._parts(num_bytes):
            slot, address = self._slots.take()
            self._calls("cuMemcpyDtoHAsync", address, device + offset, count, self._streams[stream])
            event = self._events.record(stream)
            self._slots.busy_until(slot, event)
            if waiting is not None:
                self._land(*waiting)
            waiting = (event, host + offset, address, count)
        if waiting is not None:
            self._land(*waiting)

    def _land(self, event: Event, target: int, source: int, count: int) -> None:
        self._events.synchronize(event)
        ctypes.memmove(target, source, count)

    def _parts(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of the parts of a transfer."""
        size = self._slots.slot_bytes
        for offset in range(0, num_bytes, size):
            yield offset, min(size, num_bytes - offset)


class Notes:
    """Small values that the host reads behind the device. A note's place is used again by the NUM_NOTES-th from it on."""

    def __init__(self, calls: DriverCalls, streams: dict[Stream, Any], events: Events, memory: PinnedMemory):
        self._calls = calls
        self._stream = streams[Stream.COMPUTE]
        self._events = events
        self._memory = memory
        self._turn = 0

    def read_later(self, device: int, num_bytes: int) -> Callable[[], bytes]:
        """Device memory, at most NOTE_BYTES, behind all COMPUTE work so far: the call waits for it."""
        notes = self._memory.slots().notes
        if num_bytes > NOTE_BYTES:
            raise ValueError(f"{num_bytes} bytes; a note holds {NOTE_BYTES}")
        address, self._turn = notes[self._turn], (self._turn + 1) % len(notes)
        self._calls("cuMemcpyDtoHAsync", address, device, num_bytes, self._stream)
        event = self._events.record(Stream.COMPUTE)

        def wait() -> bytes:
            self._events.synchronize(event)
            return ctypes.string_at(address, num_bytes)

        return wait
