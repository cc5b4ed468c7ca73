"""The command `gshard NAME`."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import nullcontext, suppress
from typing import NoReturn

from gshard._util.errors import did_you_mean
from gshard._util.version import __version__
from gshard.cli.output import NO_ANSWER, YES, print_in_any_encoding, tell
from gshard.cli.signals import exit_at_interrupt, interrupt_again

_INTERRUPTED = 130

COMMANDS = {
    "advise": "which level, mesh and micro-batches fit a machine, fastest first",
    "audit": "what the compiled step communicates and keeps, next to its budget",
    "configs": "list the models and sizes that ship with gshard, or print one",
    "doctor": "look for what is wrong with this machine",
    "explain": "what takes up the memory of a train state, and why",
    "launch": "run a script in several processes",
    "plan": "what every level stores and communicates, before anything runs",
    "verify": "compare checkpoints with their checksums",
}


def run() -> NoReturn:
    """Runs the command line of this process, and ends it with the exit code."""
    print_in_any_encoding()
    sys.unraisablehook = interrupt_again
    try:
        code = main()
    except KeyboardInterrupt:  # while a command imports more
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        # A compilation that was interrupted goes on in threads of XLA, and what Python frees at its
        # end is still used there.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def main(words: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    if name in COMMANDS:  # imported here, since JAX takes a second
        folder = "distributed.launch.cli" if name == "launch" else f"cli.{name}"
        with exit_at_interrupt(_INTERRUPTED) if words is None else nullcontext():
            command = importlib.import_module(f"gshard.{folder}")
        return command.main(rest)
    if name == "help":
        return main([*rest[:1], "--help"])
    names = "\n".join(f"  gshard {name:8s} {meaning}" for name, meaning in COMMANDS.items())
    if name in ("-h", "--help"):
        print(f"gshard: ZeRO data parallelism for JAX and Flax\n\n{names}\n\n"
              "`gshard NAME --help` says more. `gshard --version` prints the version.")  # fmt: skip
        return YES
    if name in ("-V", "--version"):
        print(f"gshard {__version__}")
        return YES
    known = ("--help", "--version") if name.startswith("-") else COMMANDS
    tell(f"error: gshard has no command {name!r}.{did_you_mean(name, known)}\n{names}")
    return NO_ANSWER
