"""The command `gshard explain`."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import jax
from jax.sharding import Mesh

from gshard._util.cgroup import contents, memory_limit
from gshard._util.errors import GShardError, some
from gshard._util.text import bytes_of
from gshard._util.validation import check_integer
from gshard.analysis.config import Config
from gshard.analysis.explain import explain
from gshard.analysis.setup import initialized_setup, sharded_setup
from gshard.cli.common import Answer, config_parser, levels_here, named_config, respond, value_of
from gshard.sharding.plan import Plan

_EXAMPLES = """examples:
  gshard explain my_project.toml --levels os_g
  gshard explain my_project.model:setup --devices 8 --most 50
  gshard explain my_project.toml --abstract --json

The state is made for real, one level after the other, on this computer's accelerators, or on
virtual CPU devices if there are too few. Where it does not fit, or with --abstract, nothing is made
and nothing is measured. For a state that trains: gshard.explain(state)."""

_OF_THE_STEP = ("accumulate", "reshard_after_forward", "micro_batch_size")


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    about = "What takes up the memory of a train state, why, and what would change it."
    parser = config_parser("gshard explain", about, _EXAMPLES, hidden=_OF_THE_STEP)
    parser.add_argument("--abstract", action="store_true", help="make no arrays, measure nothing")
    parser.add_argument("--most", default="20", metavar="N",
                        help="arrays that are listed (default: 20; --json has all)")  # fmt: skip
    return respond(lambda: named_config(parser, words), _explain)


def _explain(given: Namespace, config: Config) -> Answer:
    most = check_integer("--most", value_of(given.most), 1)
    unused = [f"--{x}" for x in _OF_THE_STEP if x in given]
    if unused:
        raise GShardError(
            f"gshard explain does not use {some(unused)}: it reports on the state, for every way "
            "to accumulate gradients. Leave out these options, or use gshard plan."
        )
    data, texts = {}, []
    for level, setup, mesh in levels_here(config, "explain", "making the state on"):
        state, plan = sharded_setup(setup, mesh, level, config.choices)
        why = "--abstract." if given.abstract else _does_not_fit(plan, mesh)
        if not why:
            state, plan = initialized_setup(setup, mesh, level, config.choices)
        found = explain(state, plan, micro_batches=config.choices.micro_batches)
        if not why and found.measured is None:
            why = "the setup's state is abstract."
        data[level] = found.as_dict() | {"not_measured": why}
        texts.append(found.text(most) + (f"\n  Not measured: {why}" if why else ""))
        del state  # before the next one is made
    return Answer({"levels": data}, "\n\n".join(texts))


def _does_not_fit(plan: Plan, mesh: Mesh) -> str:
    """Returns a readable reason why the state does not fit here; empty if it does."""
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(plan.layouts)]
    full = 2 * max(sizes)  # an init function may have one full array, and what it is made of
    needed, free = mesh.size * (sum(plan.bytes_per_device.values()) + full), _free_memory(mesh)
    if free is None or needed <= free:
        return ""
    return (
        f"the state needs {bytes_of(needed)} on {mesh.size} devices while it is made, and "
        f"{bytes_of(free)} are free here (as with --abstract). Measure a smaller one, with "
        "--devices or --arguments.NAME."
    )


def _free_memory(mesh: Mesh) -> float | None:
    """Returns the free bytes of all devices together, or of this computer; None if unknown."""
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":  # virtual devices share the computer's memory
        free = re.findall(r"^MemAvailable: +(\d+) kB", contents(Path("/proc/meminfo")), re.M)
        known = [*(1024 * int(x) for x in free), *filter(None, [memory_limit()])]
        return min(known, default=None)
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in x for x in stats):
        return None
    return len(stats) * min(x["bytes_limit"] - x.get("bytes_in_use", 0) for x in stats)
