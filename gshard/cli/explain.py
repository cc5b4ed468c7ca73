"""The command `gshard explain`."""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
from jax.sharding import Mesh

from gshard._util.text import bytes_of
from gshard.analysis.explain import explain
from gshard.analysis.explain_report import Explanation
from gshard.analysis.setup import Config, initialized_setup, load_setup, sharded_setup
from gshard.cli.common import (
    YES,
    config_parser,
    free_memory,
    in_words,
    mesh_here,
    named_config,
    status,
)
from gshard.sharding.plan import Plan

_EXAMPLE = """examples:
  gshard explain my_project.toml --levels os_g
  gshard explain my_project.model:setup --devices 8 --most 50
  gshard explain my_project.toml --abstract --json

The state is made for real, one level after the other, on this computer's accelerators, or on
virtual CPU devices where there are not as many. Where it does not fit, or with --abstract, nothing
is made and nothing is measured. For a state that trains: gshard.explain(state)."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    about = "What holds the memory of a train state, why, and what would change it."
    parser = config_parser("gshard explain", about, _EXAMPLE)
    parser.add_argument("--abstract", action="store_true", help="make no arrays, measure nothing")
    parser.add_argument("--most", type=_count, default=20, metavar="N",
                        help="arrays that are listed (default: 20; --json has all)")  # fmt: skip

    def work(given: Any, config: Config) -> tuple[str, int]:
        found = explained(config, given.abstract)
        if given.json:
            return json.dumps({"levels": {
                name: x.as_dict() | {"not_measured": why} for name, (x, why) in found.items()
            }}), YES  # fmt: skip
        return "\n\n".join(
            x.text(given.most) + (f"\n  Not measured: {why}" if why else "")
            for x, why in found.values()
        ), YES  # fmt: skip

    return in_words(lambda: named_config(parser, words), work)


def _count(word: str) -> int:
    """Reads a number of arrays, for argparse."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def explained(config: Config, abstract: bool) -> dict[str, tuple[Explanation, str]]:
    """Returns, for each level, its explanation and the reason why nothing was measured."""
    mesh = mesh_here(config, "gshard explain")
    setup = load_setup(config.model, config.arguments)
    found = {}
    with status("") as say:
        for level in config.levels:
            say(f"{level}: making the state on {mesh.size} devices")
            state, plan = sharded_setup(setup, mesh, level, config.choices)
            why = "--abstract." if abstract else _does_not_fit(plan, mesh)
            if not why:
                state, plan = initialized_setup(setup, mesh, level, config.choices)
            explanation = explain(state, plan, micro_batches=config.choices.micro_batches)
            if not why and explanation.measured is None:
                why = "the setup's state is abstract."
            found[level] = (explanation, why)
            del state  # before the next one is made
    return found


def _does_not_fit(plan: Plan, mesh: Mesh) -> str:
    """Returns a readable reason why the state does not fit here; empty if it does."""
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(plan.layouts)]
    made = 2 * max(sizes)  # an init function may have one array whole, and what it is made of
    needed, free = mesh.size * (sum(plan.bytes_per_device.values()) + made), free_memory(mesh)
    if free is None or needed <= free:
        return ""
    return (
        f"to make the state takes {bytes_of(needed)} on {mesh.size} devices, and {bytes_of(free)} "
        "are free here (as with --abstract). Measure a smaller one, with --devices or "
        "--arguments.NAME."
    )
