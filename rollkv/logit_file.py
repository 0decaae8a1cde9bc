"""Logits on disk: an .npz that is written and read a few rows at a time, so that memory does not grow with its length.

Arrays: `tokens` int32 [N]; `logits` float [N, vocab], or [P, vocab] with `positions` int [P], increasing; optional `top1` int [N], the top
token at every position; optional `rollkv_run`, the JSON text of an object that says how they came about. Further arrays are ignored. Files made by
numpy.savez and savez_compressed are read too.
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from rollkv.errors import LogitFileError, RollkvError, UsageError
from rollkv.whole_file import check_place, whole_file

_RUN = "rollkv_run"


class LogitFile:
    """A finished file. Raises LogitFileError for one that is missing, damaged or not of this form, with what was wanted."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.guarded(), zipfile.ZipFile(self.path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            for wanted in ("tokens", "logits"):
                if wanted not in names:
                    raise self._wrong(f"it holds no array {wanted!r}")
            self.tokens = _small(archive, "tokens")
            positions = _small(archive, "positions") if "positions" in names else None
            self.top1 = _small(archive, "top1") if "top1" in names else None
            self.run = self._run(archive) if _RUN in names else None
            with archive.open("logits.npy") as stream:
                self._shape, self.dtype = self._header(stream)
        self._check_tokens()
        self.positions = self._checked(np.arange(len(self.tokens)) if positions is None else positions)

    @property
    def vocab_size(self) -> int:
        return self._shape[1]

    @contextmanager
    def rows(self) -> Iterator["RowReader"]:
        """The rows from the first on, to be read in order."""
        with ExitStack() as opened:
            with self.guarded():
                stream = opened.enter_context(opened.enter_context(zipfile.ZipFile(self.path)).open("logits.npy"))
                self._header(stream)
            yield RowReader(self, stream)

    def _header(self, stream: IO[bytes]) -> tuple[tuple[int, int], np.dtype]:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        if len(shape) != 2 or fortran or dtype.kind != "f" or dtype.itemsize > 8:
            order = "column by column" if fortran else "row by row"
            raise self._wrong(
                f"'logits' is {dtype} {list(shape)} stored {order}; wanted are floats of at most 64 bits, [rows, vocab], stored row by row"
            )
        return (shape[0], shape[1]), dtype

    def _run(self, archive: zipfile.ZipFile) -> Mapping[str, object]:
        facts = json.loads(str(_small(archive, _RUN)))
        if not isinstance(facts, dict):
            raise self._wrong(f"{_RUN!r} is {facts!r:.40}; wanted is the JSON text of an object")
        return facts

    def _check_tokens(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu" or not len(self.tokens):
            raise self._wrong(f"'tokens' is {self.tokens.dtype} {list(self.tokens.shape)}; wanted are whole numbers [N]")
        if self.top1 is not None and (self.top1.shape != self.tokens.shape or self.top1.dtype.kind not in "iu"):
            raise self._wrong(
                f"'top1' is {self.top1.dtype} {list(self.top1.shape)}; wanted is one whole number for each of the {len(self.tokens)} tokens"
            )

    def _checked(self, positions: np.ndarray) -> np.ndarray:
        if positions.ndim != 1 or positions.dtype.kind not in "iu" or len(positions) != self._shape[0]:
            raise self._wrong(f"{self._shape[0]} rows of logits, but {positions.size} positions; each row needs its position")
        if not len(positions) or (positions[1:] <= positions[:-1]).any() or positions[0] < 0 or positions[-1] >= len(self.tokens):
            raise self._wrong(f"'positions' must be one or more, increase, and lie below the {len(self.tokens)} tokens")
        return positions.astype(np.int64)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Errors of reading become one sentence that names the file. All of them: on damaged bytes zipfile, zlib and NumPy, which evaluates a
        header, raise zlib.error, SyntaxError, tokenize.TokenError, TypeError and more."""
        try:
            yield
        except RollkvError:
            raise
        except Exception as error:
            detail = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise self._wrong(f"cannot read it: {detail or type(error).__name__}") from error

    def _wrong(self, what: str) -> LogitFileError:
        return LogitFileError(f"{self.path}: {what}; give an .npz as 'rollkv logit-equiv --save' writes it")


def check_save(path: Path, named: str) -> None:
    """Raises UsageError where no logits can be saved, or where another kind of file would be lost. named: the place in the user's words."""
    check_place(path, named)
    if path.exists():
        try:
            LogitFile(path)
        except LogitFileError as error:
            raise UsageError(f"{named}: the file is there already and holds no logits; remove it, or give another name") from error


class RowReader:
    """Rows of logits in order."""

    def __init__(self, file: LogitFile, stream: IO[bytes]) -> None:
        self._file, self._stream = file, stream

    def read(self, num_rows: int) -> np.ndarray:
        """The next rows, [num_rows, vocab] in the file's type. Raises LogitFileError when the file is damaged or ends before them."""
        shape = (num_rows, self._file.vocab_size)
        wanted = num_rows * self._file.vocab_size * self._file.dtype.itemsize
        with self._file.guarded():
            data = self._stream.read(wanted)
            if len(data) != wanted:
                raise EOFError(f"the logits end {wanted - len(data)} bytes too early")
        return np.frombuffer(data, self._file.dtype).reshape(shape)


@contextmanager
def write_logits(
    path: Path, tokens: np.ndarray, vocab_size: int, run: Mapping[str, object] | None = None
) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that takes the next rows, float32 [R, vocab], of every position. run: how they come about. The file has its name only when it is
    whole; an error leaves none behind. Raises as whole_file."""
    top1: list[np.ndarray] = []
    with whole_file(path, str(path)) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _put(archive, "tokens", tokens.astype(np.int32))
        if run is not None:
            _put(archive, _RUN, np.array(json.dumps(dict(run))))
        with archive.open("logits.npy", "w", force_zip64=True) as stream:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(tokens), vocab_size)}
            np.lib.format.write_array_header_2_0(stream, header)

            def write(rows: np.ndarray) -> None:
                stream.write(np.ascontiguousarray(rows, dtype="<f4").data.cast("B"))
                top1.append(rows.argmax(1).astype(np.int32))

            yield write
        _put(archive, "top1", np.concatenate(top1))


def logits_bytes(num_tokens: int, vocab_size: int) -> int:
    """Disk that a written file takes, but for a few kilobytes."""
    return num_tokens * (vocab_size * 4 + 8)


def _put(archive: zipfile.ZipFile, name: str, values: np.ndarray) -> None:
    with archive.open(f"{name}.npy", "w") as stream:
        np.lib.format.write_array(stream, values, allow_pickle=False)


def _small(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)
