"""The command `gshard advise`."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gshard.analysis.html.page import open_page, page
from gshard.analysis.setup import Config
from gshard.analysis.tune import Verdict, advice_rows, advice_text, advise, best_of_each
from gshard.cli.common import (
    NO,
    YES,
    config_parser,
    forecast_with_progress,
    in_words,
    leave_accelerators,
    named_config,
)

_EXAMPLE = """examples:
  gshard advise configs/llama-7b.toml --target h100:32x8
  gshard advise configs/llama-7b.toml --target a100:4x8 --micro_batch_size 8 --all
  gshard advise my_project.model:setup --target tpu-v5e:4x4 --json

Looks at every level, copies of the divided state, micro-batches for the same rows in a step,
offloading where nothing else fits, and what [vary] of CONFIG lists, such as remat =
["none", "full"]. Memory is that of the traced step; time is a model, not a measurement, and good
for an order. Exits with 1 when nothing fits, and with 2 when that cannot be said."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    about = "Which level, mesh and micro-batches fit a machine, the fastest first."
    parser = config_parser("gshard advise", about, _EXAMPLE)
    parser.add_argument("--all", action="store_true", help="every copy and micro-batch of each")
    parser.add_argument("--html", metavar="FILE", help="write a page that needs no network")

    def work(given: Any, config: Config) -> tuple[str, int]:
        with open_page(given.html) as file:
            found = _with_progress(config)
            if file is not None:
                rows = advice_rows(found if given.all else best_of_each(found))
                forecast = forecast_with_progress(config)
                file.write(page(forecast, config.model, advice=rows).encode())
                file.commit()
                print(f"wrote {given.html}", file=sys.stderr)
        said = json.dumps(_as_dict(config, found)) if given.json else None
        fits = any(x.fits for x in found)
        return said or advice_text(config, found, given.all), YES if fits else NO

    leave_accelerators()
    return in_words(lambda: named_config(parser, words), work)


def _as_dict(config: Config, found: list[Verdict]) -> dict[str, Any]:
    target = None if config.target is None else config.target.text
    return {"target": target, "options": [x.as_dict() for x in found]}


def _with_progress(config: Config) -> list[Verdict]:
    console = Console(stderr=True)
    columns = (
        TextColumn("tracing"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)
        return advise(config, lambda done, of: bar.update(task, completed=done, total=of))
