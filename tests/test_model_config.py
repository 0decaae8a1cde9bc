"""Metadata -> ModelConfig: the fixtures' values by hand, every default, and the refusal of what would change the result."""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import damaged_gguf as make
from rollkv.config import DualChunk, LayerConfig, ModelConfig, RopeConfig
from rollkv.errors import ModelFileError, RollkvError, UnsupportedModelError
from rollkv.gguf_file import open_gguf
from rollkv.model_config import FAMILIES, model_config, required_tensors

FIXTURES = Path(__file__).parent / "fixtures"
REAL_MODELS = Path(os.environ.get("ROLLKV_MODELS", Path.home() / ".cache/rollkv/models"))
Keys = Mapping[str, bytes | None]
F32, U32, STRING = make.F32, make.U32, make.STRING


def fixture_config(name: str) -> ModelConfig:
    with open_gguf(FIXTURES / f"{name}.gguf") as file:
        return model_config(file)


def tiny_config(
    tmp_path: Path, keys: Keys | None = None, tensors: Mapping[str, np.ndarray | None] | None = None, **changes: Any
) -> ModelConfig:
    path = tmp_path / "model.gguf"
    path.write_bytes(make.model(keys, tensors, **changes))
    with open_gguf(path) as file:
        return model_config(file)


def layers_base(num_layers: int, kv_heads: tuple[int, ...] = (make.KV_HEADS,)) -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    keys = make.tiny_keys() | {"llama.block_count": make.scalar(U32, num_layers)}
    return keys, make.tiny_tensors(num_layers, kv_heads)


def gemma_base(num_layers: int) -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    keys = make.tiny_keys("gemma3") | {
        "gemma3.block_count": make.scalar(U32, num_layers),
        "gemma3.attention.sliding_window": make.scalar(U32, 20),
        "gemma3.rope.freq_base": make.scalar(F32, 1e6),
    }
    tensors = make.tiny_tensors(num_layers)
    for i in range(num_layers):
        tensors |= {f"blk.{i}.attn_{name}_norm.weight": np.ones(make.HEAD_DIM, np.float32) for name in "qk"}
        tensors |= {f"blk.{i}.post_{name}_norm.weight": np.ones(make.HIDDEN, np.float32) for name in ("attention", "ffw")}
    return keys, tensors


def test_llama_fixture() -> None:
    config = fixture_config("llama")
    factors = config.layers[0].rope.frequency_factors
    assert factors is not None and len(factors) == 8
    assert factors[0] == 1.0 and factors[3:] == (8.0,) * 5 and 1.0 < factors[1] < factors[2] < 8.0
    rope = RopeConfig(16, "interleaved", 10000.0, frequency_factors=factors)
    assert config == ModelConfig(
        "llama", 64, 80, 512, 2048, float(np.float32(1e-5)), (LayerConfig(4, 2, 16, 16, rope),) * 2, 0.25, "silu", name="tiny-llama"
    )


def test_mistral_fixture() -> None:
    config = fixture_config("mistral")
    rope = RopeConfig(32, "interleaved", 1e6)
    assert config == ModelConfig(
        "llama",
        64,
        96,
        512,
        2048,
        float(np.float32(1e-5)),
        (LayerConfig(4, 1, 32, 32, rope),) * 2,
        1 / math.sqrt(32),
        "silu",
        name="tiny-mistral",
    )


def test_qwen_fixtures() -> None:
    common: dict[str, Any] = {
        "activation": "silu",
        "tied_output": True,
        "rms_norm_eps": float(np.float32(1e-6)),
        "context_length": 2048,
        "vocab_size": 512,
    }
    layer = LayerConfig(4, 2, 16, 16, RopeConfig(16, "halves", 10000.0))
    assert fixture_config("qwen2") == ModelConfig(
        "qwen2", 64, 80, layers=(layer,) * 2, attention_scale=0.25, attention_bias=True, name="tiny-qwen2", **common
    )
    layer = LayerConfig(4, 2, 32, 32, RopeConfig(32, "halves", 1e6))
    assert fixture_config("qwen3") == ModelConfig(
        "qwen3", 64, 96, layers=(layer,) * 3, attention_scale=1 / math.sqrt(32), qk_norm=True, name="tiny-qwen3", **common
    )


