"""Renders a chat template in a process of its own: a template from a downloaded file is a program.

Runs as a script, with a request as JSON on stdin and the answer as JSON on stdout; imports nothing of rollkv. The parent limits its time; it
limits its own memory and output. The environment is jinja2's immutable sandbox with the settings that models' templates are written for.
"""

import datetime
import json
import sys
from typing import Any

MEMORY_BYTES = 1 << 30
MARK = "\ue000{}\ue001"  # private-use characters stand for the users' texts, to find where these end up


def _environment() -> tuple[Any, type[Exception]]:
    """The sandbox, and the exception of its raise_exception."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Refusal(TemplateError):
        """The template's own raise_exception."""

    class Generation(Extension):
        """`{% generation %}` marks what training counts; the text is unchanged."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise Refusal(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment, Refusal


def render(request: dict[str, Any]) -> dict[str, Any]:
    """{"texts": [rendered, rendered with marks]} or {"error": kind, "message": text}; kinds refused, syntax, failed, size."""
    from jinja2 import TemplateSyntaxError

    environment, refusal = _environment()
    try:
        template = environment.from_string(request["template"])
        texts = []
        for messages in (request["messages"], request["marked"]):
            pieces: list[str] = []
            size = 0
            for piece in template.generate(messages=messages, **request["variables"]):
                pieces.append(piece)
                size += len(piece)
                if size > request["limit"]:
                    return {"error": "size", "message": f"it writes more than {request['limit']} characters"}
            texts.append("".join(pieces))
        return {"texts": texts}
    except refusal as error:
        return {"error": "refused", "message": str(error)}
    except TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"error": "size", "message": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # whatever a template does wrong, it is the template's fault
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"}


def main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    except ImportError:  # not on Windows; the time limit still holds
        pass
    sys.stdout.write(json.dumps(render(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
