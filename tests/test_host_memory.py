"""RAM and cgroup limits, read from files made here."""

from pathlib import Path

from rollkv.host_memory import RESERVE_BYTES, host_memory

GIB = 1 << 30


def make_proc(folder: Path, cgroup_lines: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {40 * GIB // 1024} kB\n")
    (folder / "self" / "cgroup").write_text(cgroup_lines)
    return folder


def test_a_parents_limit_counts(tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", "0::/jobs/run\n")
    inner = tmp_path / "cgroup" / "jobs" / "run"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5\n")
    (inner.parent / "memory.max").write_text(f"{4 * GIB}\n")
    (inner.parent / "memory.current").write_text(f"{GIB}\n")
    memory = host_memory(proc, tmp_path / "cgroup")
    assert memory.available_bytes == 40 * GIB
    assert memory.cgroup_bytes == 3 * GIB
    assert memory.usable_bytes == 3 * GIB - RESERVE_BYTES


def test_version_one_without_a_limit(tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", "12:cpu:/\n5:memory:/box\n")
    box = tmp_path / "cgroup" / "memory" / "box"
    box.mkdir(parents=True)
    (box / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (box / "memory.usage_in_bytes").write_text("7\n")
    memory = host_memory(proc, tmp_path / "cgroup")
    assert memory.cgroup_bytes is None and memory.usable_bytes == 39 * GIB


def test_no_cgroup_files_at_all(tmp_path: Path) -> None:
    proc = make_proc(tmp_path / "proc", "0::/\n")
    assert host_memory(proc, tmp_path / "none").cgroup_bytes is None


def test_this_machine_has_some_memory() -> None:
    assert 0 < host_memory().usable_bytes < 1 << 50
