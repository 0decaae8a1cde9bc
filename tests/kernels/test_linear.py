"""Linear products: batch-invariant ones for few rows, f16 ones for many, and what carries them (repacking, dequantising, rounding)."""

import ctypes
import sys
from dataclasses import replace
from itertools import product as combinations
from types import SimpleNamespace

import numpy as np
import pytest

from oracle_linear import allowed_error, load_weight, product, random_weight, values
from rollkv import reference
from rollkv.backend import RmsNorm
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.gemm import Gemm, slab_rows
from rollkv.cuda.kernels import dequantise, linear_rows, repack, round_rows
from rollkv.cuda.nvrtc import ARCHS, KernelError, KernelSpec
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.errors import DeviceError
from rollkv.quants import FORMATS, device_bytes, split_planes

gpu = pytest.mark.gpu
NUM_SMS = 132


def described(qtype: str, shape: tuple[int, int]) -> CudaWeight:
    """A weight at an address that is never followed."""
    return CudaWeight("w", shape, qtype, DeviceArray(1 << 20, (device_bytes(qtype, shape),), "u8"))


class Recorder:
    """Stands for the launcher: keeps what would be launched."""

    def __init__(self, arch: str = "sm_90a") -> None:
        self.arch = arch
        self.launches: list[tuple] = []

    def launch(self, spec, grid, block, *args, shared_bytes=0) -> None:
        self.launches.append((spec, grid, block, args, shared_bytes))


