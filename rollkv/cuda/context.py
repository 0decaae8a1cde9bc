"""One device made ready: the primary context, the three streams, and what the process holds on the device.

The primary context is shared with libraries that go through the CUDA runtime (cuBLAS). It is current on the thread that opened it.
"""

from contextlib import suppress
from typing import Any

from rollkv.backend import Stream
from rollkv.cuda.driver import DeviceFacts, DriverCalls
from rollkv.cuda.nvml import ProcessMemory
from rollkv.errors import DeviceError, OutOfMemoryError, RollkvError
from rollkv.units import format_size

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order against the default stream


class Context:
    """Open until `close`. context_bytes: what the process held on the device once context and streams existed."""

    def __init__(self, calls: DriverCalls, facts: DeviceFacts):
        self.facts = facts
        self.streams: dict[Stream, Any] = {}
        self._calls = calls
        self._retained = False
        self._device = calls("cuDeviceGet", facts.index)
        self._watch = ProcessMemory(facts.pci_bus_id)
        self._used_before = self._watch.device_used_bytes() or 0
        was_active = self._is_active()
        try:
            context = calls.unless_out_of_memory("cuDevicePrimaryCtxRetain", self._device, what=f"the context on device {facts.index}")
            if context is None:
                raise OutOfMemoryError(
                    f"device {facts.index} ({facts.name}, {format_size(facts.total_bytes)}) has no memory left for a CUDA context; "
                    "free device memory"
                )
            self._retained = True
            calls("cuCtxSetCurrent", context)
            for stream in Stream:
                self.streams[stream] = calls("cuStreamCreate", _NON_BLOCKING)
            self._watch.identify()
            self.context_bytes = self.used_bytes()
        except BaseException:
            # To retain takes a third of a second, and an interrupt meanwhile is raised when it has been done.
            with suppress(RollkvError):
                self._retained = self._retained or (not was_active and self._is_active())
            self.close()
            raise

    def free_bytes(self) -> int:
        """Device memory that can still be had."""
        return int(self._calls("cuMemGetInfo")[0])

    def used_bytes(self) -> int:
        """Device memory of this process, everything included. Where NVML does not tell, what came on top of what others held at the
        start, which counts later comers as ours: never less than the truth."""
        used = self._watch.used_bytes()
        if used is not None:
            return used
        free, total = self._calls("cuMemGetInfo")
        return max(int(total) - int(free) - self._used_before, 0)

    def synchronize(self, last_launched: str) -> None:
        """Waits for all streams. Raises DeviceError, naming the last kernel launched, when the device failed."""
        for stream, handle in self.streams.items():
            status = int(self._calls.bindings.cuStreamSynchronize(handle)[0])
            if status != 0:
                name, text = self._calls.status_text(status)
                kernel = f"; the last kernel launched was {last_launched}" if last_launched else ""
                raise DeviceError(
                    f"the device failed on stream {stream.name} with {name} ({text}){kernel}; run it again under compute-sanitizer"
                )

    def _is_active(self) -> bool:
        """Whether the primary context exists, ours or not."""
        return bool(self._calls("cuDevicePrimaryCtxGetState", self._device)[1])

    def close(self) -> None:
        """Destroys the streams and releases the context. May be called twice, also after the device has failed."""
        while self.streams:
            self._calls.bindings.cuStreamDestroy(self.streams.popitem()[1])
        if self._retained:
            self._retained = False
            self._calls.bindings.cuDevicePrimaryCtxRelease(self._device)
