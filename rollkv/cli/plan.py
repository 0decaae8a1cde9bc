"""`rollkv plan`: the memory budget of a run, from the header of the file alone, and the speed that the card's rates allow."""

from typing import Annotated

import typer

from rollkv.cli import options, positions


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
    output: options.Output = "text",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the link and how the staging ring was chosen, on stderr.")] = False,
) -> None:
    """Show what a run would hold on the device and in host memory, and how fast decode could be. Without -c the model's trained length is planned.
    Rates of link and device memory are measured once for each card and driver; without a GPU they are assumed."""
    as_json = options.wants_json(output)
    options.check_machine("auto", device)
    cap = options.size_option(vram_target, "--vram-target")
    given = options.link_option(link_gbps)

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
    from rollkv.ubatch import shrunk_words

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
    config = positions.positioned(config, cache, dca, dca_chunk, dca_local, rope_original_ctx, hf_config)
    check_length(config, cache.ctx_size, path, report.warn)
    rates, link = known_rates(device, again=probe_link, tell=report.note, warn=report.warn)
    if given is not None:
        rates = rates.with_link(given)
    budget = plan_run(path, cache, config=config, vram_target=cap, rates=rates)
    if (words := shrunk_words(cache, config, budget)) is not None:
        report.warn(words)
    if as_json:
        facts = {"model": str(path), "ctx_size": cache.ctx_size, **kv_facts(cache), **dual_chunk.facts(config)}
        report.write_json({**facts, "budget": budget.as_dict(), **link.as_dict()})
    else:
        heading = f"{path}, {cache.ctx_size} cells, {kv_words(cache)}, {dual_chunk.short_words(config)}"
        report.write_text(f"{heading}\n{report.budget_table(budget)}\n{report.prediction_line(budget)}\n")
    if verbose:
        report.note(report.link_line(rates, link))
        report.note(report.ring_line(budget))
