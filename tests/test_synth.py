"""Synthetic models: the circuit finds needles in every layout and type, and misses them when attention is damaged; the rest is seen too."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from rollkv import prose, split_mix
from rollkv.config import CacheConfig
from rollkv.engine import Engine
from rollkv.errors import UsageError
from rollkv.gguf_file import GgufFile, open_gguf
from rollkv.host_backend import HostArray, HostBackend
from rollkv.model_config import model_config, required_tensors
from rollkv.quants import dequantise
from rollkv.run_plan import run_budget
from rollkv.synth import open_model, open_synth, write_gguf
from rollkv.synth_circuit import BACKS, LOOK_BACK_SHARPNESS, MATCH_MARGIN, codewords, look_back_pairs
from rollkv.synth_noise import Noise
from rollkv.synth_shapes import ARCHITECTURES, MAX_CONTEXT, MAX_USED_TOKENS, QTYPES, parse_spec
from rollkv.synth_words import tokenizer_metadata, used_tokens
from rollkv.tokenizer import Tokenizer

TOKENS = Tokenizer.from_metadata(tokenizer_metadata(MAX_USED_TOKENS))
PAGE = 64


def engine(
    file: GgufFile, ctx_size: int, *, backend: HostBackend | None = None, window: int | None = None, page_cells: int = PAGE
) -> Engine:
    config = model_config(file)
    cache = CacheConfig(ctx_size, page_cells, "f16", "f16", 512, "full" if window is None else "window", window)
    return Engine(backend or HostBackend(), file, config, cache, run_budget(config, file.tensors, cache, None, None))


@dataclass(frozen=True)
class Needle:
    """The question, the value, and the cells that the planted sentence takes."""

    question: str
    value: str
    first: int
    end: int


def haystack(num_tokens: int, depths: tuple[float, ...], seed: int) -> tuple[list[int], list[Needle]]:
    """Prose of num_tokens with a needle at each depth (0 to 1); no digit is in two values, no word in two keys."""
    draw = random.Random(seed)
    filler = TOKENS.encode(prose.running_text(6 * num_tokens, seed))[: num_tokens - 18 * len(depths)]
    digits, adjectives, nouns = draw.sample("0123456789", 10), draw.sample(prose.ADJECTIVES, 3), draw.sample(prose.NOUNS, 3)
    ids: list[int] = []
    needles = []
    cuts = [0, *(round(depth * len(filler)) for depth in depths), len(filler)]
    for index in range(len(depths)):
        ids += filler[cuts[index] : cuts[index + 1]]
        question = f"The passcode of the {adjectives[index]} {nouns[index]} is"
        value = "".join(digits[index::3])
        text = TOKENS.encode(f" {question} {value}.")
        needles.append(Needle(question, value, len(ids), len(ids) + len(text)))
        ids += text
    return ids + filler[cuts[-2] :], needles


def answer(run: Engine, ids: list[int], needle: Needle) -> str:
    """What the model says behind ids and the needle's question, greedily, as long as the value and two tokens more."""
    row = run.prefill(ids + TOKENS.encode(f"\n\n{needle.question}"))
    said = []
    for _ in range(len(needle.value) + 2):
        said.append(int(row.argmax()))
        row = run.decode(said[-1])
    return TOKENS.decode(said)


# -- the circuit ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_needles_at_every_depth(architecture: str, qtype: str) -> None:
    ids, needles = haystack(1000, (0.0, 0.5, 1.0), seed=len(qtype) + len(architecture))
    with open_synth(f"synth:tiny:{qtype},architecture={architecture}") as file, engine(file, 1100, page_cells=256) as run:
        for needle in needles:
            assert answer(run, ids, needle) == f" {needle.value}."
            ids = []  # the next question goes behind what is cached already


def test_a_needle_in_the_tail_of_four_thousand_tokens() -> None:
    ids, (needle,) = haystack(4000, (0.3,), seed=5)
    with open_synth("synth:tiny,architecture=qwen3,layers=2,seed=3") as file, engine(file, 4096, window=512, page_cells=256) as run:
        assert answer(run, ids, needle) == f" {needle.value}."
        assert run.copied_bytes[0] > 0


