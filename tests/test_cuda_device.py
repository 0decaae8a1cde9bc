"""The CUDA runtime on a real device: memory, accounts, order of streams, copies, failures."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollkv.backend import PageRun, Stream
from rollkv.cuda.nvrtc import KernelError
from rollkv.errors import DeviceError, OutOfMemoryError
from rollkv.units import MIB

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
@pytest.mark.parametrize("size", [1, 3, 4096, 5_000_001, 20_000_000])
def test_what_is_uploaded_is_read_back(cuda: Any, dtype: type, size: int) -> None:
    values = np.random.default_rng(size).integers(0, 200, size).astype(dtype)
    array = cuda.upload("x", values)
    values_before = values.copy()
    values[...] = 0  # the upload must not look at it any more
    np.testing.assert_array_equal(cuda.read(array), values_before)


def test_write_goes_to_the_start_in_order(cuda: Any) -> None:
    array = cuda.upload("x", np.arange(10, dtype=np.int32))
    for value in range(50):
        cuda.write(array, np.array([value, -value], np.int32))
    np.testing.assert_array_equal(cuda.read(array), [49, -49, *range(2, 10)])
    with pytest.raises(ValueError, match="float64"):
        cuda.write(array, np.zeros(2))
    with pytest.raises(ValueError):
        cuda.write(array, np.zeros(11, np.int32))


def test_accounts_agree_with_the_outside(cuda: Any) -> None:
    before = cuda.memory_used_bytes()
    cuda.reserve(run_bytes=100 * MIB)
    assert 100 * MIB <= cuda.memory_used_bytes() - before <= 104 * MIB
    held = cuda.memory_used_bytes()
    cuda.empty("window", (90, MIB), "u8")
    assert cuda.memory_used_bytes() == held, "an array inside the reserved arena takes nothing more"
    assert cuda.device_bytes["window"] == 90 * MIB and cuda.device_bytes["context"] == cuda.context_bytes > 0
    assert cuda.free_bytes() < cuda.facts.total_bytes


def test_prepared_kernels_take_nothing_at_their_first_launch(cuda: Any) -> None:
    from rollkv.backend import RmsNorm
    from rollkv.cuda.kernels import add, round_rows

    x = cuda.upload("x", np.ones((4, 4096), np.float32))
    cuda.launcher.prepare([spec for module in (add, round_rows) for spec in module.instances()])
    cuda.synchronize()
    held = cuda.memory_used_bytes()
    cuda.add(x, x)
    cuda.add(x, x, RmsNorm(x.view((4096,)), 1e-5))
    cuda.synchronize()
    assert cuda.memory_used_bytes() == held


def test_memory_that_is_not_there(cuda: Any) -> None:
    with pytest.raises(OutOfMemoryError, match="much too large"):
        cuda.empty("much too large", (cuda.facts.total_bytes,), "u8")
    array = cuda.upload("x", np.ones(4, np.float32))
    np.testing.assert_array_equal(cuda.read(array), 1)


@pytest.mark.parametrize("chunk_pages", [1, 3, 64])
@pytest.mark.parametrize(("first_slot", "first_page", "num_pages"), [(0, 0, 1), (5, 2, 7), (7, 11, 8), (3, 0, 0)])
def test_pages_go_out_and_come_back(chunk_pages: int, first_slot: int, first_page: int, num_pages: int) -> None:
    from rollkv.cuda.backend import CudaBackend

    page_bytes, slots, random = 96 * 1024, 8, np.random.default_rng([chunk_pages, first_slot, num_pages])
    with CudaBackend(0, host_chunk_bytes=chunk_pages * page_bytes) as cuda:
        values = random.integers(0, 256, (slots, page_bytes)).astype(np.uint8)
        window, ring = cuda.upload("window", values), cuda.upload("ring", np.full_like(values, 0xFF))
        tail = cuda.host_pages("tail", 20, page_bytes)
        assert all(chunk.pinned for chunk in tail().chunks)
        cuda.wait(Stream.COPY_OUT, cuda.record(Stream.COMPUTE))
        cuda.copy_out(PageRun(window, slots, first_slot, first_page, num_pages), tail)
        cuda.wait(Stream.COPY_IN, cuda.record(Stream.COPY_OUT))
        cuda.copy_in(PageRun(ring, slots, 2, first_page, num_pages), tail)
        cuda.wait(Stream.COMPUTE, cuda.record(Stream.COPY_IN))
        got = cuda.read(ring)
        wanted = np.full_like(values, 0xFF)
        for index in range(num_pages):
            wanted[(2 + index) % slots] = values[(first_slot + index) % slots]
        np.testing.assert_array_equal(got, wanted)
        cuda.copy_page(window, 6, ring, 1)
        wanted[1] = values[6]
        np.testing.assert_array_equal(cuda.read(ring), wanted)


def test_wait_orders_streams(cuda: Any) -> None:
    """A copy out behind 200 additions sees all of them, and additions behind a copy in see the copy, without a host wait."""
    count = 4 * MIB
    x, y = cuda.upload("x", np.zeros((1, count), np.float32)), cuda.upload("y", np.ones((1, count), np.float32))
    tail = cuda.host_pages("tail", 1, count * 4)
    run = PageRun(x.view((1, count * 4), "u8"), 1, 0, 0, 1)
    for round_number in range(1, 4):
        for _ in range(200):
            cuda.add(x, y)
        cuda.wait(Stream.COPY_OUT, cuda.record(Stream.COMPUTE))
        cuda.copy_out(run, tail)
        cuda.wait(Stream.COMPUTE, cuda.record(Stream.COPY_OUT))
        cuda.add(x, y)
        cuda.wait(Stream.COPY_IN, cuda.record(Stream.COMPUTE))
        cuda.copy_in(run, tail)
        cuda.wait(Stream.COMPUTE, cuda.record(Stream.COPY_IN))
        np.testing.assert_array_equal(cuda.read(x.rows(1).view((4,))), 200.0 * round_number)
    np.testing.assert_array_equal(cuda.read(x), 600.0)


def test_elapsed_time_grows_with_the_work(cuda: Any) -> None:
    x = cuda.upload("x", np.zeros((1, 8 * MIB), np.float32))
    begin = cuda.record_timed(Stream.COMPUTE)
    cuda.add(x, x)
    middle = cuda.record_timed(Stream.COMPUTE)
    for _ in range(50):
        cuda.add(x, x)
    end = cuda.record_timed(Stream.COMPUTE)
    assert 0 < cuda.elapsed_ms(begin, middle) < cuda.elapsed_ms(begin, end)


def test_wrong_launches_leave_the_device_usable(cuda: Any) -> None:
    from rollkv.cuda.kernels import add

    x = cuda.upload("x", np.ones((1, 8), np.float32))
    with pytest.raises(KernelError, match="arguments"):
        cuda.launcher.launch(add.spec(4), (1, 1, 1), 256, x)
    with pytest.raises(KernelError, match="cannot be launched"):
        cuda.launcher.launch(add.spec(4), (0, 1, 1), 256, x, x, np.int64(8))
    cuda.add(x, x)
    np.testing.assert_array_equal(cuda.read(x), 2)


def test_close_frees_everything_and_may_be_repeated() -> None:
    from rollkv.cuda.backend import CudaBackend

    backend = CudaBackend(0)
    backend.reserve(run_bytes=64 * MIB)
    backend.host_pages("tail", 4, MIB)
    event = backend.record(Stream.COMPUTE)
    backend.close()
    backend.close()
    del event
    with CudaBackend(0) as again:
        assert again.device_bytes["context"] > 0 and again.pinned_bytes == 0


def test_device_index_out_of_range() -> None:
    from rollkv.cuda.backend import CudaBackend

    with pytest.raises(DeviceError, match="--device 99"):
        CudaBackend(99)


def test_a_fault_on_the_device_names_the_kernel_and_closes() -> None:
    """In a process of its own, for the fault ends its context."""
    script = textwrap.dedent("""
        import numpy as np
        from rollkv.cuda.backend import CudaBackend
        from rollkv.cuda.device import Pointer
        from rollkv.cuda.kernels import add
        from rollkv.errors import DeviceError
        backend = CudaBackend(0)
        x = backend.upload("x", np.ones((1, 8), np.float32))
        backend.launcher.launch(add.spec(4), (1, 1, 1), 256, Pointer(16), x, np.int64(8))
        try:
            backend.read(x)
        except DeviceError as error:
            print(error)
        backend.close()
        backend.close()
    """)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "add<4, 256>" in done.stdout and "CUDA_ERROR" in done.stdout and "\n" not in done.stdout.strip()
