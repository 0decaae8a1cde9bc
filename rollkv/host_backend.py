"""Backend over reference.py: NumPy, no GPU. Weights are dequantised once; pages, slots and copies are the real thing.

Compute runs at once. Copies run at once too (order="eager"), or as late as record and wait allow (order="late"): tests run both, so
that a missing wait shows as NaN or as stale cells.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from rollkv import reference
from rollkv.backend import Loadable, PageRun, PartStates, Projected, RmsNorm, Stream
from rollkv.config import Dtype, LayerConfig, PageFormat, RopeConfig, SamplingParams
from rollkv.kv_codes import rotate, turn_back
from rollkv.kv_page import read_cells, reencode_cells, write_cells
from rollkv.quants import dequantise
from rollkv.rope import bands
from rollkv.sampling import choose


@dataclass(frozen=True)
class HostArray:
    """A NumPy array under the Array protocol."""

    values: np.ndarray
    dtype: Dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def rows(self, n: int, start: int = 0) -> "HostArray":
        return HostArray(self.values[start : start + n], self.dtype)

    def view(self, shape: tuple[int, ...]) -> "HostArray":
        return HostArray(self.values.reshape(-1)[: prod(shape)].reshape(shape), self.dtype)

    def as_bytes(self) -> "HostArray":
        return HostArray(self.values.reshape(-1).view(np.uint8), "u8")


@dataclass(frozen=True)
class HostWeight:
    """A dequantised matrix."""

    name: str
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True)
class HostEvent:
    """Everything issued on `stream` before position `index`."""

    stream: Stream
    index: int


class HostBackend:
    """See the module. precision np.float64 makes it the oracle; pages hold their own types either way."""

    name = "host"
    gpu = None
    tail_made = None
    can_record = False

    def __init__(self, *, precision: type = np.float32, order: Literal["eager", "late"] = "eager") -> None:
        self._precision = np.dtype(precision)
        self._order = order
        self._queues: dict[Stream, deque[Callable[[], None]]] = {stream: deque() for stream in Stream}
        self._issued = dict.fromkeys(Stream, 0)
        self._done = dict.fromkeys(Stream, 0)

    # -- memory ----------------------------------------------------------------------------------------------------------------
    def prepare(self, rehearse: Callable[[Any], None]) -> None:
        """There is nothing to load."""

    def limit(self, cap_bytes: int | None) -> None:
        """The host's memory has no cap."""

    def reserve(self, *, weight_bytes: int = 0, run_bytes: int = 0) -> None:
        """NumPy allocates array by array."""

    def clear(self) -> None:
        """NumPy frees an array when nobody refers to it any more."""
        self.synchronize()

    def reserve_linear(self, max_rows: int, max_columns: int, max_added: int, slab_bytes: int) -> None:
        """NumPy needs no scratch of ours."""

    def device_use(self) -> None:
        """There is no device."""
        return None

    def empty(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> HostArray:
        if dtype == "f32":
            return HostArray(np.full(shape, np.nan, self._precision), dtype)
        if dtype == "u8":
            return HostArray(np.full(shape, 0xFF, np.uint8), dtype)  # NaN in every page type
        return HostArray(np.full(shape, -1, np.int32), dtype)

    def upload(self, label: str, values: np.ndarray) -> HostArray:
        kind: Dtype = "i32" if values.dtype == np.int32 else "u8" if values.dtype == np.uint8 else "f32"
        return HostArray(values.astype(self._precision) if kind == "f32" else values.copy(), kind)

    def write(self, array: HostArray, values: np.ndarray) -> None:
        array.values.reshape(-1)[: values.size] = values.reshape(-1)

    def read(self, array: HostArray) -> np.ndarray:
        return array.values.copy()

    def read_later(self, array: HostArray) -> Callable[[], np.ndarray]:
        values = array.values.copy()
        return lambda: values

    def load(self, parts: Iterable[Loadable]) -> Generator[HostWeight | HostArray, None, None]:
        for part in parts:
            values = np.empty(part.shape, self._precision)  # a copy: the file is closed after loading
            row = 0
            for tensor in part.tensors:
                values[row : row + tensor.shape[0]] = dequantise(tensor.qtype, tensor.raw, tensor.shape)
                row += tensor.shape[0]
            yield HostArray(values, "f32") if values.ndim == 1 else HostWeight(part.name, values)

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> np.ndarray:
        return np.full((num_pages, page_bytes), 0xFF, np.uint8)

    # -- order -----------------------------------------------------------------------------------------------------------------
    def record(self, stream: Stream) -> HostEvent:
        return HostEvent(stream, self._issued[stream])

    def wait(self, stream: Stream, event: HostEvent) -> None:
        if stream is Stream.COMPUTE:
            self._drain(event.stream, event.index)
        else:
            self._issue(stream, lambda: self._drain(event.stream, event.index))

    def copy_in(self, run: PageRun, host: np.ndarray) -> None:
        def copy() -> None:
            for index in range(run.num_pages):
                run.pool.values[(run.first_slot + index) % run.num_slots] = host[run.first_page + index]  # type: ignore[attr-defined]

        self._issue(Stream.COPY_IN, copy)

    def copy_out(self, run: PageRun, host: np.ndarray) -> None:
        def copy() -> None:
            for index in range(run.num_pages):
                host[run.first_page + index] = run.pool.values[(run.first_slot + index) % run.num_slots]  # type: ignore[attr-defined]

        self._issue(Stream.COPY_OUT, copy)

    def copy_page(self, source: HostArray, source_slot: int, target: HostArray, target_slot: int) -> None:
        target.values[target_slot] = source.values[source_slot]

    def capture(self, work: Callable[[], None]) -> None:
        raise AssertionError("nothing is recorded here")

    def replay(self, graph: Any) -> None:
        raise AssertionError("nothing is recorded here")

    def release(self, graph: Any) -> None:
        raise AssertionError("nothing is recorded here")

    def synchronize(self) -> None:
        for stream in Stream:
            self._drain(stream, self._issued[stream])

    def close(self) -> None:
        for queue in self._queues.values():
            queue.clear()

    def _issue(self, stream: Stream, work: Callable[[], None]) -> None:
        self._queues[stream].append(work)
        self._issued[stream] += 1
        if self._order == "eager":
            self._drain(stream, self._issued[stream])

    def _drain(self, stream: Stream, index: int) -> None:
        while self._done[stream] < index and self._queues[stream]:
            self._done[stream] += 1
            self._queues[stream].popleft()()

    # -- operations ------------------------------------------------------------------------------------------------------------
    def embed(self, sequence: HostArray, position: HostArray, table: HostWeight, scale: float, out: HostArray) -> None:
        first = int(position.values[0])
        out.values[...] = table.values[sequence.values[first : first + out.shape[0]]] * self._precision.type(scale)

    def linear(
        self,
        x: HostArray,
        weights: tuple[HostWeight, ...],
        out: HostArray,
        *,
        norm: RmsNorm | None = None,
        bias: HostArray | None = None,
        add: bool = False,
    ) -> None:
        product = self._product(x.values if norm is None else _normed(x.values, norm), weights)
        if bias is not None:
            product += bias.values
        out.values[...] = out.values + product if add else product

    def feed_forward(
        self,
        x: HostArray,
        norm: RmsNorm,
        gate_up: tuple[HostWeight, ...],
        activation: str,
        down: tuple[HostWeight, ...],
        out: HostArray,
        scratch: HostArray,
        *,
        add: bool = False,
    ) -> None:
        gate, up = np.split(self._product(_normed(x.values, norm), gate_up), 2, axis=1)
        product = self._product(reference.glu(gate, up, activation), down)
        out.values[...] = out.values + product if add else product
        scratch.values[...] = np.nan  # what another backend leaves there is no pages

    def _product(self, x: np.ndarray, weights: tuple[HostWeight, ...]) -> np.ndarray:
        return np.concatenate([reference.linear(x, weight.values, None) for weight in weights], axis=1)

    def rope_table(self, rope: RopeConfig, position: HostArray, prompt_cells: HostArray, out: HostArray) -> None:
        out.values[...] = reference.rope_table(rope, int(position.values[0]), out.shape[1], int(prompt_cells.values[0]))

    def noise(self, out: HostArray, seed: int, first: int) -> None:
        out.values[...] = reference.noise(seed, first, out.values.size).reshape(out.shape)

    def append(
        self,
        projected: Projected,
        position: HostArray,
        runs: tuple[PageRun, ...],
        page: PageFormat,
        first_position: int,
        band: int,
        q: HostArray,
    ) -> None:
        self.queries(projected, page, band, q)
        keys, values = self._cells(projected, page)
        done = 0
        for run in runs:
            for index in range(run.num_pages):
                cell = (first_position + done) % page.page_cells
                count = min(page.page_cells - cell, len(keys) - done)
                raw = run.pool.values[(run.first_slot + index) % run.num_slots]  # type: ignore[attr-defined]
                write_cells(raw, page, cell, keys[done : done + count], values[done : done + count])
                done += count

    def queries(self, projected: Projected, page: PageFormat, band: int, q: HostArray) -> None:
        layer = projected.layer
        x = projected.qkv.values[:, : layer.num_heads * layer.key_dim]
        x = x if projected.q_norm is None else _normed(x, projected.q_norm)
        turned = reference.rope(x, layer.num_heads, projected.table.values[band], layer.rope.style)
        q.values[...] = _in_frame(turned.reshape(-1, layer.key_dim), page.key_rotated).reshape(q.shape)

    def _cells(self, projected: Projected, page: PageFormat) -> tuple[np.ndarray, np.ndarray]:
        """Keys [T, Hkv, Dk], normed and turned, and values [T, Hkv, Dv], in the frame of the page."""
        layer = projected.layer
        queries, cells = layer.num_heads * layer.key_dim, layer.num_kv_heads * layer.key_dim
        _, k, v = np.split(projected.qkv.values, [queries, queries + cells], axis=1)
        k = k if projected.k_norm is None else _normed(k, projected.k_norm)
        keys = reference.rope(k, layer.num_kv_heads, projected.table.values[-1], layer.rope.style)
        keys, values = keys.reshape(-1, page.num_kv_heads, page.key_dim), v.reshape(-1, page.num_kv_heads, page.value_dim)
        return _in_frame(keys, page.key_rotated), _in_frame(values, page.value_rotated)

    def reencode(self, source: PageRun, source_page: PageFormat, target: PageRun, target_page: PageFormat) -> None:
        for index in range(source.num_pages):
            raw = source.pool.values[(source.first_slot + index) % source.num_slots]  # type: ignore[attr-defined]
            other = target.pool.values[(target.first_slot + index) % target.num_slots]  # type: ignore[attr-defined]
            reencode_cells(raw, source_page, other, target_page, self._precision.type)

    def attend_step(
        self,
        projected: Projected,
        position: HostArray,
        runs: tuple[PageRun, ...],
        page: PageFormat,
        scale: float,
        parts: PartStates,
        out: HostArray,
    ) -> None:
        layer, cell = projected.layer, int(position.values[0])
        seen_as = bands(layer.rope, page.page_cells, cell // page.page_cells)
        for run in runs:
            newest = cell // page.page_cells - run.first_page  # where the new cell's page stands in the run, if it does
            held = newest in range(run.num_pages)
            holder = PageRun(run.pool, run.num_slots, (run.first_slot + newest) % run.num_slots, run.first_page + newest, int(held))
            self.append(projected, position, (holder,), page, cell, 0, parts.q.rows(1))
            for band, *pages in seen_as.split(run.first_page, run.num_pages):
                q = parts.q.rows(1, band)
                self.queries(projected, page, band, q)
                for number, (values, total, maximum) in self._page_parts(q, position, run.part(*pages), layer, page, scale):
                    empty = total[0] == 0
                    with np.errstate(divide="ignore"):
                        parts.lse.values[number - parts.first_page] = np.where(empty, -np.inf, maximum[0] + np.log(total[0]))
                    parts.out.values[number - parts.first_page] = values[0] / np.where(empty, 1, total[0])[:, None]
        if runs[-1].first_page + runs[-1].num_pages == parts.first_page + parts.num_parts:
            merged = self._merged(parts.out.values[: parts.num_parts], parts.lse.values[: parts.num_parts])
            out.values[...] = _out_of_frame(merged, page.value_rotated).reshape(1, -1)

    def _merged(self, part_out: np.ndarray, part_lse: np.ndarray) -> np.ndarray:
        """The attention, [H, Dv], whose parts these are: [parts, H, Dv], [parts, H]."""
        merged, _ = reference.merge_states(part_out, part_lse)
        return merged

    def attend_tile(
        self,
        q: HostArray,
        position: HostArray,
        run: PageRun,
        layer: LayerConfig,
        page: PageFormat,
        scale: float,
        state: HostArray,
        scratch: HostArray,
        *,
        last: bool,
        out: HostArray,
    ) -> None:
        scratch.values[...] = 0xFF  # what another backend leaves there is no pages
        saved = state.values[: q.shape[0]].reshape(q.shape[0], layer.num_heads, -1)
        walk_out, walk_sum, walk_max = saved[..., : layer.value_dim], saved[..., layer.value_dim], saved[..., layer.value_dim + 1]
        at, run_begin = np.arange(q.shape[0]) + position.values[0], run.first_page * page.page_cells
        first_cell = np.maximum(at + 1 - layer.sliding_window, 0) if layer.sliding_window else np.zeros_like(at)
        begins = first_cell >= run_begin
        walk_out[begins], walk_sum[begins], walk_max[begins] = 0, 0, -np.inf
        running = (walk_out, walk_sum, walk_max)
        for _, part in self._page_parts(q, position, run, layer, page, scale):
            running = reference.advance_state(running, part)
        walk_out[...], walk_sum[...], walk_max[...] = running
        ends = (at >= run_begin) & (at < run_begin + run.num_pages * page.page_cells)
        if ends.any():
            attended = walk_out[ends] / np.where(walk_sum > 0, walk_sum, 1)[ends, :, None]
            out.values[ends] = _out_of_frame(attended, page.value_rotated).reshape(-1, out.shape[1])

    def _page_parts(self, q: HostArray, position: HostArray, run: PageRun, layer: LayerConfig, page: PageFormat, scale: float) -> Any:
        queries = q.values.reshape(q.shape[0], layer.num_heads, layer.key_dim)
        for index in range(run.num_pages):
            number = run.first_page + index
            raw = run.pool.values[(run.first_slot + index) % run.num_slots]  # type: ignore[attr-defined]
            keys, values = read_cells(raw, page)
            seen = reference.visible_cells(
                int(position.values[0]), q.shape[0], number * page.page_cells, page.page_cells, layer.sliding_window
            )
            yield number, reference.attend_page(queries, keys, values, seen, scale)

    def add(self, x: HostArray, y: HostArray, norm: RmsNorm | None = None) -> None:
        x.values[...] += y.values if norm is None else _normed(y.values, norm)

    def choose(
        self,
        logits: HostArray,
        sampling: SamplingParams,
        sequence: HostArray,
        position: HostArray,
        outcome: HostArray,
        scratch: HostArray,
    ) -> None:
        row, cell = logits.values[0].astype(np.float32), int(position.values[0])
        unsound = int(np.count_nonzero(~np.isfinite(row)))
        chosen = 0 if unsound else choose(row, sequence.values[: cell + 1], sampling, cell)
        sequence.values[cell + 1 : cell + 2] = chosen
        outcome.values[:] = chosen, unsound
        position.values[0] += 1


def _normed(x: np.ndarray, norm: RmsNorm) -> np.ndarray:
    return reference.rms_norm(x, norm.weight.values, norm.eps)


def _in_frame(x: np.ndarray, rotated: bool) -> np.ndarray:
    return rotate(x) if rotated else x


def _out_of_frame(y: np.ndarray, rotated: bool) -> np.ndarray:
    return turn_back(y) if rotated else y
