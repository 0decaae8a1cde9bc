"""What a comparison of logits runs: the reference's configuration, the candidates beside it, and the limits that each must keep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from rollkv.config import CacheConfig, ModelConfig
from rollkv.counts import parse_count, parse_percentage, split_list
from rollkv.dual_chunk import short_words
from rollkv.errors import UsageError
from rollkv.kv_formats import kv_words
from rollkv.metrics import Limits
from rollkv.pages import pages_for
from rollkv.startup import BackendName
from rollkv.units import format_size

DEFAULT_WINDOWS = "100%,50%,25%,1page"
# Rounding activations to 8 bits, as other engines do, costs a mean KLD of 3e-3 to 4e-3 and 1 to 3 % of the top tokens: stay well below.
DEFAULT_LIMITS = Limits(max_kld=1e-3, max_nmse=1e-3, min_top1=0.98)


@dataclass(frozen=True)
class RunSpec:
    """One configuration. same_sums: it computes exactly what the reference computes, so that its bits must be equal. judged: where no limits are given, it
    must keep ours; not so where cells are held in fewer bits than the reference's, or in more."""

    label: str
    cache: CacheConfig
    backend: BackendName
    vram_target: int | None = None  # bytes
    same_sums: bool = True
    judged: bool = True
    config: ModelConfig | None = None  # the model, with the rotations that were asked for; None: as its file declares


def window_specs(text: str, reference: RunSpec) -> tuple[RunSpec, ...]:
    """Candidates from "100%,50%,1page,4096": percent of the context's pages (rounded up), pages, cells. Raises UsageError."""
    cache = reference.cache
    total = pages_for(cache.ctx_size, cache.page_cells)
    specs: dict[int, RunSpec] = {}
    for word in split_list(text, "--windows"):
        if word.endswith("%"):
            pages = ceil(total * parse_percentage(word, "--windows") / 100)
        elif word.endswith(("page", "pages")):
            pages = parse_count(word.removesuffix("s").removesuffix("page"), "--windows")
        else:
            pages = pages_for(parse_count(word, "--windows"), cache.page_cells)
        if pages < 1:
            raise UsageError(f"--windows {word}: a window holds at least one page; write 1page or more")
        pages = min(pages, total)
        windowed = replace(cache, residency="window", window_cells=pages * cache.page_cells)
        label = f"window {word} ({pages} of {total} pages){_types_of_tail(cache)}"
        specs.setdefault(pages, replace(reference, label=label, cache=windowed))
    return tuple(specs.values())


def _types_of_tail(cache: CacheConfig) -> str:
    return f", {kv_words(cache)}" if cache.recodes else ""


def in_types(asked: CacheConfig, key: str, value: str, *, tail: bool = False) -> CacheConfig:
    """What was asked for in other types, with those of the tail or without; rotation and protection where they concern any of them."""
    tails = (asked.tail_key_type, asked.tail_value_type) if tail else (None, None)
    cache = replace(asked, key_type=key, value_type=value, tail_key_type=tails[0], tail_value_type=tails[1])  # type: ignore[arg-type]
    return replace(cache, kv_rotate=cache.kv_rotate and cache.can_rotate, protect_layers=cache.protect_layers if cache.lossy else 0)


def spilling_spec(reference: RunSpec, asked: CacheConfig) -> RunSpec:
    """What windows and caps compute: what the reference does, but with the types of the tail that were asked for."""
    cache = in_types(asked, reference.cache.key_type, reference.cache.value_type, tail=True)
    if not cache.recodes:
        return reference
    return replace(reference, cache=replace(cache, residency=reference.cache.residency), same_sums=False, judged=False)


def candidate_specs(
    reference: RunSpec,
    windows: str | None,
    vram_targets: Sequence[int],
    others: Sequence[RunSpec],
    *,
    stored: CacheConfig | None = None,
    spilling: RunSpec | None = None,
) -> tuple[RunSpec, ...]:
    """Windows and caps of what `spilling` says, the reference's own configuration unless given; then other types and backends; with none of them
    DEFAULT_WINDOWS. stored: the cache behind the logits of a file, which take the place of the reference's run: then that is a candidate too, the
    first of those that are listed, or the only one. Raises UsageError."""
    spilling = spilling or reference
    if windows is None and not vram_targets and (spilling.cache.recodes or (not others and stored is None)):
        windows = DEFAULT_WINDOWS
    specs = window_specs(windows, spilling) if windows is not None else ()
    auto = replace(spilling.cache, residency="auto", window_cells=None)
    specs += tuple(
        replace(spilling, label=f"cap {format_size(cap)}{_types_of_tail(auto)}", cache=auto, vram_target=cap) for cap in vram_targets
    )
    if stored is None:
        return (*specs, *others)
    resident = (reference,) if others or not specs else ()
    return tuple(_beside_file(spec, stored) for spec in (*specs, *resident, *others))


def _beside_file(spec: RunSpec, stored: CacheConfig) -> RunSpec:
    """A candidate where no reference of ours tells its types: its name does. Whether the sums are the same, only its run will show."""
    words = kv_words(spec.cache)
    label = spec.label if spec.label.endswith(words) else f"{spec.label}, {words}"
    judged = spec.cache.kept == stored.kept or not (spec.cache.lossy or stored.lossy)
    return replace(spec, label=label, judged=judged, same_sums=False)


def other_specs(
    reference: RunSpec,
    key_types: Sequence[str],
    value_types: Sequence[str],
    backends: Sequence[str],
    configs: Sequence[ModelConfig] = (),
    asked: CacheConfig | None = None,
) -> tuple[RunSpec, ...]:
    """Candidates from the further entries of lists whose first entries are the reference's. The lists of types go in pairs; one
    with a single entry serves all. asked: with the rotation and protection to give them; None: the reference's. Raises UsageError when two longer
    ones differ in length."""
    count = max(len(key_types), len(value_types))
    if any(len(types) not in (1, count) for types in (key_types, value_types)):
        raise UsageError(
            f"--cache-type-k names {len(key_types)} types and --cache-type-v {len(value_types)}; give as many, or one for all: they go in pairs"
        )
    keys, values = (list(types) * (count if len(types) == 1 else 1) for types in (key_types, value_types))
    full = replace(asked or reference.cache, residency=reference.cache.residency)
    typed = [in_types(full, key, value) for key, value in zip(keys[1:], values[1:], strict=True)]
    specs = []
    for cache in typed:
        same = cache == reference.cache
        judged = same or not (cache.lossy or reference.cache.lossy)
        specs.append(replace(reference, label=kv_words(cache), cache=cache, same_sums=same, judged=judged))
    specs += [replace(reference, label=f"backend {name}", backend=name, same_sums=False) for name in backends[1:]]  # type: ignore[arg-type]
    specs += [replace(reference, label=short_words(config), config=config, same_sums=False) for config in configs[1:]]
    return tuple(specs)


def limits_for(spec: RunSpec, asked: Limits | None) -> Limits:
    """Those asked for; else bit equality where the sums are the reference's own, DEFAULT_LIMITS elsewhere, and none for what is not judged."""
    if asked is not None:
        return asked
    if not spec.judged:
        return Limits()
    return Limits(bit_equal=True) if spec.same_sums else DEFAULT_LIMITS
