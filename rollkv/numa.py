"""Which NUMA node a card hangs on, and memory of that node.

A copy from the memory of another processor crosses the link between the two first. Asks the system directly (mbind), so no library is needed.
"""

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_PREFERRED = 1  # MPOL_PREFERRED: of this node as long as it has any, of others then
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

Syscall = Callable[..., int]


def node_of(pci_bus_id: str, sysfs: Path = Path("/sys")) -> int | None:
    """The node of a PCI device ("0000:1A:00.0"); None where there is one node alone, or the system does not know."""
    try:
        nodes = (sysfs / "devices" / "system" / "node" / "online").read_text().strip()
        node = int((sysfs / "bus" / "pci" / "devices" / pci_bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 and nodes != "0" else None


def prefer_node(address: int, num_bytes: int, node: int, syscall: Syscall | None = None) -> bool:
    """Has pages of this memory that are not made yet be of a node, as long as it has any. False where the system refuses, as it does in some
    containers: they are then of whatever node makes them. address: a multiple of the page size."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    call = _libc_syscall() if syscall is None else syscall
    # maxnode counts one more than the bits of the mask
    arguments = (address, num_bytes, _PREFERRED, ctypes.addressof(mask), len(mask) * _LONG_BITS + 1, 0)
    return call(*map(ctypes.c_long, (number, *arguments))) == 0


def _libc_syscall() -> Syscall:
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    return function
