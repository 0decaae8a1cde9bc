"""Pictures of results. matplotlib is needed here only, and only when a picture is asked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollkv.errors import UsageError
from rollkv.whole_file import check_place, whole_file

_COLOURS = {"found": "#4c9f70", "missed": "#c8553d", "cut off": "#e3b23c", "not run": "#d9d9d9"}


def check(path: Path) -> None:
    """Raises UsageError when a picture could not be written to `path`, so that it is said before the run and not behind it."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise UsageError(
            f"--plot {path}: {path.suffix or 'no ending'} is no picture format of matplotlib {matplotlib.__version__}; end it in .png, .svg or .pdf"
        )
    check_place(path, f"--plot {path}")


def save(figure: Any, path: Path) -> None:
    """Writes a figure of matplotlib's. Raises UsageError, OutOfMemoryError when the disk is full."""
    with whole_file(path, f"--plot {path}") as stream:
        figure.savefig(stream, format=path.suffix.lstrip(".").lower(), dpi=150)


def needle_grid(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Depths down, lengths across; colour and word say the outcome, a star that the needle lay in the tail. Raises as save."""
    _matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    lengths, depths = (sorted({row[name] for row in rows}) for name in ("length_asked", "depth_asked"))
    figure = Figure(figsize=(2.5 + 0.9 * len(lengths), 2.0 + 0.5 * len(depths)), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        x, y, outcome = lengths.index(row["length_asked"]), depths.index(row["depth_asked"]), row["outcome"]
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=_COLOURS[outcome], edgecolor="white", linewidth=2))
        star = "*" if row["place"] in ("tail", "both") else ""
        axes.text(x, y, outcome + star, ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(len(depths) - 0.5, -0.5)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("length, cells")
    axes.set_ylabel("depth, percent")
    axes.set_title(title, fontsize=9)
    present = {row["outcome"] for row in rows}
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in present],
        loc="outside right upper",
        fontsize=8,
    )
    save(figure, path)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise UsageError("--plot needs matplotlib, which is not installed; install it with: pip install 'rollkv[plot]'") from error
    return matplotlib
