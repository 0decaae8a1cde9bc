"""The command `rollkv` and its error boundary.

Whatever goes wrong ends as one line on stderr and an exit code: 0 done, 1 a check failed, 2 usage, 3 device, 4 a damaged or unsupported file, 5 memory,
74 the result cannot be written, 130 interrupted, 70 a fault of rollkv's own (with its traceback). With `-o json` stdout holds one JSON object in every case.
"""

import errno
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Annotated, TextIO

import typer

from rollkv import __version__
from rollkv.cli.generate import generate
from rollkv.cli.info import info
from rollkv.cli.ladder import ladder
from rollkv.cli.logit_equiv import logit_equiv
from rollkv.cli.needle import needle
from rollkv.cli.plan import plan
from rollkv.cli.synth import synth
from rollkv.cli.tokenize import tokenize
from rollkv.errors import Interrupted, OutOfMemoryError, RollkvError

INTERNAL_FAULT = 70
CANNOT_WRITE = 74
_COMMAND_LINE_ERROR = typer.BadParameter.__mro__[2]  # the base of all errors that the parser raises; typer has no public name for it

_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

app = typer.Typer(name="rollkv", add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
for command in (generate, ladder, needle, logit_equiv, plan, info, tokenize, synth):
    app.command()(command)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    env: Annotated[bool, typer.Option("--env", help="Show the environment as JSON: driver, devices, libraries.")] = False,
) -> None:
    """Run a GGUF language model whose KV cache does not fit in VRAM. Every cached token is attended; only residency is windowed."""
    if version:
        sys.stdout.write(f"rollkv {__version__}\n")
    elif env:
        sys.stdout.write(json.dumps(_environment(), indent=1, default=str) + "\n")
    elif context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
    else:
        return
    raise typer.Exit(0)


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    _accept_any_text()
    try:
        code = _dispatch(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # nobody reads the result any more: nothing is wrong
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        reason = error.strerror or error
        return _fail((), f"the result cannot be written: {reason}; free space, or send stdout elsewhere", "OSError", CANNOT_WRITE)


def _is_of_output(error: Exception) -> bool:
    """Whether writing the result failed: such an error names no file."""
    return isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS)


def _drop_output() -> None:
    """What is still buffered must not fail again when Python exits."""
    with suppress(OSError):  # a stdout that is no file has nothing to redirect
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main(sys.argv[1:]))


def _dispatch(arguments: Sequence[str]) -> int:
    try:
        command_line = typer.main.get_command(app)
        with command_line.make_context("rollkv", list(arguments)) as context:
            command_line.invoke(context)
        return 0
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _fail(arguments, "interrupted", Interrupted.__name__, Interrupted.exit_code)
    except RollkvError as error:
        if os.environ.get("ROLLKV_DEBUG") == "1":
            traceback.print_exc()
        return _fail(arguments, str(error), type(error).__name__, error.exit_code)
    except MemoryError:
        return _fail(
            arguments, "host memory ran out; ask for fewer tokens or cells, or free memory", "MemoryError", OutOfMemoryError.exit_code
        )
    except Exception as error:
        if _is_of_output(error):
            raise
        if isinstance(error, _COMMAND_LINE_ERROR):
            return _fail(arguments, f"{_message(error)} (see '{_command_of(error)} --help')", "UsageError", 2)
        traceback.print_exc()
        return _fail(arguments, f"a fault of rollkv's own: {type(error).__name__}: {error}", type(error).__name__, INTERNAL_FAULT)


def _fail(arguments: Sequence[str], message: str, kind: str, code: int) -> int:
    line = " ".join(message.split())
    try:
        print(f"rollkv: error: {line}", file=sys.stderr, flush=True)
    except OSError:  # a stderr that is full changes no exit code
        sys.stderr = _nobody()
    if _wants_json(arguments):
        sys.stdout.write(json.dumps({"error": line, "kind": kind, "exit_code": code}) + "\n")
    return code


def _message(error: Exception) -> str:
    form = getattr(error, "format_message", None)
    return str(form()) if form is not None else str(error)


def _command_of(error: Exception) -> str:
    """ "rollkv plan", or "rollkv" where the parser did not come as far."""
    return str(getattr(getattr(error, "ctx", None), "command_path", "rollkv"))


def _wants_json(arguments: Sequence[str]) -> bool:
    """Read from the plain arguments, since the parser itself may be what failed."""
    joined = any(word in ("-ojson", "--output=json") for word in arguments)
    return joined or any(option in ("-o", "--output") and value == "json" for option, value in pairwise(arguments))


def _environment() -> dict[str, object]:
    """What is known about the machine. Never fails: what cannot be found out is said in its place."""
    try:
        from rollkv.cuda.environment import probe

        return {"rollkv": __version__, **probe()}
    except Exception as error:
        return {"rollkv": __version__, "error": f"{type(error).__name__}: {error}"}


def _nobody() -> TextIO:
    """A stream that nobody reads."""
    return open(os.devnull, "w")  # lives as long as the process


def _accept_any_text() -> None:
    """A terminal that cannot show a character gets its escape instead of a crash; a closed stream is as good as nobody listening."""
    if sys.stdout is None:
        sys.stdout = _nobody()
    if sys.stderr is None:
        sys.stderr = _nobody()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
