"""Where files lie that can be made again: compiled kernels, measured rates."""

import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """$ROLLKV_CACHE_DIR, or ~/.cache/rollkv. Need not exist."""
    named = os.environ.get("ROLLKV_CACHE_DIR")
    return Path(named) if named else Path(os.path.expanduser("~")) / ".cache" / "rollkv"


def store(path: Path, content: bytes) -> None:
    """Writes beside, then renames, so that a file appears whole and parallel starts are safe. Best effort: where nothing can be written
    (read-only home, full disk) the next run does without."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
            temporary = file.name
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
