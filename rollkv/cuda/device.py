"""Device arrays, and the launcher that compiles, loads and starts kernels.

The launcher keeps its cost per launch to one dictionary look-up, one pack of the arguments into a block that belongs to the kernel,
and the driver's call. It is used from one thread, the one that owns the context.
"""

import ctypes
import math
import os
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollkv.backend import Stream
from rollkv.config import DTYPE_BYTES, Dtype
from rollkv.cuda.driver import DriverCalls
from rollkv.cuda.nvrtc import Cubin, CubinCache, KernelError, KernelSpec, capability_of


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Row-major device memory: address, shape and element type. Owns nothing; the allocator that made it frees it."""

    ptr: int
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def rows(self, n: int, start: int = 0) -> "DeviceArray":
        """n rows from row `start` on."""
        if start < 0 or n < 0 or start + n > self.shape[0]:
            raise ValueError(f"rows({n}, {start}) of an array of shape {self.shape}")
        row_bytes = math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]
        return DeviceArray(self.ptr + start * row_bytes, (n, *self.shape[1:]), self.dtype)

    def view(self, shape: tuple[int, ...], dtype: Dtype | None = None, offset_bytes: int = 0) -> "DeviceArray":
        """The elements from offset_bytes on in another shape, and in another type if given."""
        result = DeviceArray(self.ptr + offset_bytes, shape, dtype or self.dtype)
        if offset_bytes < 0 or offset_bytes + result.nbytes > self.nbytes:
            raise ValueError(
                f"a view of {result.nbytes} bytes at {offset_bytes} leaves the {self.nbytes} bytes of {self.shape} {self.dtype}"
            )
        return result

    def as_bytes(self) -> "DeviceArray":
        """All of it as u8 [nbytes]."""
        return self.view((self.nbytes,), "u8")

    def __index__(self) -> int:
        return self.ptr


class Pointer(int):
    """A device address (64 bits) as a kernel argument, where no array describes it."""


class TensorMap(bytes):
    """128 bytes by value: the driver's description of a matrix for bulk copies (csrc/wgmma.cuh)."""


def check_array(kernel: str, operand: str, array: DeviceArray, shape: tuple[int, ...], dtype: Dtype) -> None:
    """Raises KernelError naming kernel, operand, what was wanted and what came."""
    if array.shape != shape or array.dtype != dtype:
        raise KernelError(f"{kernel}: {operand} must be {dtype} {list(shape)}, not {array.dtype} {list(array.shape)}")


_PLANE_COLUMNS = 64  # halves: the 128 bytes of a swizzled row

# struct codes of the kernel arguments' types.
_CODES: dict[type, str] = {
    DeviceArray: "Q",
    Pointer: "Q",
    TensorMap: "128s",
    np.int8: "b",
    np.uint8: "B",
    np.int16: "h",
    np.uint16: "H",
    np.int32: "i",
    np.uint32: "I",
    np.int64: "q",
    np.uint64: "Q",
    np.float32: "f",
    np.float64: "d",
}

_COMPILERS = len(os.sched_getaffinity(0))


_FIRST_EARLY_CAPABILITY = 90  # programmatic dependent launch exists from compute capability 9.0 on


