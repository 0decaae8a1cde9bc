"""Kernels from csrc/ to machine code: find the sources, compile by name expression, keep the results on disk.

Needs NVRTC alone, neither driver nor GPU. Only machine code of an exact architecture is made (never PTX), so that it loads on any
driver of the same major version. A cubin in the cache is what the compiler would make now: the key covers every source text, the
options, the compiler's version, the architecture and the expressions, and the file carries a checksum of its content.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from rollkv.cache_dir import cache_dir, store
from rollkv.errors import DeviceError

# NVRTC 13.0 takes templates of constants without a space for host functions and refuses them; 13.5 does not.
OPTIONS = ("-std=c++17", "-lineinfo", "--device-as-default-execution-space", "--ptxas-options=-v")
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")  # compiled in tests and by report_kernels
_LOG_HEAD_LINES = 12
_MAGIC = b"rollkv cubin 1\n"


class KernelError(DeviceError):
    """A kernel does not compile, or is launched in a way that its signature forbids."""


@dataclass(frozen=True)
class KernelSpec:
    """One instance of one kernel. The expression is its identity: cache key, log line, profiler name."""

    source: str  # file in csrc/: "rms_norm.cu"
    expression: str  # "rms_norm<256>"
    archs: tuple[str, ...] = ()  # the only architectures it compiles for, such as ("sm_90a",); empty: all
    early: bool = False  # it waits by itself for the kernels before it (wait_for_previous), so it may begin while they still run

    def compiles_for(self, arch: str) -> bool:
        return not self.archs or arch in self.archs


@dataclass(frozen=True)
class Cubin:
    """Machine code, the mangled name of each expression, and the compiler's log (registers, shared memory and spills per kernel)."""

    image: bytes
    lowered: dict[str, str]
    log: str


