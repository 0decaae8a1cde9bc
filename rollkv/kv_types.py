"""What the types of the KV cache take: facts for plans and page formats. kv_codes.py makes and reads the codes.

A *plain* type holds a number for every element. A *coded* one holds a code for every element, which stands for a level, and for every *group* of
neighbouring elements of a head one f16 scale, which multiplies their levels.
"""

from dataclasses import dataclass
from types import MappingProxyType

MAX_ROTATION = 128  # elements that are rotated together at most
SCALE_BYTES = 2
CELLS_TOGETHER = 4  # cells of a coded type whose words lie side by side in a page, and whose scales do
_WORD_BITS = 32


def rotation_group(head_dim: int) -> int:
    """Elements of a head that are rotated together: the largest power of two up to 128 that divides its size."""
    return min(head_dim & -head_dim, MAX_ROTATION)


@dataclass(frozen=True)
class StoredType:
    """One type. planes: bits of an element in each of the planes that the codes of a row (a head's elements of one cell) are divided into."""

    name: str
    planes: tuple[int, ...]
    coded: bool = False  # and so narrower than 16 bits, with a loss that shows
    rotated: bool = False  # always: its groups are those of the rotation
    divisor: int = 1  # of every head size that it can hold

    def group(self, head_dim: int) -> int:
        """Elements that share a scale. Of a coded type."""
        return rotation_group(head_dim) if self.rotated else self.divisor

    def num_scales(self, head_dim: int) -> int:
        """Of a row."""
        return head_dim // self.group(head_dim) if self.coded else 0

    def code_bytes(self, head_dim: int) -> int:
        """Of a row, without its scales: every plane in whole words of 32 bits; plain numbers as they are."""
        if not self.coded:
            return head_dim * self.planes[0] // 8
        return sum(-(-head_dim * bits // _WORD_BITS) * (_WORD_BITS // 8) for bits in self.planes)

    def row_bytes(self, head_dim: int) -> int:
        """Of a row, its scales included."""
        return self.code_bytes(head_dim) + self.num_scales(head_dim) * SCALE_BYTES

    def bits(self, head_dim: int) -> float:
        """Of an element, its share of the scales included."""
        return 8 * self.row_bytes(head_dim) / head_dim


KV_TYPES: MappingProxyType[str, StoredType] = MappingProxyType(
    {
        one.name: one
        for one in (
            StoredType("f32", (32,)),
            StoredType("f16", (16,)),
            StoredType("bf16", (16,)),
            StoredType("q8_0", (8,), coded=True, divisor=32),
            StoredType("q4_0", (4,), coded=True, divisor=32),
            StoredType("turbo4", (4,), coded=True, rotated=True, divisor=16),
            StoredType("turbo3", (2, 1), coded=True, rotated=True, divisor=16),
            StoredType("turbo2", (2,), coded=True, rotated=True, divisor=16),
        )
    }
)
