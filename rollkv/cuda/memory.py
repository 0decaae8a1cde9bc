"""Device memory of a run: slabs with an account by label.

It is taken in slabs of whole 2 MiB, the driver's own granule, and handed out in order; a reserved slab is used before a new
one is taken. Nothing is handed back before `close`, which gives back all, so use is flat once everything is allocated. No managed memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rollkv.cuda.driver import DriverCalls
from rollkv.errors import OutOfMemoryError
from rollkv.units import format_need, format_size, round_up
from rollkv.workspace import ALIGNMENT, GRANULE_BYTES


@dataclass
class _Slab:
    """One device allocation, used up to `used`."""

    address: int
    size: int
    used: int = 0


class DeviceMemory:
    """Allocations on the current device. `accounts` holds the bytes handed out by label."""

    def __init__(self, calls: DriverCalls, cap_bytes: int | None, used_bytes: Callable[[], int]):
        self.accounts: dict[str, int] = {}
        self.cap_bytes = cap_bytes
        self._calls = calls
        self._used_bytes = used_bytes
        self._slabs: list[_Slab] = []

    @property
    def slab_bytes(self) -> int:
        """Bytes taken from the device, handed out or not."""
        return sum(slab.size for slab in self._slabs)

    def reserve(self, num_bytes: int) -> None:
        """Takes a slab of num_bytes that later allocations live in. Raises OutOfMemoryError."""
        self._grow("the reserved arena", num_bytes)

    def take(self, label: str, num_bytes: int) -> int:
        """Address of num_bytes, aligned to 256, from the first slab with room. Raises OutOfMemoryError naming label and sizes."""
        size = round_up(max(num_bytes, 1), ALIGNMENT)
        slab = next((slab for slab in self._slabs if slab.size - slab.used >= size), None) or self._grow(label, size)
        address = slab.address + slab.used
        slab.used += size
        self.accounts[label] = self.accounts.get(label, 0) + num_bytes
        return address

    @contextmanager
    def borrowed(self, label: str, num_bytes: int) -> Iterator[int]:
        """Address of num_bytes that go back at the end of the block. Raises OutOfMemoryError."""
        slab = self._grow(label, num_bytes)
        try:
            yield slab.address
        finally:
            self._slabs.remove(slab)
            self._calls.bindings.cuMemFree(slab.address)

    def close(self) -> None:
        """Frees everything; a new start may follow. May be called twice, also after the device has failed."""
        while self._slabs:
            self._calls.bindings.cuMemFree(self._slabs.pop().address)
        self.accounts.clear()

    def _grow(self, label: str, num_bytes: int) -> _Slab:
        size = round_up(num_bytes, GRANULE_BYTES)
        if self.cap_bytes is not None and self._used_bytes() + size > self.cap_bytes:
            raise OutOfMemoryError(self._message(label, num_bytes))
        address = self._calls.unless_out_of_memory("cuMemAlloc", size, what=label)
        if address is None:
            raise OutOfMemoryError(self._message(label, num_bytes))
        slab = _Slab(int(address), size)
        self._slabs.append(slab)
        return slab

    def _message(self, label: str, num_bytes: int) -> str:
        free, total = self._calls("cuMemGetInfo")
        cap = "no cap" if self.cap_bytes is None else f"cap {format_size(self.cap_bytes)}"
        return (
            f"device memory is too small: {label} needs {format_need(num_bytes)}; this process holds {format_size(self._used_bytes())} "
            f"({cap}), {format_size(int(free))} of {format_size(int(total))} are free; lower --ctx-size, --ubatch or --vram-target, or free memory"
        )
