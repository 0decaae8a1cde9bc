"""Many partial attention states into one (csrc/attn_merge.cu)."""

from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.config import LayerConfig
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelError, KernelSpec

_THREADS = 256
_COLUMNS = 32  # of a block


class Shape(NamedTuple):
    """Launch constants."""

    threads: int
    grid: tuple[int, int, int]


@cache
def launch_shape(num_heads: int, value_dim: int) -> Shape:
    """A block per head and 32 columns, whatever the number of parts."""
    return Shape(_THREADS, (num_heads, -(-value_dim // _COLUMNS), 1))


@cache
def spec(value_dim: int) -> KernelSpec:
    return KernelSpec("attn_merge.cu", f"attn_merge<{value_dim}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    return spec(80), spec(128)


def merge_parts_bytes(num_parts: int, layer: LayerConfig) -> int:
    """Bytes read and written."""
    return num_parts * layer.num_heads * (layer.value_dim + 1) * 4 + layer.num_heads * layer.value_dim * 4


def merge_parts(
    launcher: Launcher, part_out: DeviceArray, part_lse: DeviceArray, num_parts: int, layer: LayerConfig, out: DeviceArray
) -> None:
    """out = the attention whose parts are 0 .. num_parts - 1; an empty part is (anything, -inf), all empty gives 0. (Blocks that merge by themselves want (0, -inf), which kernels write.)

    part_out: f32 [parts, H, Dv]; part_lse: f32 [parts, H], natural logarithm; out: f32 [1, H*Dv]. Reads and writes merge_parts_bytes.
    Raises KernelError on other shapes.
    """
    if not 0 <= num_parts <= part_out.shape[0]:
        raise KernelError(f"merge_parts: {num_parts} parts of {part_out.shape[0]}")
    check_array("merge_parts", "part_out", part_out, (part_out.shape[0], layer.num_heads, layer.value_dim), "f32")
    check_array("merge_parts", "part_lse", part_lse, (part_out.shape[0], layer.num_heads), "f32")
    check_array("merge_parts", "out", out, (1, layer.num_heads * layer.value_dim), "f32")
    shape = launch_shape(layer.num_heads, layer.value_dim)
    launcher.launch(spec(layer.value_dim), shape.grid, shape.threads, part_out, part_lse, out, np.int32(num_parts))
