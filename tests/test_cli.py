"""The command line: options and exit codes with a scripted engine, and whole runs on the fixture models with the reference backend."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollkv import report
from rollkv.budget import Budget
from rollkv.cli import main as boundary
from rollkv.config import CacheConfig
from rollkv.engine import Stats
from rollkv.errors import CheckFailed, UsageError
from rollkv.gguf_file import open_gguf
from rollkv.roofline import ASSUMED, StepCost
from rollkv.tokenizer import Tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
LLAMA = FIXTURES / "llama.gguf"
ON_HOST = ["--backend", "host", "--cache-type-k", "f32", "--cache-type-v", "f32"]


def rollkv(*arguments: object) -> int:
    return boundary.main([str(argument) for argument in arguments])


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; nothing on stdout."""
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("rollkv: error: ") and out.err.count("\n") == 1, out.err
    return out.err


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with open_gguf(LLAMA) as file:
        return Tokenizer.from_metadata(file.metadata)


class ScriptedEngine:
    """Yields given ids, then raises `failure` if there is one. Remembers how it was asked and whether it was closed."""

    backend_name = "host"

    def __init__(self, ids: list[int], failure: BaseException | None = None) -> None:
        self.ids, self.failure = ids, failure
        self.stats = Stats()
        self.budget = Budget((("weights", 1000),), None, 4, 4, 256, None, 0, 0, 1000, False, 512, StepCost(0.001), ASSUMED)
        self.closed = False
        self.asked: dict[str, object] = {}
        self.loaded: dict[str, object] = {}

    def load(self, path: Path, cache: CacheConfig, **options: object) -> "ScriptedEngine":
        self.loaded = {"path": path, "cache": cache, **options}
        self.cache_config = cache
        return self

    def generate_ids(self, prompt_ids, num_tokens, sampling, stop_ids, on_progress):
        self.asked = {"prompt_ids": list(prompt_ids), "num_tokens": num_tokens, "sampling": sampling, "stop_ids": stop_ids}
        for count, token in enumerate(self.ids[:num_tokens], 1):
            self.stats = replace(self.stats, prompt_tokens=len(prompt_ids), generated_tokens=count)
            yield token
        if self.failure is not None:
            raise self.failure
        self.stats = replace(self.stats, stop_reason="length")

    def __enter__(self) -> "ScriptedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.fixture
def scripted(monkeypatch):
    def install(ids: list[int], failure: BaseException | None = None) -> ScriptedEngine:
        engine = ScriptedEngine(ids, failure)
        monkeypatch.setattr("rollkv.startup.load", engine.load)
        return engine

    return install


# -- options reach the engine --------------------------------------------------------------------------------------------------


def test_options_reach_the_engine(scripted, capsys):
    engine = scripted([5, 6])
    options = "--temp 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repeat-penalty 1.2 --repeat-last 7 --seed 9".split()
    options += "--vram-target 2GiB --residency window --window 512 --ubatch 128 --cache-type-k bf16 --cache-type-v f32".split()
    options += "--cache-type-tail-k q8_0 --cache-type-tail-v turbo3 --kv-rotate --kv-protect 2".split()
    options += "--backend cuda --device 2 --portable -n 2 -c 100 --ignore-eos".split()
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "3, 4\n5", *options, "-o", "json") == 0
    sampling = engine.asked["sampling"]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.9, 0.1)
    assert (sampling.repeat_penalty, sampling.repeat_last, sampling.seed) == (1.2, 7, 9)
    assert engine.asked["prompt_ids"] == [3, 4, 5] and engine.asked["num_tokens"] == 2 and engine.asked["stop_ids"] == frozenset()
    assert engine.loaded["cache"] == CacheConfig(100, 256, "bf16", "f32", 128, "window", 512, None, "q8_0", "turbo3", True, 2)
    assert (engine.loaded["vram_target"], engine.loaded["backend"], engine.loaded["device"]) == (2 << 30, "cuda", 2)
    assert engine.loaded["portable"] is True and engine.closed
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_ids"] == [3, 4, 5] and result["ids"] == [5, 6] and result["stop_reason"] == "length"
    assert result["budget"]["device_bytes"] == {"weights": 1000} and result["statistics"]["generated_tokens"] == 2
    assert (result["cache_type_k"], result["cache_type_tail_v"], result["kv_rotate"], result["kv_protect"]) == ("bf16", "turbo3", True, 2)


