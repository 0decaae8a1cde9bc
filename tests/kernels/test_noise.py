"""noise against reference.noise, bit for bit, and what the numbers are."""

from typing import Any

import numpy as np
import pytest

from rollkv import reference, split_mix
from rollkv.cuda.kernels import noise
from rollkv.cuda.nvrtc import KernelError

SEED = 0x9E3779B97F4A7C15 ^ 12345


def test_numbers_depend_on_their_index_alone() -> None:
    whole = reference.noise(SEED, 0, 1003)
    assert whole.dtype == np.float32
    for first, count in ((0, 1), (1, 2), (3, 6), (5, 998), (1002, 1), (8, 8)):
        np.testing.assert_array_equal(reference.noise(SEED, first, count), whole[first : first + count])
    assert (reference.noise(SEED + 1, 0, 1003) != whole).mean() > 0.99


def test_numbers_by_hand() -> None:
    for index in (0, 7, 1_000_003):
        code = split_mix.word(SEED, index // 4) >> (16 * (index % 4)) & 0xFFFF
        assert reference.noise(SEED, index, 1)[0] == np.float32(code - 32767.5) * reference.NOISE_SCALE


def test_numbers_are_sane() -> None:
    values = reference.noise(SEED, 10**12, 200_000).astype(np.float64)
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01 and np.abs(values).max() <= 3**0.5 + 1e-6


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 1), (3, 2), (0, 1024), (1, 1024), (4, 1025), (10**12 + 3, 999_999)])
def test_blocks_cover_every_word(first: int, count: int) -> None:
    words = (first + count - 1) // 4 - first // 4 + 1
    assert 0 <= noise.blocks(first, count) * 256 - words < 256


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 4, 7, 2**41 + 1])
@pytest.mark.parametrize("count", [1, 3, 4, 1023, 4096, 100_001])
def test_noise_is_the_references(cuda: Any, first: int, count: int) -> None:
    memory = cuda.upload("out", np.full(count + 64, np.nan, np.float32))
    cuda.noise(memory.view((1, count)), SEED, first)
    got = cuda.read(memory)
    np.testing.assert_array_equal(got[:count], reference.noise(SEED, first, count))
    assert np.isnan(got[count:]).all(), "written behind the end"


@pytest.mark.gpu
def test_other_memory_is_refused(cuda: Any) -> None:
    out = cuda.empty("out", (64,), "f32")
    with pytest.raises(KernelError, match="noise: out"):
        cuda.noise(out.view((64,), "i32"), SEED, 0)
    with pytest.raises(KernelError, match="16 bytes"):
        cuda.noise(out.view((8,), offset_bytes=4), SEED, 0)
