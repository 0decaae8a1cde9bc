"""Whatever call of the driver fails, or is interrupted: one error of one line, everything given back, and the next run works. Needs no GPU."""

import json
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines
from fake_machine import Library, Machine, install
from rollkv.cli.main import main
from rollkv.cuda import backend, device, loading, pinned
from rollkv.cuda.driver import DriverCalls
from rollkv.cuda.nvrtc import Cubin, CubinCache
from rollkv.errors import DeviceError, OutOfMemoryError, RollkvError
from rollkv.machine_rates import PcieLink
from rollkv.startup import load
from rollkv.units import MIB

OUT_OF_MEMORY, ILLEGAL_ADDRESS, LAUNCH_FAILED = 2, 700, 719

# What is taken, by the call that gives it back.
GIVES_BACK = {
    "cuMemFree": "cuMemAlloc",
    "cuMemHostUnregister": "cuMemHostRegister",
    "cuModuleUnload": "cuModuleLoadData",
    "cuEventDestroy": "cuEventCreate",
    "cuStreamDestroy": "cuStreamCreate",
    "cuGraphDestroy": "cuStreamEndCapture",
    "cuGraphExecDestroy": "cuGraphInstantiate",
    "cuDevicePrimaryCtxRelease": "cuDevicePrimaryCtxRetain",
}
TAKES = tuple(GIVES_BACK.values())


@dataclass(frozen=True)
class Fault:
    """The nth call of a name, counted from 0, fails with a status, and every later one too if the device is `lost`; or it is interrupted,
    before it does anything or, if `late`, when it has done it."""

    name: str = ""
    nth: int = 0
    status: int = 0
    lost: bool = False
    interrupts: bool = False
    late: bool = False


class FaultyMachine(Machine):
    """Has one fault; counts the calls, and what was taken and not yet given back."""

    def __init__(self) -> None:
        super().__init__()
        self.aim(Fault())

    def aim(self, fault: Fault) -> None:
        self.fault = fault
        self.seen: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.hits = 0

    def check_that_nothing_is_left(self) -> None:
        assert not self.device and not self.pinned and not any(self.held.values()), (self.fault, self.held)

    def interfere(self, name: str) -> int | None:
        fault, count = self.fault, self.seen[name]
        self.seen[name] += 1
        hit = (name == fault.name and count == fault.nth) or (fault.lost and self.hits > 0)
        self.hits += hit
        if hit and fault.interrupts and not fault.late:
            raise KeyboardInterrupt
        if name in GIVES_BACK:
            self.held[GIVES_BACK[name]] -= 1
        if hit and not fault.interrupts:
            return fault.status
        return None

    def succeeded(self, name: str) -> None:
        fault = self.fault
        if name in TAKES:
            self.held[name] += 1
        if name == "cuDevicePrimaryCtxRelease" and fault.interrupts and fault.name in (*TAKES, *GIVES_BACK):
            # Nobody knows of what an interrupted call took, or of what one was about to give back: it goes with the context.
            self.device.clear()
            self.pinned.clear()
            self.held.clear()
        if name == fault.name and self.seen[name] == fault.nth + 1 and fault.interrupts and fault.late:
            raise KeyboardInterrupt

    def _allocate(self, where: dict[int, np.ndarray], size: int, limit: int) -> tuple[int, Any]:
        """Zeros: since nothing is computed, every choice is then token 0 of finite logits."""
        room: np.ndarray = np.zeros(size + 512, np.uint8)
        start = -room.ctypes.data % 512
        memory = where[room.ctypes.data + start] = room[start : start + size]
        return 0, memory.ctypes.data


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FaultyMachine:
    made = install(monkeypatch, FaultyMachine())
    monkeypatch.setattr(backend, "DriverCalls", partial(DriverCalls, made))
    monkeypatch.setattr(pinned, "SLOT_BYTES", MIB)  # touching 96 MiB takes longer than all else here
    return made


def _run() -> list[int]:
    """Load, prefill, steps that are recorded, a smaller plan, and more of them. A window of two pages, so the tail is streamed."""
    cache = engines.cache(160, ubatch=48, window=32, kv="f16")
    with load("synth:tiny:Q4_K", cache, backend="cuda") as engine:
        ids = list(engine.generate_ids([1] * 100, 24))
        engine.replan(replace(cache, window_cells=16))
        return ids + list(engine.generate_ids([1] * 60, 4))


def _counted(machine: FaultyMachine) -> Counter[str]:
    """The calls of a run in which nothing fails."""
    machine.aim(Fault())
    assert _run() == [0] * 28
    machine.check_that_nothing_is_left()
    return machine.seen


