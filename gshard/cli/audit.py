"""The command `gshard audit`."""

from __future__ import annotations

from argparse import Namespace

from gshard.analysis.audit import audit
from gshard.analysis.config import Config
from gshard.analysis.setup import batch_of, sharded_setup, step_of
from gshard.cli import common
from gshard.cli.output import NO, YES, tell

_EXAMPLES = """examples:
  gshard audit my_project.toml
  gshard audit my_project.model:setup --devices 8 --levels os_g --micro_batches 4
  gshard audit my_project.toml --json

The step is compiled for this computer's accelerators, or for virtual CPU devices if there are too
few, and not run. Exits with 1 when a budget is exceeded, and says which; with 2 when the step
cannot be compiled."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    about = "What a compiled step communicates and keeps, next to its budget."
    parser = common.config_parser("gshard audit", about, _EXAMPLES)
    return common.respond(lambda: common.named_config(parser, words), _audit)


def _audit(given: Namespace, config: Config) -> common.Answer:
    found, where = {}, ""
    for level, setup, mesh in common.levels_here(config, "audit", "compiling for"):
        state, plan = sharded_setup(setup, mesh, level, config.choices)
        step = step_of(setup, plan, config.choices)
        batch = batch_of(setup, plan, config.choices)
        found[level] = audit(step, *step.arguments(state, batch))
        where = f"{mesh.size} {mesh.devices.flat[0].device_kind} devices of this computer"
    exceeded = [f"level {name}: {what}" for name, x in found.items() for what in x.exceeded]
    for line in exceeded:
        tell(f"over budget: {line}")
    data = {name: x.as_dict() | {"exceeded": list(x.exceeded)} for name, x in found.items()}
    title = f"compiled for {where}"
    if config.target is not None:
        title += f", not for {config.target.text}, for which gshard plan --target compiles"
    text = "\n\n".join(f"level {name}, {title}\n\n{x}" for name, x in found.items())
    answer = {"compiled_for": where, "levels": data}
    return common.Answer(answer, text, NO if exceeded else YES)
