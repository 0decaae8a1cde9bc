"""Renders one chat template in a process of its own: the program that `chat.render_chat` runs. A template is code from a model file.

Reads one JSON request from stdin and writes one JSON answer to stdout: {"text": ...} or {"failure": kind, "message": ...}. Knows jinja2
and the standard library only. Invariant: whatever the template does, it gets no object that can be changed or that leads out of the
sandbox, and memory, processor time and output are limited before its first line runs.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks an answer for training: what is inside is rendered as if it were not there."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusal(Exception):
    """The template's own raise_exception."""


class OutputTooLarge(Exception):
    """The template wrote more than the limit."""


def environment() -> ImmutableSandboxedEnvironment:
    """The settings that chat templates are written for: those of Hugging Face's apply_chat_template."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def render(template: str, variables: Mapping[str, Any], max_chars: int) -> str:
    """The rendered text. Raises OutputTooLarge beyond max_chars, TemplateRefusal, and whatever jinja2 or the template raise."""
    parts: list[str] = []
    room = max_chars
    for part in environment().from_string(template).generate(variables):
        room -= len(part)
        if room < 0:
            raise OutputTooLarge
        parts.append(part)
    return "".join(parts)


def answer(request: Mapping[str, Any]) -> dict[str, str]:
    """One request to one answer; no exception gets out."""
    try:
        return {"text": render(request["template"], request["variables"], request["max_chars"])}
    except TemplateRefusal as error:
        return {"failure": "refused", "message": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"failure": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except SecurityError as error:
        return {"failure": "security", "message": str(error)}
    except OutputTooLarge:
        return {"failure": "size", "message": ""}
    except MemoryError:
        return {"failure": "memory", "message": ""}
    except Exception as error:  # the template may raise anything: it is reported, not handled
        return {"failure": "error", "message": f"{type(error).__name__}: {error}"}


def limit(memory_bytes: int, seconds: float) -> None:
    """Caps address space and processor time of this process, where the system has such limits (POSIX)."""
    try:
        import resource
    except ImportError:
        return
    caps = ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, math.ceil(seconds) + 1), (resource.RLIMIT_CORE, 0))
    for which, value in caps:
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """JSON as it is, without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def main(read: Callable[[], bytes] = sys.stdin.buffer.read) -> None:
    request = json.loads(read())
    limit(request["max_memory_bytes"], request["max_seconds"])
    text = json.dumps(answer(request), ensure_ascii=False)
    sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()
