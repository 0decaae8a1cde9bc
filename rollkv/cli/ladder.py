"""`rollkv ladder`: how fast prefill and decode are as more and more of the cache lies in the tail, beside what the machine could do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache as remembered
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollkv.cli import ladder_results, ladder_text, options
from rollkv.config import DEFAULT_UBATCH
from rollkv.errors import UsageError

if TYPE_CHECKING:
    from rollkv.config import CacheConfig
    from rollkv.tasks.ceilings import Ceilings, Rates
    from rollkv.tasks.climb import PromptFor
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.ladder import Climb, Prompt, Rung, RungResult
    from rollkv.tasks.peers import Peer, PeerResult

_DEFAULT_STEPS = 8
_DEFAULT_PROMPT = 512  # as llama-bench's
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
    depth: Annotated[
        str,
        typer.Option(
            "-d",
            "--depth",
            metavar="CELLS|LIST",
            help="Cells cached before decode, such as 32k. A list such as 0,4k,32k measures each as llama-bench does, resident or under one --vram-target.",
        ),
    ] = "4k",
    n_prompt: Annotated[
        int | None,
        typer.Option(
            "-p",
            "--n-prompt",
            metavar="TOKENS",
            help="Tokens whose prefill is timed behind each depth of a list (512 unless given); makes a list of a single depth.",
        ),
    ] = None,
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", metavar="STEPS", help="Decode steps that are timed.")] = 64,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Runs of each rung, each with a prompt of its own.")] = 3,
    fill: Annotated[
        str,
        typer.Option(
            metavar="prompt|random",
            help="Read a prompt with a needle up to the depth, or fill the cache with random keys and values, where prefill would take too long.",
        ),
    ] = "prompt",
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="llama-bench=PATH",
            help="Run this program of yours in turn with the rungs: resident, KV in host RAM, and fewer layers on the GPU.",
        ),
    ] = None,
    peer_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long one run of the peer may take.")] = 600.0,
    link_gbps: options.LinkGbps = None,
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
    of two models: sum (t0 + tail/link) and overlap (max(t0, tail/link)). The weights are loaded once, with --peer once a rung. The ceilings
    take 2.5 GiB of device memory before the first load, or 1 GiB under a small cap, and give them back. Exit code 1 when a rung holds more device memory than its cap,
    or misses a needle that a resident rung found."""
    _check(output, backend, fill, {"--n-predict": n_predict, "--repetitions": repetitions, "--n-prompt": n_prompt})
    given_link = options.link_option(link_gbps)

    from rollkv import plots, report
    from rollkv.counts import parse_depths
    from rollkv.models import default_model
    from rollkv.tasks import generate as task
    from rollkv.tasks.ceilings import ceilings
    from rollkv.tasks.ladder import Climb, context_size, tail_page_bytes
    from rollkv.tasks.peers import find_peer

    if plot is not None:
        plots.check(plot)
    cells = parse_depths(depth, "--depth")
    num_prompt = _DEFAULT_PROMPT if n_prompt is None and len(cells) > 1 else n_prompt
    opened = task.open_text_model(model or default_model())
    found_peer = None if peer is None else find_peer(peer, opened.path, device)
    if peer_timeout <= 0:
        raise UsageError(f"--peer-timeout {peer_timeout:g}: the value must be above zero")
    caches = {
        one: task.cache_config(
            context_size(one, n_predict, num_prompt), ubatch=ubatch, cache_type_k=cache_type_k, cache_type_v=cache_type_v
        )
        for one in cells
    }
    if num_prompt is None:
        tail_page_bytes(opened.config, caches[cells[0]])  # refuses a model without a tail
        rungs, num_placed = _rungs(opened, caches[cells[0]], cells[0], vram_target, tail, steps)
    else:
        rungs, num_placed = _depth_rungs(caches, vram_target, {"--tail": tail, "--steps": steps, "--plot": plot}), 0
    climb = Climb(rungs, n_predict, repetitions, fill, num_prompt, num_placed, reload=found_peer is not None)  # type: ignore[arg-type]
    if fill == "prompt" and num_prompt is None:
        _prompt_for(opened, climb)(cells[0], 0)  # refuses a depth without room for a needle
    rates = replace(
        _rates(backend, device, min((rung.vram_target for rung in rungs if rung.vram_target), default=None)), link_given=given_link
    )
    bounds = {one: ceilings(opened.path, rates, caches[one], one) for one in cells}
    report.note(ladder_text.ceilings_line(bounds[max(cells)]))
    run = _Run(opened, climb, bounds, rates, backend, device, portable, found_peer, peer_timeout)
    found, interrupted = _gather(run)
    ladder_results.finish(opened, climb, bounds, rates, found, plot, output, interrupted)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)


