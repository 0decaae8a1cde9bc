"""The memory plan: what fits stays resident, what does not is spilled in whole pages, and nothing is planned over the cap."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollkv.budget import SLACK_BYTES, Budget, DeviceOverhead, check_host_tail, plan_budget
from rollkv.config import CacheConfig, LayerConfig, ModelConfig, RopeConfig
from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.host_memory import HostMemory
from rollkv.kv_formats import page_formats
from rollkv.roofline import Bandwidths
from rollkv.stream_plan import RingShape
from rollkv.units import GIB, MIB
from rollkv.workspace import GRANULE_BYTES

PAGE_BYTES = 8 * 256 * 128 * 2 * 2  # K and V of 8 heads of 128 in f16: 1 MiB
OVERHEAD = DeviceOverhead(500 * MIB, 20 * MIB, measured=True)


def model(num_layers: int = 36, sliding: tuple[int, ...] = (), num_kv_heads: int = 8, head_dim: int = 128) -> ModelConfig:
    rope = RopeConfig(128, "halves")
    layers = tuple(
        LayerConfig(32, num_kv_heads, head_dim, head_dim, rope, 1024 if index in sliding else None) for index in range(num_layers)
    )
    return ModelConfig("qwen3", 4096, 12288, 151936, 40960, 1e-6, layers, 128**-0.5, "silu")


def pages_of(config: ModelConfig) -> list[int]:
    """Bytes of an f16 page of every full-attention layer."""
    formats = zip(config.layers, page_formats(config, CacheConfig(1)), strict=True)
    return [page.page_bytes for layer, page in formats if layer.sliding_window is None]


def budget(cap: int | None, ctx: int = 65536, config: ModelConfig | None = None, **cache: object) -> Budget:
    options = CacheConfig(ctx, **cache)  # type: ignore[arg-type]
    return plan_budget(config or model(), options, {"all": 8 * GIB}, {"slab": 64 * MIB}, cap_bytes=cap, overhead=OVERHEAD)


def test_without_a_cap_everything_is_resident() -> None:
    plan = budget(None)
    assert not plan.spills and plan.window_pages == 256 and plan.ring is None and plan.host_tail_bytes == 0
    assert dict(plan.device)["resident window"] == 36 * 256 * PAGE_BYTES
    assert sum(size for _, size in plan.lines()) == plan.total_bytes


def test_estimates_are_called_so() -> None:
    measured = budget(None)
    guessed = plan_budget(model(), CacheConfig(65536), {"all": 8 * GIB}, {"slab": 64 * MIB})
    assert [name for name, _ in measured.lines()][:3] == ["context", "modules", "weights"]
    assert [name for name, _ in guessed.lines()][:3] == ["context (estimate)", "modules (estimate)", "weights"]
    assert (guessed.weight_bytes, guessed.run_bytes) == (measured.weight_bytes, measured.run_bytes)


def test_the_arena_is_whole_granules() -> None:
    """The device is asked for what the plan says, not for a part of a granule more."""
    for cap in (None, *range(11 * GIB, 11 * GIB + 40 * MIB, 3 * MIB + 17)):
        plan = budget(cap)
        assert plan.weight_bytes % (2 * MIB) == 0 and plan.run_bytes % (2 * MIB) == 0
        assert SLACK_BYTES <= dict(plan.device)["slack"] < SLACK_BYTES + 2 * MIB


def test_the_cap_at_which_all_just_fits_needs_no_ring() -> None:
    exact = budget(None).total_bytes
    assert not budget(exact).spills
    below = budget(exact - 1)
    # One page of every layer goes, through slots for as many layers as still pays.
    assert (below.window_pages, below.ring) == (255, RingShape(8, 1))


def test_window_grows_with_the_cap_and_uses_it() -> None:
    caps = [11 * GIB, 12 * GIB, 14 * GIB, 16 * GIB, 17 * GIB]
    plans = [budget(cap) for cap in caps]
    windows = [plan.window_pages for plan in plans]
    assert windows == sorted(windows) and windows[0] < windows[-1] < 256
    for cap, plan in zip(caps, plans, strict=True):
        assert cap - 37 * PAGE_BYTES < plan.total_bytes <= cap
        assert plan.host_tail_bytes == 36 * (256 - plan.window_pages) * PAGE_BYTES
    for cap in range(11 * GIB, 12 * GIB, 7 * MIB + 13):
        assert budget(cap).total_bytes <= cap


def test_below_one_page_is_refused_with_every_term() -> None:
    """Before it comes to that the staging ring shrinks, down to two slots of one page."""
    roomy = budget(None, residency="window", window_cells=1)
    assert roomy.window_pages == 1 and roomy.ring is not None and roomy.ring.slot_pages == 16
    assert budget(roomy.total_bytes).ring == roomy.ring
    smallest = roomy.total_bytes - (roomy.ring.num_slots * 16 - 2) * PAGE_BYTES
    tight = budget(smallest)
    assert tight.window_pages == 1 and tight.ring is not None and tight.ring.slot_pages == 1
    with pytest.raises(OutOfMemoryError, match=r"context 500\.0 MiB.*weights 8\.00 GiB.*resident window.*--ctx-size"):
        budget(smallest - 1)


SHAPES = st.builds(
    lambda layers, sliding, heads, dim: model(layers, tuple(range(sliding % layers)), heads, dim),
    st.integers(1, 48), st.integers(0, 47), st.sampled_from([1, 2, 8, 32]), st.sampled_from([64, 128, 256]),
)  # fmt: skip
SPEEDS = st.builds(Bandwidths, st.sampled_from([6e9, 25e9, 54.9e9]), st.sampled_from([2e11, 1e12, 4.3e12]))


@settings(deadline=None)
@given(
    shape=SHAPES,
    rates=SPEEDS,
    ctx=st.integers(1, 100_000),
    ubatch=st.sampled_from([1, 512, 4096]),
    steps=st.lists(st.floats(-0.1, 1.1), min_size=2),
)
def test_a_larger_cap_is_never_slower(shape: ModelConfig, rates: Bandwidths, ctx: int, ubatch: int, steps: list[float]) -> None:
    """Nor has it a smaller window, and no plan is larger than its cap."""

    def plan(cap: int | None, window: int | None = None) -> Budget:
        cache = CacheConfig(ctx, ubatch=ubatch, window_cells=window)
        return plan_budget(shape, cache, {"all": 64 * MIB}, {}, cap_bytes=cap, overhead=OVERHEAD, rates=rates)

    resident = plan(None)
    least = min(plan(None, window).total_bytes for window in (1, 4096, ctx))
    last: Budget | None = None
    for cap in sorted(int(least + step * (resident.total_bytes - least)) for step in steps):
        try:
            now = plan(cap)
        except OutOfMemoryError:
            assert last is None and cap < resident.total_bytes
            continue
        assert now.total_bytes <= cap and (now.spills or now.step == resident.step)
        assert last is None or (now.window_pages >= last.window_pages and now.step.seconds <= last.step.seconds)
        assert now.spills == (cap < resident.total_bytes)
        if now.ring is not None:
            tail, page = now.total_pages - now.window_pages, max(pages_of(shape))
            assert now.ring.slot_pages <= tail and now.ring.slot_pages * page <= max(page, 16 * MIB)
        last = now


@settings(deadline=None)
@given(shape=SHAPES, rates=SPEEDS, ctx=st.integers(300, 100_000), ubatch=st.sampled_from([256, 4096]))
def test_where_one_page_fits_nothing_is_refused(shape: ModelConfig, rates: Bandwidths, ctx: int, ubatch: int) -> None:
    """Beside the smallest ring, two slots of one page."""
    assume(pages_of(shape))
    cache = CacheConfig(ctx, ubatch=ubatch)
    with_one = plan_budget(shape, replace(cache, window_cells=1), {}, {}, overhead=OVERHEAD, rates=rates)
    assert with_one.ring is not None
    spare = (with_one.ring.num_slots * with_one.ring.slot_pages - 2) * max(pages_of(shape))
    cap = with_one.total_bytes - spare // GRANULE_BYTES * GRANULE_BYTES
    plan_budget(shape, cache, {}, {}, cap_bytes=cap, overhead=OVERHEAD, rates=rates)


@pytest.mark.parametrize("layers,heads,dim,weights", [(36, 8, 128, 8), (48, 8, 128, 15), (32, 8, 64, 1), (32, 32, 128, 4), (18, 1, 256, 1)])
@pytest.mark.parametrize("rates", [Bandwidths(25e9, 1e12), Bandwidths(54.9e9, 4.3e12)], ids=["pcie4", "pcie5"])
def test_nearly_all_of_the_cap_is_used(layers: int, heads: int, dim: int, weights: int, rates: Bandwidths) -> None:
    """97 % of it, wherever something spills and a page of all layers is not more than that."""
    shape, cache = model(layers, (), heads, dim), CacheConfig(131072)
    least = plan_budget(shape, replace(cache, window_cells=1), {"all": weights * GIB}, {}, overhead=OVERHEAD).total_bytes
    resident = plan_budget(shape, cache, {"all": weights * GIB}, {}, overhead=OVERHEAD).total_bytes
    for cap in range(least, resident, (resident - least) // 97):
        plan = plan_budget(shape, cache, {"all": weights * GIB}, {}, cap_bytes=cap, overhead=OVERHEAD, rates=rates)
        assert plan.spills and min(0.97 * cap, cap - sum(pages_of(shape)) - 16 * MIB) <= plan.total_bytes <= cap


def test_pieces_are_large_where_the_tail_is() -> None:
    """4 to 16 MiB, or a layer's whole tail, but beside a window of one page."""
    for cap in range(10 * GIB, budget(None).total_bytes, 97 * MIB):
        plan = budget(cap)
        assert plan.ring is not None
        assert min(4, plan.total_pages - plan.window_pages) * PAGE_BYTES <= plan.ring.slot_pages * PAGE_BYTES <= 16 * MIB


