"""The command `gshard doctor`: finds what is wrong with this machine before anything is trained."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from argparse import Namespace
from collections.abc import Callable

from gshard.cli import common
from gshard.cli.doctor import devices
from gshard.cli.doctor.machine import Check, cluster, disks, hardware, own_name
from gshard.cli.doctor.versions import check_versions, variables
from gshard.cli.output import NO, NO_ANSWER, YES, print_text

_EXAMPLES = """example:
  gshard doctor
  gshard doctor --json > machine.json
  gshard launch --nnodes 2 --rank 0 --master 10.0.0.1:29500 -m gshard doctor

Exits with 0 when nothing fails, with 1 when something does. Run it where the training will run:
on the same machine, in the same folder and environment. It removes the files that it writes."""

_NOT_TRIED = [Check("train step, processes", "warn", "not tried, since JAX does not start")]


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    about = "Looks for what keeps training from starting, or makes it slow or wrong."
    parser = common.command_parser("gshard doctor", about, _EXAMPLES)
    quick = "skip the checks that start JAX; takes about two seconds"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS",
                        help="limit for each check that starts JAX, and for the wait for a job's "
                        "other processes (default: 120)")  # fmt: skip
    given = common.parsed(parser, words)
    if not 0 < given.timeout < float("inf"):
        parser.error("--timeout must be a positive number of seconds")
    return common.guarded(lambda: _run(given))


def _run(given: Namespace) -> int:
    found: list[Check] = []
    for title, check in _groups(given.quick, given.timeout).items():
        checks = _tried(title, check)
        found += checks
        if checks and not given.json and print_text("\n".join(map(_line, checks)), YES, NO_ANSWER):
            return NO_ANSWER  # nobody reads: the other checks are left out
    failed = any(check.ok == "fail" for check in found)
    code = NO if failed else YES
    if not given.json:
        return code
    rows = [dataclasses.asdict(check) for check in found]
    return print_text(json.dumps({"ok": not failed, "checks": rows}), code)


def _groups(quick: bool, seconds: float) -> dict[str, Callable[[], list[Check]]]:
    """Returns groups of checks by title; earlier groups explain what later ones find.

    The last one waits for other machines.
    """
    here = functools.cache(hardware)
    started = functools.cache(lambda: devices.started(here()[0], seconds))
    groups = {
        "versions": check_versions,
        "accelerators": lambda: here()[1],
        "variables": lambda: variables(here()[0].all, os.environ),
        "disks": lambda: disks(here()[0].all),
        "own name": own_name,
    }
    with_jax = {
        "starting JAX": lambda: started()[1],
        "train step": lambda: devices.train_step(seconds) if started()[0] else _NOT_TRIED,
        "two processes": lambda: devices.two_processes(seconds) if started()[0] else [],
    }
    return (groups if quick else groups | with_jax) | {"job": lambda: cluster(seconds)}


def _tried(title: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Runs a group of checks; an unexpected error in one group does not stop the others."""
    try:
        with common.status(f"{title} ..."):
            return check()
    except Exception as error:
        fix = "this is a bug in gshard doctor: report it with this line"
        return [Check(title, "fail", f"{type(error).__name__}: {error}", fix)]


def _line(check: Check) -> str:
    """Formats a check as `[ok]   name: found`, and how to fix it."""
    first = f"{f'[{check.ok}]':6s} {check.name}: {check.found}"
    return f"{first}\n       fix: {check.fix}" if check.fix else first
