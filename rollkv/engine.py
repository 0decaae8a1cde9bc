"""Prefill; decode step by step. Knows token ids and no text."""

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rollkv.backend import Array, Backend
from rollkv.budget import Budget
from rollkv.config import CacheConfig, ModelConfig, SamplingParams
from rollkv.errors import CheckFailed, UsageError
from rollkv.gguf_file import GgufFile
from rollkv.kv_cache import KVCache
from rollkv.kv_formats import page_formats, tail_formats
from rollkv.model.decode import Decoder
from rollkv.model.fill import append_random
from rollkv.model.forward import announce, choose, enter, forward, logits, move_to
from rollkv.model.step import Model, take_workspace
from rollkv.phases import Phases
from rollkv.run_plan import plan_on, settled
from rollkv.sampling import check_sampling
from rollkv.weights import load_weights
from rollkv.workspace import MAX_FEW_ROWS, SLAB_BYTES, ropes_of, widest_added, widest_input

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Stats:
    """What a run did so far. Rates are None where nothing was measured."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    ttft_seconds: float | None = None
    window_cells: int = 0
    tail_cells: int = 0
    link_bytes: int = 0  # copied in while decoding
    peak_device_bytes: int | None = None
    cap_bytes: int | None = None
    stop_reason: Literal["length", "stop_token"] | None = None
    stop_token: int | None = None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second (pp)."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def decode_steps(self) -> int:
        """Forward passes of one token: the first new token comes from the prompt's own pass."""
        return max(self.generated_tokens - 1, 0)

    @property
    def decode_rate(self) -> float | None:
        """New tokens a second (tg)."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds > 0 and self.decode_steps else None

    @property
    def link_gbps(self) -> float | None:
        """Tail bytes a second while decoding, in 1e9 bytes."""
        return self.link_bytes / self.decode_seconds / 1e9 if self.decode_seconds > 0 and self.link_bytes else None


@dataclass(frozen=True)
class _Choice:
    """A token that the device is about to choose."""

    outcome: Callable[[], np.ndarray]  # waits; i32 [2]: the id, and how many logits were not finite
    copied_bytes: tuple[int, int]  # up to it


class Engine:
    """One model, one sequence. Everything on the device is allocated by the time the constructor, or `replan`, returns."""

    def __init__(
        self,
        backend: Backend,
        file: GgufFile,
        config: ModelConfig,
        cache: CacheConfig,
        budget: Budget,
        on_load: Progress | None = None,
        phases: Phases | None = None,
    ) -> None:
        phases = phases or Phases()
        self.backend = backend
        self.config = config
        self._tensors = {name: tensor.without_bytes() for name, tensor in file.tensors.items()}  # the file may be closed
        self._allocate(cache, budget)
        phases.ends("memory")
        self._weights = load_weights(backend, config, file.tensors, on_load)
        backend.synchronize()
        phases.ends("weights")
        self._begin()
        # A dropped engine would keep the device's memory, and pinned memory whose addresses the system then hands out again.
        weakref.finalize(self, backend.close).atexit = False

    def replan(self, cache: CacheConfig, vram_target: int | None = None, config: ModelConfig | None = None) -> None:
        """Plans and takes everything but the weights anew, as a fresh load with this configuration would, and forgets the sequence. config: the
        same model with other rotations (with_dual_chunk); None: those it has.

        Raises OutOfMemoryError and UsageError as `load` does; the engine then holds weights alone, and waits for another plan or `close`.
        """
        self._decoder.close()
        self.backend.clear()
        self.backend.limit(vram_target)
        self.config = config or self.config
        budget = plan_on(self.backend, self.config, self._tensors, cache, vram_target, self.budget.rates)
        self.backend.reserve(run_bytes=budget.run_bytes)
        self._allocate(settled(cache, budget), budget)
        self._begin()

    def _allocate(self, cache: CacheConfig, budget: Budget) -> None:
        backend, config = self.backend, self.config
        self.cache_config, self.budget = cache, budget
        backend.reserve_linear(min(cache.ubatch, cache.ctx_size), widest_input(config), widest_added(config), SLAB_BYTES)
        self._workspace = take_workspace(backend, config, cache)
        formats = page_formats(config, cache), tail_formats(config, cache)
        self._cache = KVCache(backend, config, cache, budget, *formats, self._workspace["attention.staged"])

    def _begin(self) -> None:
        self._model = Model(self.backend, self.config, self._weights, self._cache, self._workspace, ropes_of(self.config))
        self._decoder = Decoder(self._model)
        self.stats = Stats(cap_bytes=self.budget.cap_bytes)
        self._position = 0
        self._prompt_cells = 0
        self._copied_bytes = 0, 0

    @property
    def backend_name(self) -> str:
        return self.backend.name

    @property
    def position(self) -> int:
        """Cells cached so far."""
        return self._position

    @property
    def copied_bytes(self) -> tuple[int, int]:
        """(tail to device, device to tail) since memory was planned, by the steps up to the last of these cells."""
        return self._copied_bytes

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees everything on the device and all pinned memory. May be called twice."""
        self.backend.close()

    # -- steps -----------------------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Forgets the sequence, and what an interrupt left of a step; memory stays."""
        self.backend.synchronize()
        self._cache.forget()
        self._position = 0
        self._prompt_cells = 0
        announce(self._model, 0)

    def prefill(self, tokens: Sequence[int], on_progress: Progress | None = None, *, prompt_cells: int = 0) -> np.ndarray:
        """Appends tokens; returns the logits behind the last one, float32 [vocab]. on_progress(tokens done, all tokens).

        prompt_cells: cells of the whole prompt, where it comes in several calls. Dual chunk attention beyond the context that the model was
        trained for depends on it; elsewhere it changes nothing.
        """
        ids = self._checked(tokens, prompt_cells)
        return self._finite(self.backend.read(self._prefill(ids, prompt_cells, on_progress))[0], ids)

    def decode(self, token: int) -> np.ndarray:
        """Appends one token; returns the logits behind it, float32 [vocab]."""
        ids = self._checked([token])
        enter(self._model, ids, self._position)
        out = self._decoder.step(self._position)
        self._advance(1)
        return self._finite(self.backend.read(out)[0], ids)

    def reply(self, token: int, sampling: SamplingParams | None = None) -> Iterator[int]:
        """Appends the token, yields the id chosen behind it, appends that, and so on to the end of the context. `position` counts the cells
        behind which the last id was chosen. Raises as generate_ids."""
        sampling = sampling or SamplingParams()
        check_sampling(sampling)
        ids = self._checked([token])
        enter(self._model, ids, self._position)
        choice = self._append_chosen(sampling)
        self._position += 1
        yield from self._chosen(choice, ids, sampling, self.cache_config.ctx_size - self._position + 1)

    def fill_random(self, num_cells: int, seed: int) -> None:
        """Appends num_cells cells of random keys and values instead of a prompt's: for speeds at a depth whose prefill would take too long.
        Logits behind them mean nothing. A cell depends on seed and position alone. Raises UsageError beyond the context."""
        self._check_room(num_cells)
        for begin in range(0, num_cells, self.cache_config.ubatch):
            count = min(self.cache_config.ubatch, num_cells - begin)
            append_random(self._model, self._position, count, seed)
            self._advance(count)

    def logit_rows(self, tokens: Sequence[int], *, prompt_cells: int = 0) -> Iterator[np.ndarray]:
        """Appends tokens; yields the logits behind each of them in slices of at most 16 rows, float32 [rows, vocab]. prompt_cells as in prefill."""
        ids = self._checked(tokens, prompt_cells)
        self._announce(len(ids), prompt_cells)
        for _, part in self._steps(ids):
            hidden = self._forward(part)
            for start in range(0, len(part), MAX_FEW_ROWS):
                rows = min(MAX_FEW_ROWS, len(part) - start)
                yield self.backend.read(logits(self._model, hidden.rows(rows, start)))

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits behind every token of a fresh sequence, float32 [N, vocab]. Takes N * vocab * 4 bytes; see logit_rows."""
        self.reset()
        return np.concatenate(list(self.logit_rows(tokens)))

    def generate_ids(
        self,
        prompt_ids: Sequence[int],
        num_tokens: int,
        sampling: SamplingParams | None = None,
        stop_ids: frozenset[int] = frozenset(),
        on_progress: Progress | None = None,
    ) -> Iterator[int]:
        """Yields up to num_tokens new ids of a fresh sequence; a stop id ends it and is not yielded. `stats` follows along.

        Raises UsageError when prompt and new tokens do not fit the context, CheckFailed on logits that are not finite.
        """
        if len(prompt_ids) + num_tokens > self.cache_config.ctx_size:
            raise UsageError(
                f"a prompt of {len(prompt_ids)} tokens and {num_tokens} new ones exceed the context of {self.cache_config.ctx_size} cells; "
                "raise --ctx-size or lower --n-predict"
            )
        sampling = sampling or SamplingParams()
        check_sampling(sampling)
        self.reset()
        self.stats = Stats(len(prompt_ids), cap_bytes=self.budget.cap_bytes)
        start = time.perf_counter()
        ids = self._checked(prompt_ids)
        row = self._prefill(ids, len(ids), on_progress)
        move_to(self._model, self._position - 1)
        choose(self._model, row, sampling)
        with closing(self._chosen(self._choice(), ids, sampling, num_tokens)) as chosen:
            for count, token in enumerate(chosen, 1):
                now = time.perf_counter()
                if count == 1:
                    first, copied = now, self.copied_bytes[0]
                    self.stats = replace(
                        self.stats, prefill_seconds=now - start, ttft_seconds=now - start, peak_device_bytes=self._device_bytes()
                    )
                window_cells, tail_cells = self._occupancy()
                self.stats = replace(
                    self.stats,
                    generated_tokens=count,
                    decode_seconds=now - first,
                    link_bytes=self.copied_bytes[0] - copied,
                    window_cells=window_cells,
                    tail_cells=tail_cells,
                )
                if token in stop_ids:
                    self.stats = replace(self.stats, stop_reason="stop_token", stop_token=token, peak_device_bytes=self._device_bytes())
                    return
                if count == num_tokens:
                    self.stats = replace(self.stats, stop_reason="length", peak_device_bytes=self._device_bytes())
                yield token

    # -- inside ----------------------------------------------------------------------------------------------------------------
    def _chosen(self, choice: _Choice, ids: np.ndarray, sampling: SamplingParams, count: int) -> Generator[int, None, None]:
        """Yields `count` ids, the first of `choice`, which is made behind `ids`. While the caller has one, the device works on the next: the host
        is a step behind, where it need not wait for every step anyway. A caller may stop at any id: the cell of a step that was not asked for is
        simply written again. Not into a new page, for it takes the place of one that the repetition of the step before would need (_explain)."""
        for left in range(count - 1, -1, -1):
            begins_page = self._position % self.budget.page_cells == 0
            ahead = self._append_chosen(sampling) if left and self.backend.can_record and not begins_page else None
            token, not_finite = choice.outcome().tolist()
            self._copied_bytes = choice.copied_bytes
            if not_finite:
                self._explain(ids)
            yield token
            if left:
                ids = np.array([token], np.int32)
                choice = ahead or self._append_chosen(sampling)
                self._position += 1

    def _append_chosen(self, sampling: SamplingParams) -> _Choice:
        """Appends the token that the sequence holds at the device's position, the cell behind those of this engine, and chooses the next."""
        self._decoder.step(self._position, sampling)
        return self._choice()

    def _choice(self) -> _Choice:
        outcome = self.backend.read_later(self._model.workspace["outcome"])
        return _Choice(outcome, (self._cache.copied_in_bytes, self._cache.copied_out_bytes))

    def _prefill(self, ids: np.ndarray, prompt_cells: int, on_progress: Progress | None) -> Array:
        """Appends ids; the logits behind the last one, f32 [1, vocab]."""
        self._announce(len(ids), prompt_cells)
        hidden: Array | None = None
        for begin, part in self._steps(ids):
            hidden = self._forward(part)
            if on_progress is not None:
                self.backend.synchronize()
                on_progress(begin + len(part), len(ids))
        assert hidden is not None
        return logits(self._model, hidden.rows(1, hidden.shape[0] - 1))

    def _advance(self, num_cells: int) -> None:
        self._position += num_cells
        self._copied_bytes = self._cache.copied_in_bytes, self._cache.copied_out_bytes

    def _announce(self, num_cells: int, prompt_cells: int) -> None:
        """Tells the device how long the prompt is that these cells are of: up to them, or as long as the caller or an earlier call said."""
        self._prompt_cells = max(self._prompt_cells, self._position + num_cells, prompt_cells)
        announce(self._model, self._prompt_cells)

    def _checked(self, tokens: Sequence[int], prompt_cells: int = 0) -> np.ndarray:
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size == 0:
            raise UsageError("the prompt has no tokens; give at least one")
        wrong = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if wrong.size:
            raise UsageError(f"token id {wrong[0]} is outside the vocabulary of {self.config.vocab_size}; give ids from 0 on")
        self._check_room(max(ids.size, prompt_cells - self._position))
        return ids.astype(np.int32)

    def _check_room(self, num_cells: int) -> None:
        if self._position + num_cells > self.cache_config.ctx_size:
            raise UsageError(
                f"{self._position} cached cells and {num_cells} more exceed the context of {self.cache_config.ctx_size}; raise --ctx-size"
            )

    def _steps(self, ids: np.ndarray, before: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """The ids that each step appends, with how many come before them: a ubatch at most, and none beyond the end of a chunk of dual chunk attention,
        so that all queries of a step see a page in the same band. The first is appended to all cells but the last `before`."""
        position, begin = self._position - before, 0
        chunks = [rope.dual_chunk.stride_cells for rope in self._model.ropes if rope.dual_chunk is not None]
        while begin < len(ids):
            end = begin + min(self.cache_config.ubatch, *(stride - (position + begin) % stride for stride in chunks), len(ids) - begin)
            yield begin, ids[begin:end]
            begin = end

    def _forward(self, ids: np.ndarray) -> Array:
        hidden = forward(self._model, enter(self._model, ids, self._position))
        self._advance(len(ids))
        return hidden

    def _finite(self, row: np.ndarray, ids: np.ndarray) -> np.ndarray:
        if not np.isfinite(row).all():
            self._explain(ids)
        return row

    def _explain(self, ids: np.ndarray) -> None:
        """Repeats the last step, which appended the end of `ids`, layer by layer and raises CheckFailed naming the first layer whose rows are not
        finite."""
        *_, (_, ids) = self._steps(ids, before=len(ids))
        position = self._position - len(ids)

        def check(index: int, hidden: Array) -> None:
            if not np.isfinite(self.backend.read(hidden)).all():
                raise CheckFailed(
                    f"values are not finite behind layer {index} in the step of cells {position} to {self._position - 1}; {advice}"
                )

        advice = "the file may be damaged, or a 16-bit KV type too narrow for it: try --cache-type-k f32 --cache-type-v f32"
        forward(self._model, enter(self._model, ids, position), check)
        raise CheckFailed(
            f"logits are not finite in the step of cells {position} to {self._position - 1}: output norm or output matrix; {advice}"
        )

    def _device_bytes(self) -> int | None:
        """Device memory of the process now; all of it is taken before the first token, so now is as good as at any time."""
        use = self.backend.device_use()
        return None if use is None else use.used_bytes

    def _occupancy(self) -> tuple[int, int]:
        """(cells in the resident window, cells in the tail) now."""
        tail_pages = max(-(-self._position // self.budget.page_cells) - self.budget.window_pages, 0)
        tail = tail_pages * self.budget.page_cells
        return self._position - tail, tail
