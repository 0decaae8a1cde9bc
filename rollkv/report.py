"""Printing. Results go to stdout and nothing else does; progress, statistics and warnings go to stderr.

Only this module and the error boundary of the command line write to either. Unknown values are null in JSON, never NaN or infinite.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TextIO

from rollkv.backend import TailMade
from rollkv.budget import Budget
from rollkv.config import CacheConfig
from rollkv.engine import Stats
from rollkv.kv_formats import kv_words
from rollkv.machine_rates import PcieLink
from rollkv.phases import Phases
from rollkv.roofline import Bandwidths
from rollkv.units import format_rate, format_size

PROGRESS_LINE_SECONDS = 10.0


def write_text(text: str) -> None:
    """A piece of the result to stdout, at once. Raises BrokenPipeError when nobody reads any more."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Mapping[str, object]) -> None:
    """One JSON object and a line break to stdout, in ASCII, so that it parses whatever encoding stdout has."""
    write_text(json.dumps(_plain(value), indent=1) + "\n")


def note(message: str) -> None:
    """One line to stderr, where there is one. A reader that went away is no reason to stop."""
    if sys.stderr is None:
        return
    try:
        print(f"rollkv: {message}", file=sys.stderr, flush=True)
    except OSError:
        pass


def warn(message: str) -> None:
    note(f"warning: {message}")


def warn_once() -> Callable[[str], None]:
    """A `warn` that says each message once, for commands that load several times."""
    said: set[str] = set()

    def warn_first(message: str) -> None:
        if message not in said:
            said.add(message)
            warn(message)

    return warn_first


def table(rows: Iterable[Iterable[object]], headers: tuple[str, ...] = (), align: tuple[str, ...] | None = None) -> str:
    """A plain table; numbers keep the form they were given."""
    from tabulate import tabulate

    return tabulate(list(rows), headers=headers, tablefmt="simple" if headers else "plain", disable_numparse=True, colalign=align)


# -- statistics ----------------------------------------------------------------------------------------------------------------


def statistics_line(stats: Stats, budget: Budget, cache: CacheConfig, backend: str, stop: str | None) -> str:
    """The one line behind a run. What was not measured is left out, and types of the cells that lose nothing."""
    parts = [
        f"pp {stats.prompt_tokens} tok" + _rate(stats.prefill_rate),
        f"tg {stats.generated_tokens} tok" + _rate(stats.decode_rate),
    ]
    if stats.ttft_seconds is not None:
        parts.append(f"ttft {stats.ttft_seconds:.2f} s")
    parts.append(f"cells {stats.window_cells} window + {stats.tail_cells} tail" + (f", {kv_words(cache)}" if cache.lossy else ""))
    parts.append("link idle" if stats.link_gbps is None else f"link {stats.link_gbps:.1f} GB/s")
    parts.append(f"{backend} backend" if backend == "host" else _device_part(stats, budget))
    parts.append(f"stop {stop or 'none'}")
    return " | ".join(parts)


def start_line(phases: Phases, stats: Stats, tail: TailMade | None = None) -> str:
    """The parts of a start, from the imports of the command to the first token; and how the tail was made beside them, if it was."""
    parts = phases.seconds | ({} if stats.ttft_seconds is None else {"first token": stats.ttft_seconds})
    line = f"start {sum(parts.values()):.2f} s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
    if tail is None:
        return line
    rate = format_rate(tail.num_bytes / tail.seconds)
    return f"{line}; tail of {format_size(tail.num_bytes)} made at {rate}, {tail.waited_seconds:.2f} of it waited for"


