"""Types of the KV cache on the command line: they reach the run, what loses something says so, and what cannot be had is refused in one line."""

import json
from dataclasses import replace

import numpy as np
import pytest

import engines
from rollkv import load
from rollkv.cli.main import main
from rollkv.config import CacheConfig, PageFormat
from rollkv.errors import UsageError
from rollkv.host_backend import HostBackend
from rollkv.kv_formats import page_formats, tail_formats
from rollkv.model.rehearsal import rehearse
from rollkv.model_config import model_config
from rollkv.synth import open_model

TINY = "synth:tiny:F16"
LOSSY = ("--cache-type-k", "q8_0", "--cache-type-v", "turbo3", "--cache-type-tail-k", "q4_0", "--kv-rotate", "--kv-protect", "1")
WORDS = "KV q8_0/turbo3 rotated, tail q4_0/turbo3, first and last layer f16 (lossy)"


def rollkv(*arguments: object) -> int:
    return main(list(map(str, arguments)))


def test_generate_says_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("generate", "-m", TINY, "--backend", "host", "--prompt-ids", "1,2,3", "-n", 4)
    assert rollkv(*run, *LOSSY, "-v", "-o", "json") == 0
    out = capsys.readouterr()
    assert f"host backend, {WORDS}" in out.err
    result = json.loads(out.out)
    assert {key: result[key] for key in result if key.startswith(("cache_type", "kv_"))} == {
        "cache_type_k": "q8_0",
        "cache_type_v": "turbo3",
        "cache_type_tail_k": "q4_0",
        "cache_type_tail_v": None,
        "kv_rotate": True,
        "kv_protect": 1,
    }
    assert rollkv(*run, "-v") == 0
    assert "host backend, KV f16/f16\n" in capsys.readouterr().err


def test_generate_says_in_its_one_line_that_something_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("generate", "-m", TINY, "--backend", "host", "--prompt-ids", "1,2,3", "-n", 2)
    for more, lossy in (((), False), (("--cache-type-v", "turbo3"), True)):
        assert rollkv(*run, *more, "-o", "json") == 0
        out = capsys.readouterr()
        assert ("KV f16/turbo3 (lossy)" in out.err) == lossy and json.loads(out.out)["lossy"] is lossy


def test_a_tail_of_the_windows_types_is_no_tail_type(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    plans = []
    for more in ((), ("--cache-type-tail-k", "f16"), ("--cache-type-tail-k", "f16", "--cache-type-tail-v", "f16")):
        assert rollkv("plan", "-m", TINY, "-c", 4096, "--window", "1k", *more, "-o", "json") == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1] == plans[2] and plans[0]["cache_type_tail_k"] is None and plans[0]["budget"]["window_cells"] == 1024


def test_plan_counts_them(capsys: pytest.CaptureFixture[str], no_gpu: None) -> None:
    run = ("plan", "-m", "synth:llama-3.1-8b", "-c", 32768, "--window", 4096)
    sizes = {}
    for name in ("f16", "q8_0", "turbo4", "turbo3", "turbo2"):
        assert rollkv(*run, "--cache-type-k", name, "--cache-type-v", name, "-o", "json") == 0
        sizes[name] = json.loads(capsys.readouterr().out)["budget"]["kv_bytes"]
    assert [sizes[name] / sizes["f16"] * 16 for name in sizes] == [16, 8.5, 4.125, 3.125, 2.125]
    assert rollkv(*run, "--cache-type-tail-k", "q8_0", "--cache-type-tail-v", "turbo2", "--kv-protect", 2) == 0
    out = capsys.readouterr().out
    assert "cells, KV f16/f16, tail q8_0/turbo2, first and last 2 layers f16 (lossy), DCA off" in out and "outgoing pages" in out