class _Kernel:
    """One loaded kernel with the memory its arguments are packed into (the driver copies them during the launch call)."""

    __slots__ = (
        "configurations", "expression", "function", "spec", "pack_into", "param_sizes", "params", "params_address", "shared_limit", "slots", "types"
    )  # fmt: skip

    def __init__(self, spec: KernelSpec, function: Any, param_sizes: tuple[int, ...] | None):
        self.spec = spec
        self.expression = spec.expression
        self.function = function
        self.param_sizes = param_sizes  # None: this driver does not tell
        self.shared_limit = 0  # asked for at the first launch: 48 KiB are free only together with what the kernel declares itself
        self.configurations: dict[tuple[Any, ...], Any] = {}  # of early launches, by grid, block, shared memory and stream
        self.types: tuple[type, ...] | None = None
        self.slots = ctypes.create_string_buffer(0)
        self.params: Any = None  # array of the arguments' addresses, as cuLaunchKernel wants them
        self.params_address = 0
        self.pack_into: Callable[..., None] = struct.Struct("").pack_into

    def bind(self, types: tuple[type, ...]) -> None:
        """Lays the arguments out for these types. Raises KernelError when they are not the kernel's."""
        codes = [_CODES.get(kind) for kind in types]
        if None in codes:
            wrong = types[codes.index(None)].__name__
            raise KernelError(
                f"{self.expression}: argument {codes.index(None)} is a {wrong}; pass a DeviceArray, a Pointer, a TensorMap or a sized NumPy scalar"
            )
        sizes = tuple(struct.calcsize(f"<{code}") for code in codes)
        if self.param_sizes is not None and sizes != self.param_sizes:
            raise KernelError(
                f"{self.expression}: {len(sizes)} arguments of {sizes} bytes; the kernel takes {len(self.param_sizes)} of {self.param_sizes}"
            )
        offsets, layout = [0], "<"
        for code, size in zip(codes, sizes, strict=True):
            padding = -size % 8
            layout += f"{code}{padding}x"
            offsets.append(offsets[-1] + size + padding)
        packer = struct.Struct(layout)
        self.slots = ctypes.create_string_buffer(packer.size)
        base = ctypes.addressof(self.slots)
        self.params = (ctypes.c_void_p * max(1, len(types)))(*(base + offset for offset in offsets[:-1]))
        self.params_address = ctypes.addressof(self.params)
        self.pack_into = packer.pack_into
        self.types = types


