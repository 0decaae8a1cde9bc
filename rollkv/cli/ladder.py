"""`rollkv ladder`: how fast prefill and decode are as more and more of the cache lies in the tail, beside what the machine could do."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from rollkv.cli import ladder_results, ladder_text, options, positions, results
from rollkv.cli.ladder_run import Run, gather, machine_rates, prompts
from rollkv.cli.ladder_rungs import depths, one_depth
from rollkv.config import DEFAULT_UBATCH
from rollkv.counts import check_count
from rollkv.errors import UsageError

_DEFAULT_PROMPT = 512  # as llama-bench's
_LONG_PROMPT = 1 << 20  # tokens; to make them takes seconds


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
    cache_type_tail_k: options.CacheTypeTailK = None,
    cache_type_tail_v: options.CacheTypeTailV = None,
    kv_rotate: options.KvRotate = False,
    kv_protect: options.KvProtect = 0,
    dca: options.DcaList = "auto",
    dca_chunk: options.DcaChunk = None,
    dca_local: options.DcaLocal = None,
    rope_original_ctx: options.RopeOriginalCtx = None,
    hf_config: options.HfConfig = None,
    backend: options.Backend = "auto",
    device: options.Device = 0,
    portable: options.Portable = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it (PNG, SVG or PDF); needs matplotlib.")] = None,
    output: Annotated[str, typer.Option("-o", "--output", metavar="md|json|jsonl|csv", help="Form of the result on stdout.")] = "md",
) -> None:
    """Measure prefill and decode on rungs from a resident cache to a streamed one, first the ceilings (link, device memory), last the fit
    of two models: sum (t0 + tail/link) and overlap (max(t0, tail/link)). The weights are loaded once, with --peer once a rung. The ceilings
    take 2.5 GiB of device memory before the first load, or 1 GiB under a small cap, and give them back. Exit code 1 when a rung holds more device memory than its cap,
    or misses a needle that a resident rung found."""
    options.check_form(output, ladder_results.FORMS)
    options.check_machine(backend, device)
    _check(fill, {"--n-predict": n_predict, "--repetitions": repetitions, "--n-prompt": n_prompt})
    if not 0 < peer_timeout < inf:
        raise UsageError(f"--peer-timeout {peer_timeout:g}: the value must be a finite number of seconds above zero")
    given_link = options.link_option(link_gbps)

    from rollkv import plots, report
    from rollkv.counts import parse_depths, split_list
    from rollkv.dual_chunk import short_words
    from rollkv.kv_formats import check_kv_types
    from rollkv.models import default_model
    from rollkv.tasks import generate as task
    from rollkv.tasks.ceilings import ceilings
    from rollkv.tasks.ladder import Climb, context_size, in_variants, tail_page_bytes
    from rollkv.tasks.peers import find_peer

    if plot is not None:
        plots.check(plot)
    cells = parse_depths(depth, "--depth")
    num_prompt = _DEFAULT_PROMPT if n_prompt is None and len(cells) > 1 else n_prompt
    opened = task.open_text_model(model or default_model())
    found_peer = None if peer is None else find_peer(peer, opened.path, device)
    caches = {
        one: task.cache_config(
            context_size(one, n_predict, num_prompt),
            ubatch=ubatch,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            cache_type_tail_k=cache_type_tail_k,
            cache_type_tail_v=cache_type_tail_v,
            kv_rotate=kv_rotate,
            kv_protect=kv_protect,
        )
        for one in cells
    }
    modes = split_list(dca, "--dca")
    configs = positions.variants(opened.config, caches[max(cells)], modes, dca_chunk, dca_local, rope_original_ctx, hf_config)
    opened = replace(opened, config=configs[0])
    check_kv_types(opened.config, caches[cells[0]])
    if num_prompt is None:
        tail_page_bytes(opened.config, caches[cells[0]])  # refuses a model without a tail
        rungs, num_placed = one_depth(opened.config, caches[cells[0]], cells[0], vram_target, tail, steps)
    else:
        others = {"--tail": tail, "--steps": steps, "--plot": plot}
        rungs, num_placed = depths(opened.config, caches, vram_target, others), 0
    variants = {short_words(config) if len(configs) > 1 else "": config for config in configs}
    rungs = in_variants(rungs, variants)
    climb = Climb(rungs, n_predict, repetitions, fill, num_prompt, num_placed, reload=found_peer is not None)  # type: ignore[arg-type]
    if fill == "prompt" and num_prompt is None:
        if cells[0] >= _LONG_PROMPT:
            report.note(f"making prompts of {cells[0]} tokens; '--fill random' needs none")
        prompts(opened, climb)(cells[0], 0)  # refuses a depth without room for a needle
    smallest_cap = min((rung.vram_target for rung in rungs if rung.vram_target), default=None)
    rates = replace(machine_rates(backend, device, smallest_cap), link_given=given_link)
    bounds = {one: ceilings(opened.path, rates, caches[one], one) for one in cells}
    report.note(ladder_text.ceilings_line(bounds[max(cells)]))
    run = Run(opened, climb, bounds, rates, backend, device, portable, found_peer, peer_timeout)
    found, cut_short = results.collect(gather(run))
    ladder_results.finish(opened, climb, bounds, rates, found, plot, output, cut_short)


def _check(fill: str, counts: Mapping[str, int | None]) -> None:
    if fill not in ("prompt", "random"):
        raise UsageError(f"--fill {fill!r} is not known; choose prompt or random")
    for option, value in counts.items():
        check_count(value, option)
