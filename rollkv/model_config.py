"""GGUF metadata -> ModelConfig: the one place where the key names of model files are turned into ours.

Invariant: a ModelConfig that leaves this module describes a model that the forward pass computes exactly. Whatever a file says that
would change the result and is not computed is refused by name; a missing value is an error, with three documented exceptions (KV heads =
heads, tied output matrix, RoPE base 10000). The conventions are llama.cpp's, which writes these files.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np

from rollkv.config import DualChunk, LayerConfig, ModelConfig, RopeConfig
from rollkv.errors import ModelFileError, UnsupportedModelError
from rollkv.gguf_file import GgufFile
from rollkv.gguf_header import show

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class _Family:
    """What the architecture name alone decides."""

    rope_style: Literal["interleaved", "halves"]
    qk_norm: bool = False
    attention_bias: bool = False
    gemma: bool = False  # sandwich norms, gelu, scaled embedding, sliding-window layers


FAMILIES = {
    "llama": _Family("interleaved"),
    "qwen2": _Family("halves", attention_bias=True),
    "qwen3": _Family("halves", qk_norm=True),
    "gemma3": _Family("halves", qk_norm=True, gemma=True),
}

# Keys that change the result when they differ from these values, and that the forward pass does not know.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "use_parallel_residual": (False,),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
_UNUSED_IN_LAYER = re.compile(r"blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")  # frequency tables that older converters kept


class _Keys:
    """Typed access to the keys of one architecture. `owner` names the file in errors."""

    def __init__(self, file: GgufFile) -> None:
        self.metadata = file.metadata
        self.prefix = file.architecture
        self.owner = show(file.path)

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.metadata

    def raw(self, key: str) -> object:
        if not self.has(key):
            raise ModelFileError(f"{self.owner}: the key {self.prefix}.{key} is missing; the file is incomplete, convert the model again")
        return self.metadata[f"{self.prefix}.{key}"]

    def wrong(self, key: str, wanted: str) -> NoReturn:
        value = self.metadata[f"{self.prefix}.{key}"]
        raise ModelFileError(f"{self.owner}: {self.prefix}.{key} is {_brief(value)}, {wanted} was expected; convert the model again")

    def integer(self, key: str, default: int | None = None) -> int:
        """A count of 1 to 2^31 - 1, in any integer type."""
        if default is not None and not self.has(key):
            return default
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            self.wrong(key, "an integer above zero")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        if default is not None and not self.has(key):
            return default
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.wrong(key, "a number above zero")
        return float(value)

    def per_layer(self, key: str, num_layers: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """One integer of 0 to 2^31 - 1 for every layer, from an array of them or from a single one."""
        if default is not None and not self.has(key):
            return default
        value = self.raw(key)
        values = value.tolist() if isinstance(value, np.ndarray) else [value] * num_layers
        if len(values) != num_layers or any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 1 << 31 for v in values):
            self.wrong(key, f"an integer, or an array of {num_layers}, one for each layer,")
        return tuple(values)


def model_config(file: GgufFile) -> ModelConfig:
    """The model that the file describes, after a check that it is whole and can be computed exactly.

    Raises UnsupportedModelError for what rollkv does not compute (architecture, option, head size, tensor type) and ModelFileError for
    missing or contradictory keys and tensors; the message names the file and the key or tensor.
    """
    family = _family(file)
    keys = _Keys(file)
    _refuse_options(keys, file)
    num_layers = keys.integer("block_count")
    if num_layers > len(file.tensors):  # before anything of that length is made
        raise ModelFileError(f"{keys.owner}: {keys.prefix}.block_count is {num_layers}, but the file has only {len(file.tensors)} tensors")
    hidden_size = keys.integer("embedding_length")
    ffn_sizes = set(keys.per_layer("feed_forward_length", num_layers))
    if len(ffn_sizes) > 1 or 0 in ffn_sizes:
        raise UnsupportedModelError(f"{keys.owner}: {keys.prefix}.feed_forward_length differs between layers, which is not supported")
    layers = _layers(keys, family, num_layers, hidden_size, file)
    config = ModelConfig(
        architecture=keys.prefix,
        hidden_size=hidden_size,
        ffn_size=ffn_sizes.pop(),
        vocab_size=_vocab_size(file),
        context_length=keys.integer("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        layers=layers,
        attention_scale=_attention_scale(keys, family, layers, hidden_size),
        activation="gelu_tanh" if family.gemma else "silu",
        # transformers rounds this factor to the type of the weights, llama.cpp keeps it in float32; for float32 weights both agree
        embedding_scale=float(np.sqrt(np.float32(hidden_size))) if family.gemma else 1.0,
        qk_norm=family.qk_norm,
        attention_bias=family.attention_bias or any(re.fullmatch(r"blk\.\d+\.attn_[qkv]\.bias", name) for name in file.tensors),
        post_norms=family.gemma,
        tied_output="output.weight" not in file.tensors,
        name="".join(c for c in _text(file.metadata.get("general.name")) if c.isprintable())[:120],
        declared_dual_chunk=_dual_chunk(keys),
    )
    _check_tensors(config, file)
    return config


def required_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape, (rows, columns) or (columns,), of every tensor that the forward pass reads, in the order of use."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, config.hidden_size)}
    hidden, ffn = config.hidden_size, config.ffn_size
    for index, layer in enumerate(config.layers):
        rows = {"q": layer.num_heads * layer.key_dim, "k": layer.num_kv_heads * layer.key_dim, "v": layer.num_kv_heads * layer.value_dim}
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,)}
        for name, size in rows.items():
            block[f"attn_{name}.weight"] = (size, hidden)
            if config.attention_bias:
                block[f"attn_{name}.bias"] = (size,)
        if config.qk_norm:
            block |= {"attn_q_norm.weight": (layer.key_dim,), "attn_k_norm.weight": (layer.key_dim,)}
        block["attn_output.weight"] = (hidden, layer.num_heads * layer.value_dim)
        if config.post_norms:
            block["post_attention_norm.weight"] = (hidden,)
        block |= {"ffn_norm.weight": (hidden,), "ffn_gate.weight": (ffn, hidden), "ffn_up.weight": (ffn, hidden)}
        block["ffn_down.weight"] = (hidden, ffn)
        if config.post_norms:
            block["post_ffw_norm.weight"] = (hidden,)
        shapes |= {f"blk.{index}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not config.tied_output:
        shapes["output.weight"] = (config.vocab_size, hidden)
    return shapes


def _family(file: GgufFile) -> _Family:
    """Names the kinds of GGUF files that are no language models as what they are."""
    owner, kind, architecture = show(file.path), _text(file.metadata.get("general.type")), file.architecture
    if kind == "imatrix" or "imatrix.chunk_count" in file.metadata:
        raise UnsupportedModelError(f"{owner}: an importance matrix (imatrix), not a language model; name the model itself")
    if kind == "mmproj" or architecture == "clip":
        raise UnsupportedModelError(f"{owner}: a vision or audio projector (mmproj), not a language model; name the model itself")
    if kind == "adapter":
        raise UnsupportedModelError(f"{owner}: a LoRA adapter, not a language model; name a model with the adapter merged")
    if not architecture:
        raise ModelFileError(f"{owner}: the key general.architecture is missing or is no text; convert the model again")
    if architecture not in FAMILIES:
        raise UnsupportedModelError(f"{owner}: the architecture {show(architecture)} is not supported, only {', '.join(FAMILIES)} are")
    return FAMILIES[architecture]


def _refuse_options(keys: _Keys, file: GgufFile) -> None:
    for key, neutral in _NEUTRAL.items():
        if keys.has(key):
            value = keys.raw(key)
            if not isinstance(value, (bool, int, float)) or value not in neutral:
                what = "a mixture of experts" if key == "expert_count" else "an option"
                raise UnsupportedModelError(f"{keys.owner}: {keys.prefix}.{key} is {_brief(value)}: {what} that rollkv does not compute")
    if any("_exps." in name for name in file.tensors):
        raise UnsupportedModelError(f"{keys.owner}: a mixture of experts, which rollkv does not compute for {keys.prefix}")
    if "rope_freqs.weight" in file.tensors and keys.prefix != "llama":
        raise UnsupportedModelError(f"{keys.owner}: the tensor rope_freqs.weight is not supported for {keys.prefix}, only for llama")


def _layers(keys: _Keys, family: _Family, num_layers: int, hidden_size: int, file: GgufFile) -> tuple[LayerConfig, ...]:
    heads = keys.per_layer("attention.head_count", num_layers)
    kv_heads = keys.per_layer("attention.head_count_kv", num_layers, default=heads)
    for index, (num_heads, num_kv_heads) in enumerate(zip(heads, kv_heads, strict=True)):
        if not num_heads or not num_kv_heads:
            raise UnsupportedModelError(f"{keys.owner}: layer {index} has {num_heads} heads and {num_kv_heads} KV heads, so no attention")
        if num_heads % num_kv_heads:
            raise ModelFileError(
                f"{keys.owner}: layer {index} has {num_heads} heads, which is not a multiple of its {num_kv_heads} KV heads"
            )
    key_dim, value_dim = (_head_dim(keys, key, hidden_size, heads) for key in ("attention.key_length", "attention.value_length"))
    rope = _rope(keys, family, key_dim, file)
    windows = _sliding_windows(keys, family, num_layers)
    for key, full in [("key_length_swa", key_dim), ("value_length_swa", value_dim)]:
        if keys.integer(f"attention.{key}", full) != full:
            raise UnsupportedModelError(f"{keys.owner}: {keys.prefix}.attention.{key} differs from {full}, which is not supported")
    if keys.integer("rope.dimension_count_swa", rope.dim) != rope.dim:
        raise UnsupportedModelError(f"{keys.owner}: {keys.prefix}.rope.dimension_count_swa differs from {rope.dim}, which is not supported")
    local = RopeConfig(dim=rope.dim, style=rope.style, theta=keys.number("rope.freq_base_swa", 10000.0))
    return tuple(
        LayerConfig(heads[i], kv_heads[i], key_dim, value_dim, rope if windows[i] is None else local, windows[i]) for i in range(num_layers)
    )


def _head_dim(keys: _Keys, key: str, hidden_size: int, heads: tuple[int, ...]) -> int:
    if not keys.has(key) and (len(set(heads)) > 1 or hidden_size % heads[0]):
        keys.raw(key)  # there is no default to fall back on: the missing key is the error
    size = keys.integer(key, hidden_size // heads[0])
    if size % 16 or size > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"{keys.owner}: head size {size} ({keys.prefix}.{key}) is not supported, only multiples of 16 up to {MAX_HEAD_DIM} are"
        )
    return size


def _rope(keys: _Keys, family: _Family, key_dim: int, file: GgufFile) -> RopeConfig:
    dim = keys.integer("rope.dimension_count", key_dim)
    if dim % 2 or dim > key_dim:
        keys.wrong("rope.dimension_count", f"an even number up to the head size {key_dim}")
    theta = keys.number("rope.freq_base", 10000.0)
    factors = _frequency_factors(file, dim) if "rope_freqs.weight" in file.tensors else None
    factor_key = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
    kind = _text(keys.raw("rope.scaling.type")) if keys.has("rope.scaling.type") else "linear" if keys.has(factor_key) else "none"
    magnitude = keys.number("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{keys.owner}: {keys.prefix}.rope.scaling.type is {show(kind)}, only none, linear and yarn are supported"
        )
    if kind != "yarn" and magnitude != 1.0:
        raise UnsupportedModelError(
            f"{keys.owner}: {keys.prefix}.rope.scaling.attn_factor is {magnitude} with scaling type {kind}, supported with yarn only"
        )
    if kind == "none":
        return RopeConfig(dim, family.rope_style, theta, frequency_factors=factors)
    factor = keys.number(factor_key if keys.has(factor_key) else "rope.scaling.factor")
    if kind == "linear":
        scaling: Literal["none", "linear"] = "none" if factor == 1.0 else "linear"
        return RopeConfig(dim, family.rope_style, theta, scaling, factor, frequency_factors=factors)
    return RopeConfig(
        dim,
        family.rope_style,
        theta,
        "yarn",
        factor,
        original_context=keys.integer("rope.scaling.original_context_length"),
        attention_factor=magnitude,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        frequency_factors=factors,
    )


def _dual_chunk(keys: _Keys) -> DualChunk | None:
    """What the file says of dual chunk attention: all of it or nothing. No converter writes it yet (gguf-py has no such keys), so the names are ours."""
    names = [f"attention.dual_chunk.{name}" for name in ("chunk_size", "local_size", "original_context_length")]
    return DualChunk(*map(keys.integer, names)) if any(map(keys.has, names)) else None


def _frequency_factors(file: GgufFile, dim: int) -> tuple[float, ...]:
    """The divisors that stretch each rotary frequency (llama-3): dim/2 values of float32."""
    tensor = file.tensor("rope_freqs.weight")
    if tensor.qtype != "F32" or tensor.shape != (dim // 2,):
        raise ModelFileError(f"{tensor.file}: rope_freqs.weight is {tensor.qtype} {tensor.shape}, F32 ({dim // 2},) was expected")
    factors = np.frombuffer(tensor.raw.tobytes(), "<f4")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelFileError(f"{tensor.file}: rope_freqs.weight holds values that are not above zero; the file is damaged, get it again")
    return tuple(factors.tolist())


def _sliding_windows(keys: _Keys, family: _Family, num_layers: int) -> list[int | None]:
    """The number of visible cells of every layer, None for all of them. gemma3: all but every sixth layer have a window."""
    key = "attention.sliding_window"
    if not family.gemma:
        window = keys.per_layer(key, 1)[0] if keys.has(key) else 0
        if 0 < window < keys.integer("context_length"):
            raise UnsupportedModelError(f"{keys.owner}: {keys.prefix}.{key} is {window}: sliding windows are supported for gemma3 only")
        return [None] * num_layers
    window = keys.integer(key)
    pattern_key = "attention.sliding_window_pattern"
    pattern = keys.raw(pattern_key) if keys.has(pattern_key) else 6
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != np.bool_ or len(pattern) != num_layers:
            keys.wrong(pattern_key, f"a number, or {num_layers} bools,")
        is_local = pattern.tolist()
    else:
        period = keys.integer(pattern_key, 6)
        is_local = [index % period != period - 1 for index in range(num_layers)]
    return [window if local else None for local in is_local]


def _attention_scale(keys: _Keys, family: _Family, layers: tuple[LayerConfig, ...], hidden_size: int) -> float:
    """1/sqrt(head size); the gemma3 of 27B (known by its 62 layers) was trained with 1/sqrt(hidden / heads) instead."""
    base = hidden_size // layers[0].num_heads if family.gemma and len(layers) == 62 else layers[0].key_dim
    scale = 1.0 / math.sqrt(base)
    stated = keys.raw("attention.scale") if keys.has("attention.scale") else 0
    if not isinstance(stated, (int, float)) or (stated != 0 and not math.isclose(stated, scale, rel_tol=1e-6)):
        raise UnsupportedModelError(f"{keys.owner}: {keys.prefix}.attention.scale is {_brief(stated)}, only {scale:.7g} is supported here")
    return scale


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding; the tokenizer may name fewer tokens (padded matrices), never more."""
    shape = file.tensor("token_embd.weight").shape
    if len(shape) != 2:
        raise ModelFileError(f"{show(file.path)}: token_embd.weight has the shape {shape}, (vocabulary, hidden size) was expected")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > shape[0]:
        raise ModelFileError(f"{show(file.path)}: the tokenizer has {len(tokens)} tokens, token_embd.weight only {shape[0]} rows")
    return shape[0]


def _check_tensors(config: ModelConfig, file: GgufFile) -> None:
    """Every tensor of the forward pass is there, in its shape and in a supported type; none is there that would change the result."""
    required = required_tensors(config)
    stems = {name.rpartition(".")[0] for name in required} | {"output", "token_embd_norm", "position_embd"}
    for name in file.tensors:
        if name in required or _UNUSED_IN_LAYER.fullmatch(name):
            continue
        if name.startswith("blk.") or name.rpartition(".")[0] in stems:
            raise UnsupportedModelError(
                f"{show(file.path)}: the tensor {show(name)} is not part of a {config.architecture} model of {config.num_layers} layers as "
                "rollkv computes it"
            )
    for name, shape in required.items():
        tensor = file.tensor(name)
        if tensor.shape != shape:
            raise ModelFileError(f"{tensor.file}: the tensor {name} has the shape {tensor.shape}, {shape} was expected")


def _text(value: object) -> str:
    """A text value; anything else (absent, a number) as the nearest text that matches nothing."""
    return value if isinstance(value, str) else "" if value is None else _brief(value)


def _brief(value: object) -> str:
    return f"an array of {len(value)}" if isinstance(value, (list, np.ndarray)) else show(repr(value))
