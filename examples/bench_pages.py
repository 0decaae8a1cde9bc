"""Times what coded pages take besides attention, at a model's shapes and for every coded type: cells written, pages unpacked and encoded anew.

usage: python examples/bench_pages.py [synth:qwen3-8b:Q8_0] [type ...]
Columns as those of bench_kernels.py, "a step": of decoding. Needs a GPU.
"""

import sys
from functools import partial
from typing import Any

import numpy as np
from bench_kernels import HEADINGS, L2_BYTES, Bench
from tabulate import tabulate

from rollkv.backend import PageRun, Projected, RmsNorm
from rollkv.config import CacheConfig, PageFormat
from rollkv.cuda.backend import CudaBackend
from rollkv.cuda.kernels.prepare_step import prepare_step, prepare_step_bytes
from rollkv.cuda.kernels.qkv_append import qkv_append_bytes
from rollkv.cuda.kernels.reencode_pages import reencode_pages, reencode_pages_bytes
from rollkv.cuda.kernels.turn_back import turn_back, turn_back_bytes
from rollkv.cuda.kernels.unpack_pages import unpack_pages, unpack_pages_bytes
from rollkv.kv_formats import page_formats
from rollkv.kv_types import KV_TYPES
from rollkv.model_config import model_config
from rollkv.rope import query_bands, rotations
from rollkv.synth import open_model
from rollkv.workspace import qkv_columns

PAGES, TOKENS = 64, 4096


def run_of(bench: Bench, page: PageFormat) -> PageRun:
    pool = bench.backend.empty("pages", (PAGES, page.page_bytes), "u8")
    for slot in range(PAGES):
        bench.backend.write(
            pool.rows(1, slot), np.random.default_rng(slot).standard_normal(page.page_bytes // 2).astype(np.float16).view(np.uint8)
        )
    return PageRun(pool, PAGES, 0, 0, PAGES)


def pages(bench: Bench, page: PageFormat) -> None:
    launcher, halves, words = bench.backend.launcher, page.unpacked, f"{page.key_type}: "
    copies = range(L2_BYTES // (PAGES * page.page_bytes) + 1)
    coded = [run_of(bench, page) for _ in copies]
    out = bench.backend.empty("unpacked", (PAGES, halves.page_bytes), "u8")
    unpack = [partial(unpack_pages, launcher, run, page, out) for run in coded]
    bench.add(f"{words}unpack {PAGES} pages", 0, unpack_pages_bytes(PAGES, page), unpack)
    plain = [run_of(bench, halves) for _ in range(4)]
    encode = [partial(reencode_pages, launcher, plain[i % 4], halves, run, page) for i, run in enumerate(coded)]
    bench.add(f"{words}encode {PAGES} pages", 0, reencode_pages_bytes(PAGES, halves, page), encode)


def cells(bench: Bench, page: PageFormat, tokens: int) -> None:
    backend, layer, words = bench.backend, bench.config.layers[0], f"{page.key_type}: "
    run, position = run_of(bench, page), backend.upload("position", np.zeros(1, np.int32))
    table = backend.empty("table", (rotations(layer.rope), tokens, layer.rope.dim // 2, 2), "f32")
    backend.rope_table(layer.rope, position, position, table)
    norm = RmsNorm(bench.random(layer.key_dim), 1e-6) if bench.config.qk_norm else None
    projected = Projected(bench.random(tokens, qkv_columns(layer)), layer, norm, norm, table)
    q = bench.random(max(tokens, query_bands(layer.rope)), layer.num_heads * layer.key_dim)
    call: Any
    if tokens == 1:
        call = partial(
            prepare_step, backend.launcher, projected, position, run, page, q.rows(query_bands(layer.rope)), queries=True, cell=True
        )
        bench.add(f"{words}prepare a step", bench.config.num_layers, prepare_step_bytes(layer, page, queries=True, cell=True), [call])
    else:
        call = partial(backend.append, projected, position, (run,), page, 0, 0, q)
        bench.add(f"{words}append {tokens} cells", 0, qkv_append_bytes(tokens, layer, page), [call])


def main(spec: str, types: tuple[Any, ...]) -> None:
    with open_model(spec) as file, CudaBackend(0) as backend:
        config = model_config(file)
        bench = Bench(backend, config, 0)
        layer = config.layers[0]
        print(f"{backend.facts.name}: {bench.ceiling:.0f} GB/s for x += y over 1 GiB each; {spec}")
        for tokens in (1, TOKENS):
            out = bench.random(tokens, layer.num_heads * layer.value_dim)
            call = partial(turn_back, backend.launcher, out, layer)
            bench.add(f"turn {tokens} rows back", config.num_layers if tokens == 1 else 0, turn_back_bytes(tokens, layer), [call])
        for name in types:
            page = page_formats(config, CacheConfig(TOKENS, key_type=name, value_type=name))[0]
            for tokens in (1, TOKENS):
                cells(bench, page, tokens)
            if KV_TYPES[name].coded:
                pages(bench, page)
        print(tabulate(bench.rows, HEADINGS, floatfmt=".1f"))


if __name__ == "__main__":
    coded = tuple(name for name, kind in KV_TYPES.items() if kind.coded)
    main(sys.argv[1] if len(sys.argv) > 1 else "synth:qwen3-8b:Q8_0", tuple(sys.argv[2:]) or ("f16", *coded))
