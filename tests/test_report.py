"""What is printed: JSON that always parses, statistics without invented figures, progress that does not flood a log."""

import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from rollkv import report
from rollkv.backend import TailMade
from rollkv.budget import Budget
from rollkv.config import CacheConfig
from rollkv.engine import Stats
from rollkv.phases import Phases
from rollkv.roofline import ASSUMED, Bandwidths, StepCost
from rollkv.stream_plan import RingShape
from rollkv.units import GIB, MIB, format_rate, format_size


def budget(cap: int | None = None) -> Budget:
    return Budget(
        device=(("weights", 3 * GIB), ("resident window", GIB)),
        cap_bytes=cap,
        total_pages=10,
        window_pages=4,
        page_cells=256,
        ring=None,
        fresh_slots=0,
        host_tail_bytes=600 * MIB,
        kv_bytes=GIB,
        overhead_measured=False,
        ubatch=512,
        step=StepCost(0.003, 0.004, 0.0005, 0.0005),
        rates=ASSUMED,
    )


def test_json_never_holds_what_json_does_not_know(capsys):
    report.write_json(
        {"nan": float("nan"), "row": np.array([1.5, np.inf]), "one": np.int64(3), "deep": [{"x": -float("inf")}], "text": "\u00e9\ud800"}
    )
    out = capsys.readouterr().out
    assert json.loads(out) == {"nan": None, "row": [1.5, None], "one": 3, "deep": [{"x": None}], "text": "\u00e9\ud800"}
    assert "NaN" not in out and "Infinity" not in out


def test_statistics_line_of_a_streamed_run():
    stats = Stats(
        prompt_tokens=6000,
        generated_tokens=101,
        prefill_seconds=2.0,
        decode_seconds=4.0,
        ttft_seconds=2.01,
        window_cells=1024,
        tail_cells=5120,
        link_bytes=200 * 10**9,
        peak_device_bytes=5 * GIB,
        cap_bytes=6 * GIB,
    )
    line = report.statistics_line(stats, budget(6 * GIB), CacheConfig(65536), "cuda", "length")
    assert line == (
        "pp 6000 tok 3000 tok/s | tg 101 tok 25.0 tok/s | ttft 2.01 s | cells 1024 window + 5120 tail | link 50.0 GB/s | "
        "device peak 5.00 GiB, planned 4.00 GiB, cap 6.00 GiB | stop length"
    )
    lossy = report.statistics_line(stats, budget(6 * GIB), CacheConfig(65536, key_type="q8_0"), "cuda", "length")
    assert "window + 5120 tail, KV q8_0/f16 (lossy) | link" in lossy


def test_statistics_line_leaves_out_what_was_not_measured():
    line = report.statistics_line(Stats(), budget(), CacheConfig(1), "host", None)
    assert line == "pp 0 tok | tg 0 tok | cells 0 window + 0 tail | link idle | host backend | stop none"


def test_start_line_adds_up():
    now = iter([0.0, 0.25, 1.0, 1.5])
    phases = Phases(lambda: next(now))
    for name in ("imports", "weights", "imports"):
        phases.ends(name)
    assert report.start_line(phases, Stats()) == "start 1.50 s: imports 0.75, weights 0.75"
    assert report.start_line(phases, Stats(ttft_seconds=0.5)).startswith("start 2.00 s: imports 0.75, weights 0.75, first token 0.50")


def test_the_start_tells_of_the_tail():
    line = report.start_line(Phases(iter([0.0]).__next__), Stats(ttft_seconds=0.5), TailMade(3 * GIB, 0.25, 0.125))
    assert line == "start 0.50 s: first token 0.50; tail of 3.00 GiB made at 12.9 GB/s, 0.12 of it waited for"