def _occurrences(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def _failure(machine: FaultyMachine, fault: Fault) -> RollkvError | None:
    """What the run ends with, having given everything back."""
    machine.aim(fault)
    try:
        _run()
    except RollkvError as error:
        text = str(error)
        assert text and "\n" not in text and ("CUDA" in text or "memory" in text), text
        return error
    finally:
        assert machine.hits, fault
        machine.check_that_nothing_is_left()
    return None


@pytest.mark.parametrize("lost", [False, True], ids=["once", "lost"])
def test_whatever_call_fails(machine: FaultyMachine, lost: bool) -> None:
    """Only what gives back may fail without a word, and the wait before it."""
    for name, count in _counted(machine).items():
        for nth in _occurrences(count)[: 2 if lost else 3]:
            error = _failure(machine, Fault(name, nth, LAUNCH_FAILED if lost else ILLEGAL_ADDRESS, lost=lost))
            at_the_end = name in GIVES_BACK or (name == "cuStreamSynchronize" and nth == count - 1)
            assert isinstance(error, DeviceError) if not at_the_end else error is None or lost, (name, nth)
            if error is not None and name not in GIVES_BACK:
                words = str(error)
                kernel = re.search(r"CUDA call (\w+)|at the launch of (.+) on grid|failed on stream|driver does not start", words)
                assert kernel is not None and (kernel[1] in (None, name)), (name, nth, words)
    _counted(machine)


def test_whatever_finds_no_memory(machine: FaultyMachine) -> None:
    calls = _counted(machine)
    for name in (*TAKES, "cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch", "cuMemcpyHtoDAsync"):
        for nth in _occurrences(calls[name]):
            error = _failure(machine, Fault(name, nth, OUT_OF_MEMORY))
            if name == "cuMemHostRegister":
                assert error is None, "smaller pieces serve too"
            else:
                assert isinstance(error, OutOfMemoryError) and error.exit_code == 5, (name, nth, error)
    _counted(machine)


@pytest.mark.parametrize("late", [False, True], ids=["before the call", "behind it"])
def test_wherever_an_interrupt_comes(machine: FaultyMachine, late: bool) -> None:
    calls = _counted(machine)
    if not late:
        del calls[
            "cuDevicePrimaryCtxRelease"
        ]  # nobody can tell an interrupt just before it from one behind it, where it would be one too many
    for name, count in calls.items():
        for nth in _occurrences(count):
            machine.aim(Fault(name, nth, interrupts=True, late=late))
            with pytest.raises(KeyboardInterrupt):
                _run()
            machine.check_that_nothing_is_left()
    _counted(machine)


@pytest.mark.parametrize("fails_at", [1, 5, 40])
def test_a_failing_product_is_named(machine: FaultyMachine, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    plain = Library.multiply

    def multiply(self: Library, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        if len(Library.products) == fails_at:
            raise DeviceError("cuBLAS failed in gemm_ex: CUBLAS_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(Library, "multiply", multiply)
    with pytest.raises(DeviceError, match="gemm_ex"):
        _run()
    machine.check_that_nothing_is_left()


# -- while loading -----------------------------------------------------------------------------------------------------------------


def test_an_interrupt_does_not_wait_for_kernels_that_nobody_needs(machine: FaultyMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_slowly(self: CubinCache, source: str, expressions: tuple[str, ...], arch: str) -> Cubin:
        time.sleep(0.02)
        compiled.extend(expressions)
        return Cubin(b"", {e: e for e in expressions}, "")

    kernels = _counted(machine)["cuModuleLoadData"]
    monkeypatch.setattr(device, "_COMPILERS", 1)
    monkeypatch.setattr(CubinCache, "get", compile_slowly)
    machine.aim(Fault("cuModuleLoadData", 0, interrupts=True))
    with pytest.raises(KeyboardInterrupt):
        _run()
    assert 0 < len(compiled) < kernels // 2


@pytest.mark.parametrize("part", [0, 3])
def test_threads_that_fill_slots_have_ended_before_these_are_freed(
    machine: FaultyMachine, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    filling, plain = 0, loading._Piece.fill

    def fill(self: Any, *args: Any) -> Any:
        nonlocal filling
        filling += 1
        time.sleep(0.02 * filling)  # so that one is at work when another has arrived
        try:
            return plain(self, *args)
        finally:
            filling -= 1

    def unregister(self: FaultyMachine, address: int) -> tuple[int]:
        assert not filling
        return Machine.cuMemHostUnregister(self, address)

    parts: list[int] = []

    def interrupted(done: int, total: int) -> None:
        parts.append(done)
        if len(parts) > part:
            raise KeyboardInterrupt

    monkeypatch.setattr(loading, "_THREADS", 2)
    monkeypatch.setattr(loading._Piece, "fill", fill)
    monkeypatch.setattr(FaultyMachine, "cuMemHostUnregister", unregister)
    with pytest.raises(KeyboardInterrupt):
        load("synth:tiny:Q4_K", engines.cache(64), backend="cuda", on_load=interrupted)
    machine.check_that_nothing_is_left()


# -- pinned memory -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room_bytes", [0, MIB // 8, 2 * MIB])
def test_a_tail_that_cannot_be_pinned_leaves_the_slots(machine: FaultyMachine, room_bytes: int) -> None:
    """Down to the slots alone; one warning says what it costs."""
    said: list[str] = []
    machine.pin_limit = pinned.slots_bytes(MIB) + room_bytes
    with load("synth:tiny:Q4_K", engines.cache(8000, ubatch=48, window=32, kv="f16"), backend="cuda", warn=said.append) as engine:
        assert list(engine.generate_ids([1] * 100, 24)) == [0] * 24
        assert not engine.backend.can_record
    (warning,) = said
    assert "can be pinned" in warning and "KV tail, layer" in warning and "9 GB/s" in warning and "one by one" in warning
    machine.check_that_nothing_is_left()


# -- the command line --------------------------------------------------------------------------------------------------------------

GENERATE = ("generate", "-m", "synth:tiny:Q4_K", "--prompt-ids", ",".join(["1"] * 600), "-n", "4", "--window", "256", "--backend", "cuda")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("cuMemAlloc", 1, OUT_OF_MEMORY), 5),
        (Fault("cuModuleLoadData", 3, OUT_OF_MEMORY), 5),
        (Fault("cuLaunchKernel", 100, ILLEGAL_ADDRESS, lost=True), 3),
        (Fault("cuMemcpyHtoDAsync", 20, LAUNCH_FAILED), 3),
        (Fault("cuEventSynchronize", 0, LAUNCH_FAILED, lost=True), 3),
        (Fault("cuMemcpyHtoDAsync", 2, interrupts=True), 130),
        (Fault("cuMemAlloc", 1, interrupts=True, late=True), 130),
    ],
)
def test_the_command_ends_with_one_line(machine: FaultyMachine, capsys: pytest.CaptureFixture[str], fault: Fault, code: int) -> None:
    machine.aim(fault)
    assert main(GENERATE) == code and machine.hits
    out = capsys.readouterr()
    errors = [line for line in out.err.splitlines() if not line.startswith("rollkv: warning")]
    assert "Traceback" not in out.err and out.out == "" and errors[-1].startswith("rollkv: error: ")
    assert sum("error" in line for line in errors) == 1
    machine.check_that_nothing_is_left()


@pytest.mark.parametrize(("link", "slow"), [(PcieLink(5, 16, 5, 16, 1), False), (PcieLink(4, 8, 5, 16), True), (PcieLink(), False)])
def test_the_start_tells_of_link_and_tail(
    machine: FaultyMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], link: PcieLink, slow: bool
) -> None:
    monkeypatch.setattr("rollkv.cuda.nvml.pcie_link", lambda bus: link)
    assert main((*GENERATE, "-v")) == 0
    said = capsys.readouterr().err
    assert f"rollkv: link: {link.words}; 25.0 GB/s (assumed)\n" in said and ("the link runs at PCIe gen4 x8" in said) is slow
    assert re.search(r"rollkv: start .*; tail of [0-9.]+ [KM]iB made at [0-9.]+ GB/s, [0-9.]+ of it waited for\n", said)
    assert main((*GENERATE, "-v", "--window", "4096")) == 0
    assert "made at" not in capsys.readouterr().err, "nothing spills, so nothing is made"


@pytest.mark.parametrize(
    "fault", [Fault("cuMemcpyDtoHAsync", 5, interrupts=True), Fault("cuMemcpyDtoHAsync", 5, ILLEGAL_ADDRESS, lost=True)]
)
def test_no_half_written_logits_stay(machine: FaultyMachine, tmp_path: Path, fault: Fault) -> None:
    kept = tmp_path / "kept.npz"
    command = (
        "logit-equiv",
        "-m",
        str(engines.FIXTURES / "llama.gguf"),
        "--tokens",
        "200",
        "--ubatch",
        "16",
        "--backend",
        "cuda",
        "--save",
        str(kept),
    )
    machine.aim(fault)
    assert main(command) == (130 if fault.interrupts else 3) and machine.hits
    assert list(tmp_path.iterdir()) == []
    machine.check_that_nothing_is_left()


@pytest.mark.parametrize("nth", [30, 60])
def test_rows_of_needles_are_whole(machine: FaultyMachine, tmp_path: Path, nth: int) -> None:
    out = tmp_path / "rows.jsonl"
    command = ("needle", "-m", str(engines.FIXTURES / "llama.gguf"), "--lengths", "400,600", "--depths", "0,50,100", "--backend", "cuda")
    machine.aim(Fault("cuMemcpyDtoHAsync", nth, interrupts=True))
    assert main((*command, "--out", str(out))) == 130 and machine.hits
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert 0 < len(rows) < 6 and out.read_text().endswith("\n")
    machine.check_that_nothing_is_left()