class Launcher:
    """Compiles, loads and starts kernels on the streams of one device. Modules stay loaded until `close`.

    One module per instance: the cache then serves every model that uses the instance, whatever else it uses.
    """

    def __init__(self, calls: DriverCalls, arch: str, streams: dict[Stream, Any], cache: CubinCache):
        self.arch = arch
        self.last_launched = ""  # named when a later synchronisation fails
        self._calls = calls
        self._launch = calls.bindings.cuLaunchKernel
        self._launch_ex = calls.bindings.cuLaunchKernelEx
        self._overlaps = capability_of(arch) >= _FIRST_EARLY_CAPABILITY
        self._streams = streams
        self._cache = cache
        self._kernels: dict[str, _Kernel] = {}
        self._maps: dict[tuple[int, int, int, int], TensorMap] = {}
        self._modules: list[Any] = []

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        """Compiles and loads the instances ahead, so that the memory of their code is taken now. Several compile at a time. Raises
        KernelError, DeviceError, OutOfMemoryError. A failure or an interrupt waits for those that compile now, not for all."""
        missing = [spec for spec in dict.fromkeys(specs) if spec.expression not in self._kernels]
        with ThreadPoolExecutor(_COMPILERS) as threads:
            try:
                for spec, cubin in zip(missing, threads.map(self._cubin, missing), strict=True):
                    self._load(spec, cubin)
            finally:
                threads.shutdown(cancel_futures=True)

    def launch(
        self,
        spec: KernelSpec,
        grid: tuple[int, int, int],
        block: int,
        *args: Any,
        shared_bytes: int = 0,
        stream: Stream = Stream.COMPUTE,
    ) -> None:
        """Starts the kernel with `block` threads a block. args: DeviceArray or Pointer (64-bit addresses), TensorMap, or sized
        NumPy scalars. Returns before the kernel runs. Raises KernelError for wrong arguments, DeviceError when the device fails."""
        kernel = self._kernels.get(spec.expression)  # by a string, whose hash is kept
        if kernel is None or (kernel.spec is not spec and kernel.spec != spec):
            kernel = self._load(spec, self._cubin(spec))
        types = tuple(map(type, args))
        if types != kernel.types:
            kernel.bind(types)
        kernel.pack_into(kernel.slots, 0, *args)
        if shared_bytes > kernel.shared_limit:
            self._allow_shared(kernel, shared_bytes)
        if kernel.spec.early and self._overlaps:
            where = (*grid, block, shared_bytes, stream)
            configuration = kernel.configurations.get(where) or self._configure(kernel, where)
            status = self._launch_ex(configuration, kernel.function, kernel.params_address, 0)[0]
        else:
            status = self._launch(kernel.function, *grid, block, 1, 1, shared_bytes, self._streams[stream], kernel.params_address, 0)[0]
        if status != 0:
            self._fail(kernel, grid, block, shared_bytes, int(status))
        self.last_launched = kernel.expression

    def plane_map(self, address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
        """For bulk copies of box_rows rows at a time out of an f16 matrix [rows, columns]: they arrive as columns / 64 planes of
        [box_rows, 64] halves, swizzled in rows of 128 bytes. Kept for the next call. Raises DeviceError."""
        key = (address, rows, columns, box_rows)
        if key not in self._maps:
            self._maps[key] = _encode_planes(self._calls, *key)
        return self._maps[key]

    def close(self) -> None:
        """Unloads all modules. May be called twice; errors of a broken context are ignored, for nothing is left to save."""
        self._kernels.clear()
        while self._modules:
            self._calls.bindings.cuModuleUnload(self._modules.pop())

    def _configure(self, kernel: _Kernel, where: tuple[Any, ...]) -> Any:
        """An early launch: it may begin when every block of the kernel before it has begun, and waits for the rest by itself. Copies and events that the
        stream waits for besides have ended when it begins, in recorded work too: only the step from kernel to kernel is loosened."""
        bindings = self._calls.bindings
        attribute = bindings.CUlaunchAttribute()
        attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        made = bindings.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ, made.blockDimX, made.sharedMemBytes = where[:5]
        made.blockDimY = made.blockDimZ = 1
        made.hStream = self._streams[where[5]]
        made.attrs, made.numAttrs = [attribute], 1
        kernel.configurations[where] = made
        return made

    def _cubin(self, spec: KernelSpec) -> Cubin:
        if not spec.compiles_for(self.arch):
            raise KernelError(f"{spec.expression} exists for {', '.join(spec.archs)} only; this device is {self.arch}")
        return self._cache.get(spec.source, (spec.expression,), self.arch)

    def _load(self, spec: KernelSpec, cubin: Cubin) -> _Kernel:
        module = self._calls("cuModuleLoadData", cubin.image, what=f"loading {spec.expression}")
        self._modules.append(module)
        function = self._calls("cuModuleGetFunction", module, cubin.lowered[spec.expression].encode(), what=f"loading {spec.expression}")
        kernel = self._kernels[spec.expression] = _Kernel(spec, function, _param_sizes(self._calls, function))
        return kernel

    def _allow_shared(self, kernel: _Kernel, shared_bytes: int) -> None:
        attribute = self._calls.bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._calls(
            "cuFuncSetAttribute",
            kernel.function,
            attribute,
            shared_bytes,
            what=f"{kernel.expression} with {shared_bytes} bytes of shared memory",
        )
        kernel.shared_limit = shared_bytes

    def _fail(self, kernel: _Kernel, grid: tuple[int, int, int], block: int, shared_bytes: int, status: int) -> None:
        name, text = self._calls.status_text(status)
        where = f"{kernel.expression} on grid {grid}, {block} threads, {shared_bytes} bytes of shared memory"
        if name in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
            raise KernelError(f"{where} cannot be launched: {name} ({text})")
        before = f"; the kernel before it was {self.last_launched}" if self.last_launched else ""
        message = f"the device failed with {name} ({text}) at the launch of {where}{before}; run it again under compute-sanitizer"
        raise self._calls.error(message, status)


def _encode_planes(calls: DriverCalls, address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
    """The matrix as three dimensions, innermost first: 64 columns, rows, planes of 64 columns."""
    driver, planes = calls.bindings, columns // _PLANE_COLUMNS
    encoded = calls(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        3,
        address,
        [driver.cuuint64_t(size) for size in (_PLANE_COLUMNS, rows, planes)],
        [driver.cuuint64_t(stride) for stride in (columns * 2, _PLANE_COLUMNS * 2)],
        [driver.cuuint32_t(size) for size in (_PLANE_COLUMNS, box_rows, planes)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        what=f"describing {rows} rows of {columns} halves for bulk copies",
    )
    return TensorMap(ctypes.string_at(int(encoded.getPtr()), 128))


def _param_sizes(calls: DriverCalls, function: Any) -> tuple[int, ...] | None:
    """Bytes of every parameter of the kernel, or None with drivers before 12.4, which do not tell."""
    sizes: list[int] = []
    try:
        while True:
            status, _, size = calls.bindings.cuFuncGetParamInfo(function, len(sizes))
            if int(status) != 0:  # past the last parameter
                return tuple(sizes)
            sizes.append(int(size))
    except (AttributeError, RuntimeError):
        return None
