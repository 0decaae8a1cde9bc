"""Files at a place that the user named: they appear whole or not at all, and only where a file can be."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rollkv.errors import OutOfMemoryError, RollkvError, UsageError


def check_place(path: Path, named: str) -> None:
    """Raises UsageError where no file can be written: no folder or no permission, a folder of that name, or a device, pipe or socket. Of a
    symbolic link the file counts that it leads to. named: the place in the user's words, such as "--plot a.png"."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.exists(target) and not os.path.isfile(target):
        raise UsageError(f"{named}: it is {'a folder' if os.path.isdir(target) else 'no regular file'}; name a file")
    if not os.path.isdir(folder):
        raise UsageError(f"{named}: there is no folder {folder}; name one that exists")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{named}: cannot write to the folder {folder}; name another place")


@contextmanager
def whole_file(path: Path, named: str) -> Iterator[BinaryIO]:
    """A stream to a new file beside `path`, which takes its name when the block ends well and is gone otherwise. A symbolic link stays, and the
    file that it leads to is replaced. Raises as check_place, and where writing fails as cannot_write says."""
    check_place(path, named)
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as stream:
            try:
                yield stream
                stream.close()
                part.replace(target)
            except BaseException:
                with suppress(OSError):  # the error at hand is the one to tell
                    part.unlink()
                raise
    except OSError as error:
        if error.filename not in (None, str(part)):
            raise  # of another file
        raise cannot_write(named, error) from error


def cannot_write(named: str, error: OSError) -> RollkvError:
    """OutOfMemoryError when the disk, or the user's share of it, is full, else UsageError."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = OutOfMemoryError if full else UsageError
    return kind(f"{named}: cannot write it: {error.strerror or error}; {'free space, or ' if full else ''}name another place")
