"""The Backend protocol: every operation the forward pass uses, with its shapes.

Arrays and weights are opaque to the model; each backend brings its own. All activations are float32 [rows, columns]; an operation
writes the output it is given and allocates nothing. Letters: T new tokens, H query heads, Hkv KV heads, G = H / Hkv, Dk and Dv head
sizes of keys and values, P cells of a page, B bands of pages that queries turn differently for (rope.query_bands). Where a page's format says that it is
rotated, keys, values and queries go into its frame (kv_codes.rotate) and what was attended comes out of it, all inside the operations.

Three streams exist: COMPUTE, COPY_IN (tail to staging ring) and COPY_OUT (write-through). Operations run on COMPUTE in the order of
the calls; copies run on the stream they name; `record` and `wait` order streams against each other. A backend may run everything at
once (the host backend does) or later, but never in an order that record and wait forbid.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np

from rollkv.config import Dtype, LayerConfig, PageFormat, RopeConfig, SamplingParams
from rollkv.gguf_header import TensorData


class Stream(Enum):
    COMPUTE = 0
    COPY_IN = 1
    COPY_OUT = 2


class Array(Protocol):
    """Device memory with a shape. `rows(n, start)`: n rows from row `start` on; `view(shape)`: the first elements in another shape; `as_bytes()`: all of
    it as u8 [nbytes]."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Dtype: ...

    @property
    def nbytes(self) -> int: ...

    def rows(self, n: int, start: int = 0) -> "Array": ...

    def view(self, shape: tuple[int, ...]) -> "Array": ...

    def as_bytes(self) -> "Array": ...


class Weight(Protocol):
    """A matrix (or vector) of the model in whatever form the backend multiplies with."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Loadable:
    """Tensors that are loaded as one: vectors one behind the other, or matrices of one type and width one above the other, all but the last with
    whole tiles of 16 rows. paired: the tiles of two matrices of one shape by turns, for feed_forward."""

    tensors: tuple[TensorData, ...]
    paired: bool = False

    @property
    def name(self) -> str:
        return self.tensors[0].name

    @property
    def qtype(self) -> str:
        return self.tensors[0].qtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns) or (columns,) of the whole."""
        return (sum(tensor.shape[0] for tensor in self.tensors), *self.tensors[0].shape[1:])

    @property
    def nbytes(self) -> int:
        """In the file."""
        return sum(tensor.nbytes for tensor in self.tensors)


Operand = Any  # an Array or Weight made by the same backend
Stack = tuple[Any, ...]  # Weights of one backend: matrices with the same input, one above the other: together [N, K]


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over rows, or over every head's columns. weight f32 [n]."""

    weight: Operand
    eps: float


@dataclass(frozen=True)
class Projected:
    """One layer's queries, keys and values as the product left them, and what is still to be done to them."""

    qkv: Operand  # f32 [T, H*Dk + Hkv*Dk + Hkv*Dv]
    layer: LayerConfig
    q_norm: RmsNorm | None  # over every head's Dk columns
    k_norm: RmsNorm | None
    table: Operand  # f32 [R, T, dim/2, 2], of rope_table: turn the first dim columns of every head, of queries by their band, the last one of keys


@dataclass(frozen=True)
class PageRun:
    """Pages first_page .. first_page + num_pages - 1 in the slots (first_slot + i) mod num_slots of one pool."""

    pool: Array  # u8 [num_slots, page_bytes]
    num_slots: int
    first_slot: int
    first_page: int
    num_pages: int

    def part(self, first_page: int, num_pages: int) -> "PageRun":
        """Some of its pages."""
        return replace(
            self, first_slot=(self.first_slot + first_page - self.first_page) % self.num_slots, first_page=first_page, num_pages=num_pages
        )


@dataclass(frozen=True)
class PartStates:
    """Partial attention states of the pages that a decode step walks in one layer: page first_page + i is part i."""

    first_page: int
    num_parts: int
    out: Operand  # f32 [num_parts, H, Dv], normalised
    lse: Operand  # f32 [num_parts, H], natural logarithm
    arrivals: Operand  # i32 [H]: zeros before and after every operation
    q: Operand  # f32 [B, H*Dk]: scratch for the step's queries, which a backend may finish once for all of the step's calls


@dataclass(frozen=True)
class DeviceUse:
    """Device memory of this process: all of it, its parts beside the arena, and what can still be had; bytes."""

    used_bytes: int
    context_bytes: int
    modules_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class TailMade:
    """How the host pages of a plan came to be: the time that making and pinning them took, and how much of it somebody waited for."""

    num_bytes: int
    seconds: float
    waited_seconds: float


@dataclass(frozen=True)
class GpuFacts:
    """The card that computes, as records name it. driver_cuda: the CUDA version that the driver supports, "13.0"."""

    name: str
    memory_bytes: int
    driver_cuda: str
    pci_bus_id: str

    @property
    def card(self) -> str:
        """Card, slot and driver: what measured rates belong to."""
        return f"{self.name} at {self.pci_bus_id}, driver for CUDA {self.driver_cuda}"


