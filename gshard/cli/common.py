"""What all commands share: exit codes, output, signals, configs, and the mesh of this computer."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh
from rich.console import Console

from gshard._util.errors import GShardError, GShardWarning, did_you_mean
from gshard.analysis.forecast import Forecast, forecast_config
from gshard.analysis.setup import Config, read_config
from gshard.sharding.mesh import make_mesh, virtual_devices

# Exit codes of all commands but `gshard launch`, whose are its script's.
YES = 0
NO = 1  # the answer: it does not fit, a budget is exceeded, a checkpoint is damaged, a check fails
NO_ANSWER = 2  # the question is wrong (as argparse says it), or something to answer it is missing


def print_answer(text: str, code: int) -> int:
    """Prints an answer and returns its exit code, or `NO_ANSWER` if it cannot be written.

    A reader such as `head` may close the pipe before the end; that does not change the exit code.
    """
    error = print_text(text)
    return code if error is None or isinstance(error, BrokenPipeError) else NO_ANSWER


def print_text(text: str) -> OSError | None:
    """Prints a text; returns the error if it cannot be written, after a line on stderr if due."""
    try:
        print(text, flush=True)
    except OSError as error:
        _write_no_more()
        if not isinstance(error, BrokenPipeError):
            why = error.strerror or error
            print(f"error: stdout cannot be written: {why}.", file=sys.stderr)
        return error
    return None


def _write_no_more() -> None:
    """Keeps Python from flushing stdout at exit, which would fail again (see `SIGPIPE`)."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


Asked = TypeVar("Asked", Config, Config | None)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _Stopped(SystemExit):
    """Raised when a signal asks this program to end; its code is the one that a shell reports."""


def leave_accelerators() -> None:
    """Restricts JAX to the CPU: nothing runs, and another job may be using the accelerators.

    If JAX has already started, this changes nothing.
    """
    jax.config.update("jax_platforms", "cpu")


def in_words(
    read: Callable[[], tuple[Any, Asked]], work: Callable[[Any, Asked], tuple[str, int]]
) -> int:
    """Runs a command; prints a user's error as one line, and each warning once, as one line.

    Args:
      read: returns the parsed words and the config. It may exit, as argparse does.
      work: takes both, and returns the text to print and the exit code. Anything else that is
        printed meanwhile, such as by the model, goes to stderr.

    Returns:
      The exit code (see `print_answer`); 130 after Ctrl-C, and 128 plus its number after a signal
      that ends a program. What the work has opened is closed in every case.
    """
    with _stopped_by_signals(), _warnings_as_lines():
        try:
            asked = read()
            with contextlib.redirect_stdout(sys.stderr):
                text, code = _worked(work, asked)
            return print_answer(text, code)
        except GShardError as error:
            print(f"error: {error}", file=sys.stderr)
            return NO_ANSWER
        except Exception as error:  # of the model's own, and where: Python would exit as for a no
            sys.excepthook(type(error), error, error.__traceback__)
            return NO_ANSWER
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except _Stopped as stopped:
            return int(str(stopped))


def _worked(
    work: Callable[[Any, Asked], tuple[str, int]], asked: tuple[Any, Asked]
) -> tuple[str, int]:
    try:
        return work(*asked)
    except _Stopped:
        raise
    except SystemExit as ended:
        raise GShardError(
            f"the model ends the program: SystemExit({ended.code!r}). Raise an error that says why."
        ) from ended


@contextlib.contextmanager
def status(what: str) -> Iterator[Callable[[str], Any]]:
    """Shows progress on stderr if it is a terminal; yields a function that changes the text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(what) as shown:
        yield shown.update


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turns signals that end the program into an exception, so that everything is cleaned up.

    This leaves out signals that are handled or ignored already (`nohup`), and does nothing outside
    the main thread.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(128 + number)

    main = threading.current_thread() is threading.main_thread()
    heard = [x for x in _SIGNALS if main and signal.getsignal(x) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Collects gshard's warnings and prints each once; other warnings are shown as usual."""
    # Several levels are examined, and give the same warnings.
    said: dict[str, None] = {}
    with warnings.catch_warnings():
        show = warnings.showwarning

        def gather(message: Warning | str, category: type[Warning], *more: Any) -> None:
            if issubclass(category, GShardWarning):
                said[re.sub(r" at level '\w+'", "", str(message))] = None
            else:
                show(message, category, *more)

        warnings.showwarning = gather
        warnings.simplefilter("always", GShardWarning)
        try:
            yield
        finally:
            for text in said:
                print(f"warning: {text}", file=sys.stderr)


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
    """Returns the parser of a command that takes a config; `given_config` reads its words.

    Args:
      name: the command, such as `gshard plan`.
      about: a sentence that says what the command does.
      examples: the end of its help.

    Returns:
      A parser that takes CONFIG, an option for every key, and `--json`.
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
    """Returns the parsed words and the config that they name, or None if they name none.

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
    """Returns the parsed words and the config, which must be named.

    Raises:
      GShardError: as `read_config`.
    """
    given, config = given_config(parser, words)
    if config is None:
        parser.error("name a CONFIG")
    return given, config


def _apart(parser: argparse.ArgumentParser, words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Separates the words that argparse knows from the values of `--arguments.NAME`."""
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
    """Reads a word as a TOML value or a Python bool; other words, such as `os_g`, are strings."""
    if word in ("True", "False"):
        return word == "True"
    try:
        return tomllib.loads(f"x = {word}")["x"]
    except tomllib.TOMLDecodeError:
        return word


MOST_VIRTUAL = 64  # every one is a thread, and the whole program is compiled for all of them
_CGROUP = Path("/sys/fs/cgroup")


def mesh_here(config: Config, command: str) -> Mesh:
    """Returns the mesh of a config on this computer; nothing may have used JAX before.

    It has accelerators if there are as many as requested, and virtual CPU devices otherwise.

    Raises:
      GShardError: the config has no number of devices, or it is too large; the message begins with
        `command`.
    """
    count = config.device_count()
    if count <= MOST_VIRTUAL:
        virtual_devices(count)  # has no effect on accelerators
    given = jax.devices()
    if given[0].platform == "cpu" or len(given) < count:
        if count > MOST_VIRTUAL:
            raise GShardError(
                f"{command} works on this computer's devices, and {count} virtual ones are too "
                f"many (at most {MOST_VIRTUAL}). Give --devices {MOST_VIRTUAL} or less; gshard "
                "plan --target compiles for real machines of any size."
            )
        given = jax.devices("cpu")
    return make_mesh(replica=config.replica, devices=given[:count])


def free_memory(mesh: Mesh) -> int | None:
    """Returns the free bytes of all devices of a mesh together; None if unknown.

    Accelerators have their own memory; virtual devices share the computer's.
    """
    devices = mesh.devices.flat
    if devices[0].platform == "cpu":
        return min(filter(None, (_free_pages(), _free_in_group())), default=None)
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in x for x in stats):
        return None
    return len(stats) * min(x["bytes_limit"] - x.get("bytes_in_use", 0) for x in stats)


def _free_pages() -> int | None:
    with contextlib.suppress(OSError):  # Linux: what can be had without swapping
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _free_in_group() -> int | None:
    """Returns the free bytes of a container's memory; None if it has no limit."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        return max(limit - int((_CGROUP / "memory.current").read_text()), 1)
    return None


def forecast_with_progress(config: Config, activations: bool = True) -> Forecast:
    """Calls `forecast_config`, and shows on a terminal which level is being traced."""
    with status("importing the model") as say:
        return forecast_config(config, activations, say)
