"""Sizes of the types of the KV cache, by hand."""

from typing import get_args

import pytest

from rollkv.config import DTYPE_BYTES, KvType
from rollkv.kv_types import KV_TYPES, rotation_group


@pytest.mark.parametrize(
    "head_dim,group", [(128, 128), (256, 128), (512, 128), (64, 64), (80, 16), (96, 32), (192, 64), (16, 16), (112, 16)]
)
def test_as_many_elements_are_rotated_together_as_a_power_of_two_divides(head_dim: int, group: int) -> None:
    assert rotation_group(head_dim) == group


@pytest.mark.parametrize(
    "name,head_dim,codes,scales",
    [
        ("f32", 80, 320, 0),
        ("f16", 80, 160, 0),
        ("bf16", 16, 32, 0),
        ("q8_0", 128, 128, 4),
        ("q4_0", 128, 64, 4),
        ("q4_0", 32, 16, 1),
        ("turbo4", 128, 64, 1),
        ("turbo3", 128, 48, 1),
        ("turbo2", 128, 32, 1),
        ("turbo2", 256, 64, 2),
        ("turbo3", 256, 96, 2),
        ("turbo4", 16, 8, 1),
        ("turbo2", 16, 4, 1),
        ("turbo3", 16, 8, 1),  # a word of magnitudes, and one of signs that is half used
        ("turbo3", 80, 32, 5),  # 5 and 3 words
        ("turbo3", 96, 36, 3),
        ("turbo3", 192, 72, 3),
    ],
)
def test_bytes_of_a_row(name: str, head_dim: int, codes: int, scales: int) -> None:
    kind = KV_TYPES[name]
    assert (kind.code_bytes(head_dim), kind.num_scales(head_dim)) == (codes, scales)
    assert kind.row_bytes(head_dim) == codes + 2 * scales


@pytest.mark.parametrize(
    "name,head_dim,bits",
    [("f16", 128, 16), ("q8_0", 64, 8.5), ("q4_0", 256, 4.5), ("turbo4", 128, 4.125), ("turbo3", 128, 3.125), ("turbo2", 128, 2.125)],
)
def test_bits_of_an_element(name: str, head_dim: int, bits: float) -> None:
    assert KV_TYPES[name].bits(head_dim) == bits


def test_every_name_that_a_user_may_give_has_facts() -> None:
    assert set(KV_TYPES) == set(get_args(KvType)) and all(kind.name == name for name, kind in KV_TYPES.items())
    assert {name for name, kind in KV_TYPES.items() if kind.coded} == {"q8_0", "q4_0", "turbo4", "turbo3", "turbo2"}
    for name in set(KV_TYPES) & set(DTYPE_BYTES):
        assert KV_TYPES[name].row_bytes(48) == 48 * DTYPE_BYTES[name], "plain types are those of arrays"
