"""In which types each layer keeps its cells: what was asked for, by layer; what cannot be had; and how it is called.

Rotation is a property of a layer: a turbo type in window or tail asks for it, and --kv-rotate for any coded type. Then its whole cache is rotated, an f16
window beside a rotated tail too, so that partial states of both merge in one frame, and what leaves the window is coded as it lies there.
"""

from dataclasses import dataclass, replace

from rollkv.config import CacheConfig, KvType, LayerConfig, ModelConfig, PageFormat
from rollkv.errors import UsageError
from rollkv.kv_types import CELLS_TOGETHER, KV_TYPES


@dataclass(frozen=True)
class _Kept:
    """The types of a layer's keys, or of its values: in the window, in the tail, and whether they are rotated."""

    window: KvType
    tail: KvType
    rotated: bool


def page_formats(config: ModelConfig, cache: CacheConfig) -> tuple[PageFormat, ...]:
    """Of every layer's pages in the window, and in fresh slots."""
    return tuple(
        _page(layer, cache, keys.window, values.window, keys.rotated, values.rotated)
        for layer, (keys, values) in zip(config.layers, _kept(config, cache), strict=True)
    )


def tail_formats(config: ModelConfig, cache: CacheConfig) -> tuple[PageFormat, ...]:
    """Of every layer's pages in the tail, and in the staging ring. A layer with a sliding window has no tail: as in its window."""
    return tuple(
        _page(layer, cache, keys.tail, values.tail, keys.rotated, values.rotated)
        for layer, (keys, values) in zip(config.layers, _kept(config, cache), strict=True)
    )


def of_full_attention(config: ModelConfig, formats: tuple[PageFormat, ...]) -> tuple[PageFormat, ...]:
    """Those of the layers without a sliding window."""
    return tuple(page for layer, page in zip(config.layers, formats, strict=True) if layer.sliding_window is None)


def _page(layer: LayerConfig, cache: CacheConfig, key: KvType, value: KvType, key_rotated: bool, value_rotated: bool) -> PageFormat:
    sizes = layer.num_kv_heads, layer.key_dim, layer.value_dim
    return PageFormat(*sizes, key, value, cache.page_cells, key_rotated, value_rotated)


def _kept(config: ModelConfig, cache: CacheConfig) -> tuple[tuple[_Kept, _Kept], ...]:
    """Keys and values of every layer."""
    edges = range(cache.protect_layers, config.num_layers - cache.protect_layers)
    return tuple(
        (
            _of_layer(layer, cache.key_type, cache.tail_key_type, cache.kv_rotate, protected=index not in edges),
            _of_layer(layer, cache.value_type, cache.tail_value_type, cache.kv_rotate, protected=index not in edges),
        )
        for index, layer in enumerate(config.layers)
    )


def _of_layer(layer: LayerConfig, window: KvType, tail: KvType | None, rotate: bool, *, protected: bool) -> _Kept:
    tail = window if tail is None or layer.sliding_window is not None else tail
    window, tail = ("f16" if protected and KV_TYPES[one].coded else one for one in (window, tail))
    kinds = KV_TYPES[window], KV_TYPES[tail]
    return _Kept(window, tail, any(kind.rotated or (rotate and kind.coded) for kind in kinds))


# -- refusals ------------------------------------------------------------------------------------------------------------------


def check_kv_types(config: ModelConfig, cache: CacheConfig) -> None:
    """Raises UsageError for types that this model's heads cannot be held in, that do not go together, or that nothing would come of."""
    plain = kv_words(replace(cache, kv_rotate=False, protect_layers=0))
    if cache.kv_rotate and not cache.can_rotate:
        raise UsageError(f"--kv-rotate concerns q8_0 and q4_0 (turbo types are rotated anyway), and {plain} has neither; leave it out")
    if not cache.lossy:
        if cache.protect_layers:
            raise UsageError(
                f"--kv-protect {cache.protect_layers} concerns types below 16 bits, and {plain} has none; leave it out, or give one of {_coded_names()}"
            )
    elif 2 * cache.protect_layers >= config.num_layers:
        raise UsageError(
            f"--kv-protect {cache.protect_layers} leaves none of the {config.num_layers} layers in the types asked for; give at most {(config.num_layers - 1) // 2}"
        )
    _check_pairs(cache)
    if cache.lossy and cache.page_cells % CELLS_TOGETHER:
        raise UsageError(f"page_cells {cache.page_cells}: types below 16 bits want a multiple of {CELLS_TOGETHER}")
    if cache.recodes and all(layer.sliding_window is not None for layer in config.layers):
        raise UsageError(
            "--cache-type-tail-k, -v: all layers of this model have sliding windows, so no cell ever leaves VRAM; leave them out"
        )
    for layer, (keys, values) in zip(config.layers, _kept(config, cache), strict=True):
        for letter, dim, kept in (("k", layer.key_dim, keys), ("v", layer.value_dim, values)):
            _check_size(f"--cache-type-{letter}", dim, kept.window)
            _check_size(f"--cache-type-tail-{letter}", dim, kept.tail)
            _check_tail(letter, dim, kept)


def _check_pairs(cache: CacheConfig) -> None:
    wide = next((name for name in cache.types if not KV_TYPES[name].coded and name != "f16"), None)
    if cache.lossy and wide is not None:
        coded = next(name for name in cache.types if KV_TYPES[name].coded)
        raise UsageError(f"cells of {coded} and of {wide} do not go together; pair {coded} with f16, or with one of {_coded_names()}")


def _check_size(option: str, dim: int, name: KvType) -> None:
    if dim % KV_TYPES[name].divisor:
        others = [n for n, kind in KV_TYPES.items() if kind.coded and dim % kind.divisor == 0]
        raise UsageError(
            f"{option} {name}: heads of {dim} elements cannot be held in groups of {KV_TYPES[name].divisor}; choose {' or '.join((*others, 'f16'))}"
        )


def _check_tail(letter: str, dim: int, kept: _Kept) -> None:
    if kept.tail == kept.window:
        return
    if not KV_TYPES[kept.tail].coded or KV_TYPES[kept.tail].bits(dim) >= KV_TYPES[kept.window].bits(dim):
        of_coded = kept.window == "f16" or KV_TYPES[kept.window].coded  # which other plain types do not go with
        narrower = [n for n, kind in KV_TYPES.items() if of_coded and kind.coded and kind.bits(dim) < KV_TYPES[kept.window].bits(dim)]
        choice = f"can only be held in fewer bits; choose {' or '.join(narrower)}, or" if narrower else "keeps its type;"
        raise UsageError(f"--cache-type-tail-{letter} {kept.tail}: what leaves a window of {kept.window} {choice} leave it out")


def _coded_names() -> str:
    return ", ".join(name for name, kind in KV_TYPES.items() if kind.coded)


# -- words ---------------------------------------------------------------------------------------------------------------------


def kv_words(cache: CacheConfig) -> str:
    """ "KV f16/f16", or "KV q8_0/turbo3 rotated, tail q4_0, first and last 2 layers f16 (lossy)": the types of keys and values as they are shown."""
    words = f"KV {cache.key_type}/{cache.value_type}{' rotated' if cache.kv_rotate else ''}"
    if cache.recodes:
        words += f", tail {'/'.join(dict.fromkeys(cache.types[2:]))}"
    if cache.protect_layers:
        words += f", first and last {cache.protect_layers} layers f16" if cache.protect_layers > 1 else ", first and last layer f16"
    return words + (" (lossy)" if cache.lossy else "")