class DroppedPage(HostBackend):
    """Attention that passes over one page."""

    def __init__(self, page: int) -> None:
        super().__init__()
        self.page = page

    def _page_parts(self, *args: object) -> Iterator[object]:  # type: ignore[override]
        return (part for part in super()._page_parts(*args) if part[0] != self.page)  # type: ignore[arg-type]

    def _merged(self, part_out: np.ndarray, part_lse: np.ndarray) -> np.ndarray:
        part_out[self.page], part_lse[self.page] = 0, -np.inf
        return super()._merged(part_out, part_lse)


class ShiftedValues(HostBackend):
    """Every value lies one cell late."""

    def append(self, projected, *where) -> None:  # type: ignore[no-untyped-def]
        layer, qkv = projected.layer, projected.qkv.values.copy()
        values = qkv[:, -layer.num_kv_heads * layer.value_dim :]
        values[...] = np.roll(values, 1, axis=0)
        super().append(replace(projected, qkv=HostArray(qkv, "f32")), *where)


class LatePositions(HostBackend):
    """Decode believes to be one cell further on."""

    def rope_table(self, rope, position, prompt_cells, out) -> None:  # type: ignore[no-untyped-def]
        super().rope_table(rope, HostArray(position.values + (out.shape[1] == 1), "i32"), prompt_cells, out)


class FirstPartOnly(HostBackend):
    """Decode forgets to merge."""

    def _merged(self, part_out: np.ndarray, part_lse: np.ndarray) -> np.ndarray:
        return super()._merged(part_out[:1], part_lse[:1])


def test_damaged_attention_misses() -> None:
    ids, (needle,) = haystack(600, (0.4,), seed=11)
    page = (needle.end - 3) // PAGE  # holds a digit at least
    with open_synth("synth:tiny,layers=2") as file:
        undamaged = engine(file, 700)
        want = undamaged.logits(ids)
        undamaged.reset()
        assert answer(undamaged, ids, needle) == f" {needle.value}."
        for backend in (DroppedPage(page), ShiftedValues(), LatePositions(), FirstPartOnly()):
            assert answer(engine(file, 700, backend=backend), ids, needle) != f" {needle.value}.", type(backend).__name__
        # A page without the needle does not hide it; the logits show the damage behind that page.
        other = engine(file, 700, backend=DroppedPage(page + 2))
        difference = np.abs(other.logits(ids) - want).max(axis=1)
        other.reset()
        assert answer(other, ids, needle) == f" {needle.value}."
        assert not difference[: (page + 2) * PAGE].any()
        assert np.median(difference[(page + 3) * PAGE :]) > 0.05


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_matrix_reaches_the_logits_and_leaves_the_needle(architecture: str) -> None:
    ids, (needle,) = haystack(60, (0.5,), seed=2)
    ids += TOKENS.encode(f"\n\n{needle.question} {needle.value[:2]}")
    rng = np.random.default_rng(4)
    with open_synth(f"synth:tiny,architecture={architecture}") as file, engine(file, len(ids)) as run:
        wanted = TOKENS.encode(needle.value[2])[0]
        want = run.logits(ids)
        assert want[-1].argmax() == wanted
        for index, layer in enumerate(run._model.weights.layers):
            layout = run.config.layers[index]
            queries, keys = layout.num_heads * layout.key_dim, layout.num_kv_heads * layout.key_dim
            ((qkv,), (gate_up,), (output,), (down,)) = layer.attn_qkv, layer.ffn_gate_up, layer.attn_output, layer.ffn_down
            matrices = dict(zip(("attn_q", "attn_k", "attn_v"), np.split(qkv.values, [queries, queries + keys]), strict=True))
            matrices |= dict(zip(("ffn_gate", "ffn_up"), np.split(gate_up.values, 2), strict=True))
            for name, values in (*matrices.items(), ("attn_output", output.values), ("ffn_down", down.values)):
                kept = values.copy()
                values *= 1 + 0.02 * rng.standard_normal(values.shape, np.float32)
                noisy = run.logits(ids)
                assert np.median(np.abs(noisy - want).max(axis=1)[8:]) > 1e-3, f"{name} of layer {index}: not seen"
                assert noisy[-1].argmax() == wanted, f"{name} of layer {index}: needle lost"
                values[...] = kept
            values = output.values
            kept = values.copy()
            values[...] = 0
            without = run.logits(ids)
            assert np.abs(without - want).max(axis=1)[8:].min() > 0.05, f"layer {index} without attention: not seen"
            assert (without[-1].argmax() == wanted) == (index not in (0, file.shape.match_layer))
            values[...] = kept
        np.testing.assert_array_equal(run.logits(ids), want)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 176, 256])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_heads_that_look_back_see_one_cell(architecture: str, head_dim: int) -> None:
    shape = parse_spec(f"tiny,architecture={architecture},head_dim={head_dim}")
    distances = np.arange(-max(BACKS), shape.sliding_window if shape.gemma else 1 << 20)
    _, turns = look_back_pairs(shape)
    loss = sum(1 - np.cos(turn * distances) for turn in turns)
    others = np.exp(-LOOK_BACK_SHARPNESS * loss[distances != 0]).sum()
    assert others < 1e-3


