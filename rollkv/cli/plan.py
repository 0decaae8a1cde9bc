"""`rollkv plan`: the memory budget of a run, from the header of the file alone, and the speed that the card's rates allow."""

from typing import TYPE_CHECKING, Annotated

import typer

from rollkv.cli import options, positions
from rollkv.errors import UsageError

if TYPE_CHECKING:
    from rollkv.tasks.suggest import Ways


def plan(
    model: options.Model = None,
    ctx_size: options.CtxSize = None,
    vram_target: options.VramTarget = None,
    residency: options.Residency = "auto",
    window: options.Window = None,
    ubatch: options.FittingUbatch = None,
    cache_type_k: options.CacheTypeK = "f16",
    cache_type_v: options.CacheTypeV = "f16",
    cache_type_tail_k: options.CacheTypeTailK = None,
    cache_type_tail_v: options.CacheTypeTailV = None,
    kv_rotate: options.KvRotate = False,
    kv_protect: options.KvProtect = 0,
    dca: options.Dca = "auto",
    dca_chunk: options.DcaChunk = None,
    dca_local: options.DcaLocal = None,
    rope_original_ctx: options.RopeOriginalCtx = None,
    hf_config: options.HfConfig = None,
    device: Annotated[
        int | None, typer.Option(metavar="INDEX", help="Which GPU's rates to reckon with. Default: the first, if any.")
    ] = None,
    probe_link: Annotated[bool, typer.Option("--probe-link", help="Measure link and device memory of the GPU again.")] = False,
    link_gbps: options.LinkGbps = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="List the ways in which the context fits under the cap, exact and lossy, instead of one plan.")
    ] = False,
    output: options.Output = "text",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the link and how the staging ring was chosen, on stderr.")] = False,
) -> None:
    """Show what a run would hold on the device and in host memory, and how fast decode could be. Without -c the model's trained length is planned.
    Rates of link and device memory are measured once for each card and driver; without a GPU they are assumed."""
    as_json = options.wants_json(output)
    options.check_machine("auto", device)
    cap = options.size_option(vram_target, "--vram-target")
    given = options.link_option(link_gbps)

    from functools import partial

    from rollkv import dual_chunk, report
    from rollkv.kv_formats import kv_words
    from rollkv.model_config import model_config
    from rollkv.models import default_model
    from rollkv.startup import check_length
    from rollkv.startup import plan as plan_run
    from rollkv.synth import open_model
    from rollkv.tasks.ceilings import known_rates
    from rollkv.tasks.generate import cache_config
    from rollkv.tasks.record import kv_facts
    from rollkv.tasks.suggest import ways_to_fit
    from rollkv.ubatch import shrunk_words
    from rollkv.units import format_size

    path = model or default_model()
    with open_model(path) as file:
        config = model_config(file)
    cache = cache_config(
        config.context_length if ctx_size is None else ctx_size,
        residency=residency,
        window_cells=window,
        ubatch=ubatch,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        cache_type_tail_k=cache_type_tail_k,
        cache_type_tail_v=cache_type_tail_v,
        kv_rotate=kv_rotate,
        kv_protect=kv_protect,
    )
    if suggest and cap is None:
        raise UsageError("--suggest needs a cap to fit under; give --vram-target, such as 12GiB")
    if suggest and cache != cache_config(cache.ctx_size, ubatch=ubatch, kv_protect=kv_protect):
        raise UsageError("--suggest chooses types and window itself; leave --cache-type-*, --kv-rotate, --residency and --window out")
    config = positions.positioned(config, cache, dca, dca_chunk, dca_local, rope_original_ctx, hf_config)
    check_length(config, cache.ctx_size, path, report.warn)
    rates, link = known_rates(device, again=probe_link, tell=report.note, warn=report.warn)
    if given is not None:
        rates = rates.with_link(given)
    make = partial(plan_run, path, config=config, vram_target=cap, rates=rates)
    facts = {"model": str(path), "ctx_size": cache.ctx_size, **dual_chunk.facts(config), **link.as_dict()}
    if suggest and cap is not None:
        ways = ways_to_fit(cache, make)
        if as_json:
            found = [{**kv_facts(way.cache), **way.as_dict()} for way in ways.found]
            report.write_json({**facts, "ways": found, "left_out": list(ways.left_out)})
        else:
            report.write_text(f"{path}, {cache.ctx_size} cells, {dual_chunk.short_words(config)}, cap {format_size(cap)}\n{_table(ways)}\n")
        if verbose:
            report.note(report.link_line(rates, link))
        return
    budget = make(cache)
    if (words := shrunk_words(cache, config, budget)) is not None:
        report.warn(words)
    if as_json:
        report.write_json({**facts, **kv_facts(cache), "budget": budget.as_dict()})
    else:
        heading = f"{path}, {cache.ctx_size} cells, {kv_words(cache)}, {dual_chunk.short_words(config)}"
        report.write_text(f"{heading}\n{report.budget_table(budget)}\n{report.prediction_line(budget)}\n")
    if verbose:
        report.note(report.link_line(rates, link))
        report.note(report.ring_line(budget))


def _table(ways: "Ways") -> str:
    """A line a way, what its first word means, and what does not fit."""
    from rollkv import report
    from rollkv.units import format_size

    rows = [
        (
            "exact" if way.exact else "lossy",
            way.options or "(the default)",
            "?" if way.measured_kld is None else f"{way.measured_kld:.5f}".rstrip("0").rstrip("."),
            f"{way.tokens_per_second:.1f}",
            str(way.budget.window_cells),
            str(way.budget.tail_cells),
            format_size(way.budget.host_tail_bytes),
            format_size(way.budget.total_bytes),
        )
        for way in ways.found
    ]
    headings = ("", "options", "mean KLD", "tok/s at most", "cells resident", "in the tail", "host memory", "device memory")
    fits = any(way.exact and not way.budget.spills for way in ways.found)
    left_out = "; ".join(options or "the default" for options in ways.left_out)
    return (
        report.table(rows, headings, align=("left", "left", *["right"] * 6))
        + ("\n\nEvery f16 cell fits into VRAM: nothing has to be streamed or lost." if fits else "")
        + (f"\n\nDo not fit: {left_out}." if left_out else "")
        + "\n\nexact: the bits of a run of the same ubatch that keeps every f16 cell in VRAM. lossy: cells are rounded to fewer bits and logits change."
        "\nMean KLD: nats, as measured on a small model, SmolLM2-135M, over 8,192 tokens (?: not with protected layers); rollkv logit-equiv tells what"
        "\nyours loses. Rates are bounds behind a full context. --ubatch: smaller than usual, so that a window fits; prefill takes longer."
    )
