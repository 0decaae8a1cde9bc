"""llama-bench beside our rungs: a stand-in that checks how it is called and prints lines recorded from the real one; and what goes wrong."""

import csv
import io
import json
import stat
import sys
from pathlib import Path

import pytest

from rollkv.cli import main as boundary
from rollkv.errors import UsageError
from rollkv.synth import open_synth, write_gguf
from rollkv.tasks.generate import cache_config
from rollkv.tasks.peers import Peer, PeerRate, PeerTest, Setup, find_peer, run_peer, setups_beside

# A line as llama-bench -o jsonl writes it, all fields and their types; the stand-in puts in what it is asked for.
RECORDED = (
    '{"build_commit": "7f3b9c21", "build_number": 6710, "cpu_info": "Intel(R) Xeon(R) Platinum 8480C", "gpu_info": "NVIDIA H200", '
    '"backends": "CUDA", "model_filename": "qwen3-8b.gguf", "model_type": "qwen3 8B Q8_0", "model_size": 8701741056, '
    '"model_n_params": 8190735360, "n_batch": 2048, "n_ubatch": 512, "n_threads": 16, "cpu_mask": "0x0", "cpu_strict": false, "poll": 50, '
    '"type_k": "f16", "type_v": "f16", "n_gpu_layers": 99, "n_cpu_moe": 0, "split_mode": "layer", "main_gpu": 0, "no_kv_offload": false, '
    '"flash_attn": true, "devices": "auto", "tensor_split": "0.00", "tensor_buft_overrides": "none", "use_mmap": true, '
    '"embeddings": false, "no_op_offload": 0, "n_prompt": 8192, "n_gen": 0, "n_depth": 0, "test_time": "2026-11-02T10:21:07Z", '
    '"avg_ns": 729864000, "stddev_ns": 2113000, "avg_ts": 11224.120000, "stddev_ts": 32.500000, '
    '"samples_ns": [ 728370000, 731358000 ], "samples_ts": [ 11247.1, 11201.1 ]}'
)
WITHOUT_RATE = json.dumps(json.loads(RECORDED) | {"n_prompt": 4096, "avg_ts": None})
STAND_IN = f"""#!{sys.executable}
import json, os, sys
arguments = sys.argv[1:]
given = dict(zip(arguments[::2], arguments[1::2], strict=True))
with open(__file__ + ".calls", "a") as calls:
    calls.write(json.dumps(given | {{"GPU": os.environ["CUDA_VISIBLE_DEVICES"]}}) + "\\n")
if list(given) != ["-m", "-p", "-n", "-d", "-r", "-ngl", "-nkvo", "-ctk", "-ctv", "-fa", "-o"]:
    sys.exit("error: invalid parameter for argument")
if open(given["-m"], "rb").read(4) != b"GGUF" or given["-fa"] != "1" or given["-o"] != "jsonl":
    sys.exit("error: not a model, or other options")
for name, key, rate in (("n_prompt", "-p", 5000.0), ("n_gen", "-n", 100.0)):
    if int(given[key]):
        line = json.loads({RECORDED!r}) | {{"n_prompt": 0, "n_gen": 0, name: int(given[key]), "n_depth": int(given["-d"]), "avg_ts": rate}}
        line |= {{"n_gpu_layers": int(given["-ngl"]), "no_kv_offload": given["-nkvo"] == "1", "type_k": given["-ctk"], "type_v": given["-ctv"]}}
        print(json.dumps(line), flush=True)
"""
TESTS = PeerTest(4096, 0, 0), PeerTest(0, 64, 4096)
RESIDENT = Setup("resident", 99)


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    with open_synth("synth:tiny") as file:
        write_gguf(file, path)
    return path


@pytest.fixture
def stand_in(tmp_path) -> Path:
    return program(tmp_path / "llama-bench", STAND_IN)


def calls(stand_in: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(f"{stand_in}.calls").read_text().splitlines()]