def find_csrc() -> Path:
    """The directory of the kernel sources: beside the package in a checkout, inside it in a wheel. Raises DeviceError."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "common.cuh").is_file():
            return candidate
    raise DeviceError(f"the kernel sources are missing: no csrc/common.cuh in or beside {package}; install rollkv again")


def arch_name(major: int, minor: int, *, portable: bool = False) -> str:
    """The exact architecture of a compute capability: sm_86; sm_90a from 9.0 on, for the instructions of that chip alone, unless
    `portable`: without them no kernel that needs them can be chosen."""
    return f"sm_{major}{minor}" + ("a" if major >= 9 and not portable else "")


def capability_of(arch: str) -> int:
    """90 of "sm_90a", 120 of "sm_120"."""
    return int(arch.removeprefix("sm_").rstrip("a"))


def nvrtc_version() -> tuple[int, int]:
    """Raises DeviceError when the library is missing."""
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise RuntimeError or a loader error of their own, depending on their version
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DeviceError(f'the kernel compiler NVRTC cannot be loaded ({first_line}); pip install "rollkv[cuda]" brings it') from error
    if int(status) != 0:
        raise DeviceError(f'the kernel compiler NVRTC failed with {_status_name(status)}; pip install "rollkv[cuda]" brings a working one')
    return int(major), int(minor)


def check_compiler(driver_version: tuple[int, int]) -> None:
    """Raises DeviceError when NVRTC is missing, or makes code that a driver for this CUDA version cannot load."""
    compiler = nvrtc_version()
    if compiler[0] > driver_version[0]:
        raise DeviceError(
            f"NVRTC {compiler[0]}.{compiler[1]} makes code that the driver (CUDA {driver_version[0]}.{driver_version[1]}) cannot load; "
            f'update the driver, or pip install "rollkv[cuda{driver_version[0]}]"'
        )


def compile_cubin(source: str, expressions: tuple[str, ...], arch: str, csrc: Path | None = None) -> Cubin:
    """Compiles `source`, a file name in csrc/, into one cubin that holds all `expressions`. Raises KernelError, DeviceError."""
    csrc = csrc or find_csrc()
    nvrtc_version()
    try:
        text = (csrc / source).read_bytes()
    except OSError as error:
        raise KernelError(f"the kernel source {csrc / source} cannot be read: {error.strerror}; install rollkv again") from error
    program = _ok(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []), source)
    try:
        for expression in expressions:
            _ok(nvrtc.nvrtcAddNameExpression(program, expression.encode()), source)
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *OPTIONS, f"--include-path={csrc}")]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        log = _program_log(program)
        if int(status) != 0:
            raise KernelError(_compile_message(source, expressions, arch, status, log))
        image = bytes(_ok(nvrtc.nvrtcGetCUBINSize(program), source))
        _ok(nvrtc.nvrtcGetCUBIN(program, image), source)
        lowered = {e: _ok(nvrtc.nvrtcGetLoweredName(program, e.encode()), source).decode() for e in expressions}
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(image, lowered, log)


def _compile_message(source: str, expressions: tuple[str, ...], arch: str, status: Any, log: str) -> str:
    errors = [line for line in log.splitlines() if "error" in line]
    head = errors[:_LOG_HEAD_LINES] or log.splitlines()[:_LOG_HEAD_LINES]
    version = ".".join(map(str, nvrtc_version()))
    return f"{source}: {', '.join(expressions)} does not compile for {arch} with NVRTC {version} ({_status_name(status)}): " + " | ".join(
        head
    )


def _program_log(program: Any) -> str:
    log = bytes(_ok(nvrtc.nvrtcGetProgramLogSize(program), "log"))
    _ok(nvrtc.nvrtcGetProgramLog(program, log), "log")
    return log.rstrip(b"\0").decode(errors="replace")


def _ok(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise KernelError(f"{what}: NVRTC failed with {_status_name(result[0])}")
    return result[1] if len(result) == 2 else None


def _status_name(status: Any) -> str:
    return getattr(status, "name", None) or f"status {status}"


def default_cache_dir() -> Path:
    """kernels/ in cache_dir()."""
    return cache_dir() / "kernels"


class CubinCache:
    """Cubins on disk, one file per (source, expressions, arch). Damaged files are compiled again; without a writable directory every
    process compiles for itself. Files appear whole (written beside, then renamed), so parallel starts are safe."""

    def __init__(self, directory: Path | None = None, csrc: Path | None = None):
        self.directory = default_cache_dir() if directory is None else directory
        self.csrc = csrc or find_csrc()

    @cached_property
    def _common_key(self) -> bytes:
        digest = hashlib.sha256(repr((OPTIONS, nvrtc_version())).encode())
        for header in sorted(self.csrc.glob("*.cuh")):
            digest.update(header.name.encode() + b"\0" + hashlib.sha256(header.read_bytes()).digest())
        return digest.digest()

    def key(self, source: str, expressions: tuple[str, ...], arch: str) -> str:
        """Hexadecimal sha256 over everything that decides the machine code."""
        digest = hashlib.sha256(self._common_key)
        digest.update(hashlib.sha256((self.csrc / source).read_bytes()).digest())
        digest.update(json.dumps([source, list(expressions), arch]).encode())
        return digest.hexdigest()

    def get(self, source: str, expressions: tuple[str, ...], arch: str) -> Cubin:
        """From disk, or compiled and stored. Raises KernelError, DeviceError."""
        path = self.directory / f"{self.key(source, expressions, arch)}.cubin"
        cubin = _load(path, expressions)
        if cubin is None:
            cubin = compile_cubin(source, expressions, arch, self.csrc)
            body = json.dumps({"lowered": cubin.lowered, "log": cubin.log}).encode() + b"\n" + cubin.image
            store(path, _MAGIC + hashlib.sha256(body).digest() + body)
        return cubin


def _load(path: Path, expressions: tuple[str, ...]) -> Cubin | None:
    """None for a file that is absent, unreadable, cut short or altered."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    magic, checksum, body = content[: len(_MAGIC)], content[len(_MAGIC) : len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
    if magic != _MAGIC or hashlib.sha256(body).digest() != checksum:
        return None
    header, _, image = body.partition(b"\n")
    fields = json.loads(header)
    if set(fields["lowered"]) != set(expressions):
        return None
    return Cubin(image, fields["lowered"], fields["log"])