# ---- without a GPU ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qtype", FORMATS)
def test_launch_shapes_fit_every_device(qtype):
    for rows in range(1, 17):
        for outputs, columns, arch in combinations((1, 40, 4096, 151936), (FORMATS[qtype].span, 4096, 11264, 12288, 65536), ARCHS):
            shape = linear_rows.launch_shape(qtype, rows, outputs, columns, NUM_SMS, arch)
            span = FORMATS[qtype].span
            assert rows <= shape.rows <= 16 and shape.rows < 2 * rows
            assert shape.shared_bytes + linear_rows.static_shared_bytes(qtype, shape.rows) <= linear_rows.SHARED_LIMIT
            assert shape.staged_columns % span == 0
            if shape.staged_columns < columns and shape.depth > 1:  # a round of the warps must not straddle two stagings
                assert shape.staged_columns % (linear_rows.WARPS * span * shape.depth) == 0
            assert 1 <= shape.blocks <= -(-outputs // 16)
            assert compiled(linear_rows.spec(qtype, shape.rows, shape.depth), arch)


@pytest.mark.parametrize("qtype", FORMATS)
def test_one_row_is_copied_where_it_fits(qtype):
    """As float32, whose place its digits take, with norm beside it; in whole units, before quantised weights, where there are bulk copies."""
    quantised, units = bool(FORMATS[qtype].metas), {False: (1, 16, 54, 95), True: (1, 16, 48)}
    for normed, arch in combinations((False, True), ARCHS):
        for columns in [256 * one for one in units[normed]]:
            shape = linear_rows.row_launch_shape(qtype, 4096, columns, NUM_SMS, normed, arch)
            assert (shape is not None) == (quantised and arch in ("sm_90a", "sm_100a", "sm_120a"))
            if shape is not None:
                assert shape.shared_bytes == columns // 256 * ((2048 if normed else 1024) + 8)
                assert shape.shared_bytes + linear_rows.row_static_shared_bytes() <= linear_rows.SHARED_LIMIT
                assert (shape.blocks, shape.threads) == (132, 512) and compiled(linear_rows.row_spec(qtype), arch)
        for columns in (32, 288, 256 * (units[normed][-1] + 1)):
            assert linear_rows.row_launch_shape(qtype, 4096, columns, NUM_SMS, normed, arch) is None


def compiled(spec: KernelSpec, arch: str) -> bool:
    return any(replace(one, archs=()) == spec and one.compiles_for(arch) for one in linear_rows.instances())


def test_copies_want_whole_tiles_and_addresses():
    """All but weights comes by copies of 16 bytes and more, what y holds, and bias, of 64: else the kernel for any number of rows does it. A portable
    launcher has no copies."""
    weight, partial, pair = described("Q4_K", (96, 512)), described("Q4_K", (100, 512)), described("Q4_K", (192, 512))

    def array(address: int, *shape: int) -> DeviceArray:
        return DeviceArray(address, shape, "f32")

    def source(
        weight: CudaWeight, out: int, bias: int | None = None, x: int = 256, norm: int | None = None, arch: str = "sm_90a", **more
    ) -> str:
        launcher, rms = Recorder(arch), None if norm is None else RmsNorm(array(norm, 512), 1e-6)
        biases = None if bias is None else array(bias, weight.rows)
        linear_rows.linear_rows(
            launcher, array(x, 1, 512), weight, array(out, 1, weight.rows), bias=biases, norm=rms, num_sms=NUM_SMS, **more
        )
        return launcher.launches[0][0].source

    assert source(weight, 256) == source(weight, 260) == source(partial, 256) == source(weight, 256, norm=512) == "linear_row.cu"
    assert source(weight, 256, 512) == source(weight, 256, add=True) == "linear_row.cu"
    assert source(weight, 260, add=True) == source(weight, 256, 516) == "linear_rows.cu"
    assert source(weight, 256, x=260) == source(weight, 256, norm=260) == "linear_rows.cu"
    assert source(partial, 256, 512) == source(partial, 256, add=True) == "linear_rows.cu"
    assert source(weight, 256, arch="sm_90") == source(weight, 256, arch="sm_89") == "linear_rows.cu"

    def gated(gate_up: tuple[CudaWeight, ...], columns: int, out: int) -> str:
        launcher, norm = Recorder(), RmsNorm(array(512, 512), 1e-6)
        linear_rows.glu_rows(launcher, array(256, 1, 512), gate_up, array(out, 1, columns), num_sms=NUM_SMS, norm=norm, activation="silu")
        return launcher.launches[-1][0].source

    assert gated((pair,), 96, 256) == gated((pair,), 96, 260) == gated((weight, weight), 96, 256) == "linear_row.cu"
    assert gated((weight, weight), 96, 260) == gated((partial, partial), 100, 256) == "linear_rows.cu"


def test_the_order_of_sums_is_no_launch_constant():
    """Which warp takes which span, and when, follows from K alone: only these constants enter a launch."""
    assert linear_rows.Shape._fields == ("rows", "depth", "staged_columns", "shared_bytes", "blocks", "threads")
    assert linear_rows.RowShape._fields == ("shared_bytes", "blocks", "threads")
    assert linear_rows.WARPS == 8


def test_wrappers_check_shapes():
    weight, launcher = described("Q4_K", (100, 512)), Recorder()
    x, out = DeviceArray(256, (3, 512), "f32"), DeviceArray(256, (3, 100), "f32")
    linear_rows.linear_rows(launcher, x, weight, out, num_sms=NUM_SMS)
    assert launcher.launches[0][1] == (7, 1, 1) and launcher.launches[0][2] == 512
    for bad in (
        (DeviceArray(256, (17, 512), "f32"), DeviceArray(256, (17, 100), "f32"), None),
        (DeviceArray(256, (3, 256), "f32"), out, None),
        (x, DeviceArray(256, (3, 96), "f32"), None),
        (DeviceArray(256, (3, 512), "f16"), out, None),
        (x, out, DeviceArray(256, (99,), "f32")),
    ):
        with pytest.raises(KernelError, match="linear_rows"):
            linear_rows.linear_rows(launcher, bad[0], weight, bad[1], bias=bad[2], num_sms=NUM_SMS)
    with pytest.raises(KernelError, match="whole tiles"):
        repack.repack(launcher, DeviceArray(256, (1 << 20,), "u8"), weight, first_tile=0, num_rows=17)
    with pytest.raises(KernelError, match="at least"):
        repack.repack(launcher, DeviceArray(256, (100,), "u8"), weight, first_tile=0, num_rows=16)
    with pytest.raises(KernelError, match="whole tiles"):
        dequantise.dequantise(launcher, weight, DeviceArray(256, (16, 512), "f16"), first_row=8)
    with pytest.raises(KernelError, match="round_rows"):
        round_rows.round_rows(launcher, x, DeviceArray(256, (3, 500), "f16"), DeviceArray(256, (3,), "f32"))
    assert len(launcher.launches) == 1


def test_weights_want_their_bytes():
    with pytest.raises(ValueError, match="multiple of 256"):
        CudaWeight("w", (16, 256), "Q4_K", DeviceArray(128, (device_bytes("Q4_K", (16, 256)),), "u8"))
    with pytest.raises(ValueError, match="bytes"):
        CudaWeight("w", (16, 256), "Q4_K", DeviceArray(256, (100,), "u8"))


def test_slabs_are_whole_tiles():
    weight = described("Q8_0", (100, 64))
    assert slab_rows(weight, 64 * 2 * 50) == 48 and slab_rows(weight, 1 << 20) == 100
    with pytest.raises(KernelError, match="slab"):
        slab_rows(weight, 64 * 2 * 15)


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    with pytest.raises(DeviceError, match=r"rollkv\[cuda\]"):
        Gemm(0, DeviceArray(256, (1024,), "u8"))


class FakeCublas:
    """The library's gemm_ex by its documentation, column-major, on host memory."""

    class cuBLASError(Exception):  # noqa: N801 - the library's name
        pass

    Operation = SimpleNamespace(N=0, T=1)
    ComputeType = SimpleNamespace(COMPUTE_32F=68)
    GemmAlgo = SimpleNamespace(DFALT=-1)
    Math = SimpleNamespace(DISALLOW_REDUCED_PRECISION_REDUCTION=16)

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.broken = False

    def create(self) -> int:
        return 7

    def destroy(self, handle: int) -> None:
        self.calls.append(("destroy", handle))

    def set_stream(self, handle: int, stream: int) -> None:
        self.calls.append(("stream", handle, stream))

    def set_workspace(self, handle: int, pointer: int, size: int) -> None:
        self.calls.append(("workspace", handle, pointer, size))

    def set_math_mode(self, handle: int, mode: int) -> None:
        self.calls.append(("math", handle, mode))

    def gemm_ex(self, handle, transa, transb, m, n, k, alpha, a, atype, lda, b, btype, ldb, beta, c, ctype, ldc, compute, algo):
        if self.broken:
            raise self.cuBLASError("EXECUTION_FAILED (13)")
        assert (transa, transb, atype, btype, ctype, compute) == (1, 0, 2, 2, 0, 68)

        def columns(pointer, count, lead, dtype):  # element (i, j) of a column-major matrix is [j, i]
            size = np.dtype(dtype).itemsize
            return np.frombuffer((ctypes.c_uint8 * (count * lead * size)).from_address(pointer), dtype).reshape(count, lead)

        left, right = columns(a, m, lda, np.float16)[:, :k], columns(b, n, ldb, np.float16)[:, :k]  # A^T is m x k, B is k x n
        total = (left.astype(np.float32) @ right.T.astype(np.float32)) * ctypes.c_float.from_address(alpha).value
        assert ctypes.c_float.from_address(beta).value == 0
        for j in range(n):
            (ctypes.c_float * m).from_address(c + j * ldc * 4)[:] = total[:, j].tolist()


def test_gemm_tells_the_library_the_right_shapes(monkeypatch):
    """Two slabs side by side in a row-major result, computed by a stand-in for the library over host memory."""
    fake, rng = FakeCublas(), np.random.default_rng(5)
    monkeypatch.setitem(sys.modules, "nvmath.bindings", SimpleNamespace(cublas=fake))
    gemm = Gemm(11, DeviceArray(512, (4096,), "u8"))
    assert fake.calls == [("stream", 7, 11), ("workspace", 7, 512, 4096), ("math", 7, 16)]
    x, weight, out = (
        rng.integers(-8, 8, (5, 9)).astype(np.float16),
        rng.integers(-8, 8, (12, 9)).astype(np.float16),
        np.full((5, 12), np.nan, np.float32),
    )

    def on_host(array: np.ndarray, dtype: str) -> DeviceArray:
        return DeviceArray(array.ctypes.data, array.shape, dtype)  # type: ignore[arg-type]

    for first, part in ((0, weight[:8]), (8, weight[8:])):
        gemm.multiply(on_host(x, "f16"), on_host(part, "f16"), on_host(out, "f32"), first_column=first)
    assert np.array_equal(out, x.astype(np.float32) @ weight.T.astype(np.float32))
    with pytest.raises(KernelError, match="columns 8 to 20"):
        gemm.multiply(on_host(x, "f16"), on_host(weight, "f16"), on_host(out, "f32"), first_column=8)
    fake.broken = True
    with pytest.raises(DeviceError, match="gemm_ex: EXECUTION_FAILED"):
        gemm.multiply(on_host(x, "f16"), on_host(weight, "f16"), on_host(out, "f32"))
    gemm.close()
    gemm.close()
    assert fake.calls.count(("destroy", 7)) == 1


# ---- with one ---------------------------------------------------------------------------------------------------------------------


def awkward_shapes(qtype: str) -> list[tuple[int, int]]:
    """(N, K): one block and one row; rows beside a tile; spans that divide unevenly; several stagings of x; a real ffn_down."""
    fmt = FORMATS[qtype]
    odd = 17 if fmt.elements == 1 else fmt.elements if fmt.elements < fmt.span else 0
    return [(1, fmt.elements * (32 if fmt.elements == 1 else 1)), (37, 3 * fmt.span + odd), (50, 2304), (203, 11008), (1040, 4096)]


@gpu
@pytest.mark.parametrize("qtype", FORMATS)
def test_repack_and_dequantise_bit_for_bit(cuda, qtype):
    rng = np.random.default_rng(20)
    for shape in awkward_shapes(qtype)[:3]:
        tensor = random_weight(qtype, shape, rng)
        weight = load_weight(cuda, tensor)
        memory = cuda.read(weight.memory)
        for plane, wanted in zip(weight.form.planes, split_planes(qtype, tensor.raw, shape), strict=True):
            assert np.array_equal(memory[plane.offset : plane.offset + plane.nbytes], wanted), plane
        first = 16 if shape[0] > 16 else 0
        out = cuda.empty("out", (shape[0] - first, shape[1]), "f16")
        dequantise.dequantise(cuda.launcher, weight, out, first_row=first)
        wanted16 = np.clip(values(tensor)[first:], -65504, 65504).astype(np.float16)
        assert np.array_equal(cuda.read(out).view(np.uint16), wanted16.view(np.uint16))


@gpu
@pytest.mark.parametrize("qtype", ("F32", "BF16"))
def test_dequantise_saturates(cuda, qtype):
    numbers = np.zeros((1, 32), np.float32)
    numbers[0, :8] = (65504, 65519, 65536, 1e30, -1e30, -65536, np.inf, 1e-30)
    raw = numbers.view(np.uint8) if qtype == "F32" else (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    tensor = random_weight(qtype, (1, 32), np.random.default_rng(0))
    weight = load_weight(cuda, type(tensor)("w", qtype, (1, 32), np.ascontiguousarray(raw).reshape(-1)))
    out = cuda.empty("out", (1, 32), "f16")
    dequantise.dequantise(cuda.launcher, weight, out, first_row=0)
    found = cuda.read(out)[0, :8]
    assert np.abs(found[:6]).max() == 65504 and (np.abs(found[2:6]) == 65504).all() and found[6] == np.inf and found[7] == 0


@gpu
@pytest.mark.parametrize("qtype", FORMATS)
def test_few_rows(cuda, qtype):
    """Against float64, and by equality across the number of rows: rows beside a row, and the instance, must not show."""
    rng = np.random.default_rng(21)
    for num_outputs, columns in awkward_shapes(qtype):
        if columns % FORMATS[qtype].elements:
            continue
        tensor = random_weight(qtype, (num_outputs, columns), rng)
        weight, table = load_weight(cuda, tensor), values(tensor)
        x = (rng.standard_normal((16, columns)) + 0.3).astype(np.float32)
        bias = rng.standard_normal(num_outputs).astype(np.float32)
        limit, exact = allowed_error(x, table, bias), product(x, table, bias)
        device_bias, full = cuda.upload("bias", bias), None
        for rows in (16, 8, 5, 3, 2, 1):
            out = cuda.upload("out", np.full((rows, num_outputs), np.nan, np.float32))
            cuda.linear(cuda.upload("x", x[:rows]), (weight,), out, bias=device_bias)
            found = cuda.read(out)
            full = found if full is None else full
            assert np.abs(found - exact[:rows]).max() <= limit, (num_outputs, columns, rows)
            assert np.array_equal(found.view(np.uint32), full[:rows].view(np.uint32)), (num_outputs, columns, rows)
        single = cuda.upload("out", np.full((1, num_outputs), np.nan, np.float32))
        linear_rows.linear_rows(
            cuda.launcher, cuda.upload("x", x[9:10]), weight, single, bias=device_bias, num_sms=1
        )  # another place, another grid
        assert np.array_equal(cuda.read(single).view(np.uint32), full[9:10].view(np.uint32))


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return reference.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6)


@gpu
@pytest.mark.parametrize("columns", [96, 288, 2304, 4096, 11008, 12352])
def test_few_rows_with_a_norm_and_a_residual(cuda, columns):
    """One row sums its squares while it is staged, more rows beforehand: the bits must agree. A row of 12,352 columns is staged twice."""
    rng = np.random.default_rng(columns)
    tensor = random_weight("Q8_0", (83, columns), rng)
    weight, table = load_weight(cuda, tensor), values(tensor)
    x = (rng.standard_normal((16, columns)) * 10.0 ** rng.integers(-3, 4, (16, 1))).astype(np.float32)
    factor, before = rng.standard_normal(columns).astype(np.float32), rng.standard_normal((16, 83)).astype(np.float32)
    norm, full = RmsNorm(cuda.upload("norm", factor), 1e-6), None
    exact = product(normed(x, factor), table, np.zeros(83)) + before
    limit = 2 * allowed_error(normed(x, factor).astype(np.float32), table, np.zeros(83, np.float32))
    for rows in (16, 7, 4, 2, 1):
        out = cuda.upload("out", before[:rows])
        cuda.linear(cuda.upload("x", x[:rows]), (weight,), out, norm=norm, add=True)
        found = cuda.read(out)
        full = found if full is None else full
        assert np.abs(found - exact[:rows]).max() <= limit, rows
        assert np.array_equal(found.view(np.uint32), full[:rows].view(np.uint32)), rows


@gpu
@pytest.mark.parametrize("qtype", [one for one in FORMATS if FORMATS[one].metas])
@pytest.mark.parametrize(
    ("num_outputs", "columns"), [(16, 256), (4240, 512), (1040, 2304), (37, 4096), (96, 12288), (64, 13824), (32, 24320)]
)
def test_one_row_by_copies(cuda, qtype, num_outputs, columns):
    """Bit for bit what two rows give, which are staged by loads; teams without tiles and, on one multiprocessor, with many; part of a turn of the warps; as
    many columns as fit, with norm 12,288."""
    rng = np.random.default_rng([num_outputs, columns])
    tensor = random_weight(qtype, (num_outputs, columns), rng)
    weight, table = load_weight(cuda, tensor), values(tensor)
    x, factor = rng.standard_normal((2, columns)).astype(np.float32), rng.standard_normal(columns).astype(np.float32)
    bias, before = rng.standard_normal(num_outputs).astype(np.float32), rng.standard_normal((2, num_outputs)).astype(np.float32)
    device_bias, device_norm = cuda.upload("bias", bias), RmsNorm(cuda.upload("norm", factor), 1e-6)
    for with_norm, with_bias, add in combinations((False, True), repeat=3):
        options = {"norm": device_norm if with_norm else None, "bias": device_bias if with_bias else None, "add": add}
        copied = columns <= (12288 if with_norm else 24320) and (num_outputs % 16 == 0 or not (with_bias or add))
        results = []
        for rows, num_sms in ((2, cuda.facts.num_sms), (1, cuda.facts.num_sms), (1, 1)):
            out = cuda.upload("out", before[:rows] if add else np.full((rows, num_outputs), np.nan, np.float32))
            linear_rows.linear_rows(cuda.launcher, cuda.upload("x", x[:rows]), weight, out, num_sms=num_sms, **options)
            expected = rows == 1 and copied and cuda.launcher.arch.endswith("a")
            assert cuda.launcher.last_launched.startswith("linear_row<" if expected else "linear_rows<")
            results.append(cuda.read(out)[0].view(np.uint32))
        factors, biases = normed(x[:1], factor) if with_norm else x[:1], bias if with_bias else np.zeros_like(bias)
        exact = product(factors, table, biases) + (before[:1] if add else 0)
        limit = 2 * allowed_error(factors.astype(np.float32), table, np.abs(biases) + np.abs(before[0]))
        assert np.abs(results[1].view(np.float32) - exact[0]).max() <= limit
        assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2]), (with_norm, with_bias, add)


