"""Model files to device memory, near the rate of the link.

A tensor is cut into pieces of whole tiles of rows. Some threads fill pinned slots with the pieces that come next (a copy out of the memory map, 9 GB/s
a thread), while the copy stream moves filled ones into regions of a slab and the stream of computation repacks what has
arrived. Each slot and each region has an event; nothing waits for a tensor to end. A piece of a synthetic matrix is random weights made in
its region, and what is set by hand, which alone passes through the slot.
"""

import ctypes
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollkv.backend import Loadable, Stream
from rollkv.cuda.copies import Event, Events, SlotRing
from rollkv.cuda.device import DeviceArray, Launcher
from rollkv.cuda.driver import DriverCalls
from rollkv.cuda.kernels import repack, synth_noise
from rollkv.cuda.pinned import NUM_SLOTS
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.errors import DeviceError, OutOfMemoryError
from rollkv.gguf_header import TensorData
from rollkv.quants import TILE_ROWS, dequantise
from rollkv.synth import SynthTensor

_THREADS = min(NUM_SLOTS - 4, len(os.sched_getaffinity(0)))  # the other slots are on their way meanwhile


@dataclass(frozen=True)
class _Run:
    """Bytes of a slot that belong together: `num_rows` rows of `width` bytes, to row `first_row` of a piece."""

    offset: int
    first_row: int
    num_rows: int
    width: int


@dataclass(frozen=True)
class _Piece:
    """Rows first_row .. first_row + num_rows - 1 of a matrix, and the tiles first_tile, first_tile + tile_step, ... that they fill; or all of its
    vectors."""

    part: Loadable
    tensor: TensorData
    target: CudaWeight | DeviceArray
    first_row: int
    num_rows: int
    first_tile: int
    tile_step: int
    last: bool  # of its part

    def fill(self, address: int, slot_bytes: int) -> tuple[_Run, ...]:
        """Writes what the host contributes to the slot at `address`, and says where it belongs. Runs on a thread of its own."""
        if isinstance(self.target, DeviceArray):
            values = np.concatenate([dequantise(t.qtype, t.raw, t.shape) for t in self.part.tensors])
            return _put(address, slot_bytes, np.zeros(1, np.int64), values.view(np.uint8).reshape(1, -1))
        row_bytes = repack.row_bytes(self.target)
        if isinstance(self.tensor, SynthTensor):
            rows, values = self.tensor.by_hand(self.first_row, self.num_rows)
            return _put(address, slot_bytes, rows - self.first_row, values)
        begin, count = self.first_row * row_bytes, self.num_rows * row_bytes
        ctypes.memmove(address, self.tensor.raw.ctypes.data + begin, count)
        return (_Run(0, 0, self.num_rows, row_bytes),)


def _put(address: int, slot_bytes: int, rows: np.ndarray, values: np.ndarray) -> tuple[_Run, ...]:
    """Packs the first bytes of some rows into a slot: one run for neighbouring rows. rows int64 [n], rising; values uint8 [n, width]."""
    if values.nbytes > slot_bytes:
        raise OutOfMemoryError(f"a slot of {slot_bytes} bytes of pinned memory cannot hold {values.nbytes}; free host memory")
    if len(rows) == 0:
        return ()
    ctypes.memmove(address, values.ctypes.data, values.nbytes)
    width = values.shape[1]
    begins = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1)]
    ends = [*begins[1:], len(rows)]
    return tuple(_Run(int(b) * width, int(rows[b]), int(e - b), width) for b, e in zip(begins, ends, strict=True))


