"""Codes of the KV cache: layouts and encoders by hand values, weights' quantisers as an oracle, errors on Gaussian data, and nothing unsound hidden."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from rollkv.kv_codes import LEVELS, SIGNS, decode, encode, pack, quantise, rotate, turn_back, unpack
from rollkv.kv_types import KV_TYPES, rotation_group

CODED = [name for name, kind in KV_TYPES.items() if kind.coded]
TURBO = ["turbo4", "turbo3", "turbo2"]
DIMS = [16, 48, 64, 80, 96, 128, 192, 256]


def dims(name: str) -> list[int]:
    return [dim for dim in DIMS if dim % KV_TYPES[name].divisor == 0]


CASES = [(name, dim) for name in CODED for dim in dims(name)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


# -- layouts -------------------------------------------------------------------------------------------------------------------


def words(name: str, dim: int, **codes: int) -> list[int]:
    """The words of a row whose codes are all that of bits 0, but for those at e0, e1, ..."""
    row = np.full(dim, {"q8_0": 0, "q4_0": 0, "turbo4": 8, "turbo3": 4, "turbo2": 0}[name], np.uint8)
    for place, code in codes.items():
        row[int(place[1:])] = code
    return pack(row, name).tolist()


def test_q8_0_is_a_byte_an_element() -> None:
    packed = pack(np.arange(32, dtype=np.uint8) * 8, "q8_0")
    assert packed.astype("<u4").view(np.uint8).tolist() == [8 * e for e in range(32)]
    assert (LEVELS["q8_0"][128], LEVELS["q8_0"][255], LEVELS["q8_0"][1]) == (0, 127, -127)


@pytest.mark.parametrize("element,place", [(0, 0), (1, 16), (2, 4), (3, 20), (6, 12), (7, 28)])
def test_q4_0_has_neighbours_in_the_two_halves_of_a_word(element: int, place: int) -> None:
    assert words("q4_0", 32, **{f"e{element}": 0xB}) == [0xB << place, 0, 0, 0]
    assert words("q4_0", 32, **{f"e{element + 16}": 0xB}) == [0, 0, 0xB << place, 0] if element < 8 else True


@pytest.mark.parametrize("element", range(8))
def test_turbo4_has_codes_in_order_magnitude_and_sign(element: int) -> None:
    assert words("turbo4", 16, **{f"e{element}": 15}) == [7 << 4 * element, 0], "the largest level: magnitude 7, no sign"
    assert words("turbo4", 16, **{f"e{element + 8}": 0}) == [0, 0xF << 4 * element], "the smallest: magnitude 7, negative"
    assert words("turbo4", 16, **{f"e{element}": 7}) == [8 << 4 * element, 0], "just below zero: magnitude 0, negative"


@pytest.mark.parametrize("element,place", [(0, 0), (1, 16), (2, 2), (3, 18), (7, 22), (8, 8), (14, 14), (15, 30)])
def test_turbo2_has_neighbours_in_the_two_halves_of_a_word(element: int, place: int) -> None:
    assert words("turbo2", 32, **{f"e{element + 16}": 3}) == [0, 3 << place]
    assert LEVELS["turbo2"].tolist() == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize(
    "element,place,sign", [(0, 0, 0), (1, 4, 4), (7, 28, 28), (8, 2, 1), (15, 30, 29), (16, 0, 2), (25, 6, 7), (31, 30, 31)]
)
def test_turbo3_has_a_plane_of_magnitudes_and_one_of_signs(element: int, place: int, sign: int) -> None:
    first = [0, 0]
    first[element // 16] = 3 << place
    assert words("turbo3", 32, **{f"e{element}": 0}) == [*first, 1 << sign], "-2: magnitude 3, negative"
    assert words("turbo3", 32, **{f"e{element}": 7}) == [*first, 0], "2: magnitude 3"
    assert words("turbo3", 32, **{f"e{element}": 3}) == [0, 0, 1 << sign], "-0.25: magnitude 0, negative"


def test_the_last_signs_of_turbo3_may_fill_half_a_word() -> None:
    assert words("turbo3", 48, e47=3) == [0, 0, 0, 0, 1 << 29]
    assert words("turbo3", 16, e1=3) == [0, 1 << 4]


def test_signs_lie_one_shift_from_their_magnitudes(rng: np.random.Generator) -> None:
    """Eight elements of turbo3 as four bits each: two of the magnitude, then the sign."""
    codes = rng.integers(0, 8, 32).astype(np.uint8)
    low, high, plane = (int(w) for w in pack(codes, "turbo3"))
    for eight in range(4):
        four_bits = ((low, high)[eight // 2] >> 2 * (eight % 2) & 0x33333333) | (plane >> eight & 0x11111111) << 2
        assert [four_bits >> 4 * e & 7 for e in range(8)] == [
            code - 4 if code > 3 else 7 - code for code in codes[8 * eight : 8 * eight + 8]
        ]


def test_levels_of_turbo3_are_one_byte_each() -> None:
    assert (LEVELS["turbo3"].view(np.uint16) & 0xFF == 0).all()
    assert LEVELS["turbo3"].tolist() == [-2, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 2]
    assert LEVELS["turbo4"][15] == np.float16(2.7326) and LEVELS["turbo4"][7] == -np.float16(0.1284)


@pytest.mark.parametrize("name,dim", CASES)
def test_what_is_packed_comes_back(name: str, dim: int, rng: np.random.Generator) -> None:
    codes = rng.integers(0, len(LEVELS[name]), (3, 5, dim)).astype(np.uint8)
    packed = pack(codes, name)
    assert packed.shape == (3, 5, KV_TYPES[name].code_bytes(dim) / 4) and packed.dtype == np.uint32
    np.testing.assert_array_equal(unpack(packed, name, dim), codes)


# -- encoders ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,qtype", [("q8_0", GGMLQuantizationType.Q8_0), ("q4_0", GGMLQuantizationType.Q4_0)])
@pytest.mark.parametrize("dim", [32, 128])
def test_plain_codes_are_those_of_weights(name: str, qtype: GGMLQuantizationType, dim: int, rng: np.random.Generator) -> None:
    """Bit for bit, codes and scales, for magnitudes over many powers of ten, equal extremes of both signs, and zeros."""
    x = (rng.standard_normal((400, dim)) * 10.0 ** rng.uniform(-6, 4, (400, 1))).astype(np.float32)
    x[:40] = rng.integers(-3, 4, (40, dim))
    x[40:50] = 0
    x[50:60, ::7] = -0.0
    blocks = quantize(x, qtype).reshape(-1, 34 if name == "q8_0" else 18)
    packed, scales = encode(x, name)
    np.testing.assert_array_equal(scales.reshape(-1, 1).view(np.uint8), blocks[:, :2])
    codes = unpack(packed, name, dim).reshape(-1, 32)
    if name == "q8_0":
        np.testing.assert_array_equal(codes.astype(np.int16) - 128, blocks[:, 2:].view(np.int8))
    else:
        np.testing.assert_array_equal(codes, np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1))
    np.testing.assert_array_equal(decode(packed, scales, name, dim).ravel(), dequantize(quantize(x, qtype), qtype).ravel())


def test_q8_0_by_hand() -> None:
    row = np.zeros(32, np.float32)
    row[:6] = 127, -127, 0.5, -0.5, 1.49, 2.5  # step 1: halves go away from zero
    codes, scales = quantise(row, "q8_0")
    assert scales.tolist() == [1.0] and codes[:7].tolist() == [255, 1, 129, 127, 129, 131, 128]


def test_q4_0_by_hand() -> None:
    row = np.zeros(32, np.float32)
    row[:5] = -8, 8, 0.49, -0.51, 6.5  # of equals the first: step 1, and 8 is cut off
    codes, scales = quantise(row, "q4_0")
    assert scales.tolist() == [1.0] and codes[:6].tolist() == [0, 15, 8, 7, 15, 8]
    codes, scales = quantise(-row, "q4_0")
    assert scales.tolist() == [-1.0] and codes[:6].tolist() == [0, 15, 8, 7, 15, 8]


@pytest.mark.parametrize("name", TURBO)
def test_turbo_by_hand(name: str) -> None:
    """A group of n elements of size 1 has deviation 1, so each goes to the level nearest to 1 / s, which the scale turns into 1 again."""
    row = np.where(np.arange(64) % 3 == 0, -3.0, 3.0).astype(np.float32)
    codes, scales = quantise(row, name)
    nearest = {"turbo4": 11, "turbo3": 5, "turbo2": 3}[name]  # 0.9423, 0.75 and 1.5
    assert set(codes[row > 0].tolist()) == {nearest} and set(codes[row < 0].tolist()) == {len(LEVELS[name]) - 1 - nearest}
    assert scales.tolist() == [np.float16(3 / float(LEVELS[name][nearest]))]


def test_the_upper_level_is_taken_half_way() -> None:
    """Of 16 elements with a square sum of 16 / s^2, which stand as they are among the levels: at the borders -1, 0 and 1, and next to them."""
    rest = ((16 / 0.99**2 - 3) / 11) ** 0.5
    row = np.array([1.0, 1.0, -1.0, 0.0, -0.0, *[rest] * 11])  # in float64, where the norm is as good as exact
    codes, _ = quantise(row * np.array([1 + 1e-6, 1 - 1e-6, 1 - 1e-6, *[1] * 13]), "turbo2")
    assert codes.tolist() == [3, 2, 1, 2, 2, *[3] * 11]


@pytest.mark.parametrize("name,error", [("turbo4", 0.0092), ("turbo3", 0.0338), ("turbo2", 0.1166)])
def test_relative_error_on_gaussian_data(name: str, error: float, rng: np.random.Generator) -> None:
    """A little below that of the infinite group (0.0095, 0.0349, 0.1188), since every group has a scale of its own."""
    x = rng.standard_normal((20_000, 128)).astype(np.float32)
    got = turn_back(decode(*encode(rotate(x), name), name, 128))
    assert ((got - x) ** 2).sum() / (x**2).sum() == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("name", TURBO)
def test_rotation_spreads_outliers(name: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2_000, 128)).astype(np.float32)
    x[:, 17] *= 30
    got = turn_back(decode(*encode(rotate(x), name), name, 128))
    turned = ((got - x) ** 2).sum() / (x**2).sum()
    assert turned < 0.5 * ((decode(*encode(x, name), name, 128) - x) ** 2).sum() / (x**2).sum()


@pytest.mark.parametrize("name,dim", CASES)
def test_the_scale_is_the_best_for_the_codes(name: str, dim: int, rng: np.random.Generator) -> None:
    """Of the turbo types: no other scale has a smaller error, up to the rounding to half. All: what was decoded codes to itself."""
    x = rng.standard_normal((200, dim)).astype(np.float32)
    packed, scales = encode(x, name)
    got = decode(packed, scales, name, dim)
    if name in TURBO:
        levels = LEVELS[name][unpack(packed, name, dim)].astype(np.float64).reshape(*scales.shape, -1)
        groups = x.astype(np.float64).reshape(levels.shape)
        best = (groups * levels).sum(-1) / (levels**2).sum(-1)
        np.testing.assert_allclose(scales.astype(np.float64), best, rtol=2**-11 * 1.01)
    assert ((got - x) ** 2).sum() < 0.13 * (x**2).sum()


@pytest.mark.parametrize("name", CODED)
def test_both_precisions_agree(name: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((500, 64)).astype(np.float32)
    codes, scales = quantise(x, name)
    codes64, scales64 = quantise(x.astype(np.float64), name)
    assert (codes != codes64).mean() < 1e-4
    np.testing.assert_allclose(scales.astype(np.float64), scales64.astype(np.float64), rtol=2**-10)


@pytest.mark.parametrize("name,dim", CASES)
def test_rows_of_zeros_are_zeros(name: str, dim: int) -> None:
    x = np.zeros((2, dim), np.float32)
    x[1] = -0.0
    packed, scales = encode(rotate(x), name)
    assert (scales == 0).all()
    assert (decode(packed, scales, name, dim) == 0).all()


@pytest.mark.parametrize("unsound", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name,dim", CASES)
def test_nothing_unsound_is_hidden(name: str, dim: int, unsound: float, rng: np.random.Generator) -> None:
    """The whole group is NaN, whether it was rotated before or not, and no other."""
    x = rng.standard_normal((3, dim)).astype(np.float32)
    place = int(rng.integers(dim))
    x[1, place] = unsound
    group, turned = KV_TYPES[name].group(dim), rotation_group(dim)
    for rotated in (False, True):
        width = max(group, turned) if rotated else group
        with np.errstate(invalid="ignore"):
            given = rotate(x) if rotated else x
        got = decode(*encode(given, name), name, dim)
        hit = np.zeros((3, dim), bool)
        hit[1, place // width * width : place // width * width + width] = True
        np.testing.assert_array_equal(np.isnan(got), hit)


@pytest.mark.parametrize("name", CODED)
def test_what_half_cannot_hold_is_not_hidden_either(name: str) -> None:
    x = np.zeros((3, 64), np.float32)
    x[0, 3], x[1, :] = 3e38, 1e30
    with np.errstate(over="ignore"):
        packed, scales = encode(x, name)
    assert not np.isfinite(scales[0, 0]) and not np.isfinite(scales[1]).any() and (scales[2] == 0).all()


@pytest.mark.parametrize("tiny", [1e-45, 1e-41, 1e-30, 1e-12])
@pytest.mark.parametrize("name", CODED)
def test_what_is_too_small_for_half_becomes_zero(name: str, tiny: float) -> None:
    packed, scales = encode(np.full((1, 64), tiny, np.float32), name)
    assert (np.abs(decode(packed, scales, name, 64)) <= 1e-7).all()


# -- rotation ------------------------------------------------------------------------------------------------------------------


def test_signs_are_the_bits_of_pi() -> None:
    """243F6A88: 8 = 0001 from the lowest bit on, 8 again, A = 0101."""
    assert SIGNS[:12].tolist() == [1, 1, 1, -1, 1, 1, 1, -1, 1, -1, 1, -1]
    assert SIGNS.shape == (128,) and set(SIGNS.tolist()) == {1.0, -1.0}
    bits = [(int(f"{word:08x}", 16) >> i) & 1 for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344) for i in range(32)]
    assert ((1 - SIGNS) / 2).astype(int).tolist() == bits


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthonormal_and_comes_back(dim: int, rng: np.random.Generator) -> None:
    matrix = rotate(np.eye(dim))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-12)
    n = rotation_group(dim)
    np.testing.assert_allclose(np.abs(matrix[:n, :n]), n**-0.5, rtol=1e-12)
    assert (matrix[:n, n:] == 0).all(), "groups do not mix"
    np.testing.assert_allclose(turn_back(np.eye(dim)), matrix.T, atol=1e-12)
    for precision, tolerance in ((np.float32, 2e-6), (np.float64, 1e-14)):
        x = rng.standard_normal((7, 3, dim)).astype(precision)
        there, back = rotate(x), turn_back(rotate(x))
        assert there.dtype == back.dtype == precision and there.shape == x.shape
        np.testing.assert_allclose(back, x, atol=tolerance)
        np.testing.assert_allclose(rotate(turn_back(x)), x, atol=tolerance)


def test_rotation_by_hand() -> None:
    """Of 16 elements, x[0] alone: all equal to a quarter. x[3], whose sign is turned: minus a quarter where the bits of 3 and the place meet oddly."""
    assert rotate(np.eye(16, dtype=np.float32)[0]).tolist() == [0.25] * 16
    want = [-0.25 * (-1) ** (3 & place).bit_count() for place in range(16)]
    assert rotate(np.eye(16, dtype=np.float32)[3]).tolist() == want


def test_scores_do_not_change_with_both_rotated(rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((2, 5, 96))
    np.testing.assert_allclose((rotate(q) * rotate(k)).sum(-1), (q * k).sum(-1), rtol=1e-12)
