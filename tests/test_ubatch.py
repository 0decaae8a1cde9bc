"""Where memory is short a ubatch that nobody asked for is halved, and one that somebody did is refused with what would fit."""

import json
from bisect import bisect_left
from dataclasses import replace
from functools import partial
from inspect import signature

import numpy as np
import pytest

import engines
from rollkv.budget import Budget, plan_budget
from rollkv.cli.ladder import ladder
from rollkv.cli.logit_equiv import logit_equiv
from rollkv.cli.main import main
from rollkv.cli.needle import needle
from rollkv.config import DEFAULT_UBATCH, CacheConfig
from rollkv.errors import OutOfMemoryError
from rollkv.model_config import model_config
from rollkv.roofline import ASSUMED, StepCost
from rollkv.startup import load, plan
from rollkv.synth import open_model
from rollkv.tasks.generate import cache_config
from rollkv.ubatch import largest_ubatch, plan_ubatch, shrunk_words

TINY = "synth:tiny"


def made(most: int, cache: CacheConfig, spills: bool = True) -> Budget:
    """A budget, refused above `most` rows."""
    if min(cache.ubatch, cache.ctx_size) > most:
        raise OutOfMemoryError("the cap is too small; lower --ctx-size")
    return Budget((), 1, 9, 1 if spills else 9, 256, None, 0, 0, 0, True, cache.ubatch, StepCost(1.0), ASSUMED)


@pytest.mark.parametrize(
    "most,ctx,ubatch", [(4096, 9000, 4096), (4095, 9000, 2048), (256, 9000, 256), (300, 300, 4096), (600, 1000, 512), (999, 1000, 512)]
)
def test_halved_until_it_fits(most: int, ctx: int, ubatch: int) -> None:
    assert plan_ubatch(partial(made, most), cache_config(ctx, ubatch=None)).ubatch == ubatch


def test_not_below_the_smallest_nor_below_the_context() -> None:
    for most, ctx in ((255, 9000), (99, 100)):
        with pytest.raises(OutOfMemoryError, match=rf"lower --ctx-size, or lower --ubatch to at most {most}$"):
            plan_ubatch(partial(made, most), cache_config(ctx, ubatch=None))
    with pytest.raises(OutOfMemoryError, match="lower --ctx-size$"):
        plan_ubatch(partial(made, 0), cache_config(9000, ubatch=None))


def test_one_that_was_asked_for_is_refused() -> None:
    for most, named in ((1300, 1280), (256, 256), (255, 255), (1, 1)):
        cache = cache_config(9000, ubatch=4096)
        assert largest_ubatch(partial(made, most), cache) == named
        with pytest.raises(OutOfMemoryError, match=f"at most {named}$"):
            plan_ubatch(partial(made, most), cache)
    assert plan_ubatch(partial(made, 1300), cache_config(9000, ubatch=1280)).ubatch == 1280


def test_what_it_costs_is_said() -> None:
    with open_model(TINY) as file:
        config = model_config(file)
    layers = tuple(replace(layer, num_heads=5 * layer.num_kv_heads) for layer in config.layers)
    five, asked = replace(config, layers=layers), cache_config(9000, ubatch=None)
    words = shrunk_words(asked, five, made(512, replace(asked, ubatch=512)))
    assert words is not None and "512 tokens instead of 4096" in words and "4.3 times as long" in words and "last bits" in words, (
        "2,200 / 512"
    )
    wide = shrunk_words(replace(asked, key_type="f32", value_type="f32"), five, made(512, replace(asked, ubatch=512)))
    assert wide is not None and "8.6 times as long" in wide
    resident = shrunk_words(asked, five, made(512, replace(asked, ubatch=512), spills=False))
    assert resident is not None and "times as long" not in resident
    assert shrunk_words(asked, five, made(4096, asked)) is None


def least(ubatch: int) -> int:
    """The smallest cap under which a context of 6,000 cells runs, in KiB."""

    def is_refused(cap: int) -> bool:
        try:
            plan(TINY, CacheConfig(6000, ubatch=ubatch), vram_target=cap << 10)
        except OutOfMemoryError:
            return True
        return False

    return bisect_left(range(1 << 22), True, lo=1, key=lambda cap: not is_refused(cap))


def test_plan_halves_and_refuses(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    cap = f"{least(1024)}KiB"
    command = ["plan", "-m", TINY, "-c", "6000", "--vram-target", cap, "-o", "json"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    planned = json.loads(out)["budget"]
    assert planned["ubatch"] == 1024 and planned["total_bytes"] <= least(1024) << 10
    assert "the ubatch is 1024 tokens instead of 4096" in err
    assert main([*command, "--ubatch", "4096"]) == 5
    err = capsys.readouterr().err
    fits = int(err.rsplit("at most ", 1)[1])
    assert 1024 <= fits < 2048 and "--vram-target" in err
    assert main([*command, "--ubatch", str(fits)]) == 0 and capsys.readouterr().err == ""
    assert main([*command, "--ubatch", str(fits + 256)]) == 5


def test_a_run_computes_what_it_would_if_asked_for_the_smaller_one() -> None:
    said: list[str] = []
    options = {"backend": "host", "vram_target": least(512) << 10, "warn": said.append}
    tokens = [(7 * index) % 500 for index in range(700)]
    rows = []
    for ubatch in (None, 512):
        with load(TINY, cache_config(6000, ubatch=ubatch), **options) as engine:
            assert (engine.cache_config.ubatch, engine.budget.ubatch) == (512, 512)
            rows.append(engine.prefill(tokens))
    np.testing.assert_array_equal(*rows)
    assert len(said) == 1 and "512 tokens instead of 4096" in said[0]
    with pytest.raises(OutOfMemoryError, match="at most"):
        load(TINY, cache_config(6000), **options)


def test_a_budget_says_what_it_was_planned_with() -> None:
    with open_model(engines.FIXTURES / "llama.gguf") as file:
        config = model_config(file)
    assert plan_budget(config, CacheConfig(1000, ubatch=300), {}, {}).ubatch == 300


def test_what_is_compared_runs_at_one_ubatch() -> None:
    """Products of many rows are the vendor library's: another ubatch may round otherwise, so these commands refuse instead."""
    for command in (ladder, logit_equiv, needle):
        assert signature(command).parameters["ubatch"].default == DEFAULT_UBATCH
    assert cache_config(9000, ubatch=DEFAULT_UBATCH).smallest_ubatch is None and cache_config(9000).smallest_ubatch is None
