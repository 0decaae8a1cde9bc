"""ladder: the arithmetic by hand values, a climb on an engine with a clock of its own, the probe on a backend that knows its rates, whole runs."""

import csv
import io
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer

from rollkv import ladder_fit as fit
from rollkv.backend import DeviceUse, GpuFacts, Stream
from rollkv.budget import Budget
from rollkv.cli import main as boundary
from rollkv.cli.ladder import ladder
from rollkv.counts import parse_depths, parse_sizes, spread_evenly
from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.ladder_fit import Fit, Point
from rollkv.machine_rates import PcieLink
from rollkv.model_config import model_config
from rollkv.roofline import ASSUMED, Bandwidths, StepCost
from rollkv.startup import load
from rollkv.synth import open_model
from rollkv.tasks import ceilings as probe
from rollkv.tasks import climb
from rollkv.tasks import ladder as task
from rollkv.tasks.ceilings import Ceilings, Rates, ceilings, measure_rates
from rollkv.tasks.generate import cache_config, open_text_model
from rollkv.tasks.ladder import Climb, Prompt, Rung, RungResult
from rollkv.tasks.ladder_prompts import needle_prompt, prose_prompt
from rollkv.tasks.ladder_rows import ROW_FIELDS, lost_needles, peer_row, resident_seconds, row_dict, summarise
from rollkv.tasks.peers import PeerRate, PeerResult, PeerTest, Setup
from rollkv.units import GIB, MIB

TINY = "synth:tiny"
PAGE = 256
LINK = 50e9


@pytest.fixture(scope="module")
def config():
    with open_model(TINY) as file:
        return model_config(file)


# -- placement -----------------------------------------------------------------------------------------------------------------


def test_rungs_stand_around_the_knee():
    assert fit.place_rungs(7, 800.0, 100.0) == pytest.approx((0, 100 / 3, 200 / 3, 100, 200, 400, 800))
    assert fit.place_rungs(3, 800.0, 100.0) == pytest.approx((0, 100, 800))


@pytest.mark.parametrize("knee", [None, 0.0, 800.0, 1e9])
def test_without_a_knee_inside_rungs_stand_evenly(knee):
    assert fit.place_rungs(5, 800.0, knee) == (0, 200, 400, 600, 800)
    assert fit.place_rungs(2, 800.0, 100.0) == (0, 800) and fit.place_rungs(1, 800.0, knee) == (0,)


def test_ranges_hold_both_ends_in_either_direction():
    assert spread_evenly(0, 90, 4) == (0, 30, 60, 90)
    assert spread_evenly(90, 0, 4) == (90, 60, 30, 0)
    assert spread_evenly(5, 9, 1) == (5,)
    for place in (lambda: spread_evenly(0, 1, 0), lambda: fit.place_rungs(0, 1.0, None)):
        with pytest.raises(ValueError):
            place()


# -- models and fits -----------------------------------------------------------------------------------------------------------


def test_the_models_by_hand():
    both = Fit("sum", 0.010, LINK), Fit("overlap", 0.010, LINK)
    assert [model.seconds(1e9) for model in both] == pytest.approx([0.030, 0.020])
    assert [model.seconds(0.25e9) for model in both] == pytest.approx([0.015, 0.010])
    assert [model.knee_bytes() for model in both] == pytest.approx([0.15 * 0.010 * LINK, 1.15 * 0.010 * LINK])
    assert both[0].worst_error([Point(0, 0.010), Point(1e9, 0.024)]) == pytest.approx(0.25)
    assert Fit("sum", 0.01, None).seconds(1e9) == 0.01 and Fit("sum", 0.01, None).knee_bytes() is None
    assert Fit("overlap", None, LINK).seconds(1e9) == pytest.approx(0.02)


@pytest.mark.parametrize("name,fitted", [("sum", fit.fit_sum), ("overlap", fit.fit_overlap)])
@pytest.mark.parametrize("seed", range(5))
def test_a_fit_gets_back_what_made_the_points(name, fitted, seed):
    draw = random.Random(seed)
    truth = Fit(name, draw.uniform(1e-3, 1e-1), draw.uniform(1e9, 1e11))
    knee = truth.t0_seconds * truth.link_rate
    tails = [0.0, *(knee * draw.uniform(0.1, 0.9) for _ in range(3)), *(knee * draw.uniform(1.1, 9) for _ in range(3))]
    draw.shuffle(tails)
    found = fitted([Point(tail, truth.seconds(tail)) for tail in tails])
    assert (found.t0_seconds, found.link_rate) == pytest.approx((truth.t0_seconds, truth.link_rate), rel=1e-6)


def squares(t0: float, slope: float, points: list[Point]) -> float:
    return sum((max(t0, slope * point.tail_bytes) / point.seconds - 1) ** 2 for point in points)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_bend_fits_better(seed):
    draw = random.Random(seed)
    truth = Fit(draw.choice(["sum", "overlap"]), 0.01, LINK)
    points = [Point(tail, truth.seconds(tail) * draw.uniform(0.85, 1.15)) for tail in (0, 1e8, 3e8, 5e8, 6e8, 1e9, 2e9)]
    found = fit.fit_overlap(points)
    best = squares(found.t0_seconds or 0.0, 1 / found.link_rate if found.link_rate else 0.0, points)
    for t0 in np.linspace(0.005, 0.03, 60):
        for rate in np.linspace(0.3, 2, 60) * LINK:
            assert squares(t0, 1 / rate, points) >= best - 1e-12


def test_what_the_rungs_do_not_show_stays_unknown():
    flat = [Point(0, 0.01), Point(1e6, 0.01), Point(2e6, 0.0099)]
    assert fit.fit_sum(flat).link_rate is None, "faster with a tail: no link can be read from that"
    assert fit.fit_overlap(flat).seconds(2e6) == pytest.approx(0.01, rel=0.01)
    steep = [Point(1e9, 0.01), Point(2e9, 0.03)]
    assert fit.fit_sum(steep).t0_seconds is None
    for points in ([], [Point(0, 0.01)], [Point(5, 0.01), Point(5, 0.02)]):
        assert fit.fit_sum(points) is None and fit.fit_overlap(points) is None


def verdict_of(points: list[Point], *, link_measured: bool = True) -> fit.Verdict:
    return fit.judge(points, [found for found in (fit.fit_sum(points), fit.fit_overlap(points)) if found], link_measured=link_measured)


