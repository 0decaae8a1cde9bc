"""The memory plan: what fits stays resident, what does not is spilled in whole pages, and nothing is planned over the cap."""

from dataclasses import replace

import pytest

from rollkv.budget import RING_SLOTS, SLACK_BYTES, Budget, DeviceOverhead, check_host_tail, plan_budget
from rollkv.config import CacheConfig, LayerConfig, ModelConfig, RopeConfig
from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.host_memory import HostMemory
from rollkv.stream_plan import RingShape
from rollkv.units import GIB, MIB

PAGE_BYTES = 8 * 256 * 128 * 2 * 2  # K and V of 8 heads of 128 in f16: 1 MiB
OVERHEAD = DeviceOverhead(500 * MIB, 20 * MIB, measured=True)


def model(num_layers: int = 36, sliding: tuple[int, ...] = ()) -> ModelConfig:
    rope = RopeConfig(128, "halves")
    layers = tuple(LayerConfig(32, 8, 128, 128, rope, 1024 if index in sliding else None) for index in range(num_layers))
    return ModelConfig("qwen3", 4096, 12288, 151936, 40960, 1e-6, layers, 128**-0.5, "silu")


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
    assert below.spills and below.ring is not None
    # The ring and the fresh pages cost a little; the window gives up no more than they need.
    assert 36 * PAGE_BYTES * (256 - below.window_pages) <= RING_SLOTS * 16 * MIB + 36 * 2 * PAGE_BYTES


def test_window_grows_with_the_cap_and_uses_it() -> None:
    caps = [11 * GIB, 12 * GIB, 14 * GIB, 16 * GIB, 17 * GIB]
    plans = [budget(cap) for cap in caps]
    windows = [plan.window_pages for plan in plans]
    assert windows == sorted(windows) and windows[0] < windows[-1] < 256
    for cap, plan in zip(caps, plans, strict=True):
        assert cap - 36 * PAGE_BYTES < plan.total_bytes <= cap
        assert plan.host_tail_bytes == 36 * (256 - plan.window_pages) * PAGE_BYTES
    for cap in range(11 * GIB, 12 * GIB, 7 * MIB + 13):
        assert budget(cap).total_bytes <= cap


def test_below_one_page_is_refused_with_every_term() -> None:
    """Before it comes to that the staging ring shrinks, down to slots of one page."""
    roomy = budget(None, residency="window", window_cells=1)
    assert roomy.window_pages == 1 and roomy.ring == RingShape(RING_SLOTS, 16)
    assert budget(roomy.total_bytes).ring == roomy.ring
    tight = budget(roomy.total_bytes - 1)
    assert tight.window_pages == 1 and tight.ring == RingShape(RING_SLOTS, 8)
    smallest = roomy.total_bytes - RING_SLOTS * 15 * PAGE_BYTES
    assert budget(smallest).ring == RingShape(RING_SLOTS, 1)
    with pytest.raises(OutOfMemoryError, match=r"context 500\.0 MiB.*weights 8\.00 GiB.*resident window.*--ctx-size"):
        budget(smallest - 1)


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
