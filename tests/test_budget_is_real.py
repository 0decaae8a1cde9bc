"""The engine allocates exactly the lines of its budget: on the host array by array, and over a double of the driver from what was reserved."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import engines
from rollkv.config import CacheConfig
from rollkv.engine import Engine
from rollkv.errors import OutOfMemoryError
from rollkv.gguf_file import open_gguf
from rollkv.host_backend import HostBackend
from rollkv.model_config import model_config
from rollkv.roofline import Bandwidths
from rollkv.run_plan import run_budget
from rollkv.units import round_up
from rollkv.weights import weight_bytes
from rollkv.workspace import ALIGNMENT, GRANULE_BYTES, linear_scratch, workspace_arrays


class Ledger(HostBackend):
    """Keeps an account of what is taken, aligned as the device's arena aligns it."""

    def __init__(self) -> None:
        super().__init__()
        self.device: Counter[str] = Counter()
        self.host = 0
        self.linear: tuple[int, ...] = ()

    def empty(self, label: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._enter(label, super().empty(label, shape, dtype))

    def upload(self, label: str, values: np.ndarray) -> Any:
        return self._enter(label, super().upload(label, values))

    def _enter(self, label: str, array: Any) -> Any:
        self.device[label.split(",")[0]] += round_up(array.nbytes, ALIGNMENT)
        return array

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> Any:
        self.host += num_pages * page_bytes
        return super().host_pages(label, num_pages, page_bytes)

    def reserve_linear(self, *sizes: int) -> None:
        self.linear = sizes


CACHES = st.builds(
    CacheConfig,
    ctx_size=st.integers(1, 20_000),
    page_cells=st.sampled_from([64, 256]),
    key_type=st.sampled_from(["f16", "f32"]),
    value_type=st.sampled_from(["f16", "bf16", "f32"]),
    ubatch=st.sampled_from([1, 16, 17, 200, 4096]),
    residency=st.just("auto"),
    window_cells=st.one_of(st.none(), st.integers(1, 20_000)),
)


# Of heads of 16.
KEPT: list[dict[str, Any]] = [
    {"key_type": "turbo4", "value_type": "turbo2"},
    {"key_type": "f16", "value_type": "turbo3", "tail_value_type": "turbo2"},
    {"key_type": "f16", "value_type": "f16", "tail_key_type": "turbo4", "tail_value_type": "turbo3"},
    {"key_type": "turbo4", "value_type": "turbo4", "tail_key_type": "turbo2", "tail_value_type": "turbo2"},
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(["llama", "qwen3", "gemma3"]),
    cache=CACHES,
    kept=st.one_of(st.just({}), st.sampled_from(KEPT)),
    share=st.one_of(st.none(), st.floats(0, 1)),
    rates=st.sampled_from([Bandwidths(2e9, 1e11), Bandwidths(5e10, 4e12)]),
)
def test_every_line_of_the_budget_is_allocated(
    model: str, cache: CacheConfig, kept: dict[str, Any], share: float | None, rates: Bandwidths
) -> None:
    cache = replace(cache, **kept)
    with open_gguf(engines.FIXTURES / f"{model}.gguf") as file:
        config = model_config(file)
        resident = run_budget(config, file.tensors, cache, None, None, rates)
        budget = resident
        if share is not None:
            movable = dict(resident.device).get("resident window", 0)
            try:
                budget = run_budget(config, file.tensors, cache, resident.total_bytes - int(share * movable), None, rates)
            except OutOfMemoryError:
                reject()
        ledger = Ledger()
        Engine(ledger, file, config, cache, budget)
        weights = sum(weight_bytes(config, file.tensors).values())
    planned = dict(budget.device)
    scratch = linear_scratch(config, cache)
    want = {name: size for name, size in planned.items() if name in ("staging ring", "fresh pages", "outgoing pages")}
    want |= {name.removeprefix("workspace: "): size for name, size in planned.items() if name.startswith("workspace: ")}
    want = {name: size for name, size in want.items() if name not in scratch}
    if "resident window" in planned or "sliding-window rings" in planned:
        want["resident window"] = planned.get("resident window", 0) + planned.get("sliding-window rings", 0)
    assert dict(ledger.device) == want
    assert set(workspace_arrays(config, cache)) <= set(want)
    assert ledger.host == budget.host_tail_bytes
    assert weights <= planned["weights"] < weights + len(file.tensors) * ALIGNMENT + GRANULE_BYTES
    assert budget.run_bytes == sum(planned.values()) - planned["weights"] - planned["context"] - planned["modules"]
