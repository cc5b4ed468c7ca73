"""The command `gshard plan`."""

from __future__ import annotations

import argparse
import json

from gshard.errors import GShardError
from gshard.forecast.config import Config, add_options, given_config
from gshard.forecast.paper import DEGREES, LEVELS, SIZES, rounded, table_1
from gshard.forecast.plan import Forecast, make_plan
from gshard.forecast.plan_report import table, text_of
from gshard.forecast.words import in_words

_EXAMPLE = """examples:
  gshard plan configs/llama-7b.toml
  gshard plan configs/llama-7b.toml --devices 64 --micro_batches 4 --arguments.layers 16
  gshard plan my_project.model:setup --devices 8 --json
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

    def work() -> int:
        given, config = given_config(parser, words)
        if given.paper:
            print(json.dumps(table_1()) if given.json else _paper())
            return 0
        if config is None:
            parser.error("name a CONFIG, or give --paper")
        found = planned(config)
        print(json.dumps(found.as_dict()) if given.json else found)
        return 0

    return in_words(work)


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
