"""rms_norm, rope_table, rope, glu and add against the float64 oracle, and their launch shapes.

Limit everywhere: twice the largest error of the same formula done plainly in float32 by NumPy, plus one rounding of the largest value.
"""

from typing import Any

import numpy as np
import pytest

from rollkv import reference
from rollkv.config import RopeConfig
from rollkv.cuda.kernels import add, glu, rms_norm, rope
from rollkv.cuda.nvrtc import KernelError

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


@pytest.mark.parametrize("columns", [1, 16, 64, 80, 128, 256, 511, 512, 513, 576, 2048, 2049, 2050, 4096, 5120, 14336, 16384])
def test_rms_norm_shape(columns: int) -> None:
    shape = rms_norm.launch_shape(columns)
    assert rms_norm.spec(columns) in rms_norm.instances()
    assert columns % shape.width == 0 and shape.threads * shape.runs <= 1024
    assert shape.runs == 1 or shape.threads == 32


@pytest.mark.parametrize(("heads", "head_dim", "dim"), [(1, 16, 2), (9, 64, 64), (32, 128, 128), (8, 256, 64), (3, 80, 30), (3, 18, 16)])
def test_rope_shape(heads: int, head_dim: int, dim: int) -> None:
    shape = rope.launch_shape(heads, head_dim, dim)
    assert (dim // 2) % shape.pairs == 0
    assert shape.threads * shape.blocks * shape.pairs >= heads * dim // 2
    assert shape.pairs == 1 or (head_dim % 4 == 0 and dim % 4 == 0)
    assert {rope.spec(style, shape.pairs) for style in ("interleaved", "halves")} <= set(rope.instances())


@pytest.mark.parametrize("count", [1, 3, 4, 1023, 1024, 1025, 1028, 4096 * 14336])
def test_elementwise_shapes_cover_every_element(count: int) -> None:
    for module in (add, glu):
        shape = module.launch_shape(count)
        assert count % shape.width == 0
        assert 0 <= shape.threads * shape.blocks * shape.width - count < shape.threads * shape.width


# -- GPU ---------------------------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("rows", "runs", "columns"),
    [
        (1, 1, 576),
        (5, 1, 640),
        (3, 9, 64),
        (7, 4, 128),
        (2, 8, 256),
        (1, 1, 4096),
        (17, 1, 5120),
        (2, 1, 2048),
        (4, 3, 50),
        (3, 1, 2049),
        (1, 1, 1),
    ],
)
def test_rms_norm(cuda: Any, rows: int, runs: int, columns: int, in_place: bool) -> None:
    random = np.random.default_rng([rows, runs, columns])
    x = (random.standard_normal((rows, runs * columns)) * 10.0 ** random.integers(-4, 5, (rows, 1))).astype(np.float32)
    weight = random.standard_normal(columns).astype(np.float32)
    source, memory = _guarded(cuda, "x", x)
    out, out_memory = (source, memory) if in_place else _guarded(cuda, "out", np.full_like(x, np.nan))
    cuda.rms_norm(source, cuda.upload("weight", weight), 1e-5, out)
    got = cuda.read(out)
    for row in range(rows):  # rows differ by orders of magnitude: each has its own limit
        exact = reference.rms_norm(x[row : row + 1].astype(np.float64), weight.astype(np.float64), 1e-5)
        _check(got[row : row + 1], exact, reference.rms_norm(x[row : row + 1], weight, 1e-5))
    _untouched(cuda, out_memory, x.size)


@gpu
@pytest.mark.parametrize("columns", [64, 576, 4096])
def test_rms_norm_bits_do_not_depend_on_the_rows_beside(cuda: Any, columns: int) -> None:
    x = np.random.default_rng(columns).standard_normal((37, columns)).astype(np.float32)
    weight = cuda.upload("weight", np.ones(columns, np.float32))
    source, out = cuda.upload("x", x), cuda.empty("out", x.shape, "f32")
    cuda.rms_norm(source, weight, 1e-6, out)
    together = cuda.read(out)
    for row in (0, 5, 36):
        cuda.rms_norm(source.rows(1, row), weight, 1e-6, out.rows(1))
        np.testing.assert_array_equal(cuda.read(out.rows(1))[0], together[row])


