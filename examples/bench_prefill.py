"""Times prefill attention at sustained clocks: TFLOP/s over the visible pairs, and the ratio to a large product of half matrices.

usage: python examples/bench_prefill.py [--portable] [head_dim ...]
The ceiling comes first (a product of 8,192 x 8,192 matrices); then, for every head size, causal 32k x 32k in one launch and in five, the same
in ubatches of 4,096 queries whose cells come in one launch and in runs of 64 pages, and 4,096 queries against 128k cells in one launch and in five; 32 heads of queries, 8 of keys and values. --portable takes the kernels for any card instead of
those for this one. Needs a GPU with 8 GiB free.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tabulate import tabulate

from rollkv.backend import PageRun, Stream
from rollkv.config import LayerConfig, PageFormat, RopeConfig
from rollkv.cuda.backend import CudaBackend
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.gemm import Gemm
from rollkv.cuda.kernels.attn_prefill import attend_tile_flops
from rollkv.workspace import state_shape

SECONDS = 0.7  # of load before a measurement, and of the measurement: a cool card is 15 % faster for the first second
HEADS, KV_HEADS = 32, 8
PAGE_CELLS = 256
HEADINGS = ["head_dim", "queries", "cells", "ubatch", "launches", "ms", "TFLOP/s", "% of product"]


@dataclass(frozen=True)
class Case:
    """The last `queries` of `cells`, in ubatches; a launch walks `run_pages` pages at most."""

    queries: int
    cells: int
    ubatch: int
    run_pages: int

    def walks(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """The position of each ubatch, and the pages that each of its launches walks."""
        for position in range(self.cells - self.queries, self.cells, self.ubatch):
            pages = (position + self.ubatch) // PAGE_CELLS
            yield position, [(begin, min(begin + self.run_pages, pages)) for begin in range(0, pages, self.run_pages)]


CASES = (
    Case(32768, 32768, 32768, 128),
    Case(32768, 32768, 32768, 26),
    Case(32768, 32768, 4096, 128),
    Case(32768, 32768, 4096, 64),
    Case(4096, 131072, 4096, 512),
    Case(4096, 131072, 4096, 103),
)


def sustained_ms(backend: CudaBackend, work: Callable[[], None]) -> float:
    """Milliseconds a call, once the card has been busy with it for a while."""

    def timed(calls: int) -> float:
        begin = backend.record_timed(Stream.COMPUTE)
        for _ in range(calls):
            work()
        return backend.elapsed_ms(begin, backend.record_timed(Stream.COMPUTE)) / calls

    timed(1)
    calls = max(1, round(1e3 * SECONDS / timed(1)))
    timed(calls)
    return timed(calls)


def fill(backend: CudaBackend, array: DeviceArray, dtype: type) -> DeviceArray:
    """Random normal numbers, the same few million again and again."""
    block = np.random.default_rng(0).standard_normal(1 << 22, np.float32).astype(dtype).view(np.uint8)
    whole = array.view((array.nbytes,), "u8")
    for offset in range(0, array.nbytes, block.nbytes):
        length = min(block.nbytes, array.nbytes - offset)
        backend.write(whole.view((length,), "u8", offset), block[:length])
    return array


def product_tflops(backend: CudaBackend) -> float:
    """Of cuBLAS, half factors, float32 sums and result."""
    size = 8192
    a, b = (fill(backend, backend.empty("factor", (size, size), "f16"), np.float16) for _ in range(2))
    out, workspace = backend.empty("product", (size, size), "f32"), backend.empty("cuBLAS", (32 << 20,), "u8")
    gemm = Gemm(backend.handle(Stream.COMPUTE), workspace)
    milliseconds = sustained_ms(backend, partial(gemm.multiply, a, b, out))
    gemm.close()
    return 2 * size**3 / milliseconds / 1e9


@dataclass(frozen=True)
class Problem:
    """Random queries, and a window of random pages, of one head size."""

    backend: CudaBackend
    layer: LayerConfig
    page: PageFormat
    pool: DeviceArray
    q: DeviceArray
    out: DeviceArray
    state: DeviceArray
    scratch: DeviceArray

    def attend(self, ubatch: int, position: DeviceArray, runs: list[tuple[int, int]]) -> None:
        q, out, state = self.q.rows(ubatch), self.out.rows(ubatch), self.state.view(state_shape(ubatch, self.layer))
        for begin, end in runs:
            run, scale = PageRun(self.pool, self.pool.shape[0], begin, begin, end - begin), self.layer.key_dim**-0.5
            last = end == runs[-1][1]
            self.backend.attend_tile(q, position, run, self.layer, self.page, scale, state, self.scratch, last=last, out=out)


def make_problem(backend: CudaBackend, dim: int) -> Problem:
    layer = LayerConfig(HEADS, KV_HEADS, dim, dim, RopeConfig(dim, "halves"))
    page = PageFormat(KV_HEADS, dim, dim, "f16", "f16", PAGE_CELLS)
    ubatch, cells = max(case.ubatch for case in CASES), max(case.cells for case in CASES)
    q, out = (backend.empty(name, (ubatch, HEADS * dim), "f32") for name in ("q", "out"))
    state = backend.empty("state", state_shape(ubatch, layer), "f32")
    pool = backend.empty("pages", (cells // page.page_cells, page.page_bytes), "u8")
    scratch = backend.empty("unpacked", (page.unpacked.page_bytes,), "u8")
    return Problem(backend, layer, page, fill(backend, pool, np.float16), fill(backend, q, np.float32), out, state, scratch)


def measure(problem: Problem, case: Case, ceiling: float) -> list[Any]:
    """One row of the table."""
    backend, layer = problem.backend, problem.layer
    walks = [(backend.upload("position", np.array([position], np.int32)), runs) for position, runs in case.walks()]

    def work() -> None:
        for position, runs in walks:
            problem.attend(case.ubatch, position, runs)

    milliseconds, launches = sustained_ms(backend, work), sum(len(runs) for _, runs in walks)
    visible_pairs = case.queries * (case.cells - case.queries) + case.queries * (case.queries + 1) // 2
    rate = attend_tile_flops(visible_pairs, layer) / milliseconds / 1e9
    return [layer.key_dim, case.queries, case.cells, case.ubatch, launches, milliseconds, rate, 100 * rate / ceiling]


def main(dims: list[int], portable: bool) -> None:
    with CudaBackend(0, portable=portable) as backend:
        ceiling = product_tflops(backend)
        print(f"{backend.facts.name}: {ceiling:.0f} TFLOP/s for a product of half matrices; kernels for {backend.launcher.arch}")
    rows = []
    for dim in dims:
        with CudaBackend(0, portable=portable) as backend:  # anew, for its memory
            problem = make_problem(backend, dim)
            rows += [measure(problem, case, ceiling) for case in CASES]
    print(tabulate(rows, HEADINGS, floatfmt=".1f"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("dims", nargs="*", type=int, default=[64, 128, 256])
    arguments = parser.parse_args()
    main(arguments.dims, arguments.portable)
