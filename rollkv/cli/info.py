"""`rollkv info FILE`: what a model file holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollkv.cli import options
from rollkv.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from rollkv.config import ModelConfig
    from rollkv.gguf_file import GgufFile

_SHOWN_ITEMS = 8
_SHOWN_CHARACTERS = 60
_DUAL_CHUNK_SIZES = (
    ("chunk", "chunk_cells"),
    ("local", "local_cells"),
    ("stride", "stride_cells"),
    ("original context", "original_context"),
)


def info(
    file: Annotated[Path | None, typer.Argument(help="GGUF file, as with -m.")] = None,
    model: options.Model = None,
    hf_config: options.HfConfig = None,
    output: options.Output = "text",
) -> None:
    """Show metadata, tensors by type and memory of a model file, and what it and --hf-config declare of positions."""
    as_json = options.wants_json(output)
    if file is not None and model is not None:
        raise UsageError(f"{file} and -m {model} are both given; give one file")

    from rollkv import report
    from rollkv.dual_chunk import declared_by
    from rollkv.hf_config import read_hf_config
    from rollkv.model_config import model_config
    from rollkv.models import default_model
    from rollkv.synth import open_model

    with open_model(file or model or default_model()) as opened:
        config, reason = None, None
        try:
            config = model_config(opened)
        except UnsupportedModelError as error:
            reason = str(error)
        facts = _facts(opened, config, reason)
        if config is not None:
            facts["declared"] = declared_by(config).as_dict()
            if hf_config is not None:
                facts["declared_by_hf_config"] = read_hf_config(hf_config, config).as_dict()
        elif hf_config is not None:
            raise UnsupportedModelError(f"--hf-config {hf_config}: it is read beside a supported model only; {reason}")
        metadata = {key: _short(value) for key, value in opened.metadata.items()}
    if as_json:
        report.write_json(facts | {"metadata": metadata})
    else:
        report.write_text(_text(facts, metadata))


def _facts(file: "GgufFile", config: "ModelConfig | None", reason: str | None) -> dict[str, Any]:
    types: dict[str, dict[str, int]] = {}
    for tensor in file.tensors.values():
        entry = types.setdefault(tensor.qtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    facts: dict[str, Any] = {
        "path": str(file.path),
        "shards": len(file.shards),
        "file_bytes": file.size_bytes,
        "architecture": file.architecture,
        "file_type": file.file_type,
        "supported": config is not None,
        "unsupported_reason": reason,
        "tensors_by_type": types,
        "weight_bytes": sum(entry["bytes"] for entry in types.values()),
    }
    if config is not None:
        facts |= {
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "context_length": config.context_length,
            "kv_bytes_per_cell_f16": _cell_bytes(config, "f16"),
            "kv_bytes_per_cell": {name: _cell_bytes(config, name) for name in _types_that_fit(config)},
            "sliding_window_layers": sum(layer.sliding_window is not None for layer in config.layers),
        }
    return facts


def _cell_bytes(config: "ModelConfig", name: str) -> int:
    """K and V of one position in all full-attention layers, both of one type."""
    from rollkv.kv_types import KV_TYPES

    layers = [layer for layer in config.layers if layer.sliding_window is None]
    return sum(layer.num_kv_heads * sum(map(KV_TYPES[name].row_bytes, (layer.key_dim, layer.value_dim))) for layer in layers)


def _types_that_fit(config: "ModelConfig") -> list[str]:
    """The cache types that its heads can be held in."""
    from rollkv.kv_types import KV_TYPES

    dims = {dim for layer in config.layers for dim in (layer.key_dim, layer.value_dim)}
    return [name for name, kind in KV_TYPES.items() if not any(dim % kind.divisor for dim in dims)]


def _narrower(cell_bytes: dict[str, int]) -> str:
    """ "q8_0 54.2 KiB, turbo3 20.1 KiB": types that take less than f16, and what a cell takes in them."""
    from rollkv.units import format_size

    return ", ".join(f"{name} {format_size(size)}" for name, size in cell_bytes.items() if size < cell_bytes["f16"])


def _text(facts: dict[str, Any], metadata: dict[str, Any]) -> str:
    from rollkv import report
    from rollkv.units import format_size

    rows = [
        ("file", facts["path"] + (f" and {facts['shards'] - 1} more shards" if facts["shards"] > 1 else "")),
        ("size", format_size(facts["file_bytes"])),
        ("architecture", facts["architecture"] or "not named"),
        ("file type", facts["file_type"]),
        ("supported", "yes" if facts["supported"] else f"no: {facts['unsupported_reason']}"),
    ]
    if facts["supported"]:
        per_cell, trained = facts["kv_bytes_per_cell_f16"], facts["context_length"]
        rows += [
            ("layers", f"{facts['num_layers']}, {facts['sliding_window_layers']} of them with a sliding window"),
            ("hidden size, vocabulary", f"{facts['hidden_size']}, {facts['vocab_size']}"),
            ("KV in f16, full-attention layers", f"{format_size(per_cell)} a cell, {format_size(per_cell * trained)} at {trained} cells"),
            ("the same in fewer bits", _narrower(facts["kv_bytes_per_cell"])),
        ]
        rows += _declared_rows(facts["declared"], "")
        rows += _declared_rows(facts.get("declared_by_hf_config", {}), " in --hf-config")
    types = [(name, str(entry["tensors"]), format_size(entry["bytes"])) for name, entry in sorted(facts["tensors_by_type"].items())]
    types.append(("all", str(sum(entry["tensors"] for entry in facts["tensors_by_type"].values())), format_size(facts["weight_bytes"])))
    keys = [(key, _printable(value)) for key, value in metadata.items()]
    return "\n\n".join(
        (
            report.table(rows),
            report.table(types, ("type", "tensors", "size"), ("left", "right", "right")),
            report.table(keys, ("key", "value"), ("left", "left")),
            "",
        )
    ).removesuffix("\n")


def _declared_rows(declared: dict[str, Any], where: str) -> list[tuple[str, str]]:
    """Lines about dual chunk attention and YaRN; none where nothing was read."""
    if not declared:
        return []
    dual, yarn = "not declared", "not declared"
    if declared["dca_chunk_cells"] is not None:
        dual = ", ".join(f"{name} {declared[f'dca_{key}']}" for name, key in _DUAL_CHUNK_SIZES)
    if declared["yarn_factor"] is not None:
        yarn = f"factor {declared['yarn_factor']:g}, original context {declared['yarn_original_context'] or 'not told'}"
    return [(f"dual chunk attention{where}", dual), (f"YaRN{where}", yarn)]


def _short(value: Any) -> Any:
    """A value as it is, or the length and the first items of a long array."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    items = [item.item() if hasattr(item, "item") else item for item in value[:_SHOWN_ITEMS]]
    return items if len(value) <= _SHOWN_ITEMS else {"length": len(value), "first": items}


def _printable(value: Any) -> str:
    """One line, without characters that could steer a terminal."""
    text = f"{value['length']} items: {value['first']}, ..." if isinstance(value, dict) else str(value)
    clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: 4 * _SHOWN_CHARACTERS])
    return (
        clean if len(clean) <= _SHOWN_CHARACTERS and len(text) == len(text[: 4 * _SHOWN_CHARACTERS]) else clean[:_SHOWN_CHARACTERS] + "..."
    )
