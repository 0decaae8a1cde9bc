"""Compiler and cache of machine code: no GPU and no driver needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollkv.cuda import nvrtc
from rollkv.cuda.nvrtc import CubinCache, KernelError, KernelSpec, arch_name, compile_cubin, default_cache_dir, find_csrc

ADD = ("add.cu", ("add<4, 256>",), "sm_80")


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    return Path(shutil.copytree(find_csrc(), tmp_path / "csrc"))


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_cubin_is_machine_code_with_its_names() -> None:
    cubin = compile_cubin("add.cu", ("add<4, 256>", "add<1, 256>"), "sm_90a")
    assert cubin.image[:4] == b"\x7fELF", "a device object file, not PTX and not a bundle with PTX"
    assert len(set(cubin.lowered.values())) == 2
    assert all(name.encode() in cubin.image for name in cubin.lowered.values())
    assert "spill" in cubin.log and "registers" in cubin.log


def test_compile_error_names_expression_place_and_message(csrc: Path) -> None:
    (csrc / "broken.cu").write_text(
        '#include "common.cuh"\ntemplate <int N> __global__ void broken(float* x) { x[0] = undeclared_thing; }\n'
    )
    with pytest.raises(KernelError) as caught:
        compile_cubin("broken.cu", ("broken<3>",), "sm_80", csrc)
    text = str(caught.value)
    assert "broken<3>" in text and "broken.cu(2)" in text and "undeclared_thing" in text and "sm_80" in text
    assert "\n" not in text and caught.value.exit_code == 3


def test_unknown_arch_and_missing_source_are_kernel_errors() -> None:
    with pytest.raises(KernelError, match="sm_11"):
        compile_cubin("add.cu", ("add<4, 256>",), "sm_11")
    with pytest.raises(KernelError, match="no_such.cu"):
        compile_cubin("no_such.cu", ("x",), "sm_80")


def test_missing_nvrtc_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Failed to dlopen libnvrtc.so.13\nmore")

    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcVersion", fail)
    with pytest.raises(nvrtc.DeviceError, match=r'libnvrtc.so.13\); pip install "rollkv\[cuda\]"') as caught:
        compile_cubin(*ADD)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("compiler", "driver", "good"), [((13, 5), (13, 0), True), ((12, 9), (13, 0), True), ((13, 0), (12, 8), False)])
def test_compiler_and_driver(monkeypatch: pytest.MonkeyPatch, compiler: tuple[int, int], driver: tuple[int, int], good: bool) -> None:
    """Machine code loads across minor versions, and on newer drivers; not on a driver that is a major version behind."""
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: compiler)
    if good:
        nvrtc.check_compiler(driver)
    else:
        with pytest.raises(nvrtc.DeviceError, match=r"NVRTC 13.0 .*CUDA 12.8.*rollkv\[cuda12\]"):
            nvrtc.check_compiler(driver)


def test_arch_names() -> None:
    assert [arch_name(*c) for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))] == list(nvrtc.ARCHS)
    assert [arch_name(*c, portable=True) for c in ((8, 6), (9, 0), (12, 0))] == ["sm_86", "sm_90", "sm_120"]


def test_spec_knows_its_architectures() -> None:
    assert KernelSpec("a.cu", "a").compiles_for("sm_80")
    assert not KernelSpec("a.cu", "a", ("sm_90a",)).compiles_for("sm_80")


def test_cache_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CubinCache(tmp_path).get(*ADD)
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert CubinCache(tmp_path).get(*ADD) == first
    assert len(_files(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped header", "flipped image", "other text"])
def test_damaged_cache_file_is_compiled_again(tmp_path: Path, damage: str) -> None:
    cache = CubinCache(tmp_path)
    good = cache.get(*ADD)
    (path,) = _files(tmp_path)
    content = bytearray(path.read_bytes())
    if damage.startswith("flipped"):
        content[60 if damage == "flipped header" else -100] ^= 1
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "other text": b"<html>" * 99}.get(damage, bytes(content)))
    again = cache.get(*ADD)
    assert (again.image, again.lowered) == (good.image, good.lowered)
    assert nvrtc._load(path, ADD[1]) == again, "the damaged file was not replaced"


def test_key_follows_sources_headers_expressions_and_arch(csrc: Path, tmp_path: Path) -> None:
    def key(*what: object) -> str:
        return CubinCache(tmp_path, csrc).key(*what)  # type: ignore[arg-type]

    keys = [
        key(*ADD),
        key("add.cu", ("add<1, 256>",), "sm_80"),
        key("add.cu", ("add<4, 256>",), "sm_86"),
        key("embed.cu", ("add<4, 256>",), "sm_80"),
    ]
    for changed in ("add.cu", "common.cuh"):
        (csrc / changed).write_text((csrc / changed).read_text() + "\n")
        keys.append(key(*ADD))
    (csrc / "another.cuh").write_text("\n")
    keys.append(key(*ADD))
    assert len(set(keys)) == len(keys)
    assert key(*ADD) == keys[-1]


def test_works_without_a_writable_directory(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("x")
    assert CubinCache(in_the_way / "kernels").get(*ADD).image
    assert in_the_way.read_text() == "x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        assert CubinCache(tmp_path / "kernels").get(*ADD).image
    finally:
        tmp_path.chmod(0o755)


def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    assert CubinCache(tmp_path).get(*ADD).image
    assert _files(tmp_path) == []


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLKV_CACHE_DIR", str(tmp_path))
    assert default_cache_dir() == tmp_path / "kernels"
    monkeypatch.delenv("ROLLKV_CACHE_DIR")
    monkeypatch.setenv("HOME", "/nowhere")
    assert default_cache_dir() == Path("/nowhere/.cache/rollkv/kernels")


def test_parallel_starts(tmp_path: Path) -> None:
    """Four processes fill one directory at once; every one ends with the same code and one whole file remains."""
    script = (
        "import sys, hashlib; from pathlib import Path; from rollkv.cuda.nvrtc import CubinCache\n"
        f"c = CubinCache(Path(sys.argv[1])).get(*{ADD!r}); print(hashlib.sha256(c.image).hexdigest())"
    )
    starts = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in starts]
    assert all(process.returncode == 0 for process in starts)
    assert len(set(outputs)) == 1 and len(outputs[0]) == 65
    (path,) = _files(tmp_path)
    assert nvrtc._load(path, ADD[1]) is not None
