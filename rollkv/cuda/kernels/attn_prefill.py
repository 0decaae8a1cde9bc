"""Prefill attention with a running state that is handed from run to run (csrc/attn_prefill.cu, csrc/attn_prefill_mma.cu)."""

from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from rollkv.backend import PageFormat, PageRun
from rollkv.config import KvType, LayerConfig
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.kernels.kv_format import check_run, template_arguments
from rollkv.cuda.nvrtc import ARCHS, KernelError, KernelSpec

STATE_EXTRA = 8  # floats of state a head beside its Dv sums
_CELLS = 32  # of a block of work of the float32 kernel
_FIRST, _LAST = 1, 2

Variant = Literal["mma", "float32"]


class Shape(NamedTuple):
    """Launch constants: threads, query rows of a tile, bytes of dynamic shared memory, grid."""

    threads: int
    rows: int
    shared_bytes: int
    grid: tuple[int, int, int]


class MmaTile(NamedTuple):
    """Template arguments of the tensor-core kernel after the head size."""

    cells: int  # of a block of work
    warps: int
    tiles: int  # 16 query rows each, a warp
    stages: int  # buffers of K and of V
    blocks: int  # a multiprocessor, as far as registers go

    @property
    def rows(self) -> int:
        return self.warps * self.tiles * 16

    def shared_bytes(self, dim: int) -> int:
        """Queries and the stages of K and V, a row padded by 16 bytes where it is no multiple of 128."""
        return (self.rows + 2 * self.stages * self.cells) * (dim * 2 + (16 if dim % 64 else 0))


# 32 rows a warp where the sums fit the registers; 96 KiB of shared memory at most, for the cards that have 99.
_MMA_TILES = {
    64: MmaTile(64, 4, 2, 2, 2),
    80: MmaTile(64, 4, 2, 2, 2),
    96: MmaTile(64, 4, 2, 2, 2),
    128: MmaTile(64, 4, 2, 2, 2),
    192: MmaTile(32, 8, 1, 2, 1),
    256: MmaTile(32, 8, 1, 1, 1),
}
_MMA_TILES_SM10 = {**_MMA_TILES, 96: MmaTile(32, 4, 2, 2, 2), 128: MmaTile(32, 4, 2, 2, 2)}  # 64 cells spill from sm_100 on


def mma_tile(dim: int, arch: str) -> MmaTile:
    """The tile of a head size on an architecture."""
    return (_MMA_TILES_SM10 if int(arch[3:].rstrip("a")) >= 100 else _MMA_TILES)[dim]


def variant(layer: LayerConfig, page: PageFormat) -> Variant:
    """Which kernel serves a layer, by its shape and cache types alone: half cells of the usual head sizes go to the tensor cores, with
    queries and softmax weights rounded to half; everything else is computed in float32."""
    half = page.key_type == page.value_type == "f16" and page.key_dim == page.value_dim
    return "mma" if half and page.key_dim in _MMA_TILES and page.page_cells % 64 == 0 else "float32"


