"""One process of a program that `benchmarks.step` times over several processes (`groups`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import gshard
from benchmarks.groups import serve
from benchmarks.models import PROBLEMS
from benchmarks.processes import connect
from benchmarks.programs import by_gshard, by_gspmd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=("gshard", "gspmd", "gspmd, gathered"))
    for name in ("model", "level"):
        parser.add_argument(name)
    for name in ("devices", "examples"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        connect(args.devices)
        problem, mesh = PROBLEMS[args.model](), gshard.make_mesh()
        given = (problem, args.devices * args.examples, args.level, mesh)
        made = (
            by_gshard(*given) if args.program == "gshard" else by_gspmd(*given, "," in args.program)
        )
        return made.run, lambda: made.temporary

    serve(make)


if __name__ == "__main__":
    main()