@pytest.mark.parametrize("signs,distance", [(16, 4), (24, 8)])
def test_codes_are_far_apart(signs: int, distance: int) -> None:
    codes = codewords(signs).astype(np.float32)
    assert len(codes) >= MAX_USED_TOKENS
    agreement = codes @ codes.T - 2 * signs * np.eye(len(codes))
    assert agreement.max() == signs - 2 * distance
    assert math.log(MAX_CONTEXT) + 10 < MATCH_MARGIN


# -- shapes --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name,parameters",
    [  # as published, gemma-3-4b without its vision part
        ("qwen3-8b", 8_190_735_360),
        ("qwen2.5-14b-1m", 14_770_033_664),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("gemma-3-4b", 3_880_263_168),
    ],
)
def test_public_shapes(name: str, parameters: int) -> None:
    """Opening makes no weights, and what the header says is what the forward pass wants."""
    with open_synth(f"synth:{name}") as file:
        config = model_config(file)
        assert {tensor: data.shape for tensor, data in file.tensors.items()} == required_tensors(config)
        assert sum(math.prod(tensor.shape) for tensor in file.tensors.values()) == parameters
        assert file.size_bytes == sum(tensor.nbytes for tensor in file.tensors.values())  # type: ignore[attr-defined]
        assert config.attention_scale == pytest.approx(file.shape.attention_scale)


@pytest.mark.parametrize("qtype", QTYPES)
def test_a_matrix_of_a_public_shape(qtype: str) -> None:
    with open_synth(f"synth:llama-3.2-1b:{qtype}") as file:
        tensor = file.tensor("blk.1.attn_k.weight")
        values = dequantise(tensor.qtype, tensor.raw, tensor.shape)
        assert values[64:128:].std() == pytest.approx(
            2 / math.sqrt(2048) * math.sqrt(16 / 64), rel=0.05
        )  # 48 of 64 elements are the circuit's
        circuit = values[:64][values[:64, 32:128].any(axis=1) & (np.count_nonzero(values[:64], axis=1) == 1)]
        assert len(circuit) == 48
        assert len(np.unique(values[128:144], axis=0)) > 1
        assert tensor.nbytes == tensor.raw.nbytes  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "spec,words",
    [
        ("synth:qwen9", "'qwen9' is not known; known are qwen3-8b"),
        ("synth:tiny:Q3_K", "'Q3_K' is not known for synthetic models; known are Q8_0, Q4_K, F16"),
        ("synth:tiny,depth=3", "'depth=3' is no option; write key=value with the keys architecture, layers"),
        ("synth:tiny,layers", "'layers' is no option"),
        ("synth:tiny,layers=3,layers=4", "given twice"),
        ("synth:tiny,layers=x", "no whole number"),
        ("synth:tiny,architecture=phi3", "'phi3' is not known for synthetic models; known are llama, qwen2, qwen3, gemma3"),
        ("synth:tiny,layers=1", "layers=1 cannot be built"),
        ("synth:tiny,architecture=gemma3,layers=5", "give 6 to"),
        ("synth:tiny,heads=6,kv-heads=4", "6 heads are no multiple of 4 kv_heads"),
        ("synth:tiny,head_dim=72", "no multiple of 16"),
        ("synth:tiny,head_dim=48", "give 64 to 256"),
        ("synth:tiny:Q4_K,hidden=288", "comes in blocks of 256 columns"),
        ("synth:tiny,hidden=128", "hidden=128 cannot be built"),
        ("synth:tiny,vocab=1000", "vocab=1000 cannot be built"),
        ("synth:tiny,context=5000000", "context=5000000 cannot be built"),
    ],
)
def test_specs_that_cannot_be(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=".") as caught:
        open_synth(spec)
    assert words in str(caught.value)
    assert str(caught.value).startswith(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options", ["heads=3,kv_heads=3", "heads=4,kv_heads=1,head_dim=80", "head_dim=96,hidden=352,ffn=96", "head_dim=256,architecture=gemma3"]
)
def test_odd_shapes_work(options: str) -> None:
    ids, (needle,) = haystack(160, (0.3,), seed=9)
    with open_synth(f"synth:tiny,{options},seed=77") as file, engine(file, 200) as run:
        assert answer(run, ids, needle) == f" {needle.value}."
        assert parse_spec(file.shape.spec) == file.shape


