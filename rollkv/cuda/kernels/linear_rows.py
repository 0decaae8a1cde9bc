"""Batch-invariant products with up to 16 rows: csrc/linear_rows.cu, and csrc/linear_row.cu for one row where there are bulk copies."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from rollkv.backend import RmsNorm
from rollkv.cuda.device import DeviceArray, Launcher, Pointer, check_array
from rollkv.cuda.kernels.activation import ACTIVATIONS, NO_ACTIVATION
from rollkv.cuda.nvrtc import ARCHS, KernelError, KernelSpec, capability_of
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.quants import FORMATS, TILE_ROWS
from rollkv.workspace import MAX_FEW_ROWS

WARPS = 8  # of a team
_ROWS = (1, 2, 4, 8, 16)
_PAD_BYTES = 32  # of a staged row of x
SHARED_LIMIT = 99 << 10  # what a block can have on every device from compute capability 8.0 on

# Columns of x staged at a time, by rows: three bytes a column and row of quantised weights, six of the others, about half of SHARED_LIMIT. Whole turns of
# 16 warps over units of 256 columns, at one row: then the order of the sum of squares does not depend on them.
_STAGED_COLUMNS = {
    True: {1: 12288, 2: 8192, 4: 4096, 8: 2048, 16: 1024},
    False: {1: 8192, 2: 4096, 4: 2048, 8: 1024, 16: 512},
}
# Spans of weights in flight a warp, at one row, as far as 128 registers go: Q8_0 with 8 of them takes 7.7 us at 6144 x 4096, with 6 of them 8.5.
_DEPTH = {
    "Q8_0": 8, "Q4_0": 8, "Q4_1": 8, "Q5_0": 8, "Q5_1": 6, "IQ4_NL": 8, "F16": 4, "BF16": 4, "F32": 2,
    "Q4_K": 2, "Q6_K": 2, "Q2_K": 2, "Q3_K": 2, "Q5_K": 2, "IQ4_XS": 2,
}  # fmt: skip
_UNIT = 256  # columns of x with a common scale
_UNIT_BYTES = _UNIT * 4  # of shared memory, of a unit of a copied row: first as float32, then as digits, sums and scale
_BARRIER_BYTES = 8
_SQUARES = 16  # sums that a row's sum of squares is added up from
# Types with a shift need the sums of x over the columns that share one.
_SUM_GROUP = {"Q4_1": 32, "Q5_1": 32, "Q4_K": 32, "Q5_K": 32, "Q2_K": 16}


class Shape(NamedTuple):
    """Launch constants of linear_rows. Results do not depend on them."""

    rows: int  # of the instance: the least of 1, 2, 4, 8, 16 that holds the rows of x
    depth: int  # spans of weights in flight a warp
    staged_columns: int
    shared_bytes: int  # dynamic
    blocks: int
    threads: int  # of a block


class RowShape(NamedTuple):
    """Launch constants of linear_row. Results do not depend on them."""

    shared_bytes: int  # dynamic
    blocks: int
    threads: int  # of a block


def _depth(qtype: str, rows: int, arch: str) -> int:
    """The largest depth up to the type's whose rounds (8 warps * depth spans) divide the staged columns. More rows leave registers for one span alone
    where spans are large: super-blocks (1 to 2 KB), and F16 and BF16 (2 KB) from 4 rows on. Q6_K on 12.0 has one as well: two spill."""
    span, depth = FORMATS[qtype].span, _DEPTH[qtype]
    if (span == 256 and rows > 1) or (not FORMATS[qtype].metas and rows >= 4) or (qtype == "Q6_K" and capability_of(arch) >= 120):
        return 1
    depth = depth if rows == 1 else min(depth, 4 if rows <= 4 else 2)
    return max((d for d in range(1, depth + 1) if _staged_columns(qtype, rows) % (WARPS * span * d) == 0), default=1)


def _staged_columns(qtype: str, rows: int) -> int:
    return _STAGED_COLUMNS[bool(FORMATS[qtype].metas)][rows]


def teams(qtype: str, rows: int) -> int:
    """Of 8 warps, which share the staged x: two of 128 registers a thread fill a multiprocessor, where that is enough for codes and accumulators."""
    large = FORMATS[qtype].span == 256 or not FORMATS[qtype].metas
    return 1 if rows == 16 or (rows == 8 and large) or (rows == 4 and qtype == "F32") else 2


def static_shared_bytes(qtype: str, rows: int) -> int:
    """Shared memory that an instance of linear_rows declares itself: sums of the warps, twice, gates, factors of the rows; sums of squares."""
    num = teams(qtype, rows)
    return -(-(num * (2 * WARPS * TILE_ROWS * rows + rows * TILE_ROWS + rows) + _SQUARES) * 4 // 16) * 16


def row_static_shared_bytes() -> int:
    """Shared memory that linear_row declares itself: sums of the warps, twice, factors of the row, sums of squares; what is read of a tile, twice, and its
    barriers. Dynamic memory begins behind it, on 128 bytes."""
    return -(-((2 * 2 * WARPS * TILE_ROWS + 2 + _SQUARES + 2 * 2 * 2 * TILE_ROWS) * 4 + 2 * _BARRIER_BYTES) // 128) * 128


@cache
def launch_shape(qtype: str, num_rows: int, num_outputs: int, columns: int, num_sms: int, arch: str) -> Shape:
    """For x (num_rows, columns) and a weight (num_outputs, columns) on a device with num_sms multiprocessors."""
    rows = next(r for r in _ROWS if r >= num_rows)
    span = FORMATS[qtype].span
    staged = min(_staged_columns(qtype, rows), -(-columns // span) * span)
    blocks = min(-(-num_outputs // TILE_ROWS), num_sms)
    return Shape(rows, _depth(qtype, rows, arch), staged, _staged_bytes(qtype, rows, staged), blocks, WARPS * 32 * teams(qtype, rows))


@cache
def row_launch_shape(qtype: str, num_outputs: int, columns: int, num_sms: int, normed: bool, arch: str) -> RowShape | None:
    """For x (1, columns), normed or not; None where linear_row does not take it: floats, columns that are not whole units or too many, and
    architectures without bulk copies, or that are not to use what others lack."""
    units = columns // _UNIT
    shared = units * (_UNIT_BYTES * (2 if normed else 1) + _BARRIER_BYTES)
    fits = columns % _UNIT == 0 and shared + row_static_shared_bytes() <= SHARED_LIMIT
    if not (fits and FORMATS[qtype].metas and _has_copies(arch)):
        return None
    return RowShape(shared, min(-(-num_outputs // TILE_ROWS), num_sms), WARPS * 32 * 2)


def _has_copies(arch: str) -> bool:
    return arch.endswith("a")  # from 9.0 on, unless kernels for any card are wanted


def _staged_bytes(qtype: str, rows: int, columns: int) -> int:
    quantised = bool(FORMATS[qtype].metas)
    shared = 3 * rows * (columns * (1 if quantised else 2) + _PAD_BYTES)
    if quantised or qtype == "F16":
        shared += -(-columns // _UNIT) * rows * 4
    if qtype in _SUM_GROUP:
        shared += columns // _SUM_GROUP[qtype] * rows * 4
    return shared


@cache
def spec(qtype: str, rows: int, depth: int) -> KernelSpec:
    return KernelSpec("linear_rows.cu", f"linear_rows<{qtype}, {rows}, {depth}>", early=True)


@cache
def row_spec(qtype: str) -> KernelSpec:
    return KernelSpec("linear_row.cu", f"linear_row<{qtype}, {_DEPTH[qtype]}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    """All that products can need, each for the architectures that do."""
    needed: dict[KernelSpec, list[str]] = {}
    for arch, qtype in product(ARCHS, FORMATS):
        copied = (row_spec(qtype),) if FORMATS[qtype].metas and _has_copies(arch) else ()
        for one in (*copied, *(spec(qtype, rows, _depth(qtype, rows, arch)) for rows in _ROWS)):
            needed.setdefault(one, []).append(arch)
    return tuple(replace(one, archs=tuple(archs)) for one, archs in needed.items())


def linear_rows_bytes(weight: CudaWeight, num_rows: int) -> int:
    """Bytes that must move: the weight once, x and the result."""
    return weight.nbytes + num_rows * (weight.rows + weight.columns) * 4


def linear_rows(
    launcher: Launcher,
    x: DeviceArray,
    weight: CudaWeight,
    out: DeviceArray,
    *,
    num_sms: int,
    norm: RmsNorm | None = None,
    bias: DeviceArray | None = None,
    add: bool = False,
    first_column: int = 0,
) -> None:
    """out[:, first_column : first_column + N] = norm(x) weight^T + bias, or += that, with float32 precision; a row's bits depend on that row and the
    weight alone.

    x: f32 (T, K), 1 <= T <= 16; weight: (N, K); out: f32 (T, at least first_column + N); norm.weight: f32 (K,); bias: f32 of out's
    columns. num_sms: multiprocessors of the device, which balances the blocks and changes no result. Reads and writes linear_rows_bytes.
    Raises KernelError on other shapes.
    """
    check_array("linear_rows", "out", out, (x.shape[0], out.shape[1]), "f32")
    if not 0 <= first_column <= out.shape[1] - weight.rows:
        raise KernelError(f"linear_rows: columns {first_column} to {first_column + weight.rows} are not within the {out.shape[1]} of out")
    if bias is not None:
        check_array("linear_rows", "bias", bias, (out.shape[1],), "f32")
    bias_pointer = Pointer(0 if bias is None else bias.ptr + first_column * 4)
    _launch(launcher, x, weight, norm, bias_pointer, Pointer(out.ptr + first_column * 4), out.shape[1], num_sms, add=add)


def glu_rows(
    launcher: Launcher,
    x: DeviceArray,
    gate_up: tuple[CudaWeight, ...],
    out: DeviceArray,
    *,
    num_sms: int,
    norm: RmsNorm,
    activation: str,
) -> None:
    """out = activation(norm(x) gate^T) * (norm(x) up^T), with the precision and the bits of linear_rows.

    x: f32 (T, K); gate_up: one weight (2 F, K) whose tiles of 16 rows are gate and up by turns, or gate and up (F, K) each; out: f32
    (T, F). Raises KernelError on other shapes.
    """
    paired = len(gate_up) == 1
    columns = gate_up[0].rows // 2 if paired else gate_up[0].rows
    check_array("glu_rows", "out", out, (x.shape[0], columns), "f32")
    target, none = Pointer(out.ptr), Pointer(0)
    if not paired:
        _launch(launcher, x, gate_up[0], norm, none, target, columns, num_sms)
    _launch(launcher, x, gate_up[-1], norm, none, target, columns, num_sms, activation=ACTIVATIONS[activation], paired=paired)


def _launch(
    launcher: Launcher,
    x: DeviceArray,
    weight: CudaWeight,
    norm: RmsNorm | None,
    bias: Pointer,
    out: Pointer,
    pitch: int,
    num_sms: int,
    *,
    activation: int = NO_ACTIVATION,
    paired: bool = False,
    add: bool = False,
) -> None:
    """pitch: columns of a row of out."""
    num_rows = x.shape[0]
    if not 1 <= num_rows <= MAX_FEW_ROWS:
        raise KernelError(f"linear_rows: x has {num_rows} rows; 1 to {MAX_FEW_ROWS} were wanted")
    check_array("linear_rows", "x", x, (num_rows, weight.columns), "f32")
    if norm is not None:
        check_array("linear_rows", "norm", norm.weight, (weight.columns,), "f32")
    norm_pointer, eps = (Pointer(0), 0.0) if norm is None else (Pointer(norm.weight.ptr), norm.eps)
    outputs = weight.rows // 2 if paired else weight.rows
    read = (bias, out) if add or (activation != NO_ACTIVATION and not paired) else (bias,)
    # linear_row reads all but weights by copies: from addresses of 16 bytes on, and whole tiles of bias and out.
    copies = all(pointer % 16 == 0 for pointer in (x.ptr, norm_pointer, *read)) and (weight.rows % TILE_ROWS == 0 or not any(read))
    row_shape = row_launch_shape(weight.qtype, outputs, weight.columns, num_sms, norm is not None, launcher.arch)
    shape: Shape | RowShape
    sizes: tuple[int, ...]
    if num_rows == 1 and row_shape is not None and copies:
        shape, kernel, sizes = row_shape, row_spec(weight.qtype), (weight.rows, weight.columns)
    else:
        shape = launch_shape(weight.qtype, num_rows, outputs, weight.columns, num_sms, launcher.arch)
        kernel = spec(weight.qtype, shape.rows, shape.depth)
        sizes = (num_rows, weight.rows, weight.columns, pitch, shape.staged_columns)
    launcher.launch(
        kernel,
        (shape.blocks, 1, 1),
        shape.threads,
        x,
        norm_pointer,
        *weight.planes,
        bias,
        out,
        *map(np.int32, sizes),
        np.float32(eps),
        *map(np.int32, (activation, paired, add)),
        shared_bytes=shape.shared_bytes,
    )
