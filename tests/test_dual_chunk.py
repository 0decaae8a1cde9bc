"""Dual chunk attention on the host: by its definition, pair by pair; where it is plain RoPE; wherever pages lie; and needles through many chunks."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

import engines
import race_detector
import test_synth
from rollkv.config import DualChunk, ModelConfig, RopeConfig
from rollkv.engine import Engine
from rollkv.errors import RollkvError, UnsupportedModelError, UsageError
from rollkv.gguf_file import open_gguf
from rollkv.host_backend import HostBackend
from rollkv.model_config import model_config
from rollkv.rope import Bands, bands, check_dual_chunks, rope_frequencies
from rollkv.run_plan import run_budget
from rollkv.stream_plan import RingShape
from rollkv.synth import open_synth

PAGE = 16
CHUNK = DualChunk(chunk_cells=64, local_cells=16, original_context=50)  # numbered anew every 48 cells; 160 cells have 3.3 chunks
FAR = 1 << 20  # an original context that no test exceeds


# -- the definition ------------------------------------------------------------------------------------------------------------


def distance(query: int, key: int, chunk: DualChunk) -> int:
    """Between two cells, as it is defined: by their numbers, and how many chunks lie between."""
    stride, largest = chunk.chunk_cells - chunk.local_cells, chunk.chunk_cells
    chunks = query // stride - key // stride
    if chunks == 0:
        return query - key
    return min(query % stride + stride if chunks == 1 else 2 * stride - 1, largest) - key % stride


def temperature(chunk: DualChunk, length: int) -> float:
    return max(1.0, 1.0 + 0.1 * math.log(length / chunk.original_context))


@pytest.mark.parametrize("chunk", [CHUNK, DualChunk(49, 1, FAR), DualChunk(80, 40, FAR)], ids=str)
def test_local_distances_are_true_and_none_exceeds_the_chunk(chunk: DualChunk) -> None:
    for query in range(7 * chunk.stride_cells):
        assert all(distance(query, key, chunk) == query - key for key in range(max(query - chunk.local_cells, 0), query + 1))
        assert all(0 <= distance(query, key, chunk) <= chunk.chunk_cells for key in range(query + 1))


class Watched(HostBackend):
    """Keeps what the one layer of a model projected and attended, cell by cell."""

    def __init__(self) -> None:
        super().__init__(precision=np.float64)
        self.projected: dict[int, np.ndarray] = {}
        self.attended: dict[int, np.ndarray] = {}

    def append(self, projected: Any, position: Any, *rest: Any) -> None:
        self.projected |= {int(position.values[0]) + t: row.copy() for t, row in enumerate(projected.qkv.values)}
        super().append(projected, position, *rest)

    def attend_step(self, projected: Any, position: Any, *rest: Any) -> None:
        super().attend_step(projected, position, *rest)
        self.attended[int(position.values[0])] = rest[-1].values[0].copy()

    def attend_tile(self, q: Any, position: Any, *rest: Any, last: bool, out: Any, **options: Any) -> None:
        super().attend_tile(q, position, *rest, last=last, out=out, **options)
        if last:
            self.attended |= {int(position.values[0]) + t: row.copy() for t, row in enumerate(out.values)}


def turned(x: np.ndarray, rope: RopeConfig, cells: int) -> np.ndarray:
    """A head's row turned by so many cells, pair by pair."""
    frequencies, _ = rope_frequencies(rope)
    out = x.copy()
    for pair, frequency in enumerate(frequencies):
        a, b = (2 * pair, 2 * pair + 1) if rope.style == "interleaved" else (pair, pair + rope.dim // 2)
        cos, sin = math.cos(cells * frequency), math.sin(cells * frequency)
        out[a], out[b] = x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos
    return out


def defined(watched: Watched, query: int, prompt: int, config: ModelConfig, chunk: DualChunk) -> np.ndarray:
    """What the query's cell attends to, from the definition: every pair by its distance."""
    layer = config.layers[0]
    splits = np.cumsum([layer.num_heads * layer.key_dim, layer.num_kv_heads * layer.key_dim])
    rows = [np.split(watched.projected[cell], splits) for cell in range(query + 1)]
    square = temperature(chunk, max(prompt, query + 1)) ** 2
    out = []
    for head in range(layer.num_heads):
        of_head, of_kv_head = (np.s_[i * n : (i + 1) * n] for i, n in ((head, layer.key_dim), (head // layer.group, layer.key_dim)))
        q = rows[query][0][of_head]
        by_distance = {d: turned(q, layer.rope, d) for d in {distance(query, key, chunk) for key in range(query + 1)}}
        scores = np.array([by_distance[distance(query, key, chunk)] @ row[1][of_kv_head] for key, row in enumerate(rows)])
        scores *= square * config.attention_scale
        weights = np.exp(scores - scores.max())
        values = np.stack([row[2].reshape(layer.num_kv_heads, -1)[head // layer.group] for row in rows])
        out.append(weights @ values / weights.sum())
    return np.concatenate(out)


@pytest.mark.parametrize("model", ["llama", "qwen2"])  # interleaved, and halves
@pytest.mark.parametrize("local", [1, 16, 63])
@pytest.mark.parametrize(("stride", "lengths"), [(16, (15, 16, 17, 32, 49, 150)), (48, (47, 48, 49, 96, 145))])
def test_every_pair_scores_by_the_definition(model: str, local: int, stride: int, lengths: tuple[int, ...]) -> None:
    """A prefill of `length` tokens, then single steps over two more chunk borders where there is room; the length passes the original context."""
    chunk, tokens = DualChunk(stride + local, local, 40), engines.fixture(model)["tokens"].tolist()
    for length in lengths:
        watched = Watched()
        with open_gguf(engines.FIXTURES / f"{model}.gguf") as file:
            config = engines.with_dual_chunk(model_config(file), chunk)
            config = replace(config, layers=config.layers[:1])
            cache = engines.cache(160, ubatch=40)
            engine = Engine(watched, file, config, cache, run_budget(config, file.tensors, cache, None, None))
        with engine:
            engine.prefill(tokens[:length])
            while engine.position < min(length + 2 * stride, 160):
                engine.decode(tokens[engine.position])
        borders = [
            cell for border in range(0, engine.position, stride) for cell in (border - 1, border, border + 1) if 0 <= cell < engine.position
        ]
        for cell in {length - 1, *borders, *range(length, engine.position, 7)}:
            np.testing.assert_allclose(watched.attended[cell], defined(watched, cell, length, config, chunk), rtol=1e-5, atol=1e-6)


def test_pages_by_band() -> None:
    rope = RopeConfig(64, "halves", dual_chunk=CHUNK)
    for newest in range(12):
        seen = bands(rope, PAGE, newest)
        assert [seen.of(page) for page in range(newest + 1)] == [min(newest // 3 - page // 3, 2) for page in range(newest + 1)]
        for first in range(newest + 1):
            parts = seen.split(first, newest + 1 - first)
            assert [page for _, begin, count in parts for page in range(begin, begin + count)] == list(range(first, newest + 1))
            assert all(seen.of(page) == band for band, begin, count in parts for page in range(begin, begin + count))
            assert [band for band, *_ in parts] == sorted({band for band, *_ in parts}, reverse=True)
    assert bands(replace(rope, dual_chunk=None), PAGE, 100) == Bands(0, 0) and Bands(0, 0).split(7, 3) == ((0, 7, 3),)


# -- the engine ----------------------------------------------------------------------------------------------------------------


def rows_of(engine: Engine, tokens: list[int], prompt: int) -> np.ndarray:
    """Logits behind every token: a prefill of `prompt` tokens, then one decode step each."""
    with engine:
        rows = [np.concatenate(list(engine.logit_rows(tokens[:prompt])))]
        rows += [engine.decode(token)[None] for token in tokens[prompt:]]
    return np.concatenate(rows)


@pytest.mark.parametrize("model", engines.MODELS)
def test_up_to_a_chunk_it_is_plain_rope(model: str) -> None:
    """To the last bit, as long as neither a second chunk nor more than the original context is there; by value in the local cells behind."""
    tokens, config = engines.fixture(model)["tokens"].tolist(), engines.cache(160, ubatch=24)
    plain = rows_of(engines.host_engine(model, config), tokens, 60)
    chunked = rows_of(engines.host_engine(model, config, dual_chunk=DualChunk(128, 16, FAR)), tokens, 60)
    np.testing.assert_array_equal(chunked[:112], plain[:112])
    np.testing.assert_allclose(chunked[112:129], plain[112:129], atol=1e-3)
    assert (chunked[140:] != plain[140:]).any(axis=1).all()
    warm = rows_of(engines.host_engine(model, config, dual_chunk=DualChunk(128, 16, 100)), tokens, 60)
    np.testing.assert_array_equal(warm[:100], plain[:100])
    assert (warm[100:112] != plain[100:112]).any(axis=1).all()


@pytest.mark.parametrize("order", ["eager", "late"])
@pytest.mark.parametrize("model", engines.MODELS)
def test_every_window_gives_the_resident_bits(model: str, order: Literal["eager", "late"]) -> None:
    tokens = engines.fixture(model)["tokens"].tolist()
    resident = rows_of(engines.host_engine(model, engines.cache(160, ubatch=40), dual_chunk=CHUNK), tokens, 100)
    assert np.isfinite(resident).all()
    assert (resident != rows_of(engines.host_engine(model, engines.cache(160, ubatch=40)), tokens, 100)).any()
    for pages in (1, 2, 5, 9):
        config = engines.cache(160, ubatch=40, window=pages * PAGE)
        windowed = rows_of(engines.host_engine(model, config, order=order, dual_chunk=CHUNK), tokens, 100)
        np.testing.assert_array_equal(windowed, resident, err_msg=f"window of {pages} pages")


@pytest.mark.parametrize("kv,value_kv", [("f16", "f16"), ("bf16", "f32")])
def test_every_type_of_page(kv: Any, value_kv: Any) -> None:
    tokens, options = engines.fixture("qwen3")["tokens"].tolist(), {"ubatch": 64, "kv": kv, "value_kv": value_kv}
    resident = rows_of(engines.host_engine("qwen3", engines.cache(160, **options), dual_chunk=CHUNK), tokens, 130)
    config = engines.cache(160, window=PAGE, **options)
    np.testing.assert_array_equal(rows_of(engines.host_engine("qwen3", config, order="late", dual_chunk=CHUNK), tokens, 130), resident)


@pytest.mark.parametrize("cuts", [(1, 129), (47, 1, 82), (48, 82), (50, 13, 67), (96, 34)])
def test_a_prompt_in_several_calls(cuts: tuple[int, ...]) -> None:
    """With the length of the whole prompt given it is the same prompt, wherever the calls end; without it the first part does not know what comes."""
    tokens, config = engines.fixture("llama")["tokens"].tolist()[:140], engines.cache(160, ubatch=40)

    def rows(window: int | None, prompt_cells: int) -> np.ndarray:
        found, begin = [], 0
        with engines.host_engine(
            "llama", replace(config, residency="full" if window is None else "window", window_cells=window), dual_chunk=CHUNK
        ) as run:
            for cut in cuts:
                found += list(run.logit_rows(tokens[begin : begin + cut], prompt_cells=prompt_cells))
                begin += cut
            return np.concatenate([*found, *(run.decode(token)[None] for token in tokens[begin:])])

    whole = rows_of(engines.host_engine("llama", config, dual_chunk=CHUNK), tokens, 130)
    told = rows(None, 130)
    np.testing.assert_allclose(told, whole, atol=1e-3)
    for pages in (1, 2):
        np.testing.assert_array_equal(rows(pages * PAGE, 130), told, err_msg=f"window of {pages} pages")
    untold = rows(None, 0)
    assert np.abs(untold[: cuts[0]] - whole[: cuts[0]]).max() > (1e-3 if cuts[0] > 1 else -1)
    with engines.host_engine("llama", config, dual_chunk=CHUNK) as run, pytest.raises(UsageError, match="exceed the context of 160"):
        run.prefill(tokens[:10], prompt_cells=161)


def test_a_second_sequence_knows_nothing_of_the_first_ones_length() -> None:
    tokens = engines.fixture("llama")["tokens"].tolist()
    with engines.host_engine("llama", engines.cache(160), dual_chunk=CHUNK) as engine:
        fresh = [engine.decode(token) for token in tokens[:20]]
        for forget in (engine.reset, lambda: engine.replan(engines.cache(160, window=PAGE))):
            engine.prefill(tokens[20:150])
            forget()
            np.testing.assert_array_equal([engine.decode(token) for token in tokens[:20]], fresh)
            engine.reset()


def test_a_step_ends_with_its_chunk() -> None:
    """Also the one that is repeated when values are not finite: the last of a prompt."""
    with engines.host_engine("llama", engines.cache(160, ubatch=40), dual_chunk=CHUNK) as engine:
        assert [len(part) for _, part in engine._steps(np.arange(100))] == [40, 8, 40, 8, 4]
        engine.prefill(list(range(100)))
        assert [len(part) for _, part in engine._steps(np.arange(50))] == [40, 4, 6]
        assert [len(part) for _, part in engine._steps(np.arange(100), before=100)] == [40, 8, 40, 8, 4]


@pytest.mark.parametrize("ring", [RingShape(1, 1), RingShape(2, 3), RingShape(4, 2)], ids=str)
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("ubatch", [16, 40, 160])
def test_no_access_races_where_a_band_ends_inside_a_run(ring: RingShape, window: int, ubatch: int) -> None:
    """Slots are given back behind all parts of a run: in test_copy_order's sequence of calls, with as many launches as bands ask for."""

    class Runs(race_detector.RaceDetector):
        def __init__(self) -> None:
            super().__init__()
            self.runs: list[tuple[int, int]] = []

        def attend_tile(self, q: Any, position: Any, run: Any, *rest: Any, **flags: Any) -> None:
            self.runs.append((run.first_page, run.num_pages))
            super().attend_tile(q, position, run, *rest, **flags)

    tokens, backend = engines.fixture("qwen3")["tokens"].tolist(), Runs()
    config = engines.cache(160, ubatch=ubatch, window=window * PAGE)
    with engines.host_engine("qwen3", config, backend=backend, ring=ring, dual_chunk=CHUNK) as engine:
        engines.read_and_fill(engine, tokens)
    assert backend.checked > 1000
    assert all(first // 3 == (first + count - 1) // 3 or first + count <= 9 for first, count in backend.runs)


def test_generation_runs_ahead_over_chunks() -> None:
    """Recorded steps, and steps that are issued before the last token is known, against single ones."""
    prompt = engines.fixture("qwen3")["tokens"].tolist()[:40]
    for window in (None, PAGE):
        backend = race_detector.Recording()
        with engines.host_engine("qwen3", engines.cache(160, window=window), backend=backend, dual_chunk=CHUNK) as engine:
            ids = list(engine.generate_ids(prompt, 80))
        assert backend.replays > 40
        with engines.host_engine("qwen3", engines.cache(160), dual_chunk=CHUNK) as engine:
            row, single = engine.prefill(prompt), []
            while len(single) < 80:
                single.append(int(row.argmax()))
                row = engine.decode(single[-1]) if len(single) < 80 else row
        assert ids == single


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_needles_through_many_chunks(architecture: str) -> None:
    """At every depth of six chunks, in the tail and beyond the original context: look-backs are local, and the match is free of distance."""
    chunk = DualChunk(320, 64, 512)
    ids, needles = test_synth.haystack(1560, (0.0, 0.5, 1.0), seed=len(architecture))
    more, others = test_synth.haystack(1560, (0.17, 0.34, 0.83), seed=1 + len(architecture))
    with open_synth(f"synth:tiny,architecture={architecture}") as file:
        config = engines.with_dual_chunk(model_config(file), chunk)
        for text, planted, window in ((ids, needles, None), (more, others, 512)):
            cache = engines.cache(1700, page_cells=256, kv="f16", ubatch=512, window=window)
            with Engine(HostBackend(), file, config, cache, run_budget(config, file.tensors, cache, None, None)) as run:
                for needle in planted:
                    assert test_synth.answer(run, text, needle) == f" {needle.value}."
                    text = []
                assert run.position > 6 * chunk.stride_cells and (run.copied_bytes[0] > 0) == (window is not None)


# -- what is refused -----------------------------------------------------------------------------------------------------------


def ropes(config: ModelConfig, change: Callable[[RopeConfig], RopeConfig]) -> ModelConfig:
    return replace(config, layers=tuple(replace(layer, rope=change(layer.rope)) for layer in config.layers))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda rope: replace(rope, scaling="yarn", factor=4.0, original_context=100), UnsupportedModelError, "takes the place of yarn"),
        (lambda rope: replace(rope, dim=rope.dim // 2), UnsupportedModelError, "heads turn as a whole"),
        (lambda rope: replace(rope, dual_chunk=replace(CHUNK, chunk_cells=65)), UsageError, "multiple of the page of 16 cells"),
        (lambda rope: replace(rope, dual_chunk=replace(CHUNK, chunk_cells=16)), UsageError, "chunks of 16 cells, 16 of them local"),
        (lambda rope: replace(rope, dual_chunk=replace(CHUNK, local_cells=0)), UsageError, "0 of them local"),
        (lambda rope: replace(rope, dual_chunk=replace(CHUNK, original_context=0)), UsageError, "an original context of 0"),
    ],
)
def test_what_cannot_be_had_is_refused(change: Callable[[RopeConfig], RopeConfig], error: type[RollkvError], words: str) -> None:
    with open_gguf(engines.FIXTURES / "llama.gguf") as file:
        config = engines.with_dual_chunk(model_config(file), CHUNK)
        check_dual_chunks(config, PAGE)
        run_budget(config, file.tensors, engines.cache(160), None, None)
        with pytest.raises(error, match=words) as caught:
            run_budget(ropes(config, change), file.tensors, engines.cache(160), None, None)
        assert "\n" not in str(caught.value)