# -- bytes ---------------------------------------------------------------------------------------------------------------------
def test_the_seed_alone_decides() -> None:
    with open_synth("synth:tiny:Q4_K,architecture=qwen2,seed=5") as one, open_synth("synth:tiny:Q4_K,seed=5,architecture=qwen2") as two:
        with open_synth("synth:tiny:Q4_K,architecture=qwen2,seed=6") as other:
            for name in reversed(list(two.tensors)):  # in whatever order they are asked for
                np.testing.assert_array_equal(two.tensors[name].raw, one.tensors[name].raw)
                if one.tensors[name].qtype == "Q4_K":
                    assert (other.tensors[name].raw != one.tensors[name].raw).mean() > 0.15, name


def test_noise_is_split_mix() -> None:
    """Known answers: seed 1234567 gives 6457827717110365317, then 3203168211198807973."""
    assert [split_mix.word(1234567, index) for index in (0, 1)] == [6457827717110365317, 3203168211198807973]
    for seed, block in ((0, 0), (77, 123456), ((1 << 64) - 5, 1 << 40)):
        out = np.full(2 * 34, 0xEE, np.uint8)
        Noise("Q8_0", 0.1, seed).fill(block, out)
        blocks = out.reshape(2, 34)
        np.testing.assert_array_equal(blocks[:, :2].copy().view("<f2"), np.float16(0.1 / math.sqrt((256**2 - 1) / 12)))
        words = [split_mix.word(seed, 4 * block + i) for i in range(8)]
        np.testing.assert_array_equal(blocks[:, 2:].copy().view("<u8").reshape(-1), np.array(words, np.uint64))


