"""The options of positions, --dca and those beside it: what they make of a model, and what there is to say about that on stderr."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollkv.errors import UsageError

if TYPE_CHECKING:
    from rollkv.config import CacheConfig, ModelConfig


def positioned(
    config: "ModelConfig",
    cache: "CacheConfig",
    dca: str,
    chunk: int | None,
    local: int | None,
    original: int | None,
    hf_config: Path | None,
) -> "ModelConfig":
    """The model of a file with the rotations that the options ask for. Raises UsageError, ModelFileError and UnsupportedModelError."""
    return variants(config, cache, (dca,), chunk, local, original, hf_config)[0]


def variants(
    config: "ModelConfig",
    cache: "CacheConfig",
    modes: "Sequence[str]",
    chunk: int | None,
    local: int | None,
    original: int | None,
    hf_config: Path | None,
) -> "tuple[ModelConfig, ...]":
    """The same for several values of --dca, in their order. Where there are several, sizes are of those that are not off. Raises UsageError when
    two come to the same, and as positioned."""
    from rollkv import report
    from rollkv.dual_chunk import notes, short_words, with_dual_chunk
    from rollkv.tasks.generate import dual_chunk_request

    found: dict[ModelConfig, str] = {}
    said: list[str] = []
    for mode in modes:
        sizes = (None, None, None) if mode == "off" and len(modes) > 1 else (chunk, local, original)
        request = dual_chunk_request(config, mode, *sizes, hf_config)
        changed = with_dual_chunk(config, request, cache.page_cells)
        if changed in found:
            raise UsageError(f"--dca {found[changed]} and {mode} are the same for this model, {short_words(changed)}; give one of them")
        found[changed] = mode
        said += notes(config, request, changed, cache.ctx_size)
    for line in said:
        report.note(line)
    return tuple(found)
