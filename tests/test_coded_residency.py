"""Types below 16 bits on the host: windows of any size give the resident bits, in every type, rotated, protected, eager and late; a tail of its own type is
close; and no two accesses race."""

from typing import Any, Literal

import numpy as np
import pytest

import engines
import race_detector
from rollkv.stream_plan import RingShape

PAGE = 16
# Heads of 64; of 32 beside sliding windows; 80 is for groups of 16.
MODELS = {"tiny": "synth:tiny:F16", "gemma3": "gemma3", "odd": "synth:tiny:F16,head_dim=80"}
TOKENS = [(37 * index * index + 11 * index) % 500 for index in range(130)]
PROMPT = 105

TYPES: dict[str, dict[str, Any]] = {
    "q8_0": {"kv": "q8_0"},
    "q4_0": {"kv": "q4_0"},
    "turbo4": {"kv": "turbo4"},
    "turbo3": {"kv": "turbo3"},
    "turbo2": {"kv": "turbo2"},
    "q8_0 rotated, turbo3": {"kv": "q8_0", "value_kv": "turbo3", "rotate": True},
    "f16, q4_0": {"kv": "f16", "value_kv": "q4_0"},
    "turbo4, f16": {"kv": "turbo4", "value_kv": "f16"},
    "q4_0 rotated, protected": {"kv": "q4_0", "rotate": True, "protect": 1},
}


def rows(engine: engines.Engine) -> np.ndarray:
    """Logits behind every token: a prefill, then one decode step each."""
    with engine:
        made = [np.concatenate(list(engine.logit_rows(TOKENS[:PROMPT])))]
        made += [engine.decode(token)[None] for token in TOKENS[PROMPT:]]
    assert np.isfinite(made[0]).all() and np.isfinite(made[1]).all()
    return np.concatenate(made)


def engine(model: str, *, order: Literal["eager", "late"] = "eager", **options: Any) -> engines.Engine:
    backend, ring = options.pop("backend", None), options.pop("ring", None)
    return engines.host_engine(MODELS[model], engines.cache(130, **{"ubatch": 40, **options}), order=order, backend=backend, ring=ring)


@pytest.mark.parametrize("types", TYPES)
def test_every_window_gives_the_resident_bits(types: str) -> None:
    resident = rows(engine("tiny", **TYPES[types]))
    for pages, order in ((1, "eager"), (1, "late"), (2, "eager"), (5, "late")):
        windowed = rows(engine("tiny", order=order, window=pages * PAGE, **TYPES[types]))  # type: ignore[arg-type]
        np.testing.assert_array_equal(windowed, resident, err_msg=f"window of {pages} pages, {order}")


@pytest.mark.parametrize("model", ["gemma3", "odd"])
@pytest.mark.parametrize("types", ["turbo4", "turbo3", "turbo2", "turbo4, f16"])
def test_heads_of_any_size_and_sliding_windows(model: str, types: str) -> None:
    resident = rows(engine(model, **TYPES[types]))
    np.testing.assert_array_equal(rows(engine(model, order="late", window=PAGE, **TYPES[types])), resident)


@pytest.mark.parametrize("ubatch", [1, 16, 33, 130])
def test_steps_of_any_length(ubatch: int) -> None:
    """A page is read as soon as it is written, by its own step too, so how many tokens a step has does not show in what is stored."""
    resident = rows(engine("tiny", ubatch=ubatch, kv="q8_0", value_kv="turbo3"))
    np.testing.assert_array_equal(
        rows(engine("tiny", order="late", window=2 * PAGE, ubatch=ubatch, kv="q8_0", value_kv="turbo3")), resident
    )
    assert engines.nmse(resident, rows(engine("tiny", kv="q8_0", value_kv="turbo3"))) < 1e-4


def test_the_narrower_the_further_from_f32() -> None:
    exact = rows(engine("tiny", kv="f32"))
    errors = [engines.nmse(rows(engine("tiny", kv=name)), exact) for name in ("f16", "q8_0", "turbo4", "turbo3", "turbo2")]
    assert errors == sorted(errors) and errors[0] < 1e-4 < errors[1] < 1e-2 < errors[2] and errors[4] < 2


def test_a_rotated_cache_of_numbers_that_lose_nothing_computes_the_same() -> None:
    """Rotated f16 beside a tail that no page reaches: queries, keys, values and what is attended all turn."""
    for kinds in ({"tail_kv": "turbo4"}, {"tail_kv": "f16", "tail_value_kv": "turbo2"}, {"tail_kv": "turbo2", "tail_value_kv": "f16"}):
        turned, plain = rows(engine("tiny", kv="f16", **kinds)), rows(engine("tiny", kv="f16"))
        assert 0 < engines.nmse(turned, plain) < 1e-4


def test_protection_helps() -> None:
    exact = rows(engine("tiny", kv="f32"))
    error = [engines.nmse(rows(engine("tiny", kv="turbo2", protect=protect)), exact) for protect in (1, 0)]
    assert error[0] < error[1]


# -- tails of another type -----------------------------------------------------------------------------------------------------

