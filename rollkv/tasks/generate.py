"""Text in, text out: prompts with chat templates, the stream of text behind a stream of ids, stop strings; and `load` for programs.

Everything that can be refused is refused before the weights load: a prompt becomes ids from the header alone. Prints nothing.
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from rollkv.chat import render_chat
from rollkv.config import DEFAULT_PAGE_CELLS, DEFAULT_UBATCH, SMALLEST_UBATCH, CacheConfig, KvType, ModelConfig, SamplingParams
from rollkv.counts import check_count, check_whole
from rollkv.dual_chunk import DualChunkRequest, Mode, with_dual_chunk
from rollkv.engine import Engine, Progress
from rollkv.errors import UsageError
from rollkv.hf_config import hf_dual_chunk
from rollkv.model_config import model_config
from rollkv.models import default_model
from rollkv.sampling import check_sampling
from rollkv.startup import BackendName
from rollkv.startup import load as load_engine
from rollkv.stop_strings import StopStrings
from rollkv.synth import open_model
from rollkv.tokenizer import Tokenizer
from rollkv.units import parse_size

DEFAULT_NUM_TOKENS = 256
DEFAULT_LIBRARY_CONTEXT = 4096

StopReason = Literal["length", "stop_token", "stop_string", "interrupted"]
Residency = Literal["auto", "full", "window"]


@dataclass(frozen=True)
class TextRequest:
    """One generation. Exactly one of prompt and prompt_ids is given. chat None: as the model file wants it."""

    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    chat: bool | None = None
    system: str | None = None
    num_tokens: int = DEFAULT_NUM_TOKENS
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class TextModel:
    """What the header of a model file says: enough to make ids of text, and to refuse what cannot run."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer


def open_text_model(path: str | Path, pre_tokenizer: str | None = None) -> TextModel:
    """Reads the header. pre_tokenizer overrides how the file says that text is cut. Raises ModelFileError and UnsupportedModelError."""
    with open_model(path) as file:
        return TextModel(Path(path), model_config(file), Tokenizer.from_metadata(file.metadata, pre_tokenizer=pre_tokenizer))


def build_prompt(model: TextModel, request: TextRequest) -> list[int]:
    """The ids of the prompt, at least one, after every check that needs no device.

    Chat is used where the file carries a chat template, unless the request says otherwise. Raises UsageError.
    """
    check_sampling(request.sampling)
    StopStrings(request.stop)
    check_count(request.num_tokens, "--n-predict")
    if (request.prompt is None) == (request.prompt_ids is None):
        raise UsageError("no prompt, or several: give exactly one of -p TEXT, -f FILE and --prompt-ids IDS")
    if request.prompt_ids is not None:
        ids = _checked_ids(request, model.config.vocab_size)
    else:
        ids = _encode(model.tokenizer, request)
    if not ids:
        raise UsageError("the prompt has no tokens; give at least one character or id")
    return ids


def context_cells(num_prompt: int, num_tokens: int, ctx_size: int | None) -> int:
    """Cells of the context: what prompt and new tokens need unless ctx_size asks for more. Raises UsageError when it asks for less."""
    needed = num_prompt + num_tokens
    if ctx_size is not None and ctx_size < needed:
        raise UsageError(
            f"a prompt of {num_prompt} tokens and {num_tokens} new ones need {needed} cells, but the context has {ctx_size}; "
            f"raise --ctx-size to {needed}, lower --n-predict, or shorten the prompt"
        )
    return needed if ctx_size is None else ctx_size


def cache_config(
    ctx_size: int,
    *,
    residency: str = "auto",
    window_cells: int | None = None,
    ubatch: int | None = DEFAULT_UBATCH,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    cache_type_tail_k: str | None = None,
    cache_type_tail_v: str | None = None,
    kv_rotate: bool = False,
    kv_protect: int = 0,
    page_cells: int = DEFAULT_PAGE_CELLS,
) -> CacheConfig:
    """A checked CacheConfig. ubatch None: 4096, or less where memory is short. Raises UsageError naming the option and the value."""
    for option, value in (("--ctx-size", ctx_size), ("--window", window_cells), ("--ubatch", ubatch), ("page_cells", page_cells)):
        check_count(value, option)
    for option, name, known in (
        ("--residency", residency, get_args(Residency)),
        ("--cache-type-k", cache_type_k, get_args(KvType)),
        ("--cache-type-v", cache_type_v, get_args(KvType)),
        ("--cache-type-tail-k", cache_type_tail_k, (None, *get_args(KvType))),
        ("--cache-type-tail-v", cache_type_tail_v, (None, *get_args(KvType))),
    ):
        if name not in known:
            raise UsageError(f"{option} {name!r} is not known; choose one of {', '.join(sorted(filter(None, known)))}")
    if check_whole(kv_protect, "--kv-protect") < 0:
        raise UsageError(f"--kv-protect {kv_protect}: the value must be 0 or more")
    if residency == "full" and window_cells is not None:
        raise UsageError(f"--residency full keeps every cell in VRAM and --window {window_cells} does not; give one of them")
    rows, smallest = (DEFAULT_UBATCH, SMALLEST_UBATCH) if ubatch is None else (ubatch, None)
    types = cache_type_k, cache_type_v
    tails = (None if tail == kept else tail for tail, kept in zip((cache_type_tail_k, cache_type_tail_v), types, strict=True))
    kept = *tails, kv_rotate, kv_protect
    cache = CacheConfig(ctx_size, page_cells, *types, rows, residency, window_cells, smallest, *kept)  # type: ignore[arg-type]
    if residency == "full" and cache.recodes:
        raise UsageError(
            "--residency full keeps every cell in VRAM and --cache-type-tail-k and -v are for those that leave it; give one of them"
        )
    return cache


