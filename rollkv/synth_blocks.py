"""Bytes of synthetic weights in Q8_0, Q4_K and F16 that are set by hand: whole rows, and the heads of a table's rows."""

import numpy as np

from rollkv.quants import FORMATS

# A uniform code has this standard deviation, in steps; the largest code of a row set by hand is this many steps.
DEVIATION = {"Q8_0": (256**2 - 1) ** 0.5 / 12**0.5, "Q4_K": (16**2 - 1) ** 0.5 / 12**0.5}
_LARGEST = {"Q8_0": 127, "Q4_K": 7}
_TRIPLE = 3  # in Q4_K the code block of a table row counts three times the step of the random part
# Standard deviation of the random part of a table row, in units of the code block's magnitude. Q4_K, whose blocks of a row share one step,
# decides it for all types.
RANDOM_SHARE = DEVIATION["Q4_K"] / (_LARGEST["Q4_K"] * _TRIPLE)


def encode_rows(qtype: str, rows: np.ndarray) -> np.ndarray:
    """uint8 [rows, bytes of a row] of float32 [rows, columns] whose entries are 0 or of one magnitude a row.

    Such rows survive every type: the codes are exact, and only the magnitude is rounded, to 11 bits.
    """
    if qtype == "F16":
        return rows.astype("<f2").view(np.uint8).reshape(len(rows), -1)
    weights, nbytes = FORMATS[qtype].elements, FORMATS[qtype].nbytes
    largest = np.abs(rows).max(axis=1, keepdims=True)
    step = (largest / _LARGEST[qtype]).astype(np.float32)
    codes = np.where(rows > 0, _LARGEST[qtype], np.where(rows < 0, -_LARGEST[qtype], 0)).reshape(len(rows), -1, weights)
    out = np.zeros((*codes.shape[:2], nbytes), np.uint8)
    if qtype == "Q8_0":
        used = np.any(codes, axis=2, keepdims=True)
        out[..., :2] = np.where(used, half_bytes(step)[:, None, :], 0)
        out[..., 2:] = codes.astype(np.int8).view(np.uint8)
        return out.reshape(len(rows), -1)
    for row, blocks in enumerate(codes):
        for block in np.flatnonzero(blocks.any(axis=1)):
            used = blocks[block].reshape(8, 32).any(axis=1)
            out[row, block, :16] = q4_k_head(float(step[row, 0]), used.astype(int).tolist(), (used * 16).tolist())
    out[..., 16:] = _nibbles(codes + 8)
    return out.reshape(len(rows), -1)


def table_head(qtype: str, signs: np.ndarray, magnitude: float) -> np.ndarray:
    """The first bytes of every row of an embedding, uint8 [rows, bytes]: `magnitude` times `signs` in the first 32 columns, zero in the 96
    behind them. signs: int8 [rows, 32] of -1, 0, 1.

    Behind them the row is random, with standard deviation magnitude * RANDOM_SHARE: in Q4_K, whose head covers a part of a block, the scales
    and minima here are those of the random weights too.
    """
    if qtype == "F16":
        out = np.zeros((len(signs), 128 * 2), np.uint8)
        out[:, :64] = (signs * np.float32(magnitude)).astype("<f2").view(np.uint8)
    elif qtype == "Q8_0":
        out = np.zeros((len(signs), 4 * 34), np.uint8)
        out[:, :2] = half_bytes(magnitude / 127)
        out[:, 2:34] = (signs * 127).astype(np.int8).view(np.uint8)
    else:
        out = np.zeros((len(signs), 16 + 2 * 32), np.uint8)
        out[:, :16] = q4_k_head(magnitude / (7 * _TRIPLE), [_TRIPLE, 0, 0, 0, 1, 1, 1, 1], [16 * _TRIPLE, 0, 0, 0, 15, 15, 15, 15])
        out[:, 16:48] = (signs * 7 + 8).astype(np.uint8)
    return out


def half_bytes(value: float | np.floating | np.ndarray) -> np.ndarray:
    """The two bytes of a float16, uint8 [..., 2]."""
    half = np.asarray(value).astype("<f2")
    return half.reshape(half.shape if half.ndim else (1,)).view(np.uint8)


def q4_k_head(step: float, scales: list[int], minima: list[int]) -> np.ndarray:
    """The first 16 bytes of a Q4_K block, weights being step * scale * code - step / 2 * minimum: two halves, then 6 bits each for the
    scales and minima of eight groups, packed as ggml does."""
    low = [*(scales[i] | scales[i + 4] >> 4 << 6 for i in range(4)), *(minima[i] | minima[i + 4] >> 4 << 6 for i in range(4))]
    high = [scales[i] & 15 | (minima[i] & 15) << 4 for i in range(4, 8)]
    half = np.float16(step)
    return np.concatenate([half_bytes(half), half_bytes(half / 2), np.array([*low, *high], np.uint8)])


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """[..., 256] codes of 4 bits to [..., 128] bytes: of every 64 columns, the first 32 in the low halves."""
    parts = codes.astype(np.uint8).reshape(*codes.shape[:-1], 4, 2, 32)
    return (parts[..., 0, :] | parts[..., 1, :] << 4).reshape(*codes.shape[:-1], 128)
