"""Written before copied, copied before read, read before reused: for every window, ring and ubatch tried, no two accesses race."""

import pytest

import engines
import race_detector
from rollkv.stream_plan import RingShape

PAGE = 16


@pytest.mark.parametrize("ring", [RingShape(1, 1), RingShape(2, 1), RingShape(2, 3), RingShape(4, 2)], ids=str)
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("ubatch", [1, 16, 40, 160])
def test_no_access_races(ring: RingShape, window: int, ubatch: int) -> None:
    tokens = engines.fixture("qwen3")["tokens"].tolist()
    backend = race_detector.RaceDetector()
    with engines.host_engine("qwen3", engines.cache(160, ubatch=ubatch, window=window * PAGE), backend=backend, ring=ring) as engine:
        engines.read_and_fill(engine, tokens)
    assert backend.checked > 1000


def test_the_detector_sees_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of wait left out is found, so its presence above means something."""
    tokens = engines.fixture("qwen3")["tokens"].tolist()
    config = engines.cache(160, ubatch=40, window=PAGE)
    found = set()
    for waiting in race_detector.Stream:
        for recorded in race_detector.Stream:
            backend = race_detector.RaceDetector()
            real_wait, real_record = backend.wait, backend.record
            monkeypatch.setattr(backend, "record", lambda stream, record=real_record: (stream, record(stream)))

            def wait(stream, event, waiting=waiting, recorded=recorded, real=real_wait):  # type: ignore[no-untyped-def]
                if (stream, event[0]) != (waiting, recorded):
                    real(stream, event[1])

            monkeypatch.setattr(backend, "wait", wait)
            with engines.host_engine("qwen3", config, backend=backend, ring=RingShape(2, 1)) as engine:
                try:
                    engine.prefill(tokens[:105])
                    for token in tokens[105:]:
                        engine.decode(token)
                except AssertionError:
                    found.add((waiting.name, recorded.name))
    assert found == {
        ("COMPUTE", "COPY_IN"),
        ("COMPUTE", "COPY_OUT"),
        ("COPY_IN", "COMPUTE"),
        ("COPY_IN", "COPY_OUT"),
        ("COPY_OUT", "COMPUTE"),
    }


@pytest.mark.parametrize("model", engines.MODELS)
def test_rings_of_any_shape_give_the_same_bits(model: str) -> None:
    tokens = engines.fixture(model)["tokens"].tolist()
    config = engines.cache(160, ubatch=40, window=2 * PAGE)
    rows = []
    for ring in (RingShape(4, 16), RingShape(1, 1), RingShape(2, 3)):
        for order in ("eager", "late"):
            with engines.host_engine(model, config, ring=ring, order=order) as engine:  # type: ignore[arg-type]
                rows.append([engine.prefill(tokens[:150]), *(engine.decode(token) for token in tokens[150:])])
    for other in rows[1:]:
        for got, want in zip(other, rows[0], strict=True):
            assert (got == want).all()


@pytest.mark.parametrize("window", [1, 3])
def test_the_end_of_a_step_stages_the_next(window: int) -> None:
    """Its first pieces are on their way before it begins, unless a page has just been completed, which it may find in the tail."""
    tokens = engines.fixture("qwen3")["tokens"].tolist()
    with engines.host_engine("qwen3", engines.cache(160, window=window * PAGE), ring=RingShape(2, 1)) as engine:
        engine.prefill(tokens[:105])
        staged = []
        for token in tokens[105:]:
            engine.decode(token)
            if engine.position < 160:
                completed = any(step.completed for step in engine._cache.plan(engine.position - 1, 1))
                staged.append((completed, engine._cache.is_staged(engine._cache.plan(engine.position, 1))))
        assert set(staged) == {(True, False), (False, True)}
        engine.fill_random(0, 0)
        engine.reset()
        engine.fill_random(105, 0)
        assert not engine._cache.is_staged(engine._cache.plan(105, 1))


def test_many_rows_walk_many_pages_at_once() -> None:
    """Pieces that lie behind each other make one run: 6 pages of tail are walked as the 4 that the ring holds and 2 in the spare slots that the
    feed-forward part's array makes; then the new pages, 2 in fresh slots and 1 in the window."""

    class Runs(race_detector.RaceDetector):
        def __init__(self) -> None:
            super().__init__()
            self.pages: list[int] = []

        def attend_tile(self, q, position, run, *rest, **flags):  # type: ignore[no-untyped-def]
            self.pages.append(run.num_pages)
            super().attend_tile(q, position, run, *rest, **flags)

    tokens, backend = engines.fixture("llama")["tokens"].tolist(), Runs()
    with engines.host_engine("llama", engines.cache(160, ubatch=48, window=PAGE), backend=backend, ring=RingShape(4, 1)) as engine:
        engine.prefill(tokens[:144])
        layers = engine.config.num_layers
    assert backend.pages[-4 * layers :] == [4, 2, 2, 1] * layers
