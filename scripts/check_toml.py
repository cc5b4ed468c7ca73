"""Parse the TOML files named, or all of the project; exit 1 and name those that do not parse."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def of_project(root: Path) -> Iterator[str]:
    """Paths of the project's TOML files; git is not asked, since it may not be there."""
    for folder, inner, names in os.walk(root):
        inner[:] = [x for x in inner if not x.startswith(".") and x not in ("build", "dist")]
        inner[:] = [x for x in inner if not os.path.exists(os.path.join(folder, x, "pyvenv.cfg"))]
        yield from (os.path.join(folder, name) for name in names if name.endswith(".toml"))


def main(paths: list[str]) -> int:
    paths = paths or list(of_project(ROOT))
    if not paths:
        print(f"there is no TOML file in {ROOT}")
    failed = 0
    for path in paths:
        try:
            with open(path, "rb") as file:
                tomllib.load(file)
        except (OSError, ValueError) as error:  # it does not parse, or is not UTF-8
            print(f"{path}: {error}")
            failed += 1
    return 1 if failed or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
