"""The ways in which a context fits under a cap."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollkv.budget import Budget
from rollkv.cli.main import main
from rollkv.config import CacheConfig
from rollkv.errors import OutOfMemoryError
from rollkv.startup import plan
from rollkv.tasks.suggest import Way, ways_to_fit
from rollkv.units import GIB

MODEL = "synth:qwen3-8b"
DOCS = Path(__file__).parents[1] / "docs" / "kv-types.md"


def ways(cap: int, ctx_size: int = 65536) -> tuple[Way, ...]:
    return ways_to_fit(CacheConfig(ctx_size), lambda cache: plan(MODEL, cache, vram_target=cap)).found


def test_the_fastest_comes_first_and_every_way_is_what_its_options_plan() -> None:
    found = ways(12 * GIB)
    rates = [way.tokens_per_second for way in found]
    assert rates == sorted(rates, reverse=True) and len(found) == 9
    exact = [way for way in found if way.exact]
    assert [way.options for way in exact] == [""] and exact[0].budget.spills
    for way in found:
        assert way.budget == plan(MODEL, way.cache, vram_target=12 * GIB) and way.budget.total_bytes <= 12 * GIB
        assert way.exact == (not way.cache.lossy)


def test_a_tail_has_no_type_where_nothing_spills() -> None:
    found = ways(24 * GIB)
    assert not any(way.budget.spills or way.cache.recodes for way in found)
    assert len(found) == 8 and found[-1].exact  # f16 moves the most bytes


def test_ways_that_do_not_fit_are_left_out() -> None:
    """A budget that refuses everything but one type."""

    def make(cache: CacheConfig) -> Budget:
        if cache.key_type != "turbo2":
            raise OutOfMemoryError(f"too large: {cache.key_type}")
        return plan("synth:tiny", cache)

    fit = ways_to_fit(CacheConfig(4096), make)
    assert [way.cache.key_type for way in fit.found] == ["turbo2"] and len(fit.left_out) == 8 and fit.left_out[0] == ""
    with pytest.raises(
        OutOfMemoryError, match="no way fits; of the smallest cells, --cache-type-k turbo2 --cache-type-v turbo2: too large: f16"
    ):
        ways_to_fit(CacheConfig(4096), lambda cache: make(replace(cache, key_type="f16")))


def test_layers_are_protected_in_lossy_ways_alone() -> None:
    found = ways_to_fit(CacheConfig(65536, protect_layers=2), lambda cache: plan(MODEL, cache, vram_target=12 * GIB)).found
    assert len(found) == 9 and [way.options for way in found if way.exact] == [""]
    assert all(way.cache.protect_layers == 2 and way.options.endswith(" --kv-protect 2") for way in found if not way.exact)


def test_a_narrower_tail_may_fit_where_one_of_f16_does_not() -> None:
    """Host memory has room for half of it."""

    def make(cache: CacheConfig) -> Budget:
        budget = plan(MODEL, cache, vram_target=12 * GIB)
        if budget.host_tail_bytes > 4 * GIB:
            raise OutOfMemoryError("too large a tail")
        return budget

    found = ways_to_fit(CacheConfig(65536), make).found
    assert not any(way.exact for way in found) and any(way.cache.recodes for way in found)


def test_a_smaller_ubatch_is_one_of_the_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where none was asked for and the usual one leaves no room for a window; the exact way is exact beside a run of that ubatch."""
    monkeypatch.setenv("ROLLKV_CACHE_DIR", str(tmp_path))
    command = ("plan", "-m", "synth:qwen2.5-14b-1m", "-c", "131072", "--vram-target", "15800MiB", "--suggest")
    assert main([*command]) == 0
    text = capsys.readouterr().out
    assert "same ubatch" in text and "Do not fit: the default; --cache-type-" in text
    assert main([*command, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ways"] and found["left_out"][0] == ""
    for way in found["ways"]:
        assert way["options"].endswith(f" --ubatch {way['budget']['ubatch']}") and way["budget"]["ubatch"] < 4096


def options(text: str) -> dict[str, Any]:
    """What `generate` would make of the options of a way."""
    words = text.split()
    return {word: words[index + 1] if word.startswith("--cache") else True for index, word in enumerate(words) if word.startswith("--")}


def test_the_options_say_what_was_planned() -> None:
    for way in ways(12 * GIB):
        said, cache = options(way.options), way.cache
        assert said.get("--cache-type-k", "f16") == cache.key_type and said.get("--cache-type-v", "f16") == cache.value_type
        assert said.get("--cache-type-tail-k") == cache.tail_key_type and said.get("--cache-type-tail-v") == cache.tail_value_type
        assert said.get("--kv-rotate", False) == cache.kv_rotate


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLKV_CACHE_DIR", str(tmp_path))
    command = ("plan", "-m", MODEL, "-c", "65536", "--vram-target", "12GiB", "--suggest")
    assert main([*command]) == 0
    text = capsys.readouterr().out
    assert text.count("\nlossy ") == 8 and text.count("\nexact ") == 1 and "(the default)" in text
    assert main([*command, "-v", "-o", "json"]) == 0
    said = capsys.readouterr()
    assert "link: " in said.err
    found = json.loads(said.out)["ways"]
    assert [way["exact"] for way in found].count(True) == 1 and {"cache_type_k", "options", "budget"} <= found[0].keys()
    assert main([*command[:5], "--vram-target", "24GiB", "--suggest"]) == 0
    assert "Every f16 cell fits" in capsys.readouterr().out


def test_what_types_were_measured_to_lose(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As docs/kv-types.md has it; unknown where layers are protected."""
    monkeypatch.setenv("ROLLKV_CACHE_DIR", str(tmp_path))
    rows = (line.split("|")[1:3] for line in DOCS.read_text().splitlines() if line.count("|") == 10)
    table = {name.strip(): mean.strip() for name, mean in rows}
    for way in ways(12 * GIB):
        cache = way.cache
        name = f"{cache.key_type}/{cache.value_type}" + (" rotated" if cache.kv_rotate else "")
        name = "f16, window" if way.exact else "f16, tail q8_0" if cache.recodes else name
        assert way.measured_kld is not None and float(table[name]) == way.measured_kld, name
    command = ("plan", "-m", MODEL, "-c", "65536", "--vram-target", "12GiB", "--suggest")
    assert main([*command]) == 0
    text = capsys.readouterr().out
    assert "mean KLD" in text and " 0.00047 " in text and " ? " not in text
    assert main([*command, "--kv-protect", "2"]) == 0
    assert capsys.readouterr().out.count(" ? ") == 8
    assert main([*command, "--kv-protect", "2", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["ways"]
    assert {way["measured_kld"] for way in found if not way["exact"]} == {None} and [
        way["measured_kld"] for way in found if way["exact"]
    ] == [0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "give --vram-target"),
        (("--vram-target", "12GiB", "--cache-type-k", "q8_0"), "leave --cache-type-"),
        (("--vram-target", "12GiB", "--window", "4096"), "leave --cache-type-"),
        (("--vram-target", "1GiB"), "too small"),
        (("--vram-target", "12GiB", "--kv-protect", "99"), "--kv-protect 99 leaves none of the 36 layers"),
        (("--vram-target", "12GiB", "--kv-protect", "-1"), "--kv-protect -1"),
    ],
)
def test_refusals_are_one_line(more: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", MODEL, "-c", "65536", "--suggest", *more]) != 0
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("error: ") == 1 and err.rstrip().splitlines()[-1].startswith("rollkv: error: ")


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ((), ", or lower --ctx-size"),
        (("--window", "64k"), ", or lower --window"),
        (("--residency", "full"), ", or leave --residency full out"),
        (("--cache-type-k", "turbo2", "--cache-type-v", "turbo2"), ", or lower --ctx-size"),
    ],
)
def test_a_refusal_names_what_helps_and_a_cap_that_is_enough(
    more: tuple[str, ...], remedy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROLLKV_CACHE_DIR", str(tmp_path))
    command = ("plan", "-m", "synth:qwen2.5-14b-1m", "-c", "131072", *more, "--vram-target")
    assert main([*command, "14GiB"]) == OutOfMemoryError.exit_code
    error = capsys.readouterr().err
    assert f"; raise it{remedy}\n" in error
    least = error.split("needs at least ")[1].split(" (")[0]
    assert main([*command, least]) == 0
    capsys.readouterr()
    assert main([*command, f"{float(least.removesuffix(' GiB')) - 0.01:.2f}GiB"]) == OutOfMemoryError.exit_code
