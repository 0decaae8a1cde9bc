"""`rollkv logit-equiv`: whether other windows, KV types, backends or engines give the logits of the resident run."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollkv.cli import options, positions, results
from rollkv.cli.equiv_options import check_numbers, check_types, sizes, spec_lists, stored_reference, text_ids
from rollkv.cli.equiv_text import part_seen, result_text
from rollkv.config import DEFAULT_UBATCH
from rollkv.errors import RollkvError, UsageError

if TYPE_CHECKING:
    from rollkv.engine import Engine
    from rollkv.metrics import Limits
    from rollkv.tasks.equiv_specs import RunSpec
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.logit_equiv import EquivRow
    from rollkv.tasks.record import ModelFacts
    from rollkv.tasks.stored_run import StoredRun


def logit_equiv(
    model: options.Model = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to run over. Default: prose that comes with rollkv.")] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens of the text, such as 4096 or 4k. Default: all, or 1k of prose.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(metavar="M", help="Feed the last M tokens one by one, as generation does. [16, or all of fewer]")
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Resident windows to compare: percent of the pages, Npages, or cells. [100%,50%,25%,1page]"),
    ] = None,
    vram_target: Annotated[str | None, typer.Option(metavar="LIST", help="Caps to compare, such as 6GiB,4GiB.")] = None,
    cache_type_k: options.CacheTypeKList = "f16",
    cache_type_v: options.CacheTypeVList = "f16",
    cache_type_tail_k: options.CacheTypeTailK = None,
    cache_type_tail_v: options.CacheTypeTailV = None,
    kv_rotate: options.KvRotate = False,
    kv_protect: options.KvProtect = 0,
    backend: Annotated[str, typer.Option(metavar="LIST", help="auto, cuda or host; further entries are compared with the first.")] = "auto",
    reference: Annotated[Path | None, typer.Option(help="Compare with the logits in this .npz instead of a resident run.")] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the reference's logits in this .npz.")] = None,
    dca: options.DcaList = "auto",
    dca_chunk: options.DcaChunk = None,
    dca_local: options.DcaLocal = None,
    rope_original_ctx: options.RopeOriginalCtx = None,
    hf_config: options.HfConfig = None,
    ubatch: options.Ubatch = DEFAULT_UBATCH,
    device: options.Device = 0,
    portable: options.Portable = False,
    noise: Annotated[float | None, typer.Option(help="A margin up to this many logits counts as a tie. [0.05]")] = None,
    bit_equal: Annotated[bool, typer.Option("--bit-equal", help="Limit: every row equal to the last bit.")] = False,
    max_kld: Annotated[float | None, typer.Option(help="Limit of the mean KL divergence, in nats.")] = None,
    max_nmse: Annotated[float | None, typer.Option(help="Limit of the normalised squared error.")] = None,
    min_top1: Annotated[float | None, typer.Option(help="Limit: least fraction of positions with the same top token.")] = None,
    output: Annotated[str, typer.Option("-o", "--output", metavar="text|json|jsonl", help="Form of the result on stdout.")] = "text",
) -> None:
    """Compare the logits behind every token of a text: a resident run is the reference, other windows, caps, KV types and backends are the
    candidates. Windows and caps must be bit-equal; other candidates keep stated limits, but where types below 16 bits lose something, only those that
    are given. Any limit given replaces the others. Exit code 1 when one is not kept."""
    options.check_form(output, results.FORMS)
    if reference is not None and (save is not None or text is not None or tokens is not None):
        raise UsageError("--reference brings its own tokens and logits; leave out --text, --tokens and --save")

    check_numbers(noise, max_kld, max_nmse, min_top1)

    from rollkv.counts import split_list
    from rollkv.logit_file import check_save
    from rollkv.metrics import Limits
    from rollkv.models import default_model
    from rollkv.tasks import equiv_specs as equiv
    from rollkv.tasks import generate as task
    from rollkv.tasks.logit_equiv import DEFAULT_NOISE

    if save is not None:
        check_save(save, f"--save {save}")
    opened = task.open_text_model(model or default_model())
    stored = stored_reference(reference, opened)
    ids = stored.logits.tokens.tolist() if stored else text_ids(opened, text, tokens, save)
    if decode is None:
        decode = min(16, len(ids))
    if not 0 <= decode <= len(ids):
        raise UsageError(f"--decode {decode}: the text has {len(ids)} tokens; give a number from 0 to {len(ids)}")
    modes = split_list(dca, "--dca")
    cache = task.cache_config(
        len(ids),
        ubatch=ubatch,
        cache_type_tail_k=cache_type_tail_k,
        cache_type_tail_v=cache_type_tail_v,
        kv_rotate=kv_rotate,
        kv_protect=kv_protect,
    )
    configs = positions.variants(opened.config, cache, modes, dca_chunk, dca_local, rope_original_ctx, hf_config)
    opened = replace(opened, config=configs[0])
    first, others = spec_lists(configs, cache, cache_type_k, cache_type_v, backend, device)
    caps = sizes(vram_target)
    spilling = equiv.spilling_spec(first, cache)
    specs = equiv.candidate_specs(first, windows, caps, others, stored=stored.cache if stored else None, spilling=spilling)
    check_types(opened.config, cache, (first, *specs))
    given = Limits(bit_equal, max_kld, max_nmse, min_top1)
    asked = None if given == Limits() else given
    _run(opened, ids, decode, first, specs, stored, save, asked, DEFAULT_NOISE if noise is None else noise, device, portable, output)


def _run(
    model: "TextModel",
    ids: list[int],
    num_decode: int,
    first: "RunSpec",
    specs: "tuple[RunSpec, ...]",
    stored: "StoredRun | None",
    save: Path | None,
    asked: "Limits | None",
    noise: float,
    device: int,
    portable: bool,
    output: str,
) -> None:
    from rollkv import report
    from rollkv.kv_formats import kv_words
    from rollkv.logit_file import logits_bytes
    from rollkv.startup import load
    from rollkv.tasks import logit_equiv as equiv
    from rollkv.tasks.equiv_specs import limits_for
    from rollkv.tasks.record import machine_facts, model_facts
    from rollkv.tasks.stored_run import run_facts
    from rollkv.units import format_size

    model_file = model_facts(model.path)
    warn, machines = report.warn_once(), set[str]()

    def facts(spec: "RunSpec", machine: "Mapping[str, object]") -> dict[str, object]:
        return run_facts(model_file, spec, machine, num_decode, portable)

    def limits(spec: "RunSpec", machine: "Mapping[str, object]") -> "Limits":
        beside = spec if stored is None else replace(spec, same_sums=stored.same_sums(facts(spec, machine)))
        return limits_for(beside, asked)

    def open_engine(spec: "RunSpec") -> "Engine":
        with report.bytes_progress(f"loading for {spec.label}") as loading:
            engine = load(
                model.path,
                spec.cache,
                config=spec.config,
                vram_target=spec.vram_target,
                backend=spec.backend,
                device=device,
                portable=portable,
                warn=warn,
                on_load=loading,
                on_tail=making,
            )
        if spec is first:
            machines.add(engine.backend_name)
        return engine

    vocab = model.config.vocab_size
    with ExitStack() as cleanup:
        making = cleanup.enter_context(report.bytes_progress("making the tail"))

        def progress_for(spec: "RunSpec") -> report.PhaseProgress:
            return cleanup.enter_context(report.PhaseProgress(spec.label))

        if stored is None:
            report.note(f"the reference's logits take {format_size(logits_bytes(len(ids), vocab))} of disk")
            recorded = equiv.record_reference(
                open_engine, first, ids, num_decode, vocab, save, progress_for, lambda engine: facts(first, machine_facts(engine))
            )
            reference = cleanup.enter_context(recorded)
        else:
            reference = stored.logits
        rows = equiv.compare(
            reference,
            open_engine,
            specs,
            num_decode=num_decode,
            noise=noise,
            limits=limits,
            progress_for=progress_for,
            describe=machine_facts,
        )
        compared, cut_short = results.collect(rows)  # loads and runs the candidates, one after the other
        if cut_short is not None and not compared:
            raise cut_short
        against = stored.words if stored else f"{first.label}, {kv_words(first.cache)}, {''.join(machines)} backend"
        shared = {"num_tokens": len(ids), "decode_tokens": num_decode, "reference": against}
        _print(model, model_file, compared, shared, output, cut_short)


def _print(
    model: "TextModel",
    model_file: "ModelFacts",
    rows: "list[EquivRow]",
    shared: dict[str, Any],
    output: str,
    cut_short: RollkvError | None,
) -> None:
    from rollkv.tasks import record

    failed = [f"{row.spec.label}: {'; '.join(row.broken)}" for row in rows if not row.passed]
    failure = "not equivalent: " + " | ".join(failed) if failed else None
    verdict = failure or _verdict(rows, part_seen(rows, shared), cut_short is None)
    source = record.source_facts("logit-equiv") | model_file.as_dict() | {"utc_time": record.utc_time()}
    records = [source | shared | _asked(row.spec) | row.machine | row.as_dict() for row in rows]
    results.finish(
        output,
        f"{result_text(model, rows, shared)}\nverdict: {verdict}\n",
        records,
        {},
        failure,
        cut_short,
        judged=any(row.judged for row in rows),
    )


def _verdict(rows: "list[EquivRow]", part_seen: str, complete: bool) -> str:
    """Where no limit was broken."""
    judged = sum(row.judged for row in rows)
    kept = f"{judged} of {judged} candidates keep their limits{part_seen}"
    if judged < len(rows):
        others = f"{len(rows) - judged} of {len(rows)} not judged without --max-kld, --max-nmse or --min-top1"
        kept = f"{kept}; {others}" if judged else f"{others}{part_seen}"
    if not complete:
        return f"none, cut short: {kept} so far"
    return f"equivalent: {kept}" if judged else f"none: {kept}"


def _asked(spec: "RunSpec") -> dict[str, object]:
    from rollkv import dual_chunk
    from rollkv.tasks import record

    return record.cache_facts(spec.cache, spec.vram_target) | dual_chunk.facts(spec.config)
