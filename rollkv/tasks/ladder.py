"""The words of a ladder: its rungs, what every rung does, and what was measured. Plain data; tasks/climb.py runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from rollkv.config import CacheConfig, ModelConfig
from rollkv.errors import UsageError
from rollkv.kv_formats import of_full_attention, tail_formats
from rollkv.ladder_fit import relative_spread
from rollkv.pages import pages_for
from rollkv.units import format_size

MAX_WARM_STEPS = 16
REPLY_TOKENS = 24  # room for the answer to a needle: seven digits, and some words in front of them


@dataclass(frozen=True)
class Rung:
    """One configuration to plan. depth: cells in the cache before the first step."""

    label: str
    config: ModelConfig
    cache: CacheConfig
    depth: int
    vram_target: int | None = None  # bytes
    variant: str = ""  # tells rungs of the same label apart, where each is measured in several ways

    @property
    def name(self) -> str:
        return f"{self.label}, {self.variant}" if self.variant else self.label


@dataclass(frozen=True)
class Climb:
    """What every rung does, and the rungs. Behind the first, which is resident, num_placed - 1 more may be placed, each in all variants."""

    rungs: tuple[Rung, ...]
    num_steps: int
    repetitions: int
    fill: Literal["prompt", "random"] = "prompt"
    num_prompt: int | None = None  # tokens behind the depth whose prefill is timed; None: the prefill of the depth itself is
    num_placed: int = 0
    reload: bool = False  # load the weights for every rung, so that the device is free between them

    @property
    def variants(self) -> dict[str, ModelConfig]:
        """What the rungs compute, in the order in which they do."""
        return {rung.variant: rung.config for rung in self.rungs}

    @property
    def times_depth(self) -> bool:
        """Whether the prefill that is timed is that of the depth."""
        return self.num_prompt is None and self.fill == "prompt"


@dataclass(frozen=True)
class Prompt:
    """What one repetition reads: ids for depth and prefill, or at least one. found: whether the reply to them, of reply_tokens ids, holds
    what they ask for; None where they ask for nothing."""

    ids: tuple[int, ...]
    reply_tokens: int = 0
    found: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True)
class Repetition:
    """What one repetition measured."""

    prefill_seconds: float | None
    ttft_seconds: float | None
    warm_steps: int
    settled: bool  # whether the last two of them agreed
    step_seconds: tuple[float, ...]
    copied_bytes: tuple[int, ...]  # from the tail to the device, by step
    position: int  # behind the last step
    device_bytes: int | None
    found: bool | None


@dataclass(frozen=True)
class RungResult:
    """What was measured. Without repetitions: `refusal` says why it does not fit."""

    rung: Rung
    climb: Climb
    refusal: str | None = None
    repetitions: tuple[Repetition, ...] = ()
    cells_in_window: int | None = None
    cells_in_tail: int | None = None
    planned_bytes: int | None = None
    machine: dict[str, object] | None = None

    @property
    def ran(self) -> bool:
        return bool(self.repetitions)

    @property
    def step_seconds(self) -> list[float]:
        """Of all repetitions."""
        return [step for repetition in self.repetitions for step in repetition.step_seconds]

    @property
    def seconds(self) -> float:
        """The median step of all repetitions."""
        return median(self.step_seconds)

    @property
    def tail_bytes(self) -> float:
        """Copied in by the median step."""
        return float(median([size for repetition in self.repetitions for size in repetition.copied_bytes]))

    @property
    def prefill_seconds(self) -> list[float]:
        """One a repetition; none where none was timed."""
        return [rep.prefill_seconds for rep in self.repetitions if rep.prefill_seconds is not None]

    @property
    def ttft_seconds(self) -> list[float]:
        return [rep.ttft_seconds for rep in self.repetitions if rep.ttft_seconds is not None]

    @property
    def peak_device_bytes(self) -> int | None:
        return max((rep.device_bytes for rep in self.repetitions if rep.device_bytes is not None), default=None)

    @property
    def found(self) -> bool | None:
        """Whether every needle was found; None without any."""
        asked = [rep.found for rep in self.repetitions if rep.found is not None]
        return all(asked) if asked else None

    @property
    def spread(self) -> float | None:
        """Of the repetitions' median steps."""
        return relative_spread([median(rep.step_seconds) for rep in self.repetitions])

    @property
    def prefill_spread(self) -> float | None:
        return relative_spread(self.prefill_seconds)


def context_size(depth: int, num_steps: int, num_prompt: int | None = None) -> int:
    """Cells of depth, timed prefill, warm-up, measured steps and the reply to a needle."""
    return depth + (num_prompt or 0) + max(MAX_WARM_STEPS + num_steps, REPLY_TOKENS)


def in_variants(rungs: Sequence[Rung], variants: Mapping[str, ModelConfig]) -> tuple[Rung, ...]:
    """Each rung in every variant, one behind the other, so that they can be compared."""
    return tuple(replace(rung, config=config, variant=variant) for rung in rungs for variant, config in variants.items())


def resident_rung(config: ModelConfig, cache: CacheConfig, depth: int) -> Rung:
    return Rung("resident", config, replace(cache, residency="full", window_cells=None), depth)


def tail_rungs(config: ModelConfig, cache: CacheConfig, depth: int, tails: Sequence[float]) -> tuple[Rung, ...]:
    """A rung for every size of the tail in bytes, to the nearest whole page and each once. Raises UsageError for a tail that the context
    does not have, or a model that has none."""
    total, page_bytes = pages_for(cache.ctx_size, cache.page_cells), tail_page_bytes(config, cache)
    rungs: dict[int, Rung] = {}
    for tail in tails:
        pages = round(tail / page_bytes)
        if pages >= total:
            raise UsageError(
                f"a tail of {format_size(int(tail))} is more than a context of {cache.ctx_size} cells can have, "
                f"{format_size((total - 1) * page_bytes)}; lower --tail or raise --depth"
            )
        windowed = replace(cache, residency="window", window_cells=(total - pages) * cache.page_cells)
        label = f"tail {format_size(pages * page_bytes)}"
        rungs[pages] = Rung(label, config, windowed, depth) if pages else resident_rung(config, cache, depth)
    return tuple(rungs.values())


def cap_rung(config: ModelConfig, cache: CacheConfig, depth: int, cap: int) -> Rung:
    """Whatever fits under a cap in bytes stays resident."""
    return Rung(f"cap {format_size(cap)}", config, replace(cache, residency="auto", window_cells=None), depth, cap)


def tail_page_bytes(config: ModelConfig, cache: CacheConfig) -> int:
    """Bytes of one page of all full-attention layers in the tail. Raises UsageError when there are none."""
    size = sum(page.page_bytes for page in of_full_attention(config, tail_formats(config, cache)))
    if not size:
        raise UsageError("all layers of this model have sliding windows, so nothing is ever streamed; there is no ladder to climb")
    return size


def largest_tail(config: ModelConfig, cache: CacheConfig) -> int:
    """Bytes of the tail beside a window of one page."""
    return (pages_for(cache.ctx_size, cache.page_cells) - 1) * tail_page_bytes(config, cache)
