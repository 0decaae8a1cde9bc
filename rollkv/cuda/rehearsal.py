"""A run's steps gone through without a device: which kernels they launch, and which products they ask the vendor library for."""

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from rollkv.backend import Loadable, PageRun, Stream
from rollkv.config import Dtype
from rollkv.cuda import gemm
from rollkv.cuda.device import DeviceArray, Launcher, TensorMap
from rollkv.cuda.kernels import repack, synth_noise
from rollkv.cuda.nvrtc import KernelSpec
from rollkv.cuda.operations import Operations
from rollkv.cuda.pinned import AwaitPages, HostPages
from rollkv.cuda.weights_gpu import CudaWeight, place
from rollkv.synth import SynthTensor

_ADDRESS = 1 << 20  # of every array; never followed


class _KernelList(Launcher):
    """A launcher that launches nothing and keeps what it was asked for."""

    def __init__(self, real: Launcher) -> None:
        self.__dict__.update(real.__dict__)
        self.kernels: dict[KernelSpec, None] = {}

    def launch(self, spec: KernelSpec, grid: Any, block: int, *args: Any, shared_bytes: int = 0, stream: Stream = Stream.COMPUTE) -> None:
        self.kernels[spec] = None

    def plane_map(self, address: int, rows: int, columns: int, box_rows: int) -> TensorMap:
        return TensorMap(bytes(128))


class _ProductList(gemm.Gemm):
    """Stands for the vendor library and keeps what it was asked for."""

    def __init__(self) -> None:
        self.products: dict[gemm.Product, None] = {}

    def multiply(self, x16: DeviceArray, weight16: DeviceArray, out: DeviceArray, *, first_column: int = 0) -> None:
        self.products[gemm.Product(x16.shape[0], x16.shape[1], weight16.shape[0], out.shape[1])] = None


class Rehearsal(Operations):
    """What steps use of rollkv.backend.Backend, and loading, without their effect; `kernels` and `products` grow with every call."""

    def __init__(self, launcher: Launcher, num_sms: int) -> None:
        self._kernels, self._products = _KernelList(launcher), _ProductList()
        super().__init__(self._kernels, num_sms)

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return tuple(self._kernels.kernels)

    @property
    def products(self) -> tuple[gemm.Product, ...]:
        return tuple(self._products.products)

    def library(self, workspace: DeviceArray) -> gemm.Gemm:
        return self._products

    # -- memory ----------------------------------------------------------------------------------------------------------------
    def empty(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray:
        return DeviceArray(_ADDRESS, shape, dtype)

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        pass

    def load(self, parts: Iterable[Loadable]) -> Generator[CudaWeight | DeviceArray, None, None]:
        for part in parts:
            target = place(part, self.empty)
            if isinstance(target, CudaWeight):
                raw = self.empty("", (target.rows * repack.row_bytes(target),), "u8")
                for tensor in part.tensors:
                    if isinstance(tensor, SynthTensor):
                        synth_noise.synth_noise(self.launcher, tensor.noise, raw, first_block=0, num_blocks=1)
                repack.repack(self.launcher, raw, target, first_tile=0, num_rows=target.rows)
            yield target

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> AwaitPages:
        return lambda: HostPages(page_bytes, 0, ())

    # -- order -----------------------------------------------------------------------------------------------------------------
    def record(self, stream: Stream) -> None:
        pass

    def wait(self, stream: Stream, event: None) -> None:
        pass

    def copy_in(self, run: PageRun, host: AwaitPages) -> None:
        pass

    def copy_out(self, run: PageRun, host: AwaitPages) -> None:
        pass

    def copy_page(self, source: DeviceArray, source_slot: int, target: DeviceArray, target_slot: int) -> None:
        pass
