"""One memory budget, computed from the header alone: what lies on the device, how many pages stay resident, what is pinned on the host.

If all KV fits without a staging ring, nothing spills. Otherwise window and ring share what is left (residency.py), in whole pages, at least
one of window. The engine allocates exactly these lines, so plan and reality differ only where context and modules were estimated.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rollkv.config import CacheConfig, ModelConfig, PageFormat
from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.host_memory import HostMemory
from rollkv.kv_formats import of_full_attention, page_formats, tail_formats
from rollkv.pages import fresh_pages, pages_for, sliding_ring_pages
from rollkv.residency import choose, plans_for
from rollkv.roofline import ASSUMED, Bandwidths, StepCost, Traffic, pieces_of, resident_cost, streamed_cost
from rollkv.stream_plan import RingShape
from rollkv.units import MIB, format_need, format_size, round_up
from rollkv.workspace import ALIGNMENT, GRANULE_BYTES, arena_bytes, workspace_arrays

# Without a device to measure: a bare context (518 MiB on an H200 with driver 580), and the code of the kernels, those of cuBLAS included: 66 to
# 70 MiB on the same card for shapes from 1B to 14B. Recorded steps took nothing on top.
DEFAULT_CONTEXT_BYTES = 520 * MIB
DEFAULT_MODULES_BYTES = 96 * MIB
SLACK_BYTES = 4 * MIB  # at least: the arena is taken in whole granules
_OVERHEAD = ("context", "modules")
_RECORDED = "recorded step"
# What the driver takes for a recorded step, by pieces of the tail, a copy and a launch each: 6 MiB for 3,552 on an H200, nothing that showed for 1,536.
_RECORDED_FREE_PIECES, _RECORDED_PIECE_BYTES = 1536, 3328


@dataclass(frozen=True)
class DeviceOverhead:
    """What the process holds on the device before the first byte of the arena, and whether it was measured."""

    context_bytes: int = DEFAULT_CONTEXT_BYTES
    modules_bytes: int = DEFAULT_MODULES_BYTES
    measured: bool = False


@dataclass(frozen=True)
class Budget:
    """Bytes by name, and the residency that follows from them."""

    device: tuple[tuple[str, int], ...]
    cap_bytes: int | None
    total_pages: int  # of the context, in every full-attention layer
    window_pages: int
    page_cells: int
    ring: RingShape | None
    fresh_slots: int  # in each of the two fresh pools; 0 without
    host_tail_bytes: int
    kv_bytes: int  # of the whole context in full-attention layers
    overhead_measured: bool
    ubatch: int  # rows of the largest step
    step: StepCost  # of decode behind a full context
    rates: Bandwidths  # that it was reckoned with
    outgoing_slots: int = 0  # in each of the two pools of pages on their way to a tail of another type; 0 without

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.device)

    @property
    def window_cells(self) -> int:
        return self.window_pages * self.page_cells

    @property
    def tail_cells(self) -> int:
        """Of a full context."""
        return max(self.total_pages - self.window_pages, 0) * self.page_cells

    @property
    def spills(self) -> bool:
        return self.window_pages < self.total_pages

    @property
    def weight_bytes(self) -> int:
        """The piece of device memory that the weights fill."""
        return sum(size for name, size in self.device if name == "weights")

    @property
    def run_bytes(self) -> int:
        """The other piece that the engine takes: everything but weights and what the driver holds."""
        return self.total_bytes - sum(size for name, size in self.device if name in (*_OVERHEAD, _RECORDED, "weights"))

    def lines(self) -> list[tuple[str, int]]:
        """Device memory by name, with a word where a size is an estimate; they add up to total_bytes."""
        estimated = () if self.overhead_measured else _OVERHEAD
        return [(f"{name} (estimate)" if name in estimated else name, size) for name, size in self.device]

    def as_dict(self) -> dict[str, object]:
        return {
            "device_bytes": dict(self.device),
            "total_bytes": self.total_bytes,
            "cap_bytes": self.cap_bytes,
            "page_cells": self.page_cells,
            "total_pages": self.total_pages,
            "window_pages": self.window_pages,
            "window_cells": self.window_cells,
            "tail_pages": self.tail_cells // self.page_cells,
            "ring_slots": self.ring.num_slots if self.ring else 0,
            "ring_slot_pages": self.ring.slot_pages if self.ring else 0,
            "ubatch": self.ubatch,
            "kv_bytes": self.kv_bytes,
            "host_tail_bytes": self.host_tail_bytes,
            "context_measured": self.overhead_measured,
            "predicted": self.step.as_dict() | self.rates.as_dict(),
        }


def plan_budget(
    config: ModelConfig,
    cache: CacheConfig,
    weight_bytes: Mapping[str, int],
    linear_bytes: Mapping[str, int],
    *,
    cap_bytes: int | None = None,
    overhead: DeviceOverhead | None = None,
    rates: Bandwidths = ASSUMED,
) -> Budget:
    """The budget of one run. weight_bytes and linear_bytes: device bytes of every tensor, and of the products' scratch, by name.

    Raises OutOfMemoryError, with every line, when the cap is below the minimum, or below what residency "full" or a given window needs.
    """
    return _Planner(config, cache, weight_bytes, linear_bytes, cap_bytes, overhead or DeviceOverhead(), rates).plan()


def token_weight_bytes(config: ModelConfig, weight_bytes: Mapping[str, int]) -> int:
    """Weights that every new token reads, of those loaded. A row of the embedding table is too little to count."""
    return sum(size for name, size in weight_bytes.items() if config.tied_output or name != "token_embd.weight")


def check_host_tail(budget: Budget, memory: HostMemory) -> None:
    """Raises OutOfMemoryError, with all terms, when the tail does not fit in host memory."""
    if budget.host_tail_bytes <= memory.usable_bytes:
        return
    cgroup = "no cgroup limit" if memory.cgroup_bytes is None else f"{format_size(memory.cgroup_bytes)} left in the cgroup"
    raise OutOfMemoryError(
        f"the KV tail needs {format_need(budget.host_tail_bytes)} of host memory, but {format_size(memory.usable_bytes)} can be used "
        f"({format_size(memory.available_bytes)} available, {cgroup}, {format_size(memory.reserve_bytes)} kept back); "
        "lower --ctx-size or raise --vram-target"
    )


@dataclass(frozen=True)
class _Planner:
    config: ModelConfig
    cache: CacheConfig
    weight_bytes: Mapping[str, int]
    linear_bytes: Mapping[str, int]
    cap_bytes: int | None
    overhead: DeviceOverhead
    rates: Bandwidths

    def plan(self) -> Budget:
        cache, total = self.cache, self._total_pages
        if not self._pages or cache.residency == "full":
            return self._checked(self._budget(total, None))
        if cache.window_cells is not None:
            window = min(pages_for(cache.window_cells, cache.page_cells), total)
            return self._checked(self._best(np.array([window])))
        if self.cap_bytes is not None:
            return self._checked(self._best(np.arange(1, total + 1)))
        if cache.residency == "window":
            raise UsageError("--residency window needs a size: give --window CELLS or --vram-target SIZE")
        return self._budget(total, None)

    # -- facts of the context ----------------------------------------------------------------------------------------------------
    @cached_property
    def _total_pages(self) -> int:
        return pages_for(self.cache.ctx_size, self.cache.page_cells)

    @cached_property
    def _rows(self) -> int:
        return min(self.cache.ubatch, self.cache.ctx_size)

    @cached_property
    def _formats(self) -> tuple[PageFormat, ...]:
        return page_formats(self.config, self.cache)

    @cached_property
    def _tail_formats(self) -> tuple[PageFormat, ...]:
        return tail_formats(self.config, self.cache)

    @cached_property
    def _pages(self) -> list[int]:
        """Bytes of a page of every full-attention layer, in the window."""
        return [page.page_bytes for page in of_full_attention(self.config, self._formats)]

    @cached_property
    def _tails(self) -> list[int]:
        """Bytes of a page of every full-attention layer, in the tail."""
        return [page.page_bytes for page in of_full_attention(self.config, self._tail_formats)]

    @cached_property
    def _recoded(self) -> bool:
        """Whether some layer's tail has a type of its own."""
        return self._formats != self._tail_formats

    @cached_property
    def _sliding(self) -> list[int]:
        """Bytes of the ring of every sliding-window layer."""
        return [
            page.page_bytes * min(self._total_pages, sliding_ring_pages(layer.sliding_window, self._rows, self.cache.page_cells))
            for layer, page in zip(self.config.layers, self._formats, strict=True)
            if layer.sliding_window is not None
        ]

    @cached_property
    def _traffic(self) -> Traffic:
        seen = sum(
            page.page_bytes * min(self.cache.ctx_size, layer.sliding_window) // self.cache.page_cells
            for layer, page in zip(self.config.layers, self._formats, strict=True)
            if layer.sliding_window is not None
        )
        fixed = token_weight_bytes(self.config, self.weight_bytes) + seen
        return Traffic(fixed, tuple(self._pages), self._total_pages, tuple(self._tails))

    # -- plans -------------------------------------------------------------------------------------------------------------------
    def _best(self, windows: np.ndarray) -> Budget:
        """With one of these windows (pages); the smallest of all plans when none fits."""
        total = self._total_pages
        plans = plans_for(windows, total, max(self._tails))
        arena = self._fixed_bytes + sum(self._moving(plans.window_pages, plans.num_slots * plans.slot_pages).values())
        recorded = self._recorded_bytes(total - plans.window_pages, np.maximum(plans.slot_pages, 1))
        sizes = self.overhead.context_bytes + self.overhead.modules_bytes + recorded + arena + _slack(arena)
        resident = resident_cost(self._traffic, self.rates).seconds
        tails = np.maximum(total - plans.window_pages, 1)
        streamed = streamed_cost(self._traffic, self.rates, tails, plans.num_slots, np.maximum(plans.slot_pages, 1)).seconds
        # A tail of fewer bits is read faster than a window, but what fits into the window is not given up for that.
        seconds = np.where(plans.window_pages < total, np.maximum(streamed, resident), resident)
        row = choose(plans.window_pages, sizes, seconds, sizes.max() if self.cap_bytes is None else self.cap_bytes)
        if row is None:  # ring and fresh pages may shrink as the window grows: the smallest plan need not have the smallest window
            row = int(np.argmin(sizes))
        window, num_slots, slot_pages = (int(column[row]) for column in (plans.window_pages, plans.num_slots, plans.slot_pages))
        return self._budget(window, RingShape(num_slots, slot_pages) if num_slots else None)

    @cached_property
    def _always(self) -> dict[str, int]:
        """What the arena holds whatever the window is."""
        arrays, scratch = workspace_arrays(self.config, self.cache), self.linear_bytes
        return {
            "weights": round_up(arena_bytes(list(self.weight_bytes.values())), GRANULE_BYTES),
            "sliding-window rings": arena_bytes(self._sliding),
            **{f"workspace: {name}": round_up(spec.nbytes, ALIGNMENT) for name, spec in arrays.items()},
            **{f"workspace: {name}": round_up(size, ALIGNMENT) for name, size in scratch.items()},
        }

    @cached_property
    def _fixed_bytes(self) -> int:
        return sum(self._always.values())

    def _moving(self, window: Any, ring_pages: Any) -> dict[str, Any]:
        """What the arena holds for a window and a ring of so many pages: numbers, or arrays of plans."""
        largest, in_tail = max(self._pages, default=0), max(self._tails, default=0)
        return {
            "resident window": sum(layers * round_up(window * size, ALIGNMENT) for size, layers in Counter(self._pages).items()),
            "staging ring": round_up(ring_pages * in_tail, ALIGNMENT),
            "fresh pages": 2 * round_up(self._fresh_slots(window) * largest, ALIGNMENT),
            "outgoing pages": 2 * round_up(self._outgoing_slots(window) * in_tail, ALIGNMENT),
        }

    def _recorded_bytes(self, tail: Any, slot_pages: Any) -> Any:
        """Of a step with so many pages of every full-attention layer in the tail: numbers, or arrays of plans."""
        pieces = sum(layers * pieces_of(tail, slot_pages, max(self._tails), size) for size, layers in Counter(self._tails).items())
        return round_up(np.maximum(pieces - _RECORDED_FREE_PIECES, 0) * _RECORDED_PIECE_BYTES, GRANULE_BYTES)

    def _fresh_slots(self, window: Any) -> Any:
        """In each of the two pools; none where nothing spills."""
        touched = fresh_pages(self._rows, self.cache.page_cells, 0)
        return np.maximum(touched - window, 0) * (window < self._total_pages)

    def _outgoing_slots(self, window: Any) -> Any:
        """In each of the two pools: pages that the largest step can complete. None where pages go to the tail as they are."""
        completed = pages_for(self._rows, self.cache.page_cells)
        return np.minimum(completed, self._total_pages - window) * self._recoded

    def _budget(self, window: int, ring: RingShape | None) -> Budget:
        tail = self._total_pages - window
        arena = {"weights": 0} | self._moving(window, ring.num_slots * ring.slot_pages if ring else 0) | self._always
        arena["slack"] = _slack(sum(arena.values()))
        recorded = self._recorded_bytes(tail, ring.slot_pages if ring else 1)
        lines = {"context": self.overhead.context_bytes, "modules": self.overhead.modules_bytes, _RECORDED: recorded} | arena
        return Budget(
            device=tuple((name, int(size)) for name, size in lines.items() if size),
            cap_bytes=self.cap_bytes,
            total_pages=self._total_pages,
            window_pages=window,
            page_cells=self.cache.page_cells,
            ring=ring,
            fresh_slots=int(self._fresh_slots(window)),
            host_tail_bytes=tail * sum(self._tails),
            kv_bytes=window * sum(self._pages) + tail * sum(self._tails),
            overhead_measured=self.overhead.measured,
            ubatch=self.cache.ubatch,
            step=self._step(tail, ring),
            rates=self.rates,
            outgoing_slots=int(self._outgoing_slots(window)),
        )

    def _step(self, tail: int, ring: RingShape | None) -> StepCost:
        if ring is None:
            return resident_cost(self._traffic, self.rates)
        return streamed_cost(self._traffic, self.rates, tail, ring.num_slots, ring.slot_pages)

    def _checked(self, budget: Budget) -> Budget:
        if self.cap_bytes is None or budget.total_bytes <= self.cap_bytes:
            return budget
        terms = ", ".join(f"{name} {format_size(size)}" for name, size in _summed(budget.lines()))
        wanted = "everything resident" if not budget.spills else f"a resident window of {budget.window_cells} cells"
        raise OutOfMemoryError(
            f"--vram-target {format_size(self.cap_bytes)} is too small: {wanted} needs at least {format_need(budget.total_bytes)} "
            f"({terms}); raise it{self._remedy(budget)}"
        )

    def _remedy(self, budget: Budget) -> str:
        if budget.spills:
            return ", or lower --window" if self.cache.window_cells is not None else ", or lower --ctx-size"
        return ", or leave --residency full out" if self.cache.residency == "full" else ""


def _slack(arena_bytes: Any) -> Any:
    """The arena is taken in whole granules."""
    return round_up(arena_bytes + SLACK_BYTES, GRANULE_BYTES) - arena_bytes


def _summed(lines: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Lines with the workspace as one term, for a message of one line."""
    terms: dict[str, int] = {}
    for name, size in lines:
        key = name.split(":")[0]
        terms[key] = terms.get(key, 0) + size
    return list(terms.items())
