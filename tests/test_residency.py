"""Bit-exact residency on the host: windows of any size, eager and late copies, odd lengths; what is not valid holds NaN."""

from typing import Literal

import numpy as np
import pytest

import engines
from rollkv.errors import OutOfMemoryError, UsageError

PAGE = 16


def run(engine: engines.Engine, tokens: list[int], prompt: int) -> np.ndarray:
    """Logits behind every token: a prefill of `prompt` tokens, then one decode step each."""
    with engine:
        rows = [np.concatenate(list(engine.logit_rows(tokens[:prompt])))]
        rows += [engine.decode(token)[None] for token in tokens[prompt:]]
    return np.concatenate(rows)


@pytest.mark.parametrize("order", ["eager", "late"])
@pytest.mark.parametrize("model", engines.MODELS)
def test_every_window_gives_the_resident_bits(model: str, order: Literal["eager", "late"]) -> None:
    tokens = engines.fixture(model)["tokens"].tolist()
    resident = run(engines.host_engine(model, engines.cache(160, ubatch=40)), tokens, 100)
    assert np.isfinite(resident).all()
    for pages in (1, 2, 5, 9):
        windowed = run(engines.host_engine(model, engines.cache(160, ubatch=40, window=pages * PAGE), order=order), tokens, 100)
        np.testing.assert_array_equal(windowed, resident, err_msg=f"window of {pages} pages")


@pytest.mark.parametrize("kv,value_kv", [("f16", "f16"), ("bf16", "f32"), ("f16", "bf16")])
def test_every_type_of_page_moves_whole(kv: str, value_kv: str) -> None:
    tokens = engines.fixture("qwen3")["tokens"].tolist()
    options = {"ubatch": 40, "kv": kv, "value_kv": value_kv}
    resident = run(engines.host_engine("qwen3", engines.cache(160, **options)), tokens, 100)  # type: ignore[arg-type]
    windowed = run(engines.host_engine("qwen3", engines.cache(160, window=PAGE, **options), order="late"), tokens, 100)  # type: ignore[arg-type]
    np.testing.assert_array_equal(windowed, resident)


WINDOW = 3 * PAGE


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + PAGE + 1])
@pytest.mark.parametrize("model", ["qwen2", "gemma3"])
def test_lengths_around_pages_and_windows(model: str, length: int) -> None:
    want = engines.fixture(model)
    tokens = want["tokens"][: length + 3].tolist()
    got = run(engines.host_engine(model, engines.cache(length + 3, window=WINDOW), order="late"), tokens, length)
    np.testing.assert_allclose(got, want["logits"][: length + 3], atol=1e-3)


@pytest.mark.parametrize("ubatch", [1, 7, 16, 17, 33, 160])
@pytest.mark.parametrize("cuts", [(160,), (1, 159), (50, 13, 97)])
def test_any_division_into_calls_and_ubatches_agrees(ubatch: int, cuts: tuple[int, ...]) -> None:
    """A call may begin inside a page, and a ubatch may be larger than the window: the page that was begun is carried over."""
    want = engines.fixture("llama")
    tokens = want["tokens"].tolist()
    outputs = []
    for window in (None, PAGE, 2 * PAGE):
        with engines.host_engine("llama", engines.cache(160, ubatch=ubatch, window=window), order="late") as engine:
            rows, begin = [], 0
            for cut in cuts:
                rows += list(engine.logit_rows(tokens[begin : begin + cut]))
                begin += cut
            outputs.append(np.concatenate(rows))
    np.testing.assert_allclose(outputs[0], want["logits"], atol=1e-3)
    for windowed in outputs[1:]:
        np.testing.assert_array_equal(windowed, outputs[0])


def test_a_second_sequence_sees_nothing_of_the_first() -> None:
    tokens = engines.fixture("gemma3")["tokens"].tolist()
    with engines.host_engine("gemma3", engines.cache(160, window=PAGE), order="late") as engine:
        first = engine.logits(tokens)
        engine.logits(tokens[::-1])
        np.testing.assert_array_equal(engine.logits(tokens), first)


def test_a_run_that_never_spills_copies_nothing() -> None:
    tokens = engines.fixture("llama")["tokens"].tolist()
    with engines.host_engine("llama", engines.cache(160)) as engine:
        engine.logits(tokens)
        assert engine.budget.host_tail_bytes == 0
        assert engine.copied_bytes == (0, 0)
    with engines.host_engine("llama", engines.cache(160, window=2 * PAGE)) as engine:
        engine.logits(tokens)
        page_bytes = 2 * 2 * PAGE * 16 * 4  # K and V, 2 heads, 16 columns, f32
        assert engine.copied_bytes[1] == 2 * 8 * page_bytes, "two layers, the eight pages that leave the window, once each"


@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
def test_a_new_plan_gives_the_bits_of_a_fresh_load(model: str) -> None:
    """Weights stay; window, ring, tail, workspace and even context and ubatch change."""
    tokens = engines.fixture(model)["tokens"].tolist()
    plans = [engines.cache(160, ubatch=40, window=PAGE), engines.cache(160, ubatch=40), engines.cache(120, ubatch=64, window=3 * PAGE)]
    with engines.host_engine(model, plans[0], order="late") as engine:
        for plan in (*plans, plans[0]):
            engine.prefill(tokens[:50])
            engine.replan(plan)
            assert engine.position == 0 and engine.copied_bytes == (0, 0) and engine.cache_config is plan
            assert engine.budget.spills == (plan.window_cells is not None) and engine.stats == engine.stats.__class__()
            part = tokens[: plan.ctx_size]
            rows = np.concatenate([*engine.logit_rows(part[:100]), *(engine.decode(token)[None] for token in part[100:])])
            np.testing.assert_array_equal(rows, run(engines.host_engine(model, plan), part, 100))
            engine.reset()


def test_a_plan_that_is_refused_leaves_the_weights() -> None:
    tokens = engines.fixture("llama")["tokens"].tolist()
    with engines.host_engine("llama", engines.cache(160)) as engine:
        want = engine.logits(tokens)
        with pytest.raises(OutOfMemoryError, match="too small"):
            engine.replan(engines.cache(160), vram_target=1 << 20)
        engine.replan(engines.cache(160, window=PAGE))
        np.testing.assert_array_equal(engine.logits(tokens), want)


@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
@pytest.mark.parametrize("order", ["eager", "late"])
def test_random_cells_are_the_same_wherever_they_lie(model: str, order: Literal["eager", "late"]) -> None:
    tokens = engines.fixture(model)["tokens"].tolist()

    def rows(window: int | None, seed: int = 3) -> np.ndarray:
        with engines.host_engine(model, engines.cache(160, ubatch=40, window=window), order=order) as engine:
            engine.fill_random(70, seed)
            engine.fill_random(35, seed + 1)
            assert engine.position == 105 and engine.copied_bytes[0] == 0, "nothing attends, so nothing is copied in"
            return np.concatenate([*engine.logit_rows(tokens[:20]), *(engine.decode(token)[None] for token in tokens[20:40])])

    resident = rows(None)
    assert np.isfinite(resident).all() and (rows(None, seed=5) != resident).any()
    for pages in (1, 2, 5):
        np.testing.assert_array_equal(rows(pages * PAGE), resident, err_msg=f"window of {pages} pages")


def test_random_cells_end_with_the_context() -> None:
    with engines.host_engine("llama", engines.cache(160)) as engine:
        engine.fill_random(150, 0)
        with pytest.raises(UsageError, match="150 cached cells and 11 more"):
            engine.fill_random(11, 0)