@dataclass(frozen=True)
class _Run:
    """What was asked for, checked. bounds: ceilings by depth."""

    model: "TextModel"
    climb: "Climb"
    bounds: "dict[int, Ceilings]"
    rates: "Rates"
    backend: str
    device: int
    portable: bool
    peer: "Peer | None"
    peer_timeout: float


def _check(output: str, backend: str, fill: str, counts: Mapping[str, int | None]) -> None:
    if output not in ladder_results.FORMS:
        raise UsageError(f"-o {output!r} is not known; choose {', '.join(ladder_results.FORMS[:-1])} or {ladder_results.FORMS[-1]}")
    if backend not in ("auto", "cuda", "host"):
        raise UsageError(f"--backend {backend!r} is not known; choose auto, cuda or host")
    if fill not in ("prompt", "random"):
        raise UsageError(f"--fill {fill!r} is not known; choose prompt or random")
    for option, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: the value must be 1 or more")


# -- rungs ---------------------------------------------------------------------------------------------------------------------


def _rungs(
    model: "TextModel", cache: "CacheConfig", depth: int, vram_target: str | None, tail: str | None, steps: int | None
) -> "tuple[tuple[Rung, ...], int]":
    """(the rungs that the options name, how many there are with those that are placed behind them). Raises UsageError."""
    from rollkv.counts import is_range, parse_sizes
    from rollkv.tasks.ladder import cap_rung, resident_rung, tail_rungs

    if vram_target is not None and tail is not None:
        raise UsageError("--vram-target and --tail are both given; give one of them")
    if steps is not None and steps < 2:
        raise UsageError(f"--steps {steps}: a ladder has at least 2 rungs")
    for option, text in (("--vram-target", vram_target), ("--tail", tail)):
        if text is not None and steps is not None and not is_range(text):
            raise UsageError(
                f"--steps {steps} divides a range, but {option} {text!r} is a list; write {option} LO..HI, or leave out one of them"
            )
    count = steps or _DEFAULT_STEPS
    if vram_target is not None:
        return tuple(cap_rung(cache, depth, cap) for cap in dict.fromkeys(parse_sizes(vram_target, "--vram-target", count))), 0
    if tail is not None:
        return tail_rungs(model.config, cache, depth, parse_sizes(tail, "--tail", count, zero=True)), 0
    return (resident_rung(cache, depth),), count


def _depth_rungs(caches: "Mapping[int, CacheConfig]", vram_target: str | None, others: Mapping[str, object]) -> "tuple[Rung, ...]":
    """A rung for every depth, resident or under the cap. Raises UsageError for options that go with a ladder at one depth."""
    from rollkv.tasks.ladder import cap_rung, resident_rung

    given = [option for option, value in others.items() if value is not None]
    if given:
        raise UsageError(
            f"{given[0]} goes with a ladder at one depth, not with several depths or --n-prompt; give one --depth and leave out --n-prompt"
        )
    if vram_target is None:
        return tuple(resident_rung(cache, depth) for depth, cache in caches.items())
    cap = options.size_option(vram_target, "--vram-target")
    assert cap is not None
    return tuple(cap_rung(cache, depth, cap) for depth, cache in caches.items())


# -- the run -------------------------------------------------------------------------------------------------------------------


