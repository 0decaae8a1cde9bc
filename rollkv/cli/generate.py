"""`rollkv generate`: a prompt in, text out as it is made."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from rollkv.cli import options, positions
from rollkv.config import SamplingParams
from rollkv.errors import Interrupted
from rollkv.phases import Phases

if TYPE_CHECKING:
    from rollkv.engine import Engine
    from rollkv.tasks.generate import Generation, TextModel


def generate(
    model: options.Model = None,
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    prompt_ids: Annotated[str | None, typer.Option(metavar="IDS", help="Token ids such as 1,2,3 instead of text, fed as they are.")] = None,
    pre_tokenizer: options.PreTokenizer = None,
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", metavar="TOKENS", help="New tokens at most.")] = 256,
    ctx_size: options.CtxSize = None,
    chat: Annotated[bool | None, typer.Option("--chat/--raw", help="Use the chat template or not. Default: if the file has one.")] = None,
    system: Annotated[str | None, typer.Option(help="System message in front of the prompt.")] = None,
    temp: Annotated[float, typer.Option(help="Temperature; 0 always takes the likeliest token.")] = SamplingParams.temperature,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens only; 0 is off.")] = SamplingParams.top_k,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that together reach p; 1 is off.")] = SamplingParams.top_p,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below p times the likeliest one's probability; 0 is off.")
    ] = SamplingParams.min_p,
    repeat_penalty: Annotated[float, typer.Option(help="Penalty on tokens among the last ones; 1 is off.")] = SamplingParams.repeat_penalty,
    repeat_last: Annotated[
        int, typer.Option(metavar="TOKENS", help="How many last tokens the penalty looks at.")
    ] = SamplingParams.repeat_last,
    seed: Annotated[int, typer.Option(help="Seed of the draws; the same seed gives the same text.")] = SamplingParams.seed,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop in front of this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind end-of-text tokens.")] = False,
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
    backend: options.Backend = "auto",
    device: options.Device = 0,
    portable: options.Portable = False,
    output: options.Output = "text",
    verbose: Annotated[
        bool,
        typer.Option(
            "-v",
            "--verbose",
            help="Show model, first prompt ids, stop tokens, the budget and the time of each part of the start on stderr.",
        ),
    ] = False,
) -> None:
    """Generate text. Text goes to stdout as it is made; progress and one line of statistics go to stderr."""
    as_json = options.wants_json(output)
    options.check_machine(backend, device)
    cap = options.size_option(vram_target, "--vram-target")
    text, ids = options.read_prompt(prompt, file), options.parse_ids(prompt_ids)
    phases = Phases()

    from rollkv import report
    from rollkv.kv_formats import kv_words
    from rollkv.models import default_model
    from rollkv.startup import load
    from rollkv.tasks import generate as task

    phases.ends("imports")
    sampling = SamplingParams(temp, top_k, top_p, min_p, repeat_penalty, repeat_last, seed)
    request = task.TextRequest(text, ids, chat, system, n_predict, sampling, tuple(stop or ()), ignore_eos)
    opened = task.open_text_model(model or default_model(), pre_tokenizer)
    for message in opened.tokenizer.warnings:
        report.warn(message)
    prompt_tokens = task.build_prompt(opened, request)
    cache = task.cache_config(
        task.context_cells(len(prompt_tokens), n_predict, ctx_size),
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
    config = positions.positioned(opened.config, cache, dca, dca_chunk, dca_local, rope_original_ctx, hf_config)
    opened = replace(opened, config=config)
    if verbose:
        _describe_prompt(opened, prompt_tokens)
    phases.ends("vocabulary and prompt")
    making = report.bytes_progress("making the tail")
    with report.bytes_progress("loading") as loading:
        engine = load(
            opened.path,
            cache,
            config=opened.config,
            vram_target=cap,
            backend=backend,  # type: ignore[arg-type]
            device=device,
            portable=portable,
            warn=report.warn,
            on_load=loading,
            on_tail=making,
            phases=phases,
        )
    with engine, making, report.PhaseProgress("prompt") as progress:
        if verbose:
            report.note(f"{engine.backend_name} backend, {kv_words(engine.cache_config)}\n{report.budget_table(engine.budget)}")
            report.note(report.prediction_line(engine.budget))
            _describe_link(engine)
            report.note(report.ring_line(engine.budget))
        generation = task.Generation(engine, opened.tokenizer, prompt_tokens, request, progress)
        _stream(engine, opened, generation, as_json, phases if verbose else None)


def _stream(engine: "Engine", model: "TextModel", generation: "Generation", as_json: bool, phases: Phases | None) -> None:
    """Runs the generation to its end and prints it, and the phases of the start if given. Exit code 130 when interrupted, with what there
    was until then."""
    from rollkv import report

    try:
        for piece in generation:
            if not as_json:
                report.write_text(piece)
    except KeyboardInterrupt:
        rest = generation.interrupt()
        if not as_json:
            report.write_text(rest)
    if as_json:
        report.write_json(_result(engine, model, generation))
    elif not generation.text.endswith("\n"):
        report.write_text("\n")
    if phases is not None:
        report.note(report.start_line(phases, engine.stats, engine.backend.tail_made))
    report.note(report.statistics_line(engine.stats, engine.budget, engine.cache_config, engine.backend_name, generation.stop_reason))
    if generation.stop_reason == "interrupted":
        raise typer.Exit(Interrupted.exit_code)


def _result(engine: "Engine", model: "TextModel", generation: "Generation") -> dict[str, object]:
    from rollkv import dual_chunk, report
    from rollkv.tasks import record

    result: dict[str, object] = {
        "model": str(model.path),
        "backend": engine.backend_name,
        "prompt_ids": generation.prompt_ids,
        "ids": generation.ids,
        "text": generation.text,
        "stop_reason": generation.stop_reason,
        "stop_string": generation.stop_string,
        "ctx_size": engine.cache_config.ctx_size,
        **record.kv_facts(engine.cache_config),
        **dual_chunk.facts(model.config),
        "budget": engine.budget.as_dict(),
        "statistics": report.statistics_object(engine.stats),
    }
    return result | ({"error": "interrupted"} if generation.stop_reason == "interrupted" else {})


def _describe_prompt(model: "TextModel", prompt_tokens: list[int]) -> None:
    from rollkv import report
    from rollkv.dual_chunk import short_words

    def shown(ids: list[int]) -> str:
        return ", ".join(f"{token} {model.tokenizer.quoted(token)}" for token in ids)

    config = model.config
    report.note(
        f"{model.path}: {config.architecture}, {config.num_layers} layers, trained for {config.context_length} cells, {short_words(config)}"
    )
    report.note(f"prompt of {len(prompt_tokens)} tokens, beginning with {shown(prompt_tokens[:10])}")
    report.note(f"stop tokens: {shown(sorted(model.tokenizer.stop_ids)) or 'none'}")


def _describe_link(engine: "Engine") -> None:
    """Right behind the load, for an idle card may rest at a slower link."""
    from rollkv import report

    if engine.backend.gpu is None:
        return
    from rollkv.cuda.nvml import pcie_link

    link = pcie_link(engine.backend.gpu.pci_bus_id)
    report.note(report.link_line(engine.budget.rates, link))
    if link.slow_words is not None:
        report.warn(link.slow_words)
