"""The meter of examples/cap_meter.py: every figure of a process's life counts, and a row tells what was wrong."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rollkv.errors import OutOfMemoryError
from rollkv.startup import plan
from rollkv.tasks.generate import cache_config
from rollkv.tasks.ladder import context_size
from rollkv.units import MIB


@pytest.fixture(scope="module")
def cap_meter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cap_meter", Path(__file__).parent.parent / "examples" / "cap_meter.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["cap_meter"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Watch:
    """A meter whose figures are given one after the other, the last again and again. None: not told."""

    def __init__(self, own: list[int | None], card: list[int]) -> None:
        self.own, self.card, self.asked = own, card, 0

    def identify(self) -> None:
        self.asked += 1

    def used_bytes(self) -> int | None:
        return self.own.pop(0) if len(self.own) > 1 else self.own[0]

    def device_used_bytes(self) -> int:
        return self.card.pop(0) if len(self.card) > 1 else self.card[0]


def _command(*lines: dict[str, object], seconds: float = 0.2) -> list[str]:
    text = "\n".join(map(json.dumps, lines))
    return [sys.executable, "-c", f"import time; time.sleep({seconds}); print({text!r})"]


RUNG = {"line": "rung", "outcome": "ran", "cells_in_tail": 512, "tg_tokens_per_second": 12.5}


def test_the_largest_figure_counts_however_short(cap_meter: ModuleType) -> None:
    watch = Watch([None, 5 * MIB, 100 * MIB, 7 * MIB], [900 * MIB, 905 * MIB])
    reading = cap_meter.meter(_command(RUNG, {"line": "summary"}), lambda pid: watch)
    assert (reading.peak_bytes, reading.by_process, reading.exit_code) == (100 * MIB, True, 0)
    assert watch.asked == 1 and reading.readings > 3
    assert cap_meter.row(100 * MIB, reading)[-1] == "spilled"
    assert cap_meter.row(100 * MIB - 1, reading)[-1] == "OVER"
    assert cap_meter.row(104 * MIB, reading)[-1] == "spilled, below 97 %"


def test_without_a_figure_of_its_own_the_cards_growth_counts(cap_meter: ModuleType) -> None:
    reading = cap_meter.meter(
        _command(RUNG | {"cells_in_tail": 0}), lambda pid: Watch([None], [900 * MIB, 950 * MIB, 960 * MIB, 900 * MIB])
    )
    assert (reading.peak_bytes, reading.by_process) == (60 * MIB, False)
    assert cap_meter.row(100 * MIB, reading)[-1] == "resident"


def test_a_run_without_a_result_ends_the_table(cap_meter: ModuleType) -> None:
    refused = RUNG | {"outcome": "does not fit"}
    for command in ([sys.executable, "-c", "raise SystemExit(5)"], _command(refused, seconds=0)):
        reading = cap_meter.meter(command, lambda pid: Watch([MIB], [0]))
        with pytest.raises(SystemExit, match="exit code [05] and without a result"):
            cap_meter.row(100 * MIB, reading)


def test_caps_reach_from_the_smallest_plan_to_the_resident_one(cap_meter: ModuleType) -> None:
    path, depth, steps = Path("synth:tiny"), 30_000, 4
    caps, cache = cap_meter.spilling_caps(path, depth, steps), cache_config(context_size(depth, steps))
    assert len(caps) == cap_meter.NUM_CAPS and caps == sorted(set(caps)) and all(cap % MIB == 0 for cap in caps)
    assert [plan(path, cache, vram_target=cap).spills for cap in caps] == [True] * 5 + [False]
    assert plan(path, cache, vram_target=caps[0]).window_pages >= 1
    with pytest.raises(OutOfMemoryError):
        plan(path, cache, vram_target=caps[0] - MIB)
