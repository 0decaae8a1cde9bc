"""Teacher-forced comparison of configurations over one text: the logits behind every token, a reference against candidates.

Two engines may not fit on one device, so they run one after the other: the reference goes first and its rows go to a file, which is read
back slice by slice beside each candidate. Memory is a few slices of rows, for as many threads, disk is N x vocab x 4 bytes. Every run feeds the same tokens in the
same calls (one prefill, then the last tokens one by one), so that only what is compared differs. Yields rows, prints nothing.
"""

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollkv.engine import Engine, Progress
from rollkv.errors import CheckFailed, OutOfMemoryError, UsageError
from rollkv.logit_file import LogitFile, logits_bytes, write_logits
from rollkv.metrics import Comparison, Limits, RowComparison, SliceFigures, measure_slice
from rollkv.pages import pages_for
from rollkv.prose import running_text
from rollkv.tasks.equiv_specs import RunSpec
from rollkv.units import format_size

# Rounding activations to 16 bits moves the logits of small models by 0.004 rms; a margin this small may go either way.
DEFAULT_NOISE = 0.05
# Beside the engine, which computes the next rows meanwhile. One thread takes 20 s for the 10 GB of 16,384 rows over 152,000 tokens.
_THREADS = min(8, len(os.sched_getaffinity(0)))
_BACKLOG = 2 * _THREADS  # slices of up to 16 rows, 10 MB each at 152,000 tokens


@dataclass(frozen=True)
class EquivRow:
    """What one candidate came to. `broken` names the limits that it did not keep."""

    spec: RunSpec
    comparison: Comparison
    limits: Limits
    broken: tuple[str, ...]
    window_cells: int
    tail_cells: int
    streamed_bytes: int
    machine: dict[str, object]

    @property
    def passed(self) -> bool:
        return not self.broken

    @property
    def judged(self) -> bool:
        """Whether there was any limit to keep, but that rows be finite."""
        return self.limits != Limits()

    def as_dict(self) -> dict[str, object]:
        """Flat, in the names of the tables."""
        found, first = self.comparison, self.comparison.first_difference
        return {
            "candidate": self.spec.label,
            "passed": self.passed if self.judged or self.broken else None,
            "judged": self.judged,
            "broken_limits": "; ".join(self.broken) or None,
            "limit_bit_equal": self.limits.bit_equal,
            "limit_max_kld": self.limits.max_kld,
            "limit_max_nmse": self.limits.max_nmse,
            "limit_min_top1": self.limits.min_top1,
            "rows": found.rows,
            "bit_equal_rows": found.bit_equal_rows,
            "not_finite_rows": found.not_finite_rows,
            "first_unequal_position": found.first_unequal,
            "max_abs": found.max_abs,
            "nmse": found.nmse,
            "kld_mean": found.kld_mean,
            "kld_p999": found.kld_p999,
            "kld_max": found.kld_max,
            "tv_mean": found.tv_mean,
            "same_top1": found.same_top1,
            "real_frac": found.real_frac,
            "noise": found.noise,
            "positions": found.positions,
            "full_agreement": found.full_agreement,
            "first_difference_position": first.position if first else None,
            "first_difference_margin": first.margin if first else None,
            "first_difference_reference_token": first.reference_token if first else None,
            "first_difference_candidate_token": first.candidate_token if first else None,
            "cells_in_window": self.window_cells,
            "cells_in_tail": self.tail_cells,
            "streamed_bytes": self.streamed_bytes,
        }


Open = Callable[[RunSpec], AbstractContextManager[Engine]]
ProgressFor = Callable[[RunSpec], Progress | None]
Describe = Callable[[Engine], dict[str, object]]


# -- the runs ------------------------------------------------------------------------------------------------------------------