def test_info_tells_what_a_cell_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert rollkv("info", TINY, "-o", "json") == 0
    sizes = json.loads(capsys.readouterr().out)["kv_bytes_per_cell"]
    assert sizes["f16"] == 3 * 2 * 2 * 64 * 2 and sizes["q8_0"] == 3 * 2 * 2 * 68 and sizes["turbo3"] == 3 * 2 * 2 * (24 + 2)
    assert rollkv("info", engines.FIXTURES / "llama.gguf") == 0
    out = capsys.readouterr().out
    assert "turbo4" in out and "q8_0" not in out, "heads of 16"


def test_a_ladder_says_it_in_its_title_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("ladder", "-m", TINY, "--backend", "host", "-d", 600, "--fill", "random", "-n", 4, "-r", 1, "--steps", 2)
    assert rollkv(*run, *LOSSY) == 0
    assert f"tiny:F16, host, {WORDS}, DCA off" in capsys.readouterr().out
    assert rollkv(*run, *LOSSY, "-o", "jsonl") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["cache_type_tail_k"] == "q4_0" and row["kv_protect"] == 1 for row in rows if row["line"] == "rung")
    tail = next(row for row in rows if row.get("cells_in_tail"))
    # Per page of 256 cells, 2 heads of 64: the layer between is q4_0 and turbo3, the others are f16.
    page = 2 * 256 * ((32 + 4) + (24 + 2)) + 2 * 2 * 256 * 64 * 2 * 2
    assert tail["tail_bytes"] == tail["cells_in_tail"] // 256 * page


@pytest.mark.parametrize(
    "types", ["q8_0,q8_0", "q4_0,q4_0", "turbo4,turbo4", "turbo3,turbo3", "turbo2,turbo2", "q8_0,turbo2", "f16,turbo2"]
)
def test_needles_are_found_in_every_type(capsys: pytest.CaptureFixture[str], types: str) -> None:
    """For keys of two bits heads must be larger: those of 64 have 7 rotations to measure distance by, which leave 7 % between neighbours."""
    key, value = types.split(",")
    model = "synth:tiny,head_dim=128" if key == "turbo2" else "synth:tiny"
    run = ("needle", "-m", model, "--backend", "host", "--lengths", 700, "--depths", "0,100", "--window", 256, "--ubatch", 256)
    assert rollkv(*run, "--cache-type-k", key, "--cache-type-v", value) == 0
    out = capsys.readouterr().out
    assert f"KV {key}/{value} (lossy)" in out and out.count("found") >= 2


def test_needles_are_found_in_a_narrower_tail(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("needle", "-m", "synth:tiny", "--backend", "host", "--lengths", 700, "--depths", "0", "--window", 256, "--ubatch", 256)
    assert rollkv(*run, "--cache-type-tail-k", "turbo4", "--cache-type-tail-v", "q4_0", "-o", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["outcome"], row["place"], row["cache_type_tail_k"]) == ("found", "tail", "turbo4")


@pytest.mark.parametrize("command", [("generate", "--prompt-ids", "1"), ("plan", "-c", 1000), ("needle",), ("ladder", "--steps", 2)])
@pytest.mark.parametrize(
    "model,options,words",
    [
        (engines.FIXTURES / "llama.gguf", ("--cache-type-k", "q8_0"), "--cache-type-k q8_0: heads of 16 elements"),
        (TINY, ("--cache-type-v", "turbo3", "--cache-type-k", "f32"), "cells of turbo3 and of f32 do not go together"),
        (TINY, ("--cache-type-k", "turbo2", "--cache-type-tail-k", "q8_0"), "--cache-type-tail-k q8_0: what leaves a window of turbo2"),
        (TINY, ("--kv-protect", 2), "--kv-protect 2 concerns types below 16 bits"),
        (TINY, ("--cache-type-k", "q8_0", "--kv-protect", 2), "--kv-protect 2 leaves none of the 3 layers"),
    ],
)
def test_refusals(
    capsys: pytest.CaptureFixture[str], no_gpu: None, command: tuple[object, ...], model: object, options: tuple[object, ...], words: str
) -> None:
    machine = () if command[0] == "plan" else ("--backend", "host")
    assert rollkv(command[0], "-m", model, *command[1:], *options, *machine) == 2
    out = capsys.readouterr()
    assert out.out == "" and words in out.err and out.err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [("generate", "--prompt-ids", "1", "--backend", "host"), ("plan", "-c", 1000), ("needle", "--backend", "host")]
)
def test_what_never_leaves_has_no_type_of_its_own(capsys: pytest.CaptureFixture[str], no_gpu: None, command: tuple[object, ...]) -> None:
    assert rollkv(command[0], "-m", TINY, *command[1:], "--residency", "full", "--cache-type-tail-k", "q8_0") == 2
    out = capsys.readouterr()
    assert out.out == "" and "--residency full keeps every cell in VRAM" in out.err and out.err.count("\n") == 1


