"""The command `gshard plan`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from gshard.errors import GShardError
from gshard.exported.new_file import NewFile, file_path
from gshard.forecast.config import Config, add_options, given_config
from gshard.forecast.page import page
from gshard.forecast.paper import DEGREES, LEVELS, SIZES, rounded, table_1
from gshard.forecast.plan import Forecast, make_plan
from gshard.forecast.plan_report import table, text_of

_EXAMPLE = """examples:
  gshard plan configs/llama-7b.toml
  gshard plan configs/llama-7b.toml --devices 64 --micro_batches 4 --arguments.layers 16
  gshard plan my_project.model:setup --devices 8 --json
  gshard plan configs/llama-7b.toml --html plan.html
  gshard plan --paper

GB are 1e9 bytes. Nothing is initialised, and no device is needed."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gshard plan",
        description="What every level takes on one device, and sends, before anything runs.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument("--paper", action="store_true", help="Table 1 of the ZeRO paper")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument("--html", metavar="FILE", help="a page for a browser, too")
    try:
        given, config = given_config(parser, words)
        if given.paper and given.html is not None:
            parser.error("--html goes with a CONFIG, not with --paper")
        if given.paper:
            print(json.dumps(table_1()) if given.json else _paper())
            return 0
        if config is None:
            parser.error("name a CONFIG, or give --paper")
        with contextlib.ExitStack() as on_exit:
            # Opened first: a place that cannot be written to is refused before the work.
            path = None if given.html is None else file_path(given.html, "--html")
            file = path and on_exit.enter_context(NewFile(path, "--html"))
            found = planned(config)
            if file:
                file.write(page(found, model=config.model).encode())
                file.commit()
                print(f"wrote {path}", file=sys.stderr)
    except GShardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found.as_dict()) if given.json else found)
    return 0


def planned(config: Config) -> Forecast:
    """The forecast for a config."""
    if config.devices is None:
        raise GShardError("how many devices? Give --devices N, or --target, or either in CONFIG.")
    return make_plan(
        config.model,
        config.devices,
        levels=config.levels,
        arguments=config.arguments,
        replica=config.replica,
        **vars(config.choices),
    )


def _paper() -> str:
    found = table_1()
    columns = [f"{size} {level}" for size in SIZES for level in LEVELS]
    rows = table("GB of model states on one device (ZeRO, Table 1)", ("DP",), columns)
    for n in DEGREES:
        rows.add_row(str(n), *(rounded(found[s][n][level]) for s in SIZES for level in LEVELS))
    return text_of([rows])
