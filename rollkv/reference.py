"""The oracle: one plain NumPy function per operation, in the precision of its inputs (float64 in, float64 out). Knows no backend.

Letters as in backend.py. Attention works page by page and merges in index order, so that its bits do not depend on where a page lies.
"""

import numpy as np

from rollkv import split_mix
from rollkv.config import DualChunk, RopeConfig
from rollkv.rope import rope_frequencies

NOISE_SCALE = np.float32(3**0.5 / 32767.5)  # of 16 random bits less their mean: deviation 1


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over runs of len(weight) columns. x [T, m*n], weight [n]."""
    runs = x.reshape(-1, weight.shape[0])
    scale = 1.0 / np.sqrt(np.mean(runs * runs, axis=1, keepdims=True, dtype=x.dtype) + np.asarray(eps, x.dtype))
    return (runs * scale * weight).reshape(x.shape).astype(x.dtype, copy=False)


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """x weight^T + bias. Up to 16 rows go one by one, so that a row's bits do not depend on the rows beside it; by einsum, which reads
    memory as fast as BLAS (14 GB/s a core) and starts no threads: on a busy machine these made a small product take 8 ms, not 0.2."""
    out = np.stack([np.einsum("nk,k->n", weight, row) for row in x]) if x.shape[0] <= 16 else x @ weight.T
    return out if bias is None else out + bias


def rope_table(rope: RopeConfig, position: int, num_tokens: int, prompt_cells: int = 0) -> np.ndarray:
    """(cos, sin) times the magnitude, float64 [R, T, dim/2, 2]; see backend.py."""
    frequencies, magnitude = rope_frequencies(rope)
    cells = np.arange(position, position + num_tokens)
    places, factors = cells[None], np.ones((1, num_tokens))
    if rope.dual_chunk is not None:
        places, factors = dual_chunk_places(rope.dual_chunk, cells, prompt_cells)
    angles = places[..., None].astype(np.float64) * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1) * (factors * magnitude)[..., None, None]


def dual_chunk_places(chunk: DualChunk, cells: np.ndarray, prompt_cells: int) -> tuple[np.ndarray, np.ndarray]:
    """(places int64 [4, T], factors float64 [4, T]) of the tokens of these cells: of their queries in bands 0 to 2, and of their keys.

    After An et al., arXiv 2402.17463, section 3, clamped at chunk_cells as the published code of Qwen2.5-1M does, not one below as the paper. Its
    temperature multiplies keys and queries alike; here queries take the square, so that keys are stored as they are at any length.
    """
    number = cells % chunk.stride_cells
    before = np.minimum(number + chunk.stride_cells, chunk.chunk_cells)
    older = np.full_like(number, min(2 * chunk.stride_cells - 1, chunk.chunk_cells))
    lengths = np.maximum(cells + 1, prompt_cells).astype(np.float64)
    square = np.maximum(1.0, 1.0 + 0.1 * np.log(lengths / chunk.original_context)) ** 2
    return np.stack([number, before, older, number]), np.stack([square, square, square, np.ones_like(square)])


def rope(x: np.ndarray, num_heads: int, table: np.ndarray, style: str) -> np.ndarray:
    """Rotates pairs (2i, 2i+1) ("interleaved") or (i, i + dim/2) ("halves") of every head. x [T, num_heads*D], table [T, dim/2, 2]."""
    out = x.reshape(x.shape[0], num_heads, -1).copy()
    pairs = table.shape[1]
    first, second = (np.s_[..., 0 : 2 * pairs : 2], np.s_[..., 1 : 2 * pairs : 2]) if style == "interleaved" else (
        np.s_[..., :pairs], np.s_[..., pairs : 2 * pairs])  # fmt: skip
    a, b = out[first].copy(), out[second].copy()
    cos, sin = table[:, None, :, 0].astype(x.dtype), table[:, None, :, 1].astype(x.dtype)
    out[first], out[second] = a * cos - b * sin, a * sin + b * cos
    return out.reshape(x.shape)


def visible_cells(position: int, num_tokens: int, first_cell: int, num_cells: int, sliding_window: int | None) -> np.ndarray:
    """bool [T, cells]: query t sees cells up to position + t, and with a sliding window of W no cell before position + t - W + 1."""
    query = np.arange(position, position + num_tokens)[:, None]
    cell = np.arange(first_cell, first_cell + num_cells)[None, :]
    seen = cell <= query
    return seen if sliding_window is None else seen & (cell > query - sliding_window)


def attend_page(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One page's part of a softmax: (unnormalised out [T, H, Dv], sum l [T, H], maximum m [T, H]).

    q [T, H, Dk]; keys [Hkv, P, Dk]; values [Hkv, P, Dv]; seen bool [T, P]. Cells that no query sees may hold anything, NaN included.
    """
    num_tokens, num_heads, key_dim = q.shape
    num_kv_heads = keys.shape[0]
    used = np.asarray(seen.any(axis=0))[:, None]
    keys, values = np.where(used, keys, 0).astype(q.dtype), np.where(used, values, 0).astype(q.dtype)
    grouped = q.reshape(num_tokens, num_kv_heads, -1, key_dim).transpose(1, 2, 0, 3)  # [Hkv, G, T, Dk]
    scores = grouped @ keys[:, None].swapaxes(-1, -2) * np.asarray(scale, q.dtype)
    scores = np.where(seen, scores, -np.inf)
    maximum = scores.max(axis=-1)
    weights = np.exp(scores - np.where(np.isfinite(maximum), maximum, 0)[..., None])
    out = weights @ values[:, None]
    back = (2, 0, 1)  # [Hkv, G, T] -> [T, Hkv, G]
    return (
        out.transpose(2, 0, 1, 3).reshape(num_tokens, num_heads, -1),
        weights.sum(axis=-1).transpose(back).reshape(num_tokens, num_heads),
        maximum.transpose(back).reshape(num_tokens, num_heads),
    )


