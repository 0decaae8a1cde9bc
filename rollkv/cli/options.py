"""The options that several commands share, each written once, and the small readers of their values. Imports nothing heavy."""

import re
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from rollkv.errors import RollkvError, UsageError
from rollkv.kv_types import KV_TYPES


def _count(*names: str, unit: str = "CELLS", text: str) -> Any:
    """An option whose value is a number of tokens or cells: 4096, or 4k. What it may be is checked where it is used. names: the last is the long one;
    text: its help."""

    def read(value: str) -> int:
        from rollkv.counts import parse_count

        try:
            return int(value)
        except ValueError:
            return parse_count(value, names[-1])

    return typer.Option(*names, metavar=unit, parser=read, help=text)


Model = Annotated[
    Path | None, typer.Option("-m", "--model", help="GGUF file; of a shard set any shard. Default: the small model of 'make demo'.")
]
Prompt = Annotated[str | None, typer.Option("-p", "--prompt", help="The prompt; '-' reads it from stdin.")]
PromptFile = Annotated[
    str | None, typer.Option("-f", "--file", help="Read the prompt from this UTF-8 file, exactly as it is; '-' is stdin.")
]
PreTokenizer = Annotated[
    str | None, typer.Option(metavar="NAME", help="How text is cut before merging, where the file does not say it or is wrong.")
]
CtxSize = Annotated[
    int | None, _count("-c", "--ctx-size", text="Context length. Default: what the run needs; of a plan, the trained length.")
]
VramTarget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="All that the process may hold on the device: MiB, or with a unit (6GiB, 6GB). Default: what is free."
    ),
]
Residency = Annotated[
    str, typer.Option(metavar="auto|full|window", help="Keep all cells in VRAM (full), a window of them (window), or what fits (auto).")
]
Window = Annotated[
    int | None, _count("--window", text="Size of the resident window, in whole pages of 256 cells. Default: as large as fits.")
]
Ubatch = Annotated[int, _count("--ubatch", unit="TOKENS", text="Prompt tokens in one pass.")]
FittingUbatch = Annotated[
    int | None, _count("--ubatch", unit="TOKENS", text="Prompt tokens in one pass. Default: 4096, or less where memory is short.")
]
_TYPES = "|".join(KV_TYPES)
CacheTypeK = Annotated[str, typer.Option(metavar=_TYPES, help="Type of the cached keys. Below 16 bits something is lost.")]
CacheTypeV = Annotated[str, typer.Option(metavar=_TYPES, help="Type of the cached values.")]
CacheTypeKList = Annotated[
    str, typer.Option("--cache-type-k", metavar="LIST", help=f"Type of the keys, of {_TYPES}; further entries are compared with the first.")
]
CacheTypeVList = Annotated[
    str, typer.Option("--cache-type-v", metavar="LIST", help="Type of the values, in pairs with the keys', or one for all.")
]
CacheTypeTailK = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Narrower type of the keys that have left the window. Default: as in it.")
]
CacheTypeTailV = Annotated[str | None, typer.Option(metavar="TYPE", help="Narrower type of the values that have left the window.")]
KvRotate = Annotated[bool, typer.Option("--kv-rotate", help="Rotate q8_0 and q4_0 too, as turbo types are, so that outliers are spread.")]
KvProtect = Annotated[int, typer.Option(metavar="N", help="Keep the first and the last N layers in f16 where others have fewer bits.")]
Dca = Annotated[
    str, typer.Option("--dca", metavar="auto|on|off", help="Dual chunk attention: as the file or --hf-config declares it, on, or off.")
]
DcaList = Annotated[
    str,
    typer.Option(
        "--dca",
        metavar="LIST",
        help="Dual chunk attention: auto (as the file or --hf-config declares it), on, off; or two of them to compare.",
    ),
]
DcaChunk = Annotated[int | None, _count("--dca-chunk", text="The largest distance. Default: as declared, or 3/4 of the trained length.")]
DcaLocal = Annotated[
    int | None,
    _count(
        "--dca-local",
        text="Newest cells, whose distances are true. Default: as declared, or 1/12 of the chunk and what the rest has beyond whole pages.",
    ),
]
RopeOriginalCtx = Annotated[
    int | None,
    _count("--rope-original-ctx", text="Length behind which dual chunk attention raises scores. Default: as declared, or trained."),
]
HfConfig = Annotated[
    Path | None,
    typer.Option("--hf-config", metavar="FILE", help="config.json of the model at Hugging Face, for what its GGUF file does not declare."),
]
Backend = Annotated[str, typer.Option(metavar="auto|cuda|host", help="GPU, or the slow reference in NumPy; auto takes a GPU if usable.")]
Device = Annotated[int, typer.Option(metavar="INDEX", help="Which GPU.")]
Portable = Annotated[
    bool, typer.Option("--portable", hidden=True, help="Take the CUDA kernels that every card can run, not those for this one.")
]
LinkGbps = Annotated[
    float | None, typer.Option("--link-gbps", metavar="GB/S", help="Reckon with this rate of the link instead of the measured one.")
]
Output = Annotated[str, typer.Option("-o", "--output", metavar="text|json", help="Form of the result on stdout.")]