def test_it_has_some_of_our_types(stand_in, model):
    cache = cache_config(8192, cache_type_k="q8_0", cache_type_v="q4_0")
    assert run_peer(find_peer(f"llama-bench={stand_in}", model, 0), RESIDENT, TESTS, 3, cache, 60).failure is None
    assert [calls(stand_in)[0][option] for option in ("-ctk", "-ctv")] == ["q8_0", "q4_0"]


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"cache_type_v": "turbo3"}, "KV f16/turbo3 (lossy)"),
        ({"cache_type_k": "q8_0", "kv_rotate": True}, "KV q8_0/f16 rotated (lossy)"),
        ({"cache_type_k": "q8_0", "kv_protect": 1}, "KV q8_0/f16, first and last layer f16 (lossy)"),
        ({"cache_type_tail_k": "q8_0"}, "KV f16/f16, tail q8_0/f16 (lossy)"),
    ],
)
def test_a_cache_that_it_does_not_have_is_its_failure(stand_in, model, fields, words):
    result = run_peer(find_peer(f"llama-bench={stand_in}", model, 0), RESIDENT, TESTS, 3, cache_config(8192, **fields), 60)
    assert result.failure == f"llama-bench has no cache like {words}" and not Path(f"{stand_in}.calls").exists()


def test_rates_come_back_from_the_tests_that_were_asked_for(stand_in, model):
    result = run_peer(
        find_peer(f"llama-bench={stand_in}", model, 0), Setup("x", 30, True), TESTS, 3, cache_config(8192, cache_type_k="bf16"), 60
    )
    assert result.failure is None and result.build == "7f3b9c21 (6710)"
    assert (result.prefill, result.decode) == (PeerRate(5000.0, 32.5), PeerRate(100.0, 32.5))
    shared = {"-m": str(model), "-r": "3", "-ngl": "30", "-nkvo": "1", "-ctk": "bf16", "-ctv": "f16", "-fa": "1", "-o": "jsonl", "GPU": "0"}
    assert calls(stand_in) == [shared | {"-p": "4096", "-n": "0", "-d": "0"}, shared | {"-p": "0", "-n": "64", "-d": "4096"}]
    assert result.arguments[:6] == ("-m", str(model), "-p", "0", "-n", "64")