@gpu
@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_K", "Q6_K", "Q4_1"])
@pytest.mark.parametrize("paired", [True, False])
def test_gated_rows_on_one_multiprocessor(cuda, qtype, paired):
    """Several tiles, or pairs of them, a team: bit for bit what two rows give on the whole device."""
    rng, ffn, hidden = np.random.default_rng(29), 112, 512
    gate, up = (random_weight(qtype, (ffn, hidden), rng) for _ in range(2))
    gate_up = (load_weight(cuda, gate, up, paired=True),) if paired else (load_weight(cuda, gate), load_weight(cuda, up))
    x, factor = rng.standard_normal((2, hidden)).astype(np.float32), rng.standard_normal(hidden).astype(np.float32)
    norm, results = RmsNorm(cuda.upload("norm", factor), 1e-6), []
    for rows, num_sms in ((2, cuda.facts.num_sms), (1, cuda.facts.num_sms), (1, 1)):
        out = cuda.upload("out", np.full((rows, ffn), np.nan, np.float32))
        linear_rows.glu_rows(cuda.launcher, cuda.upload("x", x[:rows]), gate_up, out, num_sms=num_sms, norm=norm, activation="silu")
        results.append(cuda.read(out)[0].view(np.uint32))
    gates, ups = (product(normed(x[:1], factor), values(t), np.zeros(ffn)) for t in (gate, up))
    exact = reference.glu(gates, ups, "silu")
    assert np.abs(results[0].view(np.float32) - exact[0]).max() <= 1e-5 * np.abs(exact).max()
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@gpu
def test_few_rows_of_stacks(cuda):
    """Matrices one above the other, loaded as one and apart, into columns side by side."""
    rng = np.random.default_rng(31)
    upper, lower = (random_weight("Q4_K", (rows, 512), rng) for rows in (48, 35))
    table = np.concatenate([values(upper), values(lower)])
    x, bias = rng.standard_normal((3, 512)).astype(np.float32), rng.standard_normal(83).astype(np.float32)
    exact, results = product(x, table, bias), []
    for stack in ((load_weight(cuda, upper, lower),), (load_weight(cuda, upper), load_weight(cuda, lower))):
        for rows in (3, 40):
            out = cuda.upload("out", np.full((rows, 83), np.nan, np.float32))
            cuda.linear(cuda.upload("x", np.tile(x, (14, 1))[:rows]), stack, out, bias=cuda.upload("bias", bias))
            results.append(cuda.read(out)[:3])
    assert np.array_equal(results[0], results[2])
    magnitude = (np.abs(x).astype(np.float64) @ np.abs(table).astype(np.float64).T + np.abs(bias)) * 2.0**-10  # both factors rounded to f16
    for found, limit in zip(results, (allowed_error(x, table, bias), magnitude) * 2, strict=True):
        assert (np.abs(found - exact) <= limit).all()


@gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("types", "ffn"),
    [(("Q8_0", "Q8_0"), 96), (("Q8_0", "Q8_0"), 1040), (("Q4_K", "Q4_K"), 1040), (("Q4_K", "Q6_K"), 1040), (("Q8_0", "Q8_0"), 100)],
)
def test_feed_forward(cuda, types, ffn, activation):
    """Gate and up loaded as a pair, or apart where their types differ or tiles are not whole; few rows bit for bit alike, many rows close."""
    rng, hidden = np.random.default_rng([ffn, len(activation)]), 512
    gate, up = (random_weight(qtype, (ffn, hidden), rng) for qtype in types)
    down = random_weight("F16", (hidden, ffn), rng)
    together = types[0] == types[1] and ffn % 16 == 0
    gate_up = (load_weight(cuda, gate, up, paired=True),) if together else (load_weight(cuda, gate), load_weight(cuda, up))
    factor = (rng.standard_normal(hidden) * 0.05).astype(np.float32)
    norm, down_weight = RmsNorm(cuda.upload("norm", factor), 1e-6), (load_weight(cuda, down),)
    x = rng.standard_normal((40, hidden)).astype(np.float32)
    gates, ups = (product(normed(x, factor), values(t), np.zeros(ffn)) for t in (gate, up))
    exact = x + reference.glu(gates, ups, activation) @ values(down).astype(np.float64).T
    full = None
    for rows in (40, 16, 5, 1):
        out = cuda.upload("x", x[:rows])
        cuda.feed_forward(
            out, norm, gate_up, activation, down_weight, out, cuda.upload("s", np.full((rows, 2 * ffn), np.nan, np.float32)), add=True
        )
        found = cuda.read(out)
        error = np.linalg.norm(found - exact[:rows]) / np.linalg.norm(exact[:rows] - x[:rows])
        assert error <= (1e-3 if rows > 16 else 1e-5), rows
        if rows <= 16:
            full = found if full is None else full
            assert np.array_equal(found.view(np.uint32), full[:rows].view(np.uint32)), rows


