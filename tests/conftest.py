"""Marker `gpu`, the fixture `cuda`, and a header that names the versions a run was made with."""

import importlib.metadata
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

_PACKAGES = ("numpy", "gguf", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas", "nvmath-python")


@cache
def _gpu() -> tuple[Any, str]:
    """(facts of device 0, "") or (None, why there is none)."""
    from rollkv.cuda.driver import DriverCalls, find_device
    from rollkv.cuda.nvrtc import nvrtc_version
    from rollkv.errors import DeviceError

    try:
        nvrtc_version()
        return find_device(DriverCalls(), 0), ""
    except DeviceError as error:
        return None, str(error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and _gpu()[0] is None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no usable GPU: {_gpu()[1]}"))


def pytest_report_header() -> str:
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} missing")
    facts, reason = _gpu()
    device = f"{facts.name}, driver for CUDA {'.'.join(map(str, facts.driver_version))}" if facts else f"none ({reason})"
    return f"packages: {', '.join(versions)}\nGPU: {device}"


@pytest.fixture
def cuda() -> Iterator[Any]:
    """A CudaBackend on device 0, with room for products of up to 512 rows of 4096 columns."""
    from rollkv.cuda.backend import CudaBackend

    with CudaBackend(0) as backend:
        backend.reserve_linear(512, 4096, 4096, 16 << 20)
        yield backend