def merge_states(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges normalised partial states in index order. outs [parts, H, Dv], lses [parts, H]; an empty part is (0, -inf)."""
    maximum = lses.max(axis=0)
    weights = np.exp(lses - np.where(np.isfinite(maximum), maximum, 0))
    total = np.zeros_like(maximum)
    out = np.zeros_like(outs[0])
    for part, weight in zip(outs, weights, strict=True):
        total = total + weight
        out = out + part * weight[:, None]
    safe = np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, maximum + np.log(safe), -np.inf)
    return out / safe[:, None], lse.astype(lses.dtype)


def glu(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """activation(gate) * up; "silu" x / (1 + e^-x), or "gelu_tanh" (the tanh form of GELU)."""
    if activation == "silu":
        return gate * sigmoid(gate) * up
    inner = np.asarray(np.sqrt(2 / np.pi), gate.dtype) * (gate + np.asarray(0.044715, gate.dtype) * gate * gate * gate)
    return np.asarray(0.5, gate.dtype) * gate * (1 + np.tanh(inner)) * up


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def advance_state(
    state: tuple[np.ndarray, np.ndarray, np.ndarray], part: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Online softmax: a running (out, l, m) and one page's, both unnormalised with their own maximum. Empty is (0, 0, -inf)."""
    maximum = np.maximum(state[2], part[2])
    base = np.where(np.isfinite(maximum), maximum, 0)
    keep, gain = np.exp(state[2] - base), np.exp(part[2] - base)
    return state[0] * keep[..., None] + part[0] * gain[..., None], state[1] * keep + part[1] * gain, maximum


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16), round to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def noise(seed: int, first: int, count: int) -> np.ndarray:
    """Numbers first .. first + count - 1 of a seed (64 bits), float32 [count]: uniform, mean 0, deviation 1. Number i comes from the 16 bits i mod 4,
    the lowest first, of word i // 4 of SplitMix64, so any piece can be made anywhere."""
    begin, end = first // 4, -(-(first + count) // 4)
    ramp = np.arange(end - begin, dtype=np.uint64) * np.uint64(split_mix.GAMMA)
    words, spare = np.empty_like(ramp), np.empty_like(ramp)
    split_mix.words(seed, begin, ramp, words, spare)
    codes = words.astype("<u8", copy=False).view("<u2")[first % 4 :][:count]
    return (codes.astype(np.float32) - np.float32(32767.5)) * NOISE_SCALE
