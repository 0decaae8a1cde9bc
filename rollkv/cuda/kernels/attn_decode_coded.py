"""A decode step's attention to coded pages: a partial state per page (csrc/attn_decode_coded.cu)."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from rollkv.backend import PageRun, PartStates
from rollkv.config import KvType, LayerConfig, PageFormat
from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.kernels.kv_format import MERGED_WITHIN, check_step, template_arguments
from rollkv.cuda.nvrtc import ARCHS, KernelError, KernelSpec, capability_of
from rollkv.kv_types import KV_TYPES, SCALE_BYTES
from rollkv.rope import bands, query_bands

_SOME_BLOCKS = 256  # of 8 warps, that an H200 runs at once
_MAX_HEADS = 8  # query heads that one block holds sums for
_UNIT_CELLS = 32  # that a warp takes at a time
_TABLE_BYTES = 1 << 16
_WORD_ELEMENTS = {"f16": 8, "q8_0": 4, "q4_0": 8, "turbo4": 8, "turbo3": 16, "turbo2": 16}  # kWord in csrc/kv_fragments.cuh
# Shared memory that a block may have, in KiB, by compute capability; 99 where none is named. A multiprocessor has 1 KiB more, and each block takes one.
_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}


class Form(NamedTuple):
    """Template arguments behind types and sizes. Results depend on `warps`, which follows from the model, the parts of a step and the card alone."""

    warps: int  # of a team, which takes a page at a time
    teams: int  # of a block; all have the table of levels in common
    ring: int  # loads of 16 bytes a lane that run ahead
    blocks: int  # a multiprocessor
    few: bool = False  # one page a block, and the last block merges
    table: bool = False  # of turbo4's levels in shared memory


class Shape(NamedTuple):
    """Launch constants. A block serves `heads` query heads of one KV head, a KV head takes `chunks` blocks a page."""

    heads: int
    chunks: int
    grid: tuple[int, int, int]
    shared_bytes: int


def serves(page: PageFormat) -> bool:
    """Whether these pages are this kernel's: coded ones, and halves that are rotated."""
    return _reads(page) and (page.coded or page.key_rotated or page.value_rotated)


def _reads(page: PageFormat) -> bool:
    return all(KV_TYPES[name].coded or name == "f16" for name in (page.key_type, page.value_type))


