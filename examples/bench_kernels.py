"""Times every operation of one decode step at a model's shapes, in a recorded graph of it alone; its products through all layers, and
those of a layer also in the order in which a step issues them.

usage: python examples/bench_kernels.py [synth:qwen3-8b:Q8_0] [cells]
Prints the ceiling of this card first (x += y over 1 GiB each: bytes read and written), then per operation: time, bytes that must move,
rate and ratio to the ceiling; last the sum over a step. Operations whose inputs may lie in the L2 cache are marked. Needs a GPU that holds the model.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from tabulate import tabulate

from rollkv.backend import PageRun, PartStates, Projected, RmsNorm, Stack, Stream
from rollkv.config import CacheConfig, ModelConfig, SamplingParams
from rollkv.cuda.backend import CudaBackend
from rollkv.cuda.kernels.add import add_bytes
from rollkv.cuda.kernels.attn_decode import attend_step_bytes
from rollkv.cuda.kernels.choose import choose_bytes
from rollkv.cuda.kernels.linear_rows import linear_rows_bytes
from rollkv.kv_formats import page_formats
from rollkv.model_config import model_config
from rollkv.rope import query_bands, rotations
from rollkv.synth import open_model
from rollkv.weights import LayerWeights, ModelWeights, load_weights
from rollkv.workspace import choice_bytes, qkv_columns

CALLS = 20  # in one graph, at least
L2_BYTES = 200 << 20  # inputs of this much do not lie in any card's L2 cache
HEADINGS = ["operation", "a step", "us", "MiB", "GB/s", "% of HBM", "ms a step"]

Call = Callable[[], None]


def product_bytes(stack: Stack) -> int:
    """Of one row's product."""
    return sum(linear_rows_bytes(weight, 1) for weight in stack)


