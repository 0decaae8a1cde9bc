"""rollkv runs GGUF language models whose KV cache does not fit in VRAM. See README.md; `rollkv.load` is the door for programs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollkv.tasks.generate import load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """`load` on first use, so that importing the package, or asking for its version, stays cheap."""
    if name == "load":
        from rollkv.tasks.generate import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
