"""Draws how far away a query sees a key, with plain RoPE and with dual chunk attention: python examples/plot_dca_positions.py OUT.png

Left and middle: every query against every key before it, one colour scale. Right: what one query sees. The places are those of the reference
(reference.dual_chunk_places), for a model trained for 8,192 cells and the sizes that --dca on takes for it.
"""

import sys

import numpy as np
from matplotlib.figure import Figure

from rollkv.config import DualChunk
from rollkv.reference import dual_chunk_places

SIZES = DualChunk(chunk_cells=6144, local_cells=512, original_context=8192)
CELLS, STEP = 24576, 32
ONE_QUERY = 20000


def distances(queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(plain, dual chunk) [queries, keys]: the query's place minus the key's; NaN for keys behind the query."""
    places = dual_chunk_places(SIZES, queries, 0)[0]
    chunks_back = queries[:, None] // SIZES.stride_cells - keys[None] // SIZES.stride_cells
    query_places = np.take_along_axis(places[:3].T, np.clip(chunks_back, 0, 2), axis=1)
    hidden = np.where(keys[None] > queries[:, None], np.nan, 0.0)
    return queries[:, None] - keys[None] + hidden, query_places - keys[None] % SIZES.stride_cells + hidden


def main(path: str) -> None:
    cells = np.arange(0, CELLS, STEP)
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    *maps, curve = figure.subplots(1, 3)
    for axes, found, name in zip(maps, distances(cells, cells), ("plain RoPE", "dual chunk attention"), strict=True):
        image = axes.imshow(found, cmap="viridis", vmin=0, vmax=CELLS, extent=(0, CELLS, CELLS, 0), interpolation="nearest")
        axes.set_title(f"{name}: at most {int(np.nanmax(found)):,}", fontsize=10)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
    figure.colorbar(image, ax=maps, shrink=0.8, label="distance, cells")
    keys = np.arange(ONE_QUERY + 1)
    for found, name, colour in zip(
        distances(np.array([ONE_QUERY]), keys), ("plain RoPE", "dual chunk attention"), ("grey", "#3b6fb5"), strict=True
    ):
        curve.plot(keys, found[0], color=colour, label=name)
    curve.axhline(SIZES.original_context, color="#c8553d", linestyle=":", label="trained length")
    curve.set_title(f"as query {ONE_QUERY:,} sees it", fontsize=10)
    curve.set_xlabel("key")
    curve.set_ylabel("distance, cells")
    curve.legend(fontsize=8)
    figure.suptitle(
        f"chunks of {SIZES.chunk_cells:,} cells, {SIZES.local_cells} of them local: a stride of {SIZES.stride_cells:,}", fontsize=10
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "dca-positions.png")
