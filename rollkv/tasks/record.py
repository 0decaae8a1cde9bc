"""What every JSON line of a measurement says about where it comes from, so that files can be joined and filtered row by row.

All values are flat: text, numbers, true, false, or null for what is not known.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

from rollkv import __version__
from rollkv.config import CacheConfig
from rollkv.engine import Engine
from rollkv.synth import open_model
from rollkv.units import giga

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModelFacts:
    """A model file in a record: name and size say which file it was, wherever it lay."""

    path: Path
    file_bytes: int
    qtype: str
    architecture: str

    def as_dict(self) -> dict[str, object]:
        return {
            "model": str(self.path),
            "model_file": self.path.name,
            "model_bytes": self.file_bytes,
            "qtype": self.qtype,
            "architecture": self.architecture,
        }


def model_facts(path: str | Path) -> ModelFacts:
    """From the header. Raises ModelFileError."""
    with open_model(path) as file:
        return ModelFacts(Path(path), file.size_bytes, file.file_type, file.architecture)


def source_facts(command: str) -> dict[str, object]:
    """Which program wrote the line."""
    return {"schema_version": SCHEMA_VERSION, "command": command, "rollkv_version": __version__}


def cache_facts(cache: CacheConfig, vram_target: int | None) -> dict[str, object]:
    """The configuration as it was asked for."""
    return {
        "ctx_size": cache.ctx_size,
        "page_cells": cache.page_cells,
        **kv_facts(cache),
        "ubatch": cache.ubatch,
        "residency": cache.residency,
        "window_asked_cells": cache.window_cells,
        "vram_target_bytes": vram_target,
    }


def kv_facts(cache: CacheConfig) -> dict[str, object]:
    """The types of cells, and whether they lose something; those of the tail are null where cells keep their type."""
    return {
        "lossy": cache.lossy,
        "cache_type_k": cache.key_type,
        "cache_type_v": cache.value_type,
        "cache_type_tail_k": cache.tail_key_type,
        "cache_type_tail_v": cache.tail_value_type,
        "kv_rotate": cache.kv_rotate,
        "kv_protect": cache.protect_layers,
    }


def machine_facts(engine: Engine | None, link_rate: float | None = None) -> dict[str, object]:
    """Backend, GPU and driver of a loaded engine, and what its budget made of the configuration. engine None: nothing was loaded.
    link_rate: host to device, bytes a second, where it was measured."""
    facts: dict[str, object] = dict.fromkeys(
        (
            "backend",
            "gpu",
            "gpu_bytes",
            "driver_cuda",
            "link_gbps",
            "planned_device_bytes",
            "window_cells",
            "host_tail_bytes",
            "host_tail_made_gbps",
        )
    )
    facts["link_gbps"] = giga(link_rate)
    if engine is None:
        return facts
    facts["backend"] = engine.backend_name
    facts["planned_device_bytes"] = engine.budget.total_bytes
    facts["window_cells"] = engine.budget.window_cells
    facts["host_tail_bytes"] = engine.budget.host_tail_bytes
    if (made := engine.backend.tail_made) is not None:
        facts["host_tail_made_gbps"] = made.num_bytes / made.seconds / 1e9
    if (gpu := engine.backend.gpu) is not None:
        facts |= {"gpu": gpu.name, "gpu_bytes": gpu.memory_bytes, "driver_cuda": gpu.driver_cuda}
    return facts


def utc_time() -> str:
    """Now, to the second: "2025-01-31T12:00:00Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def json_line(row: Mapping[str, object]) -> str:
    """A flat row as one line of JSON with its line break, in ASCII, so that it parses whatever encoding stdout has; what is not finite becomes null."""
    plain = {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}
    return json.dumps(plain, allow_nan=False) + "\n"
