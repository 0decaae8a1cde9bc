"""One memory budget, computed from the header alone: what lies on the device, how many pages stay resident, what is pinned on the host.

The resident answer is tried first: if all KV fits without a staging ring, nothing spills. Otherwise the window gets what is left, in whole
pages, at least one. The engine allocates exactly these lines, so plan and reality differ only where context and modules were estimated.
"""

from dataclasses import dataclass

from rollkv.config import CacheConfig, ModelConfig
from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.host_memory import HostMemory
from rollkv.pages import fresh_pages, pages_for, sliding_ring_pages
from rollkv.stream_plan import RingShape
from rollkv.units import MIB, format_size, round_up
from rollkv.workspace import ALIGNMENT, GRANULE_BYTES, arena_bytes, workspace_arrays

# Without a device to measure: a bare context (518 MiB on an H200 with driver 580), and the code of the kernels, those of cuBLAS included: 66 to
# 70 MiB on the same card for shapes from 1B to 14B. Recorded steps took nothing on top.
DEFAULT_CONTEXT_BYTES = 520 * MIB
DEFAULT_MODULES_BYTES = 96 * MIB
SLACK_BYTES = 4 * MIB  # at least: the arena is taken in whole granules
_OVERHEAD = ("context", "modules")
RING_SLOTS = 4  # four slots of 16 MiB keep a PCIe 5 link busy (54.9 of 55 GB/s); smaller pieces lose to their own latency
RING_PIECE_BYTES = 16 * MIB


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

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.device)

    @property
    def window_cells(self) -> int:
        return self.window_pages * self.page_cells

    @property
    def spills(self) -> bool:
        return self.window_pages < self.total_pages

    @property
    def weight_bytes(self) -> int:
        """The piece of device memory that the weights fill."""
        return sum(size for name, size in self.device if name == "weights")

    @property
    def run_bytes(self) -> int:
        """The other piece that the engine takes: everything but context, modules and weights."""
        return self.total_bytes - sum(size for name, size in self.device if name in (*_OVERHEAD, "weights"))

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
            "tail_pages": max(self.total_pages - self.window_pages, 0),
            "ring_slots": self.ring.num_slots if self.ring else 0,
            "ring_slot_pages": self.ring.slot_pages if self.ring else 0,
            "kv_bytes": self.kv_bytes,
            "host_tail_bytes": self.host_tail_bytes,
            "context_measured": self.overhead_measured,
        }


def plan_budget(
    config: ModelConfig,
    cache: CacheConfig,
    weight_bytes: dict[str, int],
    linear_bytes: dict[str, int],
    *,
    cap_bytes: int | None = None,
    overhead: DeviceOverhead | None = None,
) -> Budget:
    """The budget of one run. weight_bytes and linear_bytes: device bytes of every tensor, and of the products' scratch, by name.

    Raises OutOfMemoryError, with every line, when the cap is below the minimum, or below what residency "full" or a given window needs.
    """
    return _Planner(config, cache, weight_bytes, linear_bytes, cap_bytes, overhead or DeviceOverhead()).plan()


def check_host_tail(budget: Budget, memory: HostMemory) -> None:
    """Raises OutOfMemoryError, with all terms, when the tail does not fit in host memory."""
    if budget.host_tail_bytes <= memory.usable_bytes:
        return
    cgroup = "no cgroup limit" if memory.cgroup_bytes is None else f"{format_size(memory.cgroup_bytes)} left in the cgroup"
    raise OutOfMemoryError(
        f"the KV tail needs {format_size(budget.host_tail_bytes)} of host memory, but {format_size(memory.usable_bytes)} can be used "
        f"({format_size(memory.available_bytes)} available, {cgroup}, {format_size(memory.reserve_bytes)} kept back); "
        "lower --ctx-size or raise --vram-target"
    )


