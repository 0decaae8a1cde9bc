"""Products with many rows: cuBLAS in f16 with float32 accumulation, over weights dequantised a slab at a time.

A result depends on its shape alone: one stream, one workspace of a fixed size, no atomics, no reduced-precision reductions. Slabs are cut
by the size of the scratch memory, never by what else is resident, so the same call gives the same bits in every run.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rollkv.backend import RmsNorm
from rollkv.config import Dtype
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.kernels.dequantise import dequantise
from rollkv.cuda.kernels.round_rows import finish_product, round_glu, round_rows
from rollkv.cuda.nvrtc import KernelError
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.errors import DeviceError
from rollkv.quants import TILE_ROWS

_R_16F, _R_32F = 2, 0  # cudaDataType_t
_INSTALL = 'pip install "rollkv[cuda]" brings it'


class Product(NamedTuple):
    """What the library chooses its kernels by: out[:, :outputs] = x16 weight16^T with x16 (rows, columns), weight16 (outputs, columns), out
    (rows, all_outputs)."""

    rows: int
    columns: int
    outputs: int
    all_outputs: int


class Gemm:
    """A cuBLAS handle on the stream of computation, working in memory of ours (`workspace`, u8; 32 MiB is what it wants on Hopper).

    stream: the driver's handle. Made and used with the device's context current. Raises DeviceError when the library or its bindings are
    missing, or a call fails.
    """

    def __init__(self, stream: Any, workspace: DeviceArray):
        try:
            from nvmath.bindings import cublas
        except ImportError as error:
            raise DeviceError(f"the bindings of cuBLAS cannot be imported ({error}); {_INSTALL}") from error
        self._cublas = cublas
        self._handle: int | None = None
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)  # read by the library during a call
        self._handle = self._call(cublas.create)
        try:
            self._call(cublas.set_stream, self._handle, int(stream))
            self.use_workspace(workspace)  # after the stream: setting that resets it
            self._call(cublas.set_math_mode, self._handle, cublas.Math.DISALLOW_REDUCED_PRECISION_REDUCTION)
        except DeviceError:
            self.close()
            raise

    def use_workspace(self, workspace: DeviceArray) -> None:
        """Works in other memory from now on. No product may be under way."""
        self._call(self._cublas.set_workspace, self._handle, workspace.ptr, workspace.nbytes)

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # the library's status, or a loader error of the bindings' own, depending on their version
            text = " ".join(str(error).split()) or type(error).__name__
            hint = "" if isinstance(error, self._cublas.cuBLASError) else f"; {_INSTALL}"
            raise DeviceError(f"cuBLAS failed in {getattr(function, '__name__', 'a call')}: {text}{hint}") from error

    def multiply(self, x16: DeviceArray, weight16: DeviceArray, out: DeviceArray, *, first_column: int = 0) -> None:
        """out[:, first_column : first_column + n] = x16 weight16^T.

        x16: f16 (T, K); weight16: f16 (n, K); out: f32 (T, N), N >= first_column + n. Raises KernelError (shapes), DeviceError.
        """
        rows, columns = x16.shape
        num_outputs = weight16.shape[0]
        check_array("gemm", "x16", x16, (rows, columns), "f16")
        check_array("gemm", "weight16", weight16, (num_outputs, columns), "f16")
        check_array("gemm", "out", out, (rows, out.shape[1]), "f32")
        if not 0 <= first_column <= out.shape[1] - num_outputs:
            raise KernelError(f"gemm: columns {first_column} to {first_column + num_outputs} are not within the {out.shape[1]} of out")
        blas = self._cublas
        # The library counts columns first: our row-major out [T, N] is its N x T, so the weight is its left factor, transposed.
        self._call(
            blas.gemm_ex,
            self._handle,
            blas.Operation.T,
            blas.Operation.N,
            num_outputs,
            rows,
            columns,
            self._one.ctypes.data,
            weight16.ptr,
            _R_16F,
            columns,
            x16.ptr,
            _R_16F,
            columns,
            self._zero.ctypes.data,
            out.ptr + first_column * 4,
            _R_32F,
            out.shape[1],
            blas.ComputeType.COMPUTE_32F,
            blas.GemmAlgo.DFALT,
        )

    def close(self) -> None:
        """Frees the handle. May be called twice."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._call(self._cublas.destroy, handle)


