"""The command `gshard audit`."""

from __future__ import annotations

import json
import sys
from typing import Any

from gshard.analysis.audit import Audit, audit
from gshard.analysis.setup import Config, batch_of, load_setup, sharded_setup, step_of
from gshard.cli.common import NO, YES, config_parser, in_words, mesh_here, named_config, status

_EXAMPLE = """examples:
  gshard audit my_project.toml
  gshard audit my_project.model:setup --devices 8 --levels os_g --micro_batches 4
  gshard audit my_project.toml --json

The step is compiled for this computer's accelerators, or for virtual CPU devices where there are
not as many, and not run. Exits with 1 when a budget is exceeded, and says which; with 2 when
it cannot be looked at."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    about = "What a compiled step communicates and keeps, next to its budget."
    parser = config_parser("gshard audit", about, _EXAMPLE)

    def work(given: Any, config: Config) -> tuple[str, int]:
        found = audited(config)
        broken = [f"level {name}: {what}" for name, x in found.items() for what in x.exceeded]
        for line in broken:
            print(f"over budget: {line}", file=sys.stderr)
        said = "\n\n".join(f"level {name}\n\n{x}" for name, x in found.items())
        if given.json:
            said = json.dumps({"levels": {
                name: x.as_dict() | {"exceeded": list(x.exceeded)} for name, x in found.items()
            }})  # fmt: skip
        return said, NO if broken else YES

    return in_words(lambda: named_config(parser, words), work)


def audited(config: Config) -> dict[str, Audit]:
    """Returns the audits of a config's levels, by name of the level."""
    mesh = mesh_here(config, "gshard audit")
    setup = load_setup(config.model, config.arguments)
    found = {}
    with status("") as say:
        for level in config.levels:
            say(f"{level}: compiling for {mesh.size} {mesh.devices.flat[0].device_kind} devices")
            state, plan = sharded_setup(setup, mesh, level, config.choices)
            step = step_of(setup, plan, config.choices)
            batch = batch_of(setup, plan, config.choices)
            found[level] = audit(step, *step.arguments(state, batch))
    return found
