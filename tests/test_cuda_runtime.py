"""The CUDA runtime against a double of the driver: what is told apart, accounted, packed and copied. Needs no GPU."""

import ctypes
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_driver import FakeDriver
from rollkv import page_maker
from rollkv.backend import Loadable, PageRun, Stream
from rollkv.cuda.backend import CudaBackend
from rollkv.cuda.context import Context
from rollkv.cuda.copies import Copies, Events, Notes, SlotRing, pieces
from rollkv.cuda.device import DeviceArray, Launcher, Pointer, TensorMap, check_array
from rollkv.cuda.driver import DriverCalls, find_device
from rollkv.cuda.environment import probe
from rollkv.cuda.memory import GRANULE_BYTES, DeviceMemory
from rollkv.cuda.nvml import ProcessMemory, pcie_link
from rollkv.cuda.nvrtc import CubinCache, KernelError, KernelSpec
from rollkv.cuda.pinned import (
    NUM_NOTES,
    NUM_SLOTS,
    SLOT_BYTES,
    HostChunk,
    HostPages,
    PinnedMemory,
    slots_bytes,
)
from rollkv.errors import DeviceError, OutOfMemoryError
from rollkv.gguf_header import TensorData
from rollkv.machine_rates import PcieLink
from rollkv.units import MIB

ADD = KernelSpec("add.cu", "add<4, 256>")


class _NoLibrary(FakeDriver):
    def cuDriverGetVersion(self) -> tuple[int, int]:
        raise RuntimeError("Failed to dlopen libcuda.so.1")


def _failing(status: int) -> FakeDriver:
    driver = FakeDriver()
    driver.fail["cuInit"] = status
    return driver


# -- what is wrong with the machine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "index", "words"),
    [
        (_NoLibrary(), 0, ("no NVIDIA driver library", "--backend host")),
        (FakeDriver(version=12080), 0, ("CUDA 12.8", "CUDA 13.2", "update the driver", "cuda-python<13")),
        (_failing(100), 0, ("finds no GPU", "CUDA_VISIBLE_DEVICES")),
        (FakeDriver(devices=0), 0, ("finds no GPU", "CUDA_VISIBLE_DEVICES")),
        (_failing(34), 0, ("stub",)),
        (_failing(803), 0, ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "nvidia-smi")),
        (FakeDriver(capability=(7, 5)), 0, ("Fake GPU", "7.5", "8.0")),
        (FakeDriver(devices=2), 2, ("--device 2", "devices 0 to 1")),
        (FakeDriver(devices=1), -1, ("--device -1", "device 0 is the only one")),
    ],
)
def test_unusable_machines_are_told_apart(driver: FakeDriver, index: int, words: tuple[str, ...]) -> None:
    with pytest.raises(DeviceError) as caught:
        find_device(DriverCalls(driver), index)
    assert caught.value.exit_code == 3
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_usable_device() -> None:
    facts = find_device(DriverCalls(FakeDriver(version=13010)), 0)
    assert (facts.name, facts.capability, facts.num_sms, facts.driver_version) == ("Fake GPU", (9, 0), 132, (13, 1))


