"""The ways in which a context fits under a cap: exact, with what does not fit streamed; or lossy, with cells of fewer bits. Plans alone; prints nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollkv.budget import Budget
from rollkv.config import CacheConfig
from rollkv.errors import OutOfMemoryError, RollkvError, UsageError

# What `rollkv generate` is asked for, beside the default; the fields of CacheConfig that say it; and the mean KL divergence from f16, in nats, that was measured with
# it on SmolLM2-135M over its whole context (docs/kv-types.md). Keys need more bits than values.
_KINDS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("", {}, 0.0),
    ("--cache-type-tail-k q8_0 --cache-type-tail-v q8_0", {"tail_key_type": "q8_0", "tail_value_type": "q8_0"}, 0.00004),
    ("--cache-type-k q8_0 --cache-type-v q8_0", {"key_type": "q8_0", "value_type": "q8_0"}, 0.00047),
    ("--cache-type-k q8_0 --cache-type-v turbo3", {"key_type": "q8_0", "value_type": "turbo3"}, 0.028),
    ("--cache-type-k q4_0 --cache-type-v q4_0 --kv-rotate", {"key_type": "q4_0", "value_type": "q4_0", "kv_rotate": True}, 0.051),
    ("--cache-type-k turbo4 --cache-type-v turbo4", {"key_type": "turbo4", "value_type": "turbo4"}, 0.062),
    ("--cache-type-k turbo4 --cache-type-v turbo2", {"key_type": "turbo4", "value_type": "turbo2"}, 0.22),
    ("--cache-type-k turbo3 --cache-type-v turbo3", {"key_type": "turbo3", "value_type": "turbo3"}, 0.28),
    ("--cache-type-k turbo2 --cache-type-v turbo2", {"key_type": "turbo2", "value_type": "turbo2"}, 1.2),
)

MakeBudget = Callable[[CacheConfig], Budget]


@dataclass(frozen=True)
class Way:
    """One of them. options: what to give beside model, length and cap, with the ubatch where it is not the one asked for; measured_kld: mean divergence in nats,
    of a small model; None where layers are protected."""

    options: str
    cache: CacheConfig
    budget: Budget
    measured_kld: float | None

    @property
    def exact(self) -> bool:
        """The bits of the resident run of the same ubatch, wherever its cells lie."""
        return not self.cache.lossy

    @property
    def tokens_per_second(self) -> float:
        """At most, behind a full context."""
        return 1 / self.budget.step.seconds

    def as_dict(self) -> dict[str, object]:
        return {"options": self.options, "exact": self.exact, "measured_kld": self.measured_kld, "budget": self.budget.as_dict()}


@dataclass(frozen=True)
class Ways:
    """found: those that fit, the best first. left_out: the options of those that do not, though the model's heads could be held so."""

    found: tuple[Way, ...]
    left_out: tuple[str, ...]


def ways_to_fit(cache: CacheConfig, make: MakeBudget) -> Ways:
    """Those that fit, the fastest first and an exact one before a lossy one of its speed. cache: f16, as large a window as the cap allows, and the layers
    that lossy ways protect; make: the budget under the cap, with the errors of run_budget.

    Raises when none fits: OutOfMemoryError, that of the last way, whose cells are the smallest, or UsageError; when layers are to be protected and no lossy way
    fits, that of the first lossy one.
    """
    found: list[Way] = []
    refused: dict[str, RollkvError] = {}
    for options, asked, loss in _kinds(cache):
        try:
            budget = make(asked)
        except (OutOfMemoryError, UsageError) as error:  # UsageError: heads that the type cannot hold, for one
            refused[options] = error
        else:
            shrunk = f"{options} --ubatch {budget.ubatch}".lstrip() if budget.ubatch != asked.ubatch else options
            found.append(Way(shrunk, asked, budget, loss))
    too_large = [options for options, error in refused.items() if isinstance(error, OutOfMemoryError)]
    if not found and too_large:
        least = too_large[-1]
        raise OutOfMemoryError(f"no way fits; of the smallest cells, {least or 'f16'}: {refused[least]}")
    if not found or (cache.protect_layers and all(way.exact for way in found)):
        raise next(iter(refused.values()))
    useful = [way for way in found if way.budget.spills or not way.cache.recodes]  # without a tail its type says nothing
    best_first = sorted(useful, key=lambda way: (-way.tokens_per_second, not way.exact))
    return Ways(tuple(best_first), tuple(too_large))


def _kinds(cache: CacheConfig) -> Iterator[tuple[str, CacheConfig, float | None]]:
    """The options of every way, what they ask for and what was measured. The exact one has no layer to protect."""
    protection = f" --kv-protect {cache.protect_layers}" if cache.protect_layers else ""
    for options, fields, loss in _KINDS:
        asked = replace(cache, **fields)
        if asked.lossy:
            yield options + protection, asked, None if protection else loss
        else:
            yield options, replace(asked, protect_layers=0), loss
