"""The command `gshard doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from rich.console import Console

from gshard.cli.common import NO, NO_ANSWER, YES, print_answer, print_text
from gshard.cli.doctor import devices
from gshard.cli.doctor.check import Check
from gshard.cli.doctor.machine import Hardware, disks, hardware, machine
from gshard.cli.doctor.network import cluster, network
from gshard.cli.doctor.versions import variables, versions

_SECONDS = 120.0
_EXAMPLE = """example:
  gshard doctor
  gshard doctor --json > machine.json
  gshard launch --nnodes 2 --rank 0 --master 10.0.0.1:29500 -m gshard doctor

Exits with 0 when nothing fails, with 1 when something does. Run it where the training will run:
on the same machine, in the same folder and environment. What it writes it removes again."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gshard doctor",
        description="Looks for what keeps a training from starting, or makes it slow or wrong.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument(
        "--quick", action="store_true", help="without the checks that start JAX (a second)"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=_SECONDS,
        metavar="SECONDS",
        help=f"for each check that starts JAX (default: {_SECONDS:g})",
    )
    given = parser.parse_args(words)
    found = []
    try:
        with ExitStack() as held:
            for check in _checks(given.quick, given.timeout, held):
                found.append(check)
                if not given.json and print_text(_lines(check)):
                    return NO_ANSWER  # nobody reads: the other checks are left out
    except KeyboardInterrupt:
        return 130
    failed = any(check.ok == "fail" for check in found)
    code = NO if failed else YES
    if not given.json:
        return code
    rows = [dataclasses.asdict(check) for check in found]
    return print_answer(json.dumps({"ok": not failed, "checks": rows}), code)


def seconds(text: str) -> float:
    """Reads a number of seconds, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _checks(quick: bool, limit: float, held: ExitStack) -> Iterator[Check]:
    """Yields all checks, in an order in which earlier ones explain later ones.

    Args:
      quick: whether to skip the checks that start JAX.
      limit: seconds for each check that starts JAX.
      held: keeps resources open until the last check.
    """
    console = Console(stderr=True)

    def run(title: str, check: Callable[[], list[Check]]) -> list[Check]:
        if not console.is_terminal:
            return _guarded(title, check)
        with console.status(f"{title} ..."):
            return _guarded(title, check)

    yield from run("versions", versions)
    here = Hardware()

    def look() -> list[Check]:
        nonlocal here
        here, checks = hardware()
        return checks

    yield from run("accelerators", look)
    yield from run("variables", lambda: variables(here.all, os.environ))
    yield from run("machine", lambda: machine(here.all))
    yield from run("disks", disks)
    yield from run("network", network)
    yield from run("job", lambda: cluster(held))
    if quick:
        return
    using = []

    def start() -> list[Check]:
        nonlocal using
        using, checks = devices.started(here, limit)
        return checks

    yield from run("starting JAX", start)
    if not using:
        yield Check("train step, processes", "warn", "not tried, since JAX does not start")
        return
    yield from run("train step", lambda: devices.numbers(using, limit))
    yield from run("two processes", lambda: devices.gloo(limit))
    yield from run("all GPUs", lambda: devices.nccl(using, limit))


def _guarded(title: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Runs a group of checks; an unexpected error in one group does not stop the others."""
    try:
        return check()
    except Exception as error:
        fix = "this is a fault of gshard doctor: report it with this line"
        return [Check(title, "fail", f"{type(error).__name__}: {error}", fix)]


def _lines(check: Check) -> str:
    """Formats a check as `[ok]   name: found`, and how to fix it."""
    first = f"{f'[{check.ok}]':6s} {check.name}: {check.found}"
    return f"{first}\n       fix: {check.fix}" if check.fix else first
