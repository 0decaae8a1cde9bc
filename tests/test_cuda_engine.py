"""The CUDA engine against the host engine on the fixture models, and against itself with other residencies, bit for bit."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import engines
from rollkv.config import CacheConfig, DualChunk, SamplingParams
from rollkv.engine import Engine
from rollkv.errors import OutOfMemoryError
from rollkv.gguf_file import open_gguf
from rollkv.model_config import model_config
from rollkv.sampling import choose
from rollkv.startup import load_on
from rollkv.units import MIB

pytestmark = pytest.mark.gpu

PAGE = 64
SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.98, repeat_penalty=1.2, repeat_last=20, seed=3)

Make = Callable[..., Engine]


@pytest.fixture
def cuda_engine(load_cuda: Make) -> Make:
    """Takes the name of a fixture model and a CacheConfig."""
    return lambda model, config, **options: load_cuda(engines.FIXTURES / f"{model}.gguf", config, **options)


@pytest.fixture
def chunked_engine(portable: bool) -> Make:
    """Takes the name of a fixture model, a CacheConfig and a DualChunk, or None."""

    def load(model: str, config: CacheConfig, chunk: DualChunk | None) -> Engine:
        from rollkv.cuda.backend import CudaBackend

        with open_gguf(engines.FIXTURES / f"{model}.gguf") as file:
            return load_on(CudaBackend(0, portable=portable), file, engines.with_dual_chunk(model_config(file), chunk), config)

    return load


def rows_of(engine: Engine, tokens: list[int], prompt: int) -> np.ndarray:
    with engine:
        rows = list(engine.logit_rows(tokens[:prompt]))
        rows += [engine.decode(token)[None] for token in tokens[prompt:]]
    return np.concatenate(rows)


@pytest.mark.parametrize("model", engines.MODELS)
@pytest.mark.parametrize("prompt", [150, 10])
def test_cuda_agrees_with_the_host(model: str, prompt: int, cuda_engine: Make) -> None:
    """A long prompt goes through the large products, a short one and the single steps through the batch-invariant ones."""
    want = engines.fixture(model)
    tokens = want["tokens"].tolist()
    got = rows_of(cuda_engine(model, engines.cache(160, page_cells=PAGE, ubatch=160, kv="f16")), tokens, prompt)
    host = rows_of(engines.host_engine(model, engines.cache(160, page_cells=PAGE, ubatch=160, kv="f16")), tokens, prompt)
    for row, reference in zip(got, host, strict=True):
        assert engines.nmse(row, reference) <= 1e-4
    assert np.abs(got - want["logits"]).max() <= 6 * want["err_f16"].max()


@pytest.mark.parametrize("model", engines.MODELS)
def test_greedy_continuation_equals_the_stored_one(model: str, cuda_engine: Make) -> None:
    want = engines.fixture(model)
    with cuda_engine(model, engines.cache(56, page_cells=PAGE)) as engine:
        assert list(engine.generate_ids(want["tokens"][:32].tolist(), 24)) == want["greedy"].tolist()


@pytest.mark.parametrize("kv,value_kv", [("f16", "f16"), ("f32", "f32"), ("bf16", "f16")])
@pytest.mark.parametrize("model", engines.MODELS)
def test_every_window_gives_the_resident_bits(model: str, kv: str, value_kv: str, cuda_engine: Make) -> None:
    tokens = engines.fixture(model)["tokens"].tolist() * 5
    options = {"page_cells": PAGE, "kv": kv, "value_kv": value_kv, "ubatch": 200}
    resident = rows_of(cuda_engine(model, engines.cache(800, **options)), tokens, 700)  # type: ignore[arg-type]
    assert np.isfinite(resident).all()
    for pages in (1, 2, 5):
        windowed = rows_of(cuda_engine(model, engines.cache(800, window=pages * PAGE, **options)), tokens, 700)  # type: ignore[arg-type]
        np.testing.assert_array_equal(windowed, resident, err_msg=f"window of {pages} pages")


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
def test_lengths_around_pages_and_windows(length: int, cuda_engine: Make) -> None:
    want = engines.fixture("qwen2")
    tokens = want["tokens"][: length + 3].tolist()
    got = rows_of(cuda_engine("qwen2", engines.cache(length + 3, page_cells=PAGE, window=PAGE, kv="f16")), tokens, length)
    assert np.isfinite(got).all()
    assert np.abs(got - want["logits"][: length + 3]).max() <= 6 * want["err_f16"].max()


@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
def test_a_new_plan_gives_the_bits_and_the_memory_of_a_fresh_load(model: str, cuda_engine: Make) -> None:
    """One load of the weights; window, ring, tail, context and ubatch change. Use stays within what each plan says."""
    from rollkv.cuda.backend import CudaBackend

    tokens = engines.fixture(model)["tokens"].tolist() * 5
    options = {"page_cells": PAGE, "kv": "f16", "ubatch": 200}
    plans = [
        engines.cache(800, window=2 * PAGE, **options),  # type: ignore[arg-type]
        engines.cache(800, **options),  # type: ignore[arg-type]
        engines.cache(300, window=PAGE, page_cells=PAGE, kv="f16", ubatch=64),
        engines.cache(800, window=2 * PAGE, **options),  # type: ignore[arg-type]
    ]
    with cuda_engine(model, plans[0]) as engine:
        for plan in plans:
            engine.prefill(tokens[:100])
            engine.replan(plan)
            part = tokens[: min(plan.ctx_size, 400)]
            rows = np.concatenate([*engine.logit_rows(part[:250]), *(engine.decode(token)[None] for token in part[250:])])
            assert isinstance(engine.backend, CudaBackend)
            assert engine.backend.memory_used_bytes() <= engine.budget.total_bytes
            accounts = engine.backend.device_bytes
            assert (
                sum(accounts.values()) - accounts["context"] - accounts["modules"] <= engine.budget.weight_bytes + engine.budget.run_bytes
            )
            np.testing.assert_array_equal(rows, rows_of(cuda_engine(model, plan), part, 250))
            engine.reset()


def test_a_new_plan_keeps_to_its_own_cap(load_cuda: Make) -> None:
    """Smaller and larger ones: what the process holds is counted from outside, and the bits are those of everything resident."""
    from rollkv.cuda.backend import CudaBackend

    def rows(engine: Engine) -> np.ndarray:
        engine.fill_random(59_000, 3)
        return np.concatenate([*engine.logit_rows(range(100, 400)), *(engine.decode(token)[None] for token in range(100, 110))])

    config = engines.cache(60_000, page_cells=256, kv="f16", ubatch=256)
    with load_cuda("synth:tiny", config) as engine:
        assert isinstance(engine.backend, CudaBackend)
        resident, total = rows(engine), engine.budget.total_bytes
        for less in (40, 8, 60, 16):
            cap = total - less * MIB
            engine.replan(replace(config, residency="auto"), cap)
            assert engine.budget.spills
            np.testing.assert_array_equal(rows(engine), resident, err_msg=f"{less} MiB less than the resident run")
            assert 0.97 * cap < engine.backend.memory_used_bytes() <= cap
            with pytest.raises(OutOfMemoryError, match="beyond needs"):
                engine.backend.empty("beyond", (8 * MIB,), "u8")


def test_random_cells_are_the_same_wherever_they_lie(cuda_engine: Make) -> None:
    tokens = engines.fixture("qwen3")["tokens"].tolist()

    def rows(window: int | None) -> np.ndarray:
        with cuda_engine("qwen3", engines.cache(800, window=window, page_cells=PAGE, kv="f16", ubatch=200)) as engine:
            engine.fill_random(700, 3)
            return np.concatenate([*engine.logit_rows(tokens[:50]), *(engine.decode(token)[None] for token in tokens[50:90])])

    resident = rows(None)
    assert np.isfinite(resident).all()
    for pages in (1, 2, 5):
        np.testing.assert_array_equal(rows(pages * PAGE), resident, err_msg=f"window of {pages} pages")


CHUNK = DualChunk(chunk_cells=4 * PAGE, local_cells=PAGE, original_context=300)  # numbered anew every three pages


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("prompt", [150, 10])
def test_dual_chunks_agree_with_the_host(model: str, prompt: int, chunked_engine: Make) -> None:
    tokens, chunk = engines.fixture(model)["tokens"].tolist(), DualChunk(PAGE + 32, 32, 100)  # numbered anew with every page
    config = engines.cache(160, page_cells=PAGE, ubatch=160, kv="f16")
    got = rows_of(chunked_engine(model, config, chunk), tokens, prompt)
    for row, reference in zip(got, rows_of(engines.host_engine(model, config, dual_chunk=chunk), tokens, prompt), strict=True):
        assert engines.nmse(row, reference) <= 1e-4


@pytest.mark.parametrize("kv,value_kv", [("f16", "f16"), ("bf16", "f32")])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3"])
def test_every_window_gives_the_resident_bits_in_dual_chunks(model: str, kv: str, value_kv: str, chunked_engine: Make) -> None:
    """And up to a chunk, plain RoPE's."""
    tokens = engines.fixture(model)["tokens"].tolist() * 5
    options = {"page_cells": PAGE, "kv": kv, "value_kv": value_kv, "ubatch": 200}
    resident = rows_of(chunked_engine(model, engines.cache(800, **options), CHUNK), tokens, 700)  # type: ignore[arg-type]
    assert np.isfinite(resident).all()
    for pages in (1, 2, 5):
        windowed = rows_of(chunked_engine(model, engines.cache(800, window=pages * PAGE, **options), CHUNK), tokens, 700)  # type: ignore[arg-type]
        np.testing.assert_array_equal(windowed, resident, err_msg=f"window of {pages} pages")
    few = engines.cache(800, page_cells=PAGE, kv=kv, value_kv=value_kv, ubatch=64)  # type: ignore[arg-type]
    chunked, plain = (rows_of(chunked_engine(model, few, chunk), tokens[:200], 100) for chunk in (CHUNK, None))
    np.testing.assert_array_equal(chunked[: 3 * PAGE], plain[: 3 * PAGE])
    assert (chunked[3 * PAGE :] != plain[3 * PAGE :]).any(axis=1).all()