def test_defaults(scripted, tokenizer):
    engine = scripted([5])
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "1,2", "-n", 7) == 0
    assert engine.loaded["cache"] == CacheConfig(9, smallest_ubatch=256), "prompt + new tokens; a ubatch that may be halved"
    assert engine.loaded["vram_target"] is None and engine.loaded["backend"] == "auto"
    assert engine.asked["sampling"].temperature == 0
    assert engine.asked["stop_ids"] == frozenset(tokenizer.stop_ids)


def test_the_library_and_the_command_line_have_the_same_default_length(scripted):
    from rollkv.tasks.generate import DEFAULT_NUM_TOKENS

    engine = scripted([5])
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "1") == 0
    assert engine.asked["num_tokens"] == DEFAULT_NUM_TOKENS


@pytest.mark.parametrize("way", ["-p", "-p -", "-f -", "-f FILE"])
def test_a_prompt_is_the_same_text_whichever_way_it_comes(scripted, monkeypatch, tmp_path, tokenizer, way):
    text = "one \u00e9\r\ntwo\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    arguments = ["-p", text] if way == "-p" else way.replace("FILE", str(tmp_path / "prompt.txt")).split()
    engine = scripted([5])
    assert rollkv("generate", "-m", LLAMA, "--raw", *arguments) == 0
    assert engine.asked["prompt_ids"] == list(tokenizer.encode(text))


# -- text, stop strings, interruption ------------------------------------------------------------------------------------------


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = list(tokenizer.encode(text, add_bos=False))
    decoder = tokenizer.stream()
    assert "".join(decoder.push(i) for i in ids) + decoder.finish() == text
    return ids


def test_text_streams_to_stdout_and_one_line_of_statistics_to_stderr(scripted, capsys, tokenizer):
    scripted(text_ids(tokenizer, "hello there"))
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "1") == 0
    out = capsys.readouterr()
    assert out.out == "hello there\n"
    assert out.err.count("\n") == 1 and out.err.startswith("rollkv: pp 1 tok") and out.err.endswith("stop length\n")


@pytest.mark.parametrize("stop", ["lo th", "there", "h", "o"])
def test_a_stop_string_ends_the_text_in_front_of_it(scripted, capsys, tokenizer, stop):
    ids = text_ids(tokenizer, "hello there")
    scripted(ids)
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "1", "--stop", "unseen", "--stop", stop, "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == "hello there".split(stop)[0]
    assert (result["stop_reason"], result["stop_string"]) == ("stop_string", stop)
    assert result["ids"] == ids[: len(result["ids"])]


def test_text_that_only_looked_like_a_stop_string_is_not_lost(scripted, capsys, tokenizer):
    scripted(text_ids(tokenizer, "hello there"))
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "1", "--stop", "there!") == 0
    assert capsys.readouterr().out == "hello there\n"


def test_ctrl_c_shows_what_there_is_frees_and_exits_130(scripted, capsys, tokenizer):
    engine = scripted(text_ids(tokenizer, "hello there"), KeyboardInterrupt())
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "1", "--stop", "there!") == 130
    out = capsys.readouterr()
    assert out.out == "hello there\n", "text held back for the stop string must be shown too"
    assert out.err.endswith("stop interrupted\n") and engine.closed


def test_ctrl_c_in_json_mode_leaves_an_object(scripted, capsys, tokenizer):
    engine = scripted(text_ids(tokenizer, "hello"), KeyboardInterrupt())
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "1", "-o", "json") == 130
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["stop_reason"], result["error"]) == ("hello", "interrupted", "interrupted") and engine.closed


def test_a_failing_run_frees_and_keeps_its_exit_code(scripted, capsys, tokenizer):
    engine = scripted(text_ids(tokenizer, "hello"), CheckFailed("logits are not finite"))
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "1", "-o", "json") == 1
    assert json.loads(capsys.readouterr().out)["error"] == "logits are not finite" and engine.closed


