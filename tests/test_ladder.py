"""ladder: the arithmetic by hand values, a climb on an engine with a clock of its own, the probe on a backend that knows its rates, whole runs."""

import csv
import io
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from rollkv import ladder_fit as fit
from rollkv.backend import DeviceUse, Stream
from rollkv.budget import Budget
from rollkv.cli import main as boundary
from rollkv.cli.ladder import ladder, read_sizes
from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.ladder_fit import Fit, Point
from rollkv.model_config import model_config
from rollkv.synth import open_model
from rollkv.tasks import ceilings as probe
from rollkv.tasks import ladder as task
from rollkv.tasks.ceilings import Ceilings, Rates, ceilings, measure_rates
from rollkv.tasks.generate import cache_config
from rollkv.tasks.ladder import Climb, Rung, RungResult
from rollkv.tasks.ladder_rows import resident_seconds, row_dict, summarise
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
    assert fit.spread_evenly(0, 90, 4) == (0, 30, 60, 90)
    assert fit.spread_evenly(90, 0, 4) == (90, 60, 30, 0)
    assert fit.spread_evenly(5, 9, 1) == (5,)
    for place in (lambda: fit.spread_evenly(0, 1, 0), lambda: fit.place_rungs(0, 1.0, None)):
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


def verdict_of(points: list[Point]) -> fit.Verdict:
    return fit.judge(points, [found for found in (fit.fit_sum(points), fit.fit_overlap(points)) if found])


@pytest.mark.parametrize("name", ["sum", "overlap"])
def test_the_verdict_names_the_model(name):
    truth = Fit(name, 0.01, LINK)
    verdict = verdict_of([Point(tail, truth.seconds(tail)) for tail in (0, 2e8, 4e8, 6e8, 1e9, 3e9)])
    assert verdict.model == name and verdict.error < 1e-6 and f"the {name} model holds within 0.0 %" in verdict.words


def test_the_verdict_can_say_no():
    assert verdict_of([Point(0, 0.01), Point(1e9, 0.03)]).model == "undecided", "two rungs fit any two parameters"
    assert verdict_of([Point(0, 0.01), Point(1e5, 0.01), Point(2e5, 0.01)]).model == "undecided", "a tail too short to tell"
    assert verdict_of([Point(0, 0.01), Point(1e9, 0.05), Point(2e9, 0.01), Point(3e9, 0.05)]).model == "neither"


def test_the_knee_is_the_largest_tail_within_15_percent():
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
    rungs = task.tail_rungs(config, cache, [0.0, 3.2 * size, 2.9 * size, 9 * size])
    assert [rung.cache.window_cells for rung in rungs] == [None, 7 * PAGE, PAGE], "two of them are the same number of pages"
    assert rungs[0].cache.residency == "full" and task.largest_tail(config, cache) == 9 * size
    with pytest.raises(UsageError, match="lower --tail"):
        task.tail_rungs(config, cache, [10.0 * size])
    slid = replace(config, layers=tuple(replace(layer, sliding_window=64) for layer in config.layers))
    with pytest.raises(UsageError, match="sliding"):
        task.tail_page_bytes(slid, cache)


def test_prompts_differ_and_have_their_length():
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text[:5000]] if len(text) < 5000 else [ord(letter) for letter in text]

    made = [task.prompt_ids(encode, 9000, repetition) for repetition in range(3)]
    assert all(len(ids) == 9000 for ids in made) and len({tuple(ids[:30]) for ids in made}) == 3
    assert made[1] == task.prompt_ids(encode, 9000, 1)


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
    assert read_sizes(text, "--tail", steps, zero=True) == sizes


@pytest.mark.parametrize("text,steps", [("1..2..3", None), ("..5", None), ("1,,2", None), ("1,2", 4), ("0apples,5", None), ("x", None)])
def test_what_is_no_list_is_refused(text, steps):
    with pytest.raises(UsageError, match="--tail"):
        read_sizes(text, "--tail", steps, zero=True)


def test_a_cap_of_nothing_is_refused():
    with pytest.raises(UsageError, match="--vram-target"):
        read_sizes("0,5", "--vram-target", None)


# -- the climb on a clock of its own -------------------------------------------------------------------------------------------