@pytest.mark.parametrize("name", ["sum", "overlap"])
def test_the_verdict_names_the_model(name):
    truth = Fit(name, 0.01, LINK)
    verdict = verdict_of([Point(tail, truth.seconds(tail)) for tail in (0, 2e8, 4e8, 6e8, 1e9, 3e9)])
    assert verdict.model == name and verdict.error < 1e-6 and f"the {name} model holds within 0.0 %" in verdict.words
    without = verdict_of([Point(tail, truth.seconds(tail)) for tail in (0, 2e8, 4e8, 6e8)], link_measured=False)
    assert (without.model, without.error) == ("undecided", None) and "no link was measured" in without.words


def test_the_verdict_can_say_no():
    assert verdict_of([Point(0, 0.01), Point(1e9, 0.03)]).model == "undecided", "two rungs fit any two parameters"
    assert verdict_of([Point(0, 0.01), Point(1e5, 0.01), Point(2e5, 0.01)]).model == "undecided", "a tail too short to tell"
    assert verdict_of([Point(0, 0.01), Point(1e9, 0.05), Point(2e9, 0.01), Point(3e9, 0.05)]).model == "neither"


def test_behind_the_knee_nothing_counts():
    assert fit.measured_knee([Point(0, 0.010), Point(100, 0.0114), Point(200, 0.0140), Point(300, 0.0113)], 0.010) == 100
    assert fit.measured_knee([Point(0, 0.020), Point(0, 0.010), Point(100, 0.010)], 0.010) is None, "resident rungs differ more than that"


def test_the_knee_is_the_largest_tail_up_to_which_all_are_within_15_percent():
    points = [Point(0, 0.010), Point(300, 0.0116), Point(100, 0.0114), Point(200, 0.0115)]
    assert fit.measured_knee(points, 0.010) == 200
    assert fit.measured_knee(points, None) is None and fit.measured_knee(points[1:2], 0.010) is None


def test_statistics_by_hand():
    assert fit.median([3, 1, 2]) == 2 and fit.median([4, 1, 2, 3]) == 2.5
    assert fit.deviation([2, 4, 4, 4, 5, 5, 7, 9]) == pytest.approx((32 / 7) ** 0.5) and fit.deviation([1]) is None
    assert fit.relative_spread([10, 11, 10.5]) == pytest.approx(1 / 10.5) and fit.relative_spread([10]) is None
    assert fit.agree(1.0, 1.019, 0.02) and fit.agree(1.019, 1.0, 0.02) and not fit.agree(1.0, 1.03, 0.02)


# -- rungs ---------------------------------------------------------------------------------------------------------------------


def test_tails_become_windows_of_whole_pages(config):
    cache = cache_config(10 * PAGE)
    size = task.tail_page_bytes(config, cache)
    full = [layer for layer in config.layers if layer.sliding_window is None]
    assert size == sum(2 * layer.num_kv_heads * layer.key_dim * 2 * PAGE for layer in full), "keys and values, 2 bytes each"
    rungs = task.tail_rungs(config, cache, 2000, [0.0, 3.2 * size, 2.9 * size, 9 * size])
    assert {rung.depth for rung in rungs} == {2000}
    assert [rung.cache.window_cells for rung in rungs] == [None, 7 * PAGE, PAGE], "two of them are the same number of pages"
    assert rungs[0].cache.residency == "full" and task.largest_tail(config, cache) == 9 * size
    with pytest.raises(UsageError, match="lower --tail"):
        task.tail_rungs(config, cache, 2000, [10.0 * size])
    slid = replace(config, layers=tuple(replace(layer, sliding_window=64) for layer in config.layers))
    with pytest.raises(UsageError, match="sliding"):
        task.tail_page_bytes(slid, cache)


def test_prose_differs_and_has_its_length():
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text[:5000]] if len(text) < 5000 else [ord(letter) for letter in text]

    made = [prose_prompt(encode, 9000, repetition) for repetition in range(3)]
    assert all(len(prompt.ids) == 9000 and prompt.found is None for prompt in made) and len({prompt.ids[:30] for prompt in made}) == 3
    assert made[1] == prose_prompt(encode, 9000, 1) and len(prose_prompt(encode, 0, 1).ids) == 1


@pytest.mark.parametrize("num_tokens", [64, 301, 1024])
def test_needles_stand_at_the_beginning_of_exact_prompts(num_tokens):
    model = open_text_model(TINY)
    made = [needle_prompt(model, num_tokens, repetition) for repetition in range(3)]
    assert len({prompt.ids for prompt in made}) == 3
    for prompt in made:
        text = model.tokenizer.decode(prompt.ids)
        question = text.strip().splitlines()[-1]
        assert len(prompt.ids) == num_tokens and text.strip().startswith(question) and text.count(question) == 2
        answer = text.split(question)[1].split(".")[0].strip()
        assert len(answer) == 7 and answer.isdigit()

        def reply(words: str, prompt: Prompt = prompt, answer: str = answer) -> bool:
            return prompt.found(model.tokenizer.encode(words) + [model.tokenizer.eos_id] + model.tokenizer.encode(f" {answer}"))

        assert reply(f" {answer}.") and not reply(" 1.") and not reply(f" {answer}5") and not reply(""), (
            "what stands behind the end is no reply"
        )


def test_a_depth_without_room_for_a_needle_is_refused():
    with pytest.raises(UsageError, match="--depth 10: needle and question alone take"):
        needle_prompt(open_text_model(TINY), 10, 0)


