"""Engines over the fixture models, as the tests need them."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from rollkv.config import CacheConfig, DualChunk, KvType, ModelConfig
from rollkv.engine import Engine
from rollkv.host_backend import HostBackend
from rollkv.model_config import model_config
from rollkv.run_plan import run_budget
from rollkv.stream_plan import RingShape
from rollkv.synth import open_model

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def cache(
    ctx_size: int,
    *,
    window: int | None = None,
    ubatch: int = 64,
    page_cells: int = 16,
    kv: KvType = "f32",
    value_kv: KvType | None = None,
    tail_kv: KvType | None = None,
    tail_value_kv: KvType | None = None,
    rotate: bool = False,
    protect: int = 0,
) -> CacheConfig:
    """Small pages; `window` in cells. One type given serves keys and values."""
    residency: Literal["full", "window"] = "full" if window is None else "window"
    tail = tail_kv, tail_value_kv or tail_kv
    return CacheConfig(ctx_size, page_cells, kv, value_kv or kv, ubatch, residency, window, None, *tail, rotate, protect)


def host_engine(
    model: str | Path,
    config: CacheConfig,
    *,
    precision: type = np.float32,
    order: Literal["eager", "late"] = "eager",
    backend: HostBackend | None = None,
    ring: RingShape | None = None,
    dual_chunk: DualChunk | None = None,
) -> Engine:
    """A fixture by name, or any file or shape of a synthetic model. `ring` replaces the planned staging ring of a run that spills."""
    path = FIXTURES / f"{model}.gguf" if model in MODELS else model
    with open_model(path) as file:
        facts = with_dual_chunk(model_config(file), dual_chunk)
        budget = run_budget(facts, file.tensors, config, None, None)
        if budget.ring and ring:
            budget = replace(budget, ring=ring)
        return Engine(backend or HostBackend(precision=precision, order=order), file, facts, config, budget)


def with_dual_chunk(config: ModelConfig, chunk: DualChunk | None) -> ModelConfig:
    """The model with dual chunk attention in its layers that see every cell."""
    layers = (layer if layer.sliding_window else replace(layer, rope=replace(layer.rope, dual_chunk=chunk)) for layer in config.layers)
    return replace(config, layers=tuple(layers))


def read_and_fill(engine: Engine, tokens: list[int]) -> None:
    """Two sequences of each kind, so that the later ones use every slot and every tail page again: a prompt and single tokens; random cells, a
    prompt and single tokens."""
    for _ in range(2):
        engine.reset()
        engine.prefill(tokens[:105])
        for token in tokens[105:]:
            engine.decode(token)
        engine.reset()
        engine.fill_random(105, 0)
        engine.prefill(tokens[105:130])
        for token in tokens[130:]:
            engine.decode(token)


def fixture(model: str) -> dict[str, np.ndarray]:
    """tokens int32 [160], logits float32 [160, vocab], greedy int32 [24], err_f16 float32 [160]."""
    with np.load(FIXTURES / f"{model}.npz") as data:
        return {name: data[name] for name in data.files}


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    """Squared error over squared reference, in float64."""
    difference = got.astype(np.float64) - want
    return float((difference**2).sum() / (want.astype(np.float64) ** 2).sum())
