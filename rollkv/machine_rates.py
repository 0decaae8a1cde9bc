"""What was measured of a machine, kept on disk by card and driver, so that plans need not measure it again."""

import hashlib
import json
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rollkv.cache_dir import cache_dir, store
from rollkv.roofline import ASSUMED, Bandwidths


@dataclass(frozen=True)
class PcieLink:
    """How the card is connected, what it could do, and the NUMA node it hangs on, where there are several. None: not known."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None
    numa_node: int | None = None

    @property
    def words(self) -> str:
        """ "PCIe gen5 x16, NUMA node 0"; what is not known is left out, and all of it "PCIe link not known"."""
        parts = ["PCIe link not known" if self.generation is None or self.width is None else f"PCIe gen{self.generation} x{self.width}"]
        return ", ".join(parts if self.numa_node is None else [*parts, f"NUMA node {self.numa_node}"])

    @property
    def slow_words(self) -> str | None:
        """What is less than it could be, in a sentence; None where nothing is known to be."""
        if None in (self.generation, self.width, self.max_generation, self.max_width):
            return None
        now, best = (self.generation, self.width), (self.max_generation, self.max_width)
        if now[0] >= best[0] and now[1] >= best[1]:  # type: ignore[operator]
            return None
        return (
            f"the link runs at PCIe gen{now[0]} x{now[1]}, but the card can do gen{best[0]} x{best[1]}: a tail is streamed that much slower; "
            "look at the slot, the riser and the firmware's settings"
        )

    def as_dict(self) -> dict[str, int | None]:
        facts = asdict(self)
        node = facts.pop("numa_node")
        return {**{f"pcie_{name}": value for name, value in facts.items()}, "numa_node": node}


@dataclass(frozen=True)
class MachineRates:
    """Bytes a second: host to device, and device memory; and the link that they were measured over."""

    link: float
    hbm: float
    pcie: PcieLink = PcieLink()

    @property
    def bandwidths(self) -> Bandwidths:
        return Bandwidths(self.link, self.hbm, "measured", "measured")


class RatesCache:
    """A small JSON file a card in `directory`, $ROLLKV_CACHE_DIR/rates unless given. `card` names card, slot and driver (GpuFacts.card)."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = cache_dir() / "rates" if directory is None else directory

    def path(self, card: str) -> Path:
        return self.directory / f"{hashlib.sha256(card.encode()).hexdigest()[:16]}.json"

    def load(self, card: str) -> MachineRates | None:
        """None for a file that is absent, damaged, or of another card."""
        try:
            fields = json.loads(self.path(card).read_bytes())
            rates = MachineRates(
                _rate(fields["link"]), _rate(fields["hbm"]), PcieLink(**{name: _count(value) for name, value in fields["pcie"].items()})
            )
            return rates if fields["card"] == card else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return None

    def store(self, card: str, rates: MachineRates) -> None:
        """Best effort."""
        store(self.path(card), json.dumps({"card": card, **asdict(rates)}, indent=1).encode())


def known_bandwidths(card: str | None) -> Bandwidths:
    """Those measured before, else ASSUMED. card None: there is no card."""
    rates = None if card is None else RatesCache().load(card)
    return ASSUMED if rates is None else rates.bandwidths


def _rate(value: Any) -> float:
    """Raises ValueError for what is no rate."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} is no rate")
    return float(value)


def _count(value: Any) -> int | None:
    """Raises ValueError for what is neither unknown nor a number of lanes or a generation."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{value!r} is no whole number")
    return value
