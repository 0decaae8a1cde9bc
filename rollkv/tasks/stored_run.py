"""The run behind logits on disk: what is kept of it beside them, how it is called, and when another run must give its bits."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollkv import __version__, dual_chunk
from rollkv.config import CacheConfig
from rollkv.errors import LogitFileError, UsageError
from rollkv.kv_formats import kv_words
from rollkv.logit_file import LogitFile
from rollkv.tasks.equiv_specs import RunSpec
from rollkv.tasks.generate import cache_config
from rollkv.tasks.record import ModelFacts, kv_facts

_CPU_LINES = ("model name", "cpu family", "model", "stepping", "CPU implementer", "CPU part")  # of /proc/cpuinfo


@dataclass(frozen=True)
class StoredRun:
    """Logits of a file, as a reference. cache: with the types of their run, and f16 where they are unknown."""

    logits: LogitFile
    cache: CacheConfig

    @property
    def words(self) -> str:
        """The file, and what it says of its run."""
        facts = self.logits.run
        if facts is None:
            return f"{self.logits.path}, KV types unknown (taken for f16)"
        dca = f"DCA {facts.get('dca_chunk_cells')}/{facts.get('dca_local_cells')}" if facts.get("dca") == "on" else "DCA off"
        return f"{self.logits.path}, {kv_words(self.cache)}, {dca}, {facts.get('backend')} backend"

    def same_sums(self, facts: Mapping[str, object]) -> bool:
        """Whether a run of these run_facts computes exactly what the file's did."""
        return self.logits.run == facts


def stored_run(logits: LogitFile) -> StoredRun:
    """Raises LogitFileError when the file names types that are none."""
    facts = logits.run
    if facts is None:
        return StoredRun(logits, cache_config(len(logits.tokens)))
    try:
        asked = {
            name: facts[name]
            for name in ("cache_type_k", "cache_type_v", "cache_type_tail_k", "cache_type_tail_v", "kv_rotate", "kv_protect")
        }
        return StoredRun(logits, cache_config(len(logits.tokens), **asked))  # type: ignore[arg-type]
    except (KeyError, TypeError, UsageError) as error:
        raise LogitFileError(
            f"{logits.path}: the types of the KV cache that it names cannot be read: {error}; save it again with this version of rollkv"
        ) from error


def run_facts(model: ModelFacts, spec: RunSpec, machine: Mapping[str, object], num_decode: int, portable: bool) -> dict[str, object]:
    """All that the bits of a run's logits depend on beside its tokens, flat. machine: as machine_facts."""
    return {
        "rollkv_version": __version__,
        "model_file": model.path.name,
        "model_bytes": model.file_bytes,
        "backend": machine["backend"],
        "gpu": machine["gpu"],
        "driver_cuda": machine["driver_cuda"],
        "host": _host() if machine["gpu"] is None else None,
        "portable": portable,
        "page_cells": spec.cache.page_cells,
        "ubatch": spec.cache.ubatch,
        "decode_tokens": num_decode,
        **kv_facts(spec.cache),
        **dual_chunk.facts(spec.config),
    }


def _host() -> str:
    """NumPy, and the kind of CPU: its library for products adds in an order that depends on both."""
    try:
        lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()]
    except OSError:
        lines = []
    cpu = ", ".join(value.strip() for name, _, value in lines if name.strip() in _CPU_LINES)
    return f"NumPy {np.__version__}, {cpu or platform.machine()}"
