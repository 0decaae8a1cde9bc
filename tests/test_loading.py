"""Loading weights over the double of the driver: every byte arrives where it belongs, whatever the pieces; on a GPU, what the planes hold."""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import engines
from fake_driver import FakeDriver
from oracle_linear import random_weight
from rollkv.backend import Loadable, Stream
from rollkv.cuda import loading, pinned
from rollkv.cuda.copies import Events, SlotRing
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.driver import DriverCalls
from rollkv.cuda.kernels import repack, synth_noise
from rollkv.cuda.weights_gpu import CudaWeight
from rollkv.errors import OutOfMemoryError
from rollkv.gguf_file import open_gguf
from rollkv.gguf_header import TensorData
from rollkv.quants import dequantise, device_bytes, split_planes
from rollkv.synth import open_synth
from rollkv.synth_noise import Noise
from rollkv.synth_shapes import QTYPES

SLAB_BYTES = 3 << 20


def _bytes(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


class Loading:
    """A loader over the double; kernels are replaced by what they are compared with elsewhere. `matrices` holds what was repacked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slot_bytes: int) -> None:
        monkeypatch.setattr(pinned, "SLOT_BYTES", slot_bytes)
        monkeypatch.setattr(repack, "repack", self._repack)
        monkeypatch.setattr(synth_noise, "synth_noise", self._noise)
        self.driver = FakeDriver()
        calls, streams = DriverCalls(self.driver), {stream: 100 + stream.value for stream in Stream}
        self.events = Events(calls, streams)
        self.pinned = pinned.PinnedMemory(calls, 1 << 20, pytest.fail)
        self.slab = DeviceArray(int(calls("cuMemAlloc", SLAB_BYTES)), (SLAB_BYTES,), "u8")
        self.slots = SlotRing(self.events, self.pinned)
        self.loader = loading.WeightLoader(calls, streams, self.events, None, self.slots, self.slab)  # type: ignore[arg-type]
        self.matrices: dict[str, np.ndarray] = {}

    def target(self, tensor: Loadable) -> CudaWeight | DeviceArray:
        if len(tensor.shape) == 1:
            return DeviceArray(int(self.driver.cuMemAlloc(4 * tensor.shape[0])[1]), tensor.shape, "f32")
        memory = DeviceArray(256, (device_bytes(tensor.qtype, tensor.shape),), "u8")  # an address that is never followed
        return CudaWeight(tensor.name, tensor.shape, tensor.qtype, memory)

    def load(self, tensors: list[TensorData]) -> Iterator[tuple[TensorData, Any]]:
        """Each alone."""
        for part, target in self.load_parts([Loadable((tensor,)) for tensor in tensors]):
            yield part.tensors[0], target

    def load_parts(self, parts: list[Loadable]) -> Iterator[tuple[Loadable, Any]]:
        targets = [self.target(part) for part in parts]
        yield from zip(self.loader.load(zip(parts, targets, strict=True)), targets, strict=True)

    def _repack(self, launcher: Any, raw: DeviceArray, weight: CudaWeight, *, first_tile: int, num_rows: int, tile_step: int = 1) -> None:
        whole = self.matrices.setdefault(weight.name, np.full((weight.rows, repack.row_bytes(weight)), 0xEE, np.uint8))
        assert self.slab.ptr <= raw.ptr and raw.ptr + raw.nbytes <= self.slab.ptr + SLAB_BYTES
        rows = np.arange(num_rows)
        whole[(first_tile + rows // 16 * tile_step) * 16 + rows % 16] = _bytes(raw.ptr, raw.nbytes).reshape(num_rows, -1)

    def _noise(self, launcher: Any, noise: Noise, out: DeviceArray, *, first_block: int, num_blocks: int, stream: Stream) -> None:
        assert stream is Stream.COPY_IN
        noise.fill(first_block, _bytes(out.ptr, num_blocks * noise.block_bytes))


@pytest.mark.parametrize("slot_bytes", [64 << 10, 256 << 10, 8 << 20])
@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_synthetic_models_arrive_whole(monkeypatch: pytest.MonkeyPatch, architecture: str, qtype: str, slot_bytes: int) -> None:
    at = Loading(monkeypatch, slot_bytes)
    with open_synth(f"synth:tiny:{qtype},architecture={architecture},vocab=2100") as file:
        for tensor, target in at.load(list(file.tensors.values())):
            if isinstance(target, CudaWeight):
                np.testing.assert_array_equal(at.matrices[tensor.name].reshape(-1), tensor.raw, err_msg=tensor.name)
            else:
                np.testing.assert_array_equal(_bytes(target.ptr, target.nbytes), tensor.raw, err_msg=tensor.name)


@pytest.mark.parametrize("model", engines.MODELS)
def test_files_arrive_whole(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """And through memory that does not grow with them, without a wait for a tensor to end."""
    at = Loading(monkeypatch, 64 << 10)
    with open_gguf(engines.FIXTURES / f"{model}.gguf") as file:
        for tensor, target in at.load(list(file.tensors.values())):
            if isinstance(target, CudaWeight):
                np.testing.assert_array_equal(at.matrices[tensor.name].reshape(-1), tensor.raw)
            else:
                values = dequantise(tensor.qtype, tensor.raw, tensor.shape)
                np.testing.assert_array_equal(_bytes(target.ptr, target.nbytes).view(np.float32), values)
    assert at.pinned.pinned_bytes == pinned.slots_bytes(64 << 10)
    assert "cuStreamSynchronize" not in [name for name, _ in at.driver.calls]


@pytest.mark.parametrize("slot_bytes", [64 << 10, 8 << 20])
def test_stacks_and_pairs(monkeypatch: pytest.MonkeyPatch, slot_bytes: int) -> None:
    at, random = Loading(monkeypatch, slot_bytes), np.random.default_rng(5)
    matrices = [random_weight("Q8_0", (rows, 512), random) for rows in (320, 48, 37)]
    pair = [random_weight("Q4_K", (352, 512), random) for _ in range(2)]
    vectors = [random_weight("F32", (rows,), random) for rows in (7, 30)]
    matrices, pair, vectors = (
        [TensorData(f"{name}{index}", t.qtype, t.shape, t.raw) for index, t in enumerate(group)]
        for name, group in (("m", matrices), ("p", pair), ("v", vectors))
    )
    parts = [Loadable(tuple(matrices)), Loadable(tuple(pair), paired=True), Loadable(tuple(vectors))]
    (_, (_, _), (_, vector)) = at.load_parts(parts)
    np.testing.assert_array_equal(at.matrices["m0"].reshape(-1), np.concatenate([t.raw for t in matrices]))
    turns = np.stack([t.raw.reshape(22, -1) for t in pair], axis=1)
    np.testing.assert_array_equal(at.matrices["p0"].reshape(-1), turns.reshape(-1))
    np.testing.assert_array_equal(_bytes(vector.ptr, vector.nbytes), np.concatenate([t.raw for t in vectors]))


def test_many_pieces_of_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    at, random = Loading(monkeypatch, 64 << 10), np.random.default_rng(3)
    tensors = [random_weight(qtype, (16 * rows + 5, 512), random) for qtype, rows in (("Q8_0", 60), ("Q4_K", 100), ("F16", 20))]
    tensors = [TensorData(f"w{index}", t.qtype, t.shape, t.raw) for index, t in enumerate(tensors)]
    for tensor, _ in at.load(tensors):
        np.testing.assert_array_equal(at.matrices[tensor.name].reshape(-1), tensor.raw)
    assert len(at.matrices) == 3


def test_the_slab_is_written_behind_the_work_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repacking of an earlier load, or a product's weights, may still be in the slab when the next load begins."""
    at, random = Loading(monkeypatch, 64 << 10), np.random.default_rng(6)
    for _ in range(2):
        begin = len(at.driver.calls)
        list(at.load([random_weight("Q8_0", (64, 512), random)]))
        calls = at.driver.calls[begin:]
        first_copy = next(index for index, (name, _) in enumerate(calls) if name.startswith("cuMemcpy"))
        records = {args[0]: args[1] for name, args in calls[:first_copy] if name == "cuEventRecord"}
        waits = [(args[0], records[args[1]]) for name, args in calls[:first_copy] if name == "cuStreamWaitEvent" and args[1] in records]
        assert (100 + Stream.COPY_IN.value, 100 + Stream.COMPUTE.value) in waits


def test_leaving_early_gives_the_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    at, random = Loading(monkeypatch, 64 << 10), np.random.default_rng(4)
    tensors = [random_weight("Q8_0", (200, 512), random) for _ in range(20)]
    for _ in range(3):
        steps = at.load(tensors)
        next(steps)
        steps.close()
    broken = TensorData("w", "IQ1_S", (256,), np.zeros(50, np.uint8))
    with pytest.raises(Exception, match="IQ1_S"):
        list(at.load([*tensors[:2], broken, *tensors[2:]]))
    for _ in range(pinned.NUM_SLOTS):
        at.slots.busy_until(at.slots.take()[0], at.events.record(Stream.COPY_IN))


def test_rows_that_no_slot_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Loading(monkeypatch, 64 << 10)
    with pytest.raises(OutOfMemoryError, match="16 rows of w take"):
        list(at.load([random_weight("F32", (16, 2048), np.random.default_rng(0))]))


# -- on a GPU ------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", QTYPES)
def test_noise_of_the_device_is_the_hosts(cuda: Any, qtype: str) -> None:
    for seed, first in ((0, 0), ((1 << 64) - 3, 5), (12345678901234567, (1 << 33) + 1)):
        noise, blocks = Noise(qtype, 0.013, seed), 70_001
        want = np.empty(blocks * noise.block_bytes, np.uint8)
        noise.fill(first, want)
        out = cuda.upload("noise", np.full(len(want) + 64, 0xEE, np.uint8))
        synth_noise.synth_noise(cuda.launcher, noise, out, first_block=first, num_blocks=blocks)
        got = cuda.read(out)
        np.testing.assert_array_equal(got[: len(want)], want)
        assert (got[len(want) :] == 0xEE).all()


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_device_made_planes_are_the_repacked_host_made_ones(cuda: Any, architecture: str, qtype: str) -> None:
    with open_synth(f"synth:tiny:{qtype},architecture={architecture},hidden=1024,ffn=2048") as file:
        tensors = list(file.tensors.values())
        for tensor, loaded in zip(tensors, list(cuda.load(Loadable((tensor,)) for tensor in tensors)), strict=True):
            if isinstance(loaded, CudaWeight):
                planes = cuda.read(loaded.memory)
                for plane, want in zip(loaded.form.planes, split_planes(tensor.qtype, tensor.raw, tensor.shape), strict=True):
                    np.testing.assert_array_equal(planes[plane.offset : plane.offset + plane.nbytes], want, err_msg=tensor.name)
            else:
                np.testing.assert_array_equal(cuda.read(loaded).view(np.uint8), tensor.raw, err_msg=tensor.name)
