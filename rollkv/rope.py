"""Rotation frequencies of a RopeConfig, in float64: plain, per-pair factors (llama 3), linear and YaRN scaling."""

import math

import numpy as np

from rollkv.config import RopeConfig


def rope_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """(frequencies float64 [dim/2] in radians a position, magnitude that multiplies cos and sin).

    YaRN after Peng et al., arXiv 2309.00071, section 3.2 to 3.4: pairs that turn more than beta_fast times within the original context keep
    their frequency, pairs that turn less than beta_slow times are divided by the factor, those between are blended linearly.
    """
    pairs = rope.dim // 2
    frequencies = rope.theta ** (-2.0 * np.arange(pairs, dtype=np.float64) / rope.dim)
    if rope.frequency_factors is not None:
        frequencies = frequencies / np.asarray(rope.frequency_factors, dtype=np.float64)
    if rope.scaling == "linear":
        return frequencies / rope.factor, rope.attention_factor
    if rope.scaling == "yarn":
        low = max(math.floor(_pair_with_turns(rope, rope.beta_fast)), 0)
        high = min(math.ceil(_pair_with_turns(rope, rope.beta_slow)), rope.dim - 1)
        stretched = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0.0, 1.0)
        frequencies = frequencies * (1.0 - stretched) + frequencies / rope.factor * stretched
        return frequencies, rope.attention_factor * (1.0 + 0.1 * math.log(rope.factor))
    return frequencies, rope.attention_factor


def _pair_with_turns(rope: RopeConfig, turns: float) -> float:
    """The (fractional) index of the pair that makes `turns` full turns over the original context."""
    return rope.dim * math.log(rope.original_context / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))
