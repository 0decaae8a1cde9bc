"""Host memory that threads make: all of it, in order, and nothing more once it is stopped."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollkv import page_maker
from rollkv.page_maker import PART_BYTES, Area, PageMaker, _Part
from rollkv.units import MIB


def _resident_bytes(area: Area) -> int:
    """Of the area: counted by the system."""
    pages = area.num_bytes // mmap.PAGESIZE
    present = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(area.address), ctypes.c_size_t(area.num_bytes), present) == 0
    return sum(flag & 1 for flag in present) * mmap.PAGESIZE


def test_whoever_waits_finds_memory_made() -> None:
    maker = PageMaker()
    areas = [maker.begin(size) for size in (3 * MIB, 4096, PART_BYTES + 8192)]
    for area in areas:
        maker.wait(area, area.num_bytes)
        assert _resident_bytes(area) == area.num_bytes
        values = np.ctypeslib.as_array((ctypes.c_uint8 * area.num_bytes).from_address(area.address))
        assert not values.any()
        values[...] = 255
    assert maker.last_made > 0
    maker.stop()
    for area in areas:
        area.close()


def test_waiting_for_a_beginning_does_not_wait_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part is held back until the first has been waited for."""
    plain, first_is_seen = _Part.make, threading.Event()

    def make(self: _Part, go_on: Callable[[], bool]) -> None:
        if self is area.parts[1]:
            assert first_is_seen.wait(10)
        plain(self, go_on)

    maker = PageMaker()
    monkeypatch.setattr(page_maker, "_BESIDE_OTHERS", 0)  # nothing begins before the area is known here
    monkeypatch.setattr(page_maker, "_CORES", 1)
    monkeypatch.setattr(_Part, "make", make)
    area = maker.begin(2 * PART_BYTES)
    maker.wait(area, PART_BYTES)
    assert not area.parts[1].done.is_set()
    first_is_seen.set()
    maker.wait(area, 2 * PART_BYTES)
    area.close()


def test_stopping_ends_what_is_under_way_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, begun, go_on = _Part.make, threading.Event(), threading.Event()
    made: list[_Part] = []

    def make(self: _Part, may_go_on: Callable[[], bool]) -> None:
        def asked() -> bool:
            """Held up in the middle of a part until somebody stops it."""
            steps.append(self)
            if len(steps) == 3:
                begun.set()
                assert go_on.wait(10)
            return may_go_on()

        plain(self, asked)
        made.append(self)

    steps: list[_Part] = []
    monkeypatch.setattr(page_maker, "_BESIDE_OTHERS", 1)
    monkeypatch.setattr(_Part, "make", make)
    maker = PageMaker()
    area = maker.begin(5 * PART_BYTES)
    assert begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    maker.stop()
    assert made == [area.parts[0]] and len(steps) == 3, "not even the part that was being made is made to its end"
    assert not any(part.done.is_set() for part in area.parts)
    area.close()
    again = maker.begin(MIB)
    maker.wait(again, MIB)
    again.close()


def test_memory_that_nobody_holds_any_more_is_still_there_while_it_is_made() -> None:
    maker = PageMaker()
    for _ in range(20):
        maker.begin(MIB)
    last = maker.begin(MIB)
    maker.wait(last, MIB)
    maker.stop()
    assert all(part.done.is_set() for part in last.parts)


def test_a_child_does_not_get_it() -> None:
    """Else a page that the device writes to could become the child's alone."""
    maker = PageMaker()
    area = maker.begin(MIB)
    maker.wait(area, MIB)
    child = os.fork()
    if child == 0:
        lines = Path("/proc/self/maps").read_text().splitlines()
        os._exit(any(int(line.split("-")[0], 16) <= area.address < int(line.split("-")[1].split()[0], 16) for line in lines))
    assert os.waitpid(child, 0)[1] == 0
    area.close()


def test_a_thread_that_never_began_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, starts = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        starts.append(self)
        if len(starts) == 1:
            raise KeyboardInterrupt
        plain(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    maker = PageMaker()
    with pytest.raises(KeyboardInterrupt):
        maker.begin(MIB)
    maker.stop()
    area = maker.begin(MIB)
    maker.wait(area, MIB)
    maker.stop()
    area.close()
