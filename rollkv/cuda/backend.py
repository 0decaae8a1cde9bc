"""Backend on one NVIDIA GPU: memory, order and copies from the modules beside it, operations from kernels/ and gemm.py.

Everything is issued asynchronously; `read` and `synchronize` wait. Device memory is taken by `reserve`; weights live until `close`, the rest
until `clear`; in between nothing allocates. Used from the thread that made it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from rollkv.backend import Backend, DeviceUse, GpuFacts, Loadable, PageRun, Projected, RmsNorm, Stream
from rollkv.config import Dtype, LayerConfig, PageFormat, RopeConfig
from rollkv.cuda import gemm
from rollkv.cuda.context import Context
from rollkv.cuda.copies import Copies, Event, Events, SlotRing
from rollkv.cuda.device import DeviceArray, Launcher
from rollkv.cuda.driver import DriverCalls, find_device
from rollkv.cuda.graph import Graph, capture
from rollkv.cuda.kernels import (
    add,
    attn_decode,
    attn_merge,
    attn_prefill,
    embed,
    linear_rows,
    qkv_append,
    repack,
    rope_table,
    synth_noise,
)
from rollkv.cuda.loading import WeightLoader
from rollkv.cuda.memory import HOST_CHUNK_BYTES, DeviceMemory, HostPages, PinnedMemory
from rollkv.cuda.nvrtc import CubinCache, KernelSpec, arch_name, check_compiler
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.errors import DeviceError
from rollkv.quants import device_bytes
from rollkv.synth import SynthTensor
from rollkv.units import round_up
from rollkv.workspace import ALIGNMENT, GEMM_WORKSPACE_BYTES, MAX_FEW_ROWS

_NUMPY: dict[str, type] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}
_OURS: dict[str, Dtype] = {"float32": "f32", "int32": "i32", "uint8": "u8"}


class CudaBackend:
    """See the module and rollkv.backend.Backend. Raises DeviceError for an unusable machine, told apart by kind, before anything is taken.

    context_bytes: device memory of the process once the context existed. `warn` takes one-line messages.
    """

    name = "cuda"

    def __init__(
        self,
        device_index: int = 0,
        *,
        cap_bytes: int | None = None,
        host_chunk_bytes: int = HOST_CHUNK_BYTES,
        warn: Callable[[str], None] = lambda message: None,
        calls: DriverCalls | None = None,
    ) -> None:
        self._calls = calls or DriverCalls()
        self.facts = find_device(self._calls, device_index)
        check_compiler(self.facts.driver_version)
        cache = CubinCache()
        self._context = Context(self._calls, self.facts)
        self.context_bytes = self._context.context_bytes
        streams = self._context.streams
        self.launcher = Launcher(self._calls, arch_name(*self.facts.capability), streams, cache)
        self._weights = DeviceMemory(self._calls, cap_bytes, self._context.used_bytes)
        self._memory = DeviceMemory(self._calls, cap_bytes, self._context.used_bytes)
        self._pinned = PinnedMemory(self._calls, host_chunk_bytes, warn)
        self._events = Events(self._calls, streams)
        self._slots = SlotRing(self._events, self._pinned)
        self._copies = Copies(self._calls, streams, self._events, self._slots)
        self._ropes: dict[RopeConfig, tuple[DeviceArray, float]] = {}
        self._gemm: gemm.Gemm | None = None
        self._warm: set[gemm.Product] = set()  # whose kernels the vendor library has loaded
        self._slab: DeviceArray | None = None  # u8: raw tensors while they load, dequantised weights of large products
        self._large: gemm.LargeProducts | None = None
        self._graphs: list[Graph] = []
        self._closed = False

    def __enter__(self) -> "CudaBackend":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def gpu(self) -> GpuFacts:
        return GpuFacts(self.facts.name, self.facts.total_bytes, ".".join(map(str, self.facts.driver_version)))

    # -- accounts --------------------------------------------------------------------------------------------------------------
    @property
    def device_bytes(self) -> dict[str, int]:
        """Device memory by label: context, modules (code and what libraries keep), and every allocation."""
        return {"context": self.context_bytes, "modules": self.modules_bytes, **self._weights.accounts, **self._memory.accounts}

    @property
    def modules_bytes(self) -> int:
        """What the process holds beside context and reserved memory: code, and what libraries keep. Complete behind `prepare`, but for
        recorded steps."""
        return max(self._context.used_bytes() - self.context_bytes - self._weights.slab_bytes - self._memory.slab_bytes, 0)

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory, the slots that pageable memory passes through included."""
        return self._pinned.pinned_bytes

    def memory_used_bytes(self) -> int:
        """Device memory of this process as seen from outside."""
        return self._context.used_bytes()

    def device_use(self) -> DeviceUse:
        return DeviceUse(self.memory_used_bytes(), self.context_bytes, self.modules_bytes, self.free_bytes())

    def free_bytes(self) -> int:
        """Device memory that can still be had."""
        return self._context.free_bytes()

    # -- memory ----------------------------------------------------------------------------------------------------------------
    def reserve(self, *, weight_bytes: int = 0, run_bytes: int = 0) -> None:
        for memory, num_bytes in ((self._weights, weight_bytes), (self._memory, run_bytes)):
            if num_bytes:
                memory.reserve(num_bytes)

    def clear(self) -> None:
        self.synchronize()
        self._clear()

    def prepare(self, rehearse: Callable[[Backend], None]) -> None:
        rehearsal = _Rehearsal(self)
        rehearse(rehearsal)
        self.launcher.prepare(rehearsal.launcher.specs)
        new = tuple(product for product in rehearsal.products if product not in self._warm)
        if new:
            self._warm_up(new)
            self._warm.update(new)

    def limit(self, cap_bytes: int | None) -> None:
        self._weights.cap_bytes = self._memory.cap_bytes = cap_bytes

    def _warm_up(self, products: tuple[gemm.Product, ...]) -> None:
        """Makes every product once, in borrowed memory: the vendor library loads its kernels at their first use."""
        x16 = 2 * max(p.rows * p.columns for p in products)
        weight16 = round_up(2 * max(p.outputs * p.columns for p in products), ALIGNMENT)
        out = round_up(4 * max(p.rows * p.all_outputs for p in products), ALIGNMENT)
        total = GEMM_WORKSPACE_BYTES + weight16 + out + x16
        with self._memory.borrowed("products to warm up with", total) as address:
            room = DeviceArray(address, (total,), "u8")
            workspace = room.view((GEMM_WORKSPACE_BYTES,))
            if self._gemm is None:
                self._gemm = gemm.Gemm(self._context.streams[Stream.COMPUTE], workspace)
            self._gemm.use_workspace(workspace)
            for p in products:
                weight = room.view((p.outputs, p.columns), "f16", GEMM_WORKSPACE_BYTES)
                result = room.view((p.rows, p.all_outputs), "f32", GEMM_WORKSPACE_BYTES + weight16)
                self._gemm.multiply(room.view((p.rows, p.columns), "f16", GEMM_WORKSPACE_BYTES + weight16 + out), weight, result)
            self.synchronize()

    def reserve_linear(self, max_rows: int, max_columns: int, max_added: int, slab_bytes: int) -> None:
        """Call it once, before weights load, which pass through the slab, and again behind `clear`."""
        if self._slab is not None:
            raise ValueError("reserve_linear was called before")
        self._slab = self.empty("dequantised weights", (slab_bytes,), "u8")
        if max_rows <= MAX_FEW_ROWS:
            return
        x16 = self.empty("f16 activations", (max_rows, max_columns), "f16")
        row_scale = self.empty("row scales", (max_rows,), "f32")
        products = self.empty("products", (max_rows, max_added), "f32")
        self._large = gemm.LargeProducts(self.launcher, self._library(), self._slab, x16, row_scale, products)

    def _library(self) -> gemm.Gemm:
        """cuBLAS, working in memory of the arena from now on."""
        workspace = self.empty("cuBLAS", (GEMM_WORKSPACE_BYTES,), "u8")
        if self._gemm is None:
            self._gemm = gemm.Gemm(self._context.streams[Stream.COMPUTE], workspace)
        self._gemm.use_workspace(workspace)
        return self._gemm

    def empty(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        return _take(self._memory, label, shape, dtype)

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

    def load(self, parts: Iterable[Loadable]) -> Iterator[CudaWeight | DeviceArray]:
        """Host memory stays at the size of the pinned slots."""
        if self._slab is None:
            raise ValueError("load: call reserve_linear first")
        pairs = [(part, self._target(part)) for part in parts]
        loader = WeightLoader(self._calls, self._context.streams, self._events, self.launcher, self._slots, self._slab)
        for _, (_, target) in zip(loader.load(pairs), pairs, strict=True):
            yield target

    def _target(self, part: Loadable) -> CudaWeight | DeviceArray:
        if len(part.shape) == 1:
            return self._kept(part.name, part.shape, "f32")
        return CudaWeight(part.name, part.shape, part.qtype, self._kept(part.name, (device_bytes(part.qtype, part.shape),), "u8"))

    def _kept(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        """Memory that `clear` leaves alone."""
        return _take(self._weights, label, shape, dtype)

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
        self._clear()
        with suppress(DeviceError):
            if self._gemm is not None:
                self._gemm.close()
        self._gemm = None
        self._pinned.close()
        self.launcher.close()
        self._events.close()
        self._weights.close()
        self._context.close()
        self._closed = True

    def _clear(self) -> None:
        self._slab = self._large = None
        self._ropes.clear()
        while self._graphs:
            self._graphs.pop().close()
        self._pinned.free_pages()
        self._memory.close()

    # -- operations ------------------------------------------------------------------------------------------------------------
    def embed(self, tokens: DeviceArray, table: CudaWeight, scale: float, out: DeviceArray) -> None:
        embed.embed(self.launcher, tokens, table, out, scale=scale)

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
        if x.shape[0] > MAX_FEW_ROWS:
            self._large_products(x).linear(x, weights, out, norm=norm, bias=bias, add=add)
            return
        column = 0
        for weight in weights:
            linear_rows.linear_rows(
                self.launcher, x, weight, out, num_sms=self.facts.num_sms, norm=norm, bias=bias, add=add, first_column=column
            )
            column += weight.rows

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
        if x.shape[0] > MAX_FEW_ROWS:
            self._large_products(x).feed_forward(x, norm, gate_up, activation, down, out, scratch, add=add)
            return
        gated = scratch.view((x.shape[0], down[0].columns))
        linear_rows.glu_rows(self.launcher, x, gate_up, gated, num_sms=self.facts.num_sms, norm=norm, activation=activation)
        self.linear(gated, down, out, add=add)

    def _large_products(self, x: DeviceArray) -> gemm.LargeProducts:
        if self._large is None or x.shape[0] > self._large.max_rows:
            raise ValueError(f"{x.shape[0]} rows are more than reserve_linear was told of")
        return self._large

    def rope_table(self, rope: RopeConfig, position: DeviceArray, out: DeviceArray) -> None:
        constants = self._ropes.get(rope)
        if constants is None:  # a few hundred bytes, once a rotation, in the first step
            frequency, magnitude = rope_table.table_constants(rope)
            constants = self._ropes[rope] = self.upload("rope frequencies", frequency.view(np.uint8)), magnitude
        rope_table.rope_table(self.launcher, position, constants[0], out, magnitude=constants[1])

    def append(self, projected: Projected, position: DeviceArray, runs: tuple[PageRun, ...], page: PageFormat, first_position: int) -> None:
        qkv_append.qkv_append(self.launcher, projected, position, runs, page, first_position)

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

    def add(self, x: DeviceArray, y: DeviceArray, norm: RmsNorm | None = None) -> None:
        add.add(self.launcher, x, y, norm)


def _take(memory: DeviceMemory, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
    return DeviceArray(memory.take(label, DeviceArray(0, shape, dtype).nbytes), shape, dtype)


class _SpecList(Launcher):
    """A launcher that launches nothing and keeps what it was asked for."""

    def __init__(self, real: Launcher) -> None:
        self.__dict__.update(real.__dict__)
        self.specs: dict[KernelSpec, None] = {}

    def launch(self, spec: KernelSpec, grid: Any, block: int, *args: Any, shared_bytes: int = 0, stream: Stream = Stream.COMPUTE) -> None:
        self.specs[spec] = None


class _ProductList(gemm.Gemm):
    """Stands for the vendor library and keeps what it was asked for."""

    def __init__(self) -> None:
        self.products: dict[gemm.Product, None] = {}

    def multiply(self, x16: DeviceArray, weight16: DeviceArray, out: DeviceArray, *, first_column: int = 0) -> None:
        self.products[gemm.Product(x16.shape[0], x16.shape[1], weight16.shape[0], out.shape[1])] = None


class _Rehearsal(CudaBackend):
    """The operations of a backend without their effect: all parts are the real one's but those that take memory or issue work."""

    launcher: _SpecList
    _ADDRESS = 1 << 20  # never followed

    def __init__(self, real: CudaBackend) -> None:
        self.__dict__.update(real.__dict__)
        self.launcher = _SpecList(real.launcher)
        self._list = _ProductList()
        self._slab = self._large = None
        self._ropes = {}

    @property
    def products(self) -> dict[gemm.Product, None]:
        return self._list.products

    def _library(self) -> gemm.Gemm:
        return self._list

    def empty(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        return DeviceArray(self._ADDRESS, shape, dtype)

    def _kept(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        return self.empty(label, shape, dtype)

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        pass

    def load(self, parts: Iterable[Loadable]) -> Iterator[CudaWeight | DeviceArray]:
        for part in parts:
            target = self._target(part)
            if isinstance(target, CudaWeight):
                raw = self.empty("", (target.rows * repack.row_bytes(target),), "u8")
                for tensor in part.tensors:
                    if isinstance(tensor, SynthTensor):
                        synth_noise.synth_noise(self.launcher, tensor.noise, raw, first_block=0, num_blocks=1)
                repack.repack(self.launcher, raw, target, first_tile=0, num_rows=target.rows)
            yield target

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> HostPages:
        return HostPages(page_bytes, 0, ())

    def record(self, stream: Stream) -> Any:
        return None

    def wait(self, stream: Stream, event: Any) -> None:
        pass

    def copy_in(self, run: PageRun, host: HostPages) -> None:
        pass

    def copy_out(self, run: PageRun, host: HostPages) -> None:
        pass

    def copy_page(self, source: DeviceArray, source_slot: int, target: DeviceArray, target_slot: int) -> None:
        pass
