"""What a Hugging Face `config.json` says of positions: dual chunk attention, which GGUF files of such models do not tell, and YaRN."""

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from rollkv.config import DualChunk, ModelConfig
from rollkv.dual_chunk import Declared, trained_length
from rollkv.errors import ModelFileError, UsageError
from rollkv.gguf_header import show

MAX_BYTES = 1 << 20
_SECTION, _ORIGINAL = "dual_chunk_attention_config", "original_max_position_embeddings"
# The model_type of what converters write as each architecture.
MODEL_TYPES = {"llama": ("llama", "mistral"), "qwen2": ("qwen2",), "qwen3": ("qwen3",), "gemma3": ("gemma3", "gemma3_text")}

Fields = dict[str, Any]


def read_hf_config(path: Path, config: ModelConfig) -> Declared:
    """The document at `path`, which is to be of this model. The original context is the trained length where it does not tell.

    Raises UsageError for a file that cannot be read, ModelFileError for one that is no JSON object, lacks a value or has a wrong one, or is of
    another model as far as it tells.
    """
    fields = _document(path)
    document = _Document(show(path), fields)
    document.check_model(config)
    dual = None
    if (section := document.section(fields, _SECTION)) is not None:
        chunk, local = (document.count(section, name) for name in ("chunk_size", "local_size"))
        original = section if _ORIGINAL in section else fields
        dual = DualChunk(chunk, local, document.count(original, _ORIGINAL) if _ORIGINAL in original else trained_length(config))
    scaling = document.section(fields, "rope_scaling") or document.section(fields, "rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return Declared(dual)
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < inf:
        document.wrong("factor of yarn", factor, "a number above zero")
    return Declared(dual, float(factor), document.count(scaling, _ORIGINAL) if _ORIGINAL in scaling else None)


def hf_dual_chunk(path: Path, config: ModelConfig) -> DualChunk:
    """What it declares of dual chunk attention. Raises ModelFileError when that is nothing, and as read_hf_config."""
    dual = read_hf_config(path, config).dual_chunk
    if dual is None:
        raise ModelFileError(f"{show(path)}: it has no {_SECTION}, so it declares no dual chunk attention; leave out --hf-config")
    return dual


def _document(path: Path) -> Fields:
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--hf-config {path}: cannot read it: {error.strerror or error}; name the config.json of the model") from error
    if len(data) > MAX_BYTES:
        raise ModelFileError(f"{show(path)}: larger than {MAX_BYTES} bytes, which no config.json is; name the config.json of the model")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{show(path)}: not JSON: {error}; name the config.json of the model") from error
    if not isinstance(fields, dict):
        raise ModelFileError(f"{show(path)}: no JSON object; name the config.json of the model")
    return fields


@dataclass(frozen=True)
class _Document:
    """Typed access. `owner` names the file in errors."""

    owner: str
    fields: Fields

    def check_model(self, config: ModelConfig) -> None:
        kind, advice = self.fields.get("model_type"), "give the config.json of this model"
        if kind is not None and kind not in MODEL_TYPES[config.architecture]:
            raise ModelFileError(f"{self.owner}: model_type is {_brief(kind)}, but the model file is {config.architecture}; {advice}")
        sizes = {
            "hidden_size": {config.hidden_size},
            "num_hidden_layers": {config.num_layers},
            "num_attention_heads": {layer.num_heads for layer in config.layers},
            "num_key_value_heads": {layer.num_kv_heads for layer in config.layers},
        }
        for name, ours in sizes.items():
            theirs = self.fields.get(name)
            if theirs is not None and sorted(ours) != [theirs]:
                told = ", ".join(map(str, sorted(ours)))
                raise ModelFileError(f"{self.owner}: {name} is {_brief(theirs)}, but {told} in the model file; {advice}")

    def section(self, fields: Fields, name: str) -> Fields | None:
        value = fields.get(name)
        if value is not None and not isinstance(value, dict):
            self.wrong(name, value, "an object")
        return value

    def count(self, fields: Fields, name: str) -> int:
        if name not in fields:
            raise ModelFileError(f"{self.owner}: {name} is missing in {_SECTION}; give the whole config.json of the model")
        value = fields[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            self.wrong(name, value, "a whole number above zero")
        return value

    def wrong(self, name: str, value: object, wanted: str) -> NoReturn:
        raise ModelFileError(
            f"{self.owner}: {name} is {_brief(value)}, {wanted} was expected; give the config.json of the model as it was published"
        )


def _brief(value: object) -> str:
    return show(repr(value)[:80])
