"""Chat messages to the text that a model was trained on, by the chat template in its file.

A template is a program from a downloaded file. It runs in jinja2's immutable sandbox in a process of its own (`chat_sandbox`), with
limits on time, memory and output: inside one process a template can always find an operation that neither ends nor fits in memory.
The process costs about 0.2 s. Nothing here is looked at before a chat is rendered, so a broken template never stands in the way of a
raw prompt.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollkv.errors import UnsupportedModelError, UsageError
from rollkv.units import GIB, format_size

MAX_OUTPUT_CHARS = 32_000_000
MAX_MEMORY_BYTES = 2 * GIB
MAX_SECONDS = 10.0

_RAW = "use --raw and write the prompt as the model was trained on it"


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    max_seconds: float = MAX_SECONDS,
) -> str:
    """The text of a conversation. messages: {"role": ..., "content": ...} and whatever else the template reads; variables: further
    names that it may ask for (enable_thinking ...). All must be plain data that JSON can hold.

    Raises UsageError with the template's own words if it refuses the messages, or if they are no JSON data; UnsupportedModelError if
    the template is no valid Jinja, fails, reaches out of the sandbox, or exceeds max_seconds, MAX_MEMORY_BYTES or MAX_OUTPUT_CHARS.
    """
    names = {
        **(variables or {}),
        "messages": list(messages),
        "tools": None if tools is None else list(tools),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    request = {
        "template": template,
        "variables": names,
        "max_chars": MAX_OUTPUT_CHARS,
        "max_memory_bytes": MAX_MEMORY_BYTES,
        "max_seconds": max_seconds,
    }
    try:
        data = json.dumps(request).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"the chat messages are not plain data ({_one_line(error)}); use text, numbers, lists and dictionaries") from error
    answer = _run(data, max_seconds)
    if "text" in answer:
        return answer["text"]
    raise _failure(answer["failure"], _one_line(answer["message"]))


def _run(request: bytes, max_seconds: float) -> dict[str, str]:
    """The sandbox's answer to a request."""
    program = Path(__file__).with_name("chat_sandbox.py")
    # -P: the package's own folder must not become a place to import from. The path of this process leads to the same jinja2.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(program)], input=request, capture_output=True, timeout=max_seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedModelError(
            f"the chat template in the model file ran for more than {max_seconds:g} s and was stopped; {_RAW}"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot start {sys.executable!r} to render the chat template: {error.strerror or error}; {_RAW}") from error
    try:
        answer: dict[str, str] = json.loads(done.stdout.decode("utf-8", "surrogatepass"))
    except ValueError:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise UnsupportedModelError(
            f"the chat template in the model file could not be rendered (exit status {done.returncode}; {_one_line(last) or 'no message'}); {_RAW}"
        ) from None
    return answer


def _failure(kind: str, message: str) -> UsageError | UnsupportedModelError:
    template = "the chat template in the model file"
    if kind == "refused":
        return UsageError(f"{template} refuses these messages: {message}; change them, or {_RAW}")
    if kind == "syntax":
        return UnsupportedModelError(f"{template} is not valid ({message}); {_RAW}")
    if kind == "security":
        return UnsupportedModelError(f"{template} reaches for what a template must not have ({message}); do not trust the file, or {_RAW}")
    if kind == "size":
        return UnsupportedModelError(f"{template} wrote more than {MAX_OUTPUT_CHARS} characters; {_RAW}")
    if kind == "memory":
        return UnsupportedModelError(f"{template} needs more than {format_size(MAX_MEMORY_BYTES)} of memory; {_RAW}")
    return UnsupportedModelError(f"{template} failed ({message}); {_RAW}")


def _one_line(text: object) -> str:
    """The words of a message, printable and at most 300 characters."""
    line = " ".join(str(text).split())
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= 300 else line[:297] + "..."
