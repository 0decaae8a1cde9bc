"""A matrix on the device, in the form that csrc/quants.cuh reads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from rollkv.backend import Loadable
from rollkv.config import Dtype
from rollkv.cuda.device import DeviceArray, Pointer
from rollkv.quants import PLANE_ALIGNMENT, DeviceForm, device_bytes, device_form

_MAX_PLANES = 4


@dataclass(frozen=True)
class CudaWeight:
    """Weights [rows, columns] of one type in `memory`, u8 [device_bytes(qtype, shape)] at a multiple of 256; defined once repacked.

    Raises UnsupportedModelError, ModelFileError (shape), ValueError (memory).
    """

    name: str
    shape: tuple[int, ...]
    qtype: str
    memory: DeviceArray

    def __post_init__(self) -> None:
        if self.memory.dtype != "u8" or self.memory.nbytes != self.form.nbytes or self.memory.ptr % PLANE_ALIGNMENT:
            raise ValueError(
                f"{self.name}: {self.form.nbytes} bytes at a multiple of {PLANE_ALIGNMENT} are wanted, not {self.memory.nbytes} at {self.memory.ptr:#x}"
            )

    @cached_property
    def form(self) -> DeviceForm:
        """Sizes and offsets of the planes."""
        return device_form(self.qtype, self.shape)

    @cached_property
    def planes(self) -> tuple[Pointer, ...]:
        """Four pointers: the planes in the order of the fields, then the first again in place of those the type does not have."""
        pointers = tuple(Pointer(self.memory.ptr + plane.offset) for plane in self.form.planes)
        return pointers + pointers[:1] * (_MAX_PLANES - len(pointers))

    @property
    def nbytes(self) -> int:
        """Bytes on the device, padding included."""
        return self.memory.nbytes

    @property
    def rows(self) -> int:
        return self.form.rows

    @property
    def columns(self) -> int:
        return self.form.columns


def place(part: Loadable, empty: Callable[[str, tuple[int, ...], Dtype], DeviceArray]) -> CudaWeight | DeviceArray:
    """What a part is loaded into: a matrix as it is multiplied with, or a vector, f32 [columns], in memory that empty(label, shape, dtype) gives."""
    if len(part.shape) == 1:
        return empty(part.name, part.shape, "f32")
    return CudaWeight(part.name, part.shape, part.qtype, empty(part.name, (device_bytes(part.qtype, part.shape),), "u8"))
