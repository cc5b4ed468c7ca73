"""CONFIG and its keys as words of a command line."""

from __future__ import annotations

import argparse
import tomllib
from typing import Any

from gshard._util.errors import did_you_mean
from gshard.analysis.config import Config, read_config

_MEANINGS = {
    "levels": "levels to look at, such as os,os_g (default: all four)",
    "devices": "number of devices",
    "target": "the machine, such as h100:32x8, tpu-v5e:16x16 or cpu:8",
    "replica": "copies of the divided state (hybrid sharding)",
    "micro_batch_size": "rows that one device takes at a time",
    "micro_batches": "how many times in one step (k)",
    "accumulate": "how gradients accumulate: level, local, scatter or sync",
    "reshard_after_forward": "true, false, or how many neighbours keep a layer between them",
    "offload": "true: the optimizer state rests in the host's memory",
}


def config_parser(name: str, about: str, examples: str) -> argparse.ArgumentParser:
    """The parser of a command that is asked about a config; `given_config` reads its words.

    Args:
      name: `gshard plan`.
      about: what it does, a sentence.
      examples: what its help ends with.

    Returns:
      One that takes CONFIG, an option for every key, and `--json`.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?",
                        help="a TOML file, or module:function")  # fmt: skip
    group = parser.add_argument_group("over what CONFIG says")
    for key, meaning in _MEANINGS.items():
        group.add_argument(f"--{key}", help=meaning, metavar="X", default=argparse.SUPPRESS)
    group.add_argument(
        "--arguments.NAME", metavar="X", dest="_", default=argparse.SUPPRESS,
        help="an argument of the model's function, such as --arguments.layers 4",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser


def given_config(parser: argparse.ArgumentParser, words: list[str]) -> tuple[Any, Config | None]:
    """The parsed words and the config that they ask about; None when none is named.

    Raises:
      GShardError: as `read_config`.
    """
    words, of_model = _apart(parser, words)
    given, rest = parser.parse_known_args(words)
    if rest and not rest[0].startswith("-"):
        parser.error(
            f"{rest[0]!r} is one word too many. There is one CONFIG, and several values of an "
            "option are joined by commas, such as --levels os,os_g."
        )
    if rest:
        known = [f"--{key}" for key in _MEANINGS] + ["--json", "--html", "--help"]
        parser.error(f"unknown option {rest[0]!r}.{did_you_mean(rest[0], known)}")
    options = {key: _value(word) for key, word in vars(given).items() if key in _MEANINGS}
    if given.config is None and not of_model:
        return given, None
    if given.config is None:
        parser.error(f"--{next(iter(of_model))} goes with a CONFIG")
    return given, read_config(given.config, options | of_model)


def named_config(parser: argparse.ArgumentParser, words: list[str]) -> tuple[Any, Config]:
    """The same where a CONFIG must be named.

    Raises:
      GShardError: as `read_config`.
    """
    given, config = given_config(parser, words)
    if config is None:
        parser.error("name a CONFIG")
    return given, config


def _apart(parser: argparse.ArgumentParser, words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The words that argparse knows, and the values of `--arguments.NAME`, wherever they stand."""
    others, found, left = [], {}, list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--arguments."):
            others.append(word)
        elif equals or left:
            found[name.removeprefix("--")] = _value(value if equals else left.pop(0))
        else:
            parser.error(f"{name} needs a value")
    return others, found


def _value(word: str) -> Any:
    """A word as TOML reads a value, or Python a bool; what is none, such as `os_g`, as a text."""
    if word in ("True", "False"):
        return word == "True"
    try:
        return tomllib.loads(f"x = {word}")["x"]
    except tomllib.TOMLDecodeError:
        return word