@pytest.mark.parametrize(
    "text,steps,sizes",
    [
        ("0,256,512MiB", None, (0, 256 * MIB, 512 * MIB)),
        ("0,256", None, (0, 256 * MIB)),
        ("0GiB, 1.5, 2GiB", None, (0, 3 * GIB // 2, 2 * GIB)),
        ("512MiB,1GiB", None, (512 * MIB, GIB)),
        ("0..1GiB", 3, (0, GIB // 2, GIB)),
        ("4GiB..2GiB", 2, (4 * GIB, 2 * GIB)),
        ("1.5..2.5GB", 3, (1_500_000_000, 2_000_000_000, 2_500_000_000)),
    ],
)
def test_lists_and_ranges(text, steps, sizes):
    assert parse_sizes(text, "--tail", steps or 8, zero=True) == sizes


@pytest.mark.parametrize("text", ["1..2..3", "..5", "1,,2", "0apples,5", "x"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(UsageError, match="--tail"):
        parse_sizes(text, "--tail", 8, zero=True)


@pytest.mark.parametrize(
    "text,word", [("0,abc", "abc"), ("0..abc", "abc"), ("0,256,xMiB", "xMiB"), ("8,foo", "foo"), ("0bar,1", "0bar"), ("1,0bar", "0bar")]
)
def test_what_is_no_size_is_named_as_it_was_written(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=f"cannot read the size '{word}'"):
        parse_sizes(text, "--tail", 8, zero=True)


def test_a_cap_of_nothing_is_refused():
    with pytest.raises(UsageError, match="--vram-target"):
        parse_sizes("0,5", "--vram-target", 8)


def test_depths_may_be_zero():
    assert parse_depths("0,4k,0,512", "-d") == (0, 4096, 512)
    with pytest.raises(UsageError, match="-d: '-1'"):
        parse_depths("-1", "-d")


# -- the climb on a clock of its own -------------------------------------------------------------------------------------------


class FakeEngine:
    """Steps take max(t0, tail / LINK) of its own clock, the first six longer where slow_first exceeds 1. Tokens count up."""

    backend_name = "fake"

    def __init__(self, rung: Rung, config, clock: list[float], *, t0: float = 0.01, slow_first: float = 1.0, used: int = 900) -> None:
        self._config, self._clock, self._t0, self._slow, self._used = config, clock, t0, slow_first, used
        self.prompts: list[list[int]] = []
        self.fed: list[int] = []
        self.filled: list[tuple[int, int]] = []
        self.plans: list[tuple[int | None, int | None]] = []
        self.closed = False
        self.backend = self
        self.refused: set[int | None] = set()
        self.replan(rung.cache, rung.vram_target)

    def replan(self, cache, vram_target: int | None = None, config=None) -> None:
        self.plans.append((cache.window_cells, vram_target))
        if cache.window_cells in self.refused:
            raise OutOfMemoryError("it is too large now")
        self.cache_config = cache
        total = -(-cache.ctx_size // PAGE)
        window = total if cache.residency == "full" else min((cache.window_cells or 1) // PAGE, total)
        self.budget = Budget((("all", 1000),), vram_target, total, window, PAGE, None, 0, 0, 0, False, 512, StepCost(0.001), ASSUMED)
        self._page_bytes = task.tail_page_bytes(self._config, cache)
        self.position, self._copied = 0, 0

    copied_bytes = property(lambda self: (self._copied, 0))

    def device_use(self) -> DeviceUse:
        return DeviceUse(self._used, 0, 0, 0)

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def reset(self) -> None:
        self.position, self._steps = 0, 0

    def fill_random(self, num_cells: int, seed: int) -> None:
        if num_cells:
            self.filled.append((num_cells, seed))
        self.position += num_cells

    def prefill(self, ids: list[int]) -> np.ndarray:
        assert ids
        self.prompts.append(ids)
        self.position += len(ids)
        self._clock[0] += 1e-3 * len(ids)
        return np.eye(9)[3]

    def reply(self, token: int) -> Iterator[int]:
        while True:
            token = self.step(token)
            yield token

    def step(self, token: int) -> int:
        self.fed.append(token)
        tail = max(self.position // PAGE + 1 - self.budget.window_pages, 0) * self._page_bytes
        self.position += 1
        self._steps += 1
        self._copied += tail
        self._clock[0] += max(self._t0, tail / LINK) * (self._slow * (8 - self._steps) if self._slow > 1 and self._steps < 7 else 1)
        return (token + 1) % 9


class Hill:
    """Engines for a climb, and the climb."""

    def __init__(self, config, depth: int = 4 * PAGE, num_prompt: int | None = None, **options: object) -> None:
        self.config, self.depth, self.num_prompt, self.options, self.clock = config, depth, num_prompt, options, [0.0]
        self.cache = cache_config(task.context_size(depth, 8, num_prompt))
        self.engines: list[FakeEngine] = []
        self.refused: set[str] = set()
        self.asked: list[tuple[int, int]] = []
        self.found = None

    def open(self, rung: Rung) -> FakeEngine:
        assert all(engine.closed for engine in self.engines), "two engines may not fit on one device"
        if rung.label in self.refused:
            raise OutOfMemoryError("it is too large")
        self.engines.append(FakeEngine(rung, self.config, self.clock, **self.options))
        return self.engines[-1]

    def tails(self, *pages: int) -> tuple[Rung, ...]:
        size = task.tail_page_bytes(self.config, self.cache)
        return task.tail_rungs(self.config, self.cache, self.depth, [float(count * size) for count in pages])

    def prompt(self, depth: int, repetition: int) -> Prompt:
        self.asked.append((depth, repetition))
        return Prompt((repetition,) * (depth + (self.num_prompt or 0) or 1), 30 if self.found else 0, self.found)

    def run(self, rungs: tuple[Rung, ...] | None = None, link_rate: float | None = LINK, **what: object) -> list[RungResult]:
        asked = Climb(rungs or self.tails(0), 8, 2, num_prompt=self.num_prompt, **what)
        describe, clock = (lambda engine: {"backend": engine.backend_name}), (lambda: self.clock[0])
        return list(climb.run_climb(asked, link_rate, self.open, self.prompt, lambda rung: None, describe, clock))


def test_a_rung_by_hand(config):
    hill = Hill(config, t0=1e-6)
    size = task.tail_page_bytes(config, hill.cache)
    resident, streamed = hill.run(hill.tails(0, 2))
    assert resident.tail_bytes == 0 and resident.seconds == pytest.approx(1e-6)
    assert streamed.tail_bytes == 2 * size and streamed.seconds == pytest.approx(2 * size / LINK)
    assert streamed.cells_in_tail == 2 * PAGE and streamed.cells_in_window == hill.depth + 4 + 8 - 2 * PAGE, "4 steps to warm up, 8 timed"
    assert streamed.step_seconds == [pytest.approx(2 * size / LINK)] * 16
    assert streamed.prefill_seconds == pytest.approx([hill.depth * 1e-3] * 2) and streamed.ttft_seconds == streamed.prefill_seconds
    assert [(rep.warm_steps, rep.settled) for rep in streamed.repetitions] == [(4, True)] * 2 and streamed.spread == pytest.approx(
        0, abs=1e-9
    )
    (engine,) = hill.engines
    assert engine.plans == [(None, None), (hill.cache.ctx_size // PAGE * PAGE + PAGE - 2 * PAGE, None)] and engine.closed, (
        "one load, two plans"
    )
    assert [ids[0] for ids in engine.prompts] == [2, 0, 1] * 2, "the warm-up's prompt and one for each repetition"
    assert engine.fed[:4] == [2, 3, 4, 5], "every token follows from the logits"

    bounds = Ceilings(Rates(LINK, LINK, LINK, 1e12), 10**6, 10**6)
    row = row_dict(streamed, bounds, resident_seconds([resident, streamed]))
    step = 1e3 * 2 * size / LINK
    assert row["step_ms"] == pytest.approx(step) and row["tg_tokens_per_second"] == pytest.approx(1e3 / step)
    assert (
        row["pp_tokens_per_second"] == pytest.approx(1000)
        and row["link_percent"] == pytest.approx(100)
        and row["tail_gbps"] == pytest.approx(50)
    )
    assert row["exposed_ms"] == pytest.approx(step - 1e-3)
    assert row["predicted_sum_ms"] == pytest.approx(step + 1e-3) and row["predicted_overlap_ms"] == pytest.approx(step)
    assert row["roofline_tokens_per_second"] == pytest.approx(1e3 / step) and bounds.roofline(0) == pytest.approx(5e5)
    assert row["step_ms_p99"] == pytest.approx(step) and row["step_ms_stdev"] == pytest.approx(0, abs=1e-9)
    assert (row["peak_device_bytes"], row["limit_bytes"], row["over_limit"], row["spread_flag"], row["settled"]) == (
        900,
        1000,
        False,
        False,
        True,
    )
    assert row_dict(resident, bounds, resident.seconds + 1)["exposed_ms"] == 0, "never below zero"
    blind = row_dict(streamed, Ceilings(Rates(), 1, 1), None)
    unknown = ("link_percent", "exposed_ms", "predicted_sum_ms", "predicted_overlap_ms", "roofline_tokens_per_second")
    assert all(blind[name] is None for name in unknown) and set(blind) == set(row) == set(ROW_FIELDS)
    assert (row["pp_test"], row["tg_test"], row["needle_found"], row["fill"]) == ("pp1024", "tg8 @ d1024", None, "prompt")


def test_warm_up_waits_for_two_equal_steps(config):
    hill = Hill(config, slow_first=3.0)
    (result,) = hill.run()
    assert [(rep.warm_steps, rep.settled) for rep in result.repetitions] == [(8, True)] * 2 and result.seconds == pytest.approx(0.01)
    assert max(result.step_seconds) == pytest.approx(0.01), "no slow step is among the timed"


def test_a_run_that_never_settles_says_so(config):
    hill, ticks = Hill(config), random.Random(1)

    class Restless(FakeEngine):
        def step(self, token: int) -> int:
            self._clock[0] += 0.01 * 1.1 ** (self._steps % 2 * 9) + 1e-6 * ticks.random()
            return super().step(token)

    hill.open = lambda rung: Restless(rung, config, hill.clock)  # type: ignore[method-assign]
    (result,) = hill.run()
    assert [(rep.warm_steps, rep.settled) for rep in result.repetitions] == [(16, False)] * 2
    assert hill.cache.ctx_size == hill.depth + 16 + 8
    assert row_dict(result, Ceilings(Rates(), 1, 1), None)["settled"] is False


def test_placed_rungs_reach_from_resident_to_one_page(config):
    hill = Hill(config, depth=32 * PAGE)
    size = task.tail_page_bytes(config, hill.cache)
    hill.options["t0"] = 8 * size / LINK / 1.149  # the knee lies just behind 8 pages
    results = hill.run(num_placed=8)
    tails = [round(result.tail_bytes / size) for result in results]
    assert tails[0] == 0 and tails == sorted(set(tails)) and len(tails) == 8
    assert 8 in tails and tails[-1] == -(-hill.cache.ctx_size // PAGE) - 1 and results[-1].rung.cache.window_cells == PAGE
    summary = summarise(results, Rates(link_in=LINK))
    overlap = next(found for found in summary.fits if found.model == "overlap")
    assert overlap.link_rate == pytest.approx(LINK) and overlap.t0_seconds == pytest.approx(hill.options["t0"])
    assert summary.verdict.model == "overlap" and summary.knee_bytes == 8 * size
    assert summary.ceiling_errors["overlap"] == pytest.approx(0, abs=1e-9) and summary.ceiling_errors["sum"] > 0.5
    flat = summary.as_dict()
    assert flat["fit_overlap_link_gbps"] == pytest.approx(50) and flat["verdict"] == "overlap"
    evenly = [round(result.tail_bytes / size) for result in Hill(config, depth=32 * PAGE).run(link_rate=None, num_placed=5)]
    assert evenly == [0, 8, 16, 24, 32]


def test_a_rung_that_does_not_fit_is_a_row(config):
    hill = Hill(config)
    hill.refused = {"resident"}
    results = hill.run(hill.tails(0, 1, 2))
    assert [result.ran for result in results] == [False, True, True] and len(hill.engines) == 1
    row = row_dict(results[0], Ceilings(Rates(), 1, 1), None)
    assert row["outcome"] == "does not fit" and row["refusal"] == "it is too large" and row["step_ms"] is None
    assert summarise(results, Rates(link_in=LINK)).as_dict()["resident_ms"] is None


def test_a_plan_that_is_refused_is_a_row_and_the_weights_stay(config):
    hill = Hill(config)
    rungs = hill.tails(0, 1, 2)

    class Refusing(FakeEngine):
        def replan(self, cache, vram_target=None, config=None) -> None:
            self.refused = {rungs[1].cache.window_cells}
            super().replan(cache, vram_target)

    def open_refusing(rung: Rung) -> FakeEngine:
        hill.engines.append(Refusing(rung, config, hill.clock))
        return hill.engines[-1]

    hill.open = open_refusing  # type: ignore[method-assign]
    assert [result.refusal for result in hill.run(rungs)] == [None, "it is too large now", None] and len(hill.engines) == 1


def test_a_peer_needs_the_device_between_rungs(config):
    hill = Hill(config)
    rungs = hill.tails(0, 1)
    asked = Climb(rungs, 8, 2, reload=True)
    for result in climb.run_climb(asked, LINK, hill.open, hill.prompt, lambda rung: None, lambda engine: {}, lambda: 0.0):
        assert result.ran and all(engine.closed for engine in hill.engines)
    assert len(hill.engines) == 2


def test_needles_are_asked_for_behind_the_timed_steps(config):
    hill = Hill(config)
    replies = []
    hill.found = lambda reply: replies.append(reply) or len(replies) != 2
    (result,) = hill.run()
    assert [len(reply) for reply in replies] == [30, 30] and len(result.step_seconds) == 16, "the rest of the reply is not timed"
    assert replies[0][:4] == [3, 4, 5, 6] and [rep.found for rep in result.repetitions] == [True, False]
    assert result.found is False and row_dict(result, Ceilings(Rates(), 1, 1), None)["needle_found"] is False
    fine = replace(result, repetitions=result.repetitions[:1])
    streamed = replace(result, repetitions=tuple(replace(rep, copied_bytes=(7,), found=False) for rep in result.repetitions))
    assert lost_needles([fine, streamed]) == ["resident"] and lost_needles([fine, fine]) == []


@pytest.mark.parametrize(
    "resident,streamed,lost",
    [((1, 1, 0), (0, 0, 0), True), ((1, 1, 0), (1, 1, 0), False), ((0, 0, 1), (1, 1, 0), True), ((0, 0, 0), (0, 0, 0), False)],
)
def test_needles_are_compared_by_repetition(config, resident, streamed, lost):
    hill = Hill(config)
    rungs = hill.tails(0, 1)

    def result(rung, found, tail):
        repetitions = tuple(task.Repetition(None, None, 4, True, (0.1,), (tail,), 9, None, bool(one)) for one in found)
        return RungResult(rung, Climb(rungs, 8, len(found)), repetitions=repetitions)

    found = [result(rungs[0], resident, 0), result(rungs[1], streamed, 100)]
    assert lost_needles(found) == ([rungs[1].name] if lost else [])
    narrower = [replace(one, rung=replace(one.rung, cache=replace(one.rung.cache, tail_key_type="q8_0"))) for one in found]
    assert lost_needles(narrower) == [], "cells that change their type when they leave need not give the same replies"


def test_random_cells_stand_in_for_the_prompt(config):
    hill = Hill(config)
    (result,) = hill.run(fill="random")
    assert hill.engines[0].filled == [(hill.depth, 0), (hill.depth, 1)] and not hill.engines[0].prompts, "nothing is read"
    row = row_dict(result, Ceilings(Rates(), 1, 1), None)
    unknown = ("pp_test", "pp_tokens_per_second", "pp_spread_percent", "ttft_seconds", "needle_found")
    assert row["fill"] == "random" and row["tg_tokens_per_second"] == pytest.approx(100) and all(row[name] is None for name in unknown)


@pytest.mark.parametrize("fill", ["prompt", "random"])
@pytest.mark.parametrize("depth", [0, 4 * PAGE])
def test_prefill_behind_a_depth(config, depth, fill):
    hill = Hill(config, depth, num_prompt=100)
    (result,) = hill.run((task.resident_rung(config, hill.cache, depth),), fill=fill)
    (engine,) = hill.engines
    assert result.prefill_seconds == pytest.approx([0.1, 0.1]) and result.ttft_seconds == []
    read = [len(ids) for ids in engine.prompts]
    assert engine.filled == ([(depth, seed) for seed in (0, 0, 1, 1)] if fill == "random" and depth else [])
    assert read == ([100, depth, 100, depth, depth, 100, depth] if fill == "prompt" and depth else [100, 100, 100]), (
        "filled anew for decode"
    )
    assert result.repetitions[0].position == depth + 4 + 8
    row = row_dict(result, Ceilings(Rates(), 1, 1), None)
    behind = f" @ d{depth}" if depth else ""
    assert (row["pp_test"], row["tg_test"]) == (f"pp100{behind}", f"tg8{behind}")
    assert row["pp_tokens_per_second"] == pytest.approx(1000) and row["pp_tokens_per_second_stdev"] == pytest.approx(0, abs=1e-6)


def test_spread_and_caps_are_flagged(config):
    hill = Hill(config, used=1200)
    (result,) = hill.run((task.cap_rung(config, hill.cache, hill.depth, 1100),))
    bounds = Ceilings(Rates(), 1, 1)
    assert row_dict(result, bounds, None)["over_limit"] is True and row_dict(result, bounds, None)["limit_bytes"] == 1100
    first = replace(result.repetitions[0], step_seconds=(1.0, 1.0), prefill_seconds=1.0)
    for second, flag in ((1.04, False), (1.06, True)):
        steps = row_dict(replace(result, repetitions=(first, replace(first, step_seconds=(second, second)))), bounds, None)
        prefills = row_dict(replace(result, repetitions=(first, replace(first, prefill_seconds=second))), bounds, None)
        assert (steps["spread_flag"], steps["pp_spread_flag"]) == (flag, False)
        assert (prefills["spread_flag"], prefills["pp_spread_flag"]) == (False, flag)


def test_a_peer_is_a_row_of_the_same_columns():
    tests = PeerTest(4096, 0, 0), PeerTest(0, 64, 4096)
    ran = peer_row(PeerResult(Setup("-ngl 30", 30), tests, 3, ("-m", "x"), None, PeerRate(5000, 50), PeerRate(100, 1), "abc (1)"))
    assert set(ran) == set(ROW_FIELDS) and ran["step_ms"] == 10 and ran["depth"] == 4096 and ran["outcome"] == "ran"
    assert (ran["pp_test"], ran["tg_test"], ran["rung"]) == ("pp4096", "tg64 @ d4096", "llama-bench -ngl 30")
    failed = peer_row(PeerResult(Setup("resident", 99), tests, 3, failure="it broke"))
    assert failed["outcome"] == "failed" and failed["refusal"] == "it broke" and failed["tg_tokens_per_second"] is None


# -- ceilings ------------------------------------------------------------------------------------------------------------------


class ProbedBackend:
    """Streams with clocks of their own: each way has a rate, copies of both at once share `both`."""

    RATES = {Stream.COPY_IN: 50e9, Stream.COPY_OUT: 40e9}

    def __init__(self) -> None:
        self.now = dict.fromkeys(Stream, 0.0)
        self.synchronize()
        self.copies = self.added = 0

    def empty(self, label: str, shape: tuple[int, ...], dtype: str) -> tuple[int, ...]:
        return shape

    host_pages = empty

    def _copy(self, stream: Stream, run) -> None:
        assert run.num_pages == 1 and run.first_page < run.num_slots
        self.copies += 1
        self.now[stream] += probe.PROBE_PAGE_BYTES / self.RATES[stream]

    def copy_in(self, run, host) -> None:
        self._copy(Stream.COPY_IN, run)

    def copy_out(self, run, host) -> None:
        self._copy(Stream.COPY_OUT, run)

    def add(self, x, y) -> None:
        assert x == y and x[0] * x[1] * 4 == GIB
        self.now[Stream.COMPUTE] += 3 * GIB / (3e12 if self.added else 1e9)  # the first one loads the kernel
        self.added += 1

    def record_timed(self, stream: Stream) -> float:
        return self.now[stream]

    def elapsed_ms(self, begin: float, end: float) -> float:
        return 1e3 * (end - begin)

    def synchronize(self) -> None:
        self.now = dict.fromkeys(Stream, max(self.now.values()))


def test_the_probe_finds_the_rates_of_a_backend():
    backend = ProbedBackend()
    rates = measure_rates(backend, GIB)
    assert (rates.link_in, rates.link_out, rates.hbm) == pytest.approx((50e9, 40e9, 3e12))
    assert rates.link_both == pytest.approx(80e9), "both ways take as long as the slower one"
    assert backend.copies == 4 * 32 * 6 and backend.added == 6


@pytest.mark.gpu
def test_the_probe_on_a_gpu():
    rates = probe.probe_device(0, lambda message: None)
    assert 1e9 < rates.link_in < 1e12 and 1e9 < rates.link_out < 1e12 and rates.link_in < rates.hbm < 2e13
    assert max(rates.link_in, rates.link_out) * 0.7 < rates.link_both < (rates.link_in + rates.link_out) * 1.1


@pytest.mark.parametrize("spec,slides", [(TINY, False), (f"{TINY},architecture=gemma3", True)])
def test_bytes_of_a_token_by_hand(spec, slides):
    with open_model(spec) as file:
        config = model_config(file)
        raw = sum(tensor.nbytes for name, tensor in file.tensors.items() if name != "token_embd.weight" or config.tied_output)
    bounds = ceilings(spec, Rates(), cache_config(4096, cache_type_k="f32"), 1000)
    cells = [min(1000, layer.sliding_window or 1000) for layer in config.layers]
    bytes_per_cell = [layer.num_kv_heads * (layer.key_dim * 4 + layer.value_dim * 2) for layer in config.layers]
    assert bounds.kv_bytes == sum(count * size for count, size in zip(cells, bytes_per_cell, strict=True))
    assert (min(cells) == 64) is slides
    assert bounds.weight_bytes == raw, "whole blocks and tiles: nothing is padded"
    assert bounds.token_bytes == bounds.kv_bytes + bounds.weight_bytes
    assert bounds.roofline(0) is None and bounds.as_dict()["measured_link_in_gbps"] is None


# -- the command ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch):
    """`rollkv ladder` behind the error boundary, on the synthetic model and the host backend."""
    app = boundary.app
    if not any(info.callback is ladder for info in app.registered_commands):
        app = typer.Typer(name="rollkv", add_completion=False, rich_markup_mode=None)
        app.callback()(lambda: None)
        app.command()(ladder)
        monkeypatch.setattr(boundary, "app", app)

    def run(*arguments: object) -> int:
        fixed = ("ladder", "-m", TINY, "--backend", "host", "-d", 300, "-n", 2, "-r", 1, "--ubatch", 64)
        return boundary.main([str(word) for word in (*fixed, *arguments)])

    return run


def test_json_end_to_end(command, capsys, config):
    assert command("--steps", 2, "-r", 2, "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    resident, streamed = result["rows"]
    size = task.tail_page_bytes(config, cache_config(task.context_size(300, 2)))
    assert resident["tail_bytes"] == 0 and resident["cells_in_tail"] == 0 and resident["exposed_ms"] == 0
    assert streamed["tail_bytes"] == size and streamed["cells_in_tail"] == PAGE and streamed["window_cells"] == PAGE
    assert streamed["cells_in_window"] + PAGE >= 300 + 4 + 2 and resident["needle_found"] is streamed["needle_found"] is True
    assert resident["fill"] == "prompt" and resident["link_gbps"] is None and resident["ttft_seconds"] > 0
    for row in (resident, streamed):
        assert row["outcome"] == "ran" and row["tg_tokens_per_second"] > 0 and row["pp_tokens_per_second"] > 0 and row["repetitions"] == 2
        assert row["measured_link_in_gbps"] is None
        assert all(row[name] is None for name in ("peak_device_bytes", "limit_bytes", "over_limit", "tail_gbps", "link_percent"))
        assert not any(isinstance(value, (dict, list)) for value in row.values()), "rows are flat"
        assert (row["command"], row["model_file"], row["backend"], row["depth"]) == ("ladder", "synth:tiny", "host", 300)
    assert result["passed"] and result["verdict"] == "undecided" and result["interrupted"] is False
    assert result["resident_ms"] == pytest.approx(resident["step_ms"]) and result["fit_overlap_t0_ms"] is not None


def test_a_context_beyond_the_trained_one_is_said_once(command, capsys):
    assert command("-m", "synth:tiny,context=256", "-d", "0,64,300", "-p", 8) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "trained for" in line]
    assert len(said) == 1 and "longer than the 256" in said[0]


def test_measured_rates_stand_in_every_row(command, capsys, monkeypatch):
    monkeypatch.setattr("rollkv.cli.ladder.machine_rates", lambda *_: Rates(50e9, 40e9, 80e9, 4e12, PcieLink(5, 16, 5, 16, 1)))
    assert command("--tail", "0,384KiB", "-o", "json") == 0
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert "link 50.0 GB/s in, 40.0 GB/s out, 80.0 GB/s both at once (PCIe gen5 x16, NUMA node 1); device memory 4000.0 GB/s" in out.err
    assert result["measured_link_out_gbps"] == 40 and result["bytes_per_token"] > 0 and result["resident_roofline_tokens_per_second"] > 0
    for row in result["rows"]:
        assert row["link_gbps"] == 50 and row["link_percent"] == pytest.approx(100 * row["tail_gbps"] / 50)
        assert row["predicted_sum_ms"] >= row["predicted_overlap_ms"] >= result["resident_ms"] and row["roofline_tokens_per_second"] > 0


def test_a_given_link_is_reckoned_with(command, capsys, monkeypatch):
    """It takes the measured one's place in predictions and in the choice of the plan; what was measured is still told, and compared with."""
    reckoned = []
    monkeypatch.setattr("rollkv.cli.ladder.machine_rates", lambda *_: Rates(50e9, 40e9, 80e9, 4e12, PcieLink(5, 16, 5, 16)))
    monkeypatch.setattr("rollkv.startup.load", lambda *_, **options: reckoned.append(options["rates"]) or load(*_, **options))
    assert command("--tail", "0,384KiB", "--link-gbps", 0.001, "-o", "json") == 0
    out = capsys.readouterr()
    assert "link 50.0 GB/s in" in out.err and "link reckoned with 0.0 GB/s (given)" in out.err
    (rates,) = reckoned
    assert (rates.link, rates.link_origin, rates.hbm, rates.hbm_origin) == (1e6, "given", 4e12, "measured")
    for row in json.loads(out.out)["rows"]:
        assert (row["given_link_gbps"], row["measured_link_in_gbps"], row["link_gbps"], row["numa_node"]) == (0.001, 50, 50, None)
        assert row["link_percent"] == pytest.approx(100 * row["tail_gbps"] / 50)
        assert row["predicted_overlap_ms"] >= row["tail_bytes"] / 1e6 * 1e3
    assert row["roofline_tokens_per_second"] == pytest.approx(1e6 / row["tail_bytes"])
    for value in ("0", "-1", "nan", "inf"):
        assert command("--link-gbps", value) == 2
        assert "--link-gbps" in capsys.readouterr().err


def test_a_given_link_needs_no_measured_one(command, capsys):
    assert Rates(link_given=1e9).bandwidths == Bandwidths(1e9, ASSUMED.hbm, "given", "assumed") and Rates().bandwidths is None
    assert command("--tail", "0,384KiB", "--link-gbps", 2, "-o", "json") == 0
    out = capsys.readouterr()
    assert "ceilings: not measured; link reckoned with 2.0 GB/s (given)" in out.err
    row = json.loads(out.out)["rows"][1]
    assert row["predicted_sum_ms"] > row["predicted_overlap_ms"] > 0 and row["link_percent"] is None


def test_the_probe_keeps_within_the_smallest_cap(command, capsys, monkeypatch):
    caps = []

    class Backend:
        facts = SimpleNamespace(pci_bus_id="0000:00:00.0")
        gpu = GpuFacts("Some GPU", 1 << 35, "13.0", "0000:00:00.0")

        def __init__(self, device: int, *, cap_bytes: int | None, warn: object) -> None:
            caps.append(cap_bytes)

        def __enter__(self) -> "Backend":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def measure(backend: Backend, array_bytes: int) -> Rates:
        if caps[-1] is not None and caps[-1] < array_bytes * 2:
            raise OutOfMemoryError("no room")
        return Rates(50e9, 40e9, 80e9, float(array_bytes))

    monkeypatch.setattr("rollkv.cuda.backend.CudaBackend", Backend)
    monkeypatch.setattr(probe, "measure_rates", measure)
    monkeypatch.setattr("rollkv.cuda.nvml.pcie_link", lambda bus: PcieLink())
    said = []
    assert probe.probe_device(0, said.append).hbm == probe.probe_device(0, said.append, 4 * GIB).hbm == GIB
    assert probe.probe_device(0, said.append, GIB).hbm == GIB // 4 and not said
    assert probe.probe_device(0, said.append, MIB) == Rates() and said == ["link and device memory cannot be measured: no room"]
    asked = []
    monkeypatch.setattr("rollkv.cli.ladder.machine_rates", lambda *what: asked.append(what) or Rates())
    for arguments in (("--vram-target", "2100,2000,2200MiB"), ("--tail", "0")):
        assert command(*arguments) == 0
    assert asked == [("host", 0, 2000 * MIB), ("host", 0, None)]
    capsys.readouterr()


@pytest.mark.parametrize("form", ["md", "json", "jsonl", "csv"])
def test_random_cells_are_labelled(command, capsys, monkeypatch, form, tmp_path):
    monkeypatch.setattr("rollkv.tasks.haystack.build_haystack", lambda *_: pytest.fail("nothing is read"))
    assert command("--tail", "0,384KiB", "--fill", "random", "-o", form) == 0
    out = capsys.readouterr().out
    if form == "md":
        assert "300 RANDOM cells (--fill random) before decode" in out and "nothing is known of needle and ttft" in out
        return
    rows = json.loads(out)["rows"] if form == "json" else list(csv.DictReader(io.StringIO(out))) if form == "csv" else None
    rows = rows or [row for row in map(json.loads, out.splitlines()) if row["line"] == "rung"]
    for row in rows:
        assert row["fill"] == "random" and float(row["tg_tokens_per_second"]) > 0
        assert {row[name] or None for name in ("pp_tokens_per_second", "ttft_seconds", "needle_found")} == {None}
    assert float(rows[1]["tail_bytes"]) == 384 * 1024, "the tail is streamed"


def test_depths_are_rows(command, capsys):
    assert command("-d", "0,100", "-p", 20, "-o", "json", "-r", 2) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["line"], row["pp_test"], row["tg_test"]) for row in result["rows"]] == [
        ("depth", "pp20", "tg2"),
        ("depth", "pp20 @ d100", "tg2 @ d100"),
    ]
    assert all(row["pp_tokens_per_second"] > 0 and row["tg_tokens_per_second_stdev"] is not None for row in result["rows"])
    assert "verdict" not in result and result["kv_bytes_per_token"] == result["rows"][1]["kv_bytes_per_token"] > 0
    assert command("-d", "300", "-p", 20, "--vram-target", "2000", "--fill", "random") == 0
    text = capsys.readouterr().out
    assert "| cap 1.95 GiB | pp20 @ d300 |" in text and "| cap 1.95 GiB | tg2 @ d300  |" in text and "behind 300 RANDOM cells" in text
    assert command("-d", "0,100", "-p", 20, "-o", "csv") == 0
    assert [row["depth"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["0", "100"]
    assert command("-d", "0,100") == 0
    assert "pp512 @ d100" in capsys.readouterr().out


def test_a_rung_that_loses_the_needle_fails(command, capsys, monkeypatch):
    """A resident run finds it, a streamed one does not: a tail that arrives damaged."""
    from rollkv.host_backend import HostBackend

    copy_in = HostBackend.copy_in
    monkeypatch.setattr(HostBackend, "copy_in", lambda self, run, host: copy_in(self, run, np.zeros_like(host)))
    assert command("--tail", "0,384KiB", "-o", "json") == 1
    result = json.loads(capsys.readouterr().out)
    assert [row["needle_found"] for row in result["rows"]] == [True, False]
    assert "1 rungs miss a needle that a resident one found: tail 384.0 KiB" in result["error"]
    assert command("--tail", "0,384KiB") == 1
    assert "MISSED" in capsys.readouterr().out


def test_lines_and_table(command, capsys):
    assert command("--tail", "0,384KiB", "-o", "jsonl") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["line"] for line in lines] == ["rung", "rung", "summary"] and lines[-1]["verdict"] == "undecided"
    assert command("--tail", "384KiB") == 0
    text = capsys.readouterr().out
    assert "| tail 384.0 KiB |" in text and "ceilings: not measured" in text and "no rung without a tail ran" in text and "verdict:" in text


def test_csv_and_caps(command, capsys):
    assert command("--vram-target", "2000,100MiB", "-o", "csv") == 0
    out = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(out.out)))
    assert [row["outcome"] for row in rows] == ["ran", "does not fit"] and rows[1]["step_ms"] == "" and float(rows[0]["step_ms"]) > 0
    assert rows[0]["vram_target_bytes"] == str(2000 * MIB) and "too small" in rows[1]["refusal"] and "too small" in out.err
    assert command("--vram-target", "100,90MiB", "-o", "json") == 5, "no rung at all"
    assert json.loads(capsys.readouterr().out)["kind"] == "OutOfMemoryError"
    assert command("--vram-target", "100MiB") == 5, "a single rung"
    assert capsys.readouterr().err.count("too small") == 1


def test_a_rung_over_its_cap_fails(command, capsys, monkeypatch):
    monkeypatch.setattr("rollkv.host_backend.HostBackend.device_use", lambda self: DeviceUse(3 * GIB, 0, 0, 50 * GIB))
    assert command("--vram-target", "2000MiB", "-o", "json") == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["passed"] and "cap 1.95 GiB" in result["error"] and result["rows"][0]["over_limit"] is True
    assert command("--vram-target", "2000MiB") == 1
    assert "OVER CAP" in capsys.readouterr().out


@pytest.mark.parametrize("at,kept", [(1, []), (2, ["resident"])])
@pytest.mark.parametrize("form", ["json", "md", "csv"])
def test_an_interrupt_keeps_what_ran(command, capsys, monkeypatch, form, at, kept):
    measure, calls = climb._measure, []

    def interrupted(engine, *rest):
        calls.append(engine)
        if len(calls) == at:
            raise KeyboardInterrupt
        return measure(engine, *rest)

    monkeypatch.setattr(climb, "_measure", interrupted)
    assert command("--tail", "0,384KiB", "-o", form) == 130
    out, err = capsys.readouterr()
    if form == "json":
        result = json.loads(out)
        assert result["interrupted"] and result["passed"] is None and [row["rung"] for row in result["rows"]] == kept
    else:
        assert out.count("resident") >= len(kept) and "tail 384" not in out and "error: interrupted" in err
    if form == "md":
        assert "cut short: interrupted" in out and ("verdict" in out) == bool(kept)
    if form == "csv":
        assert len(list(csv.reader(io.StringIO(out)))) == (2 if kept else 0)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("-o", "yaml"), "-o 'yaml'"),
        (("--backend", "gpu"), "--backend 'gpu'"),
        (("-n", 0), "--n-predict 0"),
        (("-r", 0), "--repetitions 0"),
        (("--steps", 1), "--steps 1"),
        (("--tail", "0..1MiB", "--steps", 10**12), "--steps 1000000000000"),
        (("--tail", "1", "--vram-target", "1"), "--vram-target and --tail"),
        (("--tail", "0,1", "--steps", 4), "--steps 4"),
        (("--tail", "900GiB"), "lower --tail"),
        (("--fill", "zeros"), "--fill 'zeros'"),
        (("-p", 0), "--n-prompt 0"),
        (("-d", "0,1k", "--tail", 0), "--tail goes with a ladder"),
        (("-d", "1k", "-p", 8, "--steps", 4), "--steps goes with a ladder"),
        (("-d", "0,1k", "--vram-target", "1,2"), "under one cap"),
        (("--peer-timeout", "nan", "--peer", "llama-bench=/bin/true"), "--peer-timeout nan"),
        (("--device", -1), "--device -1"),
        (("-d", "0,x"), "--depth: 'x'"),
        (("-d", 20), "--depth 20: needle"),
        (("-d", "9" * 400), "--depth: '999"),
        (("--tail", "9" * 400), "--tail: cannot read"),
        (("--tail", "-1"), "--tail: cannot read the size '-1'"),
        (("-n", 99999999999999999999), "--n-predict 99999999999999999999: the value must be at most"),
        (("--peer", "vllm=/bin/true"), "--peer 'vllm=/bin/true'"),
        (("--peer", "llama-bench=/bin/true"), "rollkv synth tiny -o FILE"),
    ],
)
def test_usage_errors_come_before_the_load(command, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("rollkv.startup.load", lambda *_, **__: pytest.fail("it loaded"))
    assert command(*arguments) == 2
    out = capsys.readouterr()
    assert out.out == "" and words in out.err and out.err.count("\n") == 1


def test_the_picture(command, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = Path(tmp_path) / "ladder.png"
    for more in ((), ("--fill", "random")):
        path.unlink(missing_ok=True)
        assert command("--steps", 2, "--plot", path, *more) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
