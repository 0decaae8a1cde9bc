"""Meters from outside what `rollkv ladder` holds on the card under caps: by NVML, every 2 ms, over the whole life of its process.

usage: python examples/cap_meter.py [-m synth:qwen3-8b] [-d 32k] [-n 8] [--caps 10200,10700] [--device 0]
A process and a row for every cap; random cells stand for the prompt. Without --caps there are six of them, from just above the smallest plan
to the resident one. The figure is NVML's for the process where it tells one, else what the card holds above what it held before, so let
nothing else use it. Exit code 1 when a process was ever above its cap. Needs a GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tabulate import tabulate

from rollkv.counts import parse_depths, parse_sizes, spread_evenly
from rollkv.cuda.driver import DriverCalls, find_device
from rollkv.cuda.nvml import ProcessMemory
from rollkv.errors import OutOfMemoryError
from rollkv.startup import plan
from rollkv.tasks.generate import cache_config
from rollkv.tasks.ladder import context_size
from rollkv.units import MIB, round_up

INTERVAL_SECONDS = 0.002
NUM_CAPS = 6
HEADINGS = ("cap MiB", "peak MiB", "used", "in tail", "tok/s", "readings", "metered", "verdict")


class Meter(Protocol):
    """rollkv.cuda.nvml.ProcessMemory, or a double."""

    def identify(self) -> None: ...

    def used_bytes(self) -> int | None: ...

    def device_used_bytes(self) -> int | None: ...


@dataclass(frozen=True)
class Reading:
    """What a process held at most, and what it printed."""

    peak_bytes: int
    readings: int
    by_process: bool  # whether NVML told the process's own figure
    exit_code: int
    output: str


def meter(command: Sequence[str], watch: Callable[[int], Meter]) -> Reading:
    """Runs a command to its end and reads all the while. watch: a meter for a process number, made before the process is on the card."""
    peak = card_peak = readings = 0
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        try:
            watched = watch(process.pid)
            before = watched.device_used_bytes() or 0
            while process.poll() is None:
                used = watched.used_bytes()
                if used is None:
                    watched.identify()
                    card_peak = max(card_peak, (watched.device_used_bytes() or 0) - before)
                peak = max(peak, used or 0)
                readings += 1
                time.sleep(max(begun + readings * INTERVAL_SECONDS - time.perf_counter(), 0))
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        return Reading(peak or card_peak, readings, peak > 0, process.returncode, output.read())


def spilling_caps(path: Path, depth: int, steps: int) -> list[int]:
    """NUM_CAPS of equal distance, from the smallest that a plan has to the one that keeps everything resident, in whole MiB."""
    cache = cache_config(context_size(depth, steps))

    def fits(cap: int) -> bool:
        try:
            plan(path, cache, vram_target=cap)
        except OutOfMemoryError:
            return False
        return True

    largest = round_up(plan(path, cache).total_bytes, MIB)
    low, high = 0, largest // MIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * MIB) else (middle, high)
    return [cap * MIB for cap in spread_evenly(high, largest // MIB, NUM_CAPS)]


def row(cap: int, reading: Reading) -> tuple[str, ...]:
    """Raises SystemExit when the command did not run a rung."""
    rungs = [fields for line in reading.output.splitlines() if (fields := json.loads(line))["line"] == "rung"]
    if not rungs or rungs[0]["outcome"] != "ran":
        raise SystemExit(f"the run under {cap // MIB} MiB ended with exit code {reading.exit_code} and without a result")
    tail, share = rungs[0]["cells_in_tail"], reading.peak_bytes / cap
    verdict = "OVER" if share > 1 else "resident" if not tail else "spilled" if share >= 0.97 else "spilled, below 97 %"
    return (
        f"{cap // MIB}",
        f"{reading.peak_bytes / MIB:.1f}",
        f"{100 * share:.1f} %",
        str(tail),
        f"{rungs[0]['tg_tokens_per_second']:.1f}",
        str(reading.readings),
        "process" if reading.by_process else "card",
        verdict,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=Path("synth:qwen3-8b"))
    parser.add_argument("-d", "--depth", default="32k")
    parser.add_argument("-n", "--n-predict", type=int, default=8)
    parser.add_argument("--caps")
    parser.add_argument("--device", type=int, default=0)
    given = parser.parse_args(arguments)
    (depth,) = parse_depths(given.depth, "--depth")
    caps = spilling_caps(given.model, depth, given.n_predict) if given.caps is None else parse_sizes(given.caps, "--caps", NUM_CAPS)
    bus = find_device(DriverCalls(), given.device).pci_bus_id
    rows = []
    for cap in caps:
        ladder = [sys.executable, "-m", "rollkv", "ladder", "-m", str(given.model), "--vram-target", f"{cap // MIB}MiB", "--fill", "random"]
        ladder += ["-d", str(depth), "-n", str(given.n_predict), "-r", "1", "--device", str(given.device), "-o", "jsonl"]
        rows.append(row(cap, meter(ladder, lambda pid: ProcessMemory(bus, pid=pid))))
        print(*rows[-1], file=sys.stderr, flush=True)
    print(tabulate(rows, HEADINGS, tablefmt="github", disable_numparse=True, stralign="right"))
    return int(any(verdict == "OVER" for *_, verdict in rows))


if __name__ == "__main__":
    sys.exit(main())
