"""One process of a program that `benchmarks.step` times over several processes (`groups`)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import jax

import gshard
from benchmarks.groups import ADDRESS, rank, serve, size
from benchmarks.models import PROBLEMS
from benchmarks.programs import by_gshard, by_gspmd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=("gshard", "gspmd", "gspmd, whole"))
    for name in ("model", "level"):
        parser.add_argument(name)
    for name in ("devices", "rows"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        gshard.virtual_devices(args.devices // size())
        if size() > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(os.environ[ADDRESS], size(), rank())
        problem, mesh = PROBLEMS[args.model](), gshard.make_mesh()
        given = (problem, args.devices * args.rows, args.level, mesh)
        made = (
            by_gshard(*given) if args.program == "gshard" else by_gspmd(*given, "," in args.program)
        )
        return made.run, lambda: made.temporary

    serve(make)


if __name__ == "__main__":
    main()
