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
    ids, position = DeviceArray(256, (9,), "i32"), DeviceArray(256, (1,), "i32")
    with pytest.raises(KernelError, match="embed: out"):
        embed.embed(None, ids, position, table, DeviceArray(256, (3, 255), "f32"), scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="embed: sequence"):
        embed.embed(None, DeviceArray(256, (9,), "f32"), position, table, DeviceArray(256, (3, 256), "f32"), scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="embed: position"):
        embed.embed(None, ids, ids, table, DeviceArray(256, (3, 256), "f32"), scale=1.0)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", FORMATS)
def test_rows_bit_for_bit(cuda, qtype):
    """Tokens outside the table, and cells outside the sequence, read nothing and give rows of NaN."""
    rng, fmt = np.random.default_rng(30), FORMATS[qtype]
    for vocab, columns in ((1, fmt.span), (203, 3 * fmt.span + (17 if fmt.elements == 1 else 0)), (37, 2560)):
        tensor = random_weight(qtype, (vocab, columns), rng)
        tokens = np.concatenate([rng.integers(0, vocab, 20), [0, vocab - 1, -1, vocab, 2**31 - 1, -(2**31)]]).astype(np.int32)
        sequence, position, table = cuda.upload("sequence", tokens), cuda.empty("position", (1,), "i32"), load_weight(cuda, tensor)
        for first in (0, 5, -2):
            out = cuda.upload("out", np.full((len(tokens), columns), 7, np.float32))
            cuda.write(position, np.array([first], np.int32))
            cuda.embed(sequence, position, table, 1.7, out)
            cells = first + np.arange(len(tokens))
            inside = (cells >= 0) & (cells < len(tokens))
            ids = np.where(inside, tokens[cells % len(tokens)], -1)
            found, known = cuda.read(out), (ids >= 0) & (ids < vocab)
            wanted = np.float32(1.7) * values(tensor)[ids[known]]
            assert np.array_equal(found[known].view(np.uint32), wanted.view(np.uint32))
            assert np.isnan(found[~known]).all() and known.sum() == {0: 22, 5: 17, -2: 22}[first]
