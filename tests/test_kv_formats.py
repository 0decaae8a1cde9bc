"""Types by layer: what is rotated, protected, refused, how it is called, and what plans make of it."""

from dataclasses import replace
from typing import Any

import pytest

from rollkv.budget import Budget, plan_budget
from rollkv.config import CacheConfig, LayerConfig, ModelConfig, PageFormat, RopeConfig
from rollkv.errors import UsageError
from rollkv.kv_formats import check_kv_types, kv_words, page_formats, tail_formats
from rollkv.roofline import Bandwidths
from rollkv.stream_plan import RingShape
from rollkv.tasks.ladder import largest_tail, tail_page_bytes
from rollkv.ubatch import shrunk_words
from rollkv.units import MIB
from rollkv.workspace import lent_to_unpack, workspace_arrays


def model(*sizes: tuple[int, int], sliding: tuple[int, ...] = (), ffn: int = 4096) -> ModelConfig:
    """Layers of 2 KV heads with these sizes of keys and values."""
    layers = tuple(
        LayerConfig(8, 2, key, value, RopeConfig(key, "halves"), 512 if index in sliding else None)
        for index, (key, value) in enumerate(sizes)
    )
    return ModelConfig("llama", 512, ffn, 1000, 8192, 1e-5, layers, 0.1, "silu", name="a model")


FIVE = model(*[(128, 128)] * 5)


def cache(key: str, value: str, tail_key: str | None = None, tail_value: str | None = None, **rest: Any) -> CacheConfig:
    return CacheConfig(4096, 256, key, value, tail_key_type=tail_key, tail_value_type=tail_value, **rest)  # type: ignore[arg-type]


def rotated(asked: CacheConfig, config: ModelConfig = FIVE) -> list[tuple[bool, bool]]:
    """By layer; window and tail agree."""
    pages, tails = page_formats(config, asked), tail_formats(config, asked)
    assert [(p.key_rotated, p.value_rotated) for p in pages] == [(t.key_rotated, t.value_rotated) for t in tails]
    return [(page.key_rotated, page.value_rotated) for page in pages]


@pytest.mark.parametrize(
    "asked,want",
    [
        (cache("f16", "f16"), (False, False)),
        (cache("q8_0", "q4_0"), (False, False)),
        (cache("q8_0", "f16", kv_rotate=True), (True, False)),
        (cache("q8_0", "turbo3"), (False, True)),
        (cache("f16", "f16", "turbo4", "q4_0"), (True, False)),
        (cache("f16", "q8_0", "q8_0", "q4_0", kv_rotate=True), (True, True)),
        (cache("q8_0", "q8_0", "turbo2"), (True, False)),
    ],
)
def test_window_and_tail_are_rotated_alike(asked: CacheConfig, want: tuple[bool, bool]) -> None:
    check_kv_types(FIVE, asked)
    assert rotated(asked) == [want] * 5


def test_bytes_of_a_page_by_hand() -> None:
    page = PageFormat(8, 128, 128, "turbo3", "q8_0", 256)
    assert page.key_bytes == 8 * 256 * (48 + 2) and page.page_bytes == 8 * 256 * (50 + 128 + 8)
    assert page.unpacked.page_bytes == 1 << 20 and page.coded and not page.unpacked.coded
    turbo2 = PageFormat(8, 128, 128, "turbo2", "turbo2", 256)
    assert turbo2.page_bytes * 256 == 34 * turbo2.unpacked.page_bytes, "2.125 bits of 16"


def test_first_and_last_layers_stay_as_they_were() -> None:
    asked = cache("q8_0", "turbo3", "q4_0", None, protect_layers=2, kv_rotate=True)
    pages, tails = page_formats(FIVE, asked), tail_formats(FIVE, asked)
    plain = page_formats(FIVE, cache("f16", "f16"))
    for index in (0, 1, 3, 4):
        assert pages[index] == tails[index] == plain[index]
    assert (pages[2].key_type, pages[2].value_type, tails[2].key_type, tails[2].value_type) == ("q8_0", "turbo3", "q4_0", "turbo3")
    assert pages[2].key_rotated and pages[2].value_rotated


def test_a_layer_that_never_spills_has_no_tail_type() -> None:
    asked = cache("f16", "q8_0", "turbo2", "turbo2")
    config = model(*[(128, 128)] * 3, sliding=(0, 2))
    pages, tails = page_formats(config, asked), tail_formats(config, asked)
    assert pages[0] == tails[0] and (pages[0].key_type, pages[0].value_type, pages[0].key_rotated) == ("f16", "q8_0", False)
    assert (tails[1].key_type, tails[1].value_type) == ("turbo2", "turbo2") and pages[1].key_rotated


