"""What attention over rotated values gives, back in the model's frame (csrc/turn_back.cu)."""

from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.config import LayerConfig
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelSpec

_WARPS = 4  # of a block, a row each


class Shape(NamedTuple):
    """Launch constants."""

    threads: int
    grid: tuple[int, int, int]


@cache
def launch_shape(num_rows: int) -> Shape:
    """A warp a row."""
    return Shape(_WARPS * 32, (-(-num_rows // _WARPS), 1, 1))


@cache
def spec(value_dim: int) -> KernelSpec:
    return KernelSpec("turn_back.cu", f"turn_back<{value_dim}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    return spec(16), spec(80), spec(128), spec(256)


def turn_back_bytes(num_tokens: int, layer: LayerConfig) -> int:
    """Bytes read and written."""
    return 8 * num_tokens * layer.num_heads * layer.value_dim


def turn_back(launcher: Launcher, out: DeviceArray, layer: LayerConfig) -> None:
    """out = signs * H(out) over each group of kv_types.rotation_group(Dv) columns of every head (kv_codes.turn_back, in equal bits).

    out: f32 [T, H*Dv]. Reads and writes turn_back_bytes. Raises KernelError on other shapes.
    """
    num_tokens = out.shape[0]
    check_array("turn_back", "out", out, (num_tokens, layer.num_heads * layer.value_dim), "f32")
    shape = launch_shape(num_tokens * layer.num_heads)
    launcher.launch(spec(layer.value_dim), shape.grid, shape.threads, out, np.int32(num_tokens * layer.num_heads))
