"""GGUF files and shard sets: what a header pass found, as one model file."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rollkv.errors import ModelFileError, UnsupportedModelError
from rollkv.gguf_header import FILE_TYPES, SUPPORTED_TYPES, TENSOR_TYPES, Header, TensorData, show

_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf\Z", re.DOTALL)


class GgufFile:
    """An open model file or shard set. Views of tensors stay valid after `close` for as long as they are held."""

    def __init__(self, path: Path, shards: tuple[Path, ...], headers: list[Header]) -> None:
        self.path = path  # the path as it was given
        self.shards = shards  # all files of the set in order; one for an ordinary file
        self.size_bytes = sum(header.size for header in headers)
        self.metadata: Mapping[str, object] = headers[0].metadata
        self.tensors: dict[str, TensorData] = {name: tensor for header in headers for name, tensor in header.tensors.items()}
        self._maps = [header.data for header in headers]

    @property
    def architecture(self) -> str:
        """general.architecture; empty if the file names none (an imatrix file, a lone part of a set)."""
        name = self.metadata.get("general.architecture")
        return name if isinstance(name, str) else ""

    @property
    def file_type(self) -> str:
        """Label of the quantisation mix, such as Q4_K_M: the file's own, else the tensor type that most bytes have."""
        number = self.metadata.get("general.file_type")
        if isinstance(number, int) and number in FILE_TYPES:
            return FILE_TYPES[number]
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.qtype] = sizes.get(tensor.qtype, 0) + tensor.nbytes
        return max(sizes, key=sizes.__getitem__, default="none")

    def tensor(self, name: str) -> TensorData:
        """A tensor that is needed. Raises ModelFileError if it is missing, UnsupportedModelError if its type cannot be computed with."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{show(self.path)}: the tensor {show(name)} is missing; the file is incomplete, convert the model again")
        if tensor.qtype not in SUPPORTED_TYPES:
            number = next((f" ({number})" for number, known in TENSOR_TYPES.items() if known.name == tensor.qtype), "")
            raise UnsupportedModelError(
                f"{tensor.file}: the tensor {show(name)} has {'' if tensor.qtype.startswith('type') else 'type '}{tensor.qtype}{number}, "
                f"supported are {', '.join(SUPPORTED_TYPES)}; take another quantisation of the model"
            )
        return tensor

    def close(self) -> None:
        """Lets go of the maps, and of metadata not yet looked at. A map whose views are still held is released with the last of them.
        May be called twice."""
        self.tensors = {}
        for data in self._maps:
            try:
                data.close()
            except BufferError:
                pass  # views exist: the memory map lives exactly as long as they do
        self._maps = []

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_gguf(path: str | Path) -> GgufFile:
    """Opens a GGUF file; any file of a shard set (NAME-00001-of-0000N.gguf) opens the whole set.

    Raises ModelFileError or UnsupportedModelError, with the file, what is wrong and where. Whether the model in the file can be run
    is a question for model_config.
    """
    path = Path(path)
    shards = _shards_of(path)
    headers = [Header(shard) for shard in shards]
    if len(shards) > 1 or "split.count" in headers[0].metadata:
        _check_set(headers)
    return GgufFile(path, shards, headers)


def _shards_of(path: Path) -> tuple[Path, ...]:
    """All files of the set that `path` is named as a part of; `path` alone if it is not."""
    match = _SHARD.match(path.name)
    if match is None or not os.path.exists(path):
        return (path,)
    number, count = int(match[2]), int(match[3])
    if not 1 <= number <= count:
        raise ModelFileError(f"{show(path)}: named as part {number} of {count}; give the files of the set their original names")
    shards = tuple(path.with_name(f"{match[1]}-{index:05d}-of-{match[3]}.gguf") for index in range(1, count + 1))
    missing = [shard.name for shard in shards if not os.path.exists(shard)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        names = ", ".join(show(name) for name in missing[:3])
        raise ModelFileError(f"{show(path)}: of the {count} files of the set, missing: {names}{more}; put them beside it")
    return shards


def _check_set(headers: list[Header]) -> None:
    first = headers[0]
    owners: dict[str, str] = {}
    for index, header in enumerate(headers):
        number, count = _plain(header, "split.no"), _plain(header, "split.count")
        if (number, count) != (index, len(headers)):
            named = f"part {index + 1} of {len(headers)}" if len(headers) > 1 else "a whole model"
            found = "says nothing of a set" if count is None else f"has split.no {number} (from 0) of split.count {count}"
            raise ModelFileError(f"{header.path}: named as {named}, but the file {found}; give the files of a set their original names")
        for key in ("split.tensors.count", "general.architecture", "general.name", "general.file_type"):
            here, there = _plain(header, key), _plain(first, key)
            if key in header.metadata and here != there:
                raise ModelFileError(f"{header.path}: {key} is {here}, but {there} in {first.path}; the files are not of one set")
        for name in header.tensors:
            if name in owners:
                raise ModelFileError(f"{header.path}: the tensor {show(name)} is in {owners[name]} too; the files are not of one set")
            owners[name] = header.path
    declared = _plain(first, "split.tensors.count")
    if declared not in (None, len(owners)):
        raise ModelFileError(f"{first.path}: the set has {len(owners)} tensors, split.tensors.count says {declared}; get the files again")


def _plain(header: Header, key: str) -> int | str | None:
    """A value in a form that can be compared and printed."""
    value = header.metadata.get(key)
    return value if value is None or isinstance(value, int) else show(value)
