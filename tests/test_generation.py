"""Generation a step behind the device: the ids are those of one step at a time, and a caller may stop at any of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import engines
import race_detector
from rollkv.config import SamplingParams
from rollkv.errors import CheckFailed, DeviceError, UsageError
from rollkv.sampling import choose
from rollkv.stream_plan import RingShape

PAGE = 16
SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.98, repeat_penalty=1.2, repeat_last=20, seed=3)


class Recording(race_detector.Recording):
    """Counts the choices."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = 0

    def choose(self, *operands: Any) -> None:
        self.choices += 1
        super().choose(*operands)


def one_by_one(model: str, prompt: list[int], count: int, sampling: SamplingParams) -> list[int]:
    """What the host makes of the logits of every step."""
    ids = list(prompt)
    with engines.host_engine(model, engines.cache(160)) as engine:
        row = engine.prefill(prompt)
        while len(ids) < len(prompt) + count:
            ids.append(choose(row, ids, sampling, len(ids) - 1))
            if len(ids) < len(prompt) + count:
                row = engine.decode(ids[-1])
    return ids[len(prompt) :]


@pytest.mark.parametrize("window", [None, PAGE, 3 * PAGE], ids=str)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("backend", [Recording, race_detector.RaceDetector], ids=["ahead", "one by one"])
@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
def test_ids_are_those_of_one_step_at_a_time(model, window, sampling, backend):
    prompt = engines.fixture(model)["tokens"][:53].tolist()
    want = one_by_one(model, prompt, 40, sampling)
    with engines.host_engine(model, engines.cache(160, window=window), backend=backend()) as engine:
        for _ in range(2):
            assert list(engine.generate_ids(prompt, 40, sampling)) == want
            assert engine.position == 53 + 39 and engine.stats.generated_tokens == 40 and engine.stats.stop_reason == "length"


@pytest.mark.parametrize("window", [None, PAGE, 2 * PAGE], ids=str)
@pytest.mark.parametrize("stop_at", [1, 2, 10, 11, 12, 13, 27, 28])  # a page ends behind cell 63, and so behind the 11th id
def test_a_caller_may_stop_at_any_id_and_go_on(window, stop_at):
    stored = engines.fixture("qwen3")
    prompt, rest = stored["tokens"][:53].tolist(), stored["tokens"][60:90].tolist()
    with engines.host_engine("qwen3", engines.cache(160)) as engine:
        ids = list(engine.generate_ids(prompt, stop_at))
    with engines.host_engine("qwen3", engines.cache(160)) as engine:
        engine.prefill(prompt)
        want = np.stack([engine.decode(token) for token in ids[:-1] + rest])[-len(rest) :]
    backend = Recording()
    with engines.host_engine("qwen3", engines.cache(160, window=window), backend=backend) as engine:
        steps = engine.generate_ids(prompt, 60)
        assert [next(steps) for _ in range(stop_at)] == ids
        steps.close()  # type: ignore[attr-defined]
        position = 53 + stop_at - 1
        ahead = position % PAGE != 0  # a step that would begin a page waits until it is asked for
        assert engine.position == position and backend.choices == stop_at + ahead
        got = np.stack([engine.decode(token) for token in rest])
        np.testing.assert_array_equal(got, want)


def test_a_stop_token_ends_it_and_is_not_yielded():
    prompt = engines.fixture("llama")["tokens"][:20].tolist()
    want = one_by_one("llama", prompt, 12, SamplingParams())
    stop = next(token for token in want if want.index(token) >= 3)
    with engines.host_engine("llama", engines.cache(64), backend=Recording()) as engine:
        assert list(engine.generate_ids(prompt, 12, stop_ids=frozenset({stop}))) == want[: want.index(stop)]
        assert (engine.stats.stop_reason, engine.stats.stop_token) == ("stop_token", stop)
        assert engine.stats.generated_tokens == want.index(stop) + 1 and engine.position == 20 + want.index(stop)


def test_a_reply_goes_on_to_the_end_of_the_context():
    prompt = engines.fixture("llama")["tokens"][:20].tolist()
    for backend in (Recording(), race_detector.RaceDetector()):
        with engines.host_engine("llama", engines.cache(64, window=PAGE), backend=backend) as engine:
            engine.prefill(prompt)
            ids = list(engine.reply(7))
            assert engine.position == 64 and len(ids) == 64 - 20
            with pytest.raises(UsageError, match="exceed the context"):
                next(engine.reply(ids[-1]))
        assert ids == one_by_one("llama", [*prompt, 7], 44, SamplingParams())
    with engines.host_engine("llama", engines.cache(64)) as engine, pytest.raises(UsageError, match="--temp"):
        next(engine.reply(7, SamplingParams(temperature=-1)))