@cache
def launch_shape(key_dim: int, value_dim: int, num_heads: int, num_tokens: int) -> Shape:
    """Mirrors the constants of the float32 kernel. At most 70 KiB of shared memory."""
    wide = max(key_dim, value_dim)
    rows = 64 if wide <= 128 else 32
    shared_floats = rows * (key_dim + 4) + _CELLS * (wide + 4) + rows * (_CELLS + 4)
    return Shape(256, rows, shared_floats * 4, (-(-num_tokens // rows) * num_heads, 1, 1))


@cache
def mma_launch_shape(dim: int, arch: str, num_heads: int, num_tokens: int) -> Shape:
    """Mirrors the constants of the tensor-core kernel."""
    tile = mma_tile(dim, arch)
    return Shape(tile.warps * 32, tile.rows, tile.shared_bytes(dim), (-(-num_tokens // tile.rows) * num_heads, 1, 1))


@cache
def spec(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int) -> KernelSpec:
    """The float32 kernel."""
    return KernelSpec("attn_prefill.cu", f"attn_prefill<{template_arguments(key_type, value_type, key_dim, value_dim)}>")


@cache
def mma_spec(dim: int, arch: str) -> KernelSpec:
    """The tensor-core kernel."""
    return KernelSpec("attn_prefill_mma.cu", f"attn_prefill_mma<{', '.join(map(str, (dim, *mma_tile(dim, arch))))}>")


def instances() -> tuple[KernelSpec, ...]:
    plain = (
        spec("f16", "f16", 128, 128),
        spec("f32", "f32", 256, 256),
        spec("f32", "bf16", 80, 96),
    )
    mma = tuple(replace(mma_spec(dim, arch), archs=(arch,)) for arch in ARCHS for dim in (64, 128, 256))
    return plain + mma


def attend_tile_flops(visible_pairs: int, layer: LayerConfig) -> int:
    """Operations for visible_pairs (query, cell) pairs of one head, over all heads."""
    return 2 * visible_pairs * (layer.key_dim + layer.value_dim) * layer.num_heads


def attend_tile_bytes(num_tokens: int, num_cells: int, layer: LayerConfig, page: PageFormat, *, first: bool, last: bool) -> int:
    """Bytes of device memory that must move at least: queries, num_cells cells once, state in and out, output."""
    rows = num_tokens * layer.num_heads
    states = (not first) + (not last)
    floats = rows * (layer.key_dim + states * (layer.value_dim + STATE_EXTRA) + last * layer.value_dim)
    return floats * 4 + num_cells * (page.page_bytes // page.page_cells)


def attend_tile(
    launcher: Launcher,
    q: DeviceArray,
    position: DeviceArray,
    run: PageRun,
    layer: LayerConfig,
    page: PageFormat,
    scale: float,
    state: DeviceArray,
    *,
    first: bool,
    last: bool,
    out: DeviceArray,
) -> None:
    """Walks the pages of `run` for T query rows; out = softmax(scale q K) V over the cells up to position[0] + t once `last` has been seen.

    q: f32 [T, H*Dk]; position: i32 [1]; state: f32 [T, H*(Dv + 8)], opaque, the same from `first` to `last`; out: f32 [T, H*Dv], written by
    the last call alone. Moves attend_tile_bytes. Raises KernelError on other shapes.
    """
    num_tokens = q.shape[0]
    check_array("attend_tile", "q", q, (num_tokens, layer.num_heads * layer.key_dim), "f32")
    check_array("attend_tile", "position", position, (1,), "i32")
    check_array("attend_tile", "state", state, (num_tokens, layer.num_heads * (layer.value_dim + STATE_EXTRA)), "f32")
    check_array("attend_tile", "out", out, (num_tokens, layer.num_heads * layer.value_dim), "f32")
    pool = check_run("attend_tile", run, page)
    if variant(layer, page) == "mma":
        if not scale > 0:
            raise KernelError(f"attend_tile: the scale of the scores must be positive, not {scale}")
        shape = mma_launch_shape(page.key_dim, launcher.arch, layer.num_heads, num_tokens)
        kernel = mma_spec(page.key_dim, launcher.arch)
    else:
        shape = launch_shape(page.key_dim, page.value_dim, layer.num_heads, num_tokens)
        kernel = spec(page.key_type, page.value_type, page.key_dim, page.value_dim)
    launcher.launch(
        kernel,
        shape.grid,
        shape.threads,
        q,
        position,
        pool,
        state,
        out,
        np.int32(num_tokens),
        np.int32(layer.num_heads),
        np.int32(layer.num_kv_heads),
        np.int32(run.num_slots),
        np.int32(run.first_slot),
        np.int32(run.first_page),
        np.int32(run.num_pages),
        np.int32(page.page_cells),
        np.int32(layer.sliding_window or 0),
        np.int32(_FIRST * first + _LAST * last),
        np.float32(scale),
        shared_bytes=shape.shared_bytes,
    )
