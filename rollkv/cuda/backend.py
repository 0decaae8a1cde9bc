"""Backend on one NVIDIA GPU: memory, order and copies from the modules beside it; operations.py has the operations.

Everything is issued asynchronously; `read` and `synchronize` wait. Device memory is taken by `reserve`; weights live until `close`, the rest
until `clear`; in between nothing allocates. Used from the thread that made it.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from types import TracebackType
from typing import Any, cast

import numpy as np

from rollkv.backend import Backend, DeviceUse, GpuFacts, Loadable, PageRun, Stream, TailMade
from rollkv.config import Dtype
from rollkv.cuda import gemm
from rollkv.cuda.context import Context
from rollkv.cuda.copies import Copies, Event, Events, Notes, SlotRing
from rollkv.cuda.device import DeviceArray, Launcher
from rollkv.cuda.driver import DriverCalls, find_device
from rollkv.cuda.graph import Graph, capture
from rollkv.cuda.loading import WeightLoader
from rollkv.cuda.memory import DeviceMemory
from rollkv.cuda.nvrtc import CubinCache, arch_name, check_compiler
from rollkv.cuda.operations import Operations
from rollkv.cuda.pinned import HOST_CHUNK_BYTES, AwaitPages, PinnedMemory, Progress
from rollkv.cuda.rehearsal import Rehearsal
from rollkv.cuda.weights_gpu import CudaWeight, place
from rollkv.errors import DeviceError
from rollkv.numa import node_of
from rollkv.units import round_up
from rollkv.workspace import ALIGNMENT, GEMM_WORKSPACE_BYTES

_NUMPY: dict[str, type] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8}


class CudaBackend(Operations):
    """See the module and rollkv.backend.Backend. Raises DeviceError for an unusable machine, told apart by kind, before anything is taken.

    context_bytes: device memory of the process once the context existed. `warn` takes one-line messages. portable: the kernels that every
    card from compute capability 8.0 on can run, instead of those written for this card's generation; results differ by rounding alone.
    on_tail(bytes, all bytes) is told of host pages while somebody waits for them.
    """

    name = "cuda"

    def __init__(
        self,
        device_index: int = 0,
        *,
        cap_bytes: int | None = None,
        host_chunk_bytes: int = HOST_CHUNK_BYTES,
        warn: Callable[[str], None] = lambda message: None,
        on_tail: Progress = lambda done, total: None,
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
        launcher = Launcher(self._calls, arch_name(*self.facts.capability, portable=portable), streams, cache)
        super().__init__(launcher, self.facts.num_sms)
        self._weights = DeviceMemory(self._calls, cap_bytes, self._context.used_bytes)
        self._memory = DeviceMemory(self._calls, cap_bytes, self._context.used_bytes)
        self._pinned = PinnedMemory(self._calls, host_chunk_bytes, warn, node=node_of(self.facts.pci_bus_id), on_progress=on_tail)
        self._events = Events(self._calls, streams)
        self._slots = SlotRing(self._events, self._pinned)
        self._copies = Copies(self._calls, streams, self._events, self._slots)
        self._notes = Notes(self._calls, streams, self._events, self._pinned)
        self._gemm: gemm.Gemm | None = None
        self._warm: set[gemm.Product] = set()  # whose kernels the vendor library has loaded
        self._graphs: list[Graph] = []
        self._closed = False

    def __enter__(self) -> "CudaBackend":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def gpu(self) -> GpuFacts:
        return self.facts.gpu

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

    def handle(self, stream: Stream) -> Any:
        """The driver's handle of a stream, for work beside the operations."""
        return self._context.streams[stream]

    # -- memory ----------------------------------------------------------------------------------------------------------------
    def reserve(self, *, weight_bytes: int = 0, run_bytes: int = 0) -> None:
        for memory, num_bytes in ((self._weights, weight_bytes), (self._memory, run_bytes)):
            if num_bytes:
                memory.reserve(num_bytes)

    def clear(self) -> None:
        self.synchronize()
        self._clear()

    def prepare(self, rehearse: Callable[[Backend], None]) -> None:
        rehearsal = Rehearsal(self.launcher, self.facts.num_sms)
        rehearse(cast(Backend, rehearsal))  # of which steps use no more than it has
        self.launcher.prepare(rehearsal.kernels)
        new = tuple(product for product in rehearsal.products if product not in self._warm)
        if new:
            self._warm_up(new)
            self._warm.update(new)

    def limit(self, cap_bytes: int | None) -> None:
        self._weights.cap_bytes = self._memory.cap_bytes = cap_bytes

    def _warm_up(self, products: tuple[gemm.Product, ...]) -> None:
        """Makes every product once, in borrowed memory: the vendor library loads its kernels at their first use. What is borrowed is less than
        the arrays of the run that the products belong to, so wherever that run fits beside weights that are there already, this does."""
        x16 = 2 * max(p.rows * p.columns for p in products)
        weight16 = round_up(2 * max(p.outputs * p.columns for p in products), ALIGNMENT)
        out = round_up(4 * max(p.rows * p.all_outputs for p in products), ALIGNMENT)
        total = GEMM_WORKSPACE_BYTES + weight16 + out + x16
        with self._memory.borrowed("products to warm up with", total) as address:
            room = DeviceArray(address, (total,), "u8")
            library = self.library(room.view((GEMM_WORKSPACE_BYTES,)))
            for p in products:
                weight = room.view((p.outputs, p.columns), "f16", GEMM_WORKSPACE_BYTES)
                result = room.view((p.rows, p.all_outputs), "f32", GEMM_WORKSPACE_BYTES + weight16)
                library.multiply(room.view((p.rows, p.columns), "f16", GEMM_WORKSPACE_BYTES + weight16 + out), weight, result)
            self.synchronize()

    def library(self, workspace: DeviceArray) -> gemm.Gemm:
        if self._gemm is None:
            self._gemm = gemm.Gemm(self._context.streams[Stream.COMPUTE], workspace)
        self._gemm.use_workspace(workspace)
        return self._gemm

    def empty(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        return _take(self._memory, label, shape, dtype)

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        if values.dtype != _NUMPY[array.dtype] or values.nbytes > array.nbytes:
            raise ValueError(f"write: {values.dtype} {values.shape} into {array.dtype} {array.shape}")
        self._copies.upload(array.ptr, values.ctypes.data, values.nbytes)

    def read(self, array: DeviceArray) -> np.ndarray:
        values: np.ndarray = np.empty(array.shape, _NUMPY[array.dtype])
        with self._naming_the_kernel():
            self._copies.download(array.ptr, values.ctypes.data, values.nbytes)
        return values

    def read_later(self, array: DeviceArray) -> Callable[[], np.ndarray]:
        data = self._notes.read_later(array.ptr, array.nbytes)

        def read() -> np.ndarray:
            with self._naming_the_kernel():
                return np.frombuffer(data(), _NUMPY[array.dtype]).reshape(array.shape)

        return read

    @contextmanager
    def _naming_the_kernel(self) -> Iterator[None]:
        """A kernel's failure surfaces where the host waits."""
        try:
            yield
        except DeviceError:
            self.synchronize()
            raise

    def load(self, parts: Iterable[Loadable]) -> Generator[CudaWeight | DeviceArray, None, None]:
        """Host memory stays at the size of the pinned slots."""
        if self._slab is None:
            raise ValueError("load: call reserve_linear first")
        pairs = [(part, place(part, lambda *what: _take(self._weights, *what))) for part in parts]
        loader = WeightLoader(self._calls, self._context.streams, self._events, self.launcher, self._slots, self._slab)
        with closing(loader.load(pairs)) as loaded:
            for _, (_, target) in zip(loaded, pairs, strict=True):
                yield target

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> AwaitPages:
        return self._pinned.pages(label, num_pages, page_bytes)

    @property
    def tail_made(self) -> TailMade | None:
        return self._pinned.made

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

    def copy_in(self, run: PageRun, host: AwaitPages) -> None:
        self._copies.copy_in(run, host())

    def copy_out(self, run: PageRun, host: AwaitPages) -> None:
        self._copies.copy_out(run, host())

    def copy_page(self, source: DeviceArray, source_slot: int, target: DeviceArray, target_slot: int) -> None:
        self._copies.copy_page(source, source_slot, target, target_slot)

    @property
    def can_record(self) -> bool:
        """Copies of pageable memory wait on the host, which a graph cannot hold."""
        self._pinned.settle()
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
        """Waits for what is under way, then frees everything. Safe after errors and interrupts; one that comes meanwhile is raised when all is
        freed. May be called twice."""
        if self._closed:
            return
        try:
            self._close()
        except KeyboardInterrupt:
            self._close()
            raise

    def _close(self) -> None:
        """Every part forgets a thing before it frees it, so this may break off anywhere and begin again."""
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
        self.forget_memory()
        while self._graphs:
            self._graphs.pop().close()
        self._pinned.free_pages()
        self._memory.close()


def _take(memory: DeviceMemory, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
    return DeviceArray(memory.take(label, DeviceArray(0, shape, dtype).nbytes), shape, dtype)