@pytest.mark.parametrize(
    "config,asked,words",
    [
        (model((80, 80)), cache("q8_0", "f16"), ["--cache-type-k q8_0", "heads of 80 elements", "groups of 32", "turbo4 or turbo3 or turbo2 or f16"]),
        (model((128, 80)), cache("f16", "q4_0"), ["--cache-type-v q4_0", "heads of 80"]),
        (model((72, 72)), cache("turbo4", "turbo4"), ["--cache-type-k turbo4", "heads of 72", "groups of 16", "choose f16"]),
        (model((128, 128), (80, 80)), cache("f16", "f16", "q8_0"), ["--cache-type-tail-k q8_0", "heads of 80"]),
        (FIVE, cache("q8_0", "f32"), ["cells of q8_0 and of f32", "pair q8_0 with f16"]),
        (FIVE, cache("bf16", "turbo2"), ["cells of turbo2 and of bf16"]),
        (FIVE, cache("f32", "f32", "q8_0"), ["cells of q8_0 and of f32"]),
        (FIVE, cache("q4_0", "q8_0", "q8_0"), ["--cache-type-tail-k q8_0", "a window of q4_0", "fewer bits", "turbo4 or turbo3 or turbo2"]),
        (FIVE, cache("f16", "turbo4", None, "q4_0"), ["--cache-type-tail-v q4_0", "a window of turbo4", "turbo3 or turbo2"]),
        (FIVE, cache("q8_0", "q8_0", "f16"), ["--cache-type-tail-k f16", "a window of q8_0"]),
        (FIVE, cache("f16", "turbo2", None, "turbo3"), ["--cache-type-tail-v turbo3", "a window of turbo2 keeps its type; leave it out"]),
        (FIVE, cache("f32", "f32", "f16", "f16"), ["--cache-type-tail-k f16", "a window of f32 keeps its type; leave it out"]),
        (model((32, 32)), cache("q4_0", "f16", "turbo4"), ["--cache-type-tail-k turbo4", "a window of q4_0", "choose turbo3 or turbo2"]),
        (model((128, 128), sliding=(0,)), cache("f16", "f16", "q8_0"), ["--cache-type-tail-k", "sliding windows", "leave them out"]),
        (FIVE, replace(cache("q8_0", "f16"), page_cells=10), ["page_cells 10", "multiple of 4"]),
        (FIVE, cache("f16", "f16", kv_rotate=True), ["--kv-rotate", "KV f16/f16", "q8_0"]),
        (FIVE, cache("turbo3", "f16", kv_rotate=True), ["--kv-rotate", "turbo types are rotated anyway", "KV turbo3/f16 (lossy) has neither"]),
        (FIVE, cache("f16", "bf16", protect_layers=2), ["--kv-protect 2", "KV f16/bf16"]),
        (FIVE, cache("q8_0", "q8_0", protect_layers=3), ["--kv-protect 3", "none of the 5 layers", "at most 2"]),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_in_one_line(config: ModelConfig, asked: CacheConfig, words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        check_kv_types(config, asked)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_a_protected_layer_may_have_heads_of_any_size() -> None:
    check_kv_types(model((80, 80), (128, 128), (80, 80)), cache("q8_0", "q8_0", protect_layers=1))


@pytest.mark.parametrize(
    "asked,words",
    [
        (cache("f16", "f16"), "KV f16/f16"),
        (cache("f32", "bf16"), "KV f32/bf16"),
        (cache("q8_0", "turbo3"), "KV q8_0/turbo3 (lossy)"),
        (cache("q8_0", "turbo3", "q4_0", "q4_0", kv_rotate=True), "KV q8_0/turbo3 rotated, tail q4_0 (lossy)"),
        (cache("f16", "f16", "turbo3"), "KV f16/f16, tail turbo3/f16 (lossy)"),
        (cache("q8_0", "q8_0", "q8_0", "q8_0", protect_layers=1), "KV q8_0/q8_0, first and last layer f16 (lossy)"),
        (cache("q4_0", "q4_0", protect_layers=2), "KV q4_0/q4_0, first and last 2 layers f16 (lossy)"),
    ],
)
def test_types_are_called_by_name(asked: CacheConfig, words: str) -> None:
    assert kv_words(asked) == words


# -- plans ---------------------------------------------------------------------------------------------------------------------


def planned(asked: CacheConfig, config: ModelConfig = FIVE, cap: int | None = None) -> Budget:
    return plan_budget(config, asked, {}, {}, cap_bytes=cap)


def test_window_ring_and_tail_are_counted_each_in_its_type() -> None:
    asked = cache("f16", "f16", "q8_0", "q4_0", residency="window", window_cells=1024, ubatch=512)
    budget = planned(asked)
    in_window, in_tail = 2 * 256 * 512, 2 * 256 * (136 + 72)
    assert (budget.total_pages, budget.window_pages) == (16, 4) and isinstance(budget.ring, RingShape)
    device = dict(budget.device)
    assert device["resident window"] == 5 * 4 * in_window
    assert device["staging ring"] == budget.ring.num_slots * budget.ring.slot_pages * in_tail
    assert budget.outgoing_slots == 2 and device["outgoing pages"] == 2 * 2 * in_tail, "512 tokens complete two pages"
    assert budget.host_tail_bytes == 12 * 5 * in_tail and budget.kv_bytes == 5 * (4 * in_window + 12 * in_tail)
    assert tail_page_bytes(FIVE, asked) == 5 * in_tail and largest_tail(FIVE, asked) == 15 * 5 * in_tail


def test_what_leaves_as_it_is_needs_no_outgoing_pages() -> None:
    for asked in (cache("f16", "f16"), cache("q8_0", "q8_0"), cache("turbo3", "turbo3", "turbo3", "turbo3")):
        budget = planned(replace(asked, residency="window", window_cells=1024))
        assert budget.outgoing_slots == 0 and "outgoing pages" not in dict(budget.device)
    resident = planned(cache("f16", "f16", "q8_0", "q8_0"))
    assert resident.outgoing_slots == 0 and not resident.spills


def test_nothing_is_recoded_for_the_sake_of_speed() -> None:
    """A step with a tail of fewer bits behind a link as fast would read less than the resident one."""
    asked = replace(cache("f16", "f16", "turbo2", "turbo2"), ctx_size=1 << 16)
    resident = planned(replace(asked, residency="full")).total_bytes
    for cap, fits in ((resident, True), (resident - 32 * MIB, False)):
        budget = plan_budget(FIVE, asked, {}, {}, cap_bytes=cap, rates=Bandwidths(1000e9, 1000e9))
        assert budget.spills != fits and budget.window_pages > 200


def test_no_more_outgoing_pages_than_ever_leave() -> None:
    asked = cache("f16", "f16", "q4_0", "q4_0", residency="window", window_cells=14 * 256, ubatch=4096)
    assert planned(asked).outgoing_slots == 2


def test_fewer_bits_are_expected_to_be_faster() -> None:
    rates = Bandwidths(25e9, 1000e9)
    seconds = []
    for name in ("f16", "q8_0", "q4_0", "turbo3", "turbo2"):
        asked = cache("f16", "f16", name, name, residency="window", window_cells=256)
        budget = plan_budget(FIVE, replace(asked, ctx_size=1 << 20), {}, {}, rates=rates)
        seconds.append(budget.step.seconds)
        assert budget.step.link * rates.link == pytest.approx(budget.host_tail_bytes, rel=0.1)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 7 * seconds[-1]


@pytest.mark.parametrize("name,times", [("f16", 4.3), ("q8_0", 2.3), ("turbo4", 1.1)])
def test_prefill_waits_less_for_fewer_bits(name: str, times: float) -> None:
    config = replace(FIVE, layers=tuple(replace(layer, num_heads=10) for layer in FIVE.layers))
    asked = cache("f16", "f16", name, name, residency="window", window_cells=256)
    words = shrunk_words(asked, config, planned(replace(asked, ubatch=512), config))
    assert words is not None and f"{times} times as long" in words
    narrow = cache("f16", "f16", "turbo3", "turbo3", residency="window", window_cells=256)
    assert "times as long" not in str(shrunk_words(narrow, config, planned(replace(narrow, ubatch=512), config)))


def test_coded_pages_are_unpacked_in_memory_that_is_idle() -> None:
    page = 2 * 256 * 256 * 2  # f16: 256 KiB
    asked = cache("q8_0", "q8_0", ubatch=64)
    assert lent_to_unpack(FIVE, asked) == 64 * 8192 * 4 == 8 * page and "attention.unpacked" not in workspace_arrays(FIVE, asked)
    many = replace(asked, ubatch=4096)
    assert lent_to_unpack(FIVE, many) == 64 << 20, "at most"
    few = replace(asked, ubatch=7)  # 229,376 bytes
    assert lent_to_unpack(FIVE, few) == 0 and workspace_arrays(FIVE, few)["attention.unpacked"].shape == (page,)
    assert "attention.unpacked" not in workspace_arrays(FIVE, replace(asked, ubatch=1)), "a single token unpacks nothing"
    odd = replace(asked, ubatch=30)  # 3.75 pages
    assert lent_to_unpack(FIVE, odd) == 3 * page
    for plain in (cache("f16", "f16"), cache("bf16", "f32")):
        assert lent_to_unpack(FIVE, plain) == 0 and "attention.unpacked" not in workspace_arrays(FIVE, replace(plain, ubatch=7))