def test_gemma3_fixture() -> None:
    config = fixture_config("gemma3")
    local = LayerConfig(4, 1, 32, 32, RopeConfig(32, "halves", 1e4), 32)
    full = LayerConfig(4, 1, 32, 32, RopeConfig(32, "halves", 1e6))
    assert config.layers == (local, local, local, local, local, full, local)
    assert config.embedding_scale == 8.0
    assert config.attention_scale == 1 / math.sqrt(32)
    assert (config.qk_norm, config.post_norms, config.attention_bias, config.tied_output) == (True, True, False, True)
    assert config.activation == "gelu_tanh"


def test_real_models() -> None:
    smollm, gemma = REAL_MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf", REAL_MODELS / "gemma-3-270m-q4_k_m.gguf"
    if not smollm.exists() or not gemma.exists():
        pytest.skip("the two real models are not there")
    with open_gguf(smollm) as file:
        config = model_config(file)
        assert required_tensors(config).keys() == file.tensors.keys()
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.context_length) == (30, 576, 49152, 8192)
    assert set(config.layers) == {LayerConfig(9, 3, 64, 64, RopeConfig(64, "interleaved", 1e5))}
    with open_gguf(gemma) as file:
        config = model_config(file)
        assert required_tensors(config).keys() == file.tensors.keys()
        tokens = file.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list) and len(tokens) == 262144
    assert [i for i, layer in enumerate(config.layers) if layer.sliding_window is None] == [5, 11, 17]
    assert config.embedding_scale == float(np.float32(math.sqrt(640)))
    assert config.attention_scale == 1 / 16


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_required_tensors_are_those_of_the_file(name: str) -> None:
    with open_gguf(FIXTURES / f"{name}.gguf") as file:
        required = required_tensors(model_config(file))
        assert required == {key: tensor.shape for key, tensor in file.tensors.items() if key != "rope_freqs.weight"}


def test_documented_defaults(tmp_path: Path) -> None:
    square = {f"blk.0.attn_{name}.weight": np.zeros((32, 32), np.float32) for name in "kv"}
    config = tiny_config(tmp_path, {"llama.attention.head_count_kv": None}, square)
    assert config.layers == (LayerConfig(2, 2, 16, 16, RopeConfig(16, "interleaved", 10000.0)),)
    assert config.tied_output
    untied = tiny_config(tmp_path, tensors={"output.weight": np.zeros((make.VOCAB, make.HIDDEN), np.float32)})
    assert not untied.tied_output
    assert required_tensors(untied).keys() - required_tensors(config).keys() == {"output.weight"}


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_what_has_no_default_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelFileError, match=f"the key llama.{key} is missing"):
        tiny_config(tmp_path, {f"llama.{key}": None})


@pytest.mark.parametrize("kind", [make.U8, make.I8, make.U16, make.I16, make.U32, make.I32, make.U64, make.I64])
def test_any_integer_type_is_an_integer(tmp_path: Path, kind: int) -> None:
    names = {"block_count": 1, "embedding_length": make.HIDDEN, "attention.head_count": make.HEADS, "feed_forward_length": make.FFN}
    keys: Keys = {f"llama.{name}": make.scalar(kind, value) for name, value in names.items()}
    assert tiny_config(tmp_path, keys) == tiny_config(tmp_path)


@pytest.mark.parametrize(
    "key, value",
    [
        ("block_count", make.scalar(STRING, "1")),
        ("block_count", make.scalar(F32, 1.0)),
        ("block_count", make.scalar(make.BOOL, True)),
        ("block_count", make.scalar(U32, 0)),
        ("block_count", make.scalar(make.I32, -1)),
        ("embedding_length", make.scalar(make.U64, 1 << 40)),
        ("attention.head_count", make.array(U32, [2, 2])),
        ("attention.head_count_kv", make.array(F32, [1.0])),
        ("attention.layer_norm_rms_epsilon", make.scalar(F32, math.nan)),
        ("attention.layer_norm_rms_epsilon", make.scalar(F32, 0.0)),
        ("rope.freq_base", make.scalar(F32, math.inf)),
        ("rope.dimension_count", make.scalar(U32, 15)),
        ("rope.dimension_count", make.scalar(U32, 18)),
        ("rope.scaling.factor", make.scalar(F32, -2.0)),
    ],
)
def test_wrong_values_name_the_key(tmp_path: Path, key: str, value: bytes) -> None:
    with pytest.raises(ModelFileError, match=f"llama.{key} is .* was expected"):
        tiny_config(tmp_path, {f"llama.{key}": value})