@gpu
def test_few_rows_span_the_range_of_floats(cuda):
    """Activations of 1e-20 and 1e30 side by side in rows of their own; neither overflows nor vanishes, as it would in 16 bits."""
    rng = np.random.default_rng(22)
    tensor = random_weight("Q8_0", (64, 1024), rng)
    weight, table = load_weight(cuda, tensor), values(tensor)
    x = (rng.standard_normal((3, 1024)) * np.array([[1e-20], [1], [1e30]])).astype(np.float32)
    out = cuda.upload("out", np.full((3, 64), np.nan, np.float32))
    cuda.linear(cuda.upload("x", x), (weight,), out)
    exact = product(x, table, np.zeros(64))
    for row, found in enumerate(cuda.read(out)):
        assert np.abs(found - exact[row]).max() <= allowed_error(x[row : row + 1], table, np.zeros(64, np.float32))


@gpu
def test_few_rows_pass_on_what_is_not_finite(cuda):
    tensor = random_weight("Q4_K", (32, 512), np.random.default_rng(23))
    weight, x = load_weight(cuda, tensor), np.ones((2, 512), np.float32)
    x[1, 300] = np.inf
    out = cuda.upload("out", np.zeros((2, 32), np.float32))
    cuda.linear(cuda.upload("x", x), (weight,), out)
    found = cuda.read(out)
    assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).any()