def test_budget_table_adds_up():
    rows = [line.rsplit("  ", 1) for line in report.budget_table(budget(6 * GIB)).splitlines()]
    shown = {name.strip(): value.strip() for name, value in rows}
    assert shown == {
        "weights": "3.00 GiB",
        "resident window": "1.00 GiB",
        "total on the device": "4.00 GiB",
        "cap": "6.00 GiB",
        "cells resident": "1024",
        "cells in the tail": "1536",
        "host memory for the tail": "600.0 MiB",
    }


def test_progress_in_a_log_is_a_line_every_ten_seconds(capsys):
    now = [0.0]
    progress = report.PhaseProgress("prompt", stream=io.StringIO(), clock=lambda: now[0])
    for step in range(1, 101):
        now[0] = step * 0.7
        progress(step * 10, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[0] == "rollkv: prompt 150 of 1000 (15 %)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar_that_goes_away():
    terminal = Terminal()
    with report.PhaseProgress("prompt", stream=terminal) as progress:
        progress(1, 4)
        assert "prompt" in terminal.getvalue() and "1 of 4" in terminal.getvalue()
        progress(4, 4)
    assert progress._bar is None


def test_a_phase_of_one_step_shows_nothing(capsys):
    terminal = Terminal()
    with report.PhaseProgress("prompt", stream=terminal) as progress:
        progress(4, 4)
    assert terminal.getvalue() == "" and capsys.readouterr().err == ""


def test_progress_tells_its_rate(capsys):
    now = [100.0]
    progress = report.PhaseProgress("tail", format_size, format_rate, stream=io.StringIO(), clock=lambda: now[0])
    for seconds, done in ((50.0, 2 * GIB), (61.0, 13 * GIB), (65.0, 20 * GIB), (200.0, 2 * GIB), (211.0, 5 * GIB)):
        now[0] = 100.0 + seconds
        progress(done, 20 * GIB)
    lines = [line.removeprefix("rollkv: tail ") for line in capsys.readouterr().err.splitlines()]
    assert lines[:2] == ["2.00 GiB of 20.00 GiB (10 %)", "13.00 GiB of 20.00 GiB, 1.1 GB/s (65 %)"]
    assert lines[2:] == ["2.00 GiB of 20.00 GiB (10 %)", "5.00 GiB of 20.00 GiB, 0.3 GB/s (25 %)"], "a second wait has a rate of its own"


@pytest.mark.parametrize("closed", ["missing", "broken"])
def test_a_closed_stderr_neither_stops_the_run_nor_reaches_stdout(monkeypatch, capsys, closed):
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", None if closed == "missing" else Broken())
    report.warn("something")
    assert capsys.readouterr().out == ""


def test_a_message_is_said_once(capsys):
    warn = report.warn_once()
    for message in ("slow", "slow", "long", "slow"):
        warn(message)
    assert capsys.readouterr().err == "rollkv: warning: slow\nrollkv: warning: long\n"


def test_what_is_predicted_names_what_it_follows_from():
    plan = replace(budget(), device=(("weights", GIB), ("staging ring", 32 * MIB)), ring=RingShape(2, 16))
    line = report.prediction_line(plan)
    assert "an estimate: 200.0 tok/s, bound by link" in line
    assert "device memory alone 333.3 at 1000.0 GB/s (assumed)" in line and "link alone 200.0 at 25.0 GB/s (assumed)" in line
    assert "estimate" not in report.prediction_line(replace(plan, rates=Bandwidths(1e9, 1e9, "measured", "given")))
    resident = replace(plan, window_pages=10, step=StepCost(0.002), ring=None)
    assert "500.0 tok/s, bound by device memory (device memory alone 500.0" in report.prediction_line(resident)
    assert "link" not in report.prediction_line(resident).split("(")[1]
    assert report.ring_line(resident) == "no staging ring: everything is resident"
    assert report.ring_line(plan) == (
        "staging ring of 2 slots of 16 pages (16.0 MiB): a step of 5.000 ms is the larger of compute 3.000 and "
        "link 4.000 + stalls 0.500 + drain 0.500"
    )