@dataclass(frozen=True)
class _Planner:
    config: ModelConfig
    cache: CacheConfig
    weight_bytes: dict[str, int]
    linear_bytes: dict[str, int]
    cap_bytes: int | None
    overhead: DeviceOverhead

    def plan(self) -> Budget:
        total = pages_for(self.cache.ctx_size, self.cache.page_cells)
        if not any(layer.sliding_window is None for layer in self.config.layers):
            return self._checked(self._budget(total, total))
        if self.cache.residency == "full":
            return self._checked(self._budget(total, total))
        if self.cache.window_cells is not None:
            return self._checked(self._budget(min(pages_for(self.cache.window_cells, self.cache.page_cells), total), total))
        if self.cache.residency == "window" and self.cap_bytes is None:
            raise UsageError("--residency window needs a size: give --window CELLS or --vram-target SIZE")
        resident = self._budget(total, total)
        if self.cap_bytes is None or resident.total_bytes <= self.cap_bytes:
            return resident
        slot_pages = self._slot_pages(total)
        return self._checked(self._budget(self._largest_window(total, slot_pages), total, slot_pages))

    def _slot_pages(self, total: int) -> int:
        """Pages of a slot of the staging ring: halved until one page of window fits beside it. Small pieces cost link rate, not bits."""
        assert self.cap_bytes is not None
        slot_pages = max(1, min(RING_PIECE_BYTES // self._largest_page(), total))
        while slot_pages > 1 and self._budget(1, total, slot_pages).total_bytes > self.cap_bytes:
            slot_pages //= 2
        return slot_pages

    def _largest_page(self) -> int:
        return max(self.cache.page_format(layer).page_bytes for layer in self.config.layers if layer.sliding_window is None)

    def _largest_window(self, total: int, slot_pages: int) -> int:
        """The most pages that fit under the cap beside a staging ring; 1 if none does."""
        assert self.cap_bytes is not None
        smallest = self._budget(1, total, slot_pages)
        sizes = dict(smallest.device)
        fixed = smallest.total_bytes - sum(sizes.get(name, 0) for name in ("resident window", "fresh pages", "staging ring", "slack"))
        page_bytes = sum(self.cache.page_format(layer).page_bytes for layer in self.config.layers if layer.sliding_window is None)
        # Ring and fresh pages shrink as the window grows, so begin at the bound without them and walk down: a few dozen steps at most.
        window = max(1, min(total - 1, (self.cap_bytes - fixed - SLACK_BYTES) // page_bytes))
        while window > 1 and self._budget(window, total, slot_pages).total_bytes > self.cap_bytes:
            window -= 1
        return window

    def _budget(self, window: int, total: int, slot_pages: int | None = None) -> Budget:
        """The budget of a given window; slot_pages None: pieces of 16 MiB."""
        cache, layers = self.cache, self.config.layers
        rows = min(cache.ubatch, cache.ctx_size)
        full = [cache.page_format(layer).page_bytes for layer in layers if layer.sliding_window is None]
        sliding = [
            cache.page_format(layer).page_bytes * min(total, sliding_ring_pages(layer.sliding_window, rows, cache.page_cells))
            for layer in layers
            if layer.sliding_window is not None
        ]
        tail = total - window
        ring, fresh = None, 0
        if tail > 0:
            ring = RingShape(RING_SLOTS, max(1, min(slot_pages or RING_PIECE_BYTES // max(full), tail)))
            fresh = fresh_pages(rows, cache.page_cells, window)
        lines = [
            ("context", self.overhead.context_bytes),
            ("modules", self.overhead.modules_bytes),
            ("weights", round_up(arena_bytes(list(self.weight_bytes.values())), GRANULE_BYTES)),
            ("resident window", arena_bytes([window * size for size in full])),
            ("sliding-window rings", arena_bytes(sliding)),
            ("staging ring", round_up(ring.num_slots * ring.slot_pages * max(full), ALIGNMENT) if ring else 0),
            ("fresh pages", 2 * round_up(fresh * max(full), ALIGNMENT) if fresh else 0),
            *((f"workspace: {name}", round_up(spec.nbytes, ALIGNMENT)) for name, spec in workspace_arrays(self.config, cache).items()),
            *((f"workspace: {name}", round_up(size, ALIGNMENT)) for name, size in self.linear_bytes.items()),
        ]
        arena = sum(size for _, size in lines) - self.overhead.context_bytes - self.overhead.modules_bytes
        lines.append(("slack", round_up(arena + SLACK_BYTES, GRANULE_BYTES) - arena))
        return Budget(
            device=tuple((name, size) for name, size in lines if size),
            cap_bytes=self.cap_bytes,
            total_pages=total,
            window_pages=window,
            page_cells=cache.page_cells,
            ring=ring,
            fresh_slots=fresh,
            host_tail_bytes=sum(tail * size for size in full),
            kv_bytes=sum(total * size for size in full),
            overhead_measured=self.overhead.measured,
        )

    def _checked(self, budget: Budget) -> Budget:
        if self.cap_bytes is None or budget.total_bytes <= self.cap_bytes:
            return budget
        terms = ", ".join(f"{name} {format_size(size)}" for name, size in _summed(budget.lines()))
        wanted = "everything resident" if not budget.spills else f"a resident window of {budget.window_cells} cells"
        raise OutOfMemoryError(
            f"--vram-target {format_size(self.cap_bytes)} is too small: {wanted} needs at least {format_size(budget.total_bytes)} "
            f"({terms}); raise it, or lower --ctx-size or --ubatch"
        )


def _summed(lines: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Lines with the workspace as one term, for a message of one line."""
    terms: dict[str, int] = {}
    for name, size in lines:
        key = name.split(":")[0]
        terms[key] = terms.get(key, 0) + size
    return list(terms.items())
