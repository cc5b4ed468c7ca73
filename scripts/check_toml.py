"""Parse every TOML file named on the command line; exit 1 and name the ones that do not parse."""

from __future__ import annotations

import sys
import tomllib


def main(paths: list[str]) -> int:
    failed = 0
    for path in paths:
        try:
            with open(path, "rb") as file:
                tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError) as error:
            print(f"{path}: {error}")
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
