"""`rollkv needle`: whether a sentence planted anywhere in a long text is found again, wherever its cells lie."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollkv.cli import options, positions, results
from rollkv.config import DEFAULT_UBATCH
from rollkv.errors import RollkvError, UsageError
from rollkv.whole_file import check_place

if TYPE_CHECKING:
    from rollkv.config import CacheConfig
    from rollkv.engine import Engine
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.haystack import NeedleRequest

_SHOWS = (
    "A found needle shows that attention reached its cells, in the window or in the tail. It does not show that all other cells counted as\n"
    "they should, nor that long answers stay good: 'rollkv logit-equiv' compares every logit of a windowed run with the resident one."
)


def needle(
    model: options.Model = None,
    lengths: Annotated[str, typer.Option(metavar="LIST", help="Cells of prompt and reply together, such as 1k,4k,16k.")] = "1k,2k,4k",
    depths: Annotated[str, typer.Option(metavar="LIST", help="Where the needle stands in the text, in percent.")] = "0,25,50,75,100",
    style: Annotated[
        str,
        typer.Option(metavar="completion|chat", help="Let the model complete the needle's sentence, or ask for it with the chat template."),
    ] = "completion",
    seed: Annotated[int, typer.Option(help="Seed of keys, values and the order of the text; the same seed gives the same prompts.")] = 0,
    n_predict: Annotated[
        int | None, typer.Option("-n", "--n-predict", metavar="TOKENS", help="Room for the reply. Default: the answer and a few tokens.")
    ] = None,
    needle: Annotated[str | None, typer.Option(metavar="TEXT", help="Plant this sentence instead of a random one; needs --answer.")] = None,
    answer: Annotated[str | None, typer.Option(metavar="TEXT", help="What the reply must hold.")] = None,
    question: Annotated[
        str | None, typer.Option(metavar="TEXT", help="End of the prompt. Default: the needle's sentence up to the answer.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append JSON lines here; cells that it holds already are not run again.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the grid (PNG, SVG or PDF); needs matplotlib.")] = None,
    ctx_size: options.CtxSize = None,
    vram_target: options.VramTarget = None,
    residency: options.Residency = "auto",
    window: options.Window = None,
    ubatch: options.Ubatch = DEFAULT_UBATCH,
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
    output: Annotated[str, typer.Option("-o", "--output", metavar="text|json|jsonl", help="Form of the result on stdout.")] = "text",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the budget on stderr.")] = False,
) -> None:
    """Plant a random number in prose of several lengths, at several depths, and ask for it. Lengths are counted by the model's tokenizer on
    the whole prompt. Exit code 1 when a needle is missed. One load of the model, for the longest length, serves the grid."""
    options.check_form(output, results.FORMS)
    options.check_machine(backend, device)
    cap = options.size_option(vram_target, "--vram-target")
    if out is not None:
        check_place(out, f"--out {out}")

    from rollkv import plots, report
    from rollkv.counts import parse_counts, parse_percentages
    from rollkv.dual_chunk import short_words
    from rollkv.engine import Engine
    from rollkv.kv_formats import check_kv_types, kv_words
    from rollkv.models import default_model
    from rollkv.startup import load
    from rollkv.tasks import generate as task
    from rollkv.tasks.haystack import NeedleRequest, check_request

    if plot is not None:
        plots.check(plot)
    sizes = parse_counts(lengths, "--lengths")
    request = NeedleRequest(sizes, parse_percentages(depths, "--depths"), style, seed, n_predict, needle, answer, question)  # type: ignore[arg-type]
    opened = task.open_text_model(model or default_model())
    for message in opened.tokenizer.warnings:
        report.warn(message)
    check_request(opened, request)
    if ctx_size is not None and ctx_size < max(sizes):
        raise UsageError(f"--ctx-size {ctx_size} is shorter than the longest of --lengths, {max(sizes)}; raise it or leave it out")
    cache = task.cache_config(
        ctx_size or max(sizes),
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
    check_kv_types(config, cache)

    def open_engine() -> Engine:
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
            )
        if verbose:
            report.note(f"{engine.backend_name} backend, {kv_words(cache)}\n{report.budget_table(engine.budget)}")
        return engine

    with report.bytes_progress("making the tail") as making:
        rows, cut_short = _run(opened, request, _identity(opened, request, cache, cap, backend), out, open_engine)

    def draw() -> None:
        if plot is not None:
            plots.needle_grid(rows, plot, f"{opened.path.name}, {style}, {kv_words(cache)}, {short_words(opened.config)}")

    _finish(opened, kv_words(cache), rows, output, cut_short, draw)


def _run(
    model: "TextModel", request: "NeedleRequest", identity: dict[str, object], out: Path | None, open_engine: "Callable[[], Engine]"
) -> tuple[list[Mapping[str, Any]], RollkvError | None]:
    """(rows in the order of the grid, what ended the run early). Cells that `out` holds are taken from there; new ones go there at once."""
    from rollkv import report
    from rollkv.tasks import needle as task
    from rollkv.tasks import record

    same = {key: value for key, value in identity.items() if key != "model"}  # where the file lies does not matter
    finished, broken = task.read_finished(out, same, request) if out is not None else ({}, 0)
    if broken:
        report.warn(f"{out}: {broken} lines are not rows of this program and are left alone")
    cells = task.grid(request)
    todo = [cell for cell in cells if cell not in finished]
    rows: dict[task.Cell, Mapping[str, Any]] = {cell: finished[cell] for cell in cells if cell in finished}
    if rows:
        report.note(f"{len(rows)} of {len(cells)} cells are taken from {out}")

    def new_rows() -> Generator[dict[str, Any], None, None]:
        if not todo:
            return
        with open_engine() as engine, task.appending(out) as append:
            machine = record.machine_facts(engine)
            for row in task.run_cells(engine, model, request, todo, _progress):
                full = identity | machine | row.as_dict() | {"utc_time": record.utc_time()}
                append(record.json_line(full))
                report.note(f"{row.length_asked} cells, depth {row.depth_asked:g} %: {row.outcome}")
                yield full

    found, cut_short = results.collect(new_rows())
    rows |= {(row["length_asked"], row["depth_asked"]): row for row in found}
    for cell in cells:
        if cell not in rows:
            rows[cell] = identity | record.machine_facts(None) | task.not_run(request, cell).as_dict() | {"utc_time": record.utc_time()}
    return [rows[cell] for cell in cells], cut_short


def _progress(cell: tuple[int, float]) -> Any:
    from rollkv import report

    return report.PhaseProgress(f"{cell[0]} cells, depth {cell[1]:g} %")


def _identity(model: "TextModel", request: "NeedleRequest", cache: "CacheConfig", cap: int | None, backend: str) -> dict[str, object]:
    """What a stored row must share with this run to stand for one of its cells."""
    from rollkv import dual_chunk
    from rollkv.tasks import record

    facts = record.model_facts(model.path).as_dict()
    own = {"own_needle": request.needle, "own_answer": request.answer, "own_question": request.question}
    asked = {
        "backend_asked": backend,
        "seed": request.seed,
        "style": request.style,
        "reply_asked": request.reply_tokens,
        "temperature": 0.0,
    }
    return record.source_facts("needle") | facts | record.cache_facts(cache, cap) | dual_chunk.facts(model.config) | asked | own


def _finish(
    model: "TextModel", kv: str, rows: list[Mapping[str, Any]], output: str, cut_short: RollkvError | None, draw: Callable[[], None]
) -> None:
    from rollkv import report
    from rollkv.dual_chunk import short_words
    from rollkv.tasks import needle as task

    passed, shown = task.verdict(rows)
    headers, lines = task.heatmap(rows)
    first = rows[0]
    text = "\n".join(
        (
            f"{model.path.name}, {first['style']} style, seed {first['seed']}, {kv}, {short_words(model.config)}, lengths in cells\n",
            report.table(lines, headers, ("right", *["left"] * (len(headers) - 1))),
            *(["* in the streamed tail, at least in part"] if any(row["place"] in ("tail", "both") for row in rows) else []),
            f"\n{shown}",
            f"\n{_SHOWS}\n",
        )
    )
    summary = {"shows": _SHOWS.replace("\n", " "), **task.score(rows).as_dict()}
    missed = any(row["outcome"] == "missed" for row in rows)
    failure = _failure(rows) if missed or not (passed or cut_short) else None
    results.finish(output, text, rows, summary, failure, cut_short, draw)


def _failure(rows: list[Mapping[str, Any]]) -> str:
    from rollkv.tasks.needle import score

    total = score(rows)
    if not total.scored:
        return f"no needle could be scored: {total.cut_off} of {len(rows)} replies were cut off; raise --n-predict"
    missed = [f"{row['length_asked']} cells at depth {row['depth_asked']:g} %" for row in rows if row["outcome"] == "missed"]
    return f"{total.missed} of {total.scored} needles were missed: {', '.join(missed[:5])}{', ...' if len(missed) > 5 else ''}; compare with a resident run"
