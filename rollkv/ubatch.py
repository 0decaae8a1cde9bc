"""Prompts are read in ubatches, whose working arrays take device memory too. Where they leave no room for the window, a ubatch that nobody asked for
is halved; one that somebody did is refused, with the largest that would fit."""

from collections.abc import Callable
from dataclasses import replace

from rollkv.budget import Budget
from rollkv.config import CacheConfig, ModelConfig
from rollkv.errors import OutOfMemoryError
from rollkv.kv_formats import tail_formats

Make = Callable[[CacheConfig], Budget]

# Attention of T rows does T * group operations with every byte of an f16 tail, which takes as long as copying it at 2,200 rows of a group of 5
# (600 TFLOP/s beside 54.9 GB/s on an H200).
RIDGE_OPERATIONS = 11_000


def plan_ubatch(make: Make, cache: CacheConfig) -> Budget:
    """make(cache), the budget of a configuration, with the first ubatch of those that it allows which is not refused. Raises OutOfMemoryError."""
    for ubatch in (cache.ubatch, *_halvings(cache)):
        try:
            return make(replace(cache, ubatch=ubatch))
        except OutOfMemoryError as error:
            refusal = error  # of the smallest, in the end: the least that is needed
    largest = largest_ubatch(make, cache)
    raise OutOfMemoryError(f"{refusal}{'' if largest is None else f', or lower --ubatch to at most {largest}'}") from refusal


def largest_ubatch(make: Make, cache: CacheConfig) -> int | None:
    """The largest ubatch below that of the configuration which is not refused, in whole pages from one page on; None when none is."""
    low, high = 0, min(cache.ubatch, cache.ctx_size)  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            make(replace(cache, ubatch=middle))
            low = middle
        except OutOfMemoryError:
            high = middle
    return (low // cache.page_cells * cache.page_cells or low) or None


def shrunk_words(asked: CacheConfig, config: ModelConfig, budget: Budget) -> str | None:
    """What a smaller ubatch than was asked for costs, in a sentence; None when it is not smaller."""
    if budget.ubatch == asked.ubatch:
        return None
    pages = zip(config.layers, tail_formats(config, asked), strict=True)
    layers = [(layer, page) for layer, page in pages if layer.sliding_window is None]
    # Of a layer: longer where a page takes more than in f16 to copy, and shorter where it takes less.
    rows = [RIDGE_OPERATIONS / layer.group * page.page_bytes / page.unpacked.page_bytes for layer, page in layers]
    ridge = max(rows, default=0.0)
    slower = f"prefill of a streamed tail takes up to about {ridge / budget.ubatch:.1f} times as long" if ridge > budget.ubatch else ""
    cost = slower if slower and budget.spills else "prefill is a little slower"
    return (
        f"the ubatch is {budget.ubatch} tokens instead of {asked.ubatch}, whose arrays leave no room for the window under the cap: {cost}, "
        f"and logits may differ in their last bits from those of {asked.ubatch}; --ubatch {budget.ubatch} says so without this warning"
    )


def _halvings(cache: CacheConfig) -> list[int]:
    """Smaller ubatches that the configuration allows and that hold less than the context, largest first."""
    found, ubatch = [], cache.ubatch // 2
    while cache.smallest_ubatch is not None and ubatch >= cache.smallest_ubatch:
        found += [ubatch] if ubatch < cache.ctx_size else []
        ubatch //= 2
    return found
