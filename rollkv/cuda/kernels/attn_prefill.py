"""Prefill attention with a running state that is handed from run to run: csrc/attn_prefill.cu, and on the tensor cores
csrc/attn_prefill_mma.cu (any card) and csrc/attn_prefill_wgmma.cu (sm_90a)."""

from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from rollkv.backend import PageFormat, PageRun
from rollkv.config import KvType, LayerConfig
from rollkv.cuda.device import DeviceArray, Launcher, TensorMap, check_array
from rollkv.cuda.kernels.kv_format import check_run, plain_arguments
from rollkv.cuda.nvrtc import ARCHS, KernelError, KernelSpec, capability_of
from rollkv.workspace import state_shape

_CELLS = 32  # of a block of work of the float32 kernel

Variant = Literal["wgmma", "mma", "float32"]


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
    shared_columns: int  # of the queries, in shared memory; the others lie in registers

    @property
    def rows(self) -> int:
        return self.warps * self.tiles * 16

    def shared_bytes(self, dim: int) -> int:
        """Queries and the stages of K and V."""
        return self.rows * _swizzled_row(self.shared_columns) + 2 * self.stages * self.cells * _swizzled_row(dim)


def _swizzled_row(columns: int) -> int:
    """Bytes of a row of halves: padded by 16 where it is no multiple of 128."""
    return columns * 2 + (16 if columns % 64 else 0)


# 32 rows a warp where the sums fit the registers; 96 KiB of shared memory at most, for the cards that have 99.
_MMA_TILES = {
    64: MmaTile(64, 4, 2, 2, 2, 0),
    80: MmaTile(64, 4, 2, 2, 2, 80),
    96: MmaTile(64, 4, 2, 2, 2, 96),
    128: MmaTile(64, 4, 2, 2, 2, 128),
    192: MmaTile(32, 8, 1, 2, 1, 64),
    256: MmaTile(32, 8, 1, 2, 1, 128),
}
_MMA_TILES_SM10 = {**_MMA_TILES, 96: MmaTile(32, 4, 2, 2, 2, 96), 128: MmaTile(32, 4, 2, 2, 2, 128)}  # 64 cells spill from sm_100 on


def mma_tile(dim: int, arch: str) -> MmaTile:
    """The tile of a head size on an architecture."""
    return (_MMA_TILES_SM10 if capability_of(arch) >= 100 else _MMA_TILES)[dim]


class WgmmaTile(NamedTuple):
    """Template arguments of the kernel for sm_90a after the head size. A block has 128 query rows."""

    cells: int  # of a block of work
    stages: int  # buffers of K and of V
    turns: bool  # the two warpgroups issue their products in turns
    query_in_registers: bool

    def shared_bytes(self, dim: int) -> int:
        """Queries, the stages of K and V, their barriers; and what it takes to begin on a multiple of 1,024 bytes."""
        rows = (0 if self.query_in_registers else _WGMMA_ROWS) + 2 * self.stages * self.cells
        return 1024 + rows * dim * 2 + 8 * (4 * self.stages + 2)


_WGMMA_ROWS, _WGMMA_THREADS = 128, 384
_WGMMA_TILES = {
    64: WgmmaTile(128, 2, True, True),
    128: WgmmaTile(128, 2, True, True),
    192: WgmmaTile(64, 2, True, True),
    256: WgmmaTile(64, 2, False, False),
}


