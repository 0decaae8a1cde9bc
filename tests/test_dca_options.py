"""--dca and what stands beside it: what is declared, asked for and refused, and what the commands say and record. What dual chunk attention computes is
checked elsewhere."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import damaged_gguf as make
import rollkv
from rollkv.cli import main as boundary
from rollkv.config import CacheConfig, DualChunk, LayerConfig, ModelConfig, RopeConfig
from rollkv.dual_chunk import DualChunkRequest, declared_by, dual_chunk_of, notes, short_words, with_dual_chunk
from rollkv.errors import ModelFileError, UnsupportedModelError, UsageError
from rollkv.hf_config import MAX_BYTES, MODEL_TYPES, hf_dual_chunk, read_hf_config
from rollkv.model_config import FAMILIES, model_config
from rollkv.startup import check_length, load
from rollkv.synth import open_model
from rollkv.tasks.generate import cache_config

TINY, MILLION = "synth:tiny", "synth:qwen2.5-14b-1m"
SMALL = ("--dca-chunk", 512, "--dca-local", 256)  # a stride of one page
YARN = RopeConfig(64, "halves", 1e6, "yarn", 4.0, original_context=32768)


def model(rope: RopeConfig = YARN, declared: DualChunk | None = None, context: int = 131072) -> ModelConfig:
    """Two layers, one of them with a sliding window and a rotation of its own."""
    layers = LayerConfig(4, 2, 64, 64, rope), LayerConfig(4, 2, 64, 64, RopeConfig(64, "halves"), 1024)
    return ModelConfig("qwen2", 256, 512, 1000, context, 1e-6, layers, 0.125, "silu", declared_dual_chunk=declared)


PLAIN = model(RopeConfig(64, "halves", 1e6), context=8192)
DECLARED = replace(PLAIN, declared_dual_chunk=DualChunk(6144, 1024, 6000))


def rollkv_command(*arguments: object) -> int:
    return boundary.main([str(argument) for argument in arguments])


def one_error(capsys: pytest.CaptureFixture[str], code: int, expected: int) -> str:
    out = capsys.readouterr()
    assert code == expected and out.out == "" and out.err.startswith("rollkv: error: ") and out.err.count("\n") == 1, out.err
    return out.err


# -- from a request to rotations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config,asked,expected",
    [
        (PLAIN, DualChunkRequest(), None),
        (PLAIN, DualChunkRequest("off"), None),
        (PLAIN, DualChunkRequest("on"), DualChunk(6144, 512, 8192)),  # 3/4 and 1/16 of 8192
        (replace(PLAIN, context_length=8000), DualChunkRequest("on"), DualChunk(5876, 500, 8000)),  # a stride of 21 pages
        (PLAIN, DualChunkRequest("on", original_context=4096), DualChunk(3072, 256, 4096)),
        (PLAIN, DualChunkRequest("on", 3000), DualChunk(3000, 440, 8192)),  # 1/12 of the chunk or some more
        (PLAIN, DualChunkRequest("on", None, 1000), DualChunk(6120, 1000, 8192)),
        (PLAIN, DualChunkRequest("on", 3000, 440, 7), DualChunk(3000, 440, 7)),
        (DECLARED, DualChunkRequest(), DualChunk(6144, 1024, 6000)),
        (DECLARED, DualChunkRequest("on"), DualChunk(6144, 1024, 6000)),
        (DECLARED, DualChunkRequest("off"), None),
        (DECLARED, DualChunkRequest("auto", 2048), DualChunk(2048, 1024, 6000)),
        (DECLARED, DualChunkRequest("auto", None, 512, 9), DualChunk(6144, 512, 9)),
        (DECLARED, DualChunkRequest(declared=DualChunk(512, 256, 5)), DualChunk(512, 256, 5)),
        (PLAIN, DualChunkRequest(declared=DualChunk(512, 256, 5)), DualChunk(512, 256, 5)),
        (model(), DualChunkRequest("on"), DualChunk(24576, 2048, 32768)),  # of what was trained before YaRN stretched it
    ],
)
def test_what_is_asked_for_and_declared_becomes_sizes(config: ModelConfig, asked: DualChunkRequest, expected: DualChunk | None) -> None:
    changed = with_dual_chunk(config, asked)
    assert dual_chunk_of(changed) == expected
    if expected is None:
        assert changed is config and short_words(changed) == "DCA off"
    else:
        assert expected.stride_cells % 256 == 0 and short_words(changed) == f"DCA {expected.chunk_cells}/{expected.local_cells}"
    assert changed.layers[1] == config.layers[1], "a layer with a sliding window keeps its rotation"


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(64, "interleaved", 5e5, frequency_factors=(2.0,) * 32),
        RopeConfig(64, "halves", 1e6, "linear", 8.0),
        RopeConfig(64, "halves", 1e6, "none"),
    ],
)
def test_only_yarn_gives_way(rope: RopeConfig) -> None:
    dual = DualChunk(512, 256, 4096)
    request = DualChunkRequest("on", 512, 256, 4096)
    assert with_dual_chunk(model(rope), request).layers[0].rope == replace(rope, dual_chunk=dual)
    stretched = replace(rope, scaling="yarn", factor=4.0, original_context=32768, attention_factor=0.5, beta_fast=16.0, beta_slow=2.0)
    plain = replace(rope, scaling="none", factor=1.0, dual_chunk=dual)
    assert with_dual_chunk(model(stretched), request).layers[0].rope == plain


def test_pages_of_other_sizes_divide_other_strides() -> None:
    assert dual_chunk_of(with_dual_chunk(PLAIN, DualChunkRequest("on", 500, 20), page_cells=16)) == DualChunk(500, 20, 8192)
    with pytest.raises(UsageError, match="page of 256"):
        with_dual_chunk(PLAIN, DualChunkRequest("on", 500, 20))
    assert dual_chunk_of(with_dual_chunk(replace(PLAIN, context_length=100), DualChunkRequest("on"), page_cells=16)) == DualChunk(
        70, 6, 100
    )


@pytest.mark.parametrize(
    "config,asked,words",
    [
        (PLAIN, DualChunkRequest("on", 0), "--dca-chunk 0: the value must be 1 or more"),
        (PLAIN, DualChunkRequest("on", None, -5), "--dca-local -5: the value must be 1 or more"),
        (PLAIN, DualChunkRequest("on", None, None, 0), "--rope-original-ctx 0: the value"),
        (PLAIN, DualChunkRequest("off", 512), "--dca-chunk 512 is of dual chunk attention, which --dca off leaves out"),
        (PLAIN, DualChunkRequest("off", None, 256), "--dca-local 256 is of"),
        (PLAIN, DualChunkRequest("off", None, None, 256), "--rope-original-ctx 256 is of"),
        (PLAIN, DualChunkRequest("auto", 512), "--dca-chunk 512: nothing declares dual chunk attention.*say --dca on"),
        (PLAIN, DualChunkRequest("on", 512, 512), "chunks of 512 cells, 512 of them local.*fewer than a chunk"),
        (PLAIN, DualChunkRequest("on", 512, 1024), "fewer than a chunk"),
        (PLAIN, DualChunkRequest("on", 1000, 256), "is 744, not a multiple of the page of 256 cells.*take --dca-chunk 768 or 1024"),
        (PLAIN, DualChunkRequest("on", 300, 256), "is 44, .*take --dca-chunk 512$"),
        (DECLARED, DualChunkRequest("auto", None, 1000), "take --dca-chunk 6120 or 6376"),
        (replace(PLAIN, context_length=300), DualChunkRequest("on"), "fewer than a chunk"),
        (replace(PLAIN, layers=PLAIN.layers[1:]), DualChunkRequest("on"), "all layers of this model have sliding windows"),
    ],
)
def test_what_cannot_be_is_refused(config: ModelConfig, asked: DualChunkRequest, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        with_dual_chunk(config, asked)
    assert str(caught.value).isprintable()


def test_heads_that_are_rotated_in_part_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="32 of 64 elements do; leave it out with --dca off"):
        with_dual_chunk(model(RopeConfig(32, "halves")), DualChunkRequest("on", 512, 256))


def test_what_a_user_is_told() -> None:
    def said(config: ModelConfig, request: DualChunkRequest, ctx_size: int = 4096) -> list[str]:
        return notes(config, request, with_dual_chunk(config, request), ctx_size)

    assert said(PLAIN, DualChunkRequest(), 10**6) == [] and said(DECLARED, DualChunkRequest()) == []
    (line,) = said(PLAIN, DualChunkRequest("on"))
    assert "nothing declares" in line and "chunk of 6144 with 512 local cells" in line and "8192 cells" in line
    assert said(PLAIN, DualChunkRequest("on", 512, 256)) == []
    for yarn in (model(declared=DualChunk(512, 256, 9)), model()):
        request = DualChunkRequest("auto" if yarn.declared_dual_chunk else "on", 512, 256)
        (line,) = said(yarn, request)
        assert "takes the place of YaRN (factor 4)" in line
    (line,) = said(DECLARED, DualChunkRequest(), 20000)
    assert "20000 cells is longer than the 8192" in line and "no key is further away than 6144" in line


def test_a_context_beyond_the_trained_one_is_warned_of_where_keys_are_that_far_away() -> None:
    def warned(config: ModelConfig, ctx_size: int, *sizes: int) -> list[str]:
        said: list[str] = []
        asked = DualChunkRequest("on", *sizes) if sizes else DualChunkRequest("off")
        check_length(with_dual_chunk(config, asked), ctx_size, "model.gguf", said.append)
        return said

    assert warned(PLAIN, 8192) == [] and warned(PLAIN, 10**6, 8192, 1024) == []
    assert warned(PLAIN, 8193) == ["the context of 8193 cells is longer than the 8192 that model.gguf was trained for"]
    assert warned(PLAIN, 8000, 9216, 1024) == []
    assert warned(PLAIN, 9000, 9216, 1024) == [
        "the context of 9000 cells in chunks of 9216 is longer than the 8192 that model.gguf was trained for"
    ]


# -- what files declare --------------------------------------------------------------------------------------------------------

SECTION = {"chunk_size": 6144, "local_size": 1024, "original_max_position_embeddings": 6000}
HF: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1010000,
    "dual_chunk_attention_config": SECTION,
}


@pytest.fixture
def hf(tmp_path: Path) -> Callable[[object], Path]:
    def write(document: object) -> Path:
        path = tmp_path / "config.json"
        path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
        return path

    return write


def without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def test_a_config_json_is_read(hf: Callable[[object], Path]) -> None:
    assert hf_dual_chunk(hf(HF), PLAIN) == DualChunk(6144, 1024, 6000)
    short = HF | {"dual_chunk_attention_config": without(SECTION, "original_max_position_embeddings")}
    assert hf_dual_chunk(hf(short | {"original_max_position_embeddings": 4000}), PLAIN) == DualChunk(6144, 1024, 4000)
    assert hf_dual_chunk(hf(short), PLAIN) == DualChunk(6144, 1024, 8192), "the trained length"
    assert hf_dual_chunk(hf(short), model()) == DualChunk(6144, 1024, 32768), "that before YaRN"
    assert hf_dual_chunk(hf({"dual_chunk_attention_config": SECTION}), PLAIN) == DualChunk(6144, 1024, 6000), "it need not tell the model"
    nothing = without(HF, "dual_chunk_attention_config")
    for scaling in ({"type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}):
        for name in ("rope_scaling", "rope_parameters"):
            found = read_hf_config(hf(nothing | {name: scaling}), PLAIN)
            assert (found.dual_chunk, found.yarn_factor) == (None, 4.0)
            assert found.yarn_original_context == scaling.get("original_max_position_embeddings")
    assert read_hf_config(hf(nothing | {"rope_scaling": {"type": "linear", "factor": 2}}), PLAIN).yarn_factor is None
    assert read_hf_config(hf(nothing | {"rope_scaling": None}), PLAIN) == declared_by(PLAIN)
    with pytest.raises(ModelFileError, match="declares no dual chunk attention; leave out --hf-config"):
        hf_dual_chunk(hf(nothing), PLAIN)


@pytest.mark.parametrize(
    "document,words",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"hidden_size": ' + b"1" * 5000 + b"}", "not JSON"),
        (b'{"x": "' + b"y" * MAX_BYTES + b'"}', "larger than 1048576 bytes"),
        ([HF], "no JSON object"),
        (HF | {"dual_chunk_attention_config": 7}, "dual_chunk_attention_config is 7, an object was expected"),
        (HF | {"dual_chunk_attention_config": {}}, "chunk_size is missing"),
        (HF | {"dual_chunk_attention_config": without(SECTION, "local_size")}, "local_size is missing"),
        (HF | {"dual_chunk_attention_config": SECTION | {"chunk_size": True}}, "chunk_size is True, a whole number above zero"),
        (HF | {"dual_chunk_attention_config": SECTION | {"local_size": 0}}, "local_size is 0"),
        (HF | {"dual_chunk_attention_config": SECTION | {"local_size": 1.5}}, "local_size is 1.5"),
        (HF | {"dual_chunk_attention_config": SECTION | {"chunk_size": "a\n\x1b" * 99}}, "chunk_size is "),
        (HF | {"dual_chunk_attention_config": SECTION | {"original_max_position_embeddings": None}}, "embeddings is None"),
        (HF | {"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "factor of yarn is inf"),
        (HF | {"rope_scaling": {"type": "yarn"}}, "factor of yarn is None"),
        (HF | {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": -1}}, "embeddings is -1"),
        (HF | {"rope_scaling": []}, r"rope_scaling is \[\], an object"),
        (HF | {"model_type": "qwen3"}, "model_type is 'qwen3', but the model file is qwen2; give the config.json of this model"),
        (HF | {"model_type": ["qwen2"]}, "model_type is"),
        (HF | {"num_attention_heads": 8}, "num_attention_heads is 8, but 4 in the model file"),
        (HF | {"num_key_value_heads": [2]}, "num_key_value_heads is"),
        (HF | {"num_hidden_layers": 3}, "num_hidden_layers is 3, but 2"),
        (HF | {"hidden_size": 255}, "hidden_size is 255, but 256"),
    ],
)
def test_a_config_json_that_cannot_be_taken_is_refused(hf: Callable[[object], Path], document: object, words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        read_hf_config(hf(document), PLAIN)
    assert "config.json" in str(caught.value) and str(caught.value).isprintable()


def test_every_architecture_has_its_names_at_hugging_face() -> None:
    assert MODEL_TYPES.keys() == FAMILIES.keys()


def test_a_config_json_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UsageError, match=r"--hf-config .*cannot read it"):
            read_hf_config(path, PLAIN)


def test_the_synthetic_model_declares_what_the_real_one_does() -> None:
    with open_model(MILLION) as file:
        assert model_config(file).declared_dual_chunk == DualChunk(262_144, 8_192, 262_144)
    with open_model(f"{MILLION},layers=2,context=5000") as file:
        assert model_config(file).declared_dual_chunk == DualChunk(262_144, 8_192, 262_144)
    with open_model(TINY) as file:
        assert model_config(file).declared_dual_chunk is None


def test_info_shows_what_is_declared(capsys: pytest.CaptureFixture[str], hf: Callable[[object], Path], tmp_path: Path) -> None:
    assert rollkv_command("info", MILLION) == 0
    text = capsys.readouterr().out
    assert "dual chunk attention              chunk 262144, local 8192, stride 253952, original context 262144" in text
    assert "YaRN                              not declared" in text
    keys = {"rope.scaling.type": make.scalar(make.STRING, "yarn"), "rope.scaling.factor": make.scalar(make.F32, 4.0)}
    keys |= {"rope.scaling.original_context_length": make.scalar(make.U32, 64)}
    path = tmp_path / "yarn.gguf"
    path.write_bytes(make.model({f"llama.{key}": value for key, value in keys.items()}))
    document = hf({"dual_chunk_attention_config": SECTION, "hidden_size": make.HIDDEN})
    assert rollkv_command("info", path, "--hf-config", document, "-o", "json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["declared"] == {
        "dca_chunk_cells": None,
        "dca_local_cells": None,
        "dca_stride_cells": None,
        "dca_original_context": None,
        "yarn_factor": 4.0,
        "yarn_original_context": 64,
    }
    assert facts["declared_by_hf_config"]["dca_stride_cells"] == 5120 and facts["declared_by_hf_config"]["yarn_factor"] is None
    assert rollkv_command("info", path, "--hf-config", document) == 0
    text = capsys.readouterr().out
    assert "factor 4, original context 64" in text and "dual chunk attention in --hf-config  chunk 6144, local 1024" in text
    path.write_bytes(make.model({"general.architecture": make.scalar(make.STRING, "gemma4")}))
    assert "read beside a supported model only" in one_error(capsys, rollkv_command("info", path, "--hf-config", document), 4)


# -- the commands --------------------------------------------------------------------------------------------------------------

COMMANDS = {
    "plan": (),
    "generate": ("-p", "a", "-n", 4, "--backend", "host"),
    "needle": ("--lengths", "600", "--backend", "host"),
    "ladder": ("-d", 300, "--backend", "host"),
    "logit-equiv": ("--tokens", 300, "--backend", "host"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "arguments,code,words",
    [
        (("--dca", "maybe"), 2, "--dca 'maybe' is not known; choose one of auto, on, off"),
        (("--dca", "on", "--dca-chunk", 0), 2, "--dca-chunk 0"),
        (("--dca", "off", "--dca-local", 256), 2, "--dca-local 256"),
        (("--dca-chunk", 512), 2, "say --dca on"),
        (("--dca", "on", "--dca-chunk", 600, "--dca-local", 256), 2, "take --dca-chunk 512 or 768"),
        (("--dca", "on", "--dca-chunk", 512, "--dca-local", 512), 2, "fewer than a chunk"),
        (("--hf-config", "none.json"), 2, "--hf-config none.json: cannot read it"),
        (("--hf-config", "other.json"), 4, "model_type is 'qwen2', but the model file is llama"),
        (("--dca", "on", "--hf-config", "empty.json"), 4, "declares no dual chunk attention"),
        (("--dca", "off", "--hf-config", "broken.json"), 4, "not JSON"),
    ],
)
def test_refusals_come_in_one_line_before_the_load(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    arguments: tuple[object, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rollkv.startup.load", lambda *_, **__: pytest.fail("it loaded"))
    for name, document in [("other", json.dumps(HF)), ("empty", "{}"), ("broken", "{")]:
        (tmp_path / f"{name}.json").write_text(document)
    assert words in one_error(capsys, rollkv_command(command, "-m", TINY, *COMMANDS[command], *arguments), code)


@pytest.mark.parametrize("command", ["ladder", "logit-equiv"])
def test_lists_of_one_and_the_same_are_refused(capsys: pytest.CaptureFixture[str], command: str) -> None:
    error = one_error(capsys, rollkv_command(command, "-m", TINY, *COMMANDS[command], "--dca", "auto,off"), 2)
    assert "--dca auto and off are the same for this model, DCA off" in error
    assert "empty entry" in one_error(capsys, rollkv_command(command, "-m", TINY, *COMMANDS[command], "--dca", "on,"), 2)


def test_plan_names_it(capsys: pytest.CaptureFixture[str], no_gpu: None, hf: Callable[[object], Path]) -> None:
    assert rollkv_command("plan", "-m", MILLION) == 0
    out = capsys.readouterr()
    assert out.out.startswith(f"{MILLION}, 1010000 cells, KV f16/f16, DCA 262144/8192\n") and out.err == ""
    assert rollkv_command("plan", "-m", MILLION, "-c", 2_000_000) == 0
    out = capsys.readouterr()
    assert (
        "longer than the 1010000 that the model was trained for: with dual chunk attention no key is further away than 262144 cells"
        in out.err
    )
    assert "warning" not in out.err
    assert rollkv_command("plan", "-m", MILLION, "-c", 2_000_000, "--dca", "off", "-o", "json") == 0
    out = capsys.readouterr()
    assert "warning: the context of 2000000 cells is longer than the 1010000" in out.err
    assert json.loads(out.out)["dca"] == "off"
    document = hf(HF | {"model_type": "llama", "num_hidden_layers": 3})
    assert rollkv_command("plan", "-m", TINY, "--hf-config", document, "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["dca"], result["dca_chunk_cells"], result["dca_local_cells"], result["dca_original_context"]) == ("on", 6144, 1024, 6000)


def test_generate_records_it(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("generate", "-m", TINY, "--prompt-ids", ",".join(map(str, range(5, 605))), "-n", 4, "--backend", "host", "-o", "json", "-v")
    found = {}
    for name, more in {"off": (), "on": ("--dca", "on", *SMALL), "short": ("--dca", "on")}.items():
        assert rollkv_command(*run, *more) == 0
        out = capsys.readouterr()
        found[name] = json.loads(out.out)
        assert ("nothing declares" in out.err) is (name == "short")
        assert {"off": "DCA off", "on": "DCA 512/256", "short": "DCA 49152/4096"}[name] in out.err
    assert [found[name]["dca"] for name in found] == ["off", "on", "on"]
    assert (found["on"]["dca_chunk_cells"], found["on"]["dca_local_cells"], found["on"]["dca_original_context"]) == (512, 256, 65536)
    assert found["off"]["ids"] == found["short"]["ids"], "up to the stride it is plain RoPE"


def test_needles_are_found_and_their_rows_say_how(capsys: pytest.CaptureFixture[str]) -> None:
    run = (
        "needle",
        "-m",
        TINY,
        "--lengths",
        900,
        "--depths",
        "0,60",
        "--window",
        256,
        "--ubatch",
        256,
        "--backend",
        "host",
        "--dca",
        "on",
        *SMALL,
    )
    assert rollkv_command(*run, "-o", "json") == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert (row["outcome"], row["dca"], row["dca_chunk_cells"], row["dca_local_cells"]) == ("found", "on", 512, 256)
    assert rollkv_command(*run[:4], 600, "--depths", 0, "--backend", "host") == 0
    assert "seed 0, KV f16/f16, DCA off, lengths in cells" in capsys.readouterr().out


def test_logits_are_compared_on_with_off(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = ("logit-equiv", "-m", TINY, "--backend", "host", "--ubatch", 128, "--decode", 4, *SMALL)
    assert rollkv_command(*run, "--tokens", 256, "--dca", "off,on", "--bit-equal", "-o", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["candidate"], row["dca"], row["bit_equal_rows"], row["rows"]) == ("DCA 512/256", "on", 256, 256)
    assert rollkv_command(*run, "--tokens", 300, "--dca", "off,on", "--bit-equal", "-o", "json") == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["bit_equal_rows"] == row["first_unequal_position"] == 256, "the stride"
    assert rollkv_command(*run, "--tokens", 600, "--dca", "on", "--windows", "1page") == 0
    text = capsys.readouterr().out
    assert text.startswith("synth:tiny, DCA 512/256, 600 tokens") and "600/600" in text


# -- the ladder ----------------------------------------------------------------------------------------------------------------

LADDER = ("ladder", "-m", TINY, "--backend", "host", "-d", 300, "-n", 2, "-r", 1, "--ubatch", 64, *SMALL)


def test_a_ladder_climbs_both_on_one_load(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rollkv import engine

    weights, loads = engine.load_weights, []
    monkeypatch.setattr(engine, "load_weights", lambda *rest: loads.append(rest) or weights(*rest))
    assert rollkv_command(*LADDER, "--dca", "on,off", "--tail", "0,384KiB", "-o", "jsonl") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(loads) == 1
    assert [(row["line"], row.get("rung"), row["dca"]) for row in rows] == [
        ("rung", "resident", "on"),
        ("rung", "resident", "off"),
        ("rung", "tail 384.0 KiB", "on"),
        ("rung", "tail 384.0 KiB", "off"),
        ("summary", None, "on"),
        ("summary", None, "off"),
    ]
    for row in rows[:4]:
        on = row["dca"] == "on"
        assert (row["dca_chunk_cells"], row["dca_local_cells"], row["dca_original_context"]) == ((512, 256, 65536) if on else (None,) * 3)
        assert (
            row["outcome"] == "ran" and row["needle_found"] is True and not any(isinstance(value, (dict, list)) for value in row.values())
        )
    for row, summary in zip(rows[:2], rows[4:], strict=True):
        assert summary["resident_ms"] == pytest.approx(row["step_ms"]), "each by its own resident step"


def test_both_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert rollkv_command(*LADDER, "--dca", "on,off", "--steps", 2) == 0
    text = capsys.readouterr().out
    assert "synth:tiny, host, KV f16/f16, DCA 512/256 and DCA off: 300 cells before decode" in text
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    headers, rule, *lines = table[: next(index for index, line in enumerate(table[1:], 1) if line[1] == "resident")]
    assert headers == [
        "rung", "depth", "tail MiB", "pp tok/s, DCA 512/256", "pp tok/s, DCA off", "ratio", "tg tok/s, DCA 512/256", "tg tok/s, DCA off", "ratio",
        "needle, DCA 512/256", "needle, DCA off",
    ]  # fmt: skip
    assert [(line[0], line[1], line[9], line[10]) for line in lines] == [
        ("resident", "300", "found", "found"),
        ("tail 384.0 KiB", "300", "found", "found"),
    ]
    for line in lines:
        for first, second, ratio in (line[3:6], line[6:9]):
            assert float(ratio) == pytest.approx(float(first) / float(second), rel=0.02)
    sections = text.split("\n\nDCA ")[1:]
    assert [section.split(":")[0] for section in sections] == ["512/256", "off"]
    assert all(section.count("\n| resident ") == 1 and section.count("verdict:") == 1 for section in sections)


def test_depths_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert rollkv_command(*LADDER, "--dca", "off,on", "-d", "0,300", "-p", 8, "--fill", "random") == 0
    text = capsys.readouterr().out
    assert (
        "| rung     | depth |" in text
        and text.count("| pp8 @ d300 |") == 2
        and "DCA off and DCA 512/256: behind 0, 300 RANDOM cells" in text
    )
    assert rollkv_command(*LADDER, "--dca", "off,on", "-d", "0,300", "-p", 8, "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["depth"], row["dca"]) for row in result["rows"]] == [(0, "off"), (0, "on"), (300, "off"), (300, "on")]
    assert [(one["dca"], one["dca_chunk_cells"]) for one in result["variants"]] == [("off", None), ("on", 512)] and "dca" not in result


def test_what_does_not_run_on_one_side_is_empty(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rollkv.errors import OutOfMemoryError
    from rollkv.tasks import climb

    measure = climb._measure

    def short_of_memory(engine: Any, rung: Any, *rest: Any) -> Any:
        if rung.name == "tail 384.0 KiB, DCA off":
            raise OutOfMemoryError("no room")
        return measure(engine, rung, *rest)

    monkeypatch.setattr(climb, "_measure", short_of_memory)
    assert rollkv_command(*LADDER, "--dca", "on,off", "--tail", "0,384KiB", "--fill", "random") == 0
    out = capsys.readouterr()
    assert "tail 384.0 KiB, DCA off, depth 300: no room" in out.err
    line = next(line for line in out.out.splitlines() if line.startswith("| tail"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2] == "0.4" and cells[6] and not cells[7] and not cells[8], "a rate on one side, none on the other, no ratio"


def test_one_side_that_loses_its_needles_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rollkv.tasks import climb

    repeat = climb._repeat

    def lossy(engine: Any, rung: Any, *rest: Any) -> Any:
        lost = rung.name in ("tail 384.0 KiB, DCA 512/256", "resident, DCA off", "tail 384.0 KiB, DCA off")
        return replace(repeat(engine, rung, *rest), found=not lost)

    monkeypatch.setattr(climb, "_repeat", lossy)
    assert rollkv_command(*LADDER, "--dca", "on,off", "--tail", "0,384KiB", "--fill", "random") == 1
    error = capsys.readouterr().err
    assert "1 rungs miss a needle that a resident one found: tail 384.0 KiB, DCA 512/256" in error, (
        "off misses it resident too: that is the model"
    )


def test_the_picture_has_both_curves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert rollkv_command(*LADDER, "--dca", "on,off", "--steps", 2, "--fill", "random", "--plot", tmp_path / "ladder.svg") == 0
    picture = (tmp_path / "ladder.svg").read_text()
    assert "<!-- measured, DCA 512/256 -->" in picture and "<!-- measured, DCA off -->" in picture


# -- engines and programs ------------------------------------------------------------------------------------------------------


def test_an_engine_changes_its_rotations_as_a_fresh_one_would_have_them() -> None:
    cache = cache_config(300, ubatch=128, residency="full")
    tokens = np.random.default_rng(3).integers(1, 500, 300).tolist()
    with open_model(TINY) as file:
        plain = model_config(file)
    dual = with_dual_chunk(plain, DualChunkRequest("on", 512, 256))

    def fresh(config: ModelConfig | None) -> np.ndarray:
        with load(TINY, cache, config=config, backend="host") as engine:
            return engine.logits(tokens)

    with_it, without_it = fresh(dual), fresh(None)
    assert not np.array_equal(with_it, without_it) and np.array_equal(with_it[:256], without_it[:256])
    with load(TINY, cache, config=dual, backend="host") as engine:
        first = engine.logits(tokens)
        engine.replan(cache, None, plain)
        second = engine.logits(tokens)
        engine.replan(CacheConfig(300, ubatch=128, residency="window", window_cells=256), None, dual)
        third = engine.logits(tokens)
        engine.replan(cache)
        assert engine.config == dual, "unless told they stay"
    assert np.array_equal(first, with_it) and np.array_equal(second, without_it) and np.array_equal(third, with_it)


def test_programs_ask_for_it_by_the_same_names(hf: Callable[[object], Path]) -> None:
    tokens = [7, 8, 9] * 120
    rows = {}
    for name, options in {
        "off": {},
        "on": {"dca": "on", "dca_chunk": 512, "dca_local": 256},
        "declared": {"hf_config": str(hf({"dual_chunk_attention_config": {"chunk_size": 512, "local_size": 256}}))},
    }.items():
        with rollkv.load(TINY, ctx_size=400, backend="host", **options) as loaded:  # type: ignore[arg-type]
            assert short_words(loaded.config) == short_words(loaded.engine.config) == ("DCA off" if name == "off" else "DCA 512/256")
            rows[name] = loaded.logits(tokens)
    assert np.array_equal(rows["on"], rows["declared"]) and not np.array_equal(rows["on"], rows["off"])
    with pytest.raises(UsageError, match="--dca 'yes'"):
        rollkv.load(TINY, dca="yes", backend="host")


def test_a_file_that_declares_it_is_loaded_with_it() -> None:
    spec = f"{MILLION}:F16,layers=2,hidden=256,heads=4,kv_heads=2,head_dim=64,ffn=256,vocab=2048"
    with load(spec, cache_config(300, ubatch=64), backend="host") as engine:
        assert dual_chunk_of(engine.config) == DualChunk(262_144, 8_192, 262_144)
        declared = engine.logits(list(range(300)))
        with open_model(spec) as file:
            engine.replan(cache_config(300, ubatch=64), None, model_config(file))
        assert dual_chunk_of(engine.config) is None and np.array_equal(engine.logits(list(range(300))), declared), "far below the stride"
