"""Memory and cores that the control groups of a container allow a process."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 2**60  # what cgroup v1 says instead of "max" is near 2**63


def cgroup_limits(root: Path = Path("/")) -> tuple[float | None, float | None]:
    """Limits of this process in bytes of memory and in cores; None where there is no limit.

    The smallest limit of its control group and of all groups around that. Reads versions 1 and 2.

    Args:
      root: the root of the file system.
    """
    memory, cores = [], []
    for line in contents(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        for folder in [Path(path), *Path(path).parents]:
            inner = str(folder).lstrip("/")
            if not kinds:
                at = root / "sys/fs/cgroup" / inner
                memory.append(_number(at / "memory.max"))
                cores.append(_cores(contents(at / "cpu.max").split()))
            elif "memory" in kinds.split(","):
                at = root / "sys/fs/cgroup/memory" / inner
                memory.append(_number(at / "memory.limit_in_bytes"))
            elif "cpu" in kinds.split(","):
                at = root / "sys/fs/cgroup/cpu" / inner
                quota = contents(at / "cpu.cfs_quota_us"), contents(at / "cpu.cfs_period_us")
                cores.append(_cores([part.strip() for part in quota]))
    known = [x for x in memory if x is not None and x < _UNLIMITED], [x for x in cores if x]
    return min(known[0], default=None), min(known[1], default=None)


def _cores(quota: list[str]) -> float | None:
    """Cores from `[microseconds of CPU time, microseconds of the period]`."""
    if len(quota) != 2 or not all(part.isdigit() for part in quota) or not int(quota[1]):
        return None  # "max", -1: no limit
    return int(quota[0]) / int(quota[1])


def _number(path: Path) -> int | None:
    text = contents(path).strip()
    return int(text) if text.isdigit() else None


def contents(path: Path) -> str:
    """The text of a file, or an empty one where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