@dataclass
class WeightLoader:
    """Loads into memory that exists. `slab`, u8, is scratch: at least one tile of 16 rows of every tensor as they are in the file."""

    calls: DriverCalls
    streams: dict[Stream, Any]
    events: Events
    launcher: Launcher
    slots: SlotRing
    slab: DeviceArray
    _repacked: dict[int, Event] = field(default_factory=dict)  # region: behind the repacking that read it last
    _region: int = 0

    def load(self, pairs: Iterable[tuple[Loadable, CudaWeight | DeviceArray]]) -> Generator[Loadable, None, None]:
        """Loads each part into its target, a matrix or an f32 vector, and yields it when all of its work is issued: later COMPUTE work
        finds it whole. Holds slots between the items: go to the end, or close the iterator."""
        self.events.wait(Stream.COPY_IN, self.events.record(Stream.COMPUTE))  # which may still be at work in the slab
        with ThreadPoolExecutor(_THREADS) as threads:
            ahead: deque[tuple[_Piece, int, Future[tuple[_Run, ...]], int]] = deque()
            pieces = (piece for part, target in pairs for piece in self._cut(part, target))
            try:
                for piece in pieces:
                    slot, address = self.slots.take()
                    ahead.append((piece, slot, threads.submit(piece.fill, address, self.slots.slot_bytes), address))
                    if len(ahead) == _THREADS:
                        yield from self._issue(*ahead.popleft())
                while ahead:
                    yield from self._issue(*ahead.popleft())
            finally:
                for _, slot, filling, _ in ahead:  # left early: what was being filled goes nowhere
                    filling.cancel()
                    self._give_back_at_last(slot)

    def _cut(self, part: Loadable, target: CudaWeight | DeviceArray) -> Iterator[_Piece]:
        if isinstance(target, DeviceArray):
            yield _Piece(part, part.tensors[0], target, 0, 1, 0, 1, last=True)
            return
        row_bytes, room = repack.row_bytes(target), min(self.slots.slot_bytes, self.slab.nbytes)
        at_once = room // (row_bytes * TILE_ROWS) * TILE_ROWS
        if at_once == 0:
            raise OutOfMemoryError(
                f"{TILE_ROWS} rows of {part.name} take {row_bytes * TILE_ROWS} bytes, more than the {room} that loading passes them "
                "through; free host memory, so that more of it can be pinned"
            )
        step, begin = (2 if part.paired else 1), 0  # begin: first tile of a tensor
        for number, tensor in enumerate(part.tensors):
            rows, final = tensor.shape[0], number + 1 == len(part.tensors)
            for first in range(0, rows, at_once):
                tile = begin + first // TILE_ROWS * step
                yield _Piece(part, tensor, target, first, min(at_once, rows - first), tile, step, last=final and first + at_once >= rows)
            begin = number + 1 if part.paired else begin + rows // TILE_ROWS

    def _issue(self, piece: _Piece, slot: int, filling: "Future[tuple[_Run, ...]]", address: int) -> Iterator[Loadable]:
        try:
            runs = filling.result()
            if isinstance(piece.target, DeviceArray):
                self._copy(runs, address, piece.target.ptr, piece.target.nbytes)
                self.events.wait(Stream.COMPUTE, self.events.record(Stream.COPY_IN))
            else:
                self._issue_rows(piece, piece.target, runs, address)
        except BaseException:
            self._give_back_at_last(slot)
            raise
        self._give_back(slot)
        if piece.last:
            yield piece.part

    def _give_back(self, slot: int) -> None:
        self.slots.busy_until(slot, self.events.record(Stream.COPY_IN))

    def _give_back_at_last(self, slot: int) -> None:
        """Behind a failure, which is the one to tell of if the device is lost."""
        with suppress(DeviceError):
            self._give_back(slot)

    def _issue_rows(self, piece: _Piece, weight: CudaWeight, runs: tuple[_Run, ...], address: int) -> None:
        row_bytes = repack.row_bytes(weight)
        region_bytes = min(self.slots.slot_bytes, self.slab.nbytes)
        region, self._region = self._region, (self._region + 1) % (self.slab.nbytes // region_bytes)
        raw = self.slab.view((piece.num_rows * row_bytes,), offset_bytes=region * region_bytes)
        if region in self._repacked:
            self.events.wait(Stream.COPY_IN, self._repacked[region])
        if isinstance(piece.tensor, SynthTensor):
            noise, blocks = piece.tensor.noise, row_bytes // piece.tensor.noise.block_bytes
            where = {"first_block": piece.first_row * blocks, "num_blocks": piece.num_rows * blocks}
            synth_noise.synth_noise(self.launcher, noise, raw, **where, stream=Stream.COPY_IN)
        self._copy(runs, address, raw.ptr, row_bytes)
        self.events.wait(Stream.COMPUTE, self.events.record(Stream.COPY_IN))
        repack.repack(self.launcher, raw, weight, first_tile=piece.first_tile, num_rows=piece.num_rows, tile_step=piece.tile_step)
        self._repacked[region] = self.events.record(Stream.COMPUTE)

    def _copy(self, runs: tuple[_Run, ...], address: int, device: int, row_bytes: int) -> None:
        """COPY_IN: from a slot to rows of row_bytes each."""
        stream = self.streams[Stream.COPY_IN]
        for run in runs:
            to, at = device + run.first_row * row_bytes, address + run.offset
            if run.width == row_bytes:
                self.calls("cuMemcpyHtoDAsync", to, at, run.num_rows * run.width, stream)
            else:
                self.calls("cuMemcpy2DAsync", self._rectangle(to, row_bytes, at, run), stream)

    def _rectangle(self, device: int, row_bytes: int, host: int, run: _Run) -> Any:
        kinds = self.calls.bindings.CUmemorytype
        copy = self.calls.bindings.CUDA_MEMCPY2D()
        copy.srcMemoryType, copy.srcHost, copy.srcPitch = kinds.CU_MEMORYTYPE_HOST, host, run.width
        copy.dstMemoryType, copy.dstDevice, copy.dstPitch = kinds.CU_MEMORYTYPE_DEVICE, device, row_bytes
        copy.WidthInBytes, copy.Height = run.width, run.num_rows
        return copy
