"""Files appear whole or not at all; what is no regular file is left alone; every writer of a place that the user names goes this way."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from rollkv.errors import OutOfMemoryError, UsageError
from rollkv.logit_file import write_logits
from rollkv.plots import save
from rollkv.synth import open_synth, write_gguf
from rollkv.tasks.needle import appending
from rollkv.whole_file import check_place, whole_file


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    (tmp_path / "a.bin.part").write_bytes(b"of somebody else")
    with whole_file(path, "--to a.bin") as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and names(tmp_path) == ["a.bin", "a.bin.part"]
    assert (tmp_path / "a.bin.part").read_bytes() == b"of somebody else"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no"), OSError(errno.ENOSPC, "full")])
def test_an_error_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    wanted = OutOfMemoryError if isinstance(error, OSError) else type(error)
    with pytest.raises(wanted), whole_file(path, "--to a.bin") as stream:
        stream.write(b"new")
        raise error
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a.bin"]


def test_an_error_of_another_file_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "a.bin", "--to a.bin"):
        (tmp_path / "absent").read_bytes()


def test_links_are_followed(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "real.bin", tmp_path / "link.bin"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with whole_file(link, "--to link.bin") as stream:
        stream.write(b"new")
    assert link.is_symlink() and target.read_bytes() == b"new" and names(tmp_path) == ["link.bin", "there"]


@pytest.mark.parametrize("make,words", [(os.mkfifo, "no regular file"), (os.mkdir, "a folder")])
@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_regular_file_is_left_alone(tmp_path, make, words, linked):
    """By every writer."""
    path = tmp_path / "a.svg"
    make(tmp_path / "real" if linked else path)
    if linked:
        path.symlink_to(tmp_path / "real")
    before = names(tmp_path), os.lstat(path)
    with pytest.raises(UsageError, match=words):
        check_place(path, "--to a")
    with pytest.raises(UsageError, match=words), write_logits(path, np.arange(2), 3):
        pass
    with pytest.raises(UsageError, match=words):
        save(None, path)
    with pytest.raises(UsageError, match=f"{words}|is there already"), open_synth("synth:tiny") as file:
        write_gguf(file, path)
    after = os.lstat(path)
    assert (names(tmp_path), after.st_mode, after.st_ino) == (before[0], before[1].st_mode, before[1].st_ino)


def test_a_read_only_file_system_is_said_in_one_sentence(tmp_path, monkeypatch):
    """Nothing can be made there, and nothing removed either."""

    def refuses(self, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "open", refuses)
    monkeypatch.setattr(Path, "unlink", refuses)
    with (
        pytest.raises(UsageError, match=r"a\.npz: cannot write it: Read-only file system"),
        write_logits(tmp_path / "a.npz", np.arange(2), 3),
    ):
        pass
    with pytest.raises(UsageError, match="Read-only"), open_synth("synth:tiny") as file:
        write_gguf(file, tmp_path / "x.gguf")
    with pytest.raises(UsageError, match="--out .*Read-only"), appending(tmp_path / "rows.jsonl"):
        pass
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="--to a: cannot write to the folder"):
        check_place(tmp_path / "a", "--to a")
