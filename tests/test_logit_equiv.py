"""logit-equiv: says yes to every window of a sound engine, no to every damaged one; files of logits; the command."""

import json
import shutil
import tempfile
import tracemalloc
import zipfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import engines
from rollkv.backend import PageRun
from rollkv.cli import main as boundary
from rollkv.cli.equiv_options import sizes
from rollkv.config import CacheConfig
from rollkv.errors import CheckFailed, LogitFileError, OutOfMemoryError, UsageError
from rollkv.host_backend import HostBackend
from rollkv.logit_file import LogitFile, write_logits
from rollkv.metrics import Limits
from rollkv.tasks import equiv_specs
from rollkv.tasks import logit_equiv as equiv
from rollkv.tasks.equiv_specs import DEFAULT_LIMITS, RunSpec
from rollkv.tasks.logit_equiv import EquivRow

PAGE = 16
FIXTURES = engines.FIXTURES
RESIDENT = RunSpec("resident", replace(engines.cache(160, ubatch=40), residency="full"), "host")


def tokens(model: str = "llama") -> list[int]:
    return engines.fixture(model)["tokens"].tolist()


def opener(model: str, backend: type[HostBackend] = HostBackend):
    """Engines for specs; windowed ones run on `backend`."""

    def open_engine(spec: RunSpec) -> engines.Engine:
        windowed = spec.cache.residency == "window"
        return engines.host_engine(model, spec.cache, backend=backend() if windowed else HostBackend())

    return open_engine


def run(
    model: str, specs: tuple[RunSpec, ...], *, backend: type[HostBackend] = HostBackend, limits: Limits | None = None
) -> list[EquivRow]:
    open_engine = opener(model, backend)
    ids = tokens(model)
    vocab = engines.fixture(model)["logits"].shape[1]
    with equiv.record_reference(open_engine, RESIDENT, ids, 24, vocab, None, lambda spec: None, lambda engine: {}) as reference:
        return list(
            equiv.compare(
                reference,
                open_engine,
                specs,
                num_decode=24,
                noise=0.05,
                limits=lambda spec, machine: equiv_specs.limits_for(spec, limits),
                progress_for=lambda spec: None,
                describe=lambda engine: {},
            )
        )


# -- yes and no ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_every_window_is_the_resident_run(model):
    rows = run(model, equiv_specs.window_specs("100%,50%,25%,1page", RESIDENT))
    assert [row.spec.cache.window_cells for row in rows] == [160, 80, 48, 16]
    for row in rows:
        assert row.passed and row.comparison.bit_equal and row.comparison.rows == row.comparison.positions == 160
        assert row.limits == Limits(bit_equal=True)
    assert [row.tail_cells for row in rows] == [0, 80, 112, 144]
    assert rows[0].streamed_bytes == 0 < rows[1].streamed_bytes < rows[3].streamed_bytes


class Damaged(HostBackend):
    """Staged pages [slots, bytes] pass through `damage` behind the copy."""

    def copy_in(self, run: PageRun, host: object) -> None:
        super().copy_in(run, host)
        for index in range(run.num_pages):
            slot = (run.first_slot + index) % run.num_slots
            page = run.pool.values.reshape(run.num_slots, -1)[slot]  # type: ignore[attr-defined]
            self.damage(run.first_page + index, page.view(np.float32))

    def damage(self, page: int, cells: np.ndarray) -> None:
        """cells f32: K then V of 2 heads, 16 cells, 16 columns."""


class OneCell(Damaged):
    def damage(self, page: int, cells: np.ndarray) -> None:
        if page == 3:
            cells.reshape(2, 2, PAGE, 16)[1, :, 7] *= 1.001


class Shifted(Damaged):
    """Every value lies one cell beside its key."""

    def damage(self, page: int, cells: np.ndarray) -> None:
        values = cells.reshape(2, 2, PAGE, 16)[1]
        values[:] = np.roll(values, 1, axis=1)


class Permuted(Damaged):
    """Keys and values move together: attention is the same but for the order of its sums, which only equality of bits can see."""

    def damage(self, page: int, cells: np.ndarray) -> None:
        shaped = cells.reshape(2, 2, PAGE, 16)
        shaped[:] = np.roll(shaped, 1, axis=2)


class NoPage(Damaged):
    def damage(self, page: int, cells: np.ndarray) -> None:
        if page == 0:
            cells.reshape(2, -1)[1] = 0


class NotANumber(Damaged):
    def damage(self, page: int, cells: np.ndarray) -> None:
        cells[0] = np.nan