ROPES = [
    RopeConfig(dim=64, style="halves"),
    RopeConfig(dim=128, style="interleaved", theta=5e5, frequency_factors=tuple(np.linspace(1, 8, 64))),
    RopeConfig(dim=96, style="halves", theta=1e6, scaling="linear", factor=4.0),
    RopeConfig(dim=128, style="halves", theta=1e6, scaling="yarn", factor=4.0, original_context=32768),
    RopeConfig(dim=6, style="interleaved", theta=100.0),
]


@gpu
@pytest.mark.parametrize("position", [0, 4095, 131_071, 1_048_575])
@pytest.mark.parametrize("config", ROPES, ids=lambda c: f"{c.style} {c.dim} {c.scaling}")
def test_rope_table(cuda: Any, config: RopeConfig, position: int) -> None:
    """Within one rounding to float32 of the exact angle, at cell a million as at cell 0."""
    shape = (19, config.dim // 2, 2)
    out, memory = _guarded(cuda, "table", np.full(shape, np.nan, np.float32))
    cuda.rope_table(config, cuda.upload("position", np.array([position], np.int32)), out)
    exact = reference.rope_table(config, position, shape[0])
    error = np.abs(cuda.read(out) - exact)
    # half a unit in the last place of the largest entry, and what the oracle's own angle (position * frequency in float64) may be off
    assert error.max() <= 0.51 * EPS32 * np.abs(exact).max() + (position + 19) * 2**-51
    _untouched(cuda, memory, out.nbytes // 4)


@gpu
@pytest.mark.parametrize("head_dim", [128, 256, 130])
@pytest.mark.parametrize("config", ROPES, ids=lambda c: f"{c.style} {c.dim} {c.scaling}")
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (1, 9), (23, 5), (300, 2)])
def test_rope(cuda: Any, rows: int, heads: int, config: RopeConfig, head_dim: int) -> None:
    random = np.random.default_rng([rows, heads, config.dim, head_dim])
    x = random.standard_normal((rows, heads * head_dim)).astype(np.float32)
    table = reference.rope_table(config, 1000, rows).astype(np.float32)
    array, memory = _guarded(cuda, "x", x)
    cuda.rope(array, heads, cuda.upload("table", table), config)
    got = cuda.read(array)
    exact = reference.rope(x.astype(np.float64), heads, table.astype(np.float64), config.style)
    _check(got, exact, reference.rope(x, heads, table, config.style))
    beyond = got.reshape(rows, heads, head_dim)[..., config.dim :]
    np.testing.assert_array_equal(beyond, x.reshape(rows, heads, head_dim)[..., config.dim :])
    _untouched(cuda, memory, x.size)


@gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 1536), (3, 2049), (33, 5120)])
def test_glu(cuda: Any, rows: int, columns: int, activation: str, in_place: bool) -> None:
    random = np.random.default_rng([rows, columns])
    gate, up = (random.standard_normal((rows, columns)).astype(np.float32) * np.float32(4) for _ in range(2))
    source, memory = _guarded(cuda, "gate", gate)
    out, out_memory = (source, memory) if in_place else _guarded(cuda, "out", np.full_like(gate, np.nan))
    cuda.glu(source, cuda.upload("up", up), activation, out)
    exact = reference.glu(gate.astype(np.float64), up.astype(np.float64), activation)
    _check(cuda.read(out), exact, reference.glu(gate, up, activation))
    _untouched(cuda, out_memory, gate.size)


@gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_glu_at_the_ends_of_the_range(cuda: Any, activation: str) -> None:
    gate = np.array([0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 89.0, -89.0, -200.0, 1e4, -1e4, 1e12, -1e12], np.float32)
    got_array = cuda.empty("out", gate.shape, "f32")
    cuda.glu(cuda.upload("gate", gate), cuda.upload("up", np.ones_like(gate)), activation, got_array)
    got = cuda.read(got_array)
    exact = reference.glu(gate.astype(np.float64), np.ones(gate.shape), activation)
    np.testing.assert_allclose(got, exact, rtol=2e-6, atol=1e-6)


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
    with pytest.raises(KernelError, match="glu: up"):
        cuda.glu(x, y, "silu", x)
    with pytest.raises(KernelError, match="multiple of 12"):
        cuda.rms_norm(x, y.view((12,)), 1e-5, x)
    with pytest.raises(KernelError, match="rope: table"):
        cuda.rope(x, 1, cuda.empty("table", (3, 2, 2), "f32"), ROPES[0])
