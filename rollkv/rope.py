"""The rotations of a RopeConfig: frequencies in float64 (plain, per-pair factors (llama 3), linear and YaRN scaling); with dual chunk attention,
how far queries turn for which pages.

The queries of a step lie in one chunk and meet keys of three kinds, so they turn three ways: a page is of *band* 0 in their own chunk, of band 1 in the
chunk before, of band 2 in any older one. Keys turn once, when they are stored. Without dual chunk attention every page is of band 0, and keys turn
as queries do.
"""

import math
from dataclasses import dataclass

import numpy as np

from rollkv.config import DualChunk, ModelConfig, RopeConfig
from rollkv.errors import UnsupportedModelError, UsageError

NUM_BANDS = 3


@dataclass(frozen=True)
class Bands:
    """The bands of the pages that one step sees."""

    previous_page: int  # first page of band 1
    own_page: int  # first page of band 0

    def of(self, page: int) -> int:
        return (page < self.own_page) + (page < self.previous_page)

    def split(self, first_page: int, num_pages: int) -> tuple[tuple[int, int, int], ...]:
        """Pages first_page .. first_page + num_pages - 1 by their band, old to new: (band, its first page, its pages)."""
        end = first_page + num_pages
        edges = (first_page, *(min(max(page, first_page), end) for page in (self.previous_page, self.own_page)), end)
        return tuple((2 - number, a, b - a) for number, (a, b) in enumerate(zip(edges, edges[1:], strict=False)) if b > a)


def bands(rope: RopeConfig, page_cells: int, newest_page: int) -> Bands:
    """As a step sees them whose new cells lie in the chunk of newest_page."""
    if rope.dual_chunk is None:
        return Bands(0, 0)
    stride_pages = rope.dual_chunk.stride_cells // page_cells
    own_page = newest_page // stride_pages * stride_pages
    return Bands(max(own_page - stride_pages, 0), own_page)


def rotations(rope: RopeConfig) -> int:
    """Ways in which a step turns: its queries in every band, then its keys; or one for all."""
    return 1 if rope.dual_chunk is None else NUM_BANDS + 1


def query_bands(rope: RopeConfig) -> int:
    """Ways in which the queries of a step turn."""
    return 1 if rope.dual_chunk is None else NUM_BANDS


def check_dual_chunks(config: ModelConfig, page_cells: int) -> None:
    """Raises UnsupportedModelError for a rotation that dual chunk attention cannot be had with, UsageError for numbers that do not go together."""
    for layer in config.layers:
        rope, owner = layer.rope, config.name or config.architecture
        if rope.dual_chunk is None:
            continue
        if rope.scaling == "yarn":
            raise UnsupportedModelError(
                f"{owner}: dual chunk attention takes the place of yarn, and the model asks for both; give one of them"
            )
        if rope.dim < layer.key_dim:  # what is not turned could not be scaled with it
            raise UnsupportedModelError(
                f"{owner}: dual chunk attention is supported where heads turn as a whole, and {rope.dim} of {layer.key_dim} elements do; "
                "leave it out with --dca off"
            )
        _check_sizes(rope.dual_chunk, page_cells)


def _check_sizes(dual: DualChunk, page_cells: int) -> None:
    chunk, local, stride = dual.chunk_cells, dual.local_cells, dual.stride_cells
    what = f"dual chunk attention with chunks of {chunk} cells, {local} of them local, and an original context of {dual.original_context}"
    if local < 1 or dual.original_context < 1:
        raise UsageError(f"{what}: all must be 1 or more; give --dca-chunk and --dca-local")
    if stride < 1:
        raise UsageError(f"{what}: local cells must be fewer than a chunk; raise --dca-chunk or lower --dca-local")
    if stride % page_cells:
        near = {max(stride // page_cells, 1) * page_cells, -(-stride // page_cells) * page_cells}
        raise UsageError(
            f"{what}: chunk - local is {stride}, not a multiple of the page of {page_cells} cells; with --dca-local {local} take --dca-chunk "
            f"{' or '.join(str(local + one) for one in sorted(near))}"
        )


def rope_frequencies(rope: RopeConfig) -> tuple[np.ndarray, float]:
    """(frequencies float64 [dim/2] in radians a position, magnitude that multiplies cos and sin).

    YaRN after Peng et al., arXiv 2309.00071, section 3.2 to 3.4: pairs that turn more than beta_fast times within the original context keep
    their frequency, pairs that turn less than beta_slow times are divided by the factor, those between are blended linearly.
    """
    pairs = rope.dim // 2
    frequencies = rope.theta ** (-2.0 * np.arange(pairs, dtype=np.float64) / rope.dim)
    if rope.frequency_factors is not None:
        frequencies = frequencies / np.asarray(rope.frequency_factors, dtype=np.float64)
    if rope.scaling == "linear":
        return frequencies / rope.factor, rope.attention_factor
    if rope.scaling == "yarn":
        low = max(math.floor(_pair_with_turns(rope, rope.beta_fast)), 0)
        high = min(math.ceil(_pair_with_turns(rope, rope.beta_slow)), rope.dim - 1)
        stretched = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0.0, 1.0)
        frequencies = frequencies * (1.0 - stretched) + frequencies / rope.factor * stretched
        return frequencies, rope.attention_factor * (1.0 + 0.1 * math.log(rope.factor))
    return frequencies, rope.attention_factor


def _pair_with_turns(rope: RopeConfig, turns: float) -> float:
    """The (fractional) index of the pair that makes `turns` full turns over the original context."""
    return rope.dim * math.log(rope.original_context / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))
