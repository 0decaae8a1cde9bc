"""The next token from one row of logits (csrc/choose.cu)."""

from functools import cache
from typing import NamedTuple

import numpy as np

from rollkv.config import SamplingParams
from rollkv.cuda.device import DeviceArray, Launcher, Pointer, check_array
from rollkv.cuda.nvrtc import KernelSpec
from rollkv.sampling import log_min_p, sharpness
from rollkv.workspace import CHOICE_BLOCK, CHOICE_SEARCH_BYTES, choice_bytes

_THREADS = 256
_KERNELS = ("choose_rank", "choose_best", "choose_narrow", "choose_sum", "choose_draw")
_DIGITS = 3  # of a key
_NONE = Pointer(0)


@cache
def spec(name: str) -> KernelSpec:
    return KernelSpec("choose.cu", name, early=True)


def instances() -> tuple[KernelSpec, ...]:
    return tuple(map(spec, _KERNELS))


class Scratch(NamedTuple):
    """Where in the scratch everything lies; what it is stands in csrc/choose.cu."""

    keys: Pointer
    search: Pointer
    best: Pointer
    sums: Pointer
    unsound: Pointer
    ties: Pointer


@cache
def scratch_parts(address: int, num_blocks: int) -> Scratch:
    """The parts one behind the other, each aligned to its elements where the first is to 16 bytes."""
    starts = [address]
    for nbytes in (num_blocks * CHOICE_BLOCK * 4, CHOICE_SEARCH_BYTES, num_blocks * 8, num_blocks * 8, num_blocks * 4):
        starts.append(starts[-1] + nbytes)
    return Scratch(*map(Pointer, starts))


def cut_of(params: SamplingParams, vocab_size: int) -> tuple[int, int]:
    """(top_k, or 0 where it takes all; launches of choose_narrow: one a digit, and top_p's first is that of top_k)."""
    top_k = params.top_k if params.top_k < vocab_size else 0
    weighed = params.top_p < 1
    return top_k, _DIGITS * (top_k > 0 or weighed) + (_DIGITS - 1) * (top_k > 0 and weighed)


def choose_bytes(params: SamplingParams, vocab_size: int) -> int:
    """Bytes read and written, out of L2 but for the logits: keys once a kernel."""
    return vocab_size * 4 * (1 if params.temperature == 0 else 3 + cut_of(params, vocab_size)[1])


def choose(
    launcher: Launcher,
    logits: DeviceArray,
    params: SamplingParams,
    sequence: DeviceArray,
    position: DeviceArray,
    outcome: DeviceArray,
    scratch: DeviceArray,
) -> None:
    """As Backend.choose: two launches where greedy, three and those of `cut_of` otherwise. Reads and writes choose_bytes.

    logits f32 [1, vocab]; sequence i32 [n]; position i32 [1]; outcome i32 [2]; scratch u8 [choice_bytes(vocab)], aligned to 16 bytes.
    Raises KernelError on other shapes.
    """
    vocab, length = logits.shape[-1], sequence.shape[0]
    check_array("choose", "logits", logits, (1, vocab), "f32")
    check_array("choose", "sequence", sequence, (length,), "i32")
    check_array("choose", "position", position, (1,), "i32")
    check_array("choose", "outcome", outcome, (2,), "i32")
    check_array("choose", "scratch", scratch, (choice_bytes(vocab),), "u8")
    greedy, blocks = params.temperature == 0, -(-vocab // CHOICE_BLOCK)
    parts = scratch_parts(scratch.ptr, blocks)
    repeat_last = 0 if params.repeat_penalty == 1 else min(params.repeat_last, length)
    end = sequence, position, outcome

    keys, search = (_NONE, _NONE) if greedy else (parts.keys, parts.search)
    penalty = np.int32(vocab), np.int32(length), np.float32(params.repeat_penalty), np.int32(repeat_last)
    launcher.launch(
        spec("choose_rank"), (blocks, 1, 1), _THREADS, logits, sequence, position, keys, parts.best, parts.unsound, search, *penalty
    )
    if greedy:
        launcher.launch(spec("choose_best"), (1, 1, 1), _THREADS, parts.best, parts.unsound, *end, np.int32(blocks), np.int32(length))
        return
    top_k, steps = cut_of(params, vocab)
    cut = np.int32(top_k), np.float64(params.top_p), np.float64(sharpness(1.0))
    for step in range(steps):
        launcher.launch(spec("choose_narrow"), (blocks, 1, 1), _THREADS, keys, parts.best, search, np.int32(step), *cut)
    draw = np.float64(sharpness(params.temperature)), np.float64(log_min_p(params))
    sums = parts.sums, parts.ties
    launcher.launch(spec("choose_sum"), (blocks, 1, 1), _THREADS, keys, parts.best, search, *sums, np.int32(steps), *cut, *draw)
    sizes, seed = (np.int32(blocks), np.int32(length), np.int32(steps)), np.uint64(params.seed)
    last = keys, parts.best, parts.unsound, search, *sums, *end, *sizes, *draw, seed
    launcher.launch(spec("choose_draw"), (1, 1, 1), _THREADS, *last)
