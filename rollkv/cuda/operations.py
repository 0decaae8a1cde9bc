"""The operations of rollkv.backend.Backend on one NVIDIA GPU, from kernels/ and gemm.py. Where their memory comes from is left open: the backend
takes it from the device, a rehearsal from nowhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from rollkv.backend import PageRun, PartStates, Projected, RmsNorm
from rollkv.config import Dtype, LayerConfig, PageFormat, RopeConfig, SamplingParams
from rollkv.cuda import gemm
from rollkv.cuda.device import DeviceArray, Launcher
from rollkv.cuda.kernels import (
    add,
    attn_decode,
    attn_decode_coded,
    attn_merge,
    attn_prefill,
    choose,
    embed,
    linear_rows,
    noise,
    prepare_step,
    qkv_append,
    queries,
    reencode_pages,
    rope_table,
    turn_back,
    unpack_pages,
)
from rollkv.cuda.kernels.kv_format import MERGED_WITHIN
from rollkv.cuda.nvrtc import KernelError
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.workspace import GEMM_WORKSPACE_BYTES, MAX_FEW_ROWS

_OURS: dict[str, Dtype] = {"float32": "f32", "int32": "i32", "uint8": "u8"}


class Operations(ABC):
    """Everything is launched by `launcher`; num_sms: multiprocessors of the device."""

    def __init__(self, launcher: Launcher, num_sms: int) -> None:
        self.launcher = launcher
        self._num_sms = num_sms
        self._slab: DeviceArray | None = None  # u8: raw tensors while they load, dequantised weights of large products
        self._large: gemm.LargeProducts | None = None
        self._ropes: dict[RopeConfig, tuple[DeviceArray, float]] = {}

    @abstractmethod
    def empty(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> DeviceArray: ...

    @abstractmethod
    def write(self, array: DeviceArray, values: np.ndarray) -> None: ...

    @abstractmethod
    def library(self, workspace: DeviceArray) -> gemm.Gemm:
        """The vendor library, working in `workspace`, u8, from now on."""

    def upload(self, label: str, values: np.ndarray) -> DeviceArray:
        array = self.empty(label, values.shape, _OURS[values.dtype.name])
        self.write(array, values)
        return array

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
        library = self.library(self.empty("cuBLAS", (GEMM_WORKSPACE_BYTES,), "u8"))
        self._large = gemm.LargeProducts(self.launcher, library, self._slab, x16, row_scale, products)

    def forget_memory(self) -> None:
        """What was taken for operations is about to be freed; reserve_linear may be called again."""
        self._slab = self._large = None
        self._ropes.clear()

    def embed(self, sequence: DeviceArray, position: DeviceArray, table: CudaWeight, scale: float, out: DeviceArray) -> None:
        embed.embed(self.launcher, sequence, position, table, out, scale=scale)

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
                self.launcher, x, weight, out, num_sms=self._num_sms, norm=norm, bias=bias, add=add, first_column=column
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
        linear_rows.glu_rows(self.launcher, x, gate_up, gated, num_sms=self._num_sms, norm=norm, activation=activation)
        self.linear(gated, down, out, add=add)

    def _large_products(self, x: DeviceArray) -> gemm.LargeProducts:
        if self._large is None or x.shape[0] > self._large.max_rows:
            raise ValueError(f"{x.shape[0]} rows are more than reserve_linear was told of")
        return self._large

    def rope_table(self, rope: RopeConfig, position: DeviceArray, prompt_cells: DeviceArray, out: DeviceArray) -> None:
        constants = self._ropes.get(rope)
        if constants is None:  # a few hundred bytes, once a rotation, in the first step
            frequency, magnitude = rope_table.table_constants(rope)
            constants = self._ropes[rope] = self.upload("rope frequencies", frequency.view(np.uint8)), magnitude
        rope_table.rope_table(self.launcher, rope, position, prompt_cells, constants[0], out, magnitude=constants[1])

    def noise(self, out: DeviceArray, seed: int, first: int) -> None:
        noise.noise(self.launcher, out, seed, first)

    def append(
        self,
        projected: Projected,
        position: DeviceArray,
        runs: tuple[PageRun, ...],
        page: PageFormat,
        first_position: int,
        band: int,
        q: DeviceArray,
    ) -> None:
        qkv_append.qkv_append(self.launcher, projected, position, runs, page, first_position, band, q)

    def queries(self, projected: Projected, page: PageFormat, band: int, q: DeviceArray) -> None:
        queries.queries(self.launcher, projected, page, band, q)

    def reencode(self, source: PageRun, source_page: PageFormat, target: PageRun, target_page: PageFormat) -> None:
        reencode_pages.reencode_pages(self.launcher, source, source_page, target, target_page)

    def attend_step(
        self,
        projected: Projected,
        position: DeviceArray,
        runs: tuple[PageRun, ...],
        page: PageFormat,
        scale: float,
        parts: PartStates,
        out: DeviceArray,
    ) -> None:
        layer = projected.layer
        ended = runs[-1].first_page + runs[-1].num_pages == parts.first_page + parts.num_parts
        if attn_decode_coded.serves(page):
            begun = runs[0].first_page == parts.first_page
            if begun or ended:
                prepare_step.prepare_step(self.launcher, projected, position, runs[-1], page, parts.q, queries=begun, cell=ended)
            attn_decode_coded.attend_coded(self.launcher, position, runs, layer, page, scale, parts, out, num_sms=self._num_sms)
        else:  # these kernels finish the query and the cell themselves
            attn_decode.attend_step(self.launcher, projected, position, runs, page, scale, parts, out)
        if ended and parts.num_parts > MERGED_WITHIN:
            attn_merge.merge_parts(self.launcher, parts.out, parts.lse, parts.num_parts, layer, out)
        if ended and page.value_rotated:
            turn_back.turn_back(self.launcher, out, layer)

    def attend_tile(
        self,
        q: DeviceArray,
        position: DeviceArray,
        run: PageRun,
        layer: LayerConfig,
        page: PageFormat,
        scale: float,
        state: DeviceArray,
        scratch: DeviceArray,
        *,
        last: bool,
        out: DeviceArray,
    ) -> None:
        for part in self._unpacked(run, page, scratch) if page.coded else (run,):
            attn_prefill.attend_tile(self.launcher, q, position, part, layer, page.unpacked if page.coded else page, scale, state, out)
        if last and page.value_rotated:
            turn_back.turn_back(self.launcher, out, layer)

    def _unpacked(self, run: PageRun, page: PageFormat, scratch: DeviceArray) -> Iterator[PageRun]:
        """The run's pages in f16, as many at a time as the scratch holds: use them before asking for the next."""
        slots = scratch.nbytes // page.unpacked.page_bytes
        if slots < 1:
            raise KernelError(f"attend_tile: {scratch.nbytes} bytes of scratch hold no page of {page.unpacked.page_bytes}")
        pool, end = scratch.view((slots, page.unpacked.page_bytes)), run.first_page + run.num_pages
        for first_page in range(run.first_page, end, slots):
            part = run.part(first_page, min(slots, end - first_page))
            unpack_pages.unpack_pages(self.launcher, part, page, pool.rows(part.num_pages))
            yield PageRun(pool, slots, 0, first_page, part.num_pages)

    def add(self, x: DeviceArray, y: DeviceArray, norm: RmsNorm | None = None) -> None:
        add.add(self.launcher, x, y, norm)

    def choose(
        self,
        logits: DeviceArray,
        sampling: SamplingParams,
        sequence: DeviceArray,
        position: DeviceArray,
        outcome: DeviceArray,
        scratch: DeviceArray,
    ) -> None:
        choose.choose(self.launcher, logits, sampling, sequence, position, outcome, scratch)