def test_a_closed_pipe_is_no_error(scripted, monkeypatch, capsys):
    engine = scripted([5] * 5)

    def nobody_reads(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(report, "write_text", nobody_reads)
    assert rollkv("generate", "-m", LLAMA, "--prompt-ids", "1") == 0
    assert capsys.readouterr().err == "" and engine.closed


# -- what is refused, before an engine is loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["-p TEXT", "-f FILE", "--prompt-ids"]),
        (["-p", "a", "-f", "b"], ["-p and -f"]),
        (["-p", "a", "--prompt-ids", "1"], ["exactly one"]),
        (["--prompt-ids", "1,x"], ["'x'"]),
        (["--prompt-ids", "1,-2"], ["'-2'"]),
        (["--prompt-ids", "1,512"], ["512", "511"]),
        (["--prompt-ids", ""], ["no tokens"]),
        (["--prompt-ids", "1", "--system", "s"], ["--system"]),
        (["--prompt-ids", "1", "--chat"], ["--chat"]),
        (["--raw", "-p", "a", "--system", "s"], ["--system"]),
        (["-p", "a", "-n", "0"], ["--n-predict", "0"]),
        (["-p", "a", "-n", "-1"], ["--n-predict", "-1"]),
        (["-p", "a", "-n", "99999999999999999999"], ["--n-predict 99999999999999999999", "at most"]),
        (["-p", "a", "-c", "99999999999999999999"], ["--ctx-size 99999999999999999999", "at most"]),
        (["-p", "a", "--device", "-1"], ["--device -1"]),
        (["--prompt-ids", "1,2,3", "-n", "5", "-c", "7"], ["3 tokens", "5 new", "7", "8"]),
        (["--prompt-ids", "1", "-c", "0"], ["0"]),
        (["--prompt-ids", "1", "--temp", "-1"], ["--temp", "-1"]),
        (["--prompt-ids", "1", "--top-p", "0"], ["--top-p"]),
        (["--prompt-ids", "1", "--seed", "-1"], ["--seed"]),
        (["--prompt-ids", "1", "--stop", ""], ["--stop"]),
        (["--prompt-ids", "1", "--window", "0"], ["--window", "0"]),
        (["--prompt-ids", "1", "--window", "-256"], ["--window", "-256"]),
        (["--prompt-ids", "1", "--window", "256", "--residency", "full"], ["--residency full", "256"]),
        (["--prompt-ids", "1", "--residency", "some"], ["'some'", "window"]),
        (["--prompt-ids", "1", "--ubatch", "0"], ["--ubatch"]),
        (["--prompt-ids", "1", "--cache-type-k", "q4_1"], ["--cache-type-k", "'q4_1'", "bf16"]),
        (["--prompt-ids", "1", "--cache-type-v", "f64"], ["--cache-type-v"]),
        (["--prompt-ids", "1", "--cache-type-tail-k", "q5_0"], ["--cache-type-tail-k", "'q5_0'", "turbo2"]),
        (["--prompt-ids", "1", "--cache-type-tail-v", "same"], ["--cache-type-tail-v", "'same'"]),
        (["--prompt-ids", "1", "--kv-protect", "-1"], ["--kv-protect -1"]),
        (["--prompt-ids", "1", "--backend", "tpu"], ["'tpu'"]),
        (["--prompt-ids", "1", "--vram-target", "lots"], ["--vram-target", "'lots'"]),
        (["--prompt-ids", "1", "--vram-target", "0"], ["--vram-target"]),
        (["--prompt-ids", "1", "-o", "xml"], ["'xml'"]),
        (["--prompt-ids", "1", "--n-predict"], ["--n-predict"]),
        (["-p", "a\udcff"], ["byte 1", "0xff", "UTF-8"]),
        (["-f", "/nonexistent/prompt.txt"], ["/nonexistent/prompt.txt"]),
        (["-f", str(LLAMA)], [str(LLAMA), "UTF-8"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(scripted, capsys, arguments, words):
    engine = scripted([1])
    assert rollkv("generate", "-m", LLAMA, *arguments) == 2
    line = one_error(capsys)
    assert not engine.loaded, "the engine was loaded all the same"
    assert all(word in line for word in words), line


def test_stdin_that_is_not_text_is_refused(scripted, monkeypatch, capsys):
    scripted([1])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xfe")))
    assert rollkv("generate", "-m", LLAMA, "-p", "-") == 2
    assert "stdin: byte 2 (0xfe)" in one_error(capsys)


@pytest.mark.parametrize("command", [["generate", "-p", "a", "-m"], ["info"], ["plan", "-m"], ["tokenize", "-p", "a", "-m"]])
def test_bad_model_files_exit_4(tmp_path, capsys, command):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"<html>not a model</html>")
    for path in (bad, tmp_path / "missing.gguf"):
        assert rollkv(*command, path) == 4
        assert str(path) in one_error(capsys)


def test_without_a_model_the_default_one_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ROLLKV_MODELS", str(tmp_path))
    assert rollkv("generate", "-p", "a") == 4
    line = one_error(capsys)
    assert str(tmp_path) in line and "-m FILE" in line


@pytest.mark.parametrize("arguments", [["nope"], ["--nope"], ["generate", "--nope"], ["generate", "-n", "many"], ["info", "a", "b"]])
def test_the_parser_s_errors_are_one_line_too(capsys, arguments):
    assert rollkv(*arguments) == 2
    one_error(capsys)
    assert rollkv(*arguments, "-o", "json") == 2
    assert "error" in json.loads(capsys.readouterr().out)


# -- whole runs on the reference backend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_greedy_continues_as_the_other_engine_did(capsys, name):
    with np.load(FIXTURES / f"{name}.npz") as stored:
        prompt, greedy = stored["tokens"][:32].tolist(), stored["greedy"].tolist()
    ids = ",".join(map(str, prompt))
    assert rollkv("generate", "-m", FIXTURES / f"{name}.gguf", "--prompt-ids", ids, "-n", 24, "--ignore-eos", "-o", "json", *ON_HOST) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_ids"] == prompt and result["ids"] == greedy
    statistics = result["statistics"]
    assert (statistics["prompt_tokens"], statistics["generated_tokens"]) == (32, 24)
    assert statistics["pp_tokens_per_second"] > 0 and statistics["tg_tokens_per_second"] > 0 and result["stop_reason"] == "length"


def test_a_window_streams_the_tail_and_changes_nothing(capsys):
    generator = np.random.default_rng(20)
    ids = ",".join(map(str, generator.integers(0, 512, 600)))
    common = ["generate", "-m", LLAMA, "--prompt-ids", ids, "-n", 12, "--ignore-eos", "--ubatch", 128, "-o", "json", *ON_HOST]
    assert rollkv(*common) == 0
    resident = json.loads(capsys.readouterr().out)
    assert rollkv(*common, "--window", 256) == 0
    windowed = json.loads(capsys.readouterr().out)
    assert windowed["ids"] == resident["ids"] and windowed["text"] == resident["text"]
    assert resident["statistics"]["tail_cells"] == 0 and windowed["statistics"]["tail_cells"] >= 256
    assert windowed["budget"]["window_cells"] == 256 and windowed["statistics"]["link_bytes"] > 0


def test_a_seed_gives_the_same_text_again(capsys):
    texts = []
    for seed in (3, 3, 4):
        assert (
            rollkv("generate", "-m", LLAMA, "-p", "once", "--raw", "-n", 20, "--temp", 1.5, "--seed", seed, "--ignore-eos", *ON_HOST) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_verbose_shows_prompt_and_budget_on_stderr(capsys):
    assert rollkv("generate", "-m", LLAMA, "-p", "hello", "--raw", "-n", 2, "-v", *ON_HOST) == 0
    err = capsys.readouterr().err
    assert "resident window" in err and "stop tokens" in err and "beginning with" in err
    assert "no staging ring: everything is resident" in err and "predicted behind a full context" in err
    (start,) = [line for line in err.splitlines() if line.startswith("rollkv: start ")]
    parts = ["imports", "vocabulary and prompt", "header", "device", "code", "memory", "weights", "first token"]
    assert [part.rsplit(" ", 1)[0] for part in start.split(": ")[2].split(", ")] == parts


def test_a_cap_below_the_minimum_exits_5_with_its_terms(capsys, no_gpu):
    assert rollkv("plan", "-m", LLAMA, "-c", 1000, "--vram-target", "1MiB") == 5
    line = one_error(capsys)
    assert "weights" in line and "context" in line and "1.0 MiB" in line


def test_plan_prints_the_budget_twice_over(capsys, no_gpu):
    assert rollkv("plan", "-m", LLAMA, "-c", 1000, "--window", 512, "-o", "json") == 0
    planned = json.loads(capsys.readouterr().out)
    budget = planned["budget"]
    assert planned["ctx_size"] == 1000 and budget["window_cells"] == 512 and budget["tail_pages"] == 2
    assert sum(budget["device_bytes"].values()) == budget["total_bytes"]
    assert rollkv("plan", "-m", LLAMA, "-c", 1000, "--window", 512) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in budget["device_bytes"]) and "cells in the tail" in out
    assert "predicted behind a full context, an estimate: " in out
    assert budget["ring_slots"] == 2 and 0 < budget["predicted"]["tokens_per_second"] < 1 / (1e-3 * budget["predicted"]["compute_ms"])
    assert rollkv("plan", "-m", LLAMA, "-c", 1000, "--window", 512, "-v") == 0
    assert "rollkv: staging ring of 2 slots of 2 pages" in capsys.readouterr().err


def test_info(capsys):
    assert rollkv("info", LLAMA, "-o", "json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "llama" and facts["supported"] and facts["vocab_size"] == 512
    assert facts["kv_bytes_per_cell_f16"] == 2 * 2 * (16 + 16) * 2, "2 layers, 2 KV heads, 16 + 16 values of 2 bytes"
    assert facts["weight_bytes"] == sum(entry["bytes"] for entry in facts["tensors_by_type"].values())
    assert facts["metadata"]["general.architecture"] == "llama"
    assert facts["metadata"]["tokenizer.ggml.tokens"]["length"] == 512
    assert rollkv("info", LLAMA, "-m", LLAMA) == 2 and "give one file" in capsys.readouterr().err
    for named in ((LLAMA,), ("-m", LLAMA)):
        assert rollkv("info", *named, "-o", "json") == 0 and json.loads(capsys.readouterr().out) == facts
    assert rollkv("info", LLAMA) == 0
    out = capsys.readouterr().out
    assert "general.architecture" in out and "F32" in out and max(map(len, out.splitlines())) < 200


def test_tokenize_gives_ids_and_pieces(capsys):
    cases = json.loads((FIXTURES / "tokenizers.json").read_text())["llama"][:4]
    assert len(cases) == 4
    for case in cases:
        assert rollkv("tokenize", "-m", LLAMA, "-p", case["text"], "--no-bos", "-o", "json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["ids"] == case["ids"] and len(result["pieces"]) == len(case["ids"])
        assert rollkv("tokenize", "-m", LLAMA, "-p", case["text"], "--no-bos") == 0
        lines = capsys.readouterr().out.splitlines()
        assert [int(line.split("\t")[0]) for line in lines] == case["ids"]
        assert [json.loads(line.split("\t")[1]) for line in lines] == result["pieces"]


# -- the program itself --------------------------------------------------------------------------------------------------------


def start(*arguments: object, **options) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rollkv", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, **options)


def test_version_and_help_load_nothing_heavy():
    program = (
        "import sys; from rollkv.cli.main import main; codes = [main([w]) for w in ('--version', '--help', '-h')] + [main([])]; "
        "heavy = {'numpy', 'rich', 'cuda', 'gguf', 'tokenizers', 'jinja2', 'tabulate'} & set(sys.modules); "
        "print(codes, sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "[0, 0, 0, 0] []\n"
    assert done.stdout.startswith("rollkv 0.1.0\n") and done.stdout.count("generate") >= 3


def test_env_is_json_and_never_fails(tmp_path):
    process = start("--env", env={"PATH": os.environ["PATH"], "HOME": str(tmp_path / "nowhere")})
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    facts = json.loads(out)
    assert facts["rollkv"] == "0.1.0" and "error" not in facts


def test_ctrl_c_in_the_middle_of_a_run():
    process = start("generate", "-m", LLAMA, "--prompt-ids", "1,2,3", "-n", 100_000, "--ignore-eos", *ON_HOST)
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 20 and rest.endswith(b"\n")
    assert b"Traceback" not in err and err.rstrip().endswith(b"stop interrupted")


def test_a_reader_that_goes_away():
    process = start("generate", "-m", LLAMA, "--prompt-ids", "1,2,3", "-n", 100_000, "--ignore-eos", *ON_HOST)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(20)
    process.stdout.close()
    begin = time.monotonic()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 0, err
    assert b"Traceback" not in err and b"error" not in err.lower()
    assert time.monotonic() - begin < 60


def test_module_is_the_command():
    process = start("--version")
    out, _ = process.communicate(timeout=60)
    assert out == b"rollkv 0.1.0\n"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["info", str(FIXTURES / "llama.gguf")]])
def test_a_full_disk_is_said_in_one_line(arguments: list[str]) -> None:
    """It used to end as a fault of our own, with a traceback."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "rollkv", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 74
    assert done.stderr == "rollkv: error: the result cannot be written: No space left on device; free space, or send stdout elsewhere\n"


@pytest.mark.parametrize("arguments,code", [(["nosuch"], 2), (["info", "/nofile"], 4)])
def test_a_full_stderr_changes_no_exit_code(arguments: list[str], code: int) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "rollkv", *arguments], stdout=subprocess.PIPE, stderr=full, check=False)
    assert done.returncode == code


def test_a_closed_stdout_is_nobody_listening() -> None:
    command = f"{sys.executable} -m rollkv info {FIXTURES / 'llama.gguf'} >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_empty_entries_among_prompt_ids_are_refused() -> None:
    from rollkv.cli.options import parse_ids

    assert parse_ids("1, 2\n3") == (1, 2, 3)
    for text in ("1,,2", ",1", "1,"):
        with pytest.raises(UsageError, match="empty entry"):
            parse_ids(text)
