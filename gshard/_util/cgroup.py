"""What a container (control group) leaves a process: memory and cores."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 2**60  # what cgroup v1 says instead of "max" is near 2**63


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, float | None]:
    """Bytes of memory, and cores, that the control groups of this process leave it.

    The least over a group and those it lies in; None where there is no limit. Versions 1 and 2.
    """
    memory, cores = [], []
    for line in contents(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        for folder in [Path(path), *Path(path).parents]:
            inner = str(folder).lstrip("/")
            if not kinds:
                at = root / "sys/fs/cgroup" / inner
                memory.append(_number(at / "memory.max"))
                cores.append(_share(contents(at / "cpu.max").split()))
            elif "memory" in kinds.split(","):
                at = root / "sys/fs/cgroup/memory" / inner
                memory.append(_number(at / "memory.limit_in_bytes"))
            elif "cpu" in kinds.split(","):
                at = root / "sys/fs/cgroup/cpu" / inner
                parts = contents(at / "cpu.cfs_quota_us"), contents(at / "cpu.cfs_period_us")
                cores.append(_share([part.strip() for part in parts]))
    known = [x for x in memory if x is not None and x < _UNLIMITED], [x for x in cores if x]
    return min(known[0], default=None), min(known[1], default=None)


def _share(parts: list[str]) -> float | None:
    """Cores of `[microseconds, of a period]`."""
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or not int(parts[1]):
        return None  # "max", -1: no limit
    return int(parts[0]) / int(parts[1])


def _number(path: Path) -> int | None:
    text = contents(path).strip()
    return int(text) if text.isdigit() else None


def contents(path: Path) -> str:
    """Of a file, or nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