@pytest.mark.parametrize("backend", [OneCell, Permuted, Shifted, NoPage])
def test_a_damaged_tail_is_told(backend):
    (row,) = run("llama", equiv_specs.window_specs("1page", RESIDENT), backend=backend)
    assert not row.passed
    assert row.comparison.first_unequal is not None and row.comparison.first_unequal >= PAGE, "what never saw the tail is equal"
    assert bool(DEFAULT_LIMITS.broken(row.comparison)) == (backend in (Shifted, NoPage)), "the small damages hide from any threshold"


def test_a_tail_of_nans_ends_the_run():
    with pytest.raises(CheckFailed, match="not finite"):
        run("llama", equiv_specs.window_specs("1page", RESIDENT), backend=NotANumber)


def test_other_types_are_near_and_not_equal():
    specs = equiv_specs.other_specs(RESIDENT, ["f32", "bf16", "f16"], ["f32"], ["host"])
    assert [(s.cache.key_type, s.cache.value_type, s.same_sums) for s in specs] == [("bf16", "f32", False), ("f16", "f32", False)]
    bf16, f16 = run("llama", specs)
    assert bf16.passed and f16.passed and bf16.limits == DEFAULT_LIMITS
    assert 0 < f16.comparison.kld_mean < bf16.comparison.kld_mean and f16.comparison.bit_equal_rows < 160
    rows = run("llama", specs, limits=Limits(bit_equal=True))
    assert not any(row.passed for row in rows)


def test_the_same_types_once_more_are_equal():
    (same,) = equiv_specs.other_specs(RESIDENT, [RESIDENT.cache.key_type] * 2, [RESIDENT.cache.value_type], ["host"])
    assert same.same_sums and same.judged and same.cache == RESIDENT.cache
    (row,) = run("llama", (same,))
    assert row.passed and row.limits == Limits(bit_equal=True)


def test_a_reference_that_is_not_finite_is_no_reference():
    with pytest.raises(CheckFailed, match="reference.*not finite"):
        with equiv.record_reference(
            lambda spec: NotFinite(), RESIDENT, tokens(), 0, 512, None, lambda spec: None, lambda engine: {}
        ):  # fmt: skip
            pass


class NotFinite:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def reset(self):
        pass

    def logit_rows(self, ids):
        yield np.full((16, 512), np.nan, np.float32)


# -- candidates ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,cells",
    [
        ("100%", [160]),
        ("50 %".replace(" ", ""), [80]),
        ("1%", [16]),
        ("3pages,2page", [48, 32]),
        ("17,160,9999", [32, 160]),
        ("10%,1page", [16]),
    ],
)
def test_windows(text, cells):
    assert [spec.cache.window_cells for spec in equiv_specs.window_specs(text, RESIDENT)] == cells


@pytest.mark.parametrize("text", ["", "0", "-1", "101%", "page", "1.5pages", "50%,", "half"])
def test_what_is_no_window_is_refused(text):
    with pytest.raises(UsageError, match="--windows"):
        equiv_specs.window_specs(text, RESIDENT)


def test_the_candidates_follow_from_what_is_asked():
    def labels(*args: object, stored: CacheConfig | None = None) -> list[str]:
        return [spec.label for spec in equiv_specs.candidate_specs(RESIDENT, *args, stored=stored)]  # type: ignore[arg-type]

    assert len(labels(None, (), ())) == 4
    assert labels(None, (), (), stored=RESIDENT.cache) == ["resident, KV f32/f32"]
    assert labels("1page", (), (), stored=RESIDENT.cache) == ["window 1page (1 of 10 pages), KV f32/f32"]
    assert labels("1page", (1 << 30,), (replace(RESIDENT, label="other"),)) == ["window 1page (1 of 10 pages)", "cap 1.00 GiB", "other"]
    (cap,) = equiv_specs.candidate_specs(RESIDENT, None, (1 << 30,), ())
    assert (cap.cache.residency, cap.vram_target, cap.same_sums) == ("auto", 1 << 30, True)
    with pytest.raises(UsageError, match="in pairs"):
        equiv_specs.other_specs(RESIDENT, ["f16", "f32"], ["f16", "f32", "bf16"], ["host"])


