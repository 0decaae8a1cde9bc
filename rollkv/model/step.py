"""What one forward pass works with: the model's parts, and the step at hand."""

from dataclasses import dataclass

import numpy as np

from rollkv.backend import Array, Backend
from rollkv.config import CacheConfig, ModelConfig, RopeConfig
from rollkv.kv_cache import KVCache
from rollkv.weights import ModelWeights
from rollkv.workspace import lent_to_unpack, workspace_arrays


def take_workspace(backend: Backend, config: ModelConfig, cache: CacheConfig) -> dict[str, Array]:
    """Device memory for the working arrays of workspace.py, by name; and what attention has of "feed_forward" while that is idle: "attention.unpacked" in
    front, and behind it "attention.staged" for pages of the tail, both u8."""
    arrays = {
        name: backend.upload(name, np.zeros(spec.shape, np.int32)) if spec.zeroed else backend.empty(name, spec.shape, spec.dtype)
        for name, spec in workspace_arrays(config, cache).items()
    }
    idle, lent = arrays["feed_forward"].as_bytes(), lent_to_unpack(config, cache)
    return {"attention.unpacked": idle.rows(lent), **arrays, "attention.staged": idle.rows(idle.nbytes - lent, lent)}


@dataclass(frozen=True)
class Model:
    """Everything a forward pass reads, fixed after loading."""

    backend: Backend
    config: ModelConfig
    weights: ModelWeights
    cache: KVCache
    workspace: dict[str, Array]  # by the names of workspace.py
    ropes: tuple[RopeConfig, ...]  # the different rotations, in the order of the rope.N arrays


@dataclass(frozen=True)
class Step:
    """T new tokens at cells position .. position + T - 1; their number and place on the device, and their rotations."""

    num_tokens: int  # T
    position: int
    position_array: Array  # i32 [1]
    tables: dict[RopeConfig, Array]  # f32 [R, T, dim/2, 2]
