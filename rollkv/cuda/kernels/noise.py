"""Random numbers by index, for cells that no prompt was read for (csrc/noise.cu)."""

import math
from functools import cache

import numpy as np

from rollkv.cuda.device import DeviceArray, Launcher, check_array
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.reference import NOISE_SCALE

_THREADS = 256


@cache
def spec() -> KernelSpec:
    return KernelSpec("noise.cu", "noise")


def instances() -> tuple[KernelSpec, ...]:
    return (spec(),)


def blocks(first: int, count: int) -> int:
    """Blocks whose threads make the words of numbers first .. first + count - 1, one each."""
    return max(1, -(-(-(-(first + count) // 4) - first // 4) // _THREADS))


def noise_bytes(count: int) -> int:
    """Bytes written."""
    return 4 * count


def noise(launcher: Launcher, out: DeviceArray, seed: int, first: int) -> None:
    """Numbers first, first + 1, ... of a seed, as reference.noise, to out.

    out: f32, any shape, at a multiple of 16 bytes; seed: 64 bits. Writes noise_bytes. Raises KernelError on others.
    """
    check_array("noise", "out", out, out.shape, "f32")
    if out.ptr % 16:
        raise KernelError(f"noise: out must begin at a multiple of 16 bytes, not at {out.ptr:#x}")
    count = math.prod(out.shape)
    launcher.launch(
        spec(), (blocks(first, count), 1, 1), _THREADS, out, np.uint64(seed), np.int64(first), np.int64(count), np.float32(NOISE_SCALE)
    )
