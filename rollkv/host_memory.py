"""How much host memory this process may still take: available RAM and the cgroup's limit, whichever is less."""

from dataclasses import dataclass
from pathlib import Path

RESERVE_BYTES = 1 << 30  # left to the rest of the system


@dataclass(frozen=True)
class HostMemory:
    """Bytes. cgroup_bytes is what the memory cgroup still allows, None without a limit."""

    available_bytes: int
    cgroup_bytes: int | None
    reserve_bytes: int = RESERVE_BYTES

    @property
    def usable_bytes(self) -> int:
        limit = self.available_bytes if self.cgroup_bytes is None else min(self.available_bytes, self.cgroup_bytes)
        return max(limit - self.reserve_bytes, 0)


def host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Reads MemAvailable and the limits of this process's cgroup (v2, else v1) and of its parents."""
    available = 0
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limits = [room for folder, names in _cgroup_folders(proc, cgroup) if (room := _room(folder, *names)) is not None]
    return HostMemory(available, min(limits) if limits else None)


def _cgroup_folders(proc: Path, cgroup: Path) -> list[tuple[Path, tuple[str, str]]]:
    folders: list[tuple[Path, tuple[str, str]]] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = cgroup, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        folders += [(place, names) for place in (folder, *folder.parents) if place == root or root in place.parents]
    return folders


def _room(folder: Path, limit_name: str, used_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / used_name).read_text())
    except (OSError, ValueError):
        return None
    # cgroup v1 writes "no limit" as a number near 2^63
    return None if limit == "max" or int(limit) >= 1 << 60 else max(int(limit) - used, 0)
