"""needle: prompts that fit exactly, what counts as found, grids on an engine that reads its prompt or loses part of it, resuming."""

import json
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollkv import plots
from rollkv.budget import Budget
from rollkv.cli import main as boundary
from rollkv.engine import Stats
from rollkv.errors import DeviceError, UsageError
from rollkv.gguf_file import open_gguf
from rollkv.host_backend import HostBackend
from rollkv.roofline import ASSUMED, StepCost
from rollkv.tasks.answers import holds, judge
from rollkv.tasks.generate import TextModel, open_text_model
from rollkv.tasks.haystack import NeedleRequest, build_haystack, check_request, make_needle, smallest_length
from rollkv.tasks.needle import appending, read_finished, verdict
from rollkv.tokenizer import Tokenizer

LLAMA = Path(__file__).parent / "fixtures" / "llama.gguf"
PAGE = 256
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</{{ message.role }}>{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model() -> TextModel:
    return open_text_model(LLAMA)


@pytest.fixture(scope="module")
def chat_model(model) -> TextModel:
    with open_gguf(LLAMA) as file:
        return replace(model, tokenizer=Tokenizer.from_metadata(dict(file.metadata) | {"tokenizer.chat_template": TEMPLATE}))


def decoded(model: TextModel, ids) -> str:
    stream = model.tokenizer.stream()
    return "".join(stream.push(token) for token in ids) + stream.finish()


# -- prompts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [129, 300, 1024, 4096])
@pytest.mark.parametrize("depth", [0.0, 33.3, 100.0])
def test_a_prompt_fills_its_length_and_holds_its_needle(model, length, depth):
    request = NeedleRequest((length,), (depth,), seed=5)
    check_request(model, request)
    haystack = build_haystack(model, request, length, depth)
    text, needle = decoded(model, haystack.ids), haystack.needle
    word = 16  # tokens of a long word with this small vocabulary
    assert length - word <= len(haystack.ids) + haystack.reply_tokens <= length
    assert text.endswith("\n\n" + needle.question) and text.count(needle.text) == 1 and needle.text.startswith(needle.question)
    assert decoded(model, haystack.ids[haystack.first_cell : haystack.end_cell]).strip() == needle.text
    room = (haystack.end_cell - haystack.first_cell) / len(haystack.ids) * 100
    sentence = 130 / len(haystack.ids) * 100  # half of a long one in tokens: how far a boundary may be
    assert abs(haystack.depth - depth * (100 - room) / 100) <= room + sentence


def test_the_needle_stands_between_sentences(model):
    request = NeedleRequest((2048,), (50.0,))
    haystack = build_haystack(model, request, 2048, 50.0)
    before, after = decoded(model, haystack.ids).split(haystack.needle.text)
    assert before.rstrip().endswith(".") and after.lstrip()[0].isupper()


def test_the_seed_decides_everything(model):
    def prompt(seed: int, length: int = 700, depth: float = 50.0) -> tuple[int, ...]:
        return build_haystack(model, NeedleRequest((length,), (depth,), seed=seed), length, depth).ids

    assert prompt(1) == prompt(1)
    answers = {
        make_needle(NeedleRequest((1,), (1.0,), seed=seed), length, depth).answer
        for seed in (1, 2)
        for length in (10, 20)
        for depth in (0.0, 0.5)
    }
    assert len(answers) == 8, "every cell has a value of its own"
    assert prompt(1) != prompt(2)


def test_the_pinned_needle():
    """The same seed gives the same prompts in every version: stored rows stay comparable."""
    needle = make_needle(NeedleRequest((1024,), (50.0,)), 1024, 50.0)
    assert needle.text == "The passcode of the jade panther is 5316708." and needle.answer == "5316708"


def test_lengths_below_the_smallest_are_refused_with_it(model):
    smallest = smallest_length(model, NeedleRequest((9,), (0.0,)), 9, 0.0)
    with pytest.raises(UsageError, match="needle, question and reply alone take") as refused:
        check_request(model, NeedleRequest((20, 4096), (0.0, 100.0)))
    named = int(str(refused.value).split("lengths of ")[1].split()[0])
    assert abs(named - smallest) < 40
    check_request(model, NeedleRequest((named + 40,), (0.0, 100.0)))


def test_chat_prompts_fit_with_their_template(chat_model):
    request = NeedleRequest((600,), (50.0,), style="chat")
    check_request(chat_model, request)
    haystack = build_haystack(chat_model, request, 600, 50.0)
    text = decoded(chat_model, haystack.ids)
    assert text.startswith("<user>Read the following") and text.endswith("Answer with the passcode alone.</user><assistant>")
    assert 584 <= len(haystack.ids) + haystack.reply_tokens <= 600
    assert decoded(chat_model, haystack.ids[haystack.first_cell : haystack.end_cell]).strip() == haystack.needle.text


def test_ones_own_needle(model):
    request = NeedleRequest((300,), (0.0,), needle="In Lyon the best bread is made by Claire, they say.", answer="Claire")
    assert make_needle(request, 300, 0.0).question == "In Lyon the best bread is made by"
    chat = make_needle(replace(request, style="chat"), 300, 0.0)
    assert chat.question.endswith(": In Lyon the best bread is made by")
    assert make_needle(replace(request, question="Who bakes?"), 300, 0.0).question == "Who bakes?"
    for answer in ("nobody", "In Lyon"):
        with pytest.raises(UsageError, match="give --question"):
            make_needle(replace(request, answer=answer), 300, 0.0)
    for change in ({"needle": None}, {"answer": None}, {"answer": " "}, {"style": "verse"}, {"depths": ()}, {"reply_tokens": 0}):
        with pytest.raises(UsageError):
            check_request(model, replace(request, **change))


# -- scoring -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer,stop,outcome",
    [
        (" 4821736.", "length", "found"),
        ("The passcode is 4821736, as the text says.", "length", "found"),
        ("4821736", "stop_token", "found"),
        ("\n**4,821,736**", "stop_token", "found"),
        ("4 821 736!", "length", "found"),
        ("4\u202f821\u202f736 ", "stop_token", "found"),
        ("\uff14\uff18\uff12\uff11\uff17\uff13\uff16", "stop_token", "found"),
        ("it is 4821736.\n", "length", "found"),
        ("48217365", "stop_token", "missed"),
        ("14821736", "stop_token", "missed"),
        ("4821736.5", "stop_token", "missed"),
        ("0.4821736", "stop_token", "missed"),
        ("x4821736", "stop_token", "missed"),
        ("482173", "stop_token", "missed"),
        ("", "stop_token", "missed"),
        ("I cannot find it in the", "length", "missed"),
        ("The value is 9137", "length", "missed"),
        ("The value is 4821", "length", "cut off"),
        ("4,821", "length", "cut off"),
        ("4,821,", "length", "cut off"),
        ("4,821,73", "length", "cut off"),
        ("\n \n", "length", "missed"),
        ("14,821,736", "stop_token", "missed"),
        ("4,821.736", "stop_token", "missed"),
        ("The passcode is 4821736", "length", "cut off"),
        ("<think> where was it", "length", "cut off"),
        ("<think> it was 4821736 </think> 12", "length", "found"),
        ("<think> hm </think> no idea at all", "length", "missed"),
        ("<think> hm", "stop_token", "missed"),
    ],
)
def test_only_the_whole_value_scores(answer, stop, outcome):
    assert judge(answer, "4821736", stop, 16) == outcome


