"""SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) by counter: word i of a seed needs none before it.

Random numbers that are functions of (seed, index): the host and the device (csrc/split_mix.cuh) make the same ones, in any order.
"""

import numpy as np

GAMMA = 0x9E3779B97F4A7C15  # what the state grows by from word to word
_MASK = (1 << 64) - 1
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))  # of the finaliser: shift, factor


def word(seed: int, index: int) -> int:
    """Output `index`, from 0 on, of the generator started at `seed`: 64 bits."""
    z = seed + (index + 1) * GAMMA & _MASK
    for shift, factor in _STEPS:
        z ^= z >> shift
        z = z if factor is None else z * factor & _MASK
    return z


def words(seed: int, first: int, ramp: np.ndarray, out: np.ndarray, spare: np.ndarray) -> None:
    """out[i] = word(seed, first + i). ramp[i] = i * GAMMA; all uint64 of one length, `spare` is overwritten. Allocates nothing."""
    np.add(ramp, np.uint64(seed + (first + 1) * GAMMA & _MASK), out=out)  # overflow wraps
    for shift, factor in _STEPS:
        np.right_shift(out, np.uint64(shift), out=spare)
        np.bitwise_xor(out, spare, out=out)
        if factor is not None:
            np.multiply(out, np.uint64(factor), out=out)
