"""Random weights of a synthetic model, made on the device (csrc/synth_noise.cu)."""

from functools import cache

import numpy as np

from rollkv.backend import Stream
from rollkv.cuda.device import DeviceArray, Launcher
from rollkv.cuda.nvrtc import KernelError, KernelSpec
from rollkv.synth_noise import Noise

_THREADS = 256
_MAX_BLOCKS = 8192  # the kernel strides over what is left


@cache
def spec() -> KernelSpec:
    return KernelSpec("synth_noise.cu", "synth_noise")


def instances() -> tuple[KernelSpec, ...]:
    return (spec(),)


def synth_noise_bytes(noise: Noise, num_blocks: int) -> int:
    """Bytes written."""
    return num_blocks * noise.block_bytes


def synth_noise(
    launcher: Launcher, noise: Noise, out: DeviceArray, *, first_block: int, num_blocks: int, stream: Stream = Stream.COMPUTE
) -> None:
    """Blocks first_block .. first_block + num_blocks - 1 of the noise, as in a file, to the start of out.

    out: u8 (at least num_blocks * noise.block_bytes,) at an even address. Writes synth_noise_bytes. Raises KernelError on other memory.
    """
    if out.dtype != "u8" or out.nbytes < num_blocks * noise.block_bytes or out.ptr % 2:
        raise KernelError(
            f"synth_noise: out must be u8 with at least {num_blocks * noise.block_bytes} bytes, not {out.dtype} {list(out.shape)}"
        )
    head = map(np.uint64, noise.head_words)
    blocks = max(1, min(_MAX_BLOCKS, -(-num_blocks * noise.block_words // _THREADS)))
    where = (np.uint64(noise.seed), np.int64(first_block), np.int64(num_blocks), np.int32(noise.block_bytes), np.int32(len(noise.head)))
    launcher.launch(spec(), (blocks, 1, 1), _THREADS, out, *where, *head, noise.scale, stream=stream)
