"""A double of cuda.bindings.driver: device memory is host memory, copies run at once, and it fails on command."""

import ctypes
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

_STATUS = {
    0: "CUDA_SUCCESS",
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    34: "CUDA_ERROR_STUB_LIBRARY",
    100: "CUDA_ERROR_NO_DEVICE",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
}


# These give back what they are given even when they report what failed before.
_GIVING_BACK = ("cuMemFree", "cuMemHostUnregister", "cuModuleUnload", "cuDevicePrimaryCtxRelease", "cuStreamEndCapture")


class _Status(IntEnum):
    """What the bindings return in the first place of every result."""

    SUCCESS = 0


class FakeDriver:
    """`fail[name] = status` makes a function fail; `calls` lists what was called; limits are in bytes."""

    CUDA_VERSION = 13020
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
    )
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_DEVICE=2)
    CUDA_MEMCPY2D = SimpleNamespace
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUtensorMapDataType = SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_FLOAT16=6)
    CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0)
    CUtensorMapSwizzle = SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_128B=3)
    CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_256B=3)
    CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0)
    cuuint32_t = cuuint64_t = int

    def __init__(self, *, version: int = 13000, devices: int = 1, capability: tuple[int, int] = (9, 0), device_limit: int = 1 << 30):
        self.version, self.devices, self.capability = version, devices, capability
        self.device_limit, self.pin_limit = device_limit, 1 << 40
        self.fail: dict[str, int] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.device: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.launches: list[tuple[tuple[int, ...], list[int]]] = []
        self.early: list[str] = []  # launched with leave to begin before the kernel before it has ended
        self.param_sizes: tuple[int, ...] = ()
        self.retained = self._handles = 0

    def __getattribute__(self, name: str) -> Any:
        member = object.__getattribute__(self, name)
        if not name.startswith("cu") or name.startswith(("cuGetError", "cuuint")):
            return member

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, args))
            status = self.interfere(name) or self.fail.get(name)
            if status is None:
                result = member(*args)
                if int(result[0]) == 0:
                    self.succeeded(name)
                return result
            if name.endswith("Destroy") or name in _GIVING_BACK:
                member(*args)
            return (status, None)

        return call

    def interfere(self, name: str) -> int | None:
        """Called before every function: a status that it fails with, or None. May raise."""
        return None

    def succeeded(self, name: str) -> None:
        """Called behind every function that did what it should. May raise."""

    # -- driver and device -------------------------------------------------------------------------------------------------------
    @staticmethod
    def CUresult(status: int) -> int:
        return status

    def cuGetErrorName(self, status: int) -> tuple[int, bytes]:
        return 0, _STATUS.get(status, "CUDA_ERROR_UNKNOWN").encode()

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, f"text of {status}".encode()

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, self.devices

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return 0, {75: self.capability[0], 76: self.capability[1], 16: 132}[attribute]

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, b"Fake GPU\0\0"

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, b"0000:00:00.0\0"

    def cuDeviceTotalMem(self, device: int) -> tuple[int, int]:
        return 0, self.device_limit

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[int, int, int]:
        return 0, 0, int(self.retained > 0)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        self.retained += 1
        return 0, 77

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[int]:
        self.retained -= 1
        return (0,)

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        return (0,)

    # -- memory ----------------------------------------------------------------------------------------------------------------
    def cuMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self.device_limit - sum(a.size for a in self.device.values()), self.device_limit

    def cuMemAlloc(self, size: int) -> tuple[int, Any]:
        return self._allocate(self.device, size, self.device_limit)

    def cuMemFree(self, address: int) -> tuple[int]:
        del self.device[address]
        return (0,)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        if sum(a.size for a in self.pinned.values()) + size > self.pin_limit:
            return (2,)
        self.pinned[address] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        del self.pinned[address]
        return (0,)

    def _allocate(self, where: dict[int, np.ndarray], size: int, limit: int) -> tuple[int, Any]:
        if sum(a.size for a in where.values()) + size > limit:
            return 2, None
        room = np.full(size + 512, 0xEE, np.uint8)
        start = -room.ctypes.data % 512  # the driver's own alignment
        memory = room[start : start + size]
        where[memory.ctypes.data] = memory
        return 0, memory.ctypes.data

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[int]:
        ctypes.memmove(target, source, size)
        return (0,)

    cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cuMemcpyHtoDAsync

    def cuMemcpy2DAsync(self, copy: SimpleNamespace, stream: int) -> tuple[int]:
        assert (copy.srcMemoryType, copy.dstMemoryType) == (1, 2)
        for row in range(copy.Height):
            ctypes.memmove(copy.dstDevice + row * copy.dstPitch, copy.srcHost + row * copy.srcPitch, copy.WidthInBytes)
        return (0,)

    # -- streams, events, kernels ------------------------------------------------------------------------------------------------
    def _handle(self, flags: int) -> tuple[int, int]:
        self._handles += 1
        return 0, 1000 + self._handles

    cuStreamCreate = cuEventCreate = _handle

    def _done(self, *args: Any) -> tuple[int]:
        return (0,)

    cuStreamDestroy = cuEventDestroy = cuStreamSynchronize = cuEventSynchronize = cuEventRecord = cuStreamWaitEvent = _done
    cuModuleUnload = cuFuncSetAttribute = _done

    def cuEventElapsedTime(self, begin: int, end: int) -> tuple[int, float]:
        return 0, 1.5

    CUstreamCaptureMode = int

    cuStreamBeginCapture = cuGraphDestroy = cuGraphExecDestroy = cuGraphLaunch = _done

    def cuStreamEndCapture(self, stream: int) -> tuple[int, int]:
        return self._handle(0)

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[int, int]:
        return self._handle(0)

    def cuModuleLoadData(self, image: bytes) -> tuple[int, int]:
        return 0, 5

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[int, str]:
        return 0, name.decode()

    def cuFuncGetParamInfo(self, function: str, index: int) -> tuple[int, int, int]:
        return (0, 8 * index, self.param_sizes[index]) if index < len(self.param_sizes) else (1, 0, 0)

    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace())

    CUlaunchConfig = SimpleNamespace

    def cuLaunchKernelEx(self, config: SimpleNamespace, function: str, params: int, extra: int) -> tuple[int]:
        (attribute,) = config.attrs
        assert (attribute.id, attribute.value.programmaticStreamSerializationAllowed, config.numAttrs) == (6, 1, 1)
        self.early.append(function)
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        return self.cuLaunchKernel(
            function, *grid, config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes, config.hStream, params, extra
        )

    def cuTensorMapEncodeTiled(self, kind: int, rank: int, address: int, *rest: Any) -> tuple[int, Any]:
        content = ctypes.create_string_buffer(address.to_bytes(8, "little") * 16, 128)
        return 0, SimpleNamespace(content=content, getPtr=lambda: ctypes.addressof(content))

    def cuLaunchKernel(self, function: str, *rest: Any) -> tuple[int]:
        *shape, stream, params, _ = rest
        addresses = (ctypes.c_void_p * len(self.param_sizes)).from_address(params)
        values = [bytes((ctypes.c_char * size).from_address(a)) for a, size in zip(addresses, self.param_sizes, strict=True)]
        self.launches.append((tuple(shape), values))
        return (_Status.SUCCESS,)
