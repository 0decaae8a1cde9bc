"""Kinds of errors: their exit codes, and the one line each leaves at the boundary of the command line."""

import json

import pytest
import typer

from rollkv import errors
from rollkv.cli import main as boundary

KINDS = {
    errors.RollkvError: 2,
    errors.UsageError: 2,
    errors.CheckFailed: 1,
    errors.DeviceError: 3,
    errors.ModelFileError: 4,
    errors.UnsupportedModelError: 4,
    errors.LogitFileError: 4,
    errors.OutOfMemoryError: 5,
    errors.Interrupted: 130,
}


def test_every_kind_is_listed():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RollkvError)}
    assert kinds == set(KINDS)


@pytest.fixture
def failing(monkeypatch):
    """A command line whose only command raises what the test wants."""

    def install(error: BaseException):
        app = typer.Typer(add_completion=False)

        @app.command()
        def fail(output: str = typer.Option("text", "-o", "--output")) -> None:
            raise error

        monkeypatch.setattr(boundary, "app", app)

    return install


@pytest.mark.parametrize(("kind", "code"), KINDS.items())
def test_one_line_and_the_exit_code(failing, capsys, kind, code):
    failing(kind("the file: it is damaged;\n  get it again"))
    assert boundary.main([]) == code
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err == "rollkv: error: the file: it is damaged; get it again\n"


@pytest.mark.parametrize(("kind", "code"), KINDS.items())
def test_in_json_mode_stdout_is_an_object(failing, capsys, kind, code):
    failing(kind("what went wrong"))
    for arguments in (["-o", "json"], ["--output", "json"], ["--output=json"], ["-ojson"]):
        assert boundary.main(arguments) == code
        assert json.loads(capsys.readouterr().out) == {"error": "what went wrong", "kind": kind.__name__, "exit_code": code}


def test_the_traceback_is_shown_only_when_asked_for(failing, capsys, monkeypatch):
    failing(errors.DeviceError("no device"))
    monkeypatch.delenv("ROLLKV_DEBUG", raising=False)
    boundary.main([])
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("ROLLKV_DEBUG", "1")
    assert boundary.main([]) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("rollkv: error: no device\n")


def test_ctrl_c_exits_130(failing, capsys):
    failing(KeyboardInterrupt())
    assert boundary.main([]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_host_memory_running_out_is_an_error_of_memory(failing, capsys):
    failing(MemoryError())
    assert boundary.main([]) == 5
    assert "ask for fewer tokens or cells" in capsys.readouterr().err


def test_a_fault_of_our_own_shows_where(failing, capsys):
    failing(ZeroDivisionError("division by zero"))
    assert boundary.main(["-o", "json"]) == 70
    out = capsys.readouterr()
    assert "Traceback" in out.err and "ZeroDivisionError" in json.loads(out.out)["error"]


def test_unknown_options_are_one_line(failing, capsys):
    failing(errors.RollkvError("not reached"))
    assert boundary.main(["--nope"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rollkv: error: ") and "--nope" in err and err.count("\n") == 1
