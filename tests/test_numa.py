"""The node of a card, from files made here, and what the system is asked for."""

import ctypes
import platform
from pathlib import Path

import pytest

from rollkv import page_maker
from rollkv.numa import node_of, prefer_node
from rollkv.page_maker import PageMaker
from rollkv.units import MIB

BUS = "0000:1A:00.0"


def make_sysfs(folder: Path, online: str | None, node: str | None) -> Path:
    if online is not None:
        (folder / "devices/system/node").mkdir(parents=True)
        (folder / "devices/system/node/online").write_text(online + "\n")
    if node is not None:
        (folder / "bus/pci/devices" / BUS.lower()).mkdir(parents=True)
        (folder / "bus/pci/devices" / BUS.lower() / "numa_node").write_text(node + "\n")
    return folder


@pytest.mark.parametrize(
    ("online", "node", "wanted"),
    [("0-1", "1", 1), ("0-1", "0", 0), ("0,2", "2", 2), ("0-1", "-1", None), ("0", "0", None), ("0", "-1", None), ("0-1", None, None),
     (None, "1", None), ("0-1", "what", None)],
)  # fmt: skip
def test_the_node_of_a_card(tmp_path: Path, online: str | None, node: str | None, wanted: int | None) -> None:
    assert node_of(BUS, make_sysfs(tmp_path, online, node)) == wanted


class _System:
    """Takes what a call of mbind is given, and answers it."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.asked: list[tuple[int, ...]] = []
        self.nodes: set[int] = set()

    def __call__(self, *arguments: ctypes.c_long) -> int:
        self.asked.append(tuple(argument.value for argument in arguments))
        _, _, _, _, mask, maxnode, _ = self.asked[-1]
        bits = ctypes.string_at(mask, (maxnode - 1) // 8)
        self.nodes = {8 * index + bit for index, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1}
        return self.status


@pytest.mark.parametrize("node", [0, 3, 63, 64, 130])
def test_the_system_is_asked_for_a_node(monkeypatch: pytest.MonkeyPatch, node: int) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    system = _System(0)
    assert prefer_node(1 << 46, 12345, node, system)
    ((number, address, num_bytes, mode, _, _, flags),) = system.asked
    assert (number, address, num_bytes, mode, flags) == (237, 1 << 46, 12345, 1, 0) and system.nodes == {node}


def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not prefer_node(4096, 4096, 1, _System(-1))
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    system = _System(0)
    assert not prefer_node(4096, 4096, 1, system) and not system.asked, "this machine's number of the call is not known"


def test_the_real_system_takes_the_call() -> None:
    """Node 0 exists everywhere; a container may forbid the call. Either way the memory is made."""
    maker = PageMaker(node=0)
    area = maker.begin(MIB)
    assert prefer_node(area.address, area.num_bytes, 0) in (True, False)
    assert not prefer_node(area.address + 1, area.num_bytes, 0), "an address inside a page is refused"
    maker.wait(area, MIB)
    area.close()


def test_memory_is_asked_for_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def prefer(address: int, num_bytes: int, node: int) -> bool:
        assert not maker._parts, "nothing is being made yet"
        asked.append((address, num_bytes, node))
        return False

    monkeypatch.setattr(page_maker, "prefer_node", prefer)
    maker = PageMaker(node=1)
    area = maker.begin(3 * MIB)
    assert asked == [(area.address, 3 * MIB, 1)]
    maker.wait(area, 3 * MIB)
    area.close()
    maker = PageMaker()
    area = maker.begin(MIB)
    maker.wait(area, MIB)
    area.close()
    assert len(asked) == 1, "where there is no choice nothing is asked"
