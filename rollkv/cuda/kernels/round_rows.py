"""Activations to f16 with a power of two a row, and the way back from a large product (csrc/round_rows.cu)."""

from functools import cache

import numpy as np

from rollkv.backend import RmsNorm
from rollkv.cuda.device import DeviceArray, Launcher, Pointer, check_array
from rollkv.cuda.kernels.activation import ACTIVATIONS
from rollkv.cuda.nvrtc import KernelError, KernelSpec

_THREADS = 256
_COLUMNS_PER_BLOCK = 1024


@cache
def spec(kernel: str, width: int) -> KernelSpec:
    """width: neighbouring columns a thread takes, 4 or 1."""
    return KernelSpec("round_rows.cu", f"{kernel}<{width}>")


@cache
def finish_spec() -> KernelSpec:
    return KernelSpec("round_rows.cu", "finish_product")


def instances() -> tuple[KernelSpec, ...]:
    return (*(spec(kernel, width) for kernel in ("round_rows", "round_glu") for width in (1, 4)), finish_spec())


def finish_grid(rows: int, columns: int) -> tuple[int, int, int]:
    return rows, -(-columns // _COLUMNS_PER_BLOCK), 1


def round_rows_bytes(rows: int, columns: int) -> int:
    return rows * columns * 6 + rows * 4


def round_glu_bytes(rows: int, columns: int) -> int:
    return rows * columns * 10 + rows * 4


def finish_product_bytes(rows: int, columns: int, add: bool) -> int:
    """Bytes read and written where every row has something to do; nothing otherwise."""
    return rows * columns * (12 if add else 8)


def round_rows(launcher: Launcher, x: DeviceArray, x16: DeviceArray, row_scale: DeviceArray, norm: RmsNorm | None = None) -> None:
    """row_scale = 1, or the power of two that brings a row whose largest magnitude exceeds 32768 to at most that; x16 = f16(row / row_scale), where
    row is x or its norm.

    x: f32 (T, K); x16: f16 (T, K); row_scale: f32 (T,); norm.weight: f32 (K,). Reads and writes round_rows_bytes. Raises KernelError on
    other shapes.
    """
    rows, columns = x.shape
    check_array("round_rows", "x", x, (rows, columns), "f32")
    check_array("round_rows", "x16", x16, (rows, columns), "f16")
    check_array("round_rows", "row_scale", row_scale, (rows,), "f32")
    if norm is not None:
        check_array("round_rows", "norm", norm.weight, (columns,), "f32")
    weight, eps = (Pointer(0), 0.0) if norm is None else (Pointer(norm.weight.ptr), norm.eps)
    kernel = spec("round_rows", 4 if columns % 4 == 0 else 1)
    launcher.launch(kernel, (rows, 1, 1), _THREADS, x, weight, x16, row_scale, np.int32(columns), np.float32(eps))


def round_glu(launcher: Launcher, gate_up: DeviceArray, x16: DeviceArray, row_scale: DeviceArray, *, run: int, activation: str) -> None:
    """As round_rows, of rows activation(gate) * up.

    gate_up: f32 (T, 2 F), `run` columns of gate and of up by turns; x16: f16 (T, F); row_scale: f32 (T,). Reads and writes
    round_glu_bytes. Raises KernelError on other shapes.
    """
    rows, columns = x16.shape
    check_array("round_glu", "gate_up", gate_up, (rows, 2 * columns), "f32")
    check_array("round_glu", "x16", x16, (rows, columns), "f16")
    check_array("round_glu", "row_scale", row_scale, (rows,), "f32")
    if run < 1 or columns % run:
        raise KernelError(f"round_glu: runs of {run} columns do not divide {columns}")
    kernel = spec("round_glu", 4 if columns % 4 == 0 and run % 4 == 0 else 1)
    numbers = map(np.int32, (columns, run, ACTIVATIONS[activation]))
    launcher.launch(kernel, (rows, 1, 1), _THREADS, gate_up, x16, row_scale, *numbers)


def finish_product(
    launcher: Launcher, product: DeviceArray, row_scale: DeviceArray, bias: DeviceArray | None, out: DeviceArray, *, add: bool
) -> None:
    """out = product * row_scale + bias, or out += that. product, out: f32 (T, N), one array or two; row_scale: f32 (T,); bias: f32 (N,) or None.

    Reads and writes at most finish_product_bytes. Raises KernelError on other shapes.
    """
    rows, columns = product.shape
    check_array("finish_product", "product", product, (rows, columns), "f32")
    check_array("finish_product", "out", out, (rows, columns), "f32")
    check_array("finish_product", "row_scale", row_scale, (rows,), "f32")
    if bias is not None:
        check_array("finish_product", "bias", bias, (columns,), "f32")
    pointer = Pointer(0 if bias is None else bias.ptr)
    numbers = map(np.int32, (columns, add))
    launcher.launch(finish_spec(), finish_grid(rows, columns), _THREADS, product, row_scale, pointer, out, *numbers)
