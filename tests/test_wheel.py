"""The wheel: what it carries, and that it works where it is unpacked, away from the checkout."""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys, hatchling.build as backend; print(backend.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_it_carries_every_module_and_every_kernel_source(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "rollkv").rglob("*.*") if path.is_file() and path.suffix != ".pyc"}
    expected |= {f"rollkv/csrc/{path.relative_to(ROOT / 'csrc')}" for path in (ROOT / "csrc").rglob("*.cu*")}
    assert any(name.endswith(".cu") for name in expected)
    assert expected <= names
    assert {name.split("/")[0] for name in names - expected} == {next(n for n in names if n.endswith("METADATA")).split("/")[0]}
    assert any(name.endswith("LICENSE") for name in names)


def test_its_metadata(unpacked):
    folder = next(unpacked.glob("*.dist-info"))
    metadata = Parser().parsestr((folder / "METADATA").read_text())
    required = metadata.get_all("Requires-Dist") or []
    core = {line.split(";")[0].split(">")[0].strip() for line in required if "extra ==" not in line}
    assert core == {"cuda-python", "gguf", "jinja2", "numpy", "rich", "tabulate", "tokenizers", "typer"}
    assert set(metadata.get_all("Provides-Extra") or []) == {"cuda", "cuda12", "cuda13", "dev", "plot"}
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "rollkv = rollkv.__main__:main" in (folder / "entry_points.txt").read_text()


def test_it_runs_and_finds_its_kernels_where_it_lies(unpacked, tmp_path):
    program = (
        "import rollkv; from rollkv.cuda.nvrtc import find_csrc; from rollkv.cli.main import main; print(find_csrc()); main(['--version'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    place, version = done.stdout.splitlines()
    assert Path(place) == unpacked / "rollkv" / "csrc"
    assert version == "rollkv 0.1.0"
