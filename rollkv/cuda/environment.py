"""What `rollkv --env` tells about the machine: versions, driver, devices, compiler. Never raises: what cannot be found out says why."""

import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable
from typing import Any

from rollkv.cuda.driver import MIN_CAPABILITY, DeviceFacts, DriverCalls, device_facts, open_driver
from rollkv.cuda.nvrtc import arch_name, default_cache_dir, find_csrc, nvrtc_version

PACKAGES = (
    "rollkv",
    "numpy",
    "gguf",
    "tokenizers",
    "jinja2",
    "cuda-python",
    "cuda-bindings",
    "cuda-pathfinder",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvmath-python",
)


def probe(calls: DriverCalls | None = None) -> dict[str, Any]:
    """JSON-ready facts by name; a value that could not be found out is a string that begins with "error: "."""
    calls = calls or DriverCalls()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "driver_cuda": _guarded(lambda: ".".join(map(str, open_driver(calls)))),
        "devices": _guarded(lambda: _devices(calls)),
        "nvrtc": _guarded(lambda: ".".join(map(str, nvrtc_version()))),
        "csrc": _guarded(lambda: str(find_csrc())),
        "kernel_cache": _guarded(lambda: str(default_cache_dir())),
        "kernel_cache_writable": _guarded(_cache_writable),
    }


def _guarded(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:
        return f"error: {error}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except Exception:
        return None


def _devices(calls: DriverCalls) -> list[dict[str, Any]]:
    version = open_driver(calls)
    return [_describe(device_facts(calls, index, version)) for index in range(int(calls("cuDeviceGetCount")))]


def _describe(facts: DeviceFacts) -> dict[str, Any]:
    return {
        "index": facts.index,
        "name": facts.name,
        "compute_capability": ".".join(map(str, facts.capability)),
        "arch": arch_name(*facts.capability),
        "usable": facts.capability >= MIN_CAPABILITY,
        "memory_bytes": facts.total_bytes,
        "multiprocessors": facts.num_sms,
        "pci_bus_id": facts.pci_bus_id,
    }


def _cache_writable() -> bool:
    """Whether a file can be made in the directory, or in its nearest existing parent; leaves nothing behind."""
    place = default_cache_dir()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError:
        return False