@pytest.mark.parametrize(
    "given,device,seen", [(None, 1, "1"), ("", 0, ""), ("3", 1, "3"), ("3, 5", 1, "5"), ("GPU-8932f937", 0, "GPU-8932f937")]
)
def test_it_sees_our_device_alone(stand_in, model, monkeypatch, given, device, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert run_peer(Peer(stand_in, model, device), RESIDENT, (PeerTest(8, 0, 0),), 1, cache_config(64), 60).failure is None
    assert [call["GPU"] for call in calls(stand_in)] == [seen]


def test_one_call_may_bring_both_rates(stand_in, model):
    result = run_peer(Peer(stand_in, model), RESIDENT, (PeerTest(512, 64, 4096),), 1, cache_config(8192), 60)
    assert (result.prefill.mean, result.decode.mean) == (5000.0, 100.0) and len(calls(stand_in)) == 1


@pytest.mark.parametrize(
    "body,words",
    [
        ("echo 'error: failed to load model' >&2; echo >&2; exit 1", "ended with exit code 1: error: failed to load model"),
        ("exit 3", "ended with exit code 3"),
        ("kill -9 $$", "was killed by signal 9"),
        ("sleep 30", "did not end within 0.5 s"),
        ("true", "printed nothing"),
        ("echo '| model | size |'", "printed a line that is no JSON object: '| model | size |'"),
        ("echo '[1]'", "no JSON object"),
        ("echo '{\"n_prompt\": 4096}'", "gave no line with n_prompt 4096, n_gen 0, n_depth 0, no_kv_offload False, type_k f16, type_v f16"),
        (f"echo '{WITHOUT_RATE}'", "gave no rate: avg_ts None"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(tmp_path, model, body, words):
    peer = Peer(program(tmp_path / "broken", f"#!/bin/sh\n{body}\n"), model)
    result = run_peer(peer, RESIDENT, TESTS, 1, cache_config(8192), 0.5 if "sleep" in body else 60)
    assert result.failure.startswith("llama-bench ") and words in result.failure and "\n" not in result.failure
    assert result.prefill is result.decode is None and result.arguments


def test_a_program_that_cannot_be_started(tmp_path, model):
    result = run_peer(Peer(program(tmp_path / "x", "\x7fELF nonsense"), model), RESIDENT, TESTS, 1, cache_config(8192), 60)
    assert "cannot be started" in result.failure


@pytest.mark.parametrize(
    "text,path,words",
    [
        ("vllm=/bin/true", "x.gguf", "--peer 'vllm=/bin/true' is not known"),
        ("llama-bench", "x.gguf", "write llama-bench=PATH"),
        ("llama-bench=/no/such/program", "x.gguf", "no program /no/such/program"),
        ("llama-bench=/bin/true", "synth:tiny:Q4_K", "write it with 'rollkv synth tiny:Q4_K -o FILE'"),
    ],
)
def test_a_peer_that_cannot_run_is_refused(text, path, words):
    with pytest.raises(UsageError) as caught:
        find_peer(text, Path(path), 0)
    assert words in str(caught.value)


def test_setups_spill_what_the_rung_spills():
    assert setups_beside(0, 36, 1e8) == (RESIDENT,)
    resident, on_host, fewer = setups_beside(3.5e8, 36, 1e8)
    assert resident == RESIDENT and on_host.kv_on_host and on_host.gpu_layers == 99 and (fewer.gpu_layers, fewer.kv_on_host) == (33, False)
    assert setups_beside(1e12, 36, 1e8)[2].gpu_layers == 0 and setups_beside(1, 120, 1e8)[0].gpu_layers == 121


# -- the command ---------------------------------------------------------------------------------------------------------------


def run(model: Path, *arguments: object) -> int:
    fixed = ("ladder", "-m", model, "--backend", "host", "-d", 300, "-n", 2, "-r", 1, "--ubatch", 64)
    return boundary.main([str(word) for word in (*fixed, *arguments)])


def test_rungs_and_peers_take_turns(stand_in, model, capsys):
    assert run(model, "--tail", "0,384KiB", "--peer", f"llama-bench={stand_in}", "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    named = ["resident", "llama-bench resident", "tail 384.0 KiB", "llama-bench KV in host RAM (-nkvo 1)", "llama-bench -ngl 3"]
    assert [row["rung"] for row in result["rows"]] == named and [row["line"] for row in result["rows"]] == [
        "rung",
        "peer",
        "rung",
        "peer",
        "peer",
    ]
    ours, theirs = result["rows"][0], result["rows"][1]
    assert set(ours) == set(theirs) and theirs["tg_tokens_per_second"] == 100 and theirs["pp_test"] == ours["pp_test"] == "pp300"
    assert theirs["tg_test"] == ours["tg_test"] == "tg2 @ d300" and theirs["peer_build"] == "7f3b9c21 (6710)" and ours["peer"] is None
    assert result["verdict"] == "undecided" and result["resident_ms"] == ours["step_ms"], "peers are no points of the fit"
    assert [call["-ngl"] for call in calls(stand_in)] == ["99"] * 4 + ["3"] * 2


def test_a_peer_at_every_depth_and_in_every_form(stand_in, model, capsys):
    peer = ("--peer", f"llama-bench={stand_in}")
    assert run(model, "-d", "0,64", "-p", 20, *peer) == 0
    text = capsys.readouterr().out
    assert "| llama-bench resident | pp20 @ d64 | 5000.00 |" in text and "build 7f3b9c21 (6710)" in text
    assert [(call["-p"], call["-n"], call["-d"]) for call in calls(stand_in)] == [("20", "2", "0"), ("20", "2", "64")]
    assert run(model, "--tail", "0", "--fill", "random", *peer, "-o", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[1]["tg_tokens_per_second"] == "100.0" and rows[1]["pp_test"] == "", "what is not measured is not asked of the peer"
    assert run(model, "--tail", "0", *peer, "-o", "jsonl") == 0
    assert [json.loads(line)["line"] for line in capsys.readouterr().out.splitlines()] == ["rung", "peer", "summary"]


def test_a_peer_that_fails_is_a_row(tmp_path, model, capsys):
    broken = program(tmp_path / "llama-bench", "#!/bin/sh\necho no such model >&2\nexit 1\n")
    assert run(model, "--tail", "0", "--peer", f"llama-bench={broken}", "-o", "json") == 0
    out = capsys.readouterr()
    row = json.loads(out.out)["rows"][1]
    assert (
        row["outcome"] == "failed" and row["refusal"] == "llama-bench ended with exit code 1: no such model" and row["refusal"] in out.err
    )
    assert run(model, "--tail", "0", "--peer", f"llama-bench={broken}") == 0
    assert "no such model" in capsys.readouterr().out
    assert run(model, "--peer", f"llama-bench={broken}", "--peer-timeout", 0) == 2
    assert "--peer-timeout 0" in capsys.readouterr().err