def test_words_score_without_case_and_blanks():
    assert judge("it is  BLUE\nCheese.", "blue cheese", "length", 20) == "found"
    assert judge("blue cheeses", "blue cheese", "stop_token", 20) == "missed"
    assert judge("(a+b)*c!", "(a+b)*c", "stop_token", 20) == "found"


def test_a_blank_reply_is_cut_off_where_the_value_did_not_fit():
    assert judge(" ", "4821736", "length", 1) == "cut off" and judge(" ", "4821736", "length", 8) == "missed"
    assert judge(" ", "4821736", "stop_token", 1) == "missed", "it had its say"


def test_groups_of_three_digits_are_one_number_on_both_sides():
    assert holds("1234", "1,234") and holds("1 234", "1,234") and holds("it is 1,234.", "1234")
    assert not holds("2024 479", "2024479"), "four digits are no group"
    assert not holds("12 3456", "123456") and not holds("1,2345", "12345")


@pytest.mark.parametrize(
    "needle,answer,question,words",
    [
        ("Nothing here at all.", "corn", "The road", "does not stand in --needle"),
        ("The mill grinds corn.", "corn", None, "stands in the filler"),
        ("The mill grinds ACORNS.", "acorn", "What?", "does not stand in --needle"),
        ("The value is 4213.", "4213", "Is it 4,213?", "stands in the question"),
        ("Read this sentence.", "sentence", None, "stands in the question"),
    ],
)
def test_an_answer_that_proves_nothing_is_refused(chat_model, needle, answer, question, words):
    request = NeedleRequest((600,), (0.0,), "chat", needle=needle, answer=answer, question=question)
    with pytest.raises(UsageError, match=words):
        check_request(chat_model, request)
    check_request(chat_model, replace(request, needle="The value is 4213.", answer="4213", question=None))