@pytest.mark.parametrize("qtype", QTYPES)
def test_noise_is_the_same_in_any_pieces(qtype: str) -> None:
    noise = Noise(qtype, 0.02, 99)
    whole = noise.make(70_000 * 32 // noise.block_weights + 3)
    values = dequantise(qtype, whole, (len(whole) // noise.block_bytes, noise.block_weights))
    assert values.std() == pytest.approx(0.02, rel=2e-3) and abs(values.mean()) < 0.02 / 50
    for first, end in ((0, 1), (1, 3), (3, 5000), (5000, len(whole) // noise.block_bytes)):
        part = np.full((end - first) * noise.block_bytes, 0xEE, np.uint8)
        noise.fill(first, part)
        np.testing.assert_array_equal(part, whole[first * noise.block_bytes : end * noise.block_bytes])


@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pieces_make_the_matrix(qtype: str, architecture: str) -> None:
    """What a device does: noise of some rows, and what is set by hand over it."""
    with open_synth(f"synth:tiny:{qtype},architecture={architecture},vocab=2100") as file:
        for tensor in file.tensors.values():
            if len(tensor.shape) == 1:
                continue
            whole = tensor.raw.reshape(tensor.shape[0], -1)
            for first in range(0, tensor.shape[0], 80):
                part = np.full((min(80, tensor.shape[0] - first), tensor.row_bytes), 0xEE, np.uint8)  # type: ignore[attr-defined]
                blocks = tensor.row_bytes // tensor.noise.block_bytes  # type: ignore[attr-defined]
                tensor.noise.fill(first * blocks, part.reshape(-1))  # type: ignore[attr-defined]
                rows, values = tensor.by_hand(first, len(part))  # type: ignore[attr-defined]
                part[rows - first, : values.shape[1]] = values
                np.testing.assert_array_equal(part, whole[first : first + len(part)])


def test_rows_do_not_repeat() -> None:
    rows = Noise("Q8_0", 0.1, 0).make(1 << 17).reshape(-1, 34 * 2)
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize("spec", ["tiny:Q4_K,architecture=gemma3", "tiny,architecture=qwen2", "tiny:F16,layers=2"])
def test_written_and_read_back(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    ids, _ = haystack(120, (0.5,), seed=1)
    with open_model(f"synth:{spec}") as file:
        size = write_gguf(file, path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]
        assert path.stat().st_size == size
        with open_model(path) as back:
            assert type(back) is GgufFile
            assert list(back.metadata) == list(file.metadata)
            for key, value in file.metadata.items():
                np.testing.assert_equal(back.metadata[key], value)
            assert back.tensors.keys() == file.tensors.keys()
            np.testing.assert_array_equal(engine(back, len(ids)).logits(ids), engine(file, len(ids)).logits(ids))
        with pytest.raises(UsageError, match="is there already"):
            write_gguf(file, path)
        with pytest.raises(UsageError, match="no folder"):
            write_gguf(file, tmp_path / "none" / "model.gguf")


def test_a_write_that_breaks_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_synth("synth:tiny") as file:
        make = file.make

        def failing(name: str) -> np.ndarray:
            if name == "blk.1.ffn_up.weight":
                raise KeyboardInterrupt
            return make(name)

        monkeypatch.setattr(file, "make", failing)
        with pytest.raises(KeyboardInterrupt):
            write_gguf(file, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_written_file_passes_for_any_other(tmp_path: Path) -> None:
    """Package gguf reads it too."""
    from gguf import GGUFReader

    path = tmp_path / "model.gguf"
    with open_synth("synth:tiny") as file:
        write_gguf(file, path)
        reader = GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        assert tensors.keys() == open_gguf(path).tensors.keys()
        for name in ("token_embd.weight", "output_norm.weight", "blk.2.ffn_down.weight"):
            np.testing.assert_array_equal(tensors[name].data.reshape(-1).view(np.uint8), file.tensors[name].raw)


# -- words ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        "The secret of zebra42 is 7316.\n\nThe secret of zebra42 is",
        "Tabs\tand  double blanks, (brackets) and \u201cquotes\u201d; caf\u00e9, \u4f60\u597d \U0001f600!\r\n",
        "<|end_of_text|> in text is text, <|unused_2000|> too.",
        prose.running_text(3000),
    ],
)
def test_text_round_trip(text: str) -> None:
    ids = TOKENS.encode(text)
    assert TOKENS.decode(ids) == text
    assert not any(TOKENS.is_control(token) for token in ids)
    assert max(ids) < len(used_tokens()[0])
    # Merges alone lead to the same tokens as looking whole words up, as engines without that rule do.
    assert Tokenizer.from_metadata(tokenizer_metadata(MAX_USED_TOKENS), pre_tokenizer="dbrx").encode(text) == ids


def test_words_are_tokens_and_digits_are_single() -> None:
    key = f" The passcode of the {prose.ADJECTIVES[3]} {prose.NOUNS[5]} is 90125."
    assert [TOKENS.piece(token) for token in TOKENS.encode(key)] == [*(f" {word}" for word in key.split()[:-1]), " ", *"90125", "."]
    words = prose.running_text(8000).replace("\n\n", " ").split(" ")
    whole = [len(TOKENS.encode(f" {word.strip('.,;:?!')}")) == 1 for word in words]
    assert sum(whole) > 0.98 * len(words)
