"""The run of a ladder: ceilings and prompts, one engine for all rungs, the peer beside them."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache as remembered
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollkv.tasks.ceilings import Ceilings, Rates
    from rollkv.tasks.climb import PromptFor
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.ladder import Climb, Prompt, Rung, RungResult
    from rollkv.tasks.peers import Peer, PeerResult


@dataclass(frozen=True)
class Run:
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


def machine_rates(backend: str, device: int, cap_bytes: int | None) -> "Rates":
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


def prompts(model: "TextModel", climb: "Climb") -> "PromptFor":
    """The prompt of a depth and a repetition, made once: every rung reads the same."""
    from rollkv.tasks.ladder_prompts import needle_prompt, prose_prompt

    @remembered
    def prompt_for(depth: int, repetition: int) -> "Prompt":
        if climb.times_depth:
            return needle_prompt(model, depth, repetition)
        return prose_prompt(model.tokenizer.encode, depth + (climb.num_prompt or 0), repetition)

    return prompt_for


def gather(run: Run) -> "Generator[RungResult | PeerResult, None, None]":
    """The rungs as they are measured, each with the peer's runs behind it."""
    from rollkv import report
    from rollkv.engine import Engine
    from rollkv.startup import check_length, load
    from rollkv.tasks.climb import run_climb
    from rollkv.tasks.record import machine_facts

    warn = report.warn_once()
    longest = max(rung.cache.ctx_size for rung in run.climb.rungs)
    for config in run.climb.variants.values():
        check_length(config, longest, run.model.path, warn)

    def open_engine(rung: "Rung") -> Engine:
        with report.bytes_progress("loading") as loading:
            return load(
                run.model.path,
                rung.cache,
                config=rung.config,
                vram_target=rung.vram_target,
                backend=run.backend,  # type: ignore[arg-type]
                device=run.device,
                portable=run.portable,
                warn=warn,
                on_load=loading,
                on_tail=making,
                rates=run.rates.bandwidths,
            )

    peers: list[PeerResult] = []
    with ExitStack() as cleanup:
        making = cleanup.enter_context(report.bytes_progress("making the tail"))

        def progress_for(rung: "Rung") -> report.PhaseProgress:
            return cleanup.enter_context(report.PhaseProgress(f"{rung.name}, depth {rung.depth}"))

        describe = partial(machine_facts, link_rate=run.rates.link_in)
        prompt_for = prompts(run.model, run.climb)
        for result in run_climb(run.climb, run.rates.link, open_engine, prompt_for, progress_for, describe):
            if not result.ran and len(run.climb.rungs) > 1:  # of a single one the error at the end says it
                report.warn(f"{result.rung.name}, depth {result.rung.depth}: {result.refusal}")
            yield result
            for theirs in _peers_beside(run, result, peers):
                if theirs.failure is not None:
                    report.warn(theirs.failure)
                peers.append(theirs)
                yield theirs


def _peers_beside(run: Run, result: "RungResult", found: "Sequence[PeerResult]") -> "Iterator[PeerResult]":
    """Runs the peer as it compares with a rung, each setup and test once."""
    from rollkv import report
    from rollkv.tasks.peers import PeerTest, run_peer, setups_beside

    if run.peer is None or not result.ran:
        return
    climb, depth = run.climb, result.rung.depth
    if climb.num_prompt is not None:
        tests: tuple[PeerTest, ...] = (PeerTest(climb.num_prompt, climb.num_steps, depth),)
    elif climb.times_depth:
        tests = PeerTest(depth, 0, 0), PeerTest(0, climb.num_steps, depth)
    else:
        tests = (PeerTest(0, climb.num_steps, depth),)
    done = {(other.setup, other.tests) for other in found}
    layers = run.model.config.num_layers
    for setup in setups_beside(result.tail_bytes, layers, run.bounds[depth].token_bytes / layers):
        if (setup, tests) not in done:
            report.note(f"running {run.peer.program} {setup.label}, depth {depth}")
            yield run_peer(run.peer, setup, tests, climb.repetitions, result.rung.cache, run.peer_timeout)
