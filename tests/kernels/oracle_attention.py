"""The oracle of the attention kernels: float64 over decoded cells, no pages, no splits; and caches laid out in poisoned pools."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollkv import kv_codes
from rollkv.backend import PageRun
from rollkv.config import LayerConfig, PageFormat, RopeConfig
from rollkv.kv_page import write_cells
from rollkv.kv_types import KV_TYPES


def make_layer(num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, sliding_window: int | None = None) -> LayerConfig:
    return LayerConfig(num_heads, num_kv_heads, key_dim, value_dim, RopeConfig(key_dim, "halves"), sliding_window)


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 [..., D] to the bytes of a cache type, uint8 [..., D * size]: to nearest, ties to even."""
    if dtype == "bf16":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
        coded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    else:
        coded = np.ascontiguousarray(x, {"f32": np.float32, "f16": np.float16}[dtype])
    return coded.view(np.uint8)


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of encode, float64."""
    if dtype == "bf16":
        return (np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.ascontiguousarray(raw).view({"f32": np.float32, "f16": np.float16}[dtype]).astype(np.float64)


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
    scale: float,
    sliding_window: int | None = None,
    first_cell: int = 0,
    half: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, H, Dv], lse [T, H]) of queries q [T, H, Dk] at position + t over keys [N, Hkv, Dk] and values [N, Hkv, Dv] of the cells
    first_cell + n, in the precision of q. Without a visible cell (0, -inf). `half` rounds queries and softmax weights to half precision and
    nothing else: what a tensor-core kernel may at best do."""
    if half:
        q = q.astype(np.float16).astype(q.dtype)
    num_tokens, num_heads, _ = q.shape
    group = num_heads // keys.shape[1]
    at = position + np.arange(num_tokens)[:, None]
    cell = first_cell + np.arange(keys.shape[0])[None]
    seen = (cell <= at) & (cell > at - (sliding_window or at.max() + 1 + cell.max(initial=0)))
    out = np.zeros((num_tokens, num_heads, values.shape[2]), q.dtype)
    lse = np.full((num_tokens, num_heads), -np.inf, q.dtype)
    for t in range(num_tokens):
        n = np.flatnonzero(seen[t])
        if n.size == 0:
            continue
        for h in range(num_heads):
            scores = (keys[n, h // group].astype(q.dtype) @ q[t, h]) * q.dtype.type(scale)
            weights = np.exp(scores - scores.max())
            rounded = weights.astype(np.float16).astype(q.dtype) if half else weights
            out[t, h] = rounded @ values[n, h // group].astype(q.dtype) / weights.sum()
            lse[t, h] = scores.max() + np.log(weights.sum())
    return out, lse


def attend_bands(
    queries: list[np.ndarray],
    keys: np.ndarray,
    values: np.ndarray,
    position: int,
    scale: float,
    borders: tuple[int, int],
    half: bool = False,
) -> np.ndarray:
    """out [T, H, Dv] as attend gives it, with queries[0] for cells from borders[1] on, queries[1] from borders[0] on and queries[2] for older ones."""
    edges = (0, *borders, keys.shape[0])
    spans = [(q, slice(a, b)) for q, a, b in zip(queries[::-1], edges, edges[1:], strict=False) if b > a]
    parts = [attend(q, keys[s], values[s], position, scale, first_cell=s.start, half=half) for q, s in spans]
    outs, lses = np.stack([out for out, _ in parts]), np.stack([lse for _, lse in parts])
    weights = np.exp(lses - lses.max(axis=0))[..., None]
    return np.asarray((outs * weights).sum(axis=0) / weights.sum(axis=0))


@dataclass(frozen=True)
class Cache:
    """Random cells in the pages of two pools. Everything that is not a cell is NaN in every cache type."""

    page: PageFormat
    keys: np.ndarray  # float64 [N, Hkv, Dk], as stored
    values: np.ndarray  # float64 [N, Hkv, Dv], as stored
    pools: tuple[np.ndarray, ...]  # uint8 [slots, page_bytes]
    places: tuple[tuple[int, int], ...]  # (pool, slot) of every page

    @property
    def num_pages(self) -> int:
        return len(self.places)

    def runs(self, pools: list[Any], cuts: tuple[int, ...] = (), first_page: int = 0) -> list[PageRun]:
        """Pages from first_page on as runs: as long as slots follow each other, ended at every page in cuts."""
        runs: list[PageRun] = []
        for number in range(first_page, self.num_pages):
            pool, slot = self.places[number]
            slots = self.pools[pool].shape[0]
            if runs and number not in cuts:
                last = runs[-1]
                if last.pool is pools[pool] and (last.first_slot + last.num_pages) % slots == slot and last.num_pages < slots:
                    runs[-1] = PageRun(last.pool, slots, last.first_slot, last.first_page, last.num_pages + 1)
                    continue
            runs.append(PageRun(pools[pool], slots, slot, number, 1))
        return runs

    def launches(self, pools: list[Any], cuts: tuple[int, ...], first_page: int, together: int) -> list[tuple[PageRun, ...]]:
        """The runs of a step as its launches take them: so many together."""
        runs = self.runs(pools, cuts, first_page)
        return [tuple(runs[first : first + together]) for first in range(0, len(runs), together)]


def make_cache(
    rng: np.random.Generator,
    page: PageFormat,
    num_cells: int,
    *,
    places: str = "ring",
    first_visible: int = 0,
    seed_scale: float = 1.0,
    given: tuple[np.ndarray, np.ndarray] | None = None,
) -> Cache:
    """num_cells random cells, or the given keys and values, f32 [N, Hkv, D]; those before first_visible are NaN in the pools (and unused by the oracle).

    places: "ring": one pool whose slots wrap; "two": the older half in one pool, the newer in another, both wrapping; "shuffled": every page
    in a random slot of one of two pools."""
    num_pages = -(-num_cells // page.page_cells)
    shape = (num_cells, page.num_kv_heads)
    keys = (rng.standard_normal((*shape, page.key_dim)) * seed_scale).astype(np.float32)
    values = rng.standard_normal((*shape, page.value_dim)).astype(np.float32)
    if given is not None:
        keys, values = given
    if places == "ring":
        slots = num_pages + int(rng.integers(0, 3))
        start = int(rng.integers(0, slots))
        where = [(0, (start + i) % slots) for i in range(num_pages)]
        sizes = [slots]
    elif places == "two":
        old = num_pages // 2
        sizes = [old + 2, num_pages - old + 1]
        starts = [int(rng.integers(0, n)) for n in sizes]
        where = [(0, (starts[0] + i) % sizes[0]) if i < old else (1, (starts[1] + i - old) % sizes[1]) for i in range(num_pages)]
    else:
        sizes = [num_pages + 1, num_pages + 2]
        slots_of = [rng.permutation(n) for n in sizes]
        where = [(int(p), int(slots_of[p][i])) for i, p in enumerate(rng.integers(0, 2, num_pages))]
    pools = tuple(np.full((n, page.page_bytes), 0xFF, np.uint8) for n in sizes)
    for number, (pool, slot) in enumerate(where):
        first = number * page.page_cells
        last = min(first + page.page_cells, num_cells)
        begin = max(first, first_visible)
        if begin < last:
            write_cells(pools[pool][slot], page, begin - first, keys[begin:last], values[begin:last])
    return Cache(page, stored(keys, page.key_type), stored(values, page.value_type), pools, tuple(where))


def stored(x: np.ndarray, name: str) -> np.ndarray:
    """What a cache type holds of float32 rows [..., D], float64."""
    if KV_TYPES[name].coded:
        return kv_codes.decode(*kv_codes.encode(x, name), name, x.shape[-1]).astype(np.float64)
    return decode(encode(x, name), name)


def page_views(raw: np.ndarray, page: PageFormat) -> tuple[np.ndarray, np.ndarray]:
    """Keys uint8 [Hkv, P, Dk * size] and values uint8 [Hkv, P, Dv * size] of one page, as views."""
    shape = (page.num_kv_heads, page.page_cells, -1)
    return raw[: page.key_bytes].reshape(shape), raw[page.key_bytes :].reshape(shape)


def relative_error(x: np.ndarray, exact: np.ndarray) -> float:
    """|x - exact| / |exact| over all elements."""
    return float(np.linalg.norm(np.asarray(x, np.float64) - exact) / np.linalg.norm(exact))


def check_parts(
    cache: Cache,
    part_out: np.ndarray,
    part_lse: np.ndarray,
    q: np.ndarray,
    scale: float,
    sliding_window: int | None,
    close: Callable[..., None],
) -> None:
    """A step's state of every page against the cells of that page, by close(out, *operands of attend, lse=lse): (0, -inf) where none is visible. A step of a
    single page has none. q float64 [1, H, Dk]; the cache's last cell is the newest."""
    cells, size = cache.keys.shape[0], cache.page.page_cells
    for number in range(cache.num_pages if cache.num_pages > 1 else 0):
        s = slice(number * size, (number + 1) * size)
        if sliding_window and s.stop <= cells - sliding_window:
            assert (part_out[number] == 0).all() and (part_lse[number] == -np.inf).all()
        else:
            close(part_out[number], q, cache.keys[s], cache.values[s], cells - 1, scale, sliding_window, s.start, lse=part_lse[number])


def divisions(num_pages: int) -> set[tuple[int, ...]]:
    """Ways to cut pages into runs: not at all, in two, unevenly, in threes, and each for itself where they are few."""
    cuts = {(), (num_pages // 2,), (1, 15, 18), tuple(range(1, num_pages, 3))}
    return cuts | {tuple(range(1, num_pages))} if num_pages < 100 else cuts
