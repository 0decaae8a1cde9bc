"""What the options of logit-equiv name: tokens, the reference, the configurations to compare."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from math import inf, isfinite
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

from rollkv.cli.options import check_machine, read_prompt
from rollkv.errors import UsageError

if TYPE_CHECKING:
    from rollkv.config import CacheConfig, ModelConfig
    from rollkv.tasks.equiv_specs import RunSpec
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.stored_run import StoredRun

_PROSE_TOKENS = 1024


def stored_reference(path: Path | None, model: "TextModel") -> "StoredRun | None":
    """The logits of --reference, if they can be compared with the model. Raises LogitFileError and UsageError."""
    if path is None:
        return None
    from rollkv.logit_file import LogitFile
    from rollkv.tasks.logit_equiv import check_reference
    from rollkv.tasks.stored_run import stored_run

    logits = LogitFile(path)
    check_reference(logits, model.config.vocab_size)
    return stored_run(logits)


def text_ids(model: "TextModel", text: Path | None, tokens: str | None, save: Path | None) -> list[int]:
    """The tokens to run over. Raises UsageError when the text has fewer than were asked for, OutOfMemoryError when the disk has no room for the
    logits of so many, which is said before the prose is made."""
    from rollkv.counts import parse_count
    from rollkv.tasks.logit_equiv import check_disk, prose_ids

    wanted = None if tokens is None else parse_count(tokens, "--tokens")
    if wanted is not None:
        check_disk(save or Path(gettempdir(), "reference"), wanted, model.config.vocab_size)
    if text is None:
        return prose_ids(model.tokenizer.encode, wanted or _PROSE_TOKENS)
    ids = list(model.tokenizer.encode(read_prompt(None, str(text), "--text") or ""))
    if not ids or (wanted is not None and wanted > len(ids)):
        raise UsageError(
            f"--text {text}: it has {len(ids)} tokens, {wanted or 'one or more'} are wanted; lower --tokens or give a longer text"
        )
    return ids[:wanted]


def spec_lists(
    configs: "Sequence[ModelConfig]", cache: "CacheConfig", keys: str, values: str, backends: str, device: int
) -> "tuple[RunSpec, tuple[RunSpec, ...]]":
    """The reference's configuration, and the candidates that the further entries of the lists name. cache: what was asked for beside their types."""
    from rollkv.counts import split_list
    from rollkv.tasks.equiv_specs import RunSpec, in_types, other_specs
    from rollkv.tasks.generate import cache_config

    key_types, value_types = split_list(keys, "--cache-type-k"), split_list(values, "--cache-type-v")
    names = split_list(backends, "--backend")
    for name in names:
        check_machine(name, device)
    for key, value in zip_longest(key_types, value_types, fillvalue="f16"):
        cache_config(cache.ctx_size, cache_type_k=key, cache_type_v=value)  # refuses unknown names
    first = RunSpec("resident", in_types(replace(cache, residency="full"), key_types[0], value_types[0]), names[0], config=configs[0])  # type: ignore[arg-type]
    return first, other_specs(first, key_types, value_types, names, configs, cache)


def check_types(config: "ModelConfig", asked: "CacheConfig", specs: "Sequence[RunSpec]") -> None:
    """Raises UsageError for types that one of them cannot have, and for rotation or protection that none of them has."""
    from rollkv.kv_formats import check_kv_types

    if not any(spec.cache.lossy for spec in specs):
        kept = {"kv_rotate": asked.kv_rotate, "protect_layers": asked.protect_layers}
        check_kv_types(config, replace(specs[0].cache, **kept))  # type: ignore[arg-type]
    for spec in specs:
        check_kv_types(config, spec.cache)


def check_numbers(noise: float | None, max_kld: float | None, max_nmse: float | None, min_top1: float | None) -> None:
    """Raises UsageError for a margin or limit that is no number of its kind."""
    for option, value, most in (
        ("--noise", noise, inf),
        ("--max-kld", max_kld, inf),
        ("--max-nmse", max_nmse, inf),
        ("--min-top1", min_top1, 1),
    ):
        if value is not None and not (0 <= value <= most and isfinite(value)):  # NaN fails every comparison
            wanted = "a finite number of at least 0" if most == inf else f"a number from 0 to {most:g}"
            raise UsageError(f"{option} {value:g}: the value must be {wanted}")


def sizes(text: str | None) -> tuple[int, ...]:
    """Bytes of the caps of a list, each once; a bare number takes the unit of the last one. Raises UsageError."""
    from rollkv.counts import parse_size_list

    return () if text is None else tuple(dict.fromkeys(parse_size_list(text, "--vram-target")))