class Backend(Protocol):
    """Raises DeviceError when the device fails, OutOfMemoryError when memory cannot be had."""

    @property
    def name(self) -> str: ...

    @property
    def gpu(self) -> GpuFacts | None:
        """None where the CPU computes."""
        ...

    # -- memory ----------------------------------------------------------------------------------------------------------------
    def prepare(self, rehearse: Callable[["Backend"], None]) -> None:
        """Loads what a run needs besides its memory: code, and what libraries keep, so that device_use tells it from then on.
        `rehearse` loads and goes through the run's steps on the backend it is given, which issues nothing and has what these use alone.
        Costs little where all is loaded."""
        ...

    def limit(self, cap_bytes: int | None) -> None:
        """From now on the process may hold cap_bytes on the device; None: what is free."""
        ...

    def reserve(self, *, weight_bytes: int = 0, run_bytes: int = 0) -> None:
        """Takes device memory at once: one piece in which weights live from then on, one for everything else.
        So use is flat after loading, and what the plan says is what is taken."""
        ...

    def clear(self) -> None:
        """Waits for what is under way and gives back everything but the weights: arrays, host pages, scratch, recorded work."""
        ...

    def reserve_linear(self, max_rows: int, max_columns: int, max_added: int, slab_bytes: int) -> None:
        """Takes the scratch of products with up to max_rows rows of up to max_columns columns, whose result is added to up to max_added
        columns: the arrays of workspace.linear_scratch."""
        ...

    def device_use(self) -> DeviceUse | None:
        """None on a backend without a device."""
        ...

    def empty(self, label: str, shape: tuple[int, ...], dtype: Dtype) -> Array:
        """Device memory. Content is undefined (the host backend fills it with NaN). `label` names it in errors and accounts."""
        ...

    def upload(self, label: str, values: np.ndarray) -> Array:
        """Device copy of a float32, int32 or uint8 array."""
        ...

    def write(self, array: Operand, values: np.ndarray) -> None:
        """Small host values into the start of `array`, ordered before later COMPUTE work."""
        ...

    def read(self, array: Operand) -> np.ndarray:
        """Host copy after all COMPUTE work so far. Synchronous."""
        ...

    def read_later(self, array: Operand) -> Callable[[], np.ndarray]:
        """A host copy of at most 64 bytes, as they are after all COMPUTE work so far: the call waits for them. Good until 8 newer ones have
        been asked for."""
        ...

    def load(self, parts: Iterable[Loadable]) -> Generator[Operand, None, None]:
        """Each part in turn: a matrix in multiplication form (quantised types stay quantised), a vector as f32 [columns].
        Reads ahead, so take all, or close the iterator, before other calls. Raises UnsupportedModelError for unknown types."""
        ...

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> Any:
        """Tail memory for num_pages pages (pinned where the backend can). It may be made in the background: the first copy waits for all of it."""
        ...

    @property
    def tail_made(self) -> TailMade | None:
        """None where no pages were asked for, or nobody has waited for them yet."""
        ...

    # -- order -----------------------------------------------------------------------------------------------------------------
    def record(self, stream: Stream) -> Any:
        """An event: the point reached by everything issued on `stream` so far."""
        ...

    def wait(self, stream: Stream, event: Any) -> None:
        """Later work on `stream` starts after `event`."""
        ...

    def copy_in(self, run: PageRun, host: Any) -> None:
        """COPY_IN: the run's pages from `host` (page index = position in `host`) into its slots."""
        ...

    def copy_out(self, run: PageRun, host: Any) -> None:
        """COPY_OUT: the run's pages from their slots to `host`."""
        ...

    def copy_page(self, source: Operand, source_slot: int, target: Operand, target_slot: int) -> None:
        """COMPUTE: one page from one pool to another on the device."""
        ...

    @property
    def can_record(self) -> bool:
        """Waits for host pages, for it depends on them. False on a backend that runs everything at once; the next three are not called there."""
        ...

    def capture(self, work: Callable[[], None]) -> Any:
        """What `work` issues, recorded without running it; it must make other streams wait for COMPUTE first and join them last."""
        ...

    def replay(self, graph: Any) -> None:
        """COMPUTE: runs a recorded piece of work."""
        ...

    def release(self, graph: Any) -> None:
        """Frees a recorded piece of work, after it has run."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None:
        """Frees everything; the backend is unusable afterwards. May be called twice."""
        ...

    # -- operations, all on COMPUTE --------------------------------------------------------------------------------------------
    def embed(self, sequence: Operand, position: Operand, table: Operand, scale: float, out: Operand) -> None:
        """out[t] = scale * table[sequence[position[0] + t]]. sequence i32 [n]; position i32 [1]; table [vocab, hidden]; out f32 [T, hidden]."""
        ...

    def linear(
        self, x: Operand, weights: Stack, out: Operand, *, norm: RmsNorm | None = None, bias: Operand | None = None, add: bool = False
    ) -> None:
        """out = norm(x) weights^T + bias, or out += that. x f32 [T, K]; weights [N, K]; out f32 [T, N]; bias f32 [N].
        A row's bits for T <= 16 do not depend on T or on the other rows."""
        ...

    def feed_forward(
        self,
        x: Operand,
        norm: RmsNorm,
        gate_up: Stack,
        activation: str,
        down: Stack,
        out: Operand,
        scratch: Operand,
        *,
        add: bool = False,
    ) -> None:
        """out = (activation(norm(x) gate^T) * (norm(x) up^T)) down^T, or out += that. x f32 [T, K], which out may be; gate_up [2 F, K], one
        paired matrix or two; down [N, F]; out f32 [T, N]; scratch f32 [T, 2 F]. Bits as those of `linear`."""
        ...

    def rope_table(self, rope: RopeConfig, position: Operand, prompt_cells: Operand, out: Operand) -> None:
        """out[r][t] = (cos, sin) of place * frequency, times the magnitude, for each of the R = rope.rotations(rope) ways in which token t, of cell
        i = position[0] + t, turns. Without dual chunk attention R is 1 and the place is i. With it the places are those of the query in bands 0 to 2,
        i mod s, min(i mod s + s, c) and min(2 s - 1, c), and of the key, i mod s, for s = stride_cells, c = chunk_cells; those of the query come
        times max(1, 1 + 0.1 ln(L / original_context))^2 with L = max(prompt_cells[0], i + 1). position, prompt_cells i32 [1]; out
        f32 [R, T, dim/2, 2]."""
        ...

    def noise(self, out: Operand, seed: int, first: int) -> None:
        """Random numbers first, first + 1, ... of a seed (64 bits) to out, f32 of any shape: mean 0, deviation 1, those of reference.noise."""
        ...

    def append(
        self,
        projected: Projected,
        position: Operand,
        runs: tuple[PageRun, ...],
        page: PageFormat,
        first_position: int,
        band: int,
        q: Operand,
    ) -> None:
        """Norms and turns keys, rounded or coded to the page's types as the values are, into cells first_position + t of the pages of `runs`, which lie in
        order and cover all of them; and queries as for pages of that band into q, f32 [T, H*Dk]. position i32 [1] holds first_position on the
        device."""
        ...

    def queries(self, projected: Projected, page: PageFormat, band: int, q: Operand) -> None:
        """The queries alone, as for pages of this format in another band."""
        ...

    def reencode(self, source: PageRun, source_page: PageFormat, target: PageRun, target_page: PageFormat) -> None:
        """The pages of one run, all of whose cells are written, into those of another in another type. Both are rotated, or neither is."""
        ...

    def attend_step(
        self,
        projected: Projected,
        position: Operand,
        runs: tuple[PageRun, ...],
        page: PageFormat,
        scale: float,
        parts: PartStates,
        out: Operand,
    ) -> None:
        """Decode, T = 1: does what `append` does, if the runs hold the page of cell position[0], and attends to the pages of the runs: one, or two that
        follow each other, each with the query of its band. The last part is the page of cell position[0]. A step calls it for all of its pages from old
        to new; the call whose runs hold the last part merges all of them into out, f32 [1, H*Dv]. Visible cells end at position[0] and, with
        layer.sliding_window = W, begin at position[0] - W + 1; a page without a visible cell gives the state (0, -inf). The runs of one call are of one
        format, those of a step may be of two that are rotated alike. Bits depend on the number of parts, not on how pages are divided into runs. A
        single part needs no state."""
        ...

    def attend_tile(
        self,
        q: Operand,
        position: Operand,
        run: PageRun,
        layer: LayerConfig,
        page: PageFormat,
        scale: float,
        state: Operand,
        scratch: Operand,
        *,
        last: bool,
        out: Operand,
    ) -> None:
        """Prefill, T > 1: walks the run's pages, all of the band of q, from old to new and carries the running state exactly from call to call. Query t sees
        cells up to position[0] + t, and within layer.sliding_window if set. A row's state begins with the call whose run holds its first visible cell, and
        out f32 [T, H*Dv] takes its result no sooner than in the call whose run holds its last; behind the `last` call of a step all rows are there.
        state f32 workspace.state_shape(T, layer): opaque, in a layout of the backend's own. scratch u8 [n], of any content: holds at least one page in f16
        where pages are coded, for a backend that unpacks them before many rows read them."""
        ...

    def add(self, x: Operand, y: Operand, norm: RmsNorm | None = None) -> None:
        """x += y, or x += norm(y). f32 [T, n]."""
        ...

    def choose(
        self, logits: Operand, sampling: SamplingParams, sequence: Operand, position: Operand, outcome: Operand, scratch: Operand
    ) -> None:
        """The id that follows cell position[0], exactly as sampling.choose: sequence[position[0] + 1] = id if there is room for it, outcome =
        (id, number of logits that are not finite), and last of all position[0] += 1, so that a recorded step is right for the next cell too.
        With such logits the id is 0, and the reader of outcome has to refuse it.

        logits f32 [1, vocab]: those behind cell position[0]; sequence i32 [n]: the ids of cells 0 .. position[0], prompt included; position
        i32 [1]; outcome i32 [2]; scratch u8 [workspace.choice_bytes(vocab)]: of any content, before as after."""
        ...
