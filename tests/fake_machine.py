"""A whole machine over the double of the driver: code and vendor library take memory too, and an engine runs on it. Nothing is computed."""

from dataclasses import replace
from typing import Any, TypeVar

import pytest

import engines
from fake_driver import FakeDriver
from rollkv.config import DualChunk
from rollkv.cuda import device, gemm
from rollkv.cuda.backend import CudaBackend
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.driver import DriverCalls
from rollkv.cuda.nvml import ProcessMemory
from rollkv.cuda.nvrtc import Cubin, CubinCache
from rollkv.engine import Engine
from rollkv.model_config import model_config
from rollkv.startup import load_on
from rollkv.synth import open_model
from rollkv.units import MIB

MODULE_BYTES, LIBRARY_BYTES = 256 << 10, 24 * MIB


class Machine(FakeDriver):
    """A device whose modules, and whose vendor library, take memory. `peak` is the most that was taken."""

    def __init__(self) -> None:
        super().__init__(device_limit=1 << 30)
        self.modules = self.library = self.peak = 0

    def taken(self) -> int:
        used = sum(a.size for a in self.device.values()) + self.modules * MODULE_BYTES + self.library
        self.peak = max(self.peak, used)
        return used

    def cuModuleLoadData(self, image: bytes) -> tuple[int, int]:
        self.modules += 1
        self.taken()
        return 0, self.modules

    def cuMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self.device_limit - self.taken(), self.device_limit

    def cuMemAlloc(self, size: int) -> tuple[int, Any]:
        result = super().cuMemAlloc(size)
        self.taken()
        return result


class Library(gemm.Gemm):
    """Stands for cuBLAS: takes memory, and keeps the products it was asked for."""

    machine: Machine
    products: list[gemm.Product]

    def __init__(self, stream: Any, workspace: DeviceArray) -> None:
        self._handle = None
        self.machine.library = LIBRARY_BYTES
        self.machine.taken()

    def use_workspace(self, workspace: DeviceArray) -> None:
        held = [(base, base + a.size) for base, a in self.machine.device.items()]
        assert any(low <= workspace.ptr and workspace.ptr + workspace.nbytes <= high for low, high in held)

    def multiply(self, x16: DeviceArray, weight16: DeviceArray, out: DeviceArray, *, first_column: int = 0) -> None:
        self.products.append(gemm.Product(*x16.shape, weight16.shape[0], out.shape[1]))  # type: ignore[call-arg]


MachineT = TypeVar("MachineT", bound=Machine)


def install(monkeypatch: pytest.MonkeyPatch, made: MachineT) -> MachineT:
    """Has backends over `made` need neither compiler nor vendor library."""
    monkeypatch.setattr(Library, "machine", made, raising=False)
    monkeypatch.setattr(Library, "products", [], raising=False)
    monkeypatch.setattr(gemm, "Gemm", Library)
    monkeypatch.setattr(CubinCache, "get", lambda self, source, expressions, arch: Cubin(b"", {e: e for e in expressions}, ""))
    monkeypatch.setattr(device, "_param_sizes", lambda calls, function: None)
    monkeypatch.setattr(ProcessMemory, "used_bytes", lambda self: None)
    monkeypatch.setattr(ProcessMemory, "device_used_bytes", lambda self: None)
    return made


def engine(machine: Machine, path: Any, cap: int | None = None, *, dual_chunk: DualChunk | None = None, **options: Any) -> Engine:
    with open_model(path) as file:
        backend = CudaBackend(cap_bytes=cap, calls=DriverCalls(machine))
        cache = engines.cache(**options)
        config = engines.with_dual_chunk(model_config(file), dual_chunk)
        return load_on(backend, file, config, cache if cap is None else replace(cache, residency="auto"), cap)
