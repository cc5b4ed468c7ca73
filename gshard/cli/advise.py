"""The command `gshard advise`."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence

import jax
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from gshard.analysis.calibration import read_calibration
from gshard.analysis.config import Config
from gshard.analysis.expert_axes import expert_axes
from gshard.analysis.html.page import page
from gshard.analysis.tune import Verdict, advise, best_of_each, bits_to_save
from gshard.analysis.tune_report import advice_rows, advice_text, base_of
from gshard.cli import common
from gshard.cli.output import NO, YES, tell
from gshard.sharding.level import LEVELS

_EXAMPLES = """examples:
  gshard advise llama-7b --target h100:32x8
  gshard advise llama-7b --target a100:4x8 --micro_batch_size 8 --all
  gshard advise my_project.model:setup --target tpu-v5e:4x4 --json
  gshard advise gpt2-124m --target h100:1x8 --calibration gpu-check/report.json

Tries the levels of CONFIG (by default all four), replicas of the sharded state, micro-batches for
the same examples in a step, gathered parameters that are kept for the backward pass, offload for
options that do not fit without it, and what [vary] of CONFIG lists, such as remat = ["none",
"full"]. Memory is estimated from the traced step, +-20 %. Times come from a model, and are
relative to the first option; with --calibration, which takes the rates that `make gpu-check`
measured, they are absolute. Options within 5 % are ties, and the simpler comes first. Exits with 1
when nothing fits, and with 2 when that is not known."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    about = "Which level, mesh and micro-batches fit a machine, the fastest first."
    parser = common.config_parser("gshard advise", about, _EXAMPLES)
    parser.add_argument("--all", action="store_true",
                        help="list all meshes and numbers of micro-batches, not only the "
                        "best ones")  # fmt: skip
    parser.add_argument("--calibration", metavar="FILE",
                        help="report.json of `make gpu-check` on the target")  # fmt: skip
    parser.add_argument("--html", metavar="FILE",
                        help="also write the report as one self-contained HTML page")  # fmt: skip
    jax.config.update("jax_platforms", "cpu")  # another job may be using the accelerators
    return common.respond(lambda: common.named_config(parser, words), _advise)


def _as_advised(config: Config, found: Sequence[Verdict]) -> Config:
    """The config as the first option trains it, without levels that this makes impossible."""
    first, reshard = found[0].option, config.choices.reshard_after_forward
    replica = first.replica if LEVELS[first.level].shards_opt_state else config.replica
    possible = {
        x.option.level
        for x in found
        if x.option.arguments == first.arguments
        and (x.option.replica == replica or not LEVELS[x.option.level].shards_opt_state)
    }
    return dataclasses.replace(
        config,
        replica=replica,
        choices=dataclasses.replace(first.choices, reshard_after_forward=reshard),
        arguments={**config.arguments, **first.arguments},
        levels=tuple(name for name in config.levels if name in possible),
    )


def _advise(given: Namespace, config: Config) -> common.Answer:
    measured = None
    if given.calibration is not None and config.target is not None:
        measured = read_calibration(given.calibration, config.target)
    with common.open_page(given.html) as file:
        with common.progress_bar(
            TextColumn("tracing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"),
        ) as bar:  # fmt: skip
            task = bar.add_task("importing the model", total=None)
            say = common.lines_of_progress()

            def show(done: int, of: int, best: str) -> None:
                say(f"{done} of {of} options{best and '; '}{best}")
                bar.update(task, completed=done, total=of, description=best if done else None)

            found = advise(config, show, measured)
        if file is not None:
            rows = advice_rows(found if given.all else best_of_each(found), measured)
            forecast = common.forecast_with_progress(_as_advised(config, found))
            file.write(page(forecast, config.model, advice=rows).encode())
            file.commit()
            tell(f"wrote {given.html}")
    target = None if config.target is None else config.target.text
    bits, axes = bits_to_save(config, found), expert_axes(config, found, measured)
    base = base_of(found, axes) if measured is None else 1.0
    unit = "step of the first option" if measured is None else "second"
    data = {
        "target": target,
        "unit": unit,
        "options": [x.as_dict(base) for x in found],
        "fewer_bits": [x.as_dict() for x in bits],
        "expert_axes": [x.as_dict(base) for x in axes],
    }
    code = YES if any(x.fits for x in found) else NO
    return common.Answer(data, advice_text(config, found, given.all, measured, bits, axes), code)
