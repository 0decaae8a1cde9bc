"""Cells in and out of the bytes of a page, in NumPy: the layout of config.PageFormat, and the oracle of every kernel that reads or writes one."""

import numpy as np

from rollkv.config import PageFormat
from rollkv.kv_codes import decode, encode
from rollkv.kv_types import KV_TYPES, SCALE_BYTES
from rollkv.reference import from_bf16_bits, to_bf16_bits

_PLAIN = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def write_cells(raw: np.ndarray, page: PageFormat, first_cell: int, keys: np.ndarray, values: np.ndarray) -> None:
    """Stores cells first_cell, first_cell + 1, ... of a page, uint8 [page_bytes]. keys [cells, Hkv, Dk], values [cells, Hkv, Dv], in the page's
    frame."""
    for part, name, x in zip(_parts(raw, page), (page.key_type, page.value_type), (keys, values), strict=True):
        _write(part, page, name, first_cell, x.swapaxes(0, 1))


def _write(part: np.ndarray, page: PageFormat, name: str, first_cell: int, x: np.ndarray) -> None:
    """x [Hkv, cells, D]."""
    codes, scales = (rows[:, first_cell : first_cell + x.shape[1]] for rows in _rows(part, page, name, x.shape[2]))
    if KV_TYPES[name].coded:
        codes[...], scales[...] = encode(x, name)
    else:
        codes.view(_PLAIN[name])[...] = to_bf16_bits(x) if name == "bf16" else x


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
    codes, scales = _rows(part, page, name, dim)
    if KV_TYPES[name].coded:
        return decode(codes, scales, name, dim)
    return from_bf16_bits(codes.view(np.uint16)) if name == "bf16" else codes.view(_PLAIN[name])


def _parts(raw: np.ndarray, page: PageFormat) -> tuple[np.ndarray, np.ndarray]:
    return raw[: page.key_bytes], raw[page.key_bytes :]


def _rows(part: np.ndarray, page: PageFormat, name: str, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of one side of a page: (codes uint8 [Hkv, P, code_bytes], scales float16 [Hkv, P, scales])."""
    kind, heads, cells = KV_TYPES[name], page.num_kv_heads, page.page_cells
    of_heads = part.reshape(heads, -1)
    codes, scales = np.split(of_heads, [cells * kind.code_bytes(dim)], axis=1)
    assert scales.shape[1] == cells * kind.num_scales(dim) * SCALE_BYTES
    return codes.reshape(heads, cells, kind.code_bytes(dim)), scales.view(np.float16).reshape(heads, cells, kind.num_scales(dim))
