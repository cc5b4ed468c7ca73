"""The command `gshard configs`: the configs that ship with gshard."""

from __future__ import annotations

import argparse
import tomllib

from gshard._util.errors import GShardError, did_you_mean
from gshard.analysis.config import SHIPPED
from gshard.cli.common import Answer, command_parser, parsed, respond

_EXAMPLES = """examples:
  gshard configs
  gshard configs show llama-7b > my-model.toml
  gshard plan llama-7b --target h100:32x8
"""


def main(words: list[str]) -> int:
    """Runs a command line; returns the exit code."""
    parser = command_parser(
        "gshard configs", "List or print the configs that ship with gshard.", _EXAMPLES
    )
    parser.add_argument("action", nargs="?", default="list", metavar="ACTION",
                        help="list (default), or show one of them")  # fmt: skip
    parser.add_argument("name", nargs="?", metavar="NAME", help="which one to show")
    return respond(lambda: (parsed(parser, words), None), lambda given, _: _answer(given))


def _answer(given: argparse.Namespace) -> Answer:
    if given.action not in ("list", "show") or (given.action == "list" and given.name is not None):
        name = given.name or given.action
        raise GShardError(
            f"`gshard configs` lists all configs, and `gshard configs show {name}` prints one."
        )
    if given.action == "show":
        if given.name not in SHIPPED:
            near = did_you_mean(given.name, SHIPPED)
            wrong = "name a config" if given.name is None else f"there is no config {given.name!r}"
            raise GShardError(f"{wrong}.{near} Those that ship are {', '.join(SHIPPED)}.")
        text = SHIPPED[given.name].read_text()
        return Answer({"name": given.name, **tomllib.loads(text)}, text.rstrip())
    about = {name: _first_sentence(path.read_text()) for name, path in SHIPPED.items()}
    width = max(map(len, about))
    return Answer(about, "\n".join(f"{name:{width}s}  {text}" for name, text in about.items()))


def _first_sentence(text: str) -> str:
    """What the comment at the top of a config begins with."""
    lines = [x.removeprefix("#").strip() for x in text.splitlines() if x.startswith("#")]
    return " ".join(lines).partition(". ")[0].removesuffix(".")
