"""What the options of a ladder name: rungs at one depth, or several depths. Each is still in one variant."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollkv.cli.options import size_option
from rollkv.errors import UsageError

if TYPE_CHECKING:
    from rollkv.config import CacheConfig, ModelConfig
    from rollkv.tasks.ladder import Rung

_DEFAULT_STEPS = 8
_MOST_STEPS = 1000


def one_depth(
    config: "ModelConfig", cache: "CacheConfig", depth: int, vram_target: str | None, tail: str | None, steps: int | None
) -> "tuple[tuple[Rung, ...], int]":
    """(the rungs that the options name, how many there are with those that are placed behind them). Raises UsageError."""
    from rollkv.counts import is_range, parse_sizes
    from rollkv.tasks.ladder import cap_rung, resident_rung, tail_rungs

    if vram_target is not None and tail is not None:
        raise UsageError("--vram-target and --tail are both given; give one of them")
    if steps is not None and not 2 <= steps <= _MOST_STEPS:
        raise UsageError(f"--steps {steps}: a ladder has 2 to {_MOST_STEPS} rungs")
    for option, text in (("--vram-target", vram_target), ("--tail", tail)):
        if text is not None and steps is not None and not is_range(text):
            raise UsageError(
                f"--steps {steps} divides a range, but {option} {text!r} is a list; write {option} LO..HI, or leave out one of them"
            )
    count = steps or _DEFAULT_STEPS
    if vram_target is not None:
        return tuple(cap_rung(config, cache, depth, cap) for cap in dict.fromkeys(parse_sizes(vram_target, "--vram-target", count))), 0
    if tail is not None:
        return tail_rungs(config, cache, depth, parse_sizes(tail, "--tail", count, zero=True)), 0
    return (resident_rung(config, cache, depth),), count


def depths(
    config: "ModelConfig", caches: "Mapping[int, CacheConfig]", vram_target: str | None, others: Mapping[str, object]
) -> "tuple[Rung, ...]":
    """A rung for every depth, resident or under the cap. Raises UsageError for options that go with a ladder at one depth."""
    from rollkv.counts import is_range, split_list
    from rollkv.tasks.ladder import cap_rung, resident_rung

    given = [option for option, value in others.items() if value is not None]
    if given:
        raise UsageError(
            f"{given[0]} goes with a ladder at one depth, not with several depths or --n-prompt; give one --depth and leave out --n-prompt"
        )
    if vram_target is None:
        return tuple(resident_rung(config, cache, depth) for depth, cache in caches.items())
    if len(split_list(vram_target, "--vram-target")) > 1 or is_range(vram_target):
        raise UsageError(f"--vram-target {vram_target}: several depths, or --n-prompt, are measured under one cap; give one, such as 6GiB")
    cap = size_option(vram_target, "--vram-target")
    assert cap is not None
    return tuple(cap_rung(config, cache, depth, cap) for depth, cache in caches.items())
