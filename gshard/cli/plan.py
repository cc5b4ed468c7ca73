"""The command `gshard plan`."""

from __future__ import annotations

import argparse
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from gshard._util.errors import GShardError, some
from gshard._util.text import text_of, text_table
from gshard.analysis.aot.compiled import check_json, compile_for, compiled_report
from gshard.analysis.aot.target import Target
from gshard.analysis.config import Config
from gshard.analysis.forecast import forecast
from gshard.analysis.forecast_report import Forecast
from gshard.analysis.html.page import page
from gshard.analysis.setup import TrainSetup
from gshard.cli import common
from gshard.cli.output import NO, NO_ANSWER, YES, tell

_EXAMPLES = """examples:
  gshard plan llama-7b
  gshard plan llama-7b --devices 64 --micro_batches 4 --arguments.layers 16
  gshard plan my_project.model:setup --devices 8 --json
  gshard plan llama-7b --devices 64 --html plan.html
  gshard plan llama-7b --target h100:32x8 --levels p_g_os
  gshard plan --paper

GB are 1e9 bytes. Nothing is initialized, and no device is needed. Peaks are estimates, +-20 %: a
level fits if 1.2 times its estimate does. With --target, the real step is compiled here if the
compiler for that machine is installed. That is exact and takes 2 to 50 s a level; results are kept
in ~/.cache/gshard. With a target, exits with 1 when no level fits, and with 2 when that is not
known."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    about = "What every level stores on one device, and communicates, before anything runs."
    parser = common.config_parser("gshard plan", about, _EXAMPLES)
    paper = "print Table 1 of the ZeRO paper"
    parser.add_argument("--paper", action="store_true", help=paper)
    parser.add_argument("--shapes", action="store_true",
                        help="work from shapes alone: do not trace the step, and leave "
                        "activations out")  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--compile", action="store_true",
                     help="compile for the target, or exit with 2")  # fmt: skip
    how.add_argument("--estimate", action="store_true", help="the quick answer: compile nothing")
    parser.add_argument("--html", metavar="FILE",
                        help="also write the report as one self-contained HTML page")  # fmt: skip
    defaults = vars(parser.parse_args([]))

    def read() -> tuple[argparse.Namespace, Config | None]:
        given, config = common.given_config(parser, words)
        if not given.paper and config is None:
            parser.error("name a CONFIG, or give --paper")
        alone = defaults | {"paper": True, "json": given.json}
        others = [x for x, value in vars(given).items() if value != alone.get(x)]
        if given.paper and others:
            named = ("CONFIG" if x == "config" else f"--{x}" for x in others)
            parser.error(f"--paper can be combined only with --json, not with {some(named)}")
        return given, config

    jax.config.update("jax_platforms", "cpu")  # another job may be using the accelerators
    return common.respond(read, _plan)


def _plan(given: argparse.Namespace, config: Config | None) -> common.Answer:
    if config is None:
        table = table_1()
        return common.Answer(table, _paper(table))
    target = _compiled_target(given, config)
    with common.open_page(given.html) as file:
        found = common.forecast_with_progress(config, activations=not given.shapes)
        programs = {} if target is None else _compiled(config, target)
        if file is not None:
            file.write(page(found, config.model, programs).encode())
            file.commit()
            tell(f"wrote {given.html}")
    report = "" if target is None else "\n\n" + compiled_report(target.text, found, programs)
    data = found.as_dict() | {"compiled": programs}
    return common.Answer(data, f"{found}{report}", exit_code(found, programs, given.compile))


def exit_code(found: Forecast, programs: dict[str, dict[str, Any]], insists: bool = False) -> int:
    """Returns the exit code: whether a level fits, as compiled, or else by its estimate.

    With `insists`, no estimate stands in for a level that was not compiled.
    """
    compiled = {name: x["fits"] for name, x in programs.items() if "error" not in x}
    if insists and not compiled:
        return NO_ANSWER
    estimated = {name: None if insists else found.fits(name) for name in found.levels}
    fits = (estimated | {name: x for name, x in compiled.items() if x is not None}).values()
    if any(fits):
        return YES
    if None not in fits:
        return NO
    # Without a limit there is nothing to fit; with one, sizes without activations are no answer.
    return YES if found.usable is None and False not in fits else NO_ANSWER


def _compiled_target(given: argparse.Namespace, config: Config) -> Target | None:
    """Returns the target to compile for, after all checks that need no work, or None."""
    if given.estimate or not (given.compile or "target" in given):
        return None
    if config.target is None:
        raise GShardError("compile for which machine? Give --target, such as h100:1x8.")
    check_json(config.arguments)
    try:
        config.target.check_compiler()
    except GShardError as error:
        if given.compile:
            raise
        tell(f"note: an estimate only, since {error}")
        return None
    return config.target


def _compiled(config: Config, target: Target) -> dict[str, dict[str, Any]]:
    """Returns the compiler's report for each level; `{"error": ...}` if there is none."""
    found: dict[str, dict[str, Any]] = {}
    say, is_terminal = common.lines_of_progress(), Console(stderr=True).is_terminal

    def report(stage: str, seconds: float) -> None:
        done = f"{len(found) + 1} of {len(config.levels)}"
        say(f"{config.levels[len(found)]} ({done}): {stage}, {seconds:.0f} s")

    for level in config.levels:
        request = {
            "model": config.model,
            "arguments": dict(config.arguments),
            "target": target.text,
            "level": level,
            "replica": config.replica,
            "sequence": config.sequence,
            "expert": config.expert,
            **vars(config.choices),
        }
        try:
            found[level] = compile_for(request, report=None if is_terminal else report)
        except GShardError as error:
            found[level] = {"error": str(error)}
    return found


# ---- the table of the paper ----------------------------------------------------------------------

SIZES = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
DEGREES = (1, 4, 16, 64, 256, 1024)
LEVELS = ("os", "os_g", "p_g_os")


def _paper(found: dict[str, dict[int, dict[str, int]]]) -> str:
    columns = [f"{size} {level}" for size in SIZES for level in LEVELS]
    rows = [
        [str(n), *(rounded(found[size][n][level]) for size in SIZES for level in LEVELS)]
        for n in DEGREES
    ]
    title = "GB of model states on one device (ZeRO, Table 1)"
    return text_of([text_table(title, ("DP",), columns, rows)])


def table_1() -> dict[str, dict[int, dict[str, int]]]:
    """Returns the bytes of model states on one device, by model size, degree and level."""
    return {name: {n: _bytes(elements, n) for n in DEGREES} for name, elements in SIZES.items()}


def _bytes(elements: int, devices: int) -> dict[str, int]:
    params = {"parameters": jax.ShapeDtypeStruct((elements,), jnp.float32)}
    setup = TrainSetup((params, optax.adam(1e-3)), shard={"precision": "bfloat16"})
    # Two micro-batches: the paper counts the gradient that is kept between them.
    found = forecast(setup, devices, levels=LEVELS, micro_batches=2)
    return {name: of.params + of.gradients + of.optimizer for name, of in found.levels.items()}


def rounded(count: int) -> str:
    """Formats bytes in GB as the paper does: 7.5, 31.4, 0.12; from 100 on without a fraction."""
    amount = Decimal(count) / 10**9
    if amount >= 100:
        return str(amount.quantize(Decimal(1), ROUND_DOWN))
    digits = Decimal("0.1") if amount >= 10 else Decimal("0.01")
    text = str(amount.quantize(digits, ROUND_HALF_UP))
    return text.rstrip("0").rstrip(".")