def test_recorded_steps_cross_chunks(chunked_engine: Make) -> None:
    """Generation, whose steps are recorded and run ahead, against single ones: over pages, chunks and the original context, and in a second sequence."""
    prompt = engines.fixture("qwen3")["tokens"][:100].tolist()
    with chunked_engine("qwen3", engines.cache(480, page_cells=PAGE, kv="f16"), CHUNK) as engine:
        ids, row = list(prompt), engine.prefill(prompt)
        while len(ids) < 460:
            ids.append(int(row.argmax()))
            row = engine.decode(ids[-1])
    for window in (None, PAGE):
        with chunked_engine("qwen3", engines.cache(480, page_cells=PAGE, kv="f16", window=window), CHUNK) as engine:
            for _ in range(2):
                assert list(engine.generate_ids(prompt, 360)) == ids[100:], f"window {window}"


def test_closing_gives_everything_back(cuda_engine: Make) -> None:
    """A context opened afterwards is as large as one opened before, by this process's own account."""
    from rollkv.cuda.backend import CudaBackend

    with CudaBackend(0) as before:
        used = before.memory_used_bytes()
    for _ in range(3):
        with cuda_engine("llama", engines.cache(160, page_cells=PAGE, window=PAGE, kv="f16")) as engine:
            engine.prefill(list(range(100)))
    with CudaBackend(0) as after:
        assert after.memory_used_bytes() <= used + (8 << 20)


