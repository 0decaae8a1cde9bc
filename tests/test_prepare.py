"""Before the plan: what a run will load is loaded, measured and planned with, over a double of the driver. Needs no GPU."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engines
from fake_machine import LIBRARY_BYTES, MODULE_BYTES, Library, Machine, engine, install
from rollkv.config import DualChunk
from rollkv.cuda.backend import CudaBackend
from rollkv.cuda.driver import DriverCalls
from rollkv.errors import OutOfMemoryError
from rollkv.machine_rates import MachineRates, RatesCache
from rollkv.model_config import model_config
from rollkv.roofline import ASSUMED, Bandwidths
from rollkv.startup import load_on
from rollkv.synth import open_model
from rollkv.tasks.record import machine_facts
from rollkv.units import MIB
from rollkv.workspace import ALIGNMENT


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = install(monkeypatch, Machine())
    monkeypatch.setattr(CudaBackend, "can_record", False)
    return made


MODELS = [
    *(engines.FIXTURES / f"{model}.gguf" for model in engines.MODELS),
    "synth:tiny:Q4_K",
    "synth:tiny:F16,architecture=gemma3,hidden=320",
]


@pytest.mark.parametrize("kv,window", [("f16", None), ("bf16", 64), ("f16", 64)])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: getattr(path, "stem", path))
def test_a_run_loads_nothing_that_was_not_prepared(machine: Machine, path: Any, kv: Any, window: int | None) -> None:
    with engine(machine, path, ctx_size=500, ubatch=200, page_cells=64, kv=kv, window=window) as run:
        modules, products = machine.modules, set(Library.products)
        assert modules > 10 and products
        for length in (*range(1, 34), 63, 64, 65, 199, 200, 201, 480):
            run.reset()
            run.prefill([1] * length)
        for _ in range(10):
            run.decode(1)
        for _ in run.logit_rows([1] * 5):
            pass
        assert machine.modules == modules
        shapes = {product[1:] for product in products}
        assert {product[1:] for product in Library.products} == shapes
        planned = dict(run.budget.device)
        assert planned["modules"] == modules * MODULE_BYTES + LIBRARY_BYTES
        assert machine.taken() == run.budget.total_bytes and run.budget.overhead_measured


@pytest.mark.parametrize("path", [MODELS[0], MODELS[4]], ids=["llama", "gemma3"])
def test_chunks_load_nothing_either(machine: Machine, path: Any) -> None:
    """Not in any of them: single steps and prompts, in the first, over its end and beyond."""
    chunk = DualChunk(chunk_cells=192, local_cells=64, original_context=100)
    with engine(machine, path, dual_chunk=chunk, ctx_size=500, ubatch=200, page_cells=64, kv="f16", window=64) as run:
        modules = machine.modules
        for length in (1, 127, 128, 129, 257, 450):
            run.reset()
            run.prefill([1] * length)
            run.decode(1)
        assert machine.modules == modules


CODED: list[dict[str, Any]] = [
    {"kv": "turbo2"},
    {"kv": "q8_0", "value_kv": "turbo3", "rotate": True, "window": 64},
    {"kv": "f16", "tail_kv": "turbo4", "window": 64},
    {"kv": "q8_0", "tail_value_kv": "q4_0", "window": 128, "protect": 1},
]


@pytest.mark.parametrize("dual_chunk", [None, DualChunk(chunk_cells=192, local_cells=64, original_context=100)], ids=["", "chunks"])
@pytest.mark.parametrize("types", CODED, ids=lambda types: " ".join(map(str, types.values())))
@pytest.mark.parametrize("path", ["synth:tiny:F16", MODELS[4]], ids=["tiny", "gemma3"])
def test_coded_pages_load_nothing_either(machine: Machine, path: Any, types: dict[str, Any], dual_chunk: DualChunk | None) -> None:
    """Nor do tails of other types, in which pages are encoded anew."""
    with engine(machine, path, dual_chunk=dual_chunk, ctx_size=500, ubatch=200, page_cells=64, **types) as run:
        modules = machine.modules
        for length in (1, 63, 64, 65, 200, 201, 480):
            run.reset()
            run.prefill([1] * length)
            run.decode(1)
        assert machine.modules == modules


def test_records_name_the_card(machine: Machine) -> None:
    with engine(machine, MODELS[0], ctx_size=16) as run:
        facts = machine_facts(run)
    assert (facts["backend"], facts["gpu"], facts["gpu_bytes"], facts["driver_cuda"]) == ("cuda", "Fake GPU", 1 << 30, "13.0")
    with engines.host_engine("llama", engines.cache(16)) as run:
        facts = machine_facts(run)
    assert (facts["backend"], facts["gpu"], facts["gpu_bytes"], facts["driver_cuda"]) == ("host", None, None, None)


def test_records_tell_how_the_tail_was_made(machine: Machine) -> None:
    with engine(machine, MODELS[0], ctx_size=300, window=64, page_cells=32, kv="f16", ubatch=64) as run:
        assert machine_facts(run)["host_tail_made_gbps"] is None, "nobody has needed it yet"
        run.fill_random(200, 0)
        assert machine_facts(run)["host_tail_made_gbps"] > 0  # type: ignore[operator]


def test_short_contexts_want_no_library(machine: Machine) -> None:
    with engine(machine, MODELS[0], ctx_size=16) as run:
        run.prefill([1] * 15)
        assert not Library.products and machine.library == 0


@pytest.mark.parametrize("extra", [0, 777_777, 5 * MIB, 30 * MIB])
def test_no_moment_exceeds_the_cap(machine: Machine, extra: int) -> None:
    """Loading included; and most of what spilling leaves is used."""
    options = {"ctx_size": 60000, "ubatch": 256, "page_cells": 256, "kv": "f16"}
    cap = 180 * MIB + extra
    with engine(machine, "synth:tiny", cap, **options) as run:
        run.prefill([1] * 1000)
        run.decode(1)
        assert run.budget.spills
        assert 0.97 * cap < machine.peak <= cap


def test_a_new_plan_keeps_to_its_own_cap(machine: Machine) -> None:
    """Smaller and larger ones, and none; new products are warmed up beside the weights that are there."""
    options: dict[str, Any] = {"page_cells": 256, "kv": "f16"}
    with engine(machine, "synth:tiny", 180 * MIB, ctx_size=60000, ubatch=64, **options) as run:
        for cap, ubatch in ((150 * MIB + 5, 64), (210 * MIB, 512), (170 * MIB, 512), (190 * MIB, 100)):
            cache = replace(engines.cache(60000, ubatch=ubatch, **options), residency="auto")
            machine.peak = 0
            run.replan(cache, cap)
            run.prefill([1] * 1000)
            run.decode(1)
            assert run.budget.spills and run.budget.cap_bytes == run.stats.cap_bytes == cap
            assert 0.97 * cap < machine.peak <= cap
            with pytest.raises(OutOfMemoryError, match=rf"beyond needs.*cap {cap / MIB:.1f} MiB"):
                run.backend.empty("beyond", (8 * MIB,), "u8")
        run.replan(cache)
        assert not run.budget.spills
        run.backend.empty("beyond", (8 * MIB,), "u8")


@pytest.mark.parametrize("before", [16, 256])
def test_a_new_plan_meets_the_caps_that_a_fresh_load_meets(machine: Machine, before: int) -> None:
    """Down to the smallest, whether the vendor library is there already (256 rows) or not (16). One that is refused leaves the weights."""
    options: dict[str, Any] = {"ctx_size": 60000, "page_cells": 256, "kv": "f16"}
    caps = [MIB * cap for cap in (136, 138, 126, 139, 160)]

    def fresh(cap: int) -> Any:
        machine.modules = machine.library = 0
        try:
            with engine(machine, "synth:tiny", cap, ubatch=256, **options) as run:
                return run.budget.device
        except OutOfMemoryError as error:
            machine.device.clear()
            return str(error)

    wanted = [fresh(cap) for cap in caps]
    assert [isinstance(outcome, str) for outcome in wanted] == [True, False, True, False, False]
    machine.modules = machine.library = 0
    cache = replace(engines.cache(ubatch=256, **options), residency="auto")
    with engine(machine, "synth:tiny", 160 * MIB, ubatch=before, **options) as run:
        for cap, outcome in zip(caps, wanted, strict=True):
            if isinstance(outcome, str):
                with pytest.raises(OutOfMemoryError) as refused:
                    run.replan(cache, cap)
                assert str(refused.value) == outcome
            else:
                run.replan(cache, cap)
                assert run.budget.device == outcome


def test_decoding_loads_nothing_at_any_depth(machine: Machine) -> None:
    """Some kernels serve few pages, others many."""
    with engine(machine, "synth:tiny", ctx_size=20000, ubatch=1024, page_cells=256, kv="f16") as run:
        modules = machine.modules
        for cells in (1, 300, 5000, 9000, 19990):
            run.fill_random(cells - run.position, 0)
            run.decode(1)
            assert machine.modules == modules


def test_what_is_warm_is_not_warmed_up_again(machine: Machine) -> None:
    with engine(machine, MODELS[0], ctx_size=500, ubatch=64) as run:
        modules, products = machine.modules, list(Library.products)
        run.replan(run.cache_config)
        assert machine.modules == modules and Library.products == products
        run.replan(engines.cache(500, ubatch=200))
        new = Library.products[len(products) :]
        assert new and not set(new) & set(products)


@pytest.mark.parametrize("name", engines.MODELS)
def test_an_engine_lets_go_of_the_file(machine: Machine, name: str) -> None:
    with open_model(engines.FIXTURES / f"{name}.gguf") as file:
        maps = list(file._maps)
        run = load_on(CudaBackend(calls=DriverCalls(machine)), file, model_config(file), engines.cache(100))
    with run:
        assert maps and all(data.closed for data in maps)
        run.replan(engines.cache(50, window=16))


def test_what_cannot_fit_is_refused_before_anything_loads(machine: Machine) -> None:
    with pytest.raises(OutOfMemoryError, match="too small"):
        engine(machine, MODELS[0], 20 * MIB, ctx_size=500)
    assert machine.modules == 0 and machine.library == 0


def test_a_failure_while_warming_up_gives_the_memory_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *_: Any, **__: Any) -> None:
        raise OutOfMemoryError("broken")

    monkeypatch.setattr(Library, "multiply", broken)
    with pytest.raises(OutOfMemoryError, match="broken"):
        engine(machine, MODELS[0], ctx_size=500)
    assert not machine.device


def test_the_host_prepares_nothing() -> None:
    from rollkv.host_backend import HostBackend

    HostBackend().prepare(lambda backend: pytest.fail("rehearsed"))


def test_plans_reckon_with_what_was_measured_of_the_card(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is measured for it: without a stored figure rates are assumed. A new plan keeps them."""
    monkeypatch.setenv("ROLLKV_CACHE_DIR", str(tmp_path))
    options = {"ctx_size": 500, "page_cells": 64, "window": 64}
    with engine(machine, MODELS[0], **options) as run:
        assert run.budget.rates == ASSUMED
        RatesCache().store(run.backend.gpu.card, MachineRates(3e9, 4e11))
        run.replan(run.cache_config)
        assert run.budget.rates == ASSUMED
    with engine(machine, MODELS[0], **options) as run:
        assert run.budget.rates == Bandwidths(3e9, 4e11, "measured", "measured")
        run.replan(run.cache_config)
        assert run.budget.rates.link == 3e9


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: getattr(path, "stem", path))
def test_every_account_is_a_line_of_the_budget(machine: Machine, path: Any, window: int | None) -> None:
    """The scratch of the products too, which the host backend does not have; and nothing is taken that no line stands for but constants."""
    with engine(machine, path, ctx_size=500, ubatch=200, page_cells=64, kv="f16", window=window) as run:
        lines: Counter[str] = Counter()
        for label, size in run.budget.device:
            lines[label.removeprefix("workspace: ").replace("sliding-window rings", "resident window")] += size
        accounts: Counter[str] = Counter()
        for label, size in run.backend.device_bytes.items():
            accounts[label.split(",")[0]] += size
        shared = lines.keys() & accounts.keys() - {"context", "modules"}
        assert {"cuBLAS", "f16 activations", "hidden", "resident window"} <= shared
        assert lines.keys() - shared <= {"context", "modules", "weights", "slack"}
        for label in shared:
            assert accounts[label] <= lines[label] < accounts[label] + len(run.config.layers) * ALIGNMENT, label
