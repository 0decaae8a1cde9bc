"""Host memory that the operating system makes on threads, ahead of its use.

The system makes a page when it is first written to, and clears it then. How fast depends on the kind of memory: shared between processes, which
is what mmap gives unless told otherwise, 4.8 GB/s by any number of threads; private 6 GB/s by 4 threads and 20 by 16; private in huge pages
18 and 40. Few threads make it while others have work to do, all of them when somebody waits for it.
"""

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from time import perf_counter

import numpy as np

from rollkv.numa import prefer_node
from rollkv.units import MIB

PART_BYTES = 16 * MIB  # that a thread makes at a time
_STEP_BYTES = 2 * MIB  # behind which it may be stopped: a huge page, for which the system may have to move others first
_CORES = len(os.sched_getaffinity(0))
_BESIDE_OTHERS = max(1, _CORES // 4)  # 4 of 16 slow copies of weights from 34 to 29 GB/s, 8 to 22
_WAIT_SECONDS = 0.1


@dataclass(frozen=True)
class _Part:
    """Memory that one thread makes."""

    address: int
    num_bytes: int
    memory: mmap.mmap  # stays mapped until it is made
    done: Event = field(default_factory=Event)

    def make(self, go_on: Callable[[], bool]) -> None:
        """Writes to every page of the smallest size; a huge one comes with its first byte."""
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * self.num_bytes).from_address(self.address))
        for begin in range(0, self.num_bytes, _STEP_BYTES):
            if not go_on():
                return
            memory[begin : begin + _STEP_BYTES : mmap.PAGESIZE] = 0
        self.done.set()


@dataclass(frozen=True)
class Area:
    """Memory of its own, being made. Lives until `close`; nobody may be making it then."""

    address: int
    num_bytes: int
    memory: mmap.mmap
    parts: tuple[_Part, ...]

    def close(self) -> None:
        self.memory.close()


class PageMaker:
    """Makes areas in the order they are asked for. node: the NUMA node to make them on, where there is a choice."""

    def __init__(self, node: int | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self.last_made = 0.0  # by the clock
        self._node = node
        self._clock = clock
        self._parts: deque[_Part] = deque()
        self._threads: list[Thread] = []
        self._stopped = False

    def begin(self, num_bytes: int) -> Area:
        """An area that is made from now on. Raises OSError when the system has none."""
        self._stopped = False
        # Private: what the device reads must not be torn from this process by a fork, so a child does not get it at all.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(OSError, AttributeError):  # a system without huge pages
                memory.madvise(getattr(mmap, advice))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self._node is not None:
            prefer_node(address, num_bytes, self._node)
        offsets = range(0, num_bytes, PART_BYTES)
        parts = tuple(_Part(address + offset, min(PART_BYTES, num_bytes - offset), memory) for offset in offsets)
        self._parts.extend(parts)
        self._start(_BESIDE_OTHERS)
        return Area(address, num_bytes, memory, parts)

    def wait(self, area: Area, num_bytes: int) -> None:
        """Until the first num_bytes of an area are made, by all cores."""
        for part in area.parts[: -(-num_bytes // PART_BYTES)]:
            while not part.done.is_set():
                self._start(_CORES)
                part.done.wait(_WAIT_SECONDS)

    def stop(self) -> None:
        """Makes no more of what was begun; it may be closed then. Takes milliseconds."""
        self._stopped = True
        self._parts.clear()
        while self._threads:
            with suppress(RuntimeError):  # an interrupt came before it began: it will find nothing to do
                self._threads[-1].join()
            self._threads.pop()

    def _start(self, count: int) -> None:
        """So many threads at work, if there are parts for them."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(min(count, len(self._parts) + len(self._threads)) - len(self._threads)):
            thread = Thread(target=self._make_parts, name="page maker", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _make_parts(self) -> None:
        while True:
            try:
                part = self._parts.popleft()
            except IndexError:
                return
            part.make(lambda: not self._stopped)
            self.last_made = self._clock()
