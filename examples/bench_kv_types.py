"""Times attention of a decode step over the KV cache's types: GB/s of the cells' bytes, and the ratio to what memory gives.

usage: python examples/bench_kv_types.py [--types q8_0,turbo2/q4_0] [--cells 8192,131072] [--dim 128] [--group 5] [--forms]
8 KV heads, pages of 256 cells, in a recorded graph over rotating caches beyond L2: attention and, beyond 16 pages, the kernel that merges the pages' states.
The ceiling comes first: x += y over 1 GiB each, bytes read and written. --forms times every form of the kernel that fits, not only the one that is taken. Needs a GPU.
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from tabulate import tabulate

from rollkv.backend import PageRun, PartStates, Projected, Stream
from rollkv.config import LayerConfig, PageFormat, RopeConfig
from rollkv.cuda.backend import CudaBackend
from rollkv.cuda.kernels.add import add_bytes
from rollkv.cuda.kernels.attn_decode_coded import Form, attend_coded, choose_form, shared_bytes
from rollkv.cuda.kernels.attn_merge import merge_parts
from rollkv.cuda.kernels.kv_format import MERGED_WITHIN

KV_HEADS, PAGE_CELLS = 8, 256
CALLS = 20  # in one graph, at least
L2_BYTES = 200 << 20  # caches rotate over at least this much
SHARED_BYTES = 227 << 10  # of a multiprocessor
TYPES = ("f16", "q8_0", "q4_0", "turbo4", "turbo3", "turbo2", "q8_0/q4_0", "turbo4/turbo2", "f16/turbo3")
FORMS = tuple(Form(*form) for form in (
    (4, 1, 8, 4), (4, 1, 8, 3), (4, 1, 16, 2), (4, 4, 8, 1), (2, 2, 8, 4), (2, 4, 8, 2), (2, 8, 8, 1), (1, 4, 8, 3), (8, 1, 8, 2), (8, 1, 16, 1),
    (4, 4, 8, 1, False, True), (2, 8, 8, 1, False, True),
))  # fmt: skip
HEADINGS = ["keys/values", "cells", "form", "us", "MiB", "GB/s", "% of memory", "merge us"]

Call = Callable[[], None]


def time_us(backend: CudaBackend, calls: list[Call]) -> float:
    """Microseconds a call: the median of nine replays of a graph of calls that take turns."""
    count = max(CALLS, len(calls))

    def work() -> None:
        for index in range(count):
            calls[index % len(calls)]()

    work()
    backend.synchronize()
    graph, times = backend.capture(work), []
    for _ in range(10):
        begin = backend.record_timed(Stream.COMPUTE)
        backend.replay(graph)
        times.append(backend.elapsed_ms(begin, backend.record_timed(Stream.COMPUTE)))
    backend.release(graph)
    return median(times[1:]) / count * 1e3


def ceiling(backend: CudaBackend) -> float:
    """GB/s."""
    x, y = (backend.empty("ceiling", (4096, 65536), "f32") for _ in range(2))
    for array in (x, y):
        backend.write(array, np.random.default_rng(0).standard_normal(array.shape, np.float32))
    return add_bytes(*x.shape) / time_us(backend, [partial(backend.add, x, y)]) / 1e3


class Step:
    """Everything that attention of one step needs, for one pair of types. The cells are the bytes of random halves, and so are their scales."""

    def __init__(self, backend: CudaBackend, types: str, dim: int, group: int, cells: int) -> None:
        key_type, _, value_type = types.partition("/")
        coded, self.backend, self.cells, pages = types != "f16", backend, cells, -(-cells // PAGE_CELLS)
        self.layer = layer = LayerConfig(KV_HEADS * group, KV_HEADS, dim, dim, RopeConfig(dim, "halves"))
        self.page = PageFormat(KV_HEADS, dim, dim, key_type, value_type or key_type, PAGE_CELLS, coded, coded)  # type: ignore[arg-type]
        halves = np.random.default_rng(0).standard_normal(pages * self.page.page_bytes // 2, np.float32).astype(np.float16)
        self.runs = []
        for _ in range(L2_BYTES // (2 * halves.size) + 1):
            pool = backend.empty("window", (pages, self.page.page_bytes), "u8")
            backend.write(pool, halves.view(np.uint8))
            self.runs.append(PageRun(pool, pages, 0, 0, pages))
        self.position = backend.upload("position", np.array([cells - 1], np.int32))
        self.out = self.random(1, layer.num_heads * dim)
        states = self.random(pages, layer.num_heads, dim), self.random(pages, layer.num_heads)
        arrivals = backend.upload("arrivals", np.zeros(layer.num_heads, np.int32))
        self.parts = PartStates(0, pages, *states, arrivals, self.random(1, layer.num_heads * dim))
        table = self.random(1, 1, dim // 2, 2)
        self.projected = Projected(self.random(1, (layer.num_heads + 2 * KV_HEADS) * dim), layer, None, None, table)

    def random(self, *shape: int) -> Any:
        return self.backend.upload("random", np.random.default_rng(0).standard_normal(shape, np.float32))

    @property
    def num_bytes(self) -> int:
        """Of the cells."""
        return self.cells * self.page.page_bytes // PAGE_CELLS

    def plain(self, run: PageRun) -> None:
        """Halves as they are: one kernel that finishes query and new cell too, and the merge."""
        scale = self.layer.key_dim**-0.5
        self.backend.attend_step(self.projected, self.position, (run,), self.page, scale, self.parts, self.out)

    def attend(self, form: Form, merged: bool, run: PageRun) -> None:
        launcher, scale, num_sms = self.backend.launcher, self.layer.key_dim**-0.5, self.backend.facts.num_sms
        attend_coded(launcher, self.position, (run,), self.layer, self.page, scale, self.parts, self.out, num_sms=num_sms, form=form)
        if merged and self.parts.num_parts > MERGED_WITHIN:
            merge_parts(launcher, self.parts.out, self.parts.lse, self.parts.num_parts, self.layer, self.out)

    def forms(self, others: bool) -> list[Form]:
        """The one that is taken, and all others that fit into a multiprocessor as often as they say."""
        arch, group = self.backend.launcher.arch, self.layer.group
        taken = choose_form(self.page, group, 1, self.parts.num_parts, arch)
        if taken.few or not others:
            return [taken]
        return [
            taken,
            *(form for form in FORMS if form != taken and self.fits(form)),
        ]

    def fits(self, form: Form) -> bool:
        has_table = "turbo4" in (self.page.key_type, self.page.value_type)
        return form.blocks * (shared_bytes(self.page, form, 1) + 1024) <= SHARED_BYTES and (has_table or not form.table)


def measure(step: Step, types: str, memory: float, others: bool) -> list[list[Any]]:
    """Rows of the table."""
    timed: list[tuple[str, float, float]] = []
    if not step.page.coded:
        us = time_us(step.backend, [partial(step.plain, run) for run in step.runs])
        timed.append(("attend_step", us, us))
    else:
        for form in step.forms(others):
            alone, whole = (
                time_us(step.backend, [partial(step.attend, form, merged, run) for run in step.runs]) for merged in (False, True)
            )
            timed.append((" ".join(map(str, form[:4])) + (" table" if form.table else ""), whole, alone))
    rate = step.num_bytes / 1e3
    return [
        [types, step.cells, name, us, step.num_bytes / 2**20, rate / us, 100 * rate / us / memory, us - alone] for name, us, alone in timed
    ]


def main(arguments: argparse.Namespace) -> None:
    with CudaBackend(0) as backend:
        memory = ceiling(backend)
        print(
            f"{backend.facts.name}: {memory:.0f} GB/s for x += y over 1 GiB each; heads of {arguments.dim}, {arguments.group} of queries for one of keys"
        )
    rows = []
    for types in arguments.types.split(","):
        for cells in map(int, arguments.cells.split(",")):
            with CudaBackend(0) as backend:  # anew, for its memory
                step = Step(backend, types, arguments.dim, arguments.group, cells)
                rows += measure(step, types, memory, arguments.forms)
    print(tabulate(rows, HEADINGS, floatfmt=".1f"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--cells", default="8192,32768,131072")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=5)
    parser.add_argument("--forms", action="store_true")
    main(parser.parse_args())