def test_a_failing_call_names_function_and_status() -> None:
    driver = FakeDriver()
    driver.fail["cuMemGetInfo"] = 700
    with pytest.raises(DeviceError, match="loading x: the CUDA call cuMemGetInfo failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        DriverCalls(driver)("cuMemGetInfo", what="loading x")


@pytest.mark.parametrize("driver", [FakeDriver(), FakeDriver(devices=0), _NoLibrary(), _failing(803)])
def test_probe_never_raises(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLKV_CACHE_DIR", "/proc/no/such/place")
    facts = probe(DriverCalls(driver))
    assert facts["python"] and facts["packages"]["numpy"] and facts["kernel_cache_writable"] is False
    if type(driver) is FakeDriver and "cuInit" not in driver.fail:
        assert [d["arch"] for d in facts["devices"]] == ["sm_90a"] * driver.devices
    else:
        assert facts["devices"].startswith("error: ")


def test_importing_the_backend_needs_no_driver() -> None:
    subprocess.run([sys.executable, "-c", "import rollkv.cuda.context, rollkv.cuda.device, rollkv.cuda.copies"], check=True, timeout=60)


# -- context and memory ------------------------------------------------------------------------------------------------------------


def test_context_without_memory_and_after_a_failure() -> None:
    driver = FakeDriver()
    facts = find_device(DriverCalls(driver), 0)
    driver.fail["cuDevicePrimaryCtxRetain"] = 2
    with pytest.raises(OutOfMemoryError, match="Fake GPU"):
        Context(DriverCalls(driver), facts)
    driver.fail = {"cuStreamCreate": 700}
    with pytest.raises(DeviceError):
        Context(DriverCalls(driver), facts)
    assert driver.calls[-1][0] == "cuDevicePrimaryCtxRelease"


def test_a_failed_device_is_named_with_the_last_kernel_and_closes() -> None:
    driver = FakeDriver()
    context = Context(DriverCalls(driver), find_device(DriverCalls(driver), 0))
    driver.fail = {"cuStreamSynchronize": 700, "cuStreamDestroy": 700}
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS.*glu<Silu, 4, 256>"):
        context.synchronize("glu<Silu, 4, 256>")
    context.close()
    context.close()
    assert [name for name, _ in driver.calls].count("cuDevicePrimaryCtxRelease") == 1


def _memory(driver: FakeDriver, cap: int | None = None) -> DeviceMemory:
    return DeviceMemory(DriverCalls(driver), cap, lambda: sum(a.size for a in driver.device.values()))


def test_clear_keeps_the_weights_and_nothing_else() -> None:
    driver = FakeDriver()
    values = np.arange(1000, dtype=np.float32)
    with CudaBackend(calls=DriverCalls(driver)) as backend:
        backend.reserve(weight_bytes=2 * MIB, run_bytes=10 * MIB)
        backend.reserve_linear(1, 64, 64, MIB)
        (vector,) = backend.load([Loadable((TensorData("norm", "F32", (1000,), values.view(np.uint8), "file"),))])
        slots = backend.pinned_bytes
        assert slots > 0
        for run_bytes in (6 * MIB, 14 * MIB):
            backend.empty("window", (4, MIB), "u8")
            backend.host_pages("tail", 3, MIB)
            assert len(driver.device) == 2, "everything lies in what was reserved"
            backend.clear()
            assert [a.size for a in driver.device.values()] == [2 * MIB] and len(driver.pinned) == 1 and backend.pinned_bytes == slots
            assert set(backend.device_bytes) == {"context", "modules", "norm"}
            backend.reserve(run_bytes=run_bytes)
            assert sorted(a.size for a in driver.device.values()) == sorted([2 * MIB, run_bytes])
            np.testing.assert_array_equal(backend.read(vector), values)
    assert not driver.device and not driver.pinned


def test_arrays_share_slabs_and_do_not_overlap() -> None:
    driver, random = FakeDriver(), np.random.default_rng(1)
    memory = _memory(driver)
    memory.reserve(5 * MIB)
    sizes = [int(n) for n in random.integers(1, MIB // 2, 40)]
    spans = sorted((memory.take("x", size), size) for size in sizes)
    assert all(address % 256 == 0 for address, _ in spans)
    assert all(a + size <= b for (a, size), (b, _) in zip(spans, spans[1:], strict=False))
    held = [(base, base + a.size) for base, a in driver.device.items()]
    assert all(any(low <= a and a + size <= high for low, high in held) for a, size in spans)
    assert memory.accounts == {"x": sum(sizes)}
    assert memory.slab_bytes == sum(a.size for a in driver.device.values())
    assert all(a.size % GRANULE_BYTES == 0 for a in driver.device.values())


def test_a_reserved_arena_takes_exactly_what_was_planned() -> None:
    driver = FakeDriver()
    memory = _memory(driver)
    memory.reserve(10 * 1024 + 256)
    for _ in range(10):
        memory.take("row", 1000)
    memory.take("last", 200)
    assert len(driver.device) == 1


@pytest.mark.parametrize(("limit", "cap", "words"), [(8 * MIB, None, "no cap"), (1 << 30, 8 * MIB, "cap 8.0 MiB")])
def test_too_little_device_memory_is_refused_by_name(limit: int, cap: int | None, words: str) -> None:
    driver = FakeDriver(device_limit=limit)
    memory = _memory(driver, cap)
    memory.take("small", 5 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        memory.take("attention.state", 3 * MIB)
    text = str(caught.value)
    assert "attention.state" in text and "3.0 MiB" in text and words in text and "free" in text and caught.value.exit_code == 5
    memory.close()
    memory.close()
    assert driver.device == {}


def test_a_lost_device_is_no_lack_of_memory() -> None:
    driver = FakeDriver()
    driver.fail["cuMemAlloc"] = driver.fail["cuMemHostRegister"] = 700
    with pytest.raises(DeviceError):
        _memory(driver).take("x", 1)
    with pytest.raises(DeviceError):
        PinnedMemory(DriverCalls(driver), MIB, pytest.fail).pages("x", 1, 4096)()


def _check_chunks(pages: HostPages, num_pages: int) -> None:
    assert [chunk.first_page for chunk in pages.chunks] == [sum(c.num_pages for c in pages.chunks[:i]) for i in range(len(pages.chunks))]
    assert sum(chunk.num_pages for chunk in pages.chunks) == pages.num_pages == num_pages


def test_pinned_chunks_hold_whole_pages() -> None:
    driver = FakeDriver()
    memory = PinnedMemory(DriverCalls(driver), 10 * MIB, pytest.fail)
    pages = memory.pages("tail", 23, 3 * MIB)()
    _check_chunks(pages, 23)
    assert [chunk.num_pages for chunk in pages.chunks] == [3] * 7 + [2]
    assert memory.pinned_bytes == 69 * MIB + slots_bytes(SLOT_BYTES)
    large = memory.pages("one page is larger than a chunk", 2, 12 * MIB)()
    assert [chunk.num_pages for chunk in large.chunks] == [1, 1]
    memory.close()
    memory.close()
    assert driver.pinned == {} and memory.pinned_bytes == 0


def test_pinning_falls_back_to_smaller_chunks_and_then_says_that_memory_is_pageable() -> None:
    driver, said = FakeDriver(), []
    driver.pin_limit = 45 * MIB
    memory = PinnedMemory(DriverCalls(driver), 32 * MIB, said.append)
    memory.slots()
    pages = memory.pages("KV tail, layer 3", 30, MIB)()
    _check_chunks(pages, 30)
    assert [chunk.pinned for chunk in pages.chunks] == [True] * (len(pages.chunks) - 1) + [False]
    assert sum(chunk.num_pages for chunk in pages.chunks if chunk.pinned) >= 9
    assert memory.has_pageable
    memory.pages("KV tail, layer 4", 4, MIB)()
    assert len(said) == 1 and "KV tail, layer 3" in said[0] and "pinned buffer" in said[0]


class _Refusing(FakeDriver):
    """Pins only as `allows(number of the call, its bytes)` says."""

    def __init__(self, allows: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.allows = allows

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        number = sum(name == "cuMemHostRegister" for name, _ in self.calls)
        return super().cuMemHostRegister(address, size, flags) if self.allows(number, size) else (304,)


@pytest.mark.parametrize(
    ("allows", "pages"),
    [
        (lambda number, size: size <= 8 * MIB, [8] * 5),
        (
            lambda number, size: number != 4,
            [16, 16, 4, 4],
        ),  # the slots are the first, so this is the third chunk, which was to take what is left
    ],
    ids=["large chunks", "third chunk"],
)
def test_refused_chunks_are_asked_for_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch, allows: Any, pages: list[int]) -> None:
    """Everything is pinned at last, so there is nothing to warn of."""
    monkeypatch.setattr("rollkv.cuda.pinned.SLOT_BYTES", MIB // 2)
    driver = _Refusing(allows)
    memory = PinnedMemory(DriverCalls(driver), 16 * MIB, pytest.fail)
    tail = memory.pages("tail", 40, MIB)()
    _check_chunks(tail, 40)
    assert [chunk.num_pages for chunk in tail.chunks] == pages and not memory.has_pageable
    memory.close()
    assert not driver.pinned


def test_a_pageable_tail_is_told_with_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks refused: all pages behind the slots."""
    monkeypatch.setattr("rollkv.cuda.pinned.SLOT_BYTES", MIB // 2)
    said: list[str] = []
    memory = PinnedMemory(DriverCalls(_Refusing(lambda number, _: number == 1)), 16 * MIB, said.append)
    (chunk,) = memory.pages("KV tail, layer 0", 40, MIB)().chunks
    assert not chunk.pinned and memory.pinned_bytes == slots_bytes(MIB // 2)
    assert len(said) == 1 and "40.0 MiB of KV tail, layer 0" in said[0] and "at about 9 GB/s" in said[0] and "\n" not in said[0]


def _names(driver: FakeDriver) -> list[str]:
    return [name for name, _ in driver.calls]


def test_pages_are_pinned_by_whoever_needs_some_first() -> None:
    driver, told = FakeDriver(), []
    memory = PinnedMemory(DriverCalls(driver), 8 * MIB, pytest.fail, on_progress=lambda *step: told.append(step))
    first, second = memory.pages("layer 0", 12, MIB), memory.pages("layer 1", 20, MIB)
    assert _names(driver).count("cuMemHostRegister") == 1 and memory.made is None, "the slots alone"
    _check_chunks(second(), 20)
    assert told == [(done * MIB, 32 * MIB) for done in (8, 12, 20, 28, 32)]
    calls = len(driver.calls)
    _check_chunks(first(), 12)
    assert first() is first() and len(driver.calls) == calls and len(told) == 5
    assert memory.made is not None and memory.made.num_bytes == 32 * MIB and 0 <= memory.made.waited_seconds <= memory.made.seconds
    memory.free_pages()
    assert memory.made is None and memory.pinned_bytes == slots_bytes(SLOT_BYTES) and len(driver.pinned) == 1
    memory.close()
    assert not driver.pinned


def test_idle_time_is_not_counted() -> None:
    """Made by 3 s on the clock, asked for at 0, needed at 100, pinned by 101."""
    now = [0.0]
    memory = PinnedMemory(DriverCalls(FakeDriver()), 8 * MIB, pytest.fail, clock=lambda: now[0])
    pages = memory.pages("tail", 12, MIB)
    memory._maker.wait(memory._areas[0], 12 * MIB)
    memory._maker.stop()
    memory._maker.last_made = 3.0

    def progress(done: int, total: int) -> None:
        now[0] = 101.0

    now[0], memory._on_progress = 100.0, progress
    pages()
    assert memory.made is not None and (memory.made.seconds, memory.made.waited_seconds) == (4.0, 1.0)
    memory.close()


class _Interrupted(FakeDriver):
    """An interrupt comes with one of the calls that pin."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def interfere(self, name: str) -> int | None:
        if name == "cuMemHostRegister" and _names(self).count(name) == self.number:
            self.number = 0
            raise KeyboardInterrupt
        return None


@pytest.mark.parametrize("number", [2, 3, 5])
def test_waiting_for_pages_may_be_interrupted_and_goes_on(number: int) -> None:
    driver = _Interrupted(number)
    memory = PinnedMemory(DriverCalls(driver), 8 * MIB, pytest.fail)
    first, second = memory.pages("layer 0", 20, MIB), memory.pages("layer 1", 9, MIB)
    with pytest.raises(KeyboardInterrupt):
        first()
    _check_chunks(first(), 20)
    _check_chunks(second(), 9)
    spans = sorted((address, memory.size) for address, memory in driver.pinned.items())
    assert all(a + size <= b for (a, size), (b, _) in zip(spans, spans[1:], strict=False)) and not memory.has_pageable
    assert sum(size for _, size in spans) == 29 * MIB + slots_bytes(SLOT_BYTES)
    memory.close()
    assert not driver.pinned


@pytest.mark.parametrize("ends", ["free_pages", "close"])
def test_pages_that_nobody_needed_are_given_back(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While threads are at work on them: they end first."""
    plain, working = page_maker._Part.make, []

    def make(self: Any, go_on: Callable[[], bool]) -> None:
        working.append(self)
        time.sleep(0.01)
        plain(self, go_on)
        working.remove(self)

    closed = page_maker.Area.close

    def close(self: Any) -> None:
        assert not working
        closed(self)

    monkeypatch.setattr(page_maker, "PART_BYTES", MIB)
    monkeypatch.setattr(page_maker._Part, "make", make)
    monkeypatch.setattr(page_maker.Area, "close", close)
    driver = FakeDriver()
    memory = PinnedMemory(DriverCalls(driver), 8 * MIB, pytest.fail)
    for layer in range(10):
        memory.pages(f"layer {layer}", 16, MIB)
    getattr(memory, ends)()
    assert not memory._maker._parts and not memory._areas and len(driver.pinned) == (ends == "free_pages")
    memory.close()


def test_no_two_chunks_share_a_page_of_the_system() -> None:
    driver = FakeDriver()
    memory = PinnedMemory(DriverCalls(driver), 40_000, pytest.fail)
    tail = memory.pages("tail", 50, 3000)()
    _check_chunks(tail, 50)
    chunks = [(address // 4096, (address + memory.size - 1) // 4096) for address, memory in sorted(driver.pinned.items())]
    assert all(end < begin for (_, end), (begin, _) in zip(chunks, chunks[1:], strict=False)) and len(tail.chunks) == 1
    assert [chunk.num_pages for chunk in memory.pages("tail", 1100, 3000)().chunks] == [512, 512, 76]


def test_without_memory_the_label_is_named() -> None:
    memory = PinnedMemory(DriverCalls(FakeDriver()), MIB, pytest.fail)
    memory.slots()
    with pytest.raises(OutOfMemoryError, match="KV tail, layer 7 needs another"):
        memory.pages("KV tail, layer 7", 1 << 42, MIB)


def test_without_any_pinned_memory_the_run_is_refused() -> None:
    driver = FakeDriver()
    driver.fail["cuMemHostRegister"] = 304
    with pytest.raises(OutOfMemoryError, match="pinned"):
        PinnedMemory(DriverCalls(driver), MIB, lambda _: None).pages("tail", 3, 4096)


# -- copies ------------------------------------------------------------------------------------------------------------------------


class _Copying:
    """Pool, tail and copies over the double."""

    def __init__(
        self, slots: int, num_pages: int, page_bytes: int, *, chunk_pages: int = 5, pin_limit: int = 1 << 40, slot_bytes: int | None = None
    ):
        self.driver = FakeDriver()
        calls = DriverCalls(self.driver)
        self.streams = {stream: 100 + stream.value for stream in Stream}
        self.memory = PinnedMemory(calls, chunk_pages * page_bytes, lambda _: None)
        if slot_bytes is not None:
            self.driver.pin_limit = slots_bytes(slot_bytes)
            self.memory.slots()
            self.driver.pin_limit = pin_limit
        self.tail = self.memory.pages("tail", num_pages, page_bytes)()
        address = int(calls("cuMemAlloc", slots * page_bytes))
        self.pool = DeviceArray(address, (slots, page_bytes), "u8")
        self.values = self.driver.device[address].reshape(slots, page_bytes)
        self.events = Events(calls, self.streams)
        self.copies = Copies(calls, self.streams, self.events, SlotRing(self.events, self.memory))

    def page(self, index: int) -> np.ndarray:
        ((address, count, _),) = self.tail.stretches(index, 1)
        assert count == 1
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.tail.page_bytes).from_address(address))


def _run(pool: DeviceArray, first_slot: int, first_page: int, num_pages: int) -> PageRun:
    return PageRun(pool, pool.shape[0], first_slot, first_page, num_pages)


def test_pieces_are_cut_at_ring_wraps_and_chunk_borders_only() -> None:
    host = HostPages(16, 12, (HostChunk(1000, 0, 5, True), HostChunk(9000, 5, 7, True)))
    pool = DeviceArray(64, (8, 16), "u8")
    got = [(p.device, p.host, p.num_bytes) for p in pieces(_run(pool, 6, 1, 7), host)]
    assert got == [(64 + 6 * 16, 1016, 32), (64, 1048, 32), (64 + 32, 9000, 48)]
    assert [(p.host, p.num_bytes) for p in pieces(_run(pool, 0, 5, 7), host)] == [(9000, 112)]
    with pytest.raises(IndexError, match="12"):
        list(pieces(_run(pool, 0, 10, 3), host))
    with pytest.raises(ValueError, match="16"):
        list(pieces(_run(DeviceArray(64, (8, 32), "u8"), 0, 0, 1), host))


PLACES: list[dict[str, int | None]] = [
    {"page_bytes": 256},  # pinned
    {"page_bytes": 3000, "slot_bytes": MIB // 2, "pin_limit": 0},  # pageable, pages smaller than a slot
    {"page_bytes": 3 * MIB + 77, "slot_bytes": MIB // 2, "pin_limit": 0},  # pageable, a page takes several slots
]


@pytest.mark.parametrize("place", PLACES, ids=["pinned", "pageable", "pageable, large pages"])
def test_copies_move_every_byte(place: dict[str, int]) -> None:
    random = np.random.default_rng(7)
    c = _Copying(4, 9, **place)
    assert all(chunk.pinned == ("pin_limit" not in place) for chunk in c.tail.chunks)
    c.values[...] = random.integers(0, 256, c.values.shape)
    before = c.values.copy()
    c.copies.copy_out(_run(c.pool, 3, 4, 4), c.tail)
    for index in range(4):
        np.testing.assert_array_equal(c.page(4 + index), before[(3 + index) % 4])
    c.values[...] = 0
    c.copies.copy_in(_run(c.pool, 1, 5, 3), c.tail)
    np.testing.assert_array_equal(c.values, np.stack([before[3] * 0, before[0], before[1], before[2]]))
    names = {name: args[-1] for name, args in c.driver.calls if name.startswith("cuMemcpy")}
    assert names == {"cuMemcpyDtoHAsync": c.streams[Stream.COPY_OUT], "cuMemcpyHtoDAsync": c.streams[Stream.COPY_IN]}


def test_pinned_copies_are_single_calls_and_never_wait() -> None:
    c = _Copying(8, 20, 64, chunk_pages=20)
    c.driver.calls.clear()
    c.copies.copy_in(_run(c.pool, 0, 3, 8), c.tail)
    assert [name for name, _ in c.driver.calls] == ["cuMemcpyHtoDAsync"]


def test_pages_move_between_pools() -> None:
    c = _Copying(4, 1, 128)
    c.values[...] = np.random.default_rng(3).integers(0, 256, c.values.shape)
    wanted = c.values.copy()
    wanted[3] = wanted[1]
    c.copies.copy_page(c.pool, 1, c.pool, 3)
    np.testing.assert_array_equal(c.values, wanted)
    with pytest.raises(ValueError, match="slot 4"):
        c.copies.copy_page(c.pool, 4, c.pool, 0)


def test_uploads_and_downloads_of_any_size() -> None:
    c = _Copying(1, 1, 4 * MIB, slot_bytes=MIB // 2, pin_limit=MIB)
    for size in (1, MIB, MIB + 1, 3 * MIB + 5):
        values = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
        c.copies.upload(c.pool.ptr, values.ctypes.data, size)
        back = np.zeros(size, np.uint8)
        c.copies.download(c.pool.ptr, back.ctypes.data, size)
        np.testing.assert_array_equal(back, values)


def test_a_slot_is_taken_again_behind_its_event() -> None:
    c = _Copying(1, 1, 64)
    slots = SlotRing(c.events, c.memory)
    taken = [slots.take() for _ in range(NUM_SLOTS)]
    assert [address for _, address in taken] == list(c.memory.slots().addresses)
    with pytest.raises(ValueError, match=f"all {NUM_SLOTS} pinned slots are taken"):
        slots.take()
    slots = SlotRing(c.events, c.memory)
    events = []
    for _ in range(NUM_SLOTS):
        events.append(c.events.record(Stream.COPY_IN))
        slots.busy_until(slots.take()[0], events[-1])
    assert "cuEventSynchronize" not in [name for name, _ in c.driver.calls]
    slots.take()
    assert [args for name, args in c.driver.calls if name == "cuEventSynchronize"] == [(events[0].handle,)]


def test_notes_are_read_behind_the_device() -> None:
    c = _Copying(1, 2, 256)
    notes = Notes(DriverCalls(c.driver), c.streams, c.events, c.memory)
    readers = []
    for number in range(NUM_NOTES):
        c.values[0, :64] = number
        readers.append(notes.read_later(c.pool.ptr, 64))
    assert "cuEventSynchronize" not in [name for name, _ in c.driver.calls], "asking does not wait"
    assert [reader() for reader in readers] == [bytes([number]) * 64 for number in range(NUM_NOTES)]
    assert [name for name, _ in c.driver.calls].count("cuEventSynchronize") == NUM_NOTES
    c.memory.free_pages()
    assert notes.read_later(c.pool.ptr, 8)() == bytes([NUM_NOTES - 1]) * 8
    with pytest.raises(ValueError, match="64"):
        notes.read_later(c.pool.ptr, 65)


def test_events_are_reused_when_nobody_holds_them() -> None:
    c = _Copying(1, 1, 64)
    for _ in range(100):
        event = c.events.record(Stream.COMPUTE)
        c.events.wait(Stream.COPY_IN, event)
    held = [c.events.record(Stream.COPY_OUT) for _ in range(5)]
    assert len({e.handle for e in held}) == 5
    created = [args for name, args in c.driver.calls if name == "cuEventCreate"]
    assert len(created) <= 7
    a, b = c.events.record_timed(Stream.COMPUTE), c.events.record_timed(Stream.COMPUTE)
    assert c.events.elapsed_ms(a, b) == 1.5
    c.events.close()
    c.events.close()
    destroyed = [args for name, args in c.driver.calls if name == "cuEventDestroy"]
    assert len(destroyed) == len(created) + 2


# -- kernels -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launching(tmp_path: Path) -> Callable[..., tuple[FakeDriver, Launcher]]:
    def make(*param_sizes: int) -> tuple[FakeDriver, Launcher]:
        driver = FakeDriver()
        driver.param_sizes = param_sizes
        return driver, Launcher(DriverCalls(driver), "sm_80", dict.fromkeys(Stream, 9), CubinCache(tmp_path))

    return make


@pytest.mark.parametrize(("arch", "overlaps"), [("sm_80", False), ("sm_89", False), ("sm_90a", True), ("sm_90", True), ("sm_120a", True)])
def test_early_kernels_are_launched_early_where_that_exists(tmp_path: Path, arch: str, overlaps: bool) -> None:
    driver = FakeDriver()
    driver.param_sizes = (8, 8, 8)
    launcher = Launcher(DriverCalls(driver), arch, dict.fromkeys(Stream, 9), CubinCache(tmp_path))
    x = DeviceArray(4096, (8,), "f32")
    early = KernelSpec("add.cu", "add<4, 256>", early=True)
    for grid in (1, 2, 1):
        launcher.launch(early, (grid, 1, 1), 256, x, x, np.int64(8), shared_bytes=64)
    launcher.launch(KernelSpec("add.cu", "add<1, 256>"), (1, 1, 1), 256, x, x, np.int64(8))
    assert len(driver.launches) == 4 and len(driver.early) == (3 if overlaps else 0)
    assert [shape[0] for shape, _ in driver.launches] == [1, 2, 1, 1]
    assert driver.launches[0][0] == (1, 1, 1, 256, 1, 1, 64)


def test_arguments_arrive_with_their_bytes(launching: Callable[..., tuple[FakeDriver, Launcher]]) -> None:
    driver, launcher = launching(8, 8, 4, 8, 4, 8, 1, 128)
    array, table = DeviceArray(0x7FFF_1234_5678_9ABC, (3, 4), "f32"), TensorMap(range(128))
    for scale in (1.25, -3.5):  # the second launch takes the short way
        launcher.launch(
            ADD,
            (7, 5, 3),
            96,
            array,
            Pointer(11),
            np.int32(-2),
            np.int64(-(1 << 40)),
            np.float32(scale),
            np.float64(scale),
            np.uint8(200),
            table,
        )
        shape, values = driver.launches[-1]
        assert shape == (7, 5, 3, 96, 1, 1, 0)
        wanted = struct.pack("<QQiqfdB128s", array.ptr, 11, -2, -(1 << 40), scale, scale, 200, table)
        assert b"".join(values) == wanted
    assert launcher.last_launched == ADD.expression
    assert [name for name, _ in driver.calls].count("cuModuleLoadData") == 1


def test_a_map_is_made_once_a_matrix(launching: Callable[..., tuple[FakeDriver, Launcher]]) -> None:
    """1,000 rows of 192 halves at address 4,096, in boxes of 64 rows: three planes of 64 columns, 128 bytes apart."""
    driver, launcher = launching(128)
    for _ in range(2):
        launcher.launch(ADD, (1, 1, 1), 32, launcher.plane_map(4096, 1000, 192, 64))
    assert driver.launches[0] == driver.launches[1] and driver.launches[0][1] == [(4096).to_bytes(8, "little") * 16]
    assert [args for name, args in driver.calls if name == "cuTensorMapEncodeTiled"] == [
        (6, 3, 4096, [64, 1000, 3], [384, 128], [64, 64, 3], [1, 1, 1], 0, 3, 3, 0)
    ]
    assert launcher.plane_map(8192, 1000, 192, 64)[:8] == (8192).to_bytes(8, "little")


@pytest.mark.parametrize(
    "args", [(), (Pointer(1),), (Pointer(1), Pointer(2), np.int32(3)), (Pointer(1), Pointer(2), np.int64(3), np.int32(4))]
)
def test_wrong_arguments_are_refused(launching: Callable[..., tuple[FakeDriver, Launcher]], args: tuple[object, ...]) -> None:
    driver, launcher = launching(8, 8, 8)
    with pytest.raises(KernelError, match="add<4, 256>"):
        launcher.launch(ADD, (1, 1, 1), 32, *args)
    assert driver.launches == []
    with pytest.raises(KernelError, match="argument 2 is a int"):
        launcher.launch(ADD, (1, 1, 1), 32, Pointer(1), Pointer(2), 3)


def test_shared_memory_is_asked_for_once(launching: Callable[..., tuple[FakeDriver, Launcher]]) -> None:
    """Also below 48 KiB: a kernel with 8 KiB of its own could not be launched with 42 KiB more that nobody had asked for."""
    driver, launcher = launching()
    for shared in (0, 43_008, 100_000, 60_000, 100_000, 120_000):
        launcher.launch(ADD, (1, 1, 1), 32, shared_bytes=shared)
    assert [args[-1] for name, args in driver.calls if name == "cuFuncSetAttribute"] == [43_008, 100_000, 120_000]
    driver.fail["cuFuncSetAttribute"] = 1
    with pytest.raises(DeviceError, match="add<4, 256> with 500000 bytes"):
        launcher.launch(ADD, (1, 1, 1), 32, shared_bytes=500_000)


def test_launch_failures(launching: Callable[..., tuple[FakeDriver, Launcher]]) -> None:
    driver, launcher = launching()
    launcher.launch(ADD, (1, 1, 1), 32)
    for status, kind, words in ((1, KernelError, "cannot be launched"), (700, DeviceError, "the kernel before it was add<4, 256>")):
        launcher._launch = lambda *_, status=status: (status,)
        with pytest.raises(kind, match=words):
            launcher.launch(ADD, (1, 1, 1), 32)


def test_kernels_of_another_architecture_are_refused(launching: Callable[..., tuple[FakeDriver, Launcher]]) -> None:
    _, launcher = launching()
    with pytest.raises(KernelError, match="sm_90a only"):
        launcher.prepare([KernelSpec("add.cu", "add<4, 256>", ("sm_90a",))])


def test_prepare_loads_ahead_and_close_unloads(launching: Callable[..., tuple[FakeDriver, Launcher]]) -> None:
    driver, launcher = launching()
    launcher.prepare([ADD, KernelSpec("add.cu", "add<1, 256>"), ADD])
    loaded = [name for name, _ in driver.calls].count("cuModuleLoadData")
    launcher.launch(ADD, (1, 1, 1), 32)
    assert loaded == 2 == [name for name, _ in driver.calls].count("cuModuleLoadData")
    launcher.close()
    launcher.close()
    assert [name for name, _ in driver.calls].count("cuModuleUnload") == 2


def test_array_views() -> None:
    array = DeviceArray(1000, (6, 4), "f32")
    assert array.rows(2) == DeviceArray(1000, (2, 4), "f32") and array.rows(2, 3) == DeviceArray(1048, (2, 4), "f32")
    assert array.view((2, 12)).nbytes == array.nbytes == 96 and array.view((3,), "u8", 93).ptr == 1093
    for bad in (lambda: array.rows(4, 3), lambda: array.rows(-1), lambda: array.view((25,)), lambda: array.view((4,), "u8", 93)):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(KernelError, match=r"glu: up must be f32 \[6, 5\], not f32 \[6, 4\]"):
        check_array("glu", "up", array, (6, 5), "f32")


# -- NVML --------------------------------------------------------------------------------------------------------------------------


class _Nvml:
    """Processes by number with their bytes."""

    def __init__(self, processes: dict[int, int]):
        self.processes = processes

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, handle: object) -> int:
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: object, info: object) -> int:
        info._obj.used = sum(self.processes.values())  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: object, count: object, infos: object) -> int:
        for index, (pid, used) in enumerate(self.processes.items()):
            infos[index].pid, infos[index].used_bytes = pid, used  # type: ignore[index]
        count._obj.value = len(self.processes)  # type: ignore[attr-defined]
        return 0


def test_process_memory_by_own_number_and_by_foreign_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 42)
    nvml = _Nvml({7: 100})
    watch = ProcessMemory("0000:00:00.0", nvml)
    assert watch.used_bytes() is None and watch.device_used_bytes() == 100
    nvml.processes |= {42: 5, 43: 6}
    watch.identify()
    assert watch.used_bytes() == 5
    nvml.processes = {7: 100}
    other = ProcessMemory("0000:00:00.0", nvml)
    nvml.processes |= {9000: 11}  # this process under the number it has outside its container
    other.identify()
    assert other.used_bytes() == 11
    assert ProcessMemory("0000:00:00.0", nvml, pid=7).used_bytes() == 100


def test_process_memory_unknown() -> None:
    nvml = _Nvml({7: 100})
    watch = ProcessMemory("0000:00:00.0", nvml)
    nvml.processes |= {8: 1, 9: 2}  # two came at once: neither can be told to be ours
    watch.identify()
    assert watch.used_bytes() is None
    nvml.processes = {7: (1 << 64) - 1}  # NVML's "not available"
    assert watch.used_bytes() is None


class _Link:
    """An NVML that knows a link: numbers by function; what it lacks, this driver lacks."""

    def __init__(self, **numbers: int) -> None:
        for name, number in numbers.items():
            setattr(self, f"nvmlDeviceGet{name}", partial(self._answer, number))

    @staticmethod
    def _answer(number: int, handle: object, value: object) -> int:
        value._obj.value = number  # type: ignore[attr-defined]
        return 0 if number else 3  # NVML_ERROR_NOT_SUPPORTED

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, handle: object) -> int:
        return 0 if bus == b"0000:00:00.0" else 6


def test_the_link_of_a_card() -> None:
    full = {
        "CurrPcieLinkGeneration": 4,
        "CurrPcieLinkWidth": 8,
        "GpuMaxPcieLinkGeneration": 5,
        "MaxPcieLinkGeneration": 4,
        "MaxPcieLinkWidth": 16,
    }
    assert pcie_link("0000:00:00.0", _Link(**full)) == PcieLink(4, 8, 5, 16)
    del full["GpuMaxPcieLinkGeneration"]  # drivers before 510
    assert pcie_link("0000:00:00.0", _Link(**full | {"CurrPcieLinkWidth": 0})) == PcieLink(4, None, 4, 16)
    assert pcie_link("0000:00:00.0", _Link()) == pcie_link("0000:99:00.0", _Link(**full)) == PcieLink()
