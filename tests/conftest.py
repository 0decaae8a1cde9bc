"""Marker `gpu`, the fixture `cuda`, and a header that names the versions a run was made with."""

import importlib.metadata
from collections.abc import Callable, Iterator
from functools import cache, partial
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--portable", action="store_true", help="run the GPU tests with the kernels for any card, not those for this one")


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


@pytest.fixture(scope="session")
def portable(pytestconfig: pytest.Config) -> bool:
    """Whether --portable was given."""
    return bool(pytestconfig.getoption("--portable"))


@pytest.fixture
def load_cuda(portable: bool) -> Callable[..., Any]:
    """rollkv.startup.load on the CUDA backend."""
    from rollkv.startup import load

    return partial(load, backend="cuda", portable=portable)


@pytest.fixture
def cuda(portable: bool) -> Iterator[Any]:
    """A CudaBackend on device 0, with room for products of up to 512 rows of 4096 columns."""
    from rollkv.cuda.backend import CudaBackend

    with CudaBackend(0, portable=portable) as backend:
        backend.reserve_linear(512, 4096, 4096, 16 << 20)
        yield backend


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the GPU from commands that look for one."""
    from rollkv.errors import DeviceError

    def find_device(*_: object) -> None:
        raise DeviceError("no GPU in this test")

    monkeypatch.setattr("rollkv.cuda.driver.find_device", find_device)