TAILS: dict[str, dict[str, Any]] = {
    "f16, tail q8_0": {"kv": "f16", "tail_kv": "q8_0"},
    "f16, tail turbo4": {"kv": "f16", "tail_kv": "turbo4"},
    "f16, tail q4_0 rotated": {"kv": "f16", "tail_kv": "q4_0", "rotate": True},
    "q8_0/f16, tail q4_0/turbo3": {"kv": "q8_0", "value_kv": "f16", "tail_kv": "q4_0", "tail_value_kv": "turbo3"},
    "f16, tail f16/q8_0, protected": {"kv": "f16", "tail_kv": "f16", "tail_value_kv": "q8_0", "protect": 1},
}


@pytest.mark.parametrize("types,limit", list(zip(TAILS, (0.01, 0.4, 0.4, 0.4, 0.01), strict=True)))
def test_a_tail_of_its_own_type_is_close_to_the_window_alone(types: str, limit: float) -> None:
    """As close as such models are, which double the error of bf16 cells to 1e-3."""
    resident = rows(engine("tiny", **TAILS[types]))
    for pages in (1, 3):
        found = [
            rows(engine("tiny", order=order, window=pages * PAGE, ring=ring, **TAILS[types]))  # type: ignore[arg-type]
            for order, ring in (("eager", None), ("late", RingShape(1, 1)), ("late", RingShape(4, 2)))
        ]
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0], err_msg="how pages reach the device makes no difference")
        error = engines.nmse(found[0], resident)
        assert 0 < error < limit, f"{error} with a window of {pages} pages"
        np.testing.assert_array_equal(found[0][:40], resident[:40], err_msg="a step sees its own pages before they leave")


def test_copied_bytes_are_those_of_the_tail() -> None:
    page_bytes, f16_bytes = 2 * PAGE * (64 + 4 + 16 + 2), 2 * PAGE * 64 * 2 * 2  # 2 heads of 64
    copied_in = []
    for size, tail in ((page_bytes, {"tail_kv": "q8_0", "tail_value_kv": "turbo2"}), (f16_bytes, {})):
        with engine("tiny", window=2 * PAGE, ring=RingShape(2, 2), kv="f16", **tail) as run:
            run.prefill(TOKENS)
            assert run.copied_bytes[1] == 3 * 7 * size, "three layers, the seven pages that leave the window, once each"
            assert run.budget.host_tail_bytes == 3 * 7 * size
            run.reset()
            run.fill_random(120, 0)
            run.decode(1)
            copied_in.append(run.copied_bytes[0] / size)
    assert copied_in[0] == copied_in[1] > 0


def test_a_new_plan_changes_types() -> None:
    plans = [engines.cache(130, window=PAGE, ubatch=40, **options) for options in (TYPES["q4_0"], TAILS["f16, tail turbo4"], {"kv": "f16"})]
    with engines.host_engine(MODELS["tiny"], plans[0], order="late") as run:
        for plan in (*plans, plans[0]):
            run.replan(plan)
            made = np.concatenate([*run.logit_rows(TOKENS[:PROMPT]), *(run.decode(token)[None] for token in TOKENS[PROMPT:])])
            np.testing.assert_array_equal(made, rows(engines.host_engine(MODELS["tiny"], plan)))


# -- races ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [RingShape(1, 1), RingShape(4, 2)], ids=str)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("ubatch", [16, 40, 160])
@pytest.mark.parametrize("types", ["q4_0", "f16, tail turbo4"])
def test_no_access_races(types: str, ubatch: int, window: int, ring: RingShape) -> None:
    backend, tokens = race_detector.RaceDetector(), [*TOKENS, *range(30)]
    cache = engines.cache(160, ubatch=ubatch, window=window * PAGE, **(TYPES | TAILS)[types])
    with engines.host_engine(MODELS["tiny"], cache, backend=backend, ring=ring) as run:
        engines.read_and_fill(run, tokens)
    assert backend.checked > 1000


def test_the_detector_sees_outgoing_pages_used_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool is used again behind the copies out of it, by the next layer but one."""
    from rollkv.kv_cache import KVCache

    real = KVCache._recoded

    def without_waiting(self: Any, layer: int, runs: Any) -> Any:
        self._outgoing_free = [None, None]
        return real(self, layer, runs)

    monkeypatch.setattr(KVCache, "_recoded", without_waiting)
    with engine("tiny", backend=race_detector.RaceDetector(), window=PAGE, **TAILS["f16, tail q8_0"]) as run:
        with pytest.raises(AssertionError, match="COMPUTE overwrites a page that COPY_OUT may still be reading"):
            run.prefill(TOKENS)


@pytest.mark.parametrize("types", ["turbo3", "f16, tail turbo4", "q8_0/f16, tail q4_0/turbo3"])
def test_recorded_steps_give_the_ids_of_direct_ones(types: str) -> None:
    found = []
    for backend in (race_detector.Recording(), race_detector.RaceDetector()):
        with engine("tiny", backend=backend, window=2 * PAGE, **(TYPES | TAILS)[types]) as run:
            found.append([list(run.generate_ids(TOKENS[:53], 60)) for _ in range(2)])
        assert isinstance(backend, race_detector.Recording) == (getattr(backend, "replays", 0) > 60)
    assert found[0] == found[1] and found[0][0] == found[0][1]
