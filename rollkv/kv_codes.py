"""The codes of the KV cache's types in NumPy: the oracle of the kernels, which do the same operations in the same order.

An element is level * scale: a level that its code names, exact in f16, and the f16 scale of its group; the product is exact in float32. Everything
works on the last axis, a head's elements of one cell ("row"), in the precision of its input; in float32 every product and sum is rounded on
its own, and sums over a group are taken in pairs of neighbours, then of pairs, and so on. A group that holds NaN or infinity gets the scale NaN.

q8_0 and q4_0 choose codes and scales as GGUF's reference does for weights. turbo4, turbo3 and turbo2 code rotated elements, which are nearly Gaussian
whatever the head holds, with a Gaussian's best levels (Lloyd-Max; Zandieh et al., arXiv 2504.19874, after the rotation and rescaling of
DRIVE and EDEN, Vargaftik et al. 2021, 2022), and a scale that makes the squared error least. The levels of turbo3 and turbo2 are a little off the best (1 %
of their errors): those of turbo3 are one byte each, the high byte of a half, and those of turbo2 uniform, so that no table is needed.
"""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from rollkv.kv_types import KV_TYPES, rotation_group

_PI_FRACTION = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)  # nothing up the sleeve
SIGNS = np.array([1 - 2 * ((_PI_FRACTION[i // 32] >> i % 32) & 1) for i in range(128)], np.float32)  # of the rotation, +1 and -1


def rotate(x: np.ndarray) -> np.ndarray:
    """H(signs * x) over each group of rotation_group(D) elements. x [..., D]."""
    groups = x.reshape(-1, rotation_group(x.shape[-1]))
    return _hadamard(groups * SIGNS[: groups.shape[1]].astype(x.dtype)).reshape(x.shape)


def turn_back(y: np.ndarray) -> np.ndarray:
    """What was rotated: signs * H(y). y [..., D]."""
    groups = y.reshape(-1, rotation_group(y.shape[-1]))
    return (_hadamard(groups) * SIGNS[: groups.shape[1]].astype(y.dtype)).reshape(y.shape)


def _hadamard(x: np.ndarray) -> np.ndarray:
    """The Walsh-Hadamard transform of rows, its own inverse: butterflies (a + b, a - b) of strides 1, 2, 4, ..., then times 1 / sqrt(n)."""
    n, stride = x.shape[1], 1
    while stride < n:
        pairs = x.reshape(len(x), -1, 2, stride)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack((a + b, a - b), axis=2).reshape(len(x), n)
        stride *= 2
    return x * x.dtype.type(n**-0.5)


# -- levels --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Book:
    """Levels of a turbo type: those above zero, and the deviation of the Gaussian that they suit best."""

    upper: tuple[float, ...]
    deviation: float


_BOOKS = {
    "turbo4": _Book((0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326), 1.0),
    "turbo3": _Book((0.25, 0.75, 1.25, 2.0), 1.0682),
    "turbo2": _Book((0.5, 1.5), 0.99),
}


def _levels(name: str) -> np.ndarray:
    if name == "q8_0":
        return np.arange(-128, 128).astype(np.float16)
    if name == "q4_0":
        return np.arange(-8, 8).astype(np.float16)
    upper = np.array(_BOOKS[name].upper, np.float16)
    return np.concatenate([-upper[::-1], upper])


# By type, f16 [codes], ascending: a code is the index of its level. q8_0 never takes the first.
LEVELS = MappingProxyType({name: _levels(name) for name, kind in KV_TYPES.items() if kind.coded})


def quantise(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8 [..., D], scales float16 [..., D / group]) of elements [..., D] in the frame that they are stored in."""
    groups = x.reshape(*x.shape[:-1], -1, KV_TYPES[name].group(x.shape[-1]))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        codes, scales = {"q8_0": _q8_0, "q4_0": _q4_0}.get(name, lambda g: _turbo(g, name))(groups)
        sound = np.isfinite(groups).all(axis=-1)
        return codes.reshape(x.shape), np.where(sound, scales, np.nan).astype(np.float16)


def _q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    step = np.abs(x).max(axis=-1) / x.dtype.type(127)
    scaled = x * _inverse(step)[..., None]
    rounded = np.copysign(np.floor(np.abs(scaled)) + (np.abs(scaled) % 1 >= 0.5), scaled)  # half away from zero
    return (np.clip(np.nan_to_num(rounded), -127, 127) + 128).astype(np.uint8), step


def _q4_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    step = largest / x.dtype.type(-8)
    scaled = x * _inverse(step)[..., None] + x.dtype.type(8.5)
    return np.clip(np.nan_to_num(scaled), 0, 15).astype(np.uint8), step


def _inverse(step: np.ndarray) -> np.ndarray:
    return np.where(step == 0, 0, 1 / step)


def _turbo(y: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    levels, n = LEVELS[name].astype(y.dtype), y.shape[-1]
    norm = np.sqrt(_sum(y * y))
    unit = np.where(norm == 0, 0, y.dtype.type(n**0.5 / _BOOKS[name].deviation) / norm)
    codes = np.searchsorted((levels[:-1] + levels[1:]) / 2, y * unit[..., None], side="right").astype(np.uint8)
    chosen = levels[codes]
    return codes, np.where(norm == 0, 0, _sum(y * chosen) / _sum(chosen * chosen))


def _sum(x: np.ndarray) -> np.ndarray:
    """Over groups, a power of two long, in pairs."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


# -- bits ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plane:
    """Some bits of every code: from bit `first` of it on, at bit places[e] of the word for the word's element e."""

    first: int
    bits: int
    places: tuple[int, ...]


# By type. Each layout spares the kernels work: neighbours in the two halves of a word, where arithmetic takes them, or in one byte, which looks both up; the signs
# of eight elements one shift from their magnitudes (csrc/kv_fragments.cuh).
_PLANES = {
    "q8_0": (_Plane(0, 8, (0, 8, 16, 24)),),
    "q4_0": (_Plane(0, 4, tuple(4 * (e // 2) + 16 * (e % 2) for e in range(8))),),
    "turbo4": (_Plane(0, 4, tuple(4 * e for e in range(8))),),
    "turbo3": (
        _Plane(0, 2, tuple(4 * (e % 8) + 2 * (e // 8) for e in range(16))),
        _Plane(2, 1, tuple(4 * (e % 8) + e // 8 for e in range(32))),
    ),
    "turbo2": (_Plane(0, 2, tuple(2 * (e // 2) + 16 * (e % 2) for e in range(16))),),
}


def _as_stored(name: str) -> np.ndarray:
    """The bits of every code: turbo4 and turbo3 keep a magnitude, 0 the smallest, and above it a sign, set where negative."""
    codes = np.arange(len(LEVELS[name]))
    half = len(codes) // 2
    return np.where(codes < half, 2 * half - 1 - codes, codes - half) if name in ("turbo4", "turbo3") else codes


_STORED = {name: _as_stored(name).astype(np.uint32) for name in LEVELS}
_CODE_OF = {name: np.argsort(stored).astype(np.uint8) for name, stored in _STORED.items()}


def pack(codes: np.ndarray, name: str) -> np.ndarray:
    """uint8 [..., D] to words uint32 [..., code_bytes(D) / 4]: the planes of a row one behind the other."""
    stored, planes = _STORED[name][codes], []
    for plane in _PLANES[name]:
        per_word = len(plane.places)
        padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)]
        bits = np.pad(stored, padding).reshape(*codes.shape[:-1], -1, per_word) >> plane.first & (1 << plane.bits) - 1
        planes.append((bits << np.array(plane.places, np.uint32)).sum(axis=-1, dtype=np.uint32))
    return np.concatenate(planes, axis=-1)


def unpack(words: np.ndarray, name: str, head_dim: int) -> np.ndarray:
    """What was packed: uint32 [..., code_bytes(D) / 4] to uint8 [..., D]."""
    stored = np.zeros((*words.shape[:-1], head_dim), np.uint32)
    begin = 0
    for plane in _PLANES[name]:
        end = begin - (-head_dim // len(plane.places))
        bits = words[..., begin:end, None] >> np.array(plane.places, np.uint32) & (1 << plane.bits) - 1
        stored |= bits.reshape(*words.shape[:-1], -1)[..., :head_dim] << plane.first
        begin = end
    return _CODE_OF[name][stored]


def encode(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(words of codes uint32 [..., code_bytes(D) / 4], scales float16 [..., D / group]) of elements [..., D]."""
    codes, scales = quantise(x, name)
    return pack(codes, name), scales


def decode(words: np.ndarray, scales: np.ndarray, name: str, head_dim: int) -> np.ndarray:
    """The elements, float32 [..., D]."""
    levels = LEVELS[name].astype(np.float32)[unpack(words, name, head_dim)]
    groups = levels.reshape(*scales.shape, -1)
    with np.errstate(invalid="ignore"):
        return (groups * scales[..., None].astype(np.float32)).reshape(levels.shape)
