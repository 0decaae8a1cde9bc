"""What bounds the speed of a machine, measured: the link each way and both at once, and device memory; and the bytes that a token moves.

The copies go through the calls, streams and kind of host memory that the cache uses. Prints nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rollkv.backend import PageRun, Stream
from rollkv.budget import token_weight_bytes
from rollkv.config import CacheConfig
from rollkv.errors import DeviceError, OutOfMemoryError
from rollkv.kv_formats import page_formats
from rollkv.machine_rates import MachineRates, PcieLink, RatesCache
from rollkv.model_config import model_config
from rollkv.roofline import ASSUMED, Bandwidths
from rollkv.synth import open_model
from rollkv.units import GIB, MIB, giga
from rollkv.weights import weight_bytes

PROBE_PAGE_BYTES, PROBE_PAGES, PROBE_COPIES, PROBE_ROUNDS = 16 * MIB, 16, 32, 5
PROBE_ARRAY_BYTES = (GIB, GIB // 4)  # the first that there is room for; both are many times the L2 cache


class TimedBackend(Protocol):
    """What a probe needs of a backend; the GPU's has it."""

    def empty(self, label: str, shape: tuple[int, ...], dtype: Any) -> Any: ...

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> Any: ...

    def copy_in(self, run: PageRun, host: Any) -> None: ...

    def copy_out(self, run: PageRun, host: Any) -> None: ...

    def add(self, x: Any, y: Any) -> None: ...

    def record_timed(self, stream: Stream) -> Any: ...

    def elapsed_ms(self, begin: Any, end: Any) -> float: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class Rates:
    """Bytes a second. None: not measured."""

    link_in: float | None = None  # host to device
    link_out: float | None = None
    link_both: float | None = None  # both ways at once, added up
    hbm: float | None = None  # device memory: two arrays read, one written
    pcie: PcieLink = PcieLink()
    link_given: float | None = None  # to reckon with in place of link_in

    @property
    def link(self) -> float | None:
        """What predictions, and the choice of window and ring, reckon with: the rate that was given, or else measured."""
        return self.link_in if self.link_given is None else self.link_given

    @property
    def bandwidths(self) -> Bandwidths | None:
        """What a plan is reckoned with; None where nothing was measured or given."""
        measured = None if self.link_in is None or self.hbm is None else MachineRates(self.link_in, self.hbm).bandwidths
        return measured if self.link_given is None else (measured or ASSUMED).with_link(self.link_given)


@dataclass(frozen=True)
class Ceilings:
    """What bounds a step at this depth, whatever the program does."""

    rates: Rates
    weight_bytes: int  # read by every new token
    kv_bytes: int  # read by every new token, as they lie in the window

    @property
    def token_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def roofline(self, tail_bytes: float) -> float | None:
        """New tokens a second at best, with this tail: the slower of device memory and link."""
        if self.rates.hbm is None or self.rates.link is None:
            return None
        return 1 / max(self.token_bytes / self.rates.hbm, tail_bytes / self.rates.link)

    def as_dict(self) -> dict[str, object]:
        rates = self.rates
        return {
            "given_link_gbps": giga(rates.link_given),
            "measured_link_in_gbps": giga(rates.link_in),
            "measured_link_out_gbps": giga(rates.link_out),
            "measured_link_both_gbps": giga(rates.link_both),
            "measured_hbm_gbps": giga(rates.hbm),
            **rates.pcie.as_dict(),
            "weight_bytes_per_token": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes,
            "bytes_per_token": self.token_bytes,
            "resident_roofline_tokens_per_second": self.roofline(0.0),
        }