@cache
def choose_form(page: PageFormat, group: int, num_bands: int, num_parts: int, arch: str) -> Form:
    """For a step over num_parts pages. Few and some are bound by latency and divide a page among many warps. It changes behind powers of two of pages, where
    rehearsals look for kernels, and makes do with the shared memory of the card."""
    units = max(page.page_cells // _UNIT_CELLS, 1)
    blocks = -(-group // _MAX_HEADS) * page.num_kv_heads * (1 << (num_parts - 1).bit_length())
    types, wide = {page.key_type, page.value_type}, max(page.key_dim, page.value_dim) > 128
    mixed = len(types) > 1  # takes more registers
    roomy = capability_of(arch) != 90  # and so does code for other chips than the one these forms were measured on
    # Weights are kept in registers once for every group of rotated values, those of 32 cells by each of eight warps, of 128 by each of two.
    turbo, values = all(KV_TYPES[name].rotated for name in types), KV_TYPES[page.value_type]
    several = values.rotated and values.num_scales(page.value_dim) > 1
    if num_parts <= MERGED_WITHIN:
        form = Form(8, 1, 16, 1, few=True)
    elif wide and "f16" in types:
        form = Form(8, 1, 16, 1)
    elif wide:
        form = Form(8, 1, 4 if mixed or roomy else 8, 2)
    elif blocks <= _SOME_BLOCKS or ("f16" in types and mixed) or several:
        form = Form(8, 1, 4 if several and roomy else 8, 2)
    elif types == {"turbo4"} and _shared_bytes_of(arch) > 2 * _TABLE_BYTES:
        form = Form(2, 6 if roomy else 8, 8, 1, table=True) if page.key_dim == page.value_dim else Form(4, 2, 8, 1, table=True)
    elif turbo and not (mixed or roomy) and page.key_dim == page.value_dim:
        form = Form(2, 8, 8, 1) if types == {"turbo3"} else Form(2, 2, 8, 4)
    else:
        form = Form(4, 1, 8, 3 if mixed or types & {"f16", "turbo4"} else 4)
    form = form._replace(warps=min(form.warps, units))
    while shared_bytes(page, form, num_bands) > _shared_bytes_of(arch):
        form = form._replace(teams=form.teams // 2) if form.teams > 1 else form._replace(warps=form.warps // 2)
    while form.blocks * (shared_bytes(page, form, num_bands) + 1024) > _shared_bytes_of(arch) + 1024:
        form = form._replace(blocks=form.blocks - 1)
    return form


def _shared_bytes_of(arch: str) -> int:
    """That a block may have."""
    return _SHARED_KIB.get(capability_of(arch), 99) << 10


@cache
def shared_bytes(page: PageFormat, form: Form, num_bands: int) -> int:
    """Mirrors Layout in the source."""
    cells = min(page.page_cells, max(page.page_cells, _UNIT_CELLS) // form.warps)
    scales = sum(KV_TYPES[name].num_scales(dim) for name, dim in ((page.key_type, page.key_dim), (page.value_type, page.value_dim)))
    warp = _part_tiles(page) * 512 + 2 * (_MAX_HEADS * 8 + 16) + 2 * cells * scales * SCALE_BYTES
    return (_TABLE_BYTES if form.table else 0) + form.teams * form.warps * warp + num_bands * -(-page.key_dim // 32) * 512


def _part_tiles(page: PageFormat) -> int:
    """Tiles of 16 columns of values that have sums at a time: a part of the slots of a lane, up to 8."""
    elements = _WORD_ELEMENTS[page.value_type]
    while page.value_dim % (8 * elements):
        elements //= 2
    slots, tiles = page.value_dim // (8 * elements), page.value_dim // 16
    return next(tiles // parts for parts in range(1, slots + 1) if slots % parts == 0 and tiles // parts <= 8)


@cache
def launch_shape(page: PageFormat, group: int, num_bands: int, num_pages: int, form: Form, num_sms: int) -> Shape:
    """As many blocks as run at once, and in each team about as many pages. Changes no result."""
    chunks = -(-group // _MAX_HEADS)
    columns = chunks * page.num_kv_heads
    rounds = 1 if form.few else -(-num_pages * columns // (num_sms * form.blocks * form.teams))
    at_once = -(-num_pages // rounds)
    grid = chunks, page.num_kv_heads, -(-at_once // form.teams)
    return Shape(-(-group // chunks), chunks, grid, shared_bytes(page, form, num_bands))


@cache
def spec(page: PageFormat, form: Form) -> KernelSpec:
    types = template_arguments(page.key_type, page.value_type, page.key_dim, page.value_dim)
    arguments = f"{types}, {page.page_cells}, {form.warps}, {form.teams}, {form.ring}, {form.blocks}, {str(form.few).lower()}, {str(form.table).lower()}"
    return KernelSpec("attn_decode_coded.cu", f"attn_decode_coded<{arguments}>", early=True)


def instances() -> tuple[KernelSpec, ...]:
    coded: tuple[KvType, ...] = ("q8_0", "q4_0", "turbo4", "turbo3", "turbo2")
    pairs: tuple[tuple[KvType, KvType], ...] = (
        ("f16", "f16"),
        ("f16", "turbo3"),
        ("turbo2", "f16"),
        ("q8_0", "turbo4"),
        ("turbo4", "turbo3"),
    )
    pages = [PageFormat(8, 128, 128, *pair, 256) for pair in pairs]
    pages += [PageFormat(8, dim, dim, name, name, 256) for name in coded[2:] for dim in (80, 96)]
    pages += [PageFormat(8, dim, dim, name, name, 256) for name in coded for dim in (64, 128, 256)]
    pages += [PageFormat(8, 80, 112, "turbo3", "turbo2", 64), PageFormat(8, 192, 48, "f16", "turbo3", 16)]
    archs: dict[KernelSpec, list[str]] = {}  # that choose it
    for arch, page, parts in product(ARCHS, pages, (1, 32, 512)):
        archs.setdefault(spec(page, choose_form(page, 5, 1, parts, arch)), []).append(arch)
    return tuple(replace(one, archs=tuple(dict.fromkeys(where))) for one, where in archs.items())


def attend_coded_bytes(num_cells: int, num_parts: int, layer: LayerConfig, page: PageFormat) -> int:
    """Bytes read of num_cells visible cells and the queries, and written; partial states are written and read once."""
    cell_bytes = page.page_bytes // page.page_cells
    states = 2 * num_parts * (layer.value_dim + 1) * layer.num_heads if num_parts > 1 else 0
    columns = layer.num_heads * (query_bands(layer.rope) * layer.key_dim + layer.value_dim)
    return num_cells * cell_bytes + (states + columns) * 4


def attend_coded(
    launcher: Launcher,
    position: DeviceArray,
    runs: tuple[PageRun, ...],
    layer: LayerConfig,
    page: PageFormat,
    scale: float,
    parts: PartStates,
    out: DeviceArray,
    *,
    num_sms: int,
    form: Form | None = None,
) -> None:
    """softmax(scale q K) V over the visible cells of each page of the runs, in the frame of the pages; if they are the last of up to MERGED_WITHIN parts, all are
    merged.

    position: i32 [1], the newest cell, which is in its page; runs: one, or two that follow each other; parts: as backend.PartStates says, with the queries in
    parts.q as prepare_step leaves them; out: f32 [1, H*Dv]; num_sms: multiprocessors of the device, which changes no result; form: None for the one that suits the
    step. Call it for all pages in their order. Reads and writes attend_coded_bytes. Raises KernelError on other shapes.
    """
    num_parts, num_bands = parts.num_parts, query_bands(layer.rope)
    check_array("attend_coded", "parts.q", parts.q, (num_bands, layer.num_heads * layer.key_dim), "f32")
    pools, first_part, num_pages = check_step("attend_coded", position, runs, layer, page, parts, out)
    run, last = runs[0], runs[-1]
    if not _reads(page):
        raise KernelError(f"attend_coded: pages of {page.key_type} and {page.value_type}; f16 and coded types were wanted")
    if not scale > 0:
        raise KernelError(f"attend_coded: the scale of the scores must be positive, not {scale}")
    seen_as = bands(layer.rope, page.page_cells, parts.first_page + num_parts - 1)
    form = form or choose_form(page, layer.group, num_bands, num_parts, launcher.arch)
    shape = launch_shape(page, layer.group, num_bands, num_pages, form, num_sms)
    place = (
        run.num_slots,
        run.first_slot,
        run.num_pages,
        last.num_slots,
        last.first_slot,
        num_pages,
        run.first_page,
        first_part,
        num_parts,
    )
    sizes = (seen_as.previous_page, seen_as.own_page, num_bands, layer.group, shape.heads, layer.sliding_window or 0)
    launcher.launch(
        spec(page, form),
        shape.grid,
        form.warps * form.teams * 32,
        parts.q,
        position,
        *pools,
        parts.out,
        parts.lse,
        parts.arrivals,
        out,
        *map(np.int32, place + sizes),
        np.float32(scale),
        shared_bytes=shape.shared_bytes,
    )
