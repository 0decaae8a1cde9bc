"""What was measured of a machine is found again for the same card and driver only, and damaged files are as good as none."""

import json
from pathlib import Path

import pytest

from rollkv.machine_rates import MachineRates, PcieLink, RatesCache, known_bandwidths
from rollkv.roofline import ASSUMED, Bandwidths

CARD = "Some GPU at 0000:01:00.0, driver for CUDA 13.0"
RATES = MachineRates(25e9, 9e11, PcieLink(4, 16, 5, None))


def test_rates_come_back_for_their_card_alone(tmp_path: Path) -> None:
    cache = RatesCache(tmp_path / "new" / "rates")
    assert cache.load(CARD) is None
    cache.store(CARD, RATES)
    cache.store(CARD + "x", MachineRates(1.0, 2.0))
    assert cache.load(CARD) == RATES and cache.load(CARD + "x") == MachineRates(1.0, 2.0)
    assert len(list(cache.directory.iterdir())) == 2, "nothing is left of the writing"
    cache.path(CARD).rename(cache.path("another"))
    assert cache.load("another") is None and cache.load(CARD) is None


@pytest.mark.parametrize(
    "change",
    [
        {"link": None}, {"link": 0}, {"link": -1.0}, {"hbm": float("nan")}, {"hbm": float("inf")}, {"hbm": "1e9"}, {"hbm": True},
        {"pcie": None}, {"pcie": {"lanes": 3}}, {"card": "another"},
    ],
)  # fmt: skip
def test_what_is_no_rate_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    cache = RatesCache(tmp_path)
    cache.store(CARD, RATES)
    whole = cache.path(CARD).read_text()
    cache.path(CARD).write_text(json.dumps(json.loads(whole) | change))
    assert cache.load(CARD) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"link": 1e9}'])
def test_damaged_files_are_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    cache = RatesCache(tmp_path)
    cache.path(CARD).write_bytes(content)
    assert cache.load(CARD) is None
    cache.store(CARD, RATES)
    assert cache.load(CARD) == RATES


def test_a_place_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = RatesCache(tmp_path / "file")
    cache.store(CARD, RATES)
    assert cache.load(CARD) is None


def test_plans_reckon_with_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLKV_CACHE_DIR", str(tmp_path))
    assert known_bandwidths(None) == known_bandwidths(CARD) == ASSUMED
    RatesCache().store(CARD, RATES)
    assert known_bandwidths(CARD) == Bandwidths(25e9, 9e11, "measured", "measured") and known_bandwidths(None) == ASSUMED
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["rates"]


def test_a_slow_link_is_named() -> None:
    words = PcieLink(1, 4, 5, 16).slow_words
    assert words is not None and "gen1 x4" in words and "gen5 x16" in words
    assert PcieLink(5, 8, 5, 16).slow_words and PcieLink(4, 16, 5, 16).slow_words
    assert PcieLink(5, 16, 5, 16).slow_words is None and PcieLink(5, 16, 4, 16).slow_words is None
    for unknown in (PcieLink(), PcieLink(1, 4, None, 16), PcieLink(1, None, 5, 16)):
        assert unknown.slow_words is None
    assert PcieLink(3, 8, numa_node=1).as_dict() == {
        "pcie_generation": 3,
        "pcie_width": 8,
        "pcie_max_generation": None,
        "pcie_max_width": None,
        "numa_node": 1,
    }


def test_a_link_in_words() -> None:
    assert PcieLink(5, 16, 5, 16, 0).words == "PCIe gen5 x16, NUMA node 0"
    assert PcieLink(4, 8).words == "PCIe gen4 x8" and PcieLink(4, None, numa_node=1).words == "PCIe link not known, NUMA node 1"
