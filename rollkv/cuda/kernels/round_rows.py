"""Activations to f16 with a power of two a row, and the way back (csrc/round_rows.cu)."""

import numpy as np

from rollkv.cuda.device import DeviceArray, Launcher, Pointer, check_array
from rollkv.cuda.nvrtc import KernelSpec

_THREADS = 256
_COLUMNS_PER_BLOCK = 1024
_NO_BIAS = Pointer(0)


def spec(kernel: str) -> KernelSpec:
    return KernelSpec("round_rows.cu", kernel)


def instances() -> tuple[KernelSpec, ...]:
    return spec("round_rows"), spec("scale_bias")


def scale_bias_grid(rows: int, columns: int) -> tuple[int, int, int]:
    return rows, -(-columns // _COLUMNS_PER_BLOCK), 1


def round_rows_bytes(rows: int, columns: int) -> int:
    return rows * columns * 6 + rows * 4


def scale_bias_bytes(rows: int, columns: int) -> int:
    """Bytes read and written where every row has something to do; nothing otherwise."""
    return rows * columns * 8


def round_rows(launcher: Launcher, x: DeviceArray, x16: DeviceArray, row_scale: DeviceArray) -> None:
    """row_scale = 1, or the power of two that brings a row whose largest magnitude exceeds 32768 to at most that; x16 = f16(x / row_scale).

    x: f32 (T, K); x16: f16 (T, K); row_scale: f32 (T,). Reads and writes round_rows_bytes. Raises KernelError on other shapes.
    """
    rows, columns = x.shape
    check_array("round_rows", "x", x, (rows, columns), "f32")
    check_array("round_rows", "x16", x16, (rows, columns), "f16")
    check_array("round_rows", "row_scale", row_scale, (rows,), "f32")
    launcher.launch(spec("round_rows"), (rows, 1, 1), _THREADS, x, x16, row_scale, np.int32(columns))


def scale_bias(launcher: Launcher, out: DeviceArray, row_scale: DeviceArray, bias: DeviceArray | None) -> None:
    """out = out * row_scale + bias in place. out: f32 (T, N); row_scale: f32 (T,); bias: f32 (N,) or None.

    Reads and writes at most scale_bias_bytes. Raises KernelError on other shapes.
    """
    rows, columns = out.shape
    check_array("scale_bias", "out", out, (rows, columns), "f32")
    check_array("scale_bias", "row_scale", row_scale, (rows,), "f32")
    if bias is not None:
        check_array("scale_bias", "bias", bias, (columns,), "f32")
    launcher.launch(spec("scale_bias"), scale_bias_grid(rows, columns), _THREADS, out, row_scale, _pointer(bias), np.int32(columns))


def _pointer(array: DeviceArray | None) -> Pointer:
    return _NO_BIAS if array is None else Pointer(array.ptr)