def test_more_layers_than_tensors_is_refused_before_they_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="block_count is 2147483647, but the file has only 11 tensors"):
        tiny_config(tmp_path, {"llama.block_count": make.scalar(U32, (1 << 31) - 1)})


def test_kv_heads_for_each_layer(tmp_path: Path) -> None:
    key = "llama.attention.head_count_kv"
    config = tiny_config(tmp_path, {key: make.array(make.I32, [2, 1, 2])}, base=layers_base(3, (2, 1, 2)))
    assert [layer.num_kv_heads for layer in config.layers] == [2, 1, 2]
    assert [layer.group for layer in config.layers] == [1, 2, 1]
    with pytest.raises(UnsupportedModelError, match="layer 1 has 2 heads and 0 KV heads"):
        tiny_config(tmp_path, {key: make.array(U32, [2, 0, 2])}, base=layers_base(3, (2, 1, 2)))
    with pytest.raises(ModelFileError, match="layer 0 has 2 heads, which is not a multiple of its 3 KV heads"):
        tiny_config(tmp_path, {key: make.scalar(U32, 3)})


def test_key_and_value_sizes_of_their_own(tmp_path: Path) -> None:
    keys: Keys = {"llama.attention.key_length": make.scalar(U32, 48), "llama.attention.value_length": make.scalar(U32, 80)}
    rows = {"q": (2 * 48, 32), "k": (48, 32), "v": (80, 32), "output": (32, 2 * 80)}
    config = tiny_config(tmp_path, keys, {f"blk.0.attn_{name}.weight": np.zeros(shape, np.float32) for name, shape in rows.items()})
    assert (config.layers[0].key_dim, config.layers[0].value_dim, config.layers[0].rope.dim) == (48, 80, 48)
    assert config.attention_scale == 1 / math.sqrt(48)


@pytest.mark.parametrize("size", [8, 24, 100, 272, 512])
def test_head_sizes_out_of_range_are_named(tmp_path: Path, size: int) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"head size {size} \(llama.attention.key_length\) is not supported, only multiples of 16"
    ):
        tiny_config(tmp_path, {"llama.attention.key_length": make.scalar(U32, size)})


def scaled(tmp_path: Path, **scaling: bytes) -> RopeConfig:
    return tiny_config(tmp_path, {"llama.rope." + key.replace("__", "."): value for key, value in scaling.items()}).layers[0].rope