class Bench:
    """Rows of one table, measured on one backend."""

    def __init__(self, backend: CudaBackend, config: ModelConfig, cells: int) -> None:
        self.backend = backend
        self.config = config
        self.cells = cells
        self.rows: list[list[Any]] = []
        x, y = (backend.empty("ceiling", (4096, 65536), "f32") for _ in range(2))
        for array in (x, y):
            backend.write(array, np.random.default_rng(0).standard_normal(array.shape, np.float32))
        self.ceiling = add_bytes(*x.shape) / self.time_us([partial(backend.add, x, y)]) / 1e3  # GB/s

    def time_us(self, calls: Sequence[Call]) -> float:
        """Microseconds a call: the median of nine replays of a graph of CALLS calls, or once all if they are more, which take turns."""
        count = max(CALLS, len(calls))

        def work() -> None:
            for index in range(count):
                calls[index % len(calls)]()

        work()
        self.backend.synchronize()
        graph, times = self.backend.capture(work), []
        for _ in range(10):
            begin = self.backend.record_timed(Stream.COMPUTE)
            self.backend.replay(graph)
            times.append(self.backend.elapsed_ms(begin, self.backend.record_timed(Stream.COMPUTE)))
        self.backend.release(graph)
        return median(times[1:]) / count * 1e3

    def add(self, name: str, times: int, num_bytes: int, calls: Sequence[Call]) -> None:
        """One operation that a step issues `times` times; 0: it is counted as a part of another, or not at all. num_bytes: of a call."""
        us, name = self.time_us(calls), name if num_bytes * len(calls) >= L2_BYTES else f"{name} (L2)"
        rate = num_bytes / us / 1e3
        self.rows.append([name, times, us, num_bytes / 2**20, rate, 100 * rate / self.ceiling, times * us / 1e3])

    def random(self, *shape: int) -> Any:
        return self.backend.upload("random", np.random.default_rng(0).standard_normal(shape).astype(np.float32))

    def products(self, weights: ModelWeights) -> None:
        """Those of one row, each kind through all layers, and all of a layer in their order."""
        linear: Any = self.backend.linear
        layers, config, add = weights.layers, self.config, not self.config.post_norms
        x, attended = self.random(1, config.hidden_size), self.random(1, layers[0].attn_output[0].columns)
        qkv, gated, scratch = (self.random(1, n) for n in (qkv_columns(config.layers[0]), config.ffn_size, 2 * config.ffn_size))
        norm, logits = RmsNorm(self.random(config.hidden_size), config.rms_norm_eps), self.random(1, config.vocab_size)

        def project(layer: LayerWeights) -> None:
            linear(x, layer.attn_qkv, qkv, norm=norm, bias=layer.attn_qkv_bias)

        def add_attended(layer: LayerWeights) -> None:
            linear(attended, layer.attn_output, x, add=add)

        def down(layer: LayerWeights) -> None:
            linear(gated, layer.ffn_down, x, add=add)

        def feed_forward(layer: LayerWeights) -> None:
            self.backend.feed_forward(x, norm, layer.ffn_gate_up, config.activation, layer.ffn_down, x, scratch, add=add)

        def all_products(layer: LayerWeights) -> None:
            for product in (project, add_attended, feed_forward):
                product(layer)

        def through_layers(name: str, times: int, product: Callable[[LayerWeights], None], *fields: str) -> None:
            num_bytes = sum(product_bytes(getattr(layer, field)) for layer in layers for field in fields)
            self.add(name, times, num_bytes // len(layers), [partial(product, layer) for layer in layers])

        through_layers("q, k, v", 0, project, "attn_qkv")
        through_layers("attn_output", 0, add_attended, "attn_output")
        through_layers("ffn_down", 0, down, "ffn_down")
        through_layers("feed_forward", 0, feed_forward, "ffn_gate_up", "ffn_down")
        through_layers("products of a layer", len(layers), all_products, "attn_qkv", "attn_output", "ffn_gate_up", "ffn_down")
        self.add("output", 1, product_bytes(weights.output), [partial(linear, x, weights.output, logits, norm=norm)])

    def attention(self, cache: CacheConfig) -> None:
        backend, layer = self.backend, self.config.layers[0]
        page = page_formats(self.config, cache)[0]
        pages = -(-self.cells // page.page_cells)
        pools = [backend.empty("window", (pages, page.page_bytes), "u8") for _ in range(L2_BYTES // (pages * page.page_bytes) + 1)]
        for pool in pools:
            backend.write(pool, np.random.default_rng(0).standard_normal(pool.nbytes // 2).astype(np.float16).view(np.uint8))
        runs = [PageRun(pool, pages, 0, 0, pages) for pool in pools]
        out = self.random(1, layer.num_heads * layer.value_dim)
        position = backend.upload("position", np.array([self.cells - 1], np.int32))
        states = self.random(pages, layer.num_heads, layer.value_dim), self.random(pages, layer.num_heads)
        q = self.random(query_bands(layer.rope), layer.num_heads * layer.key_dim)
        parts = PartStates(0, pages, *states, backend.upload("arrivals", np.zeros(layer.num_heads, np.int32)), q)
        table = backend.empty("table", (rotations(layer.rope), 1, layer.rope.dim // 2, 2), "f32")
        backend.rope_table(layer.rope, position, position, table)
        norm = RmsNorm(self.random(layer.key_dim), 1e-6) if self.config.qk_norm else None
        projected = Projected(self.random(1, qkv_columns(layer)), layer, norm, norm, table)
        scale = self.config.attention_scale
        calls = [partial(backend.attend_step, projected, position, (run,), page, scale, parts, out) for run in runs]
        self.add("attend_step", self.config.num_layers, attend_step_bytes(self.cells, pages, layer, page), calls)

    def choice(self) -> None:
        backend, vocab = self.backend, self.config.vocab_size
        sequence, position = backend.upload("sequence", np.zeros(64, np.int32)), backend.upload("position", np.zeros(1, np.int32))
        outcome, scratch = backend.empty("outcome", (2,), "i32"), backend.empty("choice", (choice_bytes(vocab),), "u8")
        for name, times, sampling in (("greedy", 1, SamplingParams()), ("every filter", 0, SamplingParams(0.8, 40, 0.95, 0.05, 1.1))):
            call = partial(backend.choose, self.random(1, vocab), sampling, sequence, position, outcome, scratch)
            self.add(f"choose, {name}", times, choose_bytes(sampling, vocab), [call])


def main(spec: str, cells: int) -> None:
    with open_model(spec) as file, CudaBackend(0) as backend:
        config = model_config(file)
        backend.reserve_linear(16, max(config.hidden_size, config.ffn_size), config.hidden_size, 64 << 20)
        bench = Bench(backend, config, cells)
        print(f"{backend.facts.name}: {bench.ceiling:.0f} GB/s for x += y over 1 GiB each; {spec}, {cells} cells")
        bench.products(load_weights(backend, config, file.tensors))
        bench.attention(CacheConfig(cells))
        bench.choice()
        print(tabulate(bench.rows, HEADINGS, floatfmt=".1f"))
        total, moved = sum(row[-1] for row in bench.rows), sum(row[1] * row[3] for row in bench.rows) * 2**20
        print(f"sum {total:.2f} ms = {1e3 / total:.0f} tok/s; the bytes alone take {moved / bench.ceiling / 1e6:.2f} ms")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "synth:qwen3-8b:Q8_0", int(sys.argv[2]) if len(sys.argv) > 2 else 13312)
