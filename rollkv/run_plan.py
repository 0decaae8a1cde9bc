"""The budget of a run: from a header alone, or on a backend whose code is loaded and measured."""

from collections.abc import Mapping
from dataclasses import replace

from rollkv.backend import Backend
from rollkv.budget import Budget, DeviceOverhead, check_host_tail, plan_budget
from rollkv.config import CacheConfig, ModelConfig
from rollkv.errors import OutOfMemoryError
from rollkv.gguf_header import TensorData
from rollkv.host_memory import host_memory
from rollkv.kv_formats import check_kv_types
from rollkv.model.rehearsal import rehearse
from rollkv.roofline import ASSUMED, Bandwidths
from rollkv.rope import check_dual_chunks
from rollkv.ubatch import plan_ubatch
from rollkv.units import format_need, format_size
from rollkv.weights import weight_bytes
from rollkv.workspace import linear_scratch


def run_budget(
    config: ModelConfig,
    tensors: Mapping[str, TensorData],
    cache: CacheConfig,
    cap: int | None,
    overhead: DeviceOverhead | None,
    rates: Bandwidths = ASSUMED,
) -> Budget:
    """The budget of a run under a cap (None: as large as it likes). Raises as plan_budget, check_dual_chunks and check_kv_types do."""
    check_dual_chunks(config, cache.page_cells)
    check_kv_types(config, cache)
    weights = weight_bytes(config, tensors)

    def make(cache: CacheConfig) -> Budget:
        return plan_budget(config, cache, weights, linear_scratch(config, cache), cap_bytes=cap, overhead=overhead, rates=rates)

    return plan_ubatch(make, cache)


def plan_on(
    machine: Backend,
    config: ModelConfig,
    tensors: Mapping[str, TensorData],
    cache: CacheConfig,
    vram_target: int | None,
    rates: Bandwidths = ASSUMED,
) -> Budget:
    """The budget of a run on a backend that holds nothing, or weights alone, once its code is loaded and measured. Raises OutOfMemoryError
    when it exceeds the cap, the device or host memory."""
    use, limit, overhead = machine.device_use(), vram_target, None
    if use is not None:
        available = use.free_bytes + use.used_bytes
        limit = vram_target or available
        # What cannot fit beside the code that is there already is refused before more of it loads.
        first = run_budget(config, tensors, cache, limit, DeviceOverhead(use.context_bytes, use.modules_bytes, measured=True), rates)
        machine.prepare(lambda backend: rehearse(backend, config, settled(cache, first), tensors))
        use = machine.device_use()
        assert use is not None
        overhead = DeviceOverhead(use.context_bytes, use.modules_bytes, measured=True)
    budget = run_budget(config, tensors, cache, limit, overhead, rates)
    if use is not None and budget.total_bytes > available:
        raise OutOfMemoryError(
            f"the run needs {format_need(budget.total_bytes)} on the device, but {format_size(available)} of it can be had now; "
            "free device memory, or lower --vram-target"
        )
    check_host_tail(budget, host_memory())
    return budget


def settled(cache: CacheConfig, budget: Budget) -> CacheConfig:
    """The configuration with the ubatch that it was planned with."""
    return cache if cache.ubatch == budget.ubatch else replace(cache, ubatch=budget.ubatch)
