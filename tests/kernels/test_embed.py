"""Embedding rows out of tables of every type."""

import numpy as np
import pytest

from oracle_linear import load_weight, random_weight, values
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import embed
from rollkv.cuda.nvrtc import KernelError
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.quants import FORMATS, device_bytes


@pytest.mark.parametrize("spans", (1, 31, 32, 33, 1000))
def test_launch_grid_covers_the_row(spans):
    tokens, blocks, _ = embed.launch_grid(7, spans)
    assert tokens == 7 and (blocks - 1) * 128 < spans * 4 <= blocks * 128


def test_shapes_are_checked():
    table = CudaWeight("t", (100, 256), "Q6_K", DeviceArray(256, (device_bytes("Q6_K", (100, 256)),), "u8"))
    with pytest.raises(KernelError, match="embed: out"):
        embed.embed(None, DeviceArray(256, (3,), "i32"), table, DeviceArray(256, (3, 255), "f32"), scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="embed: tokens"):
        embed.embed(None, DeviceArray(256, (3,), "f32"), table, DeviceArray(256, (3, 256), "f32"), scale=1.0)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", FORMATS)
def test_rows_bit_for_bit(cuda, qtype):
    """Tokens outside the table read nothing and give rows of NaN."""
    rng, fmt = np.random.default_rng(30), FORMATS[qtype]
    for vocab, columns in ((1, fmt.span), (203, 3 * fmt.span + (17 if fmt.elements == 1 else 0)), (37, 2560)):
        tensor = random_weight(qtype, (vocab, columns), rng)
        tokens = np.concatenate([rng.integers(0, vocab, 20), [0, vocab - 1, -1, vocab, 2**31 - 1, -(2**31)]]).astype(np.int32)
        out = cuda.upload("out", np.full((len(tokens), columns), 7, np.float32))
        cuda.embed(cuda.upload("tokens", tokens), load_weight(cuda, tensor), 1.7, out)
        found, known = cuda.read(out), (tokens >= 0) & (tokens < vocab)
        wanted = np.float32(1.7) * values(tensor)[tokens[known]]
        assert np.array_equal(found[known].view(np.uint32), wanted.view(np.uint32))
        assert np.isnan(found[~known]).all() and known.sum() == 22