def forced_rows(
    engine: Engine, tokens: Sequence[int], num_decode: int, on_progress: Progress | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """(first position, logits float32 [R, vocab]) of a fresh sequence; the last num_decode tokens go one by one."""
    engine.reset()
    prompt, rest = tokens[: len(tokens) - num_decode], tokens[len(tokens) - num_decode :]
    position = 0
    slices = engine.logit_rows(prompt) if len(prompt) else iter(())
    for rows in slices:
        yield position, rows
        position += len(rows)
        _tell(on_progress, position, len(tokens))
    for token in rest:
        yield position, engine.decode(int(token))[None]
        position += 1
        _tell(on_progress, position, len(tokens))


@contextmanager
def record_reference(
    open_engine: Open,
    spec: RunSpec,
    tokens: Sequence[int],
    num_decode: int,
    vocab_size: int,
    save: Path | None,
    progress_for: ProgressFor,
    describe: Describe,
) -> Iterator[LogitFile]:
    """Runs the reference; its rows as a file, with what `describe` says of the run: `save`, which stays, or one in the temporary directory, which
    goes with the context.

    Raises OutOfMemoryError before the model loads when the disk is too small, CheckFailed when a row is not finite.
    """
    with tempfile.TemporaryDirectory(prefix="rollkv-logits-") as folder:
        path = save or Path(folder) / "reference.npz"
        check_disk(path, len(tokens), vocab_size)
        with (
            open_engine(spec) as engine,
            write_logits(path, np.asarray(tokens), vocab_size, describe(engine)) as write,
            ThreadPoolExecutor(1) as thread,
        ):
            written: deque[Future[None]] = deque()
            for position, rows in forced_rows(engine, tokens, num_decode, progress_for(spec)):
                written.append(thread.submit(_write, write, spec, position, rows))
                if len(written) > _BACKLOG:
                    written.popleft().result()
            for future in written:
                future.result()
        yield LogitFile(path)


def _write(write: Callable[[np.ndarray], None], spec: RunSpec, position: int, rows: np.ndarray) -> None:
    if not np.isfinite(rows).all():
        last = position + len(rows) - 1
        raise CheckFailed(f"the reference ({spec.label}) has logits that are not finite within positions {position} to {last}")
    write(rows)


def prose_ids(encode: Callable[[str], Sequence[int]], num_tokens: int) -> list[int]:
    """The first num_tokens ids of the shipped prose, repeated as often as it takes."""
    characters = 8 * num_tokens
    while len(ids := encode(running_text(characters))) < num_tokens:
        characters *= 2
    return list(ids[:num_tokens])


def check_disk(path: Path, num_tokens: int, vocab_size: int) -> None:
    """Raises OutOfMemoryError when the logits do not fit beside `path`, whose folder exists."""
    needed, free = logits_bytes(num_tokens, vocab_size), shutil.disk_usage(path.parent).free
    if needed > free:
        raise OutOfMemoryError(
            f"the reference's logits take {format_size(needed)} of disk, but {path.parent} has {format_size(free)} free; "
            "lower --tokens, or let TMPDIR or --save name another disk"
        )


def check_reference(reference: LogitFile, vocab_size: int) -> None:
    """Raises UsageError when a stored file cannot be compared with a model of this vocabulary."""
    if reference.vocab_size != vocab_size:
        raise UsageError(
            f"{reference.path}: its rows have {reference.vocab_size} logits, the model has {vocab_size} tokens; give a file of the same model"
        )
    for name, ids in (("tokens", reference.tokens), ("top1", reference.top1)):
        if ids is not None and len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
            raise UsageError(
                f"{reference.path}: token id {wrong[0]} in {name!r} is outside the vocabulary of {vocab_size}; give a file of the same model"
            )


def compare(
    reference: LogitFile,
    open_engine: Open,
    specs: Sequence[RunSpec],
    *,
    num_decode: int,
    noise: float,
    limits: Callable[[RunSpec, Mapping[str, object]], Limits],
    progress_for: ProgressFor,
    describe: Describe,
) -> Generator[EquivRow, None, None]:
    """Runs every candidate over the reference's tokens and yields what it came to. limits: what it must keep, by what `describe` says of its run."""
    for spec in specs:
        with open_engine(spec) as engine:
            found = _compare_one(reference, engine, num_decode, noise, progress_for(spec))
            position = engine.position
            tail = max(pages_for(position, engine.budget.page_cells) - engine.budget.window_pages, 0) * engine.budget.page_cells
            machine = describe(engine)
            wanted = limits(spec, machine)
            row = EquivRow(spec, found, wanted, wanted.broken(found), position - tail, tail, engine.copied_bytes[0], machine)
        yield row


def _compare_one(reference: LogitFile, engine: Engine, num_decode: int, noise: float, on_progress: Progress | None) -> Comparison:
    comparison = RowComparison(noise)
    tokens, positions, top1 = reference.tokens.tolist(), reference.positions, reference.top1
    measured: deque[Future[tuple[np.ndarray, SliceFigures]]] = deque()
    with reference.rows() as stored, ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(_THREADS) as threads:
        for begin, rows in forced_rows(engine, tokens, num_decode, on_progress):
            here = np.arange(begin, begin + len(rows))
            first, last = np.searchsorted(positions, [begin, begin + len(rows)])
            known = positions[first:last]
            if len(known):
                mine = rows if len(known) == len(rows) else rows[known - begin]
                measured.append(threads.submit(_measure, known, reader.submit(stored.read, len(known)), mine, noise))
            if top1 is not None and len(known) < len(rows):
                others = np.setdiff1d(here, known)
                comparison.add_tops(others, top1[others], rows[others - begin].argmax(1))
            if len(measured) > _BACKLOG:
                comparison.include(*measured.popleft().result())
        for future in measured:
            comparison.include(*future.result())
    return comparison.result()


def _measure(positions: np.ndarray, stored: "Future[np.ndarray]", rows: np.ndarray, noise: float) -> tuple[np.ndarray, SliceFigures]:
    return positions, measure_slice(positions, stored.result(), rows, noise)


def _tell(on_progress: Progress | None, done: int, total: int) -> None:
    if on_progress is not None:
        on_progress(done, total)
