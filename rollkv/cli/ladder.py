"""`rollkv ladder`: how fast prefill and decode are as more and more of the cache lies in the tail, beside what the machine could do."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache as remembered
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollkv.cli import ladder_text, options, results
from rollkv.config import DEFAULT_UBATCH
from rollkv.errors import OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from rollkv.config import CacheConfig
    from rollkv.tasks.ceilings import Ceilings, Rates
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.ladder import Climb, Rung, RungResult

FORMS = ("md", "json", "jsonl", "csv")
_DEFAULT_STEPS = 8
_INTERRUPTED = 130


def ladder(
    model: options.Model = None,
    vram_target: Annotated[
        str | None, typer.Option(metavar="LIST|LO..HI", help="Caps, a rung each, such as 8,7,6GiB; or a range, divided by --steps.")
    ] = None,
    tail: Annotated[
        str | None, typer.Option(metavar="LIST|LO..HI", help="Sizes of the tail, a rung each, such as 0,256,512MiB; or a range.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Rungs: of a range, or from resident to a one-page window, placed around the knee. [8]"),
    ] = None,
    depth: Annotated[str, typer.Option("-d", "--depth", metavar="CELLS", help="Cells cached before decode, such as 32k.")] = "4k",
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", metavar="STEPS", help="Decode steps that are timed.")] = 64,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Runs of each rung, each with a prompt of its own.")] = 3,
    ubatch: options.Ubatch = DEFAULT_UBATCH,
    cache_type_k: options.CacheTypeK = "f16",
    cache_type_v: options.CacheTypeV = "f16",
    backend: Annotated[
        str, typer.Option(metavar="auto|cuda|host", help="GPU, or the slow reference in NumPy, which has no ceilings.")
    ] = "auto",
    device: Annotated[int, typer.Option(metavar="INDEX", help="Which GPU.")] = 0,
    portable: options.Portable = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it (PNG, SVG or PDF); needs matplotlib.")] = None,
    output: Annotated[str, typer.Option("-o", "--output", metavar="md|json|jsonl|csv", help="Form of the result on stdout.")] = "md",
) -> None:
    """Measure prefill and decode on rungs from a resident cache to a streamed one, first the ceilings (link, device memory), last the fit
    of two models: sum (t0 + tail/link) and overlap (max(t0, tail/link)). The model is loaded once a rung. The ceilings take 2.5 GiB of
    device memory before the first load and give them back. Exit code 1 when a rung holds more device memory than its cap."""
    _check(output, backend, n_predict, repetitions)

    from rollkv import plots, report
    from rollkv.counts import parse_count
    from rollkv.models import default_model
    from rollkv.tasks import generate as task
    from rollkv.tasks.ceilings import ceilings
    from rollkv.tasks.ladder import context_size

    if plot is not None:
        plots.check(plot)
    cells = parse_count(depth, "--depth")
    opened = task.open_text_model(model or default_model())
    cache = task.cache_config(context_size(cells, n_predict), ubatch=ubatch, cache_type_k=cache_type_k, cache_type_v=cache_type_v)
    climb = _climb(opened, cache, cells, n_predict, repetitions, vram_target, tail, steps)
    bounds = ceilings(opened.path, _rates(backend, device), cache, cells)
    report.note(ladder_text.ceilings_line(bounds))
    found, interrupted = _run(opened, climb, cache, bounds.rates, backend, device, portable)
    if not any(result.ran for result in found) and not interrupted:
        raise OutOfMemoryError(f"no rung fits; the first: {found[0].refusal}")
    _finish(opened, found, bounds, cells, plot, output, interrupted)


def _check(output: str, backend: str, n_predict: int, repetitions: int) -> None:
    if output not in FORMS:
        raise UsageError(f"-o {output!r} is not known; choose {', '.join(FORMS[:-1])} or {FORMS[-1]}")
    if backend not in ("auto", "cuda", "host"):
        raise UsageError(f"--backend {backend!r} is not known; choose auto, cuda or host")
    for option, value in (("--n-predict", n_predict), ("--repetitions", repetitions)):
        if value < 1:
            raise UsageError(f"{option} {value}: the value must be 1 or more")


# -- rungs ---------------------------------------------------------------------------------------------------------------------


def _climb(
    model: "TextModel",
    cache: "CacheConfig",
    depth: int,
    num_steps: int,
    repetitions: int,
    vram_target: str | None,
    tail: str | None,
    steps: int | None,
) -> "Climb":
    """The rungs that the options name. Raises UsageError."""
    from rollkv.tasks.ladder import Climb, cap_rungs, tail_page_bytes, tail_rungs

    if vram_target is not None and tail is not None:
        raise UsageError("--vram-target and --tail are both given; give one of them")
    if steps is not None and steps < 2:
        raise UsageError(f"--steps {steps}: a ladder has at least 2 rungs")
    tail_page_bytes(model.config, cache)  # refuses a model without a tail
    rungs: tuple[Rung, ...] = ()
    if vram_target is not None:
        rungs = cap_rungs(cache, read_sizes(vram_target, "--vram-target", steps))
    elif tail is not None:
        rungs = tail_rungs(model.config, cache, read_sizes(tail, "--tail", steps, zero=True))
    return Climb(depth, num_steps, repetitions, rungs, 0 if rungs else steps or _DEFAULT_STEPS)


def read_sizes(text: str, option: str, steps: int | None, *, zero: bool = False) -> tuple[int, ...]:
    """Bytes from "6,5,4GiB" or "4..6GiB"; a bare number takes the unit of the last one, MiB without any.

    A range gives `steps` values, in the order it is written in. Raises UsageError, also for a size of nothing unless `zero`.
    """
    from rollkv.counts import split_list
    from rollkv.ladder_fit import spread_evenly
    from rollkv.units import MIB, parse_size

    is_range = ".." in text
    words = [word.strip() for word in text.split("..")] if is_range else split_list(text, option)
    if is_range and (len(words) != 2 or not all(words)):
        raise UsageError(f"{option}: cannot read the range {text!r}; write it as 4..6GiB")
    if steps is not None and not is_range:
        raise UsageError(
            f"--steps {steps} divides a range, but {option} {text!r} is a list; write {option} LO..HI, or leave out one of them"
        )
    unit = words[-1].lstrip("0123456789. ")
    bare = parse_size(f"1{unit}", option) if unit else MIB
    sizes = tuple(0 if zero and _is_zero(word, option) else parse_size(word, option, bare_unit=bare) for word in words)
    return spread_evenly(sizes[0], sizes[1], steps or _DEFAULT_STEPS) if is_range else sizes


def _is_zero(word: str, option: str) -> bool:
    """Whether it is nothing, in a known unit. Raises UsageError for an unknown one."""
    from rollkv.units import parse_size

    match = re.fullmatch(r"0+(?:\.0+)?\s*([A-Za-z]*)", word)
    if match is not None and match[1]:
        parse_size(f"1{match[1]}", option)
    return match is not None


# -- the run -------------------------------------------------------------------------------------------------------------------


def _rates(backend: str, device: int) -> "Rates":
    """Measured on a GPU; nothing on the host backend, and none where auto finds no usable GPU."""
    from rollkv import report
    from rollkv.errors import DeviceError
    from rollkv.tasks.ceilings import Rates, probe_device

    if backend == "host":
        return Rates()
    try:
        return probe_device(device, report.warn)
    except DeviceError as error:
        if backend == "cuda":
            raise
        report.warn(f"the ceilings are not measured: {error}")
        return Rates()


def _run(
    model: "TextModel", climb: "Climb", cache: "CacheConfig", rates: "Rates", backend: str, device: int, portable: bool
) -> "tuple[list[RungResult], bool]":
    """(results so far, whether it was interrupted)."""
    from rollkv import report
    from rollkv.engine import Engine, load
    from rollkv.tasks.ladder import prompt_ids, run_climb
    from rollkv.tasks.record import machine_facts
    from rollkv.units import format_size

    warn = report.warn_once()

    def open_engine(rung: "Rung") -> Engine:
        with report.PhaseProgress(f"loading for {rung.label}", format_size) as loading:
            return load(
                model.path,
                rung.cache,
                vram_target=rung.vram_target,
                backend=backend,  # type: ignore[arg-type]
                device=device,
                portable=portable,
                warn=warn,
                on_load=loading,
            )

    @remembered  # every rung reads the same prompts
    def prompt(repetition: int) -> list[int]:
        return prompt_ids(model.tokenizer.encode, climb.depth, repetition)

    found: list[RungResult] = []
    with ExitStack() as cleanup:

        def progress_for(label: str) -> report.PhaseProgress:
            return cleanup.enter_context(report.PhaseProgress(label))

        try:
            for result in run_climb(climb, model.config, cache, rates.link_in, open_engine, prompt, progress_for, machine_facts):
                found.append(result)
                if not result.ran:
                    report.warn(f"{result.rung.label}: {result.refusal}")
        except KeyboardInterrupt:
            return found, True
    return found, False


# -- printing ------------------------------------------------------------------------------------------------------------------


def _finish(
    model: "TextModel", found: "list[RungResult]", bounds: "Ceilings", depth: int, plot: Path | None, output: str, interrupted: bool
) -> None:
    from rollkv import ladder_plot
    from rollkv.tasks import record
    from rollkv.tasks.ladder_rows import row_dict, summarise

    summary = summarise(found, bounds.rates)
    source = record.source_facts("ladder") | record.model_facts(model.path).as_dict()
    time = {"utc_time": record.utc_time()}
    rows: list[Mapping[str, Any]] = [
        source
        | {"line": "rung"}
        | record.cache_facts(result.rung.cache, result.rung.vram_target)
        | (result.machine or record.machine_facts(None))
        | bounds.as_dict()
        | row_dict(result, bounds, summary.resident_seconds, depth)
        | time
        for result in found
    ]
    if plot is not None and any(row["outcome"] == "ran" for row in rows):
        title = f"{model.path.name}, {depth} cells before decode; {summary.verdict.words}"
        ladder_plot.draw([row for row in rows if row["outcome"] == "ran"], summary.fits, plot, title)
    over = [row for row in rows if row["over_limit"] and row["vram_target_bytes"] is not None]
    failure = f"{len(over)} rungs hold more device memory than their cap: {', '.join(row['rung'] for row in over)}" if over else None
    facts = bounds.as_dict() | summary.as_dict() | {"interrupted": interrupted}
    text = _csv(rows) if output == "csv" else ladder_text.markdown(model, rows, bounds, summary, depth)
    last = [source | {"line": "summary", "depth": depth} | facts | time] if output == "jsonl" else []
    results.finish("text" if output in ("md", "csv") else output, text, [*rows, *last], facts, failure if not interrupted else None)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """All columns of the rows, unknown values empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
