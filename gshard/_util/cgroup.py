"""The memory that the control groups of a container allow a process."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 2**60  # what cgroup v1 says instead of "max" is near 2**63


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process may use; None where there is no limit.

    The smallest limit of its control group and of all groups around that. Reads versions 1 and 2;
    `root` is the root of the file system.
    """
    found = []
    for line in contents(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        groups = root / ("sys/fs/cgroup/memory" if kinds else "sys/fs/cgroup")
        for folder in [Path(path), *Path(path).parents]:
            file = "memory.limit_in_bytes" if kinds else "memory.max"
            text = contents(groups / str(folder).lstrip("/") / file).strip()
            if text.isdigit():
                found.append(int(text))
    return min((x for x in found if x < _UNLIMITED), default=None)


def contents(path: Path) -> str:
    """The text of a file, or an empty one where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
