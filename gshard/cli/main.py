"""The command `gshard NAME`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gshard._util.errors import did_you_mean
from gshard.cli.advise import main as advise
from gshard.cli.audit import main as audit
from gshard.cli.common import NO_ANSWER, YES
from gshard.cli.doctor import main as doctor
from gshard.cli.explain import main as explain
from gshard.cli.plan import main as plan
from gshard.cli.verify import main as verify
from gshard.distributed.launch.cli import main as launch

COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "advise": (advise, "which level, mesh and micro-batches fit a machine, fastest first"),
    "audit": (audit, "what the compiled step communicates and keeps, next to its budget"),
    "doctor": (doctor, "look for what is wrong with this machine"),
    "explain": (explain, "what holds the memory of a train state, and why"),
    "launch": (launch, "run a script in several processes"),
    "plan": (plan, "what every level stores and communicates, before anything runs"),
    "verify": (verify, "compare checkpoints with their checksums"),
}


def main(words: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    if name in COMMANDS:
        return COMMANDS[name][0](rest)
    names = "\n".join(f"  gshard {name:8s} {meaning}" for name, (_, meaning) in COMMANDS.items())
    if name in ("-h", "--help"):
        print(f"gshard: ZeRO data parallelism for JAX and Flax\n\n{names}\n\n"
              "`gshard NAME --help` says more.")  # fmt: skip
        return YES
    print(f"error: gshard has no command {name!r}.{did_you_mean(name, COMMANDS)}\n{names}",
          file=sys.stderr)  # fmt: skip
    return NO_ANSWER
