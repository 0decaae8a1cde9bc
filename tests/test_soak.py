"""One engine through many sequences: long and short, stopped anywhere, interrupted, planned anew. Each gives what a fresh resident engine gives."""

import gc
import weakref
from itertools import islice
from typing import Any

import numpy as np
import pytest

import engines
from race_detector import Recording
from rollkv.config import CacheConfig, Dtype, SamplingParams
from rollkv.engine import Engine

PAGE, CONTEXT, SEQUENCES = 16, 160, 12


class Accounted(Recording):
    """Knows the bytes that were taken and still live; is interrupted in the operation that `interrupt_in` counts down to."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt_in = 0
        self._arrays: list[weakref.ref[np.ndarray]] = []

    def live_bytes(self) -> int:
        gc.collect()
        return sum(array.nbytes for ref in self._arrays if (array := ref()) is not None)

    def empty(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> Any:
        made = super().empty(label, shape, dtype)
        self._arrays.append(weakref.ref(made.values))
        return made

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> np.ndarray:
        made = super().host_pages(label, num_pages, page_bytes)
        self._arrays.append(weakref.ref(made))
        return made

    def linear(self, *args: Any, **options: Any) -> None:
        self.interrupt_in -= 1
        if self.interrupt_in == 0:
            raise KeyboardInterrupt
        super().linear(*args, **options)


def _fresh(model: str, ubatch: int, prompt: list[int], count: int, sampling: SamplingParams) -> list[int]:
    with engines.host_engine(model, engines.cache(CONTEXT, ubatch=ubatch)) as engine:
        return list(engine.generate_ids(prompt, count, sampling))


def _plan(draw: np.random.Generator) -> CacheConfig:
    window = [None, PAGE, PAGE, 2 * PAGE, 4 * PAGE][draw.integers(5)]
    return engines.cache(CONTEXT, window=window, ubatch=int(draw.choice([16, 40, 64])))


def _interrupt(engine: Engine, backend: Accounted, prompt: list[int], operation: int) -> None:
    backend.interrupt_in = operation
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate_ids(prompt, CONTEXT - len(prompt)))


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_soak(model: str) -> None:
    draw, backend = np.random.default_rng(7), Accounted()
    first, tokens = engines.cache(CONTEXT, window=PAGE, ubatch=40), engines.fixture(model)["tokens"]
    with engines.host_engine(model, first, backend=backend) as engine:
        list(engine.generate_ids(tokens[:100].tolist(), 20))
        live = backend.live_bytes()
        for number in range(SEQUENCES):
            if number % 4 == 3:
                engine.replan(_plan(draw))
            length = int(draw.integers(1, CONTEXT - 40))
            prompt, count = draw.permutation(tokens)[:length].tolist(), int(draw.integers(1, 40))
            sampling = SamplingParams(temperature=float(draw.choice([0.0, 0.9])), repeat_penalty=1.2, seed=number)
            if number % 3 == 1:
                _interrupt(engine, backend, prompt, int(draw.integers(1, 300)))
            want = _fresh(model, engine.cache_config.ubatch, prompt, count, sampling)
            stop = frozenset({want[int(draw.integers(count))]}) if number % 2 else frozenset[int]()
            wanted = want[: next(i for i, token in enumerate(want) if token in stop)] if stop else want
            taken = int(draw.integers(1, count + 1))  # of which the caller takes so many, and leaves
            got = list(islice(engine.generate_ids(prompt, count, sampling, stop), taken))
            assert got == wanted[:taken], (number, engine.cache_config, length, count)
            assert list(engine.generate_ids(prompt, count, sampling, stop)) == wanted, (number, engine.cache_config, length, count)
        engine.replan(first)
        assert backend.live_bytes() == live and backend.replays > 20
