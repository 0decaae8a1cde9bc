"""What was attended over rotated values, back in the model's frame: the bits that the host makes."""

from typing import Any

import numpy as np
import pytest

from oracle_attention import make_layer
from rollkv import kv_codes
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import turn_back
from rollkv.cuda.nvrtc import KernelError

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(
    ("num_tokens", "heads", "dim"), [(1, 1, 128), (1, 40, 128), (1, 6, 80), (3, 5, 16), (7, 3, 256), (2, 9, 96), (5, 2, 192), (333, 8, 64)]
)
def test_every_row_in_equal_bits(cuda: Any, num_tokens: int, heads: int, dim: int) -> None:
    x = np.random.default_rng([num_tokens, dim]).standard_normal((num_tokens + 1, heads * dim)).astype(np.float32)
    out = cuda.upload("out", x)
    turn_back.turn_back(cuda.launcher, out.rows(num_tokens), make_layer(heads, heads, 64, dim))
    got = cuda.read(out)
    np.testing.assert_array_equal(got[:num_tokens], kv_codes.turn_back(x[:num_tokens].reshape(-1, dim)).reshape(num_tokens, -1))
    np.testing.assert_array_equal(got[num_tokens:], x[num_tokens:])


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 4096 * 40])
def test_every_row_has_one_warp(rows: int) -> None:
    shape = turn_back.launch_shape(rows)
    assert rows <= shape.grid[0] * shape.threads // 32 < rows + 4


def test_bytes_moved_and_wrong_shapes() -> None:
    layer = make_layer(4, 2, 64, 128)
    assert turn_back.turn_back_bytes(3, layer) == 3 * 4 * 128 * 8
    with pytest.raises(KernelError, match="out must be f32"):
        turn_back.turn_back(None, DeviceArray(4096, (3, 256), "f32"), layer)  # type: ignore[arg-type]