# -- files of logits -----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_and_read_in_slices_with_little_memory(tmp_path):
    rows, vocab = 256, 20_000
    path = tmp_path / "long.npz"
    rng = np.random.default_rng(3)
    block = rng.normal(size=(16, vocab)).astype(np.float32)
    tracemalloc.start()
    with write_logits(path, np.arange(rows), vocab) as write:
        for index in range(rows // 16):
            write(block + index)
    stored = LogitFile(path)
    with stored.rows() as reader:
        for index in range(rows // 16):
            np.testing.assert_array_equal(reader.read(16), block + index)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * block.nbytes < rows * vocab * 4 / 2
    with np.load(path) as plain:
        assert plain["logits"].shape == (rows, vocab) and plain["tokens"].dtype == np.int32
        np.testing.assert_array_equal(plain["top1"], plain["logits"].argmax(1))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_files_of_others_are_read(tmp_path, save):
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(3, 7)).astype(np.float16)
    save(tmp_path / "a.npz", tokens=np.arange(9), positions=np.array([2, 3, 8]), logits=logits, note=np.array("x"), object=np.array([None]))
    stored = LogitFile(tmp_path / "a.npz")
    assert stored.positions.tolist() == [2, 3, 8] and stored.vocab_size == 7 and stored.top1 is None
    with stored.rows() as reader:
        np.testing.assert_array_equal(np.concatenate([reader.read(1), reader.read(2)]), logits)
        with pytest.raises(LogitFileError, match="too early"):
            reader.read(1)


GOOD = {"tokens": np.arange(5, dtype=np.int32), "logits": np.zeros((5, 3), np.float32)}


@pytest.mark.parametrize(
    "change,words",
    [
        ({"logits": None}, "no array 'logits'"),
        ({"tokens": None}, "no array 'tokens'"),
        ({"logits": np.zeros((5, 3), np.int32)}, "wanted are floats"),
        ({"logits": np.zeros(5, np.float32)}, "wanted are floats"),
        ({"logits": np.asfortranarray(np.zeros((5, 3), np.float32))}, "column by column"),
        ({"logits": np.zeros((4, 3), np.float32)}, "4 rows of logits, but 5 positions"),
        ({"tokens": np.zeros(5, np.float32)}, "'tokens'"),
        ({"positions": np.array([0, 1, 1, 2, 3])}, "increase"),
        ({"positions": np.array([0, 1, 2, 3, 5])}, "below the 5 tokens"),
        ({"positions": np.array([-1, 1, 2, 3, 4])}, "increase"),
        ({"top1": np.zeros(4, np.int32)}, "'top1'"),
        ({"tokens": np.array([None] * 5)}, "cannot read it"),
        ({"tokens": np.array(5)}, "'tokens' is int64 \\[\\]"),
        ({"positions": np.array(0)}, "positions"),
        ({"positions": np.array([2**64 - 1, 0, 1, 2, 3], np.uint64)}, "increase"),
        ({"logits": np.zeros((5, 3), np.longdouble)}, "at most 64 bits"),
        ({"rollkv_run": np.array("[1]")}, "'rollkv_run' is \\[1\\]; wanted is the JSON text of an object"),
        ({"rollkv_run": np.array("{")}, "cannot read it"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, change, words):
    arrays = {name: value for name, value in (GOOD | change).items() if value is not None}
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(LogitFileError, match="wrong.npz.*" + words):
        LogitFile(tmp_path / "wrong.npz")


def test_damaged_files_are_refused_by_name(tmp_path):
    path = tmp_path / "torn.npz"
    with pytest.raises(LogitFileError, match="torn.npz: cannot read it: No such file"):
        LogitFile(path)
    np.savez(path, **GOOD)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(LogitFileError, match="torn.npz: cannot read it"):
        LogitFile(path)
    position = data.index(b"logits.npy") + 150  # inside the rows
    path.write_bytes(data[:position] + b"\x55" + data[position + 1 :])
    with pytest.raises(LogitFileError, match="torn.npz: cannot read it"), LogitFile(path).rows() as reader:
        reader.read(5)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("seed", range(40))
def test_a_file_with_wrong_bytes_is_read_or_refused(tmp_path, save, seed):
    """Whatever the libraries underneath make of damage, it comes as the one error that names the file."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "hurt.npz"
    save(path, **GOOD, top1=np.arange(5), positions=np.arange(5), rollkv_run=np.array('{"backend": "host"}'))
    data = bytearray(path.read_bytes())
    for position in rng.integers(0, len(data), int(rng.integers(1, 9))):
        data[position] = data[position] ^ (1 << int(rng.integers(8))) if rng.random() < 0.5 else int(rng.integers(256))
    path.write_bytes(data)
    try:
        with LogitFile(path).rows() as reader:
            reader.read(5)
    except LogitFileError as error:
        assert "hurt.npz" in str(error)


@pytest.mark.parametrize("header", [b"{'descr': '<i4', 'shape': (5,", b"(1, 2)", b"{1: [}", b"\xff\xff"])
def test_headers_that_are_none_are_refused_by_name(tmp_path, header):
    path = tmp_path / "header.npz"
    np.savez(path, **GOOD)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["tokens.npy"] = parts["tokens.npy"][:10] + header.ljust(118) + parts["tokens.npy"][128:]
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    with pytest.raises(LogitFileError, match="header.npz: cannot read it"):
        LogitFile(path)


def test_a_failed_run_leaves_no_file(tmp_path):
    path = tmp_path / "kept.npz"
    with pytest.raises(KeyboardInterrupt), write_logits(path, np.arange(3), 4) as write:
        write(np.zeros((1, 4), np.float32))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_told_before_the_model_loads(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 10**6))
    with pytest.raises(OutOfMemoryError, match="take 1.9 GiB|take 1.91 GiB of disk, but .* has 976.6 KiB free"):
        equiv.check_disk(tmp_path / "x.npz", 4000, 128_000)
    equiv.check_disk(tmp_path / "x.npz", 2, 100)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_file_that_cannot_even_be_begun_leaves_none(tmp_path, monkeypatch, error):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(np.lib.format, "write_array_header_2_0", fails)
    with (
        pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OutOfMemoryError),
        write_logits(tmp_path / "kept.npz", np.arange(3), 5),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


# -- the command ---------------------------------------------------------------------------------------------------------------


def command(*arguments: object) -> int:
    on_host = ("--backend", "host", "--cache-type-k", "f32", "--cache-type-v", "f32")
    return boundary.main(["logit-equiv", *(() if "--backend" in arguments else on_host), *map(str, arguments)])


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_windows_over_the_shipped_prose(capsys, scratch):
    assert command("-m", FIXTURES / "qwen3.gguf", "--tokens", 520, "--windows", "1page,512", "--ubatch", 128, "-o", "jsonl") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["cells_in_tail"], second["cells_in_tail"]) == (512, 256)
    for row in (first, second):
        assert row["passed"] and row["bit_equal_rows"] == row["rows"] == 520 and row["limit_bit_equal"] and row["decode_tokens"] == 16
        assert (row["command"], row["schema_version"], row["model_file"], row["backend"]) == ("logit-equiv", 1, "qwen3.gguf", "host")
        assert row["gpu"] is None and row["first_difference_position"] is None and row["utc_time"].endswith("Z")
        assert not any(isinstance(value, (dict, list)) for value in row.values()), "rows are flat"
    assert list(scratch.iterdir()) == [], "nothing is left behind"


def test_logits_of_another_engine(capsys):
    assert command("-m", FIXTURES / "llama.gguf", "--reference", FIXTURES / "llama.npz", "--windows", "100%", "-o", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["rows"] == 160 and 0 < row["nmse"] < 1e-8 and row["full_agreement"] == 1 and row["limit_max_kld"] == DEFAULT_LIMITS.max_kld
    assert command("-m", FIXTURES / "llama.gguf", "--reference", FIXTURES / "llama.npz", "--bit-equal", "-o", "json") == 1
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert not result["passed"] and result["exit_code"] == 1 and "bits" in result["error"] and out.err.count("not equivalent") == 1


def test_a_saved_reference_serves_again(capsys, tmp_path, scratch):
    text, kept = tmp_path / "text.txt", tmp_path / "kept.npz"
    text.write_text("the river and the mill and the road " * 20)
    model = ("-m", FIXTURES / "mistral.gguf")
    assert command(*model, "--text", text, "--tokens", 300, "--windows", "1page", "--save", kept) == 0
    assert "equivalent: 1 of 1" in capsys.readouterr().out
    assert command(*model, "--reference", kept, "--windows", "1page", "--bit-equal") == 0
    assert command(*model, "--reference", kept, "--decode", 30, "--windows", "1page") == 0
    with np.load(kept) as full:
        some = np.array([3, 250, 299])
        np.savez(tmp_path / "some.npz", tokens=full["tokens"], positions=some, logits=full["logits"][some], top1=full["top1"])
    capsys.readouterr()
    assert command(*model, "--reference", tmp_path / "some.npz", "--bit-equal", "-o", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["rows"], row["positions"], row["full_agreement"]) == (3, 300, 1)
    assert command(*model, "--reference", tmp_path / "some.npz", "--bit-equal") == 0
    heading, *_, verdict = capsys.readouterr().out.splitlines()
    assert heading.endswith("; 3 of 300 positions compared") and verdict.endswith("their limits; 3 of 300 positions compared")


def test_caps_reach_the_plan(capsys, scratch):
    model = ("-m", FIXTURES / "llama.gguf", "--tokens", 100, "-o", "json")
    assert command(*model, "--vram-target", "4GiB,5GiB,4096") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["candidate"], row["vram_target_bytes"], row["residency"]) for row in rows] == [
        ("cap 4.00 GiB", 4 << 30, "auto"),
        ("cap 5.00 GiB", 5 << 30, "auto"),
    ]
    assert all(row["limit_bit_equal"] and row["bit_equal_rows"] == 100 for row in rows)
    assert command(*model, "--vram-target", "100MiB") == 5
    assert "--vram-target 100.0 MiB is too small" in capsys.readouterr().err
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("form", ["text", "json", "jsonl"])
def test_candidates_that_ran_are_printed_whatever_ends_the_run(capsys, scratch, monkeypatch, form):
    model = ("-m", FIXTURES / "llama.gguf", "--tokens", 100, "--windows", "1page", "--vram-target", "100MiB", "-o", form)
    assert command(*model) == 5
    out, err = capsys.readouterr()
    assert "100.0 MiB is too small" in err
    if form == "json":
        result = json.loads(out)
        assert result["passed"] is None and result["kind"] == "OutOfMemoryError" and len(result["rows"]) == 1
    else:
        assert "window 1page" in out and ("verdict: none, cut short: 1 of 1" in out) == (form == "text")


def test_an_interrupted_comparison_prints_what_ran(capsys, scratch, monkeypatch):
    compared, calls = equiv._compare_one, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compared(*arguments)

    monkeypatch.setattr(equiv, "_compare_one", interrupted)
    assert command("-m", FIXTURES / "llama.gguf", "--tokens", 300, "--windows", "100%,1page", "-o", "json") == 130
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is None and result["interrupted"] and [row["passed"] for row in result["rows"]] == [True]


@pytest.mark.parametrize("place", ["model.gguf", "text.txt", "notes.md"])
def test_no_other_file_is_lost_to_save(capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str) -> None:
    """The model itself, the text that is read, or whatever is there: refused before anything runs."""
    model, text = tmp_path / "model.gguf", tmp_path / "text.txt"
    shutil.copy(FIXTURES / "llama.gguf", model)
    text.write_text("the river and the mill " * 9)
    (tmp_path / "notes.md").write_text("notes")
    before = (tmp_path / place).read_bytes()
    assert command("-m", model, "--text", text, "--save", tmp_path / place) == 2
    out = capsys.readouterr()
    assert out.out == "" and "is there already and holds no logits" in out.err and (tmp_path / place).read_bytes() == before


def test_a_short_text_is_fed_one_by_one_altogether(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("-m", FIXTURES / "llama.gguf", "--tokens", 10, "--windows", "1page", "-o", "json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["rows"] == row["decode_tokens"] == 10


def test_a_bare_cap_takes_the_unit_of_the_last() -> None:
    assert sizes("8,6GiB") == (8 << 30, 6 << 30) and sizes("512,300") == (512 << 20, 300 << 20)


def test_text_says_what_failed_and_where_the_first_difference_is(capsys, scratch):
    types = ("--backend", "host", "--cache-type-k", "f32,bf16", "--cache-type-v", "f32")
    assert command("-m", FIXTURES / "llama.gguf", *types, "--tokens", 300, "--max-kld", "1e-6") == 1
    out = capsys.readouterr()
    assert "KV bf16/f32" in out.out and "\nlimits: mean KLD <= 1e-06\n" in out.out and "FAILED" in out.out
    assert "KV bf16/f32: first other top token at position" in out.out and "the noise of 0.05" in out.out
    assert "verdict: not equivalent: KV bf16/f32: mean KLD" in out.out and "error: not equivalent" in out.err


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--reference", FIXTURES / "llama.npz", "--tokens", "5"], "leave out --text"),
        (["--decode", "2000"], "--decode 2000"),
        (["--backend", "gpu"], "--backend 'gpu'"),
        (["--backend", "host", "--cache-type-k", "f16,f8"], "--cache-type-k 'f8'"),
        (["--windows", "half"], "--windows"),
        (["-o", "csv"], "-o 'csv'"),
        (["--text", "/nowhere.txt"], "/nowhere.txt"),
        (["--vram-target", "6GiB,x"], "--vram-target"),
        (["--noise", "nan"], "--noise nan"),
        (["--noise", "-1"], "--noise -1"),
        (["--max-kld", "nan"], "--max-kld nan"),
        (["--max-nmse", "inf"], "--max-nmse inf"),
        (["--min-top1", "1.5"], "--min-top1 1.5: the value must be a number from 0 to 1"),
        (["--save", "/nowhere/x.npz"], "--save /nowhere/x.npz: there is no folder"),
    ],
)
def test_usage_errors_name_the_option(capsys, arguments, words):
    assert command("-m", FIXTURES / "llama.gguf", *arguments) == 2
    out = capsys.readouterr()
    assert out.out == "" and words in out.err and out.err.count("\n") == 1


def test_a_disk_that_is_too_small_is_told_before_the_text_is_made(capsys, scratch, monkeypatch):
    monkeypatch.setattr(equiv, "prose_ids", lambda *_: pytest.fail("it made text"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 1 << 36))
    assert command("-m", FIXTURES / "llama.gguf", "--tokens", "99m") == 5
    assert "of disk, but" in capsys.readouterr().err


def test_a_reference_of_another_vocabulary_is_refused(capsys, tmp_path):
    np.savez(tmp_path / "small.npz", **GOOD)
    assert command("-m", FIXTURES / "llama.gguf", "--reference", tmp_path / "small.npz") == 2
    assert "3 logits, the model has 512 tokens" in capsys.readouterr().err
    np.savez(tmp_path / "ids.npz", tokens=np.array([600]), logits=np.zeros((1, 512), np.float32))
    assert command("-m", FIXTURES / "llama.gguf", "--reference", tmp_path / "ids.npz") == 2
    assert "token id 600" in capsys.readouterr().err
    for wrong in (512, -1):
        np.savez(tmp_path / "top.npz", tokens=np.arange(2), positions=np.array([0]), logits=np.zeros((1, 512)), top1=np.array([0, wrong]))
        assert command("-m", FIXTURES / "llama.gguf", "--reference", tmp_path / "top.npz") == 2
        assert f"top.npz: token id {wrong} in 'top1'" in capsys.readouterr().err
    (tmp_path / "top.npz").write_bytes(b"no zip at all")
    assert command("-m", FIXTURES / "llama.gguf", "--reference", tmp_path / "top.npz") == 4


# -- types that lose something -------------------------------------------------------------------------------------------------


def lossy(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str, str]:
    code = boundary.main(["logit-equiv", "-m", "synth:tiny:F16", "--backend", "host", "--tokens", "600", *map(str, options)])
    return code, *capsys.readouterr()


def test_lossy_types_are_reported_and_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = lossy(
        capsys, "--cache-type-k", "f16,q8_0,bf16", "--cache-type-v", "f16,turbo3,f16", "--windows", "1page", "-o", "json"
    )
    rows = json.loads(out)["rows"]
    assert code == 1 and "KV bf16/f16: " in err and "turbo3" not in err, "bf16 is judged as ever"
    assert [(row["candidate"], row["judged"]) for row in rows[0::2]] == [("window 1page (1 of 3 pages)", True), ("KV bf16/f16", True)]
    coded = rows[1]
    assert (coded["candidate"], coded["judged"], coded["passed"], coded["limit_max_kld"]) == ("KV q8_0/turbo3 (lossy)", False, None, None)
    assert (coded["cache_type_k"], coded["cache_type_v"], coded["kv_rotate"]) == ("q8_0", "turbo3", False) and coded["nmse"] > 1e-3


def test_limits_that_are_given_judge_lossy_types(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("--cache-type-k", "f16,q4_0", "--cache-type-v", "f16", "--kv-rotate", "--kv-protect", 1)
    code, out, err = lossy(capsys, *pair, "--max-nmse", 1e-6)
    assert code == 1 and "KV q4_0/f16 rotated, first and last layer f16 (lossy): NMSE" in err and "FAILED" in out
    code, out, err = lossy(capsys, *pair)
    assert code == 0 and "not judged" in out and "verdict: none: 1 of 1 not judged without --max-kld" in out
    code, out, _ = lossy(capsys, "--cache-type-k", "q8_0,f16,q8_0", "--cache-type-v", "f16,f16,q8_0", "--windows", "1page")
    assert code == 0 and "equivalent: 1 of 1 candidates keep their limits; 2 of 3 not judged without --max-kld" in out, (
        "nor is what loses less"
    )


@pytest.mark.parametrize("types,passed", [("f16,q8_0", [None]), ("f16,q8_0,f16", [None, True])])
def test_passed_is_null_where_nothing_was_judged(capsys: pytest.CaptureFixture[str], types: str, passed: list[bool | None]) -> None:
    code, out, _ = lossy(capsys, "--cache-type-k", types, "--cache-type-v", "f16", "-o", "json")
    result = json.loads(out)
    assert code == 0 and result["passed"] is passed[-1] and [row["passed"] for row in result["rows"]] == passed


def test_limits_are_told_by_the_numbers_of_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    types = ("--cache-type-k", "f16,f16,q8_0,f16", "--cache-type-v", "f16,f16,turbo3,f16")
    _, out, _ = lossy(capsys, *types, "--windows", "1page")
    lines = out.splitlines()
    assert [line.split("  ")[1] for line in lines if "600/600" in line] == ["window 1page (1 of 3 pages)", "KV f16/f16", "KV f16/f16"]
    assert [line for line in lines if line.startswith("limits")] == [
        "limits of candidates 1 to 2, 4: bit equality",
        "limits of candidate 3: finite rows",
    ]


def test_windows_of_lossy_types_are_equal_to_the_resident_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lossy(capsys, "--cache-type-k", "turbo4", "--cache-type-v", "q8_0", "--windows", "50%,1page")
    assert code == 0 and "reference: resident, KV turbo4/q8_0 (lossy), host backend" in out
    assert out.count("600/600") == 2 and "verdict: equivalent: 2 of 2" in out


def test_types_of_the_tail_are_those_of_windows(capsys: pytest.CaptureFixture[str]) -> None:
    tail = ("--cache-type-tail-k", "q8_0", "--cache-type-tail-v", "turbo4")
    code, out, _ = lossy(capsys, *tail, "--windows", "1page")
    assert code == 0 and "reference: resident, KV f16/f16, host backend" in out
    assert "window 1page (1 of 3 pages), KV f16/f16, tail q8_0/turbo4 (lossy)" in out and "verdict: none: 1 of 1 not judged" in out
    code, out, _ = lossy(capsys, *tail, "--cache-type-k", "f16,q8_0", "--cache-type-v", "f16", "-o", "json")
    labels = [row["candidate"] for row in json.loads(out)["rows"]]
    assert labels[-1] == "KV q8_0/f16 (lossy)" and sum("tail q8_0/turbo4" in label for label in labels) == 3, "the windows of old"


@pytest.mark.parametrize(
    "options,words",
    [
        (("--kv-rotate",), "--kv-rotate concerns q8_0 and q4_0 (turbo types are rotated anyway), and KV f16/f16 has neither"),
        (("--cache-type-k", "f16,q8_0", "--cache-type-v", "f32"), "cells of q8_0 and of f32 do not go together"),
        (("--cache-type-k", "q4_0", "--cache-type-tail-k", "q8_0"), "a window of q4_0 can only be held in fewer bits"),
        (("--cache-type-k", "f16,q5_0"), "'q5_0' is not known"),
    ],
)
def test_types_that_cannot_be_had_are_refused(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str) -> None:
    code, out, err = lossy(capsys, *options)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


# -- files as the reference ----------------------------------------------------------------------------------------------------

Q8 = ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0")


@pytest.fixture
def saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Path]:
    def save(*options: object) -> Path:
        path = tmp_path / "saved.npz"
        assert lossy(capsys, *options, "--windows", "1page", "--save", path)[0] == 0
        return path

    return save


def beside(capsys: pytest.CaptureFixture[str], path: Path, *options: object) -> tuple[int, str, str]:
    code = boundary.main(["logit-equiv", "-m", "synth:tiny:F16", "--backend", "host", "--reference", *map(str, (path, *options))])
    return code, *capsys.readouterr()


def without_run(path: Path) -> Path:
    """The file as it was written before it told of its run."""
    with np.load(path) as full:
        np.savez(path.with_name("older.npz"), **{name: full[name] for name in ("tokens", "logits", "top1")})
    return path.with_name("older.npz")


def judgements(out: str) -> list[tuple[str, bool, bool | None, bool, float | None]]:
    names = ("candidate", "judged", "passed", "limit_bit_equal", "limit_max_kld")
    return [tuple(row[name] for name in names) for row in json.loads(out)["rows"]]


def test_candidates_beside_a_file_tell_their_types(capsys: pytest.CaptureFixture[str], saved: Callable[..., Path]) -> None:
    path = saved()
    code, out, _ = beside(capsys, path, *Q8)
    assert code == 0 and f"; reference: {path}, KV f16/f16, DCA off, host backend" in out
    assert " resident, KV q8_0/q8_0 (lossy) " in out and "verdict: none: 1 of 1 not judged" in out
    _, out, _ = beside(capsys, path, *Q8, "--windows", "1page", "--vram-target", "4GiB", "-o", "json")
    assert [row[:2] for row in judgements(out)] == [
        ("window 1page (1 of 3 pages), KV q8_0/q8_0 (lossy)", False),
        ("cap 4.00 GiB, KV q8_0/q8_0 (lossy)", False),
    ]


def test_every_listed_type_is_a_candidate_beside_a_file(capsys: pytest.CaptureFixture[str], saved: Callable[..., Path]) -> None:
    path = saved()
    code, out, _ = beside(capsys, path, "--cache-type-k", "q8_0,f16", "--cache-type-v", "f16", "-o", "json")
    resident = [("resident, KV q8_0/f16 (lossy)", False, None, False, None), ("KV f16/f16", True, True, True, None)]
    assert code == 0 and judgements(out) == resident
    _, out, _ = beside(capsys, path, "--cache-type-k", "q8_0,f16", "--cache-type-v", "f16", "--windows", "1page", "-o", "json")
    assert judgements(out) == [("window 1page (1 of 3 pages), KV q8_0/f16 (lossy)", False, None, False, None), *resident]


def test_a_file_of_lossy_types_is_judged_by_them(capsys: pytest.CaptureFixture[str], saved: Callable[..., Path]) -> None:
    path = saved(*Q8)
    code, out, _ = beside(capsys, path, *Q8, "--windows", "1page")
    assert code == 0 and f"; reference: {path}, KV q8_0/q8_0 (lossy), DCA off, host backend" in out
    assert "600/600" in out and "limits: bit equality" in out and "verdict: equivalent: 1 of 1" in out
    for other in ((), (*Q8, "--kv-rotate"), (*Q8, "--kv-protect", 1), (*Q8, "--cache-type-tail-k", "q4_0", "--windows", "1page")):
        code, out, _ = beside(capsys, path, *other)
        assert code == 0 and "verdict: none: 1 of 1 not judged" in out, other


def test_rotation_protection_and_positions_are_kept_in_a_file(capsys: pytest.CaptureFixture[str], saved: Callable[..., Path]) -> None:
    options = (*Q8, "--kv-rotate", "--kv-protect", 1, "--dca", "on", "--dca-chunk", 512, "--dca-local", 256)
    path = saved(*options)
    code, out, _ = beside(capsys, path, *options)
    assert (
        code == 0 and "KV q8_0/q8_0 rotated, first and last layer f16 (lossy), DCA 512/256, host backend" in out and "bit equality" in out
    )


@pytest.mark.parametrize("other", [("--decode", 3), ("--ubatch", 256)])
def test_bits_are_not_expected_of_another_run(
    capsys: pytest.CaptureFixture[str], saved: Callable[..., Path], other: tuple[object, ...]
) -> None:
    """Products of another number of rows are added in another order."""
    code, out, _ = beside(capsys, saved(*Q8), *Q8, *other, "-o", "json")
    assert judgements(out)[0][3:] == (False, DEFAULT_LIMITS.max_kld) and json.loads(out)["passed"] is (code == 0)


def test_a_file_that_tells_no_types_is_taken_for_f16(capsys: pytest.CaptureFixture[str], saved: Callable[..., Path]) -> None:
    path = without_run(saved())
    code, out, _ = beside(capsys, path)
    assert code == 0 and f"; reference: {path}, KV types unknown (taken for f16)" in out
    assert "limits: mean KLD <= 0.001" in out and "verdict: equivalent: 1 of 1" in out
    code, out, _ = beside(capsys, path, *Q8)
    assert code == 0 and "verdict: none: 1 of 1 not judged" in out


@pytest.mark.parametrize("facts", [{}, {"cache_type_k": "q5_0"}, {"cache_type_k": ["f16"]}, {"kv_protect": "two"}])
def test_a_file_of_types_that_are_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, facts: dict[str, object]) -> None:
    plain = {f"cache_type_{place}": None for place in ("tail_k", "tail_v")} | {"cache_type_k": "f16", "cache_type_v": "f16"}
    run = json.dumps(facts and plain | {"kv_rotate": False, "kv_protect": 0} | facts)
    path, vocab = tmp_path / "wrong.npz", engines.fixture("llama")["logits"].shape[1]
    np.savez(path, tokens=np.arange(2), logits=np.zeros((2, vocab)), rollkv_run=np.array(run))
    assert command("-m", FIXTURES / "llama.gguf", "--reference", path) == 4
    out, err = capsys.readouterr()
    assert out == "" and "wrong.npz: the types of the KV cache that it names cannot be read" in err and err.count("\n") == 1