def dual_chunk_request(
    config: ModelConfig,
    mode: str = "auto",
    chunk_cells: int | None = None,
    local_cells: int | None = None,
    original_context: int | None = None,
    hf_config: str | Path | None = None,
) -> DualChunkRequest:
    """What with_dual_chunk is asked for this model; hf_config: a config.json, whose declaration takes the place of the file's. Raises UsageError,
    ModelFileError."""
    if mode not in get_args(Mode):
        raise UsageError(f"--dca {mode!r} is not known; choose one of {', '.join(get_args(Mode))}")
    declared = None if hf_config is None else hf_dual_chunk(Path(hf_config), config)
    return DualChunkRequest(mode, chunk_cells, local_cells, original_context, declared)  # type: ignore[arg-type]


class Generation(Iterator[str]):
    """The pieces of one generated text. `ids`, `text`, `stop_reason` and `stop_string` follow along and are final at the end.

    `ids` holds every token that was generated, those of a stop string too; a stop token is in the engine's `stats` only.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, prompt_ids: Sequence[int], request: TextRequest, on_progress: Progress | None = None
    ) -> None:
        self.prompt_ids = list(prompt_ids)
        self.ids: list[int] = []
        self.stop_reason: StopReason | None = None
        self._engine = engine
        self._parts: list[str] = []
        self._stops = StopStrings(request.stop)
        self._decoder = tokenizer.stream()
        stop_ids: frozenset[int] = frozenset() if request.ignore_eos else tokenizer.stop_ids
        self._steps = engine.generate_ids(self.prompt_ids, request.num_tokens, request.sampling, stop_ids, on_progress)
        self._pieces = self._run()

    @property
    def text(self) -> str:
        """All pieces so far."""
        return "".join(self._parts)

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    def __next__(self) -> str:
        piece = next(self._pieces)
        self._parts.append(piece)
        return piece

    def interrupt(self) -> str:
        """Ends the generation where it stands; returns the text that was still held back, which may end in a broken character."""
        self._pieces.close()
        if self.stop_reason is not None:
            return ""
        self.stop_reason = "interrupted"
        rest = self._stops.push(self._decoder.finish()) + self._stops.finish()
        self._parts.append(rest)
        return rest

    def _run(self) -> Generator[str, None, None]:
        for token in self._steps:
            self.ids.append(token)
            if piece := self._stops.push(self._decoder.push(token)):
                yield piece
            if self._stops.matched is not None:
                self.stop_reason = "stop_string"
                return
        rest = self._stops.push(self._decoder.finish())
        rest += self._stops.finish()
        self.stop_reason = "stop_string" if self._stops.matched is not None else self._engine.stats.stop_reason
        if rest:
            yield rest


class TextEngine:
    """A loaded model for programs: text in, text out, and logits. Use it as a context manager, or call close()."""

    def __init__(self, engine: Engine, model: TextModel) -> None:
        self.engine = engine
        self.config = model.config
        self.tokenizer = model.tokenizer
        self._model = model

    def __enter__(self) -> "TextEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the device and all pinned memory. May be called twice."""
        self.engine.close()

    @property
    def plan(self) -> dict[str, object]:
        """The budget: bytes by name, and what stays resident."""
        return self.engine.budget.as_dict()

    def generate(
        self,
        prompt: str,
        max_tokens: int = DEFAULT_NUM_TOKENS,
        *,
        chat: bool | None = None,
        system: str | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        seed: int = 0,
    ) -> Generation:
        """A fresh sequence: yields the new text piece by piece. Raises UsageError at once when the request cannot be honoured."""
        sampling = SamplingParams(temperature, top_k, top_p, min_p, repeat_penalty, seed=seed)
        request = TextRequest(prompt, None, chat, system, max_tokens, sampling, tuple(stop), ignore_eos)
        ids = build_prompt(self._model, request)
        context_cells(len(ids), max_tokens, self.engine.cache_config.ctx_size)
        return Generation(self.engine, self.tokenizer, ids, request)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits behind every token of a fresh sequence: float32 [N, vocab]."""
        return self.engine.logits(tokens)


def load(
    path: str | Path | None = None,
    *,
    vram_target: int | str | None = None,
    ctx_size: int | None = None,
    residency: str = "auto",
    window_cells: int | None = None,
    ubatch: int | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    cache_type_tail_k: str | None = None,
    cache_type_tail_v: str | None = None,
    kv_rotate: bool = False,
    kv_protect: int = 0,
    page_cells: int = DEFAULT_PAGE_CELLS,
    dca: str = "auto",
    dca_chunk: int | None = None,
    dca_local: int | None = None,
    rope_original_ctx: int | None = None,
    hf_config: str | Path | None = None,
    backend: BackendName = "auto",
    device: int = 0,
    warn: Callable[[str], None] | None = None,
) -> TextEngine:
    """Loads a GGUF model; without a path, the small default model if it was brought.

    vram_target: bytes, or text such as "6GiB": what the process may hold on the device, all included. ctx_size: cells of the context,
    4096 unless given, or what the model was trained for if that is less. ubatch: prompt tokens in one pass, 4096 unless given, or less where
    memory is short. cache_type_*, kv_rotate, kv_protect: docs/kv-types.md. dca and what stands behind it: dual chunk attention, docs/dca.md. warn
    takes one-line messages; without it they are Python warnings.
    Raises ModelFileError, UnsupportedModelError, OutOfMemoryError, DeviceError, UsageError.
    """
    tell = warn or (lambda message: warnings.warn(message, RuntimeWarning, stacklevel=3))
    model = open_text_model(default_model() if path is None else path)
    for message in model.tokenizer.warnings:
        tell(message)
    cache = cache_config(
        min(DEFAULT_LIBRARY_CONTEXT, model.config.context_length) if ctx_size is None else ctx_size,
        residency=residency,
        window_cells=window_cells,
        ubatch=ubatch,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        cache_type_tail_k=cache_type_tail_k,
        cache_type_tail_v=cache_type_tail_v,
        kv_rotate=kv_rotate,
        kv_protect=kv_protect,
        page_cells=page_cells,
    )
    request = dual_chunk_request(model.config, dca, dca_chunk, dca_local, rope_original_ctx, hf_config)
    model = replace(model, config=with_dual_chunk(model.config, request, page_cells))
    cap = parse_size(vram_target, "vram_target") if isinstance(vram_target, str) else vram_target
    engine = load_engine(model.path, cache, config=model.config, vram_target=cap, backend=backend, device=device, warn=tell)
    return TextEngine(engine, model)


def _checked_ids(request: TextRequest, vocab_size: int) -> list[int]:
    assert request.prompt_ids is not None
    if request.chat or request.system is not None:
        raise UsageError("--prompt-ids are taken as they are: --chat and --system need a prompt of text")
    for token in request.prompt_ids:
        if not 0 <= token < vocab_size:
            raise UsageError(f"--prompt-ids: {token} is outside the vocabulary of {vocab_size} tokens; give ids from 0 to {vocab_size - 1}")
    return list(request.prompt_ids)


def _encode(tokenizer: Tokenizer, request: TextRequest) -> list[int]:
    assert request.prompt is not None
    template = tokenizer.chat_template
    if request.chat and not template:
        raise UsageError("--chat: the model file carries no chat template; use --raw and write the prompt as the model was trained on it")
    if not template or request.chat is False:
        if request.system is not None:
            raise UsageError("--system needs a chat template; this run takes the prompt raw")
        return tokenizer.encode(request.prompt)
    # What users write is shielded: control tokens spelt out in it stay text.
    messages = [] if request.system is None else [{"role": "system", "content": tokenizer.shield(request.system)}]
    messages.append({"role": "user", "content": tokenizer.shield(request.prompt)})
    bos, eos = _spelling(tokenizer, tokenizer.bos_id), _spelling(tokenizer, tokenizer.eos_id)
    rendered = render_chat(template, messages, add_generation_prompt=True, bos_token=bos, eos_token=eos)
    return tokenizer.encode_rendered(rendered)


def _spelling(tokenizer: Tokenizer, token: int | None) -> str:
    """How a template writes the token; nothing where the file has none."""
    return "" if token is None else tokenizer.piece(token)
