"""Random weights of every type, and products with them in float64 and, plainly, in float32."""

import math
from typing import Any

import numpy as np

from rollkv.backend import Loadable
from rollkv.gguf_header import TensorData
from rollkv.quants import FORMATS, dequantise, raw_bytes

_HALVES = {  # offsets of the f16 scales and shifts in a block
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_weight(qtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> TensorData:
    """Random codes under scales of either sign in +-[0.002, 0.2]; normal values for the floating-point types."""
    if qtype in ("F32", "F16", "BF16"):
        values = rng.standard_normal(shape).astype(np.float32)
        raw = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}[qtype]
        return TensorData("w", qtype, shape, raw.view(np.uint8).reshape(-1))
    blocks = rng.integers(0, 256, raw_bytes(qtype, shape), dtype=np.uint8).reshape(-1, FORMATS[qtype].nbytes)
    for offset in _HALVES[qtype]:
        scale = rng.uniform(0.002, 0.2, len(blocks)) * rng.choice([-1, 1], len(blocks))
        blocks[:, offset : offset + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return TensorData("w", qtype, shape, blocks.reshape(-1))


def load_weight(cuda: Any, *tensors: TensorData, paired: bool = False) -> Any:
    """The matrices, one above the other or their tiles by turns, on the device."""
    (weight,) = cuda.load([Loadable(tensors, paired)])
    return weight


def values(weight: TensorData) -> np.ndarray:
    """float32 [rows, columns]."""
    return dequantise(weight.qtype, weight.raw, weight.shape).reshape(math.prod(weight.shape[:-1]), -1)


def product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """float64 [T, N]."""
    return x.astype(np.float64) @ weight.astype(np.float64).T + bias


def plain_product(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """float32 [T, N], one column of the weight after the other."""
    total = np.zeros((len(x), len(weight)), np.float32)
    for k in range(x.shape[1]):
        total += x[:, k : k + 1] * weight[:, k]
    return total + bias


def allowed_error(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> float:
    """Twice the largest error of the plain float32 product, and one rounding of the largest sum of magnitudes."""
    magnitude = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T + np.abs(bias)
    return float(2 * np.abs(plain_product(x, weight, bias) - product(x, weight, bias)).max() + magnitude.max() * 2.0**-24)