def test_bytes_count_for_the_ids_so_far():
    """The step ahead has copied its tail already; it counts when its id is asked for."""
    prompt = engines.fixture("qwen3")["tokens"][:53].tolist()
    seen = []
    for backend in (Recording(), race_detector.RaceDetector()):
        with engines.host_engine("qwen3", engines.cache(160, window=PAGE), backend=backend) as engine:
            seen.append([(engine.copied_bytes, engine.stats.link_bytes) for _ in engine.generate_ids(prompt, 40)])
    assert seen[0] == seen[1] and seen[0][0][1] == 0 < seen[0][1][1]


def test_logits_that_are_not_finite_end_it(monkeypatch):
    prompt = engines.fixture("llama")["tokens"][:20].tolist()
    with engines.host_engine("llama", engines.cache(64), backend=Recording()) as engine:
        steps = engine.generate_ids(prompt, 12)
        next(steps)
        next(steps)
        engine._weights.output[0].values[5] = np.nan
        with pytest.raises(CheckFailed, match="not finite in the step of cells 2[12] to 2[12]: output"):
            for _ in range(3):
                next(steps)


def test_a_replay_waits_for_what_a_step_beside_it_staged():
    """Sequences that meet the same pages, and a few rows between single ones, stage pieces outside the recorded step."""
    tokens = engines.fixture("qwen3")["tokens"].tolist()
    for window in (PAGE, 2 * PAGE):
        for ring in (RingShape(1, 1), RingShape(2, 1), RingShape(4, 2)):
            backend = Recording()
            with engines.host_engine("qwen3", engines.cache(160, window=window), backend=backend, ring=ring) as engine:
                first = list(engine.generate_ids(tokens[:49], 10))
                assert list(engine.generate_ids(tokens[:49], 10)) == first
                list(engine.generate_ids(tokens[:50], 10))
                for rows in (1, 3):
                    engine.reset()
                    engine.prefill(tokens[:49])
                    for token in tokens[49:53]:
                        engine.decode(token)
                    engine.prefill(tokens[53 : 53 + rows])
                    for token in tokens[53 + rows : 62]:
                        engine.decode(token)
            assert backend.replays > 20


def test_the_last_cells_of_a_context():
    """Nothing follows them, so nothing is staged behind them: a recorded step of theirs would leave the ring to the next sequence as it should not."""
    tokens = engines.fixture("qwen3")["tokens"].tolist()
    sequences = (range(155, 157), range(149, 157))  # cells that are decoded one by one
    rows: list[list[np.ndarray]] = []
    for backend, window in ((race_detector.RaceDetector(), None), (Recording(), PAGE)):
        with engines.host_engine("qwen3", engines.cache(157, window=window), backend=backend, ring=RingShape(2, 1)) as engine:
            found = []
            for cells in sequences:
                engine.reset()
                engine.prefill(tokens[: cells[0]])
                found += [engine.decode(tokens[cell]) for cell in cells]
            rows.append(found)
    for want, got in zip(*rows, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("error", [KeyboardInterrupt, DeviceError])
def test_a_recording_that_breaks_off_leaves_the_cache_as_it_was(error):
    tokens = engines.fixture("qwen3")["tokens"].tolist()
    backend = Recording()
    with engines.host_engine("qwen3", engines.cache(160, window=PAGE), backend=backend, ring=RingShape(2, 1)) as engine:
        engine.prefill(tokens[:49])
        want = [engine.decode(token) for token in tokens[49:58]]
        capture = backend.capture

        def breaks(work: Callable[[], None]) -> Any:
            capture(work)
            raise error("in the middle")

        engine.reset()
        engine._decoder.close()
        engine.prefill(tokens[:49])
        engine.decode(tokens[49])
        engine.prefill(tokens[50:53])  # so that the recording begins with an empty ring
        backend.capture = breaks  # type: ignore[method-assign]
        with pytest.raises(error):
            engine.decode(tokens[53])
        backend.capture = capture  # type: ignore[method-assign]
        got = [engine.decode(token) for token in tokens[53:58]]
        for a, b in zip(got, want[4:], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)  # three of the rows before came together
        engine.reset()
        engine.prefill(tokens[:49])
        for token, row in zip(tokens[49:58], want, strict=True):
            np.testing.assert_array_equal(engine.decode(token), row)