def check_form(output: str, forms: Sequence[str]) -> None:
    """Raises UsageError for a form of the result that is not one of `forms`."""
    if output not in forms:
        raise UsageError(f"-o {output!r} is not known; choose {', '.join(forms[:-1])} or {forms[-1]}")


def wants_json(output: str) -> bool:
    """Raises UsageError for anything but text and json."""
    check_form(output, ("text", "json"))
    return output == "json"


def check_machine(backend: str, device: int | None) -> None:
    """Raises UsageError for a backend that is not known, or a GPU that cannot be."""
    if backend not in ("auto", "cuda", "host"):
        raise UsageError(f"--backend {backend!r} is not known; choose auto, cuda or host")
    if device is not None and device < 0:
        raise UsageError(f"--device {device}: GPUs are numbered from 0; give 0 or more")


def size_option(text: str | None, option: str) -> int | None:
    """Bytes of an optional size. Raises UsageError."""
    from rollkv.units import parse_size

    return None if text is None else parse_size(text, option)


def link_option(gbps: float | None) -> float | None:
    """Bytes a second of an optional --link-gbps. Raises UsageError."""
    if gbps is not None and not 0 < gbps < inf:
        raise UsageError(f"--link-gbps {gbps:g}: the value must be a finite number above zero, such as 25")
    return None if gbps is None else 1e9 * gbps


def read_prompt(prompt: str | None, file: str | None, file_option: str = "-f") -> str | None:
    """The text of -p or -f (or of the option named), not changed in any way; None when neither is given. Raises UsageError, also for bytes that are not UTF-8."""
    if prompt is not None and file is not None:
        raise UsageError("-p and -f are both given; give one prompt")
    if prompt == "-" or file == "-":
        return _decode(_read_stdin(), "stdin")
    if file is not None:
        try:
            return _decode(Path(file).read_bytes(), file)
        except OSError as error:
            raise UsageError(f"{file_option} {file}: cannot read it: {error.strerror or error}; name a readable text file") from error
    if prompt is not None:
        # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
        return _decode(prompt.encode("utf-8", "surrogateescape"), "-p")
    return None


def parse_ids(text: str | None) -> tuple[int, ...] | None:
    """Token ids from "1,2,3"; blanks and line breaks separate too. Raises UsageError naming what is not a number."""
    if text is None:
        return None
    if re.search(r",\s*,|^\s*,|,\s*\Z", text):
        raise UsageError(f"--prompt-ids: {text[:40]!r} has an empty entry; write numbers with single commas, such as 1,15043,29892")
    words = text.replace(",", " ").split()
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise UsageError(f"--prompt-ids: {word[:40]!r} is not a token id; write numbers with commas, such as 1,15043,29892")
    return tuple(int(word) for word in words)


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise UsageError("the prompt should come from stdin, but stdin is closed; use -p TEXT or -f FILE")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise RollkvError(f"stdin: cannot read it: {error}; use -p TEXT or -f FILE") from error


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: byte {error.start} (0x{data[error.start]:02x}) is not valid UTF-8; give text in UTF-8") from None