def test_rope_scaling(tmp_path: Path) -> None:
    plain = RopeConfig(16, "interleaved")
    four = make.scalar(F32, 4.0)
    linear = dataclasses.replace(plain, scaling="linear", factor=4.0)
    assert scaled(tmp_path, scaling__type=make.scalar(STRING, "none"), scaling__factor=four) == plain
    assert scaled(tmp_path, scaling__type=make.scalar(STRING, "linear"), scaling__factor=four) == linear
    assert scaled(tmp_path, scaling__factor=four) == linear
    assert scaled(tmp_path, scale_linear=four) == linear
    assert scaled(tmp_path, scale_linear=make.scalar(F32, 1.0)) == plain
    assert scaled(tmp_path, freq_base=make.scalar(F32, 5e5), dimension_count=make.scalar(U32, 8)) == RopeConfig(8, "interleaved", 5e5)
    yarn = {
        "scaling__type": make.scalar(STRING, "yarn"),
        "scaling__factor": four,
        "scaling__original_context_length": make.scalar(U32, 32768),
    }
    expected = dataclasses.replace(plain, scaling="yarn", factor=4.0, original_context=32768)
    assert scaled(tmp_path, **yarn) == expected
    more = {"attn_factor": 0.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    assert scaled(tmp_path, **yarn, **{f"scaling__{key}": make.scalar(F32, value) for key, value in more.items()}) == dataclasses.replace(
        expected, attention_factor=0.5, beta_fast=16.0, beta_slow=2.0
    )


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"type": make.scalar(STRING, "longrope")}, "rope.scaling.type is longrope, only none, linear and yarn"),
        ({"type": make.scalar(STRING, "linear")}, "rope.scaling.factor is missing"),
        ({"type": make.scalar(STRING, "yarn"), "factor": make.scalar(F32, 4)}, "rope.scaling.original_context_length is missing"),
        ({"attn_factor": make.scalar(F32, 1.2)}, "rope.scaling.attn_factor is 1.2000.* with scaling type none"),
        ({"yarn_log_multiplier": make.scalar(F32, 0.1)}, "rope.scaling.yarn_log_multiplier is 0.1000"),
        ({"yarn_ext_factor": make.scalar(F32, 0.5)}, "rope.scaling.yarn_ext_factor is 0.5"),
    ],
)
def test_rope_scaling_that_is_not_computed_is_refused(tmp_path: Path, scaling: Keys, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        tiny_config(tmp_path, {f"llama.rope.scaling.{key}": value for key, value in scaling.items()})


DUAL_CHUNK = {"chunk_size": 4096, "local_size": 1024, "original_context_length": 2048}


def test_dual_chunk_attention_is_declared_in_three_keys(tmp_path: Path) -> None:
    keys: Keys = {f"llama.attention.dual_chunk.{key}": make.scalar(U32, value) for key, value in DUAL_CHUNK.items()}
    config = tiny_config(tmp_path, keys)
    assert config.declared_dual_chunk == DualChunk(4096, 1024, 2048) and config.declared_dual_chunk.stride_cells == 3072
    assert config.layers[0].rope.dual_chunk is None, "what is declared is not yet asked for"
    assert tiny_config(tmp_path).declared_dual_chunk is None
    for key in keys:
        with pytest.raises(ModelFileError, match=f"the key {key} is missing"):
            tiny_config(tmp_path, {other: value for other, value in keys.items() if other != key})
        with pytest.raises(ModelFileError, match=f"{key} is 0, an integer above zero"):
            tiny_config(tmp_path, {**keys, key: make.scalar(U32, 0)})


def test_frequency_factors(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 3, 4, 8, 8, 8.5], np.float32)
    assert tiny_config(tmp_path, tensors={"rope_freqs.weight": factors}).layers[0].rope.frequency_factors == tuple(factors.tolist())
    for wrong, message in [
        (factors[:4], r"F32 \(8,\) was expected"),
        (factors * 0, "not above zero"),
        (factors * np.nan, "not above zero"),
    ]:
        with pytest.raises(ModelFileError, match=message):
            tiny_config(tmp_path, tensors={"rope_freqs.weight": wrong})
    base = gemma_base(2)
    with pytest.raises(UnsupportedModelError, match="rope_freqs.weight is not supported for gemma3"):
        tiny_config(tmp_path, tensors={"rope_freqs.weight": factors}, base=base)


def test_gemma_layers(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, base=gemma_base(13))
    assert [layer.sliding_window for layer in config.layers] == ([20] * 5 + [None]) * 2 + [20]
    assert {layer.rope.theta for layer in config.layers if layer.sliding_window} == {10000.0}
    assert {layer.rope.theta for layer in config.layers if not layer.sliding_window} == {1e6}
    assert config.embedding_scale == float(np.float32(math.sqrt(32)))
    keys: Keys = {
        "gemma3.rope.freq_base_swa": make.scalar(F32, 5000.0),
        "gemma3.rope.scaling.type": make.scalar(STRING, "linear"),
        "gemma3.rope.scaling.factor": make.scalar(F32, 8.0),
    }
    config = tiny_config(tmp_path, keys, base=gemma_base(6))
    assert config.layers[0].rope == RopeConfig(16, "halves", 5000.0)
    assert config.layers[5].rope == RopeConfig(16, "halves", 1e6, "linear", 8.0)


