"""What all commands share: exit codes, output, signals, configs, and the mesh of this computer."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
import threading
import time
import tomllib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress, ProgressColumn

from gshard._util.durable import NewFile, file_path
from gshard._util.errors import GShardError, GShardWarning, similar_option
from gshard._util.validation import with_known_spelling
from gshard.analysis.config import Config, read_config
from gshard.analysis.forecast import forecast_config
from gshard.analysis.forecast_report import Forecast
from gshard.analysis.setup import TrainSetup, load_setup
from gshard.cli.output import NO_ANSWER, YES, print_text, tell
from gshard.cli.signals import send_again
from gshard.sharding.mesh import make_mesh, virtual_devices

Asked = TypeVar("Asked", Config, Config | None, None)


class Answer(NamedTuple):
    """What a command found: as JSON, as text, and its exit code."""

    data: Mapping[str, Any]
    text: str
    code: int = YES


def respond(
    read: Callable[[], tuple[argparse.Namespace, Asked]],
    work: Callable[[argparse.Namespace, Asked], Answer],
) -> int:
    """Runs a command and prints its answer; returns the exit code (see `guarded`).

    Args:
      read: returns the parsed words, and a config if the command has one. It may exit, as argparse
        does.
      work: takes both. What is printed meanwhile, such as by the model, goes to stderr.
    """

    def run() -> int:
        given, asked = read()
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found = work(given, asked)
            except _Stopped:
                raise
            except SystemExit as ended:
                raise GShardError(
                    f"the model ends the program: SystemExit({ended.code!r}). Raise an error that "
                    "says why."
                ) from ended
        return print_text(json.dumps(found.data) if given.json else found.text, found.code)

    return guarded(run)


def guarded(run: Callable[[], int]) -> int:
    """Returns the exit code of `run`; errors and gshard's warnings become lines on stderr.

    Ctrl-C gives 130, and a signal that ends a program 128 plus its number. What `run` has opened is
    closed in every case.
    """
    with _stopped_by_signals(), _warnings_as_lines():
        try:
            return run()
        except GShardError as error:
            tell(f"error: {error}")
            return NO_ANSWER
        except Exception as error:  # of the model's own, and where: Python would exit as for a no
            sys.excepthook(type(error), error, error.__traceback__)
            return NO_ANSWER
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except _Stopped as stopped:
            return int(str(stopped))


class _Stopped(SystemExit):
    """Raised when a signal asks this program to end; its code is the one that a shell reports."""


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turns signals that end the program into an exception, so that everything is cleaned up.

    This leaves out signals that are handled or ignored already (`nohup`), and does nothing outside
    the main thread. Python drops an exception that is raised in a finalizer, such as those of JAX's
    caches, or in `sys.unraisablehook`, which reports it: then the signal is sent again.
    """
    hooks = 0  # that run in the main thread: one may run within another

    def stop(number: int, frame: FrameType | None) -> None:
        if not hooks:
            raise _Stopped(128 + number)
        send_again(number)

    def dropped(problem: sys.UnraisableHookArgs) -> None:
        nonlocal hooks
        here = threading.current_thread() is threading.main_thread()
        hooks += here
        try:
            if isinstance(problem.exc_value, _Stopped):
                send_again(int(str(problem.exc_value)) - 128)
            else:
                before(problem)
        finally:
            hooks -= here

    main = threading.current_thread() is threading.main_thread()
    both = (signal.SIGTERM, signal.SIGHUP)
    handled = [x for x in both if main and signal.getsignal(x) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, stop)
    before, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = before
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Collects gshard's warnings and prints each once; other warnings are shown as usual."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", GShardWarning)
            yield
    finally:
        texts: dict[tuple[str, str], dict[str, None]] = {}  # to the levels that give the same one
        for x in caught:
            if issubclass(x.category, GShardWarning):
                said = re.split(r"(?<= at level )('\w+')", str(x.message), maxsplit=1)
                before, level, after = said if len(said) == 3 else (*said, "", "")
                texts.setdefault((before, after), {})[level] = None
            else:
                warnings.showwarning(x.message, x.category, x.filename, x.lineno)
        for (before, after), levels in texts.items():
            *others, last = levels
            listed = f"{', '.join(others)} and {last}" if others else last
            tell(f"warning: {before}{listed}{after}")


