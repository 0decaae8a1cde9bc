"""The choice of a token against sampling.py: the same id, always.

A temperature of 1e30 makes the draw uniform over what the filters leave, so that one candidate too many or too few shows in most draws.
"""

import re
from typing import Any

import numpy as np
import pytest

from rollkv import sampling
from rollkv.config import SamplingParams
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.kernels import choose
from rollkv.cuda.nvrtc import KernelError, find_csrc
from rollkv.workspace import CHOICE_BLOCK, choice_bytes

gpu = pytest.mark.gpu
VOCABS = (1, 2, 31, 1023, 1024, 1025, 4099, 49_152, 151_936, 262_147)
FLAT = 1e30


# -- CPU ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_scratch_holds_its_parts(vocab: int) -> None:
    blocks = -(-vocab // CHOICE_BLOCK)
    parts, sizes = choose.scratch_parts(4096, blocks), (CHOICE_BLOCK * 4 * blocks, 123_024, 8 * blocks, 8 * blocks, 4 * blocks, 4 * blocks)
    starts = (parts.keys, parts.search, parts.best, parts.sums, parts.unsound, parts.ties)
    assert all(start + size == following for start, size, following in zip(starts, sizes, starts[1:], strict=False))
    assert starts[-1] + sizes[-1] == 4096 + choice_bytes(vocab)
    assert not any(start % align for start, align in zip(starts, (16, 16, 8, 8, 4, 4), strict=True))


def test_one_digit_a_launch() -> None:
    def cut(**settings: Any) -> tuple[int, int]:
        return choose.cut_of(SamplingParams(temperature=1.0, **settings), 1000)

    assert cut() == cut(top_k=1000) == cut(top_k=2000, min_p=0.5) == (0, 0)
    assert cut(top_k=5) == (5, 3) and cut(top_p=0.5) == cut(top_k=1000, top_p=0.5) == (0, 3)
    assert cut(top_k=5, top_p=0.5) == (5, 5)


def test_both_sides_have_the_same_polynomial() -> None:
    text = re.search(r"kExp2\[\] = \{([^}]*)\}", (find_csrc() / "choose.cu").read_text())
    assert text and tuple(map(float, text[1].split(","))) == sampling._EXP2


def test_shapes_are_checked() -> None:
    def call(logits: tuple[int, ...] = (1, 50), outcome: int = 2, scratch: int = choice_bytes(50)) -> None:
        arrays = (DeviceArray(4096, (8,), "i32"), DeviceArray(4096, (1,), "i32"), DeviceArray(4096, (outcome,), "i32"))
        choose.choose(None, DeviceArray(4096, logits, "f32"), SamplingParams(), *arrays, DeviceArray(4096, (scratch,), "u8"))  # type: ignore[arg-type]

    for name, wrong in (("logits", {"logits": (2, 50)}), ("outcome", {"outcome": 1}), ("scratch", {"scratch": 100})):
        with pytest.raises(KernelError, match=f"choose: {name}"):
            call(**wrong)


# -- GPU ---------------------------------------------------------------------------------------------------------------------------


class Step:
    """One row and one sequence on the device, among memory full of what must not matter."""

    def __init__(self, cuda: Any, logits: np.ndarray, ids: np.ndarray, length: int) -> None:
        self.cuda, self.vocab, self.length = cuda, len(logits), length
        self.logits = cuda.upload("logits", logits[None])
        room = np.full(length + 64, -7, np.int32)
        room[: len(ids)] = ids
        self.memory = cuda.upload("sequence", room)
        self.position = cuda.upload("position", np.array([len(ids) - 1], np.int32))
        self.outcome = cuda.upload("outcome", np.full(2, -9, np.int32))
        self.scratch = cuda.upload("scratch", np.random.default_rng(1).integers(0, 256, choice_bytes(self.vocab), np.uint8))

    def choose(self, params: SamplingParams) -> None:
        self.cuda.choose(self.logits, params, self.memory.view((self.length,)), self.position, self.outcome, self.scratch)

    def at(self, cell: int) -> None:
        self.cuda.write(self.position, np.array([cell], np.int32))

    def read(self) -> tuple[list[int], int]:
        """(outcome, position)."""
        return self.cuda.read(self.outcome).tolist(), int(self.cuda.read(self.position)[0])


def random_row(random: np.random.Generator, vocab: int, kind: int) -> np.ndarray:
    """Finite logits: bell-shaped, with many ties, of two values, with one far ahead, of all magnitudes, zeros of both signs."""
    row = random.standard_normal(vocab)
    if kind == 1:
        row = np.round(row * 12) / 4
    elif kind == 2:
        row = np.where(row > 0.5, 3.25, -1.0)
    elif kind == 3:
        row[random.integers(vocab)] += 25
    elif kind == 4:
        row = row * 10.0 ** random.integers(-38, 39, vocab)
    elif kind == 5:
        row = np.where(row > 1, row, np.where(row > 0, 0.0, -0.0))
    return np.clip(row * 3, -3e38, 3e38).astype(np.float32)


def random_params(random: np.random.Generator, vocab: int) -> SamplingParams:
    """Every filter on and off, near its ends and between them."""
    ks = [0, 1, 2, 40, vocab // 2, vocab - 1, vocab, vocab + 5]
    return SamplingParams(
        temperature=float(random.choice([0.2, 0.8, 1.0, 3.0, FLAT, FLAT])),
        top_k=max(int(random.choice(ks)), 0),
        top_p=float(random.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.9999, 1 - 1e-12])),
        min_p=float(random.choice([0.0, 0.0, 1e-9, 0.05, 0.7, 1.0])),
        repeat_penalty=float(random.choice([1.0, 1.3, 0.5, 1e20])),
        repeat_last=int(random.choice([0, 1, 64, 10**12])),
        seed=int(random.integers(1 << 63)) * 2 + 1,
    )


@gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", range(6))
def test_draws_are_those_of_sampling(cuda: Any, vocab: int, kind: int) -> None:
    random = np.random.default_rng([vocab, kind])
    row, ids = random_row(random, vocab, kind), random.integers(0, vocab, 300).astype(np.int32)
    ids[::3] = ids[0]  # a repeated id is penalised once
    step = Step(cuda, row, ids, 310)
    for _ in range(24 if vocab < 10_000 else 8):
        params = random_params(random, vocab)
        wanted = []
        for cell in random.integers(0, 300, 3):
            step.at(int(cell))
            step.choose(params)
            known = cuda.read(step.memory)[: cell + 1]
            wanted = [sampling.choose(row, known, params, int(cell)), 0]
            assert step.read() == (wanted, cell + 1), params
            assert cuda.read(step.memory)[cell + 1] == wanted[0]
    assert (cuda.read(step.memory)[310:] == -7).all() and np.array_equal(cuda.read(step.logits)[0], row)


@gpu
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_cut_is_at_the_right_token(cuda: Any, vocab: int) -> None:
    """Few tokens of equal weight are left, and a hundred draws show which."""
    random = np.random.default_rng(vocab)
    row = random_row(random, vocab, 1)
    step = Step(cuda, row, np.zeros(1, np.int32), 200)
    for settings in ({"top_k": 3}, {"top_k": 7, "top_p": 0.5}, {"top_p": 3 / vocab}, {"min_p": 0.9}, {"top_k": 40, "min_p": 0.5}):
        params = SamplingParams(temperature=FLAT, seed=vocab, **settings)
        step.at(0)
        for _ in range(100):
            step.choose(params)
        wanted = [sampling.choose(row, (), params, cell) for cell in range(100)]
        assert cuda.read(step.memory)[1:101].tolist() == wanted, settings


@gpu
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", range(6))
def test_greedy(cuda: Any, vocab: int, kind: int) -> None:
    """A chain of choices, each of which penalises those before; the sequence ends before the chain does."""
    random = np.random.default_rng([vocab, kind])
    row, ids = random_row(random, vocab, kind), random.integers(0, vocab, 5).astype(np.int32)
    for params in (
        SamplingParams(),
        SamplingParams(repeat_penalty=1.7, repeat_last=4),
        SamplingParams(repeat_penalty=0.9, repeat_last=1000),
    ):
        step, known = Step(cuda, row, ids, 20), ids.tolist()
        for cell in range(4, 19):
            step.choose(params)
            known.append(sampling.choose(row, known, params, cell))
        assert cuda.read(step.memory)[:20].tolist() == known
        assert step.read() == ([known[-1], 0], 19)
        step.choose(params)
        last = sampling.choose(row, known, params, 19)
        assert step.read() == ([last, 0], 20) and (cuda.read(step.memory)[20:] == -7).all()


@gpu
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(1.0, 5, 0.9, 0.1, 1.5)],
    ids=["greedy", "no filter", "all filters"],
)
def test_logits_that_are_not_finite_are_counted(cuda: Any, value: float, params: SamplingParams) -> None:
    vocab, random = 5000, np.random.default_rng(3)
    for count in (1, 2, 1500, vocab):
        row = random_row(random, vocab, 0)
        row[random.permutation(vocab)[:count]] = value
        step = Step(cuda, row, np.arange(10, dtype=np.int32), 20)
        step.choose(params)
        assert step.read() == ([0, count], 10)
        assert cuda.read(step.memory)[10] == 0
        cuda.write(step.logits, random_row(random, vocab, 0)[None])
        step.choose(params)
        wanted = sampling.choose(cuda.read(step.logits)[0], cuda.read(step.memory)[:11], params, 10)
        assert step.read() == ([wanted, 0], 11)


@gpu
def test_a_recorded_choice_moves_on(cuda: Any) -> None:
    vocab, random = 9001, np.random.default_rng(4)
    row, params = random_row(random, vocab, 0), SamplingParams(2.0, 50, 0.95, 0.001, 1.2, 8, 77)
    step = Step(cuda, row, np.array([3], np.int32), 100)
    step.choose(params)
    graph = cuda.capture(lambda: step.choose(params))
    known = [3, int(cuda.read(step.memory)[1])]
    for cell in range(1, 60):
        cuda.replay(graph)
        known.append(sampling.choose(row, known, params, cell))
    assert cuda.read(step.memory)[:61].tolist() == known
    cuda.release(graph)