@gpu
def test_rounding_of_rows(cuda):
    rng = np.random.default_rng(24)
    for columns in (37, 4096):
        x = rng.standard_normal((6, columns)).astype(np.float32) * np.array([[1], [1e5], [1e37], [0], [3e4], [1e-6]], np.float32)
        x[0] = np.clip(x[0], -3, 3)
        x[3, 5], x[4, :] = 65536, np.clip(x[4], -32768, 32768)
        x16, scale = cuda.empty("x16", x.shape, "f16"), cuda.empty("scale", (6,), "f32")
        round_rows.round_rows(cuda.launcher, cuda.upload("x", x), x16, scale)
        scales = cuda.read(scale)
        assert scales[0] == scales[4] == scales[5] == 1 and scales[3] == 2 and (np.frexp(scales)[0] == 0.5).all()
        most = np.abs(x).max(axis=1) / scales
        assert (most <= 32768).all() and (most[1:4] > 16383).all()
        assert np.array_equal(cuda.read(x16).view(np.uint16), (x / scales[:, None]).astype(np.float16).view(np.uint16))


@gpu
@pytest.mark.parametrize("columns", [37, 4096])
def test_rounding_of_normed_and_gated_rows(cuda, columns):
    """Half a unit in the last place of f16, beside the float32 arithmetic before it; a gate whose products exceed f16 among the rows."""
    rng = np.random.default_rng(columns)
    x, factor = rng.standard_normal((5, columns)).astype(np.float32), rng.standard_normal(columns).astype(np.float32)
    x16, scale = cuda.empty("x16", x.shape, "f16"), cuda.empty("scale", (5,), "f32")
    factor[0] = 1e5
    round_rows.round_rows(cuda.launcher, cuda.upload("x", x), x16, scale, RmsNorm(cuda.upload("norm", factor), 1e-6))
    exact = normed(x, factor)
    found = cuda.read(x16).astype(np.float64) * cuda.read(scale)[:, None]
    assert (np.abs(found - exact) <= np.abs(exact) * (2.0**-11 + 1e-6) + 1e-7 * np.abs(exact).max(axis=1, keepdims=True)).all()
    gate, up = (rng.standard_normal((5, columns)).astype(np.float32) * 3 for _ in range(2))
    up[2] *= 1e6
    for run in {1, columns} if columns == 37 else {16, columns}:
        mixed = np.stack([gate.reshape(5, -1, run), up.reshape(5, -1, run)], axis=2).reshape(5, -1)
        for activation in ("silu", "gelu_tanh"):
            round_rows.round_glu(cuda.launcher, cuda.upload("gate_up", mixed), x16, scale, run=run, activation=activation)
            exact = reference.glu(gate.astype(np.float64), up.astype(np.float64), activation)
            found = cuda.read(x16).astype(np.float64) * cuda.read(scale)[:, None]
            least = cuda.read(scale)[:, None] * 2.0**-24  # the spacing of f16's smallest numbers
            assert (np.abs(found - exact) <= np.abs(exact) * (2.0**-11 + 4e-6) + 1e-6 * np.abs(up) + least).all(), (run, activation)