def test_the_library_takes_them_too() -> None:
    kept = {"cache_type_k": "q8_0", "cache_type_v": "f16", "cache_type_tail_v": "turbo2", "kv_rotate": True, "kv_protect": 1}
    with load(TINY, backend="host", ctx_size=300, window_cells=256, residency="window", **kept) as model:  # type: ignore[arg-type]
        assert model.engine.cache_config == CacheConfig(
            300, 256, "q8_0", "f16", 4096, "window", 256, 256, tail_value_type="turbo2", kv_rotate=True, protect_layers=1
        )
        assert len(model.logits([1, 2, 3])) == 3


# -- rehearsals ----------------------------------------------------------------------------------------------------------------


class Formats(HostBackend):
    """Notes which pages it is asked for, and for what."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def append(self, projected, position, runs, page, *rest):  # type: ignore[no-untyped-def]
        self.seen.add(("append", page))
        super().append(projected, position, runs, page, *rest)

    def attend_step(self, projected, position, runs, page, *rest):  # type: ignore[no-untyped-def]
        self.seen.add(("attend_step", page))
        super().attend_step(projected, position, runs, page, *rest)

    def attend_tile(self, q, position, run, layer, page, *rest, **flags):  # type: ignore[no-untyped-def]
        self.seen.add(("attend_tile", page))
        super().attend_tile(q, position, run, layer, page, *rest, **flags)

    def reencode(self, source, source_page: PageFormat, target, target_page: PageFormat):  # type: ignore[no-untyped-def]
        self.seen.add(("reencode", source_page, target_page))
        super().reencode(source, source_page, target, target_page)


@pytest.mark.parametrize("tail", [None, "turbo3"])
@pytest.mark.parametrize("protect", [0, 1])
def test_a_rehearsal_meets_every_format_that_a_run_does(tail: object, protect: int) -> None:
    cache = engines.cache(100, kv="q8_0", tail_kv=tail, window=16, protect=protect)  # type: ignore[arg-type]
    run, rehearsal = Formats(), Formats()
    with engines.host_engine(TINY, cache, backend=run) as engine:
        engine.prefill(list(range(60)))
        for token in range(18):
            engine.decode(token)
        engine.prefill([1, 2])
    with open_model(TINY) as file, np.errstate(over="ignore", invalid="ignore"):  # what a rehearsal computes with is no model
        rehearse(rehearsal, model_config(file), replace(cache), file.tensors)
    assert rehearsal.seen == run.seen
    pages = {*page_formats(engine.config, cache), *tail_formats(engine.config, cache)}
    assert {page for name, *pages in rehearsal.seen for page in pages} == pages and len(pages) == 1 + (tail is not None) + protect


@pytest.mark.parametrize(("option", "value"), [("ctx_size", "4k"), ("ctx_size", 4096.5), ("window_cells", "1k"), ("kv_protect", "1")])
def test_a_library_user_s_texts_are_no_numbers(option: str, value: object) -> None:
    with pytest.raises(UsageError, match="whole number"):
        load(TINY, **{"backend": "host", "ctx_size": 4096, option: value})
    load(TINY, backend="host", ctx_size=np.int64(300), kv_protect=np.int64(0)).close()
