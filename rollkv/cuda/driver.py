"""Calls of the CUDA driver, and what is wrong with a machine on which they cannot work.

`DriverCalls` wraps the bindings' module (in tests, a double of it): every call checks its status, so that no error is carried on
silently. Kinds of unusable machine are told apart by `find_device`, before a context is made.
"""

from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as _bindings

from rollkv.backend import GpuFacts
from rollkv.errors import DeviceError, OutOfMemoryError, RollkvError

MIN_CAPABILITY = (8, 0)
HOST_HINT = "or, where there is that option, run with --backend host"
_OUT_OF_MEMORY = 2


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of a device before a context exists on it."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    num_sms: int
    pci_bus_id: str
    driver_version: tuple[int, int]  # the CUDA version that the driver supports

    @property
    def gpu(self) -> GpuFacts:
        """As records name it."""
        return GpuFacts(self.name, self.total_bytes, ".".join(map(str, self.driver_version)), self.pci_bus_id)


class DriverError(DeviceError):
    """A driver call failed. `status` is the CUresult as a number."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class DriverMemoryError(OutOfMemoryError):
    """A driver call failed for lack of memory: the device's or the host's own, whatever it was that the call makes."""


class DriverCalls:
    """The driver's functions without their status codes: `calls("cuMemAlloc", n)` returns the value or raises DriverError, or
    DriverMemoryError for lack of memory."""

    def __init__(self, bindings: Any = _bindings):
        self.bindings = bindings

    def __call__(self, function: str, *args: Any, what: str = "") -> Any:
        result = getattr(self.bindings, function)(*args)
        status = int(result[0])
        if status != 0:
            raise self.error(self._describe(function, status, what), status)
        return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]

    def unless_out_of_memory(self, function: str, *args: Any, what: str = "") -> Any:
        """The value, or None when the driver has no memory for it. Other failures raise DriverError."""
        try:
            return self(function, *args, what=what)
        except DriverMemoryError:
            return None

    def error(self, message: str, status: int) -> RollkvError:
        """Of the kind of a status that is not success."""
        return DriverMemoryError(message) if status == _OUT_OF_MEMORY else DriverError(message, status)

    def status_text(self, status: int) -> tuple[str, str]:
        """("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered")."""
        code = self.bindings.CUresult(status)
        return _text(self.bindings.cuGetErrorName(code)) or f"CUDA error {status}", _text(self.bindings.cuGetErrorString(code)) or "unknown"

    def _describe(self, function: str, status: int, what: str) -> str:
        name, text = self.status_text(status)
        advice = "free device memory, or lower --vram-target" if status == _OUT_OF_MEMORY else "rollkv --env shows the state of the device"
        return f"{what + ': ' if what else ''}the CUDA call {function} failed with {name} ({text}); {advice}"


def _text(result: tuple[Any, ...]) -> str:
    return result[1].decode() if int(result[0]) == 0 and result[1] else ""


def split_version(number: int) -> tuple[int, int]:
    """CUDA's 13040 is (13, 4)."""
    return number // 1000, number % 1000 // 10


def open_driver(calls: DriverCalls) -> tuple[int, int]:
    """Initialises the driver; the CUDA version it supports. Raises DeviceError: no library, driver too old, no device, broken."""
    try:
        version = split_version(int(calls("cuDriverGetVersion")))
    except DeviceError:
        raise
    except Exception as error:  # the loader's own error type differs between versions of the bindings
        raise DeviceError(f"no NVIDIA driver library (libcuda) is found; install the NVIDIA driver, {HOST_HINT}") from error
    wanted = split_version(int(calls.bindings.CUDA_VERSION))
    if version[0] < wanted[0]:
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {version[0]}.{version[1]}, but the installed cuda-bindings are made for CUDA "
            f'{wanted[0]}.{wanted[1]}; update the driver, or pip install "cuda-python<{version[0] + 1}", {HOST_HINT}'
        )
    status = int(calls.bindings.cuInit(0)[0])
    if status == 0:
        return version
    name, text = calls.status_text(status)
    if name == "CUDA_ERROR_NO_DEVICE":
        raise DeviceError(f"the NVIDIA driver finds no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, {HOST_HINT}")
    if name == "CUDA_ERROR_STUB_LIBRARY":
        raise DeviceError(f"libcuda is the toolkit's stub, not a driver; install the NVIDIA driver, {HOST_HINT}")
    raise DeviceError(f"the NVIDIA driver does not start: {name} ({text}); nvidia-smi should say why, {HOST_HINT}")


def device_facts(calls: DriverCalls, index: int, driver_version: tuple[int, int]) -> DeviceFacts:
    """Facts of device `index`, which must exist. Needs no context."""
    device = calls("cuDeviceGet", index)
    kinds = calls.bindings.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(calls("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    return DeviceFacts(
        index=index,
        name=_until_nul(calls("cuDeviceGetName", 256, device)),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        total_bytes=int(calls("cuDeviceTotalMem", device)),
        num_sms=attribute("MULTIPROCESSOR_COUNT"),
        pci_bus_id=_until_nul(calls("cuDeviceGetPCIBusId", 64, device)),
        driver_version=driver_version,
    )


def _until_nul(text: bytes) -> str:
    return text.split(b"\0")[0].decode(errors="replace")


def find_device(calls: DriverCalls, index: int) -> DeviceFacts:
    """The device that a run asks for. Raises DeviceError when there is none, or it cannot run the kernels."""
    version = open_driver(calls)
    count = int(calls("cuDeviceGetCount"))
    if count == 0:
        raise DeviceError(f"the NVIDIA driver finds no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, {HOST_HINT}")
    if not 0 <= index < count:
        plural = "device 0 is the only one" if count == 1 else f"devices 0 to {count - 1} exist"
        raise DeviceError(f"--device {index}: there is no such GPU; {plural}")
    facts = device_facts(calls, index, version)
    if facts.capability < MIN_CAPABILITY:
        have, want = (f"{major}.{minor}" for major, minor in (facts.capability, MIN_CAPABILITY))
        raise DeviceError(f"device {index} ({facts.name}) has compute capability {have}; {want} (Ampere) or newer is needed, {HOST_HINT}")
    return facts