def lines_of_progress(every: float = 5.0) -> Callable[[str], None]:
    """Makes a function that prints a text on stderr, at most once in so many seconds.

    It prints nothing on a terminal, which has a progress bar or a status.
    """
    is_terminal, last = Console(stderr=True).is_terminal, time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if not is_terminal and time.monotonic() >= last + every:
            tell(text)
            last = time.monotonic()

    return say


@contextlib.contextmanager
def status(what: str) -> Iterator[Callable[[str], Any]]:
    """Shows progress on stderr; yields a function that changes the text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lines_of_progress()
        return
    with console.status(what) as shown:
        yield shown.update


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Returns a progress bar on stderr, which is erased at the end; none if it is no terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def open_page(file: str | None) -> contextlib.AbstractContextManager[NewFile | None]:
    """Opens the file of `--html` before the work, so that an unwritable path is refused at once."""
    return (
        contextlib.nullcontext() if file is None else NewFile(file_path(file, "--html"), "--html")
    )


# ---- options, and configs ------------------------------------------------------------------------

_MEANINGS = {
    "levels": "levels to look at, such as os,os_g (default: those of the config, "
    "otherwise all four)",
    "devices": "number of devices",
    "target": "the machine, such as h100:32x8, tpu-v5e:16x16 or cpu:8",
    "replica": "replicas of the sharded state (hybrid sharding)",
    "sequence": "devices that share the sequence of an example",
    "expert": "devices that share the experts of a mixture",
    "keep": "parameters that stay on an axis, such as \"{'experts/' = ['expert', 0]}\"",
    "micro_batch_size": "examples of one device in one micro-batch",
    "micro_batches": "micro-batches in one step (k)",
    "accumulate": "how gradients accumulate: level, local, scatter or sync",
    "reshard_after_forward": "true, false, or the number of devices in each sub-group that keeps "
    "parameters sharded until the backward pass",
    "offload": "store optimizer state and sharded parameters in host memory: true (the value may "
    "be left out) or false",
}


def command_parser(name: str, about: str, examples: str) -> argparse.ArgumentParser:
    """Returns a parser with the option `--json`; `examples` are the end of its help."""
    parser = argparse.ArgumentParser(
        prog=name,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser


def parsed(
    parser: argparse.ArgumentParser,
    words: list[str],
    too_many: str = "unrecognized arguments: {rest}",
    instead: str = "",
) -> argparse.Namespace:
    """Returns the parsed words; an unknown option is an error that suggests one of this command.

    `too_many` is the error for other words that are left over: `{first}`, or all of them, `{rest}`.
    `instead` is suggested for an option, `{name}`, that is similar to none.
    """
    known = [name for action in parser._actions for name in action.option_strings]
    given, rest = parser.parse_known_args(with_known_spelling(words, known))
    if rest and rest[0].startswith("-"):
        name = rest[0].partition("=")[0].lstrip("-")
        near = similar_option(name, known) or instead.format(
            name="NAME" if name == "arguments" else name
        )
        parser.error(f"unknown option {rest[0]!r}.{near}")
    if rest:
        parser.error(too_many.format(first=rest[0], rest=" ".join(rest)))
    return given


def config_parser(
    name: str, about: str, examples: str, hidden: Collection[str] = ()
) -> argparse.ArgumentParser:
    """Returns a parser that takes CONFIG, and an option for every key of it.

    The help does not list those that are hidden, which the command refuses.
    """
    parser = command_parser(name, about, examples)
    parser.add_argument("config", metavar="CONFIG", nargs="?",
                        help="a TOML file, a name that `gshard configs` lists, or "
                        "module:function")  # fmt: skip
    of_model = "An argument of the model's function is given by name: --arguments.layers 4"
    group = parser.add_argument_group("options that override CONFIG", of_model)
    parser.add_argument("--allow-import", action="append", default=[], metavar="NAME",
                        help="a module or package outside the current folder that a TOML file may "
                        "name as its model, whose code then runs")  # fmt: skip
    for key, meaning in _MEANINGS.items():
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if key == "offload" else {}
        meaning = argparse.SUPPRESS if key in hidden else meaning
        group.add_argument(
            f"--{key}", help=meaning, metavar="X", default=argparse.SUPPRESS, **alone
        )
    return parser


def given_config(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[argparse.Namespace, Config | None]:
    """Returns the parsed words and the config that they name, or None if they name none."""
    for name in {x.partition("=")[0] for x in words if x.startswith("--arguments.")}:
        dest = name.removeprefix("--")
        parser.add_argument(name, dest=dest, metavar="X", default=argparse.SUPPRESS)
    too_many = (
        "unexpected argument {first!r}. Give only one CONFIG, and several values of an option "
        "joined by commas, such as --levels os,os_g."
    )
    by_name = " An argument of the model's function is given by name: --arguments.{name} VALUE."
    given = parsed(parser, words, too_many, by_name)
    offload = vars(given).get("offload", "true")
    if given.config is None and not isinstance(value_of(offload), bool):
        given.config, given.offload = offload, "true"  # it stood alone, before CONFIG
    options = {
        key: value_of(word)
        for key, word in vars(given).items()
        if key in _MEANINGS or key.startswith("arguments.")
    }
    if given.config is not None:
        return given, read_config(given.config, options, given.allow_import)
    for key in options:
        if key not in _MEANINGS:
            parser.error(f"--{key} goes with a CONFIG")
    return given, None


def named_config(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[argparse.Namespace, Config]:
    """Returns the parsed words and the config, which must be named."""
    given, config = given_config(parser, words)
    return given, config or parser.error("name a CONFIG")


def value_of(word: str) -> Any:
    """Reads a word as a TOML value or a Python bool; other words, such as `os_g`, are strings."""
    if word in ("True", "False"):
        return word == "True"
    try:
        return tomllib.loads(f"x = {word}")["x"]
    except (ValueError, RecursionError):
        return word


# ---- this computer -------------------------------------------------------------------------------

_MOST_VIRTUAL = 64  # every one is a thread, and the whole program is compiled for all of them


def levels_here(config: Config, command: str, doing: str) -> Iterator[tuple[str, TrainSetup, Mesh]]:
    """Yields each level with the setup and a mesh of this computer, and shows what goes on.

    The mesh has accelerators if there are as many as requested, and virtual CPU devices otherwise;
    nothing may have used JAX before.

    Raises:
      GShardError: the config has no number of devices, or it is too large.
    """
    count = config.device_count()
    if count <= _MOST_VIRTUAL:
        virtual_devices(count)  # has no effect on accelerators
    devices = jax.devices()
    if devices[0].platform == "cpu" or len(devices) < count:
        if count > _MOST_VIRTUAL:
            raise GShardError(
                f"gshard {command} works on this computer's devices, and {count} virtual ones are "
                f"too many (at most {_MOST_VIRTUAL}). Give --devices {_MOST_VIRTUAL} or less; "
                "gshard plan --target compiles for real machines of any size."
            )
        try:
            devices = jax.devices("cpu")
        except RuntimeError as error:
            raise GShardError(
                f"gshard {command} needs {count} devices, this process has {len(devices)}, and "
                "JAX_PLATFORMS leaves out the virtual ones of the CPU. Unset it, or give --devices."
            ) from error
    if len(devices) < count:
        raise GShardError(
            f"gshard {command} needs {count} devices, and this process has {len(devices)}. Run it "
            "without gshard launch, or give --devices."
        )
    axes = {name: getattr(config, name) for name in ("replica", "sequence", "expert")}
    mesh = make_mesh(devices=devices[:count], **axes)
    setup = load_setup(config.model, config.arguments)
    with status("") as say:
        for level in config.levels:
            say(f"{level}: {doing} {count} {devices[0].device_kind} devices")
            yield level, setup, mesh


def forecast_with_progress(config: Config, activations: bool = True) -> Forecast:
    """Calls `forecast_config`, and shows which level is being traced."""
    with status("importing the model") as say:
        return forecast_config(config, activations, say)