# -- grids ---------------------------------------------------------------------------------------------------------------------


class ReadingEngine:
    """Continues like the longest earlier match of the last tokens, among the cells that it can still see.

    window_pages: pages that stay; older ones are the tail, whose cells it forgets when `forgets`. It stops before cell number
    `interrupt_at` with a KeyboardInterrupt.
    """

    backend_name = "host"
    backend = HostBackend()

    def __init__(self, *, window_pages: int = 100, forgets: bool = False, interrupt_at: int | None = None) -> None:
        self.window_pages, self.forgets, self.interrupt_at = window_pages, forgets, interrupt_at
        self.prompts: list[list[int]] = []
        self.stats, self.copied_bytes = Stats(), (0, 0)

    def load(self, path: Path, cache, **options: object) -> "ReadingEngine":
        pages = -(-cache.ctx_size // PAGE)
        self.cache_config = cache
        self.budget = Budget(
            (("weights", 1000),), None, pages, min(self.window_pages, pages), PAGE, None, 0, 0, 1000, False, 512, StepCost(0.001), ASSUMED
        )
        return self

    def generate_ids(self, prompt_ids, num_tokens, sampling, stop_ids, on_progress) -> Iterator[int]:
        if len(self.prompts) == self.interrupt_at:
            raise KeyboardInterrupt
        self.prompts.append(list(prompt_ids))
        history = list(prompt_ids)
        tail = max(-(-len(history) // PAGE) - self.window_pages, 0)
        self.copied_bytes = (self.copied_bytes[0] + tail * 1000, 0)
        seen = tail * PAGE if self.forgets else 0
        for count in range(num_tokens):
            history.append(follower(history, seen))
            self.stats = replace(self.stats, prompt_tokens=len(prompt_ids), generated_tokens=count + 1, ttft_seconds=0.5)
            yield history[-1]
        self.stats = replace(self.stats, stop_reason="length")

    def __enter__(self) -> "ReadingEngine":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def follower(history: list[int], seen: int) -> int:
    """The token behind the longest match of the end of history, at least 5 tokens, that begins at `seen` or later; else the first token."""
    end = tuple(history[-5:])
    matches = [i + 5 for i in range(seen, len(history) - 5) if tuple(history[i : i + 5]) == end]

    def length(at: int) -> int:
        return next((n for n in range(at - seen) if history[at - 1 - n] != history[-1 - n]), at - seen)

    return history[max(matches, key=length)] if matches else history[0]


@pytest.fixture
def engine(monkeypatch):
    def install(**options: object) -> ReadingEngine:
        made = ReadingEngine(**options)  # type: ignore[arg-type]
        monkeypatch.setattr("rollkv.startup.load", made.load)
        return made

    return install


def command(*arguments: object, lengths: str = "600,1000,2k", depths: str = "0,50,100") -> int:
    fixed = ("needle", "-m", str(LLAMA), "--lengths", lengths, "--depths", depths)
    return boundary.main([*fixed, *map(str, arguments)])


def test_an_engine_that_reads_finds_all(engine, capsys):
    made = engine()
    assert command("-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] and (result["found"], result["missed"], result["cut_off"], result["not_run"]) == (9, 0, 0, 0)
    assert 0.6 < result["rate_low_95"] < result["rate_high_95"] == 1
    assert made.cache_config.ctx_size == 2048, "one load, for the longest"
    for row, prompt in zip(result["rows"], made.prompts, strict=True):
        assert row["expected"] in row["answer"] and row["outcome"] == "found" and row["place"] == "window" and row["tail_pages"] == 0
        assert row["prompt_tokens"] == len(prompt) and row["length"] <= row["length_asked"]
        assert not any(isinstance(value, (dict, list)) for value in row.values()), "rows are flat"
        assert (row["schema_version"], row["command"], row["model_file"], row["gpu"], row["temperature"]) == (
            1,
            "needle",
            "llama.gguf",
            None,
            0,
        )
        assert row["utc_time"].endswith("Z") and row["seed"] == 0 and row["style"] == "completion" and row["ctx_size"] == 2048


def test_the_table_says_where_needles_lay_and_what_it_shows(engine, capsys):
    engine(window_pages=2)
    assert command() == 0
    out = capsys.readouterr().out
    assert "found*" in out and "* in the streamed tail" in out and "found 9 of 9 needles" in out
    assert (
        "in the streamed tail: " in out and "in the resident window: " in out and "logit-equiv" in out and "nothing was streamed" not in out
    )
    engine()
    assert command() == 0
    assert "nothing was streamed" in capsys.readouterr().out


def test_an_engine_that_forgets_the_tail_is_told(engine, capsys):
    engine(window_pages=2, forgets=True)
    assert command("-o", "json") == 1
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert not result["passed"] and result["exit_code"] == 1 and "were missed" in result["error"]
    places = {row["place"]: set() for row in result["rows"]}
    for row in result["rows"]:
        places[row["place"]].add(row["outcome"])
    assert places["tail"] == {"missed"} and places["window"] == {"found"}, "missed exactly where it forgot"
    assert command() == 1
    text = capsys.readouterr()
    assert "MISSED*" in text.out and text.err.count("were missed") == 1


def test_replies_that_are_cut_off_prove_nothing(engine, capsys):
    engine()
    assert command("-n", 3, lengths="600", depths="50") == 1
    out = capsys.readouterr()
    assert "cut off" in out.out and "no needle could be scored" in out.err and "raise --n-predict" in out.err


def test_json_lines(engine, capsys):
    engine(window_pages=2)
    assert command("-o", "jsonl") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 9 and [row["length_asked"] for row in rows] == [600] * 3 + [1000] * 3 + [2048] * 3
    assert sum(row["streamed_bytes"] for row in rows) > 0


# -- resuming ------------------------------------------------------------------------------------------------------------------


def test_an_interrupted_grid_goes_on_where_it_stopped(engine, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    first = engine(interrupt_at=4)
    assert command("--out", out, "-o", "json") == 130
    result = json.loads(capsys.readouterr().out)
    assert result["interrupted"] and (result["found"], result["not_run"]) == (4, 5)
    assert [row["outcome"] for row in result["rows"]] == ["found"] * 4 + ["not run"] * 5
    assert len(out.read_text().splitlines()) == 4, "what was not run is not stored"
    with out.open("a") as stream:
        stream.write('{"command": "needle", "length_asked": 2048, "dep')  # a line that a crash cut
    second = engine()
    assert command("--out", out) == 0
    text = capsys.readouterr()
    assert "4 of 9 cells are taken from" in text.err and "1 lines are not rows" in text.err and "found 9 of 9" in text.out
    assert len(first.prompts) == 4 and len(second.prompts) == 5
    third = engine()
    assert command("--out", out) == 0 and not third.prompts and not hasattr(third, "budget"), "nothing left: nothing is loaded"


def test_an_interrupted_grid_has_not_passed(engine, capsys):
    engine(interrupt_at=1)
    assert command("-o", "json") == 130
    result = json.loads(capsys.readouterr().out)
    assert (result["passed"], result["kind"], result["exit_code"]) == (None, "Interrupted", 130)
    engine(window_pages=1, forgets=True, interrupt_at=1)
    assert command("-o", "json") == 130
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is False and (result["found"], result["missed"], result["not_run"]) == (0, 1, 8)
    assert command() == 130
    assert "rollkv: error: interrupted" in capsys.readouterr().err


def test_an_error_keeps_the_cells_that_ran(engine, capsys, monkeypatch):
    made = engine()
    generate = made.generate_ids

    def fails(*arguments):
        if len(made.prompts) == 2:
            raise DeviceError("the device fell off the bus")
        return generate(*arguments)

    monkeypatch.setattr(made, "generate_ids", fails)
    assert command("-o", "json") == 3
    result = json.loads(capsys.readouterr().out)
    assert (result["passed"], result["found"], result["not_run"]) == (None, 2, 7) and "off the bus" in result["error"]


@pytest.mark.parametrize(
    "change", [("--seed", 1), ("--window", 512), ("--cache-type-k", "f32"), ("--ubatch", 64), ("-n", 30), ("-c", 4096), ("--dca", "on")]
)
def test_rows_of_another_run_are_not_taken(engine, tmp_path, change):
    out = tmp_path / "rows.jsonl"
    engine()
    assert command("--out", out, lengths="600", depths="0,100") == 0
    again = engine()
    assert command("--out", out, *change, lengths="600", depths="0,100") == 0
    assert len(again.prompts) == 2 and len(out.read_text().splitlines()) == 4
    again = engine()
    assert command("--out", out, lengths="600,700", depths="100,0") == 0, "another grid with another context is another run"
    assert len(again.prompts) == 4


def test_files_that_cannot_be_used_are_named(tmp_path, engine, capsys):
    made = engine()
    assert command("--out", tmp_path / "no" / "rows.jsonl", lengths="600", depths="0") == 2
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert command("--out", tmp_path / "binary", lengths="600", depths="0") == 2
    os.mkfifo(tmp_path / "pipe")
    assert command("--out", tmp_path / "pipe", lengths="600", depths="0") == 2, "and does not wait for a writer"
    assert capsys.readouterr().err.count("--out") == 3 and not hasattr(made, "budget")
    assert read_finished(tmp_path / "new.jsonl", {}, NeedleRequest((600,), (0.0,))) == ({}, 0)


@pytest.mark.parametrize(
    "line",
    [
        '{"length_asked": Infinity, "depth_asked": 0}',
        "[" * 100_000,
        '"text"',
        '{"length_asked": [], "depth_asked": 0, "outcome": "found"}',
    ],
)
def test_lines_that_are_no_rows_are_counted_and_left_alone(engine, capsys, tmp_path, line):
    out = tmp_path / "rows.jsonl"
    out.write_text(line + "\n")
    engine()
    assert command("--out", out, lengths="600", depths="0") == 0
    assert ("Infinity" in line) or "1 lines are not rows" in capsys.readouterr().err


def test_rows_that_were_changed_are_judged_anew_or_run_again(engine, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    engine()
    assert command("--out", out, lengths="600", depths="0") == 0
    row = json.loads(out.read_text())
    for change, ran, code in (
        ({"answer": "nothing"}, 0, 1),
        ({"expected": "zzz", "answer": "zzz"}, 1, 0),
        ({"answer": 5}, 1, 0),
        ({"place": ...}, 1, 0),
        ({"outcome": "missed"}, 0, 0),
    ):
        changed = {key: value for key, value in (row | change).items() if value is not ...}
        out.write_text(json.dumps(changed) + "\n")
        made = engine()
        assert command("--out", out, lengths="600", depths="0") == code and len(made.prompts) == ran, change


def test_rows_are_ascii_whatever_they_hold(engine, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    path = tmp_path / "m\udcff.gguf"  # the byte 0xff, which is no UTF-8
    path.symlink_to(LLAMA)
    own = ("-m", path, "--needle", "The caf\u00e9\u0085\u2028 is 4213.", "--answer", "4213", "--out", out, "-o", "jsonl")
    for ran in (1, 0):
        made = engine()
        command(*own, lengths="600", depths="0")
        assert len(made.prompts) == ran
        printed = capsys.readouterr().out
        assert printed.isascii() and json.loads(printed)["needle"] == own[3]
        assert out.read_bytes().isascii() and len(out.read_text().splitlines()) == 1


def test_verdict_needs_at_least_one_found():
    missing = {"outcome": "not run", "place": None, "streamed_bytes": None}
    assert verdict([missing])[0] is False
    assert verdict([missing, missing | {"outcome": "found", "place": "tail", "streamed_bytes": 5}])[0] is True
    assert verdict([missing | {"outcome": "found", "place": "tail"}, missing | {"outcome": "missed", "place": "tail"}])[0] is False


# -- options -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("--style", "chat"), "--style chat: the model file carries no chat template; use --style completion"),
        (("--seed", -1), "--seed -1: the value must be from 0 to 2^64 - 1"),
        (("--style", "verse"), "--style 'verse'"),
        (("-c", 1000), "--ctx-size 1000"),
        (("--needle", "One is two."), "--answer"),
        (("--backend", "gpu"), "--backend 'gpu'"),
        (("-o", "csv"), "-o 'csv'"),
        (("--residency", "full", "--window", 512), "--residency full"),
        (("-n", 0), "--n-predict 0"),
        (("-n", 10**20), "--n-predict 100000000000000000000"),
        (("-c", 10**20), "--ctx-size 100000000000000000000"),
        (("--window", 10**20), "--window 100000000000000000000"),
        (("--dca", "on", "--dca-chunk", 10**20), "--dca-chunk 100000000000000000000"),
        (("--vram-target", "9" * 400), "--vram-target: cannot read"),
        (("--device", -1), "--device -1"),
    ],
)
def test_usage_errors_come_before_the_load(engine, capsys, arguments, words):
    made = engine()
    assert command(*arguments) == 2
    out = capsys.readouterr()
    assert out.out == "" and words in out.err and out.err.count("\n") == 1 and not hasattr(made, "budget")


def test_options_reach_the_engine(engine, monkeypatch):
    made = engine()
    seen = {}
    load = made.load
    monkeypatch.setattr("rollkv.startup.load", lambda path, cache, **options: seen.update(options) or load(path, cache, **options))
    options = (
        "--vram-target 2GiB --residency window --window 512 --ubatch 128 --cache-type-k bf16 --backend cuda --device 2 --portable".split()
    )
    assert command(*options, lengths="600", depths="0") == 0
    assert (seen["vram_target"], seen["backend"], seen["device"], seen["portable"]) == (2 << 30, "cuda", 2, True)
    cache = made.cache_config
    assert (cache.residency, cache.window_cells, cache.ubatch, cache.key_type, cache.value_type) == ("window", 512, 128, "bf16", "f16")


# -- the picture ---------------------------------------------------------------------------------------------------------------


def test_without_matplotlib_it_is_said_before_the_run(engine, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    made = engine()
    assert command("--plot", tmp_path / "grid.png") == 2
    assert "pip install 'rollkv[plot]'" in capsys.readouterr().err and not made.prompts


def test_a_picture_that_fails_takes_no_figure_with_it(engine, capsys, monkeypatch, tmp_path):
    def fails(*_: object) -> None:
        raise UsageError("--plot: cannot write it")

    monkeypatch.setattr(plots, "check", lambda path: None)
    monkeypatch.setattr(plots, "needle_grid", fails)
    engine()
    for form in ("json", "text"):
        assert command("--plot", tmp_path / "grid.png", "-o", form, lengths="600", depths="0") == 2
        out, err = capsys.readouterr()
        assert "cannot write it" in err and (json.loads(out)["passed"] is True if form == "json" else "found 1 of 1" in out)


def test_the_picture(engine, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    engine(window_pages=2, forgets=True)
    assert command("--plot", tmp_path / "grid.png") == 1
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    for wrong in (tmp_path / "grid.doc", tmp_path / "no" / "grid.png"):
        with pytest.raises(UsageError, match="--plot"):
            plots.check(wrong)


@pytest.fixture
def file_limit():
    """Lets no file grow beyond a size, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_that_the_disk_cannot_hold_is_not_begun(tmp_path, file_limit):
    out = tmp_path / "rows.jsonl"
    with appending(out) as append:
        append('{"whole": 1}\n')
        file_limit(20)
        with pytest.raises(UsageError, match=r"rows\.jsonl: cannot write it"):
            append('{"whole": 2}\n')
    assert out.read_text() == '{"whole": 1}\n'
