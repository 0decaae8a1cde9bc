"""`rollkv plan`: which rates it reckons with, and what it says of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollkv.backend import GpuFacts
from rollkv.cli.main import main
from rollkv.machine_rates import MachineRates, PcieLink, RatesCache
from rollkv.tasks import ceilings

GPU = GpuFacts("Some GPU", 1 << 35, "13.0", "0000:01:00.0")
MODEL = ("plan", "-m", "synth:tiny", "-c", "4096", "--window", "256")


class Backend:
    """Stands for the GPU's: opened, measured, given back."""

    facts = SimpleNamespace(pci_bus_id=GPU.pci_bus_id)
    gpu = GPU
    opened = 0

    def __init__(self, device: int, *, cap_bytes: int | None, warn: Any) -> None:
        type(self).opened += 1

    def __enter__(self) -> "Backend":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Backend]:
    """A GPU over a slow link whose rates are 20 and 500 GB/s, and an empty cache."""
    monkeypatch.setenv("ROLLKV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("rollkv.cuda.driver.find_device", lambda calls, index: SimpleNamespace(gpu=GPU))
    monkeypatch.setattr("rollkv.cuda.backend.CudaBackend", Backend)
    monkeypatch.setattr("rollkv.cuda.nvml.pcie_link", lambda bus: PcieLink(4, 16, 5, 16, 1))
    monkeypatch.setattr(ceilings, "measure_rates", lambda backend, array_bytes: ceilings.Rates(20e9, 20e9, 40e9, 500e9))
    monkeypatch.setattr(Backend, "opened", 0)
    return Backend


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    assert main([*MODEL, *options, "-o", "json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    return found["budget"]["predicted"] | {"link": (found["pcie_generation"], found["pcie_max_width"], found["numa_node"])}, err


def test_rates_are_measured_once(machine: type[Backend], capsys: pytest.CaptureFixture[str]) -> None:
    first, said = planned(capsys)
    assert (first["link_gbps"], first["link_origin"], first["hbm_gbps"], first["hbm_origin"]) == (20, "measured", 500, "measured")
    assert first["link"] == (4, 16, 1)
    assert machine.opened == 1 and "measuring link and device memory" in said and "gen4 x16" in said
    again, said = planned(capsys)
    assert again == first and machine.opened == 1
    assert "measuring" not in said and said.count("gen4 x16") == 1, "the link stays slow, and is named again"
    planned(capsys, "--probe-link")
    assert machine.opened == 2


def test_a_damaged_file_is_measured_again(machine: type[Backend], capsys: pytest.CaptureFixture[str]) -> None:
    planned(capsys)
    RatesCache().path(GPU.card).write_text("{")
    assert planned(capsys)[0]["link_gbps"] == 20 and machine.opened == 2
    assert RatesCache().load(GPU.card) == MachineRates(20e9, 500e9, PcieLink(4, 16, 5, 16, 1))


def test_a_given_rate_takes_the_place_of_the_measured_one(machine: type[Backend], capsys: pytest.CaptureFixture[str]) -> None:
    given = planned(capsys, "--link-gbps", "5")[0]
    assert (given["link_gbps"], given["link_origin"], given["hbm_gbps"]) == (5, "given", 500)
    assert given["link_ms"] > 3 * planned(capsys)[0]["link_ms"]
    for value in ("0", "-1", "nan", "inf"):
        assert main([*MODEL, "--link-gbps", value]) == 2
        assert "--link-gbps" in capsys.readouterr().err


def test_the_link_is_shown(machine: type[Backend], capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[tuple[tuple[str, ...], str]] = [((), "20.0 GB/s (measured)"), (("--link-gbps", "5"), "5.0 GB/s (given)")]
    for options, rate in shown:
        assert main([*MODEL, "-v", *options]) == 0
        assert f"rollkv: link: PCIe gen4 x16, NUMA node 1; {rate}\n" in capsys.readouterr().err


def test_without_a_gpu_rates_are_assumed(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assumed, said = planned(capsys)
    assert (assumed["link_gbps"], assumed["link_origin"], assumed["hbm_origin"]) == (25, "assumed", "assumed") and said == ""
    assert assumed["link"] == (None, None, None)
    assert main([*MODEL, "--probe-link"]) == 3
    assert "no GPU in this test" in capsys.readouterr().err


def test_without_memory_to_spare_rates_are_assumed(
    machine: type[Backend], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(backend: Backend, array_bytes: int) -> None:
        raise ceilings.OutOfMemoryError("no room")

    monkeypatch.setattr(ceilings, "measure_rates", full)
    assumed, said = planned(capsys)
    assert assumed["link_origin"] == "assumed" and "link and device memory cannot be measured: no room" in said
    assert RatesCache().load(GPU.card) is None
