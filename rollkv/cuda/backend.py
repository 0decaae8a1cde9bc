"""Backend on one NVIDIA GPU: memory, order and copies from the modules beside it, operations from kernels/ and gemm.py.

Everything is issued asynchronously; `read` and `synchronize` wait. Device memory is taken by `reserve` and lives until `close`; after
loading nothing allocates. Used from the thread that made it.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from rollkv.backend import DeviceUse, PageRun, Stream
from rollkv.config import Dtype, LayerConfig, PageFormat, RopeConfig
from rollkv.cuda import gemm
from rollkv.cuda.context import Context
from rollkv.cuda.copies import Copies, Event, Events
from rollkv.cuda.device import DeviceArray, Launcher
from rollkv.cuda.driver import DriverCalls, find_device
from rollkv.cuda.graph import Graph, capture
from rollkv.cuda.kernels import add, attn_decode, attn_merge, attn_prefill, embed, glu, kv_append, linear_rows, repack, rms_norm
from rollkv.cuda.kernels import rope as rotation
from rollkv.cuda.memory import HOST_CHUNK_BYTES, DeviceMemory, HostPages, PinnedMemory
from rollkv.cuda.nvrtc import CubinCache, KernelSpec, arch_name, check_compiler
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.errors import DeviceError
from rollkv.gguf_header import TensorData
from rollkv.quants import TILE_ROWS, dequantise, device_bytes
from rollkv.workspace import GEMM_WORKSPACE_BYTES, MAX_FEW_ROWS

_NUMPY: dict[str, type] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}
_OURS: dict[str, Dtype] = {"float32": "f32", "int32": "i32", "uint8": "u8"}


@dataclass(frozen=True)
class _LinearScratch:
    """Memory of products with many rows. `slab` also takes raw tensors while they load."""

    slab: DeviceArray  # u8; holds dequantised weights, f16
    x16: DeviceArray | None  # f16 [max_rows, max_columns]; this and what follows only for more than 16 rows
    row_scale: DeviceArray | None  # f32 [max_rows]
    gemm: gemm.Gemm | None


class CudaBackend:
    """See the module and rollkv.backend.Backend. Raises DeviceError for an unusable machine, told apart by kind, before anything is taken.

    context_bytes: device memory of the process once the context existed. `warn` takes one-line messages. portable: the kernels that every
    card from compute capability 8.0 on can run, instead of those written for this card's generation; results differ by rounding alone.
    """

    name = "cuda"

    def __init__(
        self,
        device_index: int = 0,
        *,
        cap_bytes: int | None = None,
        host_chunk_bytes: int = HOST_CHUNK_BYTES,
        warn: Callable[[str], None] = lambda message: None,
        portable: bool = False,
        calls: DriverCalls | None = None,
    ) -> None:
        self._calls = calls or DriverCalls()
        self.facts = find_device(self._calls, device_index)
        check_compiler(self.facts.driver_version)
        cache = CubinCache()
        self._context = Context(self._calls, self.facts)
        self.context_bytes = self._context.context_bytes
        streams = self._context.streams
        self.launcher = Launcher(self._calls, arch_name(*self.facts.capability, portable=portable), streams, cache)
        self._memory = DeviceMemory(self._calls, cap_bytes, self._context.used_bytes)
        self._pinned = PinnedMemory(self._calls, host_chunk_bytes, warn)
        self._events = Events(self._calls, streams)
        self._copies = Copies(self._calls, streams, self._events, self._pinned)
        self._ropes: dict[RopeConfig, tuple[DeviceArray, float]] = {}
        self._scratch: _LinearScratch | None = None
        self._graphs: list[Graph] = []
        self._closed = False

    def __enter__(self) -> "CudaBackend":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- accounts --------------------------------------------------------------------------------------------------------------
    @property
    def device_bytes(self) -> dict[str, int]:
        """Device memory by label: context, modules (code and what libraries keep), and every allocation."""
        return {"context": self.context_bytes, "modules": self.modules_bytes, **self._memory.accounts}

    @property
    def modules_bytes(self) -> int:
        """What the process holds beside context and arena: grows with the kernels loaded so far; call `prepare` first."""
        return max(self._context.used_bytes() - self.context_bytes - self._memory.slab_bytes, 0)

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory, the staging buffer included."""
        return self._pinned.pinned_bytes

    def memory_used_bytes(self) -> int:
        """Device memory of this process as seen from outside."""
        return self._context.used_bytes()

    def device_use(self) -> DeviceUse:
        return DeviceUse(self.memory_used_bytes(), self.context_bytes, self.modules_bytes, self.free_bytes())

    def free_bytes(self) -> int:
        """Device memory that can still be had."""
        return self._context.free_bytes()

    def handle(self, stream: Stream) -> Any:
        """The driver's handle of a stream, for work beside the operations."""
        return self._context.streams[stream]

    # -- memory ----------------------------------------------------------------------------------------------------------------
    def reserve(self, num_bytes: int) -> None:
        self._memory.reserve(num_bytes)

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        """Compiles and loads kernels ahead, so that their memory is taken before the first token."""
        self.launcher.prepare(specs)

    def reserve_linear(self, max_rows: int, max_columns: int, slab_bytes: int) -> None:
        """Scratch of `linear` for up to max_rows rows of up to max_columns columns, and of `load_weight`; the bytes are those of
        workspace.linear_scratch. Call it once, before weights load."""
        if self._scratch is not None:
            raise ValueError("reserve_linear was called before")
        slab = self.empty("dequantised weights", (slab_bytes,), "u8")
        if max_rows <= MAX_FEW_ROWS:
            self._scratch = _LinearScratch(slab, None, None, None)
            return
        x16 = self.empty("f16 activations", (max_rows, max_columns), "f16")
        row_scale = self.empty("row scales", (max_rows,), "f32")
        workspace = self.empty("cuBLAS", (GEMM_WORKSPACE_BYTES,), "u8")
        self._scratch = _LinearScratch(slab, x16, row_scale, gemm.Gemm(self._context.streams[Stream.COMPUTE], workspace))

    def empty(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        described = DeviceArray(0, shape, dtype)
        return DeviceArray(self._memory.take(label, described.nbytes), shape, dtype)

    def upload(self, label: str, values: np.ndarray) -> DeviceArray:
        array = self.empty(label, values.shape, _OURS[values.dtype.name])
        self.write(array, values)
        return array

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        if values.dtype != _NUMPY[array.dtype] or values.nbytes > array.nbytes:
            raise ValueError(f"write: {values.dtype} {values.shape} into {array.dtype} {array.shape}")
        self._copies.upload(array.ptr, values.ctypes.data, values.nbytes)

    def read(self, array: DeviceArray) -> np.ndarray:
        values: np.ndarray = np.empty(array.shape, _NUMPY[array.dtype])
        try:
            self._copies.download(array.ptr, values.ctypes.data, values.nbytes)
        except DeviceError:
            self.synchronize()  # a kernel's failure surfaces here: name the kernel
            raise
        return values

    def load_weight(self, tensor: TensorData) -> CudaWeight:
        """Streams the raw blocks through the pinned stage and the slab, some tiles of 16 rows at a time, and splits them into planes on
        the device: host memory stays at the size of the stage."""
        if self._scratch is None:
            raise ValueError("load_weight: call reserve_linear first")
        slab, nbytes = self._scratch.slab, device_bytes(tensor.qtype, tensor.shape)
        weight = CudaWeight(tensor.name, tensor.shape, tensor.qtype, self.empty(tensor.name, (nbytes,), "u8"))
        row_bytes = repack.row_bytes(weight)
        tiles_at_once = slab.nbytes // (row_bytes * TILE_ROWS)
        if tiles_at_once == 0:
            raise ValueError(
                f"load_weight: {TILE_ROWS} rows of {tensor.name} take {row_bytes * TILE_ROWS} bytes; the slab has {slab.nbytes}"
            )
        raw = tensor.raw  # once: a synthetic tensor makes it on demand
        for first in range(0, weight.rows, tiles_at_once * TILE_ROWS):
            rows = min(tiles_at_once * TILE_ROWS, weight.rows - first)
            part = raw[first * row_bytes : (first + rows) * row_bytes]
            self._copies.upload(slab.ptr, part.ctypes.data, part.nbytes)
            repack.repack(self.launcher, slab, weight, first_tile=first // TILE_ROWS, num_rows=rows)
        return weight

    def load_vector(self, tensor: TensorData) -> DeviceArray:
        return self.upload(tensor.name, dequantise(tensor.qtype, tensor.raw, tensor.shape).reshape(-1))

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> HostPages:
        return self._pinned.pages(label, num_pages, page_bytes)

    # -- order -----------------------------------------------------------------------------------------------------------------
    def record(self, stream: Stream) -> Event:
        return self._events.record(stream)

    def record_timed(self, stream: Stream) -> Event:
        """An event that elapsed_ms can read."""
        return self._events.record_timed(stream)

    def elapsed_ms(self, begin: Event, end: Event) -> float:
        """Device time between two timed events; waits for the second."""
        return self._events.elapsed_ms(begin, end)

    def wait(self, stream: Stream, event: Event) -> None:
        self._events.wait(stream, event)

    def copy_in(self, run: PageRun, host: HostPages) -> None:
        self._copies.copy_in(run, host)

    def copy_out(self, run: PageRun, host: HostPages) -> None:
        self._copies.copy_out(run, host)

    def copy_page(self, source: DeviceArray, source_slot: int, target: DeviceArray, target_slot: int) -> None:
        self._copies.copy_page(source, source_slot, target, target_slot)

    @property
    def can_record(self) -> bool:
        """Copies of pageable memory wait on the host, which a graph cannot hold."""
        return not self._pinned.has_pageable

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = capture(self._calls, self._context.streams[Stream.COMPUTE], work)
        self._graphs.append(graph)
        return graph

    def replay(self, graph: Graph) -> None:
        graph.replay(self._context.streams[Stream.COMPUTE])

    def release(self, graph: Graph) -> None:
        self.synchronize()
        graph.close()
        self._graphs.remove(graph)

    def synchronize(self) -> None:
        self._context.synchronize(self.launcher.last_launched)

    def close(self) -> None:
        """Waits for what is under way, then frees everything. Safe after errors and interrupts; a second call ends what the first began."""
        if self._closed:
            return
        with suppress(DeviceError):
            self.synchronize()
        with suppress(DeviceError):
            if self._scratch is not None and self._scratch.gemm is not None:
                self._scratch.gemm.close()
        self._scratch = None
        self._ropes.clear()
        while self._graphs:
            self._graphs.pop().close()
        self.launcher.close()
        self._events.close()
        self._pinned.close()
        self._memory.close()
        self._context.close()
        self._closed = True

    # -- operations ------------------------------------------------------------------------------------------------------------
    def embed(self, tokens: DeviceArray, table: CudaWeight, scale: float, out: DeviceArray) -> None:
        embed.embed(self.launcher, tokens, table, out, scale=scale)

    def rms_norm(self, x: DeviceArray, weight: DeviceArray, eps: float, out: DeviceArray) -> None:
        rms_norm.rms_norm(self.launcher, x, weight, out, eps=eps)

    def linear(self, x: DeviceArray, weight: CudaWeight, out: DeviceArray, bias: DeviceArray | None = None) -> None:
        if x.shape[0] <= MAX_FEW_ROWS:
            linear_rows.linear_rows(self.launcher, x, weight, out, bias, num_sms=self.facts.num_sms)
            return
        scratch = self._scratch
        if scratch is None or scratch.gemm is None or scratch.x16 is None or scratch.row_scale is None or x.shape[0] > scratch.x16.shape[0]:
            raise ValueError(f"linear: {x.shape[0]} rows of {x.shape[1]} columns are more than reserve_linear was told of")
        gemm.large_linear(self.launcher, scratch.gemm, x, weight, out, bias, scratch.slab, scratch.x16, scratch.row_scale)

    def rope_table(self, rope: RopeConfig, position: DeviceArray, out: DeviceArray) -> None:
        constants = self._ropes.get(rope)
        if constants is None:  # a few hundred bytes, once a rotation, in the first step
            frequency, magnitude = rotation.table_constants(rope)
            constants = self._ropes[rope] = self.upload("rope frequencies", frequency.view(np.uint8)), magnitude
        rotation.rope_table(self.launcher, position, constants[0], out, magnitude=constants[1])

    def rope(self, x: DeviceArray, num_heads: int, table: DeviceArray, rope: RopeConfig) -> None:
        rotation.rope(self.launcher, x, table, num_heads=num_heads, style=rope.style)

    def append(
        self, k: DeviceArray, v: DeviceArray, position: DeviceArray, runs: tuple[PageRun, ...], page: PageFormat, first_position: int
    ) -> None:
        kv_append.append(self.launcher, k, v, position, runs, page, first_position)

    def attend_rows(
        self,
        q: DeviceArray,
        position: DeviceArray,
        run: PageRun,
        base_page: int,
        layer: LayerConfig,
        page: PageFormat,
        scale: float,
        part_out: DeviceArray,
        part_lse: DeviceArray,
    ) -> None:
        attn_decode.attend_rows(self.launcher, q, position, run, base_page, layer, page, scale, part_out, part_lse)

    def merge_rows(self, part_out: DeviceArray, part_lse: DeviceArray, num_parts: int, layer: LayerConfig, out: DeviceArray) -> None:
        attn_merge.merge_rows(self.launcher, part_out, part_lse, num_parts, layer, out)

    def attend_tile(
        self,
        q: DeviceArray,
        position: DeviceArray,
        run: PageRun,
        layer: LayerConfig,
        page: PageFormat,
        scale: float,
        state: DeviceArray,
        *,
        first: bool,
        last: bool,
        out: DeviceArray,
    ) -> None:
        attn_prefill.attend_tile(self.launcher, q, position, run, layer, page, scale, state, first=first, last=last, out=out)

    def glu(self, gate: DeviceArray, up: DeviceArray, activation: str, out: DeviceArray) -> None:
        glu.glu(self.launcher, gate, up, out, activation=activation)

    def add(self, x: DeviceArray, y: DeviceArray) -> None:
        add.add(self.launcher, x, y)
