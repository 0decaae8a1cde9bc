"""SmolLM2 and gemma3, the real files, where they have been brought: residency bit for bit, fidelity against the host backend, the cap."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollkv.config import CacheConfig
from rollkv.engine import Engine
from rollkv.models import models_dir
from rollkv.startup import load
from rollkv.tasks.generate import open_text_model

pytestmark = pytest.mark.gpu

Make = Callable[..., Engine]
SMOLLM2, GEMMA3 = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"


def real(name: str) -> Path:
    path = models_dir() / name
    if not path.exists():
        pytest.skip(f"{path} has not been brought")
    return path


def prose(path: Path, count: int) -> list[int]:
    """The first `count` tokens of this project's own texts and sources, over and over."""
    root = Path(__file__).resolve().parent.parent
    files = [root / "README.md", *sorted(root.glob("docs/*.md")), *sorted(root.glob("rollkv/**/*.py")), *sorted(root.glob("csrc/*.cu*"))]
    ids = open_text_model(path).tokenizer.encode("\n".join(file.read_text() for file in files))
    return (ids * (1 + count // len(ids)))[:count]


def checksums(engine: Engine, tokens: list[int], prompt: int) -> Iterator[bytes]:
    """The bits of every row of logits, by their hash: 12,000 rows of a vocabulary of 262,144 take 12 GB."""
    for rows in engine.logit_rows(tokens[:prompt]):
        yield from (hashlib.sha256(row.tobytes()).digest() for row in rows)
    for token in tokens[prompt:]:
        yield hashlib.sha256(engine.decode(token).tobytes()).digest()


@pytest.mark.parametrize("name,length", [(SMOLLM2, 6000), (GEMMA3, 12000)])
@pytest.mark.parametrize("ubatch", [4096, 512])
def test_every_window_gives_the_resident_bits(name: str, length: int, ubatch: int, load_cuda: Make) -> None:
    path, decoded = real(name), 300
    tokens = prose(path, length + decoded)
    with load_cuda(path, CacheConfig(length + decoded, ubatch=ubatch)) as engine:
        assert not engine.budget.spills
        pages = engine.budget.total_pages
        resident = list(checksums(engine, tokens, length))
    for window in (1, 2, 5, pages // 2):
        with load_cuda(path, CacheConfig(length + decoded, ubatch=ubatch, residency="window", window_cells=window * 256)) as engine:
            assert engine.budget.window_pages == window
            assert list(checksums(engine, tokens, length)) == resident, f"window of {window} pages"


@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
@pytest.mark.parametrize("prompt", [1000, 8])
def test_logits_stay_with_the_host_backend(name: str, prompt: int, load_cuda: Make) -> None:
    """1,000 tokens through the large products (prompt 1000) or 200 one by one; the host backend keeps float32 throughout."""
    path = real(name)
    tokens = prose(path, 1000 if prompt == 1000 else 208)
    with load(path, CacheConfig(len(tokens), ubatch=512, key_type="f32", value_type="f32"), backend="host") as engine:
        want = np.concatenate(list(engine.logit_rows(tokens)))
    with load_cuda(path, CacheConfig(len(tokens), ubatch=512)) as engine:
        rows = list(engine.logit_rows(tokens[:prompt])) + [engine.decode(token)[None] for token in tokens[prompt:]]
    got = np.concatenate(rows)
    divergence = kl_divergence(want, got)
    errors = ((got.astype(np.float64) - want) ** 2).sum(axis=1) / (want.astype(np.float64) ** 2).sum(axis=1)
    flips = got.argmax(axis=1) != want.argmax(axis=1)
    best = np.sort(want, axis=1)[:, -2:]
    margins = (best[:, 1] - best[:, 0])[flips]
    print(
        f"\n{name} prompt {prompt}: KLD mean {divergence.mean():.2e} max {divergence.max():.2e}; NMSE max {errors.max():.2e}; "
        f"other top token {flips.sum()} of {len(tokens)}, largest margin there {margins.max(initial=0):.4f}"
    )
    assert divergence.mean() <= 5e-5
    assert errors.max() <= 1e-4
    assert margins.max(initial=0) < 0.05, "another top token where it was no near-tie"


def kl_divergence(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Of the second distribution from the first, a row; float64."""
    p, q = (x.astype(np.float64) - x.max(axis=1, keepdims=True) for x in (want, got))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    return (np.exp(p) * (p - q)).sum(axis=1)


LOAD = """
import sys, time
from cuda.bindings import driver
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
memory = driver.cuMemAlloc(1 << 30)[1]
print("busy", flush=True)
while True:
    for _ in range(64):
        driver.cuMemsetD32Async(memory, 7, 1 << 28, 0)
    driver.cuCtxSynchronize()
"""


def test_twenty_runs_beside_a_busy_process_are_equal(load_cuda: Make) -> None:
    path = real(SMOLLM2)
    tokens = prose(path, 2000)
    busy = subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True)
    try:
        assert busy.stdout is not None and busy.stdout.readline() == "busy\n"
        with load_cuda(path, CacheConfig(2100, residency="window", window_cells=256, ubatch=512)) as engine:
            runs = [list(engine.generate_ids(tokens, 100)) for _ in range(20)]
    finally:
        busy.kill()
        busy.wait()
    assert all(run == runs[0] for run in runs)


def test_the_cap_holds_against_an_outside_meter(tmp_path: Path, load_cuda: Make) -> None:
    """Five caps between the smallest window and all resident; NVML, sampled every 20 ms over the whole life of the process."""
    import pynvml

    path = real(SMOLLM2)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    context = 16384
    with load_cuda(path, CacheConfig(context, ubatch=512)) as engine:
        resident = engine.budget.total_bytes
    with load_cuda(path, CacheConfig(context, ubatch=512, residency="window", window_cells=256)) as engine:
        smallest = engine.budget.total_bytes
    windows, tails = [], []
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        cap = int(smallest + part * (resident - smallest)) + (6 << 20)
        command = [
            sys.executable,
            "-m",
            "rollkv",
            "generate",
            "-m",
            str(path),
            "--raw",
            "-p",
            "word " * 8000,
            "-n",
            "50",
            "-c",
            str(context),
        ]
        command += ["--ubatch", "512", "--vram-target", f"{cap / (1 << 20)}MiB", "--ignore-eos", "-o", "json"]
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:  # a pipe would fill up: nobody reads it
            process = subprocess.Popen(command, stdout=out, stderr=err)
            peak = _watch(pynvml, handle, process)
        assert process.returncode == 0, (tmp_path / "err").read_text()
        result = json.loads((tmp_path / "out").read_text())
        windows.append(result["budget"]["window_pages"])
        tails.append(result["budget"]["tail_pages"])
        print(
            f"\ncap {cap / 2**20:.1f} MiB: peak {peak / 2**20:.1f} MiB = {100 * peak / cap:.1f} %, window {windows[-1]} pages, tail {tails[-1]}"
        )
        assert 0 < peak <= cap
    assert windows == sorted(windows) and windows[0] < windows[-1]
    assert tails[-1] == 0


def _watch(pynvml: object, handle: object, process: subprocess.Popen[bytes]) -> int:
    """The most device memory that the process held, until it ends, in bytes."""
    peak = 0
    while process.poll() is None:
        for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):  # type: ignore[attr-defined]
            if entry.pid == process.pid:
                peak = max(peak, entry.usedGpuMemory or 0)
        time.sleep(0.02)
    return peak