def statistics_object(stats: Stats) -> dict[str, object]:
    """The same figures for JSON, and the raw ones behind them."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "pp_tokens_per_second": stats.prefill_rate,
        "tg_tokens_per_second": stats.decode_rate,
        "ttft_seconds": stats.ttft_seconds,
        "window_cells": stats.window_cells,
        "tail_cells": stats.tail_cells,
        "link_bytes": stats.link_bytes,
        "link_gbps": stats.link_gbps,
        "peak_device_bytes": stats.peak_device_bytes,
        "cap_bytes": stats.cap_bytes,
        "stop_token": stats.stop_token,
    }


def _rate(rate: float | None) -> str:
    return "" if rate is None else f" {rate:.1f} tok/s" if rate < 1000 else f" {rate:.0f} tok/s"


def _device_part(stats: Stats, budget: Budget) -> str:
    terms = [f"planned {format_size(budget.total_bytes)}"]
    if stats.peak_device_bytes is not None:
        terms.insert(0, f"peak {format_size(stats.peak_device_bytes)}")
    if stats.cap_bytes is not None:
        terms.append(f"cap {format_size(stats.cap_bytes)}")
    return "device " + ", ".join(terms)


# -- budget --------------------------------------------------------------------------------------------------------------------


def budget_table(budget: Budget) -> str:
    """Device lines with their sum, the residency that follows from them, and what the host holds."""
    rows = [(name, format_size(size)) for name, size in budget.lines()]
    rows.append(("total on the device", format_size(budget.total_bytes)))
    if budget.cap_bytes is not None:
        rows.append(("cap", format_size(budget.cap_bytes)))
    rows.append(("cells resident", str(budget.window_cells)))
    rows.append(("cells in the tail", str(budget.tail_cells)))
    rows.append(("host memory for the tail", format_size(budget.host_tail_bytes)))
    return table(rows, align=("left", "right"))


def prediction_line(budget: Budget) -> str:
    """What decode behind a full context could reach, and where the two rates come from that it follows from."""
    step, rates = budget.step, budget.rates
    alone = f"device memory alone {1 / step.compute:.1f} at {format_rate(rates.hbm)} ({rates.hbm_origin})"
    if budget.spills:
        alone += f", link alone {1 / step.beside_compute:.1f} at {format_rate(rates.link)} ({rates.link_origin})"
    estimate = ", an estimate" if "assumed" in (rates.link_origin, rates.hbm_origin) else ""
    return f"predicted behind a full context{estimate}: {1 / step.seconds:.1f} tok/s, bound by {step.bound} ({alone})"


def link_line(rates: Bandwidths, link: PcieLink) -> str:
    """The link between host and device, and the rate it is reckoned with."""
    return f"link: {link.words}; {format_rate(rates.link)} ({rates.link_origin})"


def ring_line(budget: Budget) -> str:
    """How the staging ring was chosen: the terms of roofline.py."""
    if budget.ring is None:
        return "no staging ring: everything is resident"
    step, ring = budget.step, budget.ring
    size = dict(budget.device)["staging ring"] // ring.num_slots
    times = {name: f"{name} {1e3 * getattr(step, name):.3f}" for name in ("compute", "link", "stalls", "drain")}
    return (
        f"staging ring of {ring.num_slots} slots of {ring.slot_pages} pages ({format_size(size)}): a step of {1e3 * step.seconds:.3f} ms is the larger "
        f"of {times['compute']} and {times['link']} + {times['stalls']} + {times['drain']}"
    )


# -- progress ------------------------------------------------------------------------------------------------------------------


class PhaseProgress:
    """Progress of one phase on stderr: a bar that vanishes on a terminal, elsewhere at most one line every ten seconds.

    Call it with (done, total). A phase that is over with its first call shows nothing. rate_form: shows how much is done a second, from the
    first call on.
    """

    def __init__(
        self,
        label: str,
        form: Callable[[int], str] = str,
        rate_form: Callable[[float], str] | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._form, self._rate_form, self._clock = label, form, rate_form, clock
        self._first: tuple[float, int] | None = None  # when the first call came, and what was done then
        self._stream = sys.stderr if stream is None else stream
        self._bar: Any = None
        self._task: Any = None
        self._last = clock()

    def __enter__(self) -> "PhaseProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __call__(self, done: int, total: int) -> None:
        if self._stream is None:
            return
        self._first = self._first or (self._clock(), done)
        if self._stream.isatty():
            self._show_bar(done, total)
        elif done < total and self._clock() - self._last >= PROGRESS_LINE_SECONDS:
            self._last = self._clock()
            note(f"{self._label} {self._shown(done, total)} ({done * 100 // total} %)")
        if done >= total:
            self._first = None
            self.close()

    def close(self) -> None:
        """Removes the bar. May be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_bar(self, done: int, total: int) -> None:
        if self._bar is None:
            if done >= total:
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(self._label, total=total, completed=done, shown=self._shown(done, total))
            self._bar.start()
        self._bar.update(self._task, completed=done, shown=self._shown(done, total))

    def _shown(self, done: int, total: int) -> str:
        shown = f"{self._form(done)} of {self._form(total)}"
        if self._rate_form is None or self._first is None or done == self._first[1]:
            return shown
        return f"{shown}, {self._rate_form((done - self._first[1]) / max(self._clock() - self._first[0], 1e-9))}"


def bytes_progress(label: str) -> PhaseProgress:
    """Progress of a phase that counts bytes, with their rate."""
    return PhaseProgress(label, format_size, format_rate)


def _plain(value: Any) -> Any:
    """JSON values only: NumPy scalars and arrays become Python's, what is not finite becomes null, bytes and the rest text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
