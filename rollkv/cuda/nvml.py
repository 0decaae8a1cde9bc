"""What the driver's management library (NVML) tells: device memory of a process as an observer outside would measure it, and the PCIe link.

NVML comes with every driver; it is called through ctypes, so that no package has to match it. Where it does not tell (some containers
and virtual machines), `ProcessMemory` says None and the caller counts for itself.
"""

import ctypes
import os
from typing import Any

from rollkv.machine_rates import PcieLink
from rollkv.numa import node_of

_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_NOT_AVAILABLE = (1 << 64) - 1
_MAX_PROCESSES = 1024


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of the _v3 functions."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _open(pci_bus_id: str, library: Any) -> tuple[Any, ctypes.c_void_p]:
    """(the library, None where it or the device cannot be had; the device's handle). library: a double, in tests."""
    handle = ctypes.c_void_p()
    try:
        nvml = library if library is not None else ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == _SUCCESS:
            if nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(handle)) == _SUCCESS:
                return nvml, handle
    except (OSError, AttributeError):
        pass
    return None, handle


def pcie_link(pci_bus_id: str, library: Any = None) -> PcieLink:
    """The link of a device now, and the best that the device can do. An idle card may rest at a lower generation: ask right behind copies."""
    nvml, handle = _open(pci_bus_id, library)

    def ask(*names: str) -> int | None:
        for name in names:
            value, function = ctypes.c_uint(), getattr(nvml, name, None)  # of several the first that this driver has
            if function is not None and function(handle, ctypes.byref(value)) == _SUCCESS:
                return int(value.value)
        return None

    return PcieLink(
        generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        max_generation=ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkGeneration"),
        max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        numa_node=node_of(pci_bus_id),
    )


class ProcessMemory:
    """Watches what one process holds on one device: this one, or that of the number `pid`. Make it before that process's context: inside a
    container it may appear under a foreign process number, and is then recognised as the one that came with the context."""

    def __init__(self, pci_bus_id: str, library: Any = None, pid: int | None = None):
        self._pid = os.getpid() if pid is None else pid
        self._library, self._handle = _open(pci_bus_id, library)
        self._pids_before = set(self._processes() or {})

    def identify(self) -> None:
        """Call once the context exists."""
        processes = self._processes() or {}
        newcomers = set(processes) - self._pids_before
        if self._pid not in processes and len(newcomers) == 1:
            self._pid = newcomers.pop()

    def used_bytes(self) -> int | None:
        """Device memory of the process, everything included; None where NVML does not tell."""
        return (self._processes() or {}).get(self._pid)

    def device_used_bytes(self) -> int | None:
        """Device memory of all processes together."""
        info = _MemoryInfo()
        if self._library is None or self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(info)) != _SUCCESS:
            return None
        return int(info.used)

    def _processes(self) -> dict[int, int] | None:
        if self._library is None:
            return None
        count = ctypes.c_uint(_MAX_PROCESSES)
        infos = (_ProcessInfo * _MAX_PROCESSES)()
        try:
            status = self._library.nvmlDeviceGetComputeRunningProcesses_v3(self._handle, ctypes.byref(count), infos)
        except AttributeError:  # drivers before 510
            return None
        if status not in (_SUCCESS, _INSUFFICIENT_SIZE):
            return None
        return {int(p.pid): int(p.used_bytes) for p in infos[: min(count.value, _MAX_PROCESSES)] if p.used_bytes != _NOT_AVAILABLE}