class FakeEngine:
    """Steps take max(t0, tail / LINK) of its own clock, the first six longer where slow_first exceeds 1. Tokens count up."""

    backend_name = "fake"

    def __init__(self, rung: Rung, config, clock: list[float], *, t0: float = 0.01, slow_first: float = 1.0, used: int = 900) -> None:
        self.cache_config, self._clock, self._t0, self._slow = rung.cache, clock, t0, slow_first
        total = -(-rung.cache.ctx_size // PAGE)
        window = total if rung.cache.residency == "full" else min((rung.cache.window_cells or 1) // PAGE, total)
        self.budget = Budget((("all", 1000),), rung.vram_target, total, window, PAGE, None, 0, 0, 0, False)
        self._page_bytes = task.tail_page_bytes(config, rung.cache)
        self.position, self._copied, self._used = 0, 0, used
        self.prompts: list[list[int]] = []
        self.fed: list[int] = []
        self.closed = False
        self.backend = self

    copied_bytes = property(lambda self: (self._copied, 0))

    def device_use(self) -> DeviceUse:
        return DeviceUse(self._used, 0, 0, 0)

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def reset(self) -> None:
        self.position, self._steps = 0, 0

    def prefill(self, ids: list[int]) -> np.ndarray:
        assert self.position == 0
        self.prompts.append(ids)
        self.position += len(ids)
        self._clock[0] += 1e-3 * len(ids)
        return np.eye(9)[3]

    def decode(self, token: int) -> np.ndarray:
        self.fed.append(token)
        tail = max(self.position // PAGE + 1 - self.budget.window_pages, 0) * self._page_bytes
        self.position += 1
        self._steps += 1
        self._copied += tail
        self._clock[0] += max(self._t0, tail / LINK) * (self._slow * (8 - self._steps) if self._slow > 1 and self._steps < 7 else 1)
        return np.eye(9)[(token + 1) % 9]


class Hill:
    """Engines for a climb, and the climb."""

    def __init__(self, config, depth: int = 4 * PAGE, **options: object) -> None:
        self.config, self.depth, self.options, self.clock = config, depth, options, [0.0]
        self.cache = cache_config(task.context_size(depth, 8))
        self.engines: list[FakeEngine] = []
        self.refused: set[str] = set()

    def open(self, rung: Rung) -> FakeEngine:
        assert all(engine.closed for engine in self.engines), "two engines may not fit on one device"
        if rung.label in self.refused:
            raise OutOfMemoryError("it is too large")
        self.engines.append(FakeEngine(rung, self.config, self.clock, **self.options))
        return self.engines[-1]

    def run(self, link_rate: float | None = LINK, **what: object) -> list[RungResult]:
        climb = Climb(self.depth, 8, 2, **what)
        return list(
            task.run_climb(
                climb,
                self.config,
                self.cache,
                link_rate,
                self.open,
                lambda repetition: [repetition] * self.depth,
                lambda label: None,
                lambda engine: {"backend": engine.backend_name},
                lambda: self.clock[0],
            )
        )


def test_a_rung_by_hand(config):
    hill = Hill(config, t0=1e-6)
    size = task.tail_page_bytes(config, hill.cache)
    resident, streamed = hill.run(rungs=task.tail_rungs(config, hill.cache, [0.0, 2.0 * size]))
    assert resident.tail_bytes == 0 and resident.seconds == pytest.approx(1e-6)
    assert streamed.tail_bytes == 2 * size and streamed.seconds == pytest.approx(2 * size / LINK)
    assert streamed.cells_in_tail == 2 * PAGE and streamed.cells_in_window == hill.depth + 4 + 8 - 2 * PAGE, "4 steps to warm up, 8 timed"
    assert streamed.step_seconds == (pytest.approx((2 * size / LINK,) * 8),) * 2
    assert streamed.prefill_seconds == pytest.approx((hill.depth * 1e-3,) * 2) and streamed.ttft_seconds == streamed.prefill_seconds
    assert streamed.warm_steps == ((4, True), (4, True)) and streamed.spread == pytest.approx(0, abs=1e-9)
    prompts = hill.engines[1].prompts
    assert [ids[0] for ids in prompts] == [2, 0, 1], "the warm-up's prompt and one for each repetition"
    assert hill.engines[1].fed[:3] == [3, 4, 5], "every token follows from the logits"

    bounds = Ceilings(Rates(LINK, LINK, LINK, 1e12), 10**6, 10**6)
    row = row_dict(streamed, bounds, resident_seconds([resident, streamed]), hill.depth)
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
    assert row_dict(resident, bounds, resident.seconds + 1, hill.depth)["exposed_ms"] == 0, "never below zero"
    blind = row_dict(streamed, Ceilings(Rates(), 1, 1), None, hill.depth)
    unknown = ("link_percent", "exposed_ms", "predicted_sum_ms", "predicted_overlap_ms", "roofline_tokens_per_second")
    assert all(blind[name] is None for name in unknown) and set(blind) == set(row)


def test_warm_up_waits_for_two_equal_steps(config):
    hill = Hill(config, slow_first=3.0)
    (result,) = hill.run(rungs=(task.resident_rung(hill.cache),))
    assert result.warm_steps == ((8, True), (8, True)) and result.seconds == pytest.approx(0.01)
    assert max(max(steps) for steps in result.step_seconds) == pytest.approx(0.01), "no slow step is among the timed"


def test_a_run_that_never_settles_says_so(config):
    hill, ticks = Hill(config), random.Random(1)
    engine_decode = FakeEngine.decode

    class Restless(FakeEngine):
        def decode(self, token: int) -> np.ndarray:
            self._clock[0] += 0.01 * 1.1 ** (self._steps % 2 * 9) + 1e-6 * ticks.random()
            return engine_decode(self, token)

    hill.open = lambda rung: Restless(rung, config, hill.clock)  # type: ignore[method-assign]
    (result,) = hill.run(rungs=(task.resident_rung(hill.cache),))
    assert result.warm_steps == ((16, False), (16, False)) and hill.cache.ctx_size == hill.depth + 16 + 8
    assert row_dict(result, Ceilings(Rates(), 1, 1), None, hill.depth)["settled"] is False


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
    evenly = [round(result.tail_bytes / size) for result in Hill(config, depth=32 * PAGE).run(None, num_placed=5)]
    assert evenly == [0, 8, 16, 24, 32]


def test_a_rung_that_does_not_fit_is_a_row(config):
    hill = Hill(config)
    hill.refused = {"resident"}
    size = task.tail_page_bytes(config, hill.cache)
    results = hill.run(rungs=task.tail_rungs(config, hill.cache, [0.0, float(size), 2.0 * size]))
    assert [result.ran for result in results] == [False, True, True]
    row = row_dict(results[0], Ceilings(Rates(), 1, 1), None, hill.depth)
    assert row["outcome"] == "does not fit" and row["refusal"] == "it is too large" and row["step_ms"] is None
    assert summarise(results, Rates(link_in=LINK)).as_dict()["resident_ms"] is None


def test_spread_and_caps_are_flagged(config):
    hill = Hill(config, used=1200)
    (result,) = hill.run(rungs=task.cap_rungs(hill.cache, [1100, 1100]))
    bounds = Ceilings(Rates(), 1, 1)
    assert row_dict(result, bounds, None, 1)["over_limit"] is True and row_dict(result, bounds, None, 1)["limit_bytes"] == 1100
    for second, flag in ((1.04, False), (1.06, True)):
        uneven = replace(result, step_seconds=((1.0, 1.0), (second, second)))
        assert row_dict(uneven, bounds, None, 1)["spread_flag"] is flag


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
        assert x == y and x[0] * x[1] * 4 == probe.PROBE_ARRAY_BYTES
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
    rates = measure_rates(backend)
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
    size = task.tail_page_bytes(config, cache_config(318))
    assert resident["tail_bytes"] == 0 and resident["cells_in_tail"] == 0 and resident["exposed_ms"] == 0
    assert streamed["tail_bytes"] == size and streamed["cells_in_tail"] == PAGE and streamed["window_cells"] == PAGE
    assert streamed["cells_in_window"] + PAGE >= 300 + 4 + 2
    for row in (resident, streamed):
        assert row["outcome"] == "ran" and row["tg_tokens_per_second"] > 0 and row["pp_tokens_per_second"] > 0 and row["repetitions"] == 2
        assert row["peak_device_bytes"] is None and row["measured_link_in_gbps"] is None and row["link_percent"] is None
        assert not any(isinstance(value, (dict, list)) for value in row.values()), "rows are flat"
        assert (row["command"], row["model_file"], row["backend"], row["depth"]) == ("ladder", "synth:tiny", "host", 300)
    assert result["passed"] and result["verdict"] == "undecided" and result["interrupted"] is False
    assert result["resident_ms"] == pytest.approx(resident["step_ms"]) and result["fit_overlap_t0_ms"] is not None


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
    measure, calls = task._measure, []

    def interrupted(engine, *rest):
        calls.append(engine)
        if len(calls) == at:
            raise KeyboardInterrupt
        return measure(engine, *rest)

    monkeypatch.setattr(task, "_measure", interrupted)
    assert command("--tail", "0,384KiB", "-o", form) == 130
    out = capsys.readouterr().out
    if form == "json":
        result = json.loads(out)
        assert result["interrupted"] and [row["rung"] for row in result["rows"]] == kept
    else:
        assert out.count("resident") >= len(kept) and "tail 384" not in out


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("-o", "yaml"), "-o 'yaml'"),
        (("--backend", "gpu"), "--backend 'gpu'"),
        (("-n", 0), "--n-predict 0"),
        (("-r", 0), "--repetitions 0"),
        (("--steps", 1), "--steps 1"),
        (("--tail", "1", "--vram-target", "1"), "--vram-target and --tail"),
        (("--tail", "0,1", "--steps", 4), "--steps 4"),
        (("--tail", "900GiB"), "lower --tail"),
    ],
)
def test_usage_errors_come_before_the_load(command, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("rollkv.engine.load", lambda *_, **__: pytest.fail("it loaded"))
    assert command(*arguments) == 2
    out = capsys.readouterr()
    assert out.out == "" and words in out.err and out.err.count("\n") == 1


def test_the_picture(command, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = Path(tmp_path) / "ladder.png"
    assert command("--steps", 2, "--plot", path) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