def test_gemma_pattern(tmp_path: Path) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    windows = [layer.sliding_window for layer in tiny_config(tmp_path, {key: make.scalar(U32, 2)}, base=gemma_base(4)).layers]
    assert windows == [20, None, 20, None]
    flags = make.array(make.BOOL, [False, True, True, False])
    windows = [layer.sliding_window for layer in tiny_config(tmp_path, {key: flags}, base=gemma_base(4)).layers]
    assert windows == [None, 20, 20, None]
    with pytest.raises(ModelFileError, match="an array of 3, a number, or 4 bools"):
        tiny_config(tmp_path, {key: make.array(make.BOOL, [True] * 3)}, base=gemma_base(4))
    with pytest.raises(ModelFileError, match="gemma3.attention.sliding_window is missing"):
        tiny_config(tmp_path, {"gemma3.attention.sliding_window": None}, base=gemma_base(4))


def test_gemma_of_62_layers_scales_by_the_hidden_size(tmp_path: Path) -> None:
    sizes: Keys = {"gemma3.attention.key_length": make.scalar(U32, 16), "gemma3.attention.head_count": make.scalar(U32, 2)}
    assert tiny_config(tmp_path, sizes, base=gemma_base(61)).attention_scale == 0.25
    keys, tensors = gemma_base(62)
    keys["gemma3.attention.head_count"] = make.scalar(U32, 1)
    keys["gemma3.attention.key_length"] = keys["gemma3.attention.value_length"] = make.scalar(U32, 16)
    for i in range(62):
        tensors[f"blk.{i}.attn_q.weight"] = np.zeros((16, 32), np.float32)
        tensors[f"blk.{i}.attn_output.weight"] = np.zeros((32, 16), np.float32)
    assert tiny_config(tmp_path, base=(keys, tensors)).attention_scale == 1 / math.sqrt(32)


def test_sliding_window_of_other_architectures(tmp_path: Path) -> None:
    key = "llama.attention.sliding_window"
    for harmless in (0, 128, 4096):  # off, or as long as the context of 128
        assert tiny_config(tmp_path, {key: make.scalar(U32, harmless)}) == tiny_config(tmp_path)
    with pytest.raises(UnsupportedModelError, match="llama.attention.sliding_window is 64"):
        tiny_config(tmp_path, {key: make.scalar(U32, 64)})


@pytest.mark.parametrize(
    "key, value, harmless",
    [
        ("expert_count", make.scalar(U32, 8), make.scalar(U32, 0)),
        ("attn_logit_softcapping", make.scalar(F32, 50), make.scalar(F32, 0)),
        ("final_logit_softcapping", make.scalar(F32, 30), make.scalar(F32, 0)),
        ("attention.causal", make.scalar(make.BOOL, False), make.scalar(make.BOOL, True)),
        ("logit_scale", make.scalar(F32, 0.5), make.scalar(F32, 1)),
        ("attention.scale", make.scalar(F32, 0.5), make.scalar(F32, 0.25)),
        ("attention.key_length_swa", make.scalar(U32, 32), make.scalar(U32, 16)),
        ("expert_count", make.array(U32, [8]), make.scalar(make.I64, 0)),
    ],
)
def test_options_that_change_the_result_are_refused(tmp_path: Path, key: str, value: bytes, harmless: bytes) -> None:
    assert tiny_config(tmp_path, {f"llama.{key}": harmless}) == tiny_config(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"llama.{key} "):
        tiny_config(tmp_path, {f"llama.{key}": value})


