"""Dual chunk attention: what is asked for and what is declared become the rotations of a model's full-attention layers.

The rotations themselves are DualChunk's (config.py). Nothing here goes by the name of a model: `auto` takes what its file or a Hugging Face
configuration declares, and is off where neither does.
"""

from dataclasses import dataclass, replace
from typing import Literal

from rollkv.config import DEFAULT_PAGE_CELLS, DualChunk, ModelConfig, RopeConfig
from rollkv.counts import check_count
from rollkv.errors import UsageError
from rollkv.rope import check_dual_chunks

Mode = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Declared:
    """What a file says of positions. None: nothing."""

    dual_chunk: DualChunk | None = None
    yarn_factor: float | None = None
    yarn_original_context: int | None = None

    def as_dict(self) -> dict[str, object]:
        dual = self.dual_chunk
        return {
            "dca_chunk_cells": None if dual is None else dual.chunk_cells,
            "dca_local_cells": None if dual is None else dual.local_cells,
            "dca_stride_cells": None if dual is None else dual.stride_cells,
            "dca_original_context": None if dual is None else dual.original_context,
            "yarn_factor": self.yarn_factor,
            "yarn_original_context": self.yarn_original_context,
        }


@dataclass(frozen=True)
class DualChunkRequest:
    """What a run asks for. Sizes that are None are those declared, else the default of `on`."""

    mode: Mode = "auto"
    chunk_cells: int | None = None
    local_cells: int | None = None
    original_context: int | None = None
    declared: DualChunk | None = None  # by a Hugging Face configuration; takes the place of what the file declares

    def given(self) -> dict[str, int]:
        """The sizes that were asked for, by option."""
        sizes = {"--dca-chunk": self.chunk_cells, "--dca-local": self.local_cells, "--rope-original-ctx": self.original_context}
        return {option: size for option, size in sizes.items() if size is not None}


def with_dual_chunk(config: ModelConfig, request: DualChunkRequest, page_cells: int = DEFAULT_PAGE_CELLS) -> ModelConfig:
    """The model with the rotations that were asked for. config: as its file describes it (model_config). Layers with a sliding window keep theirs;
    in all others dual chunk attention takes the place of YaRN's interpolation: their frequencies are the unscaled ones.

    Raises UsageError for sizes that cannot be, UnsupportedModelError for heads that are rotated in part only.
    """
    dual = _dual_chunk(config, request, page_cells)
    if dual is None:
        return config
    layers = tuple(
        replace(layer, rope=replace(_unscaled(layer.rope), dual_chunk=dual)) if layer.sliding_window is None else layer
        for layer in config.layers
    )
    changed = replace(config, layers=layers)
    if dual_chunk_of(changed) is None:
        raise UsageError(
            "all layers of this model have sliding windows, so dual chunk attention changes nothing; leave it out with --dca off"
        )
    check_dual_chunks(changed, page_cells)
    return changed


def dual_chunk_of(config: ModelConfig) -> DualChunk | None:
    """The dual chunk attention that the model is computed with."""
    return next((layer.rope.dual_chunk for layer in config.layers if layer.rope.dual_chunk is not None), None)


def yarn_of(config: ModelConfig) -> RopeConfig | None:
    """The rotation of the layers that YaRN stretches."""
    return next((layer.rope for layer in config.layers if layer.rope.scaling == "yarn"), None)


def trained_length(config: ModelConfig) -> int:
    """Cells that the unscaled frequencies were trained for; config: as its file describes it."""
    yarn = yarn_of(config)
    return config.context_length if yarn is None else yarn.original_context


def declared_by(config: ModelConfig) -> Declared:
    """What the model's own file says; config: as that file describes it."""
    yarn = yarn_of(config)
    return (
        Declared(config.declared_dual_chunk) if yarn is None else Declared(config.declared_dual_chunk, yarn.factor, yarn.original_context)
    )


def short_words(config: ModelConfig) -> str:
    """For headings: "DCA off", or "DCA chunk/local"."""
    dual = dual_chunk_of(config)
    return "DCA off" if dual is None else f"DCA {dual.chunk_cells}/{dual.local_cells}"


def facts(config: ModelConfig | None) -> dict[str, object]:
    """For records: flat, and null where it is off, or where nothing is known of a model."""
    dual = None if config is None else dual_chunk_of(config)
    return {
        "dca": None if config is None else "off" if dual is None else "on",
        "dca_chunk_cells": None if dual is None else dual.chunk_cells,
        "dca_local_cells": None if dual is None else dual.local_cells,
        "dca_original_context": None if dual is None else dual.original_context,
    }


def notes(config: ModelConfig, request: DualChunkRequest, changed: ModelConfig, ctx_size: int) -> list[str]:
    """What a user should be told about `changed`, which with_dual_chunk made of the other two, for a context of ctx_size cells."""
    dual = dual_chunk_of(changed)
    if dual is None:
        return []
    said = []
    if _declared(config, request) is None and (request.chunk_cells is None or request.local_cells is None):
        by = f", by the length of {dual.original_context} cells that the model was trained for" if request.chunk_cells is None else ""
        said.append(
            f"nothing declares dual chunk attention: taking a chunk of {dual.chunk_cells} with {dual.local_cells} local cells{by}; "
            "--dca-chunk and --dca-local say otherwise"
        )
    if (yarn := yarn_of(config)) is not None:
        said.append(f"dual chunk attention takes the place of YaRN (factor {yarn.factor:g}): frequencies are the unscaled ones")
    if config.context_length < ctx_size and dual.chunk_cells <= config.context_length:
        said.append(
            f"the context of {ctx_size} cells is longer than the {config.context_length} that the model was trained for: with dual chunk attention "
            f"no key is further away than {dual.chunk_cells} cells"
        )
    return said


def _declared(config: ModelConfig, request: DualChunkRequest) -> DualChunk | None:
    return request.declared or config.declared_dual_chunk


def _dual_chunk(config: ModelConfig, request: DualChunkRequest, page_cells: int) -> DualChunk | None:
    """The sizes that the request comes to; None: off. Where nothing declares them those of the authors' code (ChunkLlama), 3/4 and 1/16 of the
    trained length (so that the one is 1/12 of the other), with the stride rounded down to whole pages."""
    declared = _declared(config, request)
    for option, size in request.given().items():
        check_count(size, option)
        if request.mode == "off":
            raise UsageError(f"{option} {size} is of dual chunk attention, which --dca off leaves out; leave out one of them")
        if request.mode == "auto" and declared is None:
            raise UsageError(f"{option} {size}: nothing declares dual chunk attention, so --dca auto leaves it out; say --dca on")
    if request.mode == "off" or (request.mode == "auto" and declared is None):
        return None
    chunk, local = request.chunk_cells, request.local_cells
    if declared is not None:
        original = request.original_context or declared.original_context
        return DualChunk(chunk or declared.chunk_cells, local or declared.local_cells, original)
    original = request.original_context or trained_length(config)
    if chunk is None:
        local = local or original // 16
        chunk = local + (original * 3 // 4 - local) // page_cells * page_cells
    elif local is None:
        local = chunk - (chunk - chunk // 12) // page_cells * page_cells
    return DualChunk(chunk, local, original)


def _unscaled(rope: RopeConfig) -> RopeConfig:
    """The rotation without YaRN's interpolation and magnitude."""
    return rope if rope.scaling != "yarn" else RopeConfig(rope.dim, rope.style, rope.theta, frequency_factors=rope.frequency_factors)
