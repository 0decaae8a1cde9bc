"""Random weights by counter: any piece of a matrix can be made anywhere, in any order, on the host and on the device, with equal bytes.

The random bits of a matrix are 64-bit words, eight bytes of codes each, in the order of the file. Word i is word i of SplitMix64 (split_mix.py)
for the matrix's seed. This module is the definition; csrc/synth_noise.cu follows it.

Weights are uniform and centred, so their sum over a row has no bias (Q8_0: but for half a step).
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rollkv import split_mix
from rollkv.quants import FORMATS
from rollkv.synth_blocks import DEVIATION, half_bytes, q4_k_head

WORD_BYTES = 8
_CHUNK_WORDS = 1 << 15  # 256 KiB: three such arrays stay in the L2 cache (2.3 GB/s a core; 1.3 with four times as many)
_PART_CHUNKS = 64  # that one thread makes at a time
_F16_CENTRE = 32767.5
_F16_GROUP = 32  # weights that count as a block


@dataclass(frozen=True)
class Noise:
    """A matrix of random weights with this standard deviation: a function of the seed (64 bits) alone."""

    qtype: str
    deviation: float
    seed: int

    @property
    def block_weights(self) -> int:
        """Weights of the block that the words are counted by."""
        return _F16_GROUP if self.qtype == "F16" else FORMATS[self.qtype].elements

    @property
    def block_bytes(self) -> int:
        return 2 * _F16_GROUP if self.qtype == "F16" else FORMATS[self.qtype].nbytes

    @cached_property
    def head(self) -> np.ndarray:
        """uint8: the bytes in front of every block's codes, the same in all."""
        if self.qtype == "F16":
            return np.zeros(0, np.uint8)
        step = self.deviation / DEVIATION[self.qtype]
        # Q4_K: step * code - step / 2 * 15
        return half_bytes(step) if self.qtype == "Q8_0" else q4_k_head(step, [1] * 8, [15] * 8)

    @cached_property
    def head_words(self) -> tuple[int, int]:
        """The head as two numbers of 64 bits, its first byte lowest."""
        low, high = np.pad(self.head, (0, 2 * WORD_BYTES - len(self.head))).view("<u8")
        return int(low), int(high)

    @property
    def block_words(self) -> int:
        return (self.block_bytes - len(self.head)) // WORD_BYTES

    @property
    def scale(self) -> np.float32:
        """F16: what 16 random bits, less their mean, are multiplied by; the product is rounded to float32, then to float16."""
        return np.float32(self.deviation * 3**0.5 / _F16_CENTRE)

    @cached_property
    def _halves(self) -> np.ndarray:
        """F16: the weight of every 16 bits, as uint16. Looking it up is ten times as fast as NumPy's rounding to half."""
        return ((np.arange(1 << 16, dtype=np.float32) - np.float32(_F16_CENTRE)) * self.scale).astype("<f2").view("<u2")

    def fill(self, first_block: int, out: np.ndarray) -> None:
        """Writes the blocks from first_block on into out, uint8 [blocks * block_bytes]. One thread, no memory to speak of."""
        blocks = out.reshape(-1, self.block_bytes)
        per_chunk = _CHUNK_WORDS // self.block_words
        ramp = np.arange(_CHUNK_WORDS, dtype=np.uint64) * np.uint64(split_mix.GAMMA)
        words, spare = np.empty_like(ramp), np.empty_like(ramp)
        for begin in range(0, len(blocks), per_chunk):
            part = blocks[begin : begin + per_chunk]
            n = len(part) * self.block_words
            split_mix.words(self.seed, (first_block + begin) * self.block_words, ramp[:n], words[:n], spare[:n])
            self._store(words[:n], part)

    def make(self, num_blocks: int) -> np.ndarray:
        """uint8 [num_blocks * block_bytes], by as many threads as there are cores."""
        out = np.empty(num_blocks * self.block_bytes, np.uint8)
        at_once = _PART_CHUNKS * (_CHUNK_WORDS // self.block_words)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            parts = ((first, out[first * self.block_bytes :][: at_once * self.block_bytes]) for first in range(0, num_blocks, at_once))
            for done in [threads.submit(self.fill, first, part) for first, part in parts]:
                done.result()
        return out

    def _store(self, words: np.ndarray, blocks: np.ndarray) -> None:
        if self.qtype == "F16":
            np.take(self._halves, words.astype("<u8", copy=False).view("<u2"), out=blocks.reshape(-1).view("<u2"), mode="wrap")
            return
        head, codes = len(self.head), self.block_bytes - len(self.head)
        fields = blocks.view([("head", f"V{head}"), ("codes", f"V{codes}")])  # whole fields move three times as fast as bytes
        fields["head"] = self.head.view(f"V{head}")
        fields["codes"][:, 0] = words.astype("<u8", copy=False).view(f"V{codes}")
