"""From a model file to an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rollkv.backend import Backend
from rollkv.budget import Budget
from rollkv.config import CacheConfig, ModelConfig
from rollkv.dual_chunk import DualChunkRequest, dual_chunk_of, with_dual_chunk
from rollkv.engine import Engine, Progress
from rollkv.errors import DeviceError
from rollkv.gguf_file import GgufFile
from rollkv.host_backend import HostBackend
from rollkv.machine_rates import known_bandwidths
from rollkv.model_config import model_config
from rollkv.phases import Phases
from rollkv.roofline import ASSUMED, Bandwidths
from rollkv.run_plan import plan_on, run_budget, settled
from rollkv.synth import open_model
from rollkv.ubatch import shrunk_words

BackendName = Literal["auto", "cuda", "host"]


def plan(
    path: str | Path, cache: CacheConfig, *, config: ModelConfig | None = None, vram_target: int | None = None, rates: Bandwidths = ASSUMED
) -> Budget:
    """The budget of a run from the header alone; touches no device. config: as for `load`. Raises what loading would raise."""
    with open_model(path) as file:
        return run_budget(config or _as_declared(file, cache), file.tensors, cache, vram_target, None, rates)


def load(
    path: str | Path,
    cache: CacheConfig,
    *,
    config: ModelConfig | None = None,
    vram_target: int | None = None,
    backend: BackendName = "auto",
    device: int = 0,
    portable: bool = False,
    warn: Callable[[str], None] = lambda message: None,
    on_load: Progress | None = None,
    on_tail: Progress = lambda done, total: None,
    phases: Phases | None = None,
    rates: Bandwidths | None = None,
) -> Engine:
    """Opens a model and allocates everything; refuses before the weights load whatever would not fit.

    config: the model of the file, with the rotations that with_dual_chunk gave it; None: with those that the file declares.
    vram_target: bytes this process may hold on the device, context included; None: what is free. portable: the CUDA kernels that
    every card can run, not those for this one. `warn` takes one-line messages, `on_load` and `on_tail` (bytes done, all bytes) of the weights, and of the
    tail while a step waits for it, `phases` the time of each part of loading. rates: of the
    machine, by which window and ring are chosen; None: those measured before, if any.
    Raises ModelFileError, UnsupportedModelError, OutOfMemoryError, DeviceError, UsageError.
    """
    phases = phases or Phases()
    with open_model(path) as file:
        config = config or _as_declared(file, cache)
        phases.ends("header")
        check_length(config, cache.ctx_size, path, warn)
        machine = _open_backend(backend, device, vram_target, portable, warn, on_tail)
        phases.ends("device")
        try:
            engine = load_on(machine, file, config, cache, vram_target, on_load, phases, rates)
            if (words := shrunk_words(cache, config, engine.budget)) is not None:
                warn(words)
        except BaseException:
            machine.close()
            raise
    return engine


def check_length(config: ModelConfig, ctx_size: int, path: str | Path, warn: Callable[[str], None]) -> None:
    """Warns of a context in which keys may be further away than the model was trained for."""
    dual = dual_chunk_of(config)
    furthest, chunks = (ctx_size, "") if dual is None else (min(ctx_size, dual.chunk_cells), f" in chunks of {dual.chunk_cells}")
    if furthest > config.context_length:
        model = config.name or path
        warn(f"the context of {ctx_size} cells{chunks} is longer than the {config.context_length} that {model} was trained for")


def _as_declared(file: GgufFile, cache: CacheConfig) -> ModelConfig:
    return with_dual_chunk(model_config(file), DualChunkRequest(), cache.page_cells)


def load_on(
    machine: Backend,
    file: GgufFile,
    config: ModelConfig,
    cache: CacheConfig,
    vram_target: int | None = None,
    on_load: Progress | None = None,
    phases: Phases | None = None,
    rates: Bandwidths | None = None,
) -> Engine:
    """As load, on an open file and a backend of the caller's, which stays open if this fails."""
    phases = phases or Phases()
    rates = rates or known_bandwidths(None if machine.gpu is None else machine.gpu.card)
    budget = plan_on(machine, config, file.tensors, cache, vram_target, rates)
    phases.ends("code")
    machine.reserve(weight_bytes=budget.weight_bytes, run_bytes=budget.run_bytes)
    return Engine(machine, file, config, settled(cache, budget), budget, on_load, phases)


def _open_backend(
    name: BackendName, device: int, cap_bytes: int | None, portable: bool, warn: Callable[[str], None], on_tail: Progress
) -> Backend:
    if name == "host":
        return HostBackend()
    from rollkv.cuda.backend import CudaBackend  # here, so that host runs and plans do not wait for the bindings

    try:
        return CudaBackend(
            device, cap_bytes=cap_bytes, portable=portable, warn=warn, on_tail=on_tail
        )  # which refuses whatever the plan forgot
    except DeviceError as error:
        if name == "cuda":
            raise
        warn(
            f"NO USABLE GPU ({error}): running the NumPy reference backend on the CPU, which is slow; --backend host says so without this warning"
        )
        return HostBackend()
