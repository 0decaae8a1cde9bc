"""`rollkv plan`: the memory budget of a run, from the header of the file alone."""

from typing import Annotated

import typer

from rollkv.cli import options
from rollkv.config import DEFAULT_UBATCH


def plan(
    model: options.Model = None,
    ctx_size: options.CtxSize = None,
    vram_target: options.VramTarget = None,
    residency: options.Residency = "auto",
    window: options.Window = None,
    ubatch: options.Ubatch = DEFAULT_UBATCH,
    cache_type_k: options.CacheTypeK = "f16",
    cache_type_v: options.CacheTypeV = "f16",
    output: options.Output = "text",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show how the staging ring was chosen, on stderr.")] = False,
) -> None:
    """Show what a run would hold on the device and in host memory. Touches no device; without -c the model's trained length is planned."""
    as_json = options.wants_json(output)
    cap = options.size_option(vram_target, "--vram-target")

    from rollkv import report
    from rollkv.engine import plan as plan_run
    from rollkv.model_config import model_config
    from rollkv.models import default_model
    from rollkv.synth import open_model
    from rollkv.tasks.generate import cache_config

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
    )
    if cache.ctx_size > config.context_length:
        report.warn(f"a context of {cache.ctx_size} cells is longer than the {config.context_length} that the model was trained for")
    budget = plan_run(path, cache, vram_target=cap)
    if as_json:
        report.write_json({"model": str(path), "ctx_size": cache.ctx_size, "budget": budget.as_dict()})
    else:
        report.write_text(f"{path}, {cache.ctx_size} cells\n{report.budget_table(budget)}\n{report.prediction_line(budget)}\n")
    if verbose:
        report.note(report.ring_line(budget))