@gpu
@pytest.mark.parametrize("qtype", FORMATS)
def test_many_rows(cuda, qtype):
    """Within the rounding of both factors to f16: the same product of rounded factors, in float64, differs by float32 sums alone."""
    rng = np.random.default_rng(25)
    for rows, num_outputs, columns in ((17, 37, 3 * FORMATS[qtype].span), (200, 2500, 4096)):
        tensor = random_weight(qtype, (num_outputs, columns), rng)
        weight, table = load_weight(cuda, tensor), values(tensor)
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        x[1] *= 1e6  # a row that f16 cannot hold
        bias = rng.standard_normal(num_outputs).astype(np.float32)
        out = cuda.upload("out", np.full((rows, num_outputs), np.nan, np.float32))
        cuda.linear(cuda.upload("x", x), (weight,), out, bias=cuda.upload("bias", bias))
        found, exact = cuda.read(out), product(x, table, bias)
        magnitude = np.abs(x).astype(np.float64) @ np.abs(table).astype(np.float64).T + np.abs(bias)
        assert (np.abs(found - exact) <= magnitude * 2.0**-10).all()
        scale = np.maximum(1, 2.0 ** np.ceil(np.log2(np.abs(x).max(axis=1) / 32768)))[:, None]
        rounded = product((x / scale).astype(np.float16), table.astype(np.float16), np.zeros(num_outputs)) * scale + bias
        assert (np.abs(found - rounded) <= magnitude * 2.0**-16).all()
        again = cuda.upload("out", np.full((rows, num_outputs), np.nan, np.float32))
        cuda.linear(cuda.upload("x", x), (weight,), again, bias=cuda.upload("bias", bias))
        assert np.array_equal(cuda.read(again).view(np.uint32), found.view(np.uint32))