def variant(page: PageFormat, arch: str) -> Variant:
    """Which kernel serves a layer, by its page format and the architecture compiled for: half cells of the usual head sizes go to the
    tensor cores, with queries and softmax weights rounded to half; everything else is computed in float32."""
    dim, cells = page.key_dim, page.page_cells
    if not (page.key_type == page.value_type == "f16" and dim == page.value_dim):
        return "float32"
    if arch == "sm_90a" and dim in _WGMMA_TILES and cells % _WGMMA_TILES[dim].cells == 0:
        return "wgmma"
    return "mma" if dim in _MMA_TILES and cells % 64 == 0 else "float32"


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
def wgmma_launch_shape(dim: int, num_heads: int, num_tokens: int) -> Shape:
    """Mirrors the constants of the kernel for sm_90a."""
    grid = (-(-num_tokens // _WGMMA_ROWS) * num_heads, 1, 1)
    return Shape(_WGMMA_THREADS, _WGMMA_ROWS, _WGMMA_TILES[dim].shared_bytes(dim), grid)


@cache
def spec(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int) -> KernelSpec:
    """The float32 kernel."""
    return KernelSpec("attn_prefill.cu", f"attn_prefill<{plain_arguments(key_type, value_type, key_dim, value_dim)}>")


@cache
def mma_spec(dim: int, arch: str) -> KernelSpec:
    """The tensor-core kernel."""
    return KernelSpec("attn_prefill_mma.cu", f"attn_prefill_mma<{', '.join(map(str, (dim, *mma_tile(dim, arch))))}>")


@cache
def wgmma_spec(dim: int) -> KernelSpec:
    """The kernel for sm_90a."""
    arguments = ", ".join(str(x).lower() for x in (dim, *_WGMMA_TILES[dim]))
    return KernelSpec("attn_prefill_wgmma.cu", f"attn_prefill_wgmma<{arguments}>", ("sm_90a",))


def instances() -> tuple[KernelSpec, ...]:
    plain = (
        spec("f16", "f16", 128, 128),
        spec("f32", "f32", 256, 256),
        spec("f32", "bf16", 80, 96),
    )
    mma = tuple(replace(mma_spec(dim, arch), archs=(arch,)) for arch in ARCHS for dim in _MMA_TILES)
    return plain + mma + tuple(map(wgmma_spec, _WGMMA_TILES))


def attend_tile_flops(visible_pairs: int, layer: LayerConfig) -> int:
    """Operations for visible_pairs (query, cell) pairs of one head, over all heads."""
    return 2 * visible_pairs * (layer.key_dim + layer.value_dim) * layer.num_heads


def attend_tile(
    launcher: Launcher,
    q: DeviceArray,
    position: DeviceArray,
    run: PageRun,
    layer: LayerConfig,
    page: PageFormat,
    scale: float,
    state: DeviceArray,
    out: DeviceArray,
) -> None:
    """Walks the pages of `run` for T query rows, all runs that they see from old to new in as many calls: out = softmax(scale q K) V over the cells up to
    position[0] + t, and within the layer's window.

    q: f32 [T, H*Dk]; position: i32 [1]; state: f32 state_shape(T, layer), opaque, of any content before a row's first visible cell, the same in all
    calls; out: f32 [T, H*Dv], a row of it written by the call that walks the last cell of its tile. Raises KernelError on other shapes.
    """
    num_tokens = q.shape[0]
    check_array("attend_tile", "q", q, (num_tokens, layer.num_heads * layer.key_dim), "f32")
    check_array("attend_tile", "position", position, (1,), "i32")
    check_array("attend_tile", "state", state, state_shape(num_tokens, layer), "f32")
    check_array("attend_tile", "out", out, (num_tokens, layer.num_heads * layer.value_dim), "f32")
    pool = check_run("attend_tile", run, page)
    chosen, dim, cells = variant(page, launcher.arch), page.key_dim, page.page_cells
    if chosen != "float32" and not scale > 0:
        raise KernelError(f"attend_tile: the scale of the scores must be positive, not {scale}")
    pages: DeviceArray | TensorMap = pool
    if chosen == "wgmma":
        shape, kernel = wgmma_launch_shape(dim, layer.num_heads, num_tokens), wgmma_spec(dim)
        pages = launcher.plane_map(pool.ptr, pool.nbytes // (dim * 2), dim, _WGMMA_TILES[dim].cells)
    elif chosen == "mma":
        shape, kernel = mma_launch_shape(dim, launcher.arch, layer.num_heads, num_tokens), mma_spec(dim, launcher.arch)
    else:
        shape = launch_shape(dim, page.value_dim, layer.num_heads, num_tokens)
        kernel = spec(page.key_type, page.value_type, dim, page.value_dim)
    launcher.launch(
        kernel,
        shape.grid,
        shape.threads,
        q,
        position,
        pages,
        state,
        out,
        np.int32(num_tokens),
        np.int32(layer.num_heads),
        np.int32(layer.num_kv_heads),
        np.int32(run.num_slots),
        np.int32(run.first_slot),
        np.int32(run.first_page),
        np.int32(run.num_pages),
        np.int32(cells),
        np.int32(layer.sliding_window or 0),
        np.float32(scale),
        shared_bytes=shape.shared_bytes,
    )