def _rates(backend: str, device: int, cap_bytes: int | None) -> "Rates":
    """Measured on a GPU, within a cap; nothing on the host backend, and none where auto finds no usable GPU."""
    from rollkv import report
    from rollkv.errors import DeviceError
    from rollkv.tasks.ceilings import Rates, probe_device

    if backend == "host":
        return Rates()
    try:
        return probe_device(device, report.warn, cap_bytes)
    except DeviceError as error:
        if backend == "cuda":
            raise
        report.warn(f"the ceilings are not measured: {error}")
        return Rates()


def _prompt_for(model: "TextModel", climb: "Climb") -> "PromptFor":
    """The prompt of a depth and a repetition, made once: every rung reads the same."""
    from rollkv.tasks.ladder_prompts import needle_prompt, prose_prompt

    @remembered
    def prompt_for(depth: int, repetition: int) -> "Prompt":
        if climb.times_depth:
            return needle_prompt(model, depth, repetition)
        return prose_prompt(model.tokenizer.encode, depth + (climb.num_prompt or 0), repetition)

    return prompt_for


def _gather(run: _Run) -> "tuple[list[RungResult | PeerResult], bool]":
    """(results so far, whether it was interrupted)."""
    from rollkv import report
    from rollkv.engine import Engine, check_length, load
    from rollkv.tasks.climb import run_climb
    from rollkv.tasks.record import machine_facts
    from rollkv.units import format_rate, format_size

    warn = report.warn_once()
    longest = max(rung.cache.ctx_size for rung in run.climb.rungs)
    check_length(run.model.config, longest, run.model.path, warn)

    def open_engine(rung: "Rung") -> Engine:
        with report.PhaseProgress("loading", format_size, format_rate) as loading:
            return load(
                run.model.path,
                rung.cache,
                vram_target=rung.vram_target,
                backend=run.backend,  # type: ignore[arg-type]
                device=run.device,
                portable=run.portable,
                warn=warn,
                on_load=loading,
                on_tail=making,
                rates=run.rates.bandwidths,
            )

    found: list[RungResult | PeerResult] = []
    with ExitStack() as cleanup:
        making = cleanup.enter_context(report.PhaseProgress("making the tail", format_size, format_rate))

        def progress_for(rung: "Rung") -> report.PhaseProgress:
            return cleanup.enter_context(report.PhaseProgress(f"{rung.label}, depth {rung.depth}"))

        describe = partial(machine_facts, link_rate=run.rates.link_in)
        prompt_for = _prompt_for(run.model, run.climb)
        try:
            for result in run_climb(run.climb, run.model.config, run.rates.link, open_engine, prompt_for, progress_for, describe):
                found.append(result)
                if not result.ran:
                    report.warn(f"{result.rung.label}, depth {result.rung.depth}: {result.refusal}")
                for theirs in _peers_beside(run, result, found):
                    found.append(theirs)
                    if theirs.failure is not None:
                        report.warn(theirs.failure)
        except KeyboardInterrupt:
            return found, True
    return found, False


def _peers_beside(run: _Run, result: "RungResult", found: "Sequence[RungResult | PeerResult]") -> "Iterator[PeerResult]":
    """Runs the peer as it compares with a rung, each setup and test once."""
    from rollkv import report
    from rollkv.tasks.peers import PeerResult, PeerTest, run_peer, setups_beside

    if run.peer is None or not result.ran:
        return
    climb, depth = run.climb, result.rung.depth
    if climb.num_prompt is not None:
        tests: tuple[PeerTest, ...] = (PeerTest(climb.num_prompt, climb.num_steps, depth),)
    elif climb.times_depth:
        tests = PeerTest(depth, 0, 0), PeerTest(0, climb.num_steps, depth)
    else:
        tests = (PeerTest(0, climb.num_steps, depth),)
    done = {(other.setup, other.tests) for other in found if isinstance(other, PeerResult)}
    layers = run.model.config.num_layers
    for setup in setups_beside(result.tail_bytes, layers, run.bounds[depth].token_bytes / layers):
        if (setup, tests) not in done:
            report.note(f"running {run.peer.program} {setup.label}, depth {depth}")
            yield run_peer(run.peer, setup, tests, climb.repetitions, result.rung.cache, run.peer_timeout)
