"""Bytes of synthetic weights in Q8_0, Q4_K and F16: rows set by hand, and any number of random ones cut from a pool of blocks.

A pool is a prime number of random blocks of one scale. A matrix is the pool over and over again from an offset of its own, so its rows differ,
up to as many rows as the pool has blocks, and filling memory costs a copy and no arithmetic. Random weights are uniform and centred, so
their sum over a row has no bias (Q8_0: but for half a step).
"""

import numpy as np

from rollkv.quants import FORMATS

# Mersenne primes: no row length divides them.
_POOL_BLOCKS, _SMALL_POOL_BLOCKS = (1 << 17) - 1, (1 << 13) - 1
# A uniform code has this standard deviation, in steps; the largest code of a row set by hand is this many steps.
_DEVIATION = {"Q8_0": (256**2 - 1) ** 0.5 / 12**0.5, "Q4_K": (16**2 - 1) ** 0.5 / 12**0.5}
_LARGEST = {"Q8_0": 127, "Q4_K": 7}
_TRIPLE = 3  # in Q4_K the code block of a table row counts three times the step of the random part
# Standard deviation of the random part of a table row, in units of the code block's magnitude. Q4_K, whose blocks of a row share one step,
# decides it for all types.
RANDOM_SHARE = _DEVIATION["Q4_K"] / (_LARGEST["Q4_K"] * _TRIPLE)


def num_blocks(qtype: str, shape: tuple[int, ...]) -> int:
    """Blocks (F16: groups of 32 weights) of a matrix."""
    return int(np.prod(shape)) // _block(qtype)[0]


def _block(qtype: str) -> tuple[int, int]:
    """(weights, bytes) of the piece that pools are made of."""
    return (32, 64) if qtype == "F16" else (FORMATS[qtype].elements, FORMATS[qtype].nbytes)


def make_pool(qtype: str, deviation: float, rng: np.random.Generator, small: bool) -> np.ndarray:
    """uint8 [blocks, bytes of a block]: random weights of this standard deviation."""
    count = _SMALL_POOL_BLOCKS if small else _POOL_BLOCKS
    weights, nbytes = _block(qtype)
    if qtype == "F16":
        spread = rng.random((count, weights), np.float32) * np.float32(2) - np.float32(1)
        return (spread * np.float32(deviation * 3**0.5)).astype("<f2").view(np.uint8)
    pool = rng.integers(0, 256, (count, nbytes), np.uint8)
    step = deviation / _DEVIATION[qtype]
    if qtype == "Q8_0":
        pool[:, :2] = _half(step)
    else:
        pool[:, :16] = _q4_k_head(step, [1] * 8, [15] * 8)  # step * code - step / 2 * 15
    return pool


def fill(pool: np.ndarray, offset: int, blocks: int) -> np.ndarray:
    """uint8 [blocks * block bytes]: the pool from block `offset` on, over and over again."""
    count, nbytes = pool.shape
    out = np.empty((blocks, nbytes), np.uint8)
    part = pool[offset:][:blocks]
    out[: len(part)] = part
    for first in range(len(part), blocks, count):
        part = out[first : first + count]
        part[:] = pool[: len(part)]
    return out.reshape(-1)


def encode_rows(qtype: str, rows: np.ndarray) -> np.ndarray:
    """uint8 [rows, bytes of a row] of float32 [rows, columns] whose entries are 0 or of one magnitude a row.

    Such rows survive every type: the codes are exact, and only the magnitude is rounded, to 11 bits.
    """
    if qtype == "F16":
        return rows.astype("<f2").view(np.uint8).reshape(len(rows), -1)
    weights, nbytes = _block(qtype)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    step = (largest / _LARGEST[qtype]).astype(np.float32)
    codes = np.where(rows > 0, _LARGEST[qtype], np.where(rows < 0, -_LARGEST[qtype], 0)).reshape(len(rows), -1, weights)
    out = np.zeros((*codes.shape[:2], nbytes), np.uint8)
    if qtype == "Q8_0":
        used = np.any(codes, axis=2, keepdims=True)
        out[..., :2] = np.where(used, _half(step)[:, None, :], 0)
        out[..., 2:] = codes.astype(np.int8).view(np.uint8)
        return out.reshape(len(rows), -1)
    for row, blocks in enumerate(codes):
        for block in np.flatnonzero(blocks.any(axis=1)):
            used = blocks[block].reshape(8, 32).any(axis=1)
            out[row, block, :16] = _q4_k_head(float(step[row, 0]), used.astype(int).tolist(), (used * 16).tolist())
    out[..., 16:] = _nibbles(codes + 8)
    return out.reshape(len(rows), -1)


def set_table_head(qtype: str, table: np.ndarray, signs: np.ndarray, magnitude: float) -> None:
    """Writes the first 128 columns of every row of an embedding: `magnitude` times `signs` in 32 columns, zero in the others.

    table: uint8 [rows, bytes of a row] of random weights with standard deviation magnitude * RANDOM_SHARE, changed in place; signs: int8
    [rows, 32] of -1, 0, 1.
    """
    if qtype == "F16":
        table[:, :256] = 0
        table[:, :64] = (signs * np.float32(magnitude)).astype("<f2").view(np.uint8)
    elif qtype == "Q8_0":
        table[:, : 4 * 34] = 0
        table[:, :2] = _half(magnitude / 127)
        table[:, 2:34] = (signs * 127).astype(np.int8).view(np.uint8)
    else:
        head = _q4_k_head(magnitude / (7 * _TRIPLE), [_TRIPLE, 0, 0, 0, 1, 1, 1, 1], [16 * _TRIPLE, 0, 0, 0, 15, 15, 15, 15])
        table[:, :16] = head
        table[:, 16:80] = 0
        table[:, 16:48] = (signs * 7 + 8).astype(np.uint8)


def _half(value: float | np.floating | np.ndarray) -> np.ndarray:
    """The two bytes of a float16, uint8 [..., 2]."""
    half = np.asarray(value).astype("<f2")
    return half.reshape(half.shape if half.ndim else (1,)).view(np.uint8)


def _q4_k_head(step: float, scales: list[int], minima: list[int]) -> np.ndarray:
    """The first 16 bytes of a Q4_K block, weights being step * scale * code - step / 2 * minimum: two halves, then 6 bits each for the
    scales and minima of eight groups, packed as ggml does."""
    low = [*(scales[i] | scales[i + 4] >> 4 << 6 for i in range(4)), *(minima[i] | minima[i + 4] >> 4 << 6 for i in range(4))]
    high = [scales[i] & 15 | (minima[i] & 15) << 4 for i in range(4, 8)]
    half = np.float16(step)
    return np.concatenate([_half(half), _half(half / 2), np.array([*low, *high], np.uint8)])


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """[..., 256] codes of 4 bits to [..., 128] bytes: of every 64 columns, the first 32 in the low halves."""
    parts = codes.astype(np.uint8).reshape(*codes.shape[:-1], 4, 2, 32)
    return (parts[..., 0, :] | parts[..., 1, :] << 4).reshape(*codes.shape[:-1], 128)