def measure_rates(backend: TimedBackend, array_bytes: int) -> Rates:
    """Copies of PROBE_PAGE_BYTES between a device pool and host pages, in runs of PROBE_COPIES, and `add` over two arrays of array_bytes; each
    the median of PROBE_ROUNDS behind one that does not count. Takes the arrays and 512 MiB of device memory, and 512 MiB of the host's,
    until the backend is closed. Raises OutOfMemoryError."""
    shape = (PROBE_PAGES, PROBE_PAGE_BYTES)
    pool_in, pool_out = backend.empty("link probe, in", shape, "u8"), backend.empty("link probe, out", shape, "u8")
    host_in, host_out = backend.host_pages("link probe, in", *shape), backend.host_pages("link probe, out", *shape)

    def copies(*, way_in: bool, way_out: bool) -> float:
        streams = [stream for stream, wanted in ((Stream.COPY_IN, way_in), (Stream.COPY_OUT, way_out)) if wanted]
        backend.synchronize()
        begins = [backend.record_timed(stream) for stream in streams]
        for index in range(PROBE_COPIES):
            page = index % PROBE_PAGES
            if way_in:
                backend.copy_in(PageRun(pool_in, PROBE_PAGES, page, page, 1), host_in)
            if way_out:
                backend.copy_out(PageRun(pool_out, PROBE_PAGES, page, page, 1), host_out)
        ends = [backend.record_timed(stream) for stream in streams]
        milliseconds = max(backend.elapsed_ms(begins[0], end) for end in ends)
        return len(streams) * PROBE_COPIES * PROBE_PAGE_BYTES / milliseconds * 1e3

    columns = 1 << 14
    x, y = (backend.empty(f"memory probe, {name}", (array_bytes // 4 // columns, columns), "f32") for name in "xy")

    def additions() -> float:
        begin = backend.record_timed(Stream.COMPUTE)
        backend.add(x, y)
        return 3 * array_bytes / backend.elapsed_ms(begin, backend.record_timed(Stream.COMPUTE)) * 1e3

    return Rates(
        link_in=_settled(lambda: copies(way_in=True, way_out=False)),
        link_out=_settled(lambda: copies(way_in=False, way_out=True)),
        link_both=_settled(lambda: copies(way_in=True, way_out=True)),
        hbm=_settled(additions),
    )


def probe_device(device: int, warn: Callable[[str], None], cap_bytes: int | None = None) -> Rates:
    """measure_rates on a GPU, which is given back; what was measured is kept for later plans. Warns of a slow link. Raises DeviceError for an
    unusable GPU; where memory, or what the process may hold of it, is short (1 GiB) it warns and measures nothing."""
    from rollkv.cuda.backend import CudaBackend  # here, so that host runs do not wait for the bindings
    from rollkv.cuda.nvml import pcie_link

    for array_bytes in PROBE_ARRAY_BYTES:
        try:
            with CudaBackend(device, cap_bytes=cap_bytes, warn=warn) as backend:
                rates = replace(measure_rates(backend, array_bytes), pcie=pcie_link(backend.facts.pci_bus_id))
                card = backend.gpu.card
            break
        except OutOfMemoryError as error:
            refusal = error
    else:
        warn(f"link and device memory cannot be measured: {refusal}")
        return Rates()
    assert rates.link_in is not None and rates.hbm is not None
    RatesCache().store(card, MachineRates(rates.link_in, rates.hbm, rates.pcie))
    if rates.pcie.slow_words is not None:
        warn(rates.pcie.slow_words)
    return rates


def known_rates(
    device: int | None, *, again: bool, tell: Callable[[str], None], warn: Callable[[str], None]
) -> tuple[Bandwidths, PcieLink]:
    """What plans for this machine are reckoned with, and its link: measured before or, on a GPU of which nothing is known or if `again`, now.
    ASSUMED without a usable GPU, unless one was asked for: device None means the first if there is one. Warns of a slow link. Raises DeviceError
    for a GPU that was asked for, by its number or by `again`, and cannot be used, and for one that fails while it is measured."""
    from rollkv.cuda.driver import DriverCalls, find_device

    try:
        card = find_device(DriverCalls(), device or 0).gpu.card
    except DeviceError:
        if again or device is not None:
            raise
        return ASSUMED, PcieLink()
    known = None if again else RatesCache().load(card)
    if known is None:
        tell("measuring link and device memory, once for this card and driver")
        rates = probe_device(device or 0, warn)
        return rates.bandwidths or ASSUMED, rates.pcie
    if known.pcie.slow_words is not None:
        warn(known.pcie.slow_words)
    return known.bandwidths, known.pcie


def ceilings(path: str | Path, rates: Rates, cache: CacheConfig, depth: int) -> Ceilings:
    """The bytes of a step behind `depth` cells, from the header."""
    with open_model(path) as file:
        config = model_config(file)
        weights = token_weight_bytes(config, weight_bytes(config, file.tensors))
    visible = [min(depth, layer.sliding_window or depth) for layer in config.layers]
    pages = [page.page_bytes for page in page_formats(config, cache)]
    return Ceilings(rates, weights, sum(cells * size // cache.page_cells for cells, size in zip(visible, pages, strict=True)))


def _settled(measure: Callable[[], float]) -> float:
    measure()
    return median([measure() for _ in range(PROBE_ROUNDS)])