def slab_rows(weight: CudaWeight, slab_bytes: int) -> int:
    """Rows of a weight that are dequantised at a time: whole tiles, at most all. Raises KernelError when not one tile fits."""
    fit = slab_bytes // (weight.columns * 2) // TILE_ROWS * TILE_ROWS
    if fit == 0:
        raise KernelError(
            f"large products: {TILE_ROWS} rows of {weight.name} take {TILE_ROWS * weight.columns * 2} bytes; the slab has {slab_bytes}"
        )
    return min(fit, weight.rows)


@dataclass(frozen=True)
class LargeProducts:
    """Products of more than 16 rows, both factors rounded to f16, sums in float32; results do not depend on what the scratch holds.

    slab: any type, at least 16 rows of every weight in f16; x16: f16, at least T * K elements; row_scale: f32, at least T; products: f32
    (at least T, N) for every result that is added.
    """

    launcher: Launcher
    gemm: Gemm
    slab: DeviceArray
    x16: DeviceArray
    row_scale: DeviceArray
    products: DeviceArray

    @property
    def max_rows(self) -> int:
        return self.row_scale.shape[0]

    def linear(
        self,
        x: DeviceArray,
        weights: tuple[CudaWeight, ...],
        out: DeviceArray,
        *,
        norm: RmsNorm | None = None,
        bias: DeviceArray | None = None,
        add: bool = False,
    ) -> None:
        """out = norm(x) weights^T + bias, or out += that. x: f32 (T, K); weights: (N, K) together; out: f32 (T, N); bias: f32 (N,).
        Raises KernelError (shapes), DeviceError."""
        rounded, scales = self._rounded(x.shape)
        round_rows(self.launcher, x, rounded, scales, norm)
        self._multiply(rounded, scales, weights, out, bias, add=add)

    def feed_forward(
        self,
        x: DeviceArray,
        norm: RmsNorm,
        gate_up: tuple[CudaWeight, ...],
        activation: str,
        down: tuple[CudaWeight, ...],
        out: DeviceArray,
        scratch: DeviceArray,
        *,
        add: bool = False,
    ) -> None:
        """out = (activation(norm(x) gate^T) * (norm(x) up^T)) down^T, or out += that. x: f32 (T, K); gate_up: (2 F, K); down: (N, F); out: f32
        (T, N); scratch: f32 (T, 2 F). Raises KernelError (shapes), DeviceError."""
        self.linear(x, gate_up, scratch, norm=norm)
        columns = down[0].columns
        gated, scales = self._rounded((x.shape[0], columns))
        run = TILE_ROWS if len(gate_up) == 1 else columns  # of gate and of up, as the weight has its tiles
        round_glu(self.launcher, scratch, gated, scales, run=run, activation=activation)
        self._multiply(gated, scales, down, out, None, add=add)

    def _multiply(
        self,
        x16: DeviceArray,
        scales: DeviceArray,
        weights: tuple[CudaWeight, ...],
        out: DeviceArray,
        bias: DeviceArray | None,
        *,
        add: bool,
    ) -> None:
        rows, outputs = x16.shape[0], sum(weight.rows for weight in weights)
        check_array("large products", "out", out, (rows, outputs), "f32")
        target = _scratch("products", self.products, (rows, outputs), "f32") if add else out
        column = 0
        for weight in weights:
            at_once = slab_rows(weight, self.slab.nbytes)
            for first in range(0, weight.rows, at_once):
                part = _scratch("slab", self.slab, (min(at_once, weight.rows - first), weight.columns), "f16")
                dequantise(self.launcher, weight, part, first_row=first)
                self.gemm.multiply(x16, part, target, first_column=column + first)
            column += weight.rows
        finish_product(self.launcher, target, scales, bias, out, add=add)

    def _rounded(self, shape: tuple[int, ...]) -> tuple[DeviceArray, DeviceArray]:
        return _scratch("x16", self.x16, shape, "f16"), _scratch("row_scale", self.row_scale, shape[:1], "f32")


def _scratch(name: str, memory: DeviceArray, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
    wanted = DeviceArray(memory.ptr, shape, dtype)
    if memory.nbytes < wanted.nbytes:
        raise KernelError(f"large products: {name} must hold {dtype} {list(shape)}, {wanted.nbytes} bytes; it has {memory.nbytes}")
    return wanted
