"""The user's own llama-bench beside our rungs: the same tests in a process of its own, whose JSON lines are read back.

Field names are those of llama.cpp's tools/llama-bench (its jsonl printer): n_prompt, n_gen, n_depth, avg_ts, stddev_ts, no_kv_offload,
type_k, type_v, n_gpu_layers, build_commit, build_number. Whatever the program does wrong becomes the `failure` of its result. Prints nothing.
"""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollkv.config import CacheConfig
from rollkv.errors import UsageError
from rollkv.kv_formats import kv_words
from rollkv.synth_shapes import is_spec

LLAMA_BENCH = "llama-bench"
_KNOWN_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")  # of ours, those that its cache has too; its own has one type for all cells


@dataclass(frozen=True)
class Peer:
    """The program, found and executable, the model file that it loads, and the one GPU that it sees: it would spread over all."""

    program: Path
    model: Path
    device: int = 0


@dataclass(frozen=True)
class Setup:
    """Where the peer keeps its layers and its cache. gpu_layers: its -ngl; more than there are means all."""

    label: str
    gpu_layers: int
    kv_on_host: bool = False


@dataclass(frozen=True)
class PeerTest:
    """One call: the prefill of num_prompt tokens and num_steps new ones, each behind `depth` cells; 0 leaves one out."""

    num_prompt: int
    num_steps: int
    depth: int


@dataclass(frozen=True)
class PeerRate:
    """Tokens a second, mean and standard deviation of the repetitions."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class PeerResult:
    """What the peer measured; without rates `failure` says why."""

    setup: Setup
    tests: tuple[PeerTest, ...]
    repetitions: int
    arguments: tuple[str, ...] = ()  # of the last call
    failure: str | None = None
    prefill: PeerRate | None = None
    decode: PeerRate | None = None
    build: str | None = None


def find_peer(text: str, model: Path, device: int) -> Peer:
    """The peer of "llama-bench=PATH" (or a name on the search path). Raises UsageError."""
    name, _, place = text.partition("=")
    if name != LLAMA_BENCH or not place:
        raise UsageError(f"--peer {text!r} is not known; write {LLAMA_BENCH}=PATH, with the path of the program")
    if is_spec(model):
        raise UsageError(
            f"--peer needs a model file, and {model} is made on the fly; write it with 'rollkv synth {str(model).partition(':')[2]} -o FILE' and give -m FILE"
        )
    found = shutil.which(Path(place).expanduser())
    if found is None:
        raise UsageError(f"--peer {text}: there is no program {place} that can be run; build llama.cpp and name its {LLAMA_BENCH}")
    return Peer(Path(found), model, device)


def setups_beside(tail_bytes: float, num_layers: int, layer_bytes: float) -> tuple[Setup, ...]:
    """What to compare a rung with: everything resident; and where the rung has a tail, the cache in host memory, or as many layers there as
    hold about the tail's bytes. layer_bytes: weights and cache of one layer."""
    everything = max(99, num_layers + 1)
    resident = Setup("resident", everything)
    if not tail_bytes:
        return (resident,)
    left = max(num_layers + 1 - math.ceil(tail_bytes / layer_bytes), 0)  # it counts the output matrix as a layer
    return resident, Setup("KV in host RAM (-nkvo 1)", everything, kv_on_host=True), Setup(f"-ngl {left}", left)


def run_peer(
    peer: Peer, setup: Setup, tests: tuple[PeerTest, ...], repetitions: int, cache: CacheConfig, timeout_seconds: float
) -> PeerResult:
    """Runs the tests one after the other, up to the first that fails. Raises nothing of the peer's making."""
    result = PeerResult(setup, tests, repetitions)
    if any(name not in _KNOWN_TYPES for name in cache.types) or cache.recodes or cache.kv_rotate or cache.protect_layers:
        return PeerResult(setup, tests, repetitions, failure=f"{LLAMA_BENCH} has no cache like {kv_words(cache)}")
    for test in tests:
        arguments = _arguments(peer, setup, test, repetitions, cache)
        try:
            lines = _call(peer, arguments, timeout_seconds)
            prefill, decode = (_rate(lines, setup, test, cache, prefill=kind) for kind in (True, False))
        except _PeerFailed as failed:
            return PeerResult(setup, tests, repetitions, arguments, failure=f"{LLAMA_BENCH} {failed}")
        build = f"{lines[-1].get('build_commit')} ({lines[-1].get('build_number')})"
        result = PeerResult(setup, tests, repetitions, arguments, None, prefill or result.prefill, decode or result.decode, build)
    return result


class _PeerFailed(Exception):
    """What the peer did."""


def _arguments(peer: Peer, setup: Setup, test: PeerTest, repetitions: int, cache: CacheConfig) -> tuple[str, ...]:
    options = {
        "-m": peer.model,
        "-p": test.num_prompt,
        "-n": test.num_steps,
        "-d": test.depth,
        "-r": repetitions,
        "-ngl": setup.gpu_layers,
        "-nkvo": int(setup.kv_on_host),
        "-ctk": cache.key_type,
        "-ctv": cache.value_type,
        "-fa": 1,
        "-o": "jsonl",
    }
    return tuple(str(word) for option in options.items() for word in option)


def _call(peer: Peer, arguments: Sequence[str], timeout_seconds: float) -> list[dict[str, object]]:
    """The objects that it printed, one or more."""
    try:
        done = subprocess.run(
            [str(peer.program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": _visible(peer.device, os.environ.get("CUDA_VISIBLE_DEVICES"))},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _PeerFailed(f"did not end within {timeout_seconds:g} s") from None
    except OSError as error:
        raise _PeerFailed(f"cannot be started: {error.strerror or error}") from None
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        ending = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with exit code {done.returncode}"
        raise _PeerFailed(f"{ending}{': ' + said[-1] if said else ''}")
    objects = []
    for line in filter(None, map(str.strip, done.stdout.decode(errors="replace").splitlines())):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise _PeerFailed(f"printed a line that is no JSON object: {line[:60]!r}")
        objects.append(value)
    if not objects:
        raise _PeerFailed("printed nothing")
    return objects


def _visible(device: int, given: str | None) -> str:
    """What CUDA_VISIBLE_DEVICES must be for a process to see our device alone; ours counts within what is given."""
    if given is None:
        return str(device)
    devices = [word.strip() for word in given.split(",")]
    return devices[device] if device < len(devices) else given


def _rate(lines: Sequence[dict[str, object]], setup: Setup, test: PeerTest, cache: CacheConfig, *, prefill: bool) -> PeerRate | None:
    """From the line of that very test; None where it was not asked for."""
    num_prompt, num_steps = (test.num_prompt, 0) if prefill else (0, test.num_steps)
    if not num_prompt + num_steps:
        return None
    wanted = {
        "n_prompt": num_prompt,
        "n_gen": num_steps,
        "n_depth": test.depth,
        "no_kv_offload": setup.kv_on_host,
        "type_k": cache.key_type,
        "type_v": cache.value_type,
    }
    for line in lines:
        if all(line.get(name) == value for name, value in wanted.items()):
            mean, deviation = line.get("avg_ts"), line.get("stddev_ts")
            if isinstance(mean, (int, float)) and isinstance(deviation, (int, float)) and math.isfinite(mean) and mean > 0:
                return PeerRate(float(mean), float(deviation))
            raise _PeerFailed(f"gave no rate: avg_ts {mean!r}, stddev_ts {deviation!r}")
    raise _PeerFailed(f"gave no line with {', '.join(f'{name} {value}' for name, value in wanted.items())}")
