"""The Backend protocol: every operation the forward pass uses, with its shapes.

Arrays and weights are opaque to the model; each backend brings its own. All activations are float32 [rows, columns]; an operation
writes the output it is given and allocates nothing. Letters: T new tokens, H query heads, Hkv KV heads, G = H / Hkv, Dk and Dv head
sizes of keys and values, P cells of a page.

Three streams exist: COMPUTE, COPY_IN (tail to staging ring) and COPY_OUT (write-through). Operations run on COMPUTE in the order of
the calls; copies run on the stream they name; `record` and `wait` order streams against each other. A backend may run everything at
once (the host backend does) or later, but never in an order that record and wait forbid.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from rollkv.config import Dtype, LayerConfig, PageFormat, RopeConfig
from rollkv.gguf_header import TensorData


class Stream(Enum):
    COMPUTE = 0
    COPY_IN = 1
    COPY_OUT = 2


class Array(Protocol):
    """Device memory with a shape. `rows(n, start)`: n rows from row `start` on; `view(shape)`: the first elements in another shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Dtype: ...

    @property
    def nbytes(self) -> int: ...

    def rows(self, n: int, start: int = 0) -> "Array": ...

    def view(self, shape: tuple[int, ...]) -> "Array": ...


class Weight(Protocol):
    """A matrix (or vector) of the model in whatever form the backend multiplies with."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


Operand = Any  # an Array or Weight made by the same backend


@dataclass(frozen=True)
class PageRun:
    """Pages first_page .. first_page + num_pages - 1 in the slots (first_slot + i) mod num_slots of one pool."""

    pool: Array  # u8 [num_slots, page_bytes]
    num_slots: int
    first_slot: int
    first_page: int
    num_pages: int


@dataclass(frozen=True)
class DeviceUse:
    """Device memory of this process: all of it, its parts beside the arena, and what can still be had; bytes."""

    used_bytes: int
    context_bytes: int
    modules_bytes: int
    free_bytes: int


class Backend(Protocol):
    """Raises DeviceError when the device fails, OutOfMemoryError when memory cannot be had."""

    @property
    def name(self) -> str: ...

    # -- memory ----------------------------------------------------------------------------------------------------------------
    def reserve(self, *, weight_bytes: int = 0, run_bytes: int = 0) -> None:
        """Takes device memory at once: one piece in which weights live from then on, one for everything else.
        So use is flat after loading, and what the plan says is what is taken."""
        ...

    def clear(self) -> None:
        """Waits for what is under way and gives back everything but the weights: arrays, host pages, scratch, recorded work."""
        ...

    def reserve_linear(self, max_rows: int, max_columns: int, slab_bytes: int) -> None:
        """Takes the scratch of `linear` for up to max_rows rows of up to max_columns columns: the arrays of workspace.linear_scratch."""
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

    def load_weight(self, tensor: TensorData) -> Weight:
        """A matrix in multiplication form: quantised types stay quantised. Raises UnsupportedModelError for unknown types."""
        ...

    def load_vector(self, tensor: TensorData) -> Array:
        """A norm weight or bias as f32 [columns]."""
        ...

    def host_pages(self, label: str, num_pages: int, page_bytes: int) -> Any:
        """Tail memory for num_pages pages (pinned where the backend can)."""
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
        """False on a backend that runs everything at once; the next three are not called there."""
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
    def embed(self, tokens: Operand, table: Operand, scale: float, out: Operand) -> None:
        """out[t] = scale * table[tokens[t]]. tokens i32 [T]; table [vocab, hidden]; out f32 [T, hidden]."""
        ...

    def rms_norm(self, x: Operand, weight: Operand, eps: float, out: Operand) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight over the last axis of `weight`.
        weight f32 [n]; x, out f32 [T, m*n]: every run of n columns is normalised by itself (m = 1, or heads for query/key norm).
        out may be x."""
        ...

    def linear(self, x: Operand, weight: Operand, out: Operand, bias: Operand | None = None) -> None:
        """out = x weight^T + bias. x f32 [T, K]; weight [N, K]; out f32 [T, N]; bias f32 [N].
        A row's bits for T <= 16 do not depend on T or on the other rows."""
        ...

    def rope_table(self, rope: RopeConfig, position: Operand, out: Operand) -> None:
        """out[t] = (cos, sin) of (position[0] + t) * frequency, times the magnitude. position i32 [1]; out f32 [T, dim/2, 2]."""
        ...

    def rope(self, x: Operand, num_heads: int, table: Operand, rope: RopeConfig) -> None:
        """Rotates the first rope.dim columns of every head in place. x f32 [T, num_heads*D]; table f32 [T, dim/2, 2]."""
        ...

    def append(self, k: Operand, v: Operand, position: Operand, runs: tuple[PageRun, ...], page: PageFormat, first_position: int) -> None:
        """Cells first_position + t of k f32 [T, Hkv*Dk] and v f32 [T, Hkv*Dv], rounded to the page's types, into the pages of `runs`,
        which lie in order and cover all of them. position i32 [1] holds first_position on the device."""
        ...

    def attend_rows(
        self,
        q: Operand,
        position: Operand,
        run: PageRun,
        base_page: int,
        layer: LayerConfig,
        page: PageFormat,
        scale: float,
        part_out: Operand,
        part_lse: Operand,
    ) -> None:
        """Decode, T = 1: the partial state of every page of the run, stored at index (page - base_page) of the partials.
        Visible cells end at position[0] and, with layer.sliding_window = W, begin at position[0] - W + 1; a page without a visible
        cell gives (0, -inf). q f32 [1, H*Dk]; part_out f32 [pages, H, Dv] normalised; part_lse f32 [pages, H] natural logarithm."""
        ...

    def merge_rows(self, part_out: Operand, part_lse: Operand, num_parts: int, layer: LayerConfig, out: Operand) -> None:
        """Merges partial states 0 .. num_parts - 1 in index order. out f32 [1, H*Dv]."""
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
        *,
        first: bool,
        last: bool,
        out: Operand,
    ) -> None:
        """Prefill, T > 1: walks the run's pages from old to new and carries the running state exactly from call to call; `first` starts
        it, `last` writes out f32 [T, H*Dv]. Query t sees cells up to position[0] + t, and within layer.sliding_window if set.
        state f32 [T, H*(Dv + 8)]: opaque, in a layout of the backend's own."""
        ...

    def glu(self, gate: Operand, up: Operand, activation: str, out: Operand) -> None:
        """out = activation(gate) * up. f32 [T, ffn]; out may be gate."""
        ...

    def add(self, x: Operand, y: Operand) -> None:
        """x += y. f32 [T, n]."""
        ...
