"""rope_table and add against the float64 oracle, and their launch shapes.

Limit everywhere: twice the largest error of the same formula done plainly in float32 by NumPy, plus one rounding of the largest value.
"""

from typing import Any

import numpy as np
import pytest

from rollkv import reference
from rollkv.backend import RmsNorm
from rollkv.config import DualChunk, RopeConfig
from rollkv.cuda.kernels import add
from rollkv.cuda.nvrtc import KernelError
from rollkv.rope import rotations

gpu = pytest.mark.gpu
EPS32 = float(np.finfo(np.float32).eps)


def _guarded(cuda: Any, label: str, values: np.ndarray, guard: int = 64) -> tuple[Any, Any]:
    """(array holding values, whole memory with NaN behind it): what a kernel must not touch is looked at afterwards."""
    room = -(-(values.size + guard) // 64) * 64
    whole = np.full(room, np.nan, np.float32)
    whole[: values.size] = values.reshape(-1)
    memory = cuda.upload(label, whole)
    return memory.view(values.shape), memory


def _untouched(cuda: Any, memory: Any, size: int) -> None:
    assert np.isnan(cuda.read(memory)[size:]).all(), "written behind the end"


def _check(got: np.ndarray, exact: np.ndarray, plain: np.ndarray) -> None:
    assert got.dtype == plain.dtype == np.float32 and exact.dtype == np.float64
    limit = 2 * np.abs(plain - exact).max() + EPS32 * np.abs(exact).max()
    error = np.abs(got - exact)
    assert error.max() <= limit, (
        f"error {error.max():.3g} is {100 * error.max() / limit:.0f} % of the limit at {np.unravel_index(error.argmax(), error.shape)}"
    )


# -- launch shapes, CPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 16, 64, 511, 512, 576, 2048, 2049, 2050, 4096, 5120, 14336, 16384])
def test_norm_shape(columns: int) -> None:
    shape = add.norm_shape(3, columns)
    assert add.norm_spec(shape.width, shape.threads) in add.instances()
    assert columns % shape.width == 0 and shape.blocks == 3


@pytest.mark.parametrize("count", [1, 3, 4, 1023, 1024, 1025, 1028, 4096 * 14336])
def test_elementwise_shapes_cover_every_element(count: int) -> None:
    shape = add.launch_shape(count)
    assert count % shape.width == 0
    assert 0 <= shape.threads * shape.blocks * shape.width - count < shape.threads * shape.width


# -- GPU ---------------------------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 576), (5, 640), (3, 64), (1, 4096), (17, 5120), (2, 2048), (4, 50), (3, 2049), (1, 1)])
def test_add_norm(cuda: Any, rows: int, columns: int) -> None:
    random = np.random.default_rng([rows, columns])
    x, y = (random.standard_normal((rows, columns)).astype(np.float32) for _ in range(2))
    y *= (10.0 ** random.integers(-4, 5, (rows, 1))).astype(np.float32)
    weight = random.standard_normal(columns).astype(np.float32)
    array, memory = _guarded(cuda, "x", x)
    cuda.add(array, cuda.upload("y", y), RmsNorm(cuda.upload("weight", weight), 1e-5))
    exact = x + reference.rms_norm(y.astype(np.float64), weight.astype(np.float64), 1e-5)
    _check(cuda.read(array), exact, x + reference.rms_norm(y, weight, 1e-5))
    _untouched(cuda, memory, x.size)


@gpu
@pytest.mark.parametrize("columns", [64, 576, 4096])
def test_norm_bits_do_not_depend_on_the_rows_beside(cuda: Any, columns: int) -> None:
    y = np.random.default_rng(columns).standard_normal((37, columns)).astype(np.float32)
    norm, source = RmsNorm(cuda.upload("weight", np.ones(columns, np.float32)), 1e-6), cuda.upload("y", y)
    out = cuda.upload("x", np.zeros_like(y))
    cuda.add(out, source, norm)
    together = cuda.read(out)
    for row in (0, 5, 36):
        alone = cuda.upload("x", np.zeros((1, columns), np.float32))
        cuda.add(alone, source.rows(1, row), norm)
        np.testing.assert_array_equal(cuda.read(alone)[0], together[row])


ROPES = [
    RopeConfig(dim=64, style="halves"),
    RopeConfig(dim=128, style="interleaved", theta=5e5, frequency_factors=tuple(np.linspace(1, 8, 64))),
    RopeConfig(dim=96, style="halves", theta=1e6, scaling="linear", factor=4.0),
    RopeConfig(dim=128, style="halves", theta=1e6, scaling="yarn", factor=4.0, original_context=32768),
    RopeConfig(dim=6, style="interleaved", theta=100.0),
    RopeConfig(dim=128, style="halves", theta=1e7, dual_chunk=DualChunk(262_144, 8_192, 262_144)),
    RopeConfig(dim=64, style="interleaved", dual_chunk=DualChunk(2_052, 4, 4_096)),
]


@gpu
@pytest.mark.parametrize("position", [0, 4095, 131_071, 1_048_575])
@pytest.mark.parametrize("config", ROPES, ids=lambda c: f"{c.style} {c.dim} {c.scaling} {c.dual_chunk}")
def test_rope_table(cuda: Any, config: RopeConfig, position: int) -> None:
    """Within one rounding to float32 of the exact angle, at cell a million as at cell 0."""
    shape = (rotations(config), 19, config.dim // 2, 2)
    out, memory = _guarded(cuda, "table", np.full(shape, np.nan, np.float32))
    at, prompt_cells = (cuda.upload("number", np.array([number], np.int32)) for number in (position, 200_000))
    cuda.rope_table(config, at, prompt_cells, out)
    exact = reference.rope_table(config, position, 19, 200_000)
    error = np.abs(cuda.read(out) - exact)
    # half a unit in the last place of the largest entry, and what the oracle's own angle (position * frequency in float64) may be off
    assert error.max() <= 0.51 * EPS32 * np.abs(exact).max() + (position + 19) * 2**-51
    _untouched(cuda, memory, out.nbytes // 4)


@gpu
@pytest.mark.parametrize("count", [1, 7, 576, 4096, 4097, 1_000_001])
def test_add_is_exact(cuda: Any, count: int) -> None:
    random = np.random.default_rng(count)
    x, y = (random.standard_normal((1, count)).astype(np.float32) for _ in range(2))
    array, memory = _guarded(cuda, "x", x)
    cuda.add(array, cuda.upload("y", y))
    np.testing.assert_array_equal(cuda.read(array), x + y)
    _untouched(cuda, memory, count)


@gpu
def test_wrong_shapes_are_refused(cuda: Any) -> None:
    x, y = cuda.empty("x", (2, 8), "f32"), cuda.empty("y", (2, 12), "f32")
    with pytest.raises(KernelError, match="add: y"):
        cuda.add(x, y)
    with pytest.raises(KernelError, match="add: norm"):
        cuda.add(x, x, RmsNorm(y.view((12,)), 1e-5))