def test_full_is_full_or_refused() -> None:
    assert not budget(64 * GIB, residency="full").spills
    with pytest.raises(OutOfMemoryError, match="everything resident"):
        budget(12 * GIB, residency="full")


def test_a_given_window_is_taken_in_whole_pages() -> None:
    assert budget(None, residency="window", window_cells=257).window_pages == 2
    assert budget(None, residency="window", window_cells=10**9).window_pages == 256
    with pytest.raises(UsageError, match="--window"):
        budget(None, residency="window")


def test_sliding_layers_keep_a_small_ring_and_never_spill() -> None:
    config = model(6, sliding=(0, 1, 2, 3, 4))
    plan = budget(10 * GIB, ctx=1 << 20, config=config, ubatch=512)
    ring_pages = -(-(1023 + 511) // 256) + 1
    assert dict(plan.device)["sliding-window rings"] == 5 * ring_pages * PAGE_BYTES
    assert plan.host_tail_bytes == (4096 - plan.window_pages) * PAGE_BYTES
    assert plan.total_bytes <= 10 * GIB


def test_only_sliding_layers_have_no_window_to_plan() -> None:
    plan = budget(None, config=model(2, sliding=(0, 1)))
    assert "resident window" not in dict(plan.device) and plan.host_tail_bytes == 0


def test_a_short_context_takes_short_arrays() -> None:
    assert budget(None, ctx=40).total_bytes < budget(None, ctx=4096).total_bytes - 1 * GIB


def test_the_tail_must_fit_in_host_memory() -> None:
    plan = budget(12 * GIB)
    check_host_tail(plan, HostMemory(plan.host_tail_bytes + GIB, None))
    with pytest.raises(OutOfMemoryError, match=r"4\.00 GiB left in the cgroup.*1\.00 GiB kept back"):
        check_host_tail(plan, HostMemory(64 * GIB, 4 * GIB))
    check_host_tail(replace(plan, host_tail_bytes=0), HostMemory(0, 0))
