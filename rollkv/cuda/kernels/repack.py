"""Raw GGUF blocks to the planes of the device form (csrc/repack.cu)."""

from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.cuda.device import DeviceArray, Launcher
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.quants import STEP_COLUMNS, TILE_ROWS, CodeField, DeviceForm, span_bytes

_THREADS = 256
_MAX_BLOCKS = 8192  # the kernels stride over what is left


@cache
def spec(kernel: str) -> KernelSpec:
    return KernelSpec("repack.cu", kernel)


def instances() -> tuple[KernelSpec, ...]:
    return spec("repack_codes"), spec("repack_bytes")


def row_bytes(weight: CudaWeight) -> int:
    """Bytes of a row in the file."""
    return weight.columns // weight.form.format.elements * weight.form.format.nbytes


def launch_blocks(threads: int) -> int:
    """Blocks of a launch for so many words or bytes."""
    return max(1, min(_MAX_BLOCKS, -(-threads // _THREADS)))


class _Launch(NamedTuple):
    """One plane of a form: its kernel, the words or bytes of a tile, and the numbers that describe the field."""

    spec: KernelSpec
    per_tile: int
    numbers: tuple[np.int32, ...]


@cache
def _launches(form: DeviceForm) -> tuple[_Launch, ...]:
    fmt, launches = form.format, []
    for plane in form.planes:
        field, tile_bytes = plane.field, form.spans * span_bytes(form.format, plane.field)
        numbers: tuple[int, ...]
        if isinstance(field, CodeField):
            numbers = (fmt.elements, fmt.nbytes, fmt.span // STEP_COLUMNS, field.offset, field.bits, max(field.run, 1))
            launches.append(_Launch(spec("repack_codes"), tile_bytes // 4, tuple(map(np.int32, numbers))))
        else:
            numbers = (fmt.nbytes, fmt.span // fmt.elements, field.offset, field.length)
            launches.append(_Launch(spec("repack_bytes"), tile_bytes, tuple(map(np.int32, numbers))))
    return tuple(launches)


def repack_bytes(weight: CudaWeight, num_rows: int) -> int:
    """Bytes read and written for rows of a weight."""
    return 2 * num_rows * row_bytes(weight)


def repack(launcher: Launcher, raw: DeviceArray, weight: CudaWeight, *, first_tile: int, num_rows: int, tile_step: int = 1) -> None:
    """Moves num_rows rows from the file's form into the tiles first_tile, first_tile + tile_step, ... of the planes of `weight`.

    raw: u8 (at least num_rows * row_bytes,); num_rows: a multiple of 16 unless it ends the matrix. Writes the padding too, so that
    repacking all rows defines every byte of the planes. Reads and writes repack_bytes. Raises KernelError on other shapes.
    """
    form, fmt = weight.form, weight.form.format
    tiles = -(-num_rows // TILE_ROWS)
    first = first_tile * TILE_ROWS
    end = first + (tiles - 1) * tile_step * TILE_ROWS + num_rows - (tiles - 1) * TILE_ROWS
    if raw.dtype != "u8" or raw.nbytes < num_rows * row_bytes(weight):
        raise KernelError(f"repack: raw must be u8 with at least {num_rows * row_bytes(weight)} bytes, not {raw.dtype} {list(raw.shape)}")
    if not 0 <= first < end <= weight.rows or tile_step < 1 or (num_rows % TILE_ROWS and end != weight.rows):
        raise KernelError(f"repack: rows {first} to {end} of {weight.rows} are no whole tiles of {TILE_ROWS}")
    where = (*map(np.int64, (first_tile, tile_step, tiles, num_rows)), np.int32(weight.columns // fmt.elements), np.int32(form.spans))
    for launch, target in zip(_launches(form), weight.planes, strict=False):
        blocks = launch_blocks(tiles * launch.per_tile)
        launcher.launch(launch.spec, (blocks, 1, 1), _THREADS, raw, target, *where, *launch.numbers)
