"""The working arrays of the forward pass by name: one table, used both to plan memory and to allocate it."""

from dataclasses import dataclass
from math import prod

from rollkv.config import DTYPE_BYTES, CacheConfig, Dtype, LayerConfig, ModelConfig, RopeConfig
from rollkv.kv_formats import page_formats
from rollkv.pages import pages_for, sliding_ring_pages
from rollkv.rope import query_bands, rotations
from rollkv.units import round_up

ALIGNMENT = 256  # bytes; every array of the device arena begins at a multiple
GRANULE_BYTES = 2 << 20  # the driver hands out device memory in whole granules
MAX_FEW_ROWS = 16  # rows up to which products are batch-invariant (decode, output matrix, verification)
SLAB_BYTES = 64 << 20
UNPACKED_BYTES = 64 << 20  # at most, of f16 pages that coded ones are unpacked into at a time
GEMM_WORKSPACE_BYTES = 32 << 20  # what cuBLAS asks for on Hopper; less would rule out some of its kernels
CHOICE_BLOCK = 1024  # tokens that a block of the choice looks at
CHOICE_SEARCH_BYTES = 123_024  # five histograms of 2048 bins of a sum and a count, and what is known before each and in the end


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of one working array; zeroed: it begins as zeros, int32."""

    shape: tuple[int, ...]
    dtype: Dtype
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def ropes_of(config: ModelConfig) -> tuple[RopeConfig, ...]:
    """The different rotations of a model, in the order of their first layer."""
    return tuple(dict.fromkeys(layer.rope for layer in config.layers))


def qkv_columns(layer: LayerConfig) -> int:
    """Columns of one layer's queries, keys and values together."""
    return layer.num_heads * layer.key_dim + layer.num_kv_heads * (layer.key_dim + layer.value_dim)


def state_shape(num_tokens: int, layer: LayerConfig) -> tuple[int, int]:
    """Of the running attention state of a step of so many tokens: f32, 8 floats beside the outputs of a head, rows in whole groups of 8."""
    return round_up(num_tokens, 8), layer.num_heads * (layer.value_dim + 8)


def workspace_arrays(config: ModelConfig, cache: CacheConfig) -> dict[str, ArraySpec]:
    """Every working array of a forward pass of up to min(ubatch, ctx_size) rows."""
    rows = min(cache.ubatch, cache.ctx_size)
    layers = config.layers
    arrays = {
        "sequence": ArraySpec((cache.ctx_size + 1,), "i32"),  # ids of all cells, and the one to come
        "position": ArraySpec((1,), "i32"),
        "prompt_cells": ArraySpec((1,), "i32", zeroed=True),  # of the whole prompt, however many of them are cached
        "outcome": ArraySpec((2,), "i32"),  # of a choice: the id, and how many logits were not finite
        "hidden": ArraySpec((rows, config.hidden_size), "f32"),
        "q": ArraySpec((rows, max(layer.num_heads * max(layer.key_dim, layer.value_dim) for layer in layers)), "f32"),
        "qkv": ArraySpec((rows, max(max(qkv_columns(layer), layer.num_heads * layer.value_dim) for layer in layers)), "f32"),
        "feed_forward": ArraySpec((rows, 2 * config.ffn_size), "f32"),
        "logits": ArraySpec((min(rows, MAX_FEW_ROWS), config.vocab_size), "f32"),
        "choice.scratch": ArraySpec((choice_bytes(config.vocab_size),), "u8"),
    }
    if config.post_norms:
        arrays["branch"] = ArraySpec((rows, config.hidden_size), "f32")
    for index, rope in enumerate(ropes_of(config)):
        arrays[f"rope.{index}"] = ArraySpec((rotations(rope), rows, rope.dim // 2, 2), "f32")
    if rows > 1:
        arrays["attention.state"] = ArraySpec(max(state_shape(rows, layer) for layer in layers), "f32")
        if cache.lossy and not lent_to_unpack(config, cache):
            arrays["attention.unpacked"] = ArraySpec((_unpacked_page_bytes(config, cache),), "u8")
    queries = max(query_bands(layer.rope) * layer.num_heads * layer.key_dim for layer in layers)
    arrays["attention.queries"] = ArraySpec((queries,), "f32")  # of a single token, in every band
    parts = max(_visible_pages(layer.sliding_window, cache) * layer.num_heads for layer in layers)
    parts_v = max(_visible_pages(layer.sliding_window, cache) * layer.num_heads * layer.value_dim for layer in layers)
    arrays["attention.part_out"] = ArraySpec((parts_v,), "f32")
    arrays["attention.part_lse"] = ArraySpec((parts,), "f32")
    arrays["attention.arrivals"] = ArraySpec((max(layer.num_heads for layer in layers),), "i32", zeroed=True)
    return arrays


def lent_to_unpack(config: ModelConfig, cache: CacheConfig) -> int:
    """Bytes at the beginning of "feed_forward", which is idle meanwhile, that attention of many rows unpacks coded pages into: whole f16 pages of the
    widest layer. 0 where no pages are coded, and where not one fits: then "attention.unpacked" is an array of its own."""
    if not cache.lossy:
        return 0
    rows, page_bytes = min(cache.ubatch, cache.ctx_size), _unpacked_page_bytes(config, cache)
    lent = min(rows * 2 * config.ffn_size * DTYPE_BYTES["f32"], max(UNPACKED_BYTES, page_bytes))
    return lent // page_bytes * page_bytes


def _unpacked_page_bytes(config: ModelConfig, cache: CacheConfig) -> int:
    """Of the widest layer. Of all layers, for a rehearsal of some of them must find what the run will."""
    return max(page.unpacked.page_bytes for page in page_formats(config, cache))


def choice_bytes(vocab_size: int) -> int:
    """Scratch of the choice of a token: 4 bytes a token, and by block its best token and its sum (8 each), its unsound logits and ties (4 each)."""
    return -(-vocab_size // CHOICE_BLOCK) * (CHOICE_BLOCK * 4 + 24) + CHOICE_SEARCH_BYTES


def widest_input(config: ModelConfig) -> int:
    """Columns of the widest matrix that a product has."""
    return max(config.hidden_size, config.ffn_size, *(layer.num_heads * layer.value_dim for layer in config.layers))


def widest_added(config: ModelConfig) -> int:
    """Columns of the widest product whose result is added to what is there: the branches, where no norm comes between."""
    return 0 if config.post_norms else config.hidden_size


def linear_scratch(config: ModelConfig, cache: CacheConfig) -> dict[str, int]:
    """Bytes of the scratch of products with more than 16 rows: f16 activations with a scale a row, a slab of dequantised weights, results before
    they are added, and the vendor library's own workspace. Loading stages raw tensors in the slab, so it exists for short contexts too."""
    rows = min(cache.ubatch, cache.ctx_size)
    scratch = {"dequantised weights": SLAB_BYTES}
    if rows > MAX_FEW_ROWS:
        scratch |= {"f16 activations": rows * widest_input(config) * 2, "row scales": rows * 4, "cuBLAS": GEMM_WORKSPACE_BYTES}
        scratch["products"] = rows * widest_added(config) * 4
    return scratch


def arena_bytes(sizes: list[int]) -> int:
    """Bytes of an arena that holds arrays of these sizes, each aligned."""
    return sum(round_up(size, ALIGNMENT) for size in sizes)


def _visible_pages(sliding_window: int | None, cache: CacheConfig) -> int:
    total = pages_for(cache.ctx_size, cache.page_cells)
    return total if sliding_window is None else min(total, sliding_ring_pages(sliding_window, 1, cache.page_cells))