def test_a_tail_that_cannot_be_pinned_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, cuda_engine: Make) -> None:
    """Only the slots are pinned: the tail is pageable, said aloud, and steps are not recorded."""
    from rollkv.cuda.pinned import SLOT_BYTES, PinnedMemory, slots_bytes

    tokens = engines.fixture("qwen3")["tokens"].tolist() * 3
    config = engines.cache(480, page_cells=PAGE, kv="f16", ubatch=200)
    resident = rows_of(cuda_engine("qwen3", config), tokens, 400)
    pin, said = PinnedMemory._pin, []
    monkeypatch.setattr(PinnedMemory, "_pin", lambda self, at, size: size == slots_bytes(SLOT_BYTES) and pin(self, at, size))
    windowed = engines.cache(480, page_cells=PAGE, kv="f16", ubatch=200, window=PAGE)
    engine = cuda_engine("qwen3", windowed, warn=said.append)
    assert not engine.backend.can_record and any("pinned" in message for message in said)
    prompt = tokens[:100]
    ids = list(engine.generate_ids(prompt, 80))
    engine.reset()
    np.testing.assert_array_equal(rows_of(engine, tokens, 400), resident)
    with cuda_engine("qwen3", config) as engine:
        assert list(engine.generate_ids(prompt, 80)) == ids


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
def test_the_device_chooses_what_the_host_would(model: str, sampling: SamplingParams, cuda_engine: Make) -> None:
    """Generation, which runs ahead of the host, against single steps whose logits the host reads."""
    prompt = engines.fixture(model)["tokens"][:100].tolist()
    with cuda_engine(model, engines.cache(480, page_cells=PAGE, kv="f16")) as engine:
        ids, row = list(prompt), engine.prefill(prompt)
        while len(ids) < 300:
            ids.append(choose(row, ids, sampling, len(ids) - 1))
            row = engine.decode(ids[-1])
    for window in (None, PAGE, 3 * PAGE):
        with cuda_engine(model, engines.cache(480, page_cells=PAGE, kv="f16", window=window)) as engine:
            for _ in range(2):
                assert list(engine.generate_ids(prompt, 200, sampling)) == ids[100:], f"window {window}"
            for stop_at in (1, 28, 29, 30):  # a page ends behind cell 127, and so behind the 29th id
                steps = engine.generate_ids(prompt, 200, sampling)
                assert [next(steps) for _ in range(stop_at)] == ids[100 : 100 + stop_at]
                steps.close()  # type: ignore[attr-defined]
                rest = [engine.decode(token) for token in ids[100 + stop_at - 1 : 200]]
                assert choose(rest[-1], ids[:200], sampling, 199) == ids[200], f"window {window}, stopped at {stop_at}"


def test_recorded_steps_cross_pages_and_sequences(cuda_engine: Make) -> None:
    """Steps run directly, recorded and replayed, over page borders and in a second, shorter sequence, as often as the host engine does."""
    tokens = engines.fixture("gemma3")["tokens"].tolist() * 3
    for window in (None, PAGE):
        with cuda_engine("gemma3", engines.cache(480, page_cells=PAGE, kv="f16", window=window)) as engine:
            first = list(engine.generate_ids(tokens[:100], 200))
            second = list(engine.generate_ids(tokens[:40], 200))
            assert list(engine.generate_ids(tokens[:100], 200)) == first
        logits = np.concatenate(list(_host_rows(tokens[:40] + second[:-1])))
        chosen = logits[39:].argmax(axis=1)
        best = np.sort(logits[39:], axis=1)
        near = best[:, -1] - best[:, -2] < 0.1
        assert ((chosen == np.array(second)) | near).all()


def _host_rows(tokens: list[int]) -> list[np.ndarray]:
    with engines.host_engine("gemma3", engines.cache(len(tokens), page_cells=PAGE, kv="f16")) as host:
        return list(host.logit_rows(tokens))
