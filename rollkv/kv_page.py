"""Cells in and out of the bytes of a page, in NumPy: the layout of config.PageFormat, and the oracle of every kernel that reads or writes one."""

import numpy as np

from rollkv.config import PageFormat
from rollkv.kv_codes import decode, encode
from rollkv.kv_types import CELLS_TOGETHER, KV_TYPES
from rollkv.reference import from_bf16_bits, to_bf16_bits

_PLAIN = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def write_cells(raw: np.ndarray, page: PageFormat, first_cell: int, keys: np.ndarray, values: np.ndarray) -> None:
    """Stores cells first_cell, first_cell + 1, ... of a page, uint8 [page_bytes]. keys [cells, Hkv, Dk], values [cells, Hkv, Dv], in the page's
    frame."""
    for part, name, x in zip(_parts(raw, page), (page.key_type, page.value_type), (keys, values), strict=True):
        _write(part, page, name, first_cell, x.swapaxes(0, 1))


def _write(part: np.ndarray, page: PageFormat, name: str, first_cell: int, x: np.ndarray) -> None:
    """x [Hkv, cells, D]."""
    at = np.arange(first_cell, first_cell + x.shape[1])
    if KV_TYPES[name].coded:
        for array, rows in zip(_coded(part, page, name, x.shape[2]), encode(x, name), strict=True):
            array[:, at // CELLS_TOGETHER, :, at % CELLS_TOGETHER] = rows.swapaxes(0, 1)
    else:
        _plain(part, page, name, x.shape[2])[:, at] = to_bf16_bits(x) if name == "bf16" else x


def read_cells(raw: np.ndarray, page: PageFormat) -> tuple[np.ndarray, np.ndarray]:
    """(keys [Hkv, P, Dk], values [Hkv, P, Dv]) of a page, uint8 [page_bytes], in its frame: float16 of f16, float32 of all other types, exact."""
    sides = zip(_parts(raw, page), (page.key_type, page.value_type), (page.key_dim, page.value_dim), strict=True)
    keys, values = (_read(part, page, name, dim) for part, name, dim in sides)
    return keys, values


def reencode_cells(
    source: np.ndarray, source_page: PageFormat, target: np.ndarray, target_page: PageFormat, precision: type = np.float32
) -> None:
    """All cells of a page, uint8 [page_bytes], into another of other types, encoded anew as they are decoded; a side whose type stays is copied."""
    sides = zip(
        _parts(source, source_page),
        _parts(target, target_page),
        (source_page.key_type, source_page.value_type),
        (target_page.key_type, target_page.value_type),
        (source_page.key_dim, source_page.value_dim),
        strict=True,
    )
    for part, other, name, other_name, dim in sides:
        if name == other_name:
            other[...] = part
        else:
            _write(other, target_page, other_name, 0, _read(part, source_page, name, dim).astype(precision))


def _read(part: np.ndarray, page: PageFormat, name: str, dim: int) -> np.ndarray:
    if KV_TYPES[name].coded:
        shape = page.num_kv_heads, page.page_cells, -1
        words, scales = (array.swapaxes(2, 3).reshape(shape) for array in _coded(part, page, name, dim))
        return decode(words, scales, name, dim)
    rows = _plain(part, page, name, dim)
    return from_bf16_bits(rows) if name == "bf16" else rows


def _parts(raw: np.ndarray, page: PageFormat) -> tuple[np.ndarray, np.ndarray]:
    return raw[: page.key_bytes], raw[page.key_bytes :]


def _plain(part: np.ndarray, page: PageFormat, name: str, dim: int) -> np.ndarray:
    """One side of a page as numbers [Hkv, P, D], a view."""
    return part.view(_PLAIN[name]).reshape(page.num_kv_heads, page.page_cells, dim)


def _coded(part: np.ndarray, page: PageFormat, name: str, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of one side of a page: words of codes uint32 [Hkv, P/4, words, 4 cells] and scales float16 [Hkv, P/4, scales, 4 cells]."""
    kind, heads, cells = KV_TYPES[name], page.num_kv_heads, page.page_cells
    codes, scales = np.split(part.reshape(heads, -1), [cells * kind.code_bytes(dim)], axis=1)
    shape = heads, cells // CELLS_TOGETHER, -1, CELLS_TOGETHER
    return codes.view("<u4").reshape(shape), scales.view(np.float16).reshape(shape)