@pytest.mark.parametrize(
    "tensor, message",
    [
        ("blk.0.ffn_gate_exps.weight", "a mixture of experts"),
        ("blk.0.attn_qkv.weight", "blk.0.attn_qkv.weight is not part of a llama model of 1 layers"),
        ("blk.0.attn_output.bias", "blk.0.attn_output.bias is not part"),
        ("blk.0.attn_q_norm.weight", "blk.0.attn_q_norm.weight is not part"),
        ("blk.1.attn_norm.weight", "blk.1.attn_norm.weight is not part"),
        ("output.bias", "output.bias is not part"),
        ("token_embd_norm.weight", "token_embd_norm.weight is not part"),
    ],
)
def test_tensors_that_would_change_the_result_are_refused(tmp_path: Path, tensor: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        tiny_config(tmp_path, tensors={tensor: np.zeros(32, np.float32)})


def test_tensors_without_effect_are_allowed(tmp_path: Path) -> None:
    spare = np.zeros(8, np.float32)
    assert tiny_config(tmp_path, tensors={"blk.0.attn_rot_embd.weight": spare, "other.thing": spare}) == tiny_config(tmp_path)


def test_biases_of_llama(tmp_path: Path) -> None:
    biases = {f"blk.0.attn_{name}.bias": np.zeros(size, np.float32) for name, size in [("q", 32), ("k", 16), ("v", 16)]}
    config = tiny_config(tmp_path, tensors=biases)
    assert config.attention_bias and required_tensors(config).keys() >= biases.keys()
    del biases["blk.0.attn_k.bias"]
    with pytest.raises(ModelFileError, match="blk.0.attn_k.bias is missing"):
        tiny_config(tmp_path, tensors=biases)


def test_vocabulary_is_the_embedding(tmp_path: Path) -> None:
    rows = np.zeros((make.VOCAB + 24, make.HIDDEN), np.float32)
    assert tiny_config(tmp_path, tensors={"token_embd.weight": rows}).vocab_size == make.VOCAB + 24
    with pytest.raises(ModelFileError, match="the tokenizer has 8 tokens, token_embd.weight only 7 rows"):
        tiny_config(tmp_path, tensors={"token_embd.weight": rows[:7]})
    with pytest.raises(ModelFileError, match="token_embd.weight has the shape"):
        tiny_config(tmp_path, tensors={"token_embd.weight": rows[0]})


@pytest.mark.parametrize("missing", sorted(make.tiny_tensors()))
def test_every_tensor_is_needed(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ModelFileError, match=f"the tensor {missing} is missing"):
        tiny_config(tmp_path, tensors={missing: None})


ODD_VALUES = {
    "number": make.scalar(U32, 3),
    "negative": make.scalar(make.I64, -5),
    "float": make.scalar(F32, math.nan),
    "bool": make.scalar(make.BOOL, True),
    "text": make.scalar(STRING, "\x1b[1m\n"),
    "numbers": make.array(U32, [1, 2, 3]),
    "one number": make.array(U32, [1]),
    "floats": make.array(F32, [0.5, math.nan]),
    "bools": make.array(make.BOOL, [True, False]),
    "texts": make.array(STRING, ["a", "b"]),
    "nothing": make.array(U32, []),
    "no texts": make.array(STRING, []),
}
READ_KEYS = [
    *make.tiny_keys("gemma3"),
    *("general.type", "general.file_type", "gemma3.attention.key_length", "gemma3.attention.value_length", "gemma3.attention.scale"),
    *("gemma3.attention.sliding_window", "gemma3.attention.sliding_window_pattern", "gemma3.attention.key_length_swa"),
    *(f"gemma3.rope.{key}" for key in ("dimension_count", "freq_base", "freq_base_swa", "scale_linear", "scaling.type", "scaling.factor")),
    *(f"gemma3.rope.scaling.{key}" for key in ("attn_factor", "original_context_length", "yarn_beta_fast", "yarn_ext_factor")),
    *(f"gemma3.attention.dual_chunk.{key}" for key in DUAL_CHUNK),
    *("gemma3.expert_count", "gemma3.final_logit_softcapping", "split.count", "split.no", "split.tensors.count"),
]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_odd_values_of_any_key_never_escape(tmp_path: Path, architecture: str) -> None:
    base = gemma_base(2) if architecture == "gemma3" else layers_base(2)
    for key in READ_KEYS:
        for value in ODD_VALUES.values():
            try:
                tiny_config(tmp_path, {key.replace("gemma3", architecture): value}, base=base)
            except RollkvError as error:
                assert str(error).isprintable()


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("gemma4", "qwen3moe", "phi3", "nonsense\n"):
        with pytest.raises(UnsupportedModelError, match=f"is not supported, only {', '.join(FAMILIES)} are") as caught:
            tiny_config(tmp_path, {"general.architecture": make.scalar(STRING, name)})
        assert repr(name)[1:-1] in str(caught.value)
        assert str(caught.value).isprintable()
