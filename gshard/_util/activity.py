"""What this process does: calls that wait for other processes, compilation, work on the devices.

The watchdog reads it, in a thread of its own, and `gshard.Metrics` what time is spent on. Noting
something costs a microsecond and no communication.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import jax
from jax import core
from jax.sharding import Mesh

from gshard._util.errors import is_library_frame

T = TypeVar("T")
_OTHER_CODE = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))

_LONGEST_ERROR = 200  # characters

_BEGAN = time.monotonic()  # about when this process did
_running: dict[doing, None] = {}  # in the order in which they began
_last_call: Call | None = None
_last_saved = ""
_script_ended = _script_failed = False


@dataclass(eq=False)
class doing:
    """A context in which this process does something that the watchdog should know of.

    Args:
      what: for messages, such as `save(step=20)`.
      waits: whether it waits for other processes, and ends when they make the same call. Otherwise
        it is work of this process alone that may take long, such as compilation.
      mesh: whose processes it waits for; None for all.
    """

    what: str
    waits: bool = False
    mesh: Mesh | None = None
    began: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)

    def __enter__(self) -> None:
        _running[self] = None

    def __exit__(self, *error: object) -> None:
        del _running[self]

    def __str__(self) -> str:
        return f"in {self.what}" if self.waits else f"busy with {self.what}"

    @property
    def line(self) -> str:
        """The line of the user's code at which it waits."""
        return user_line(sys._current_frames().get(self.thread)) if self.waits else ""

    @property
    def ranks(self) -> set[int] | None:
        """The processes that it waits for; None for all."""
        return None if self.mesh is None else {d.process_index for d in self.mesh.devices.flat}


class spending:
    """A context whose time is spent on something other than steps: `data`, `checkpoint`.

    A context inside another one of the same thread adds nothing.
    """

    _inside = threading.local()

    def __init__(self, what: str):
        self._what, self._outer, self._began = what, True, 0.0

    def __enter__(self) -> None:
        self._outer = not getattr(self._inside, "is_on", False)
        self._inside.is_on, self._began = True, time.monotonic()

    def __exit__(self, *error: object) -> None:
        if self._outer:
            self._inside.is_on = False
            spent[self._what] = spent.get(self._what, 0.0) + time.monotonic() - self._began


spent: dict[str, float] = {}  # seconds


def spent_on(what: str, items: Iterator[T]) -> Iterator[T]:
    """Yields the items; the time until each is there is spent on this."""
    while True:
        with spending(what):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


class collecting(doing):
    """A context that waits for files that other processes write, and not for their calls."""

    @property
    def ranks(self) -> set[int]:
        """The processes whose calls it waits for."""
        return set()


class calling(doing):
    """A context of a call that returns at once, unless XLA:CPU runs it in this thread."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call whose result the devices compute after it has returned."""

    what: str  # such as `the train step of loss_fn (train.py:12)`
    number: int  # from 1
    result: Any  # a small array that is there once the devices have finished the call
    began: float

    @property
    def ranks(self) -> set[int]:
        """The processes that make it."""
        return {device.process_index for device in self.result.sharding.device_set}

    def __str__(self) -> str:
        return f"call {self.number} of {self.what}"


class Place(NamedTuple):
    """Where a process is, as the others are told.

    Attributes:
      text: what it does, with the line of the user's code.
      seconds: for how long.
      is_busy: it works by itself, such as compiling or writing a save, in some thread.
      has_ended: its script has ended, so that it makes no further call.
      only_waits: it waits for others, and does nothing else that gshard knows of.
      handles: the exception that it handles there, see `handled`.
    """

    text: str
    seconds: float
    is_busy: bool = False
    has_ended: bool = False
    only_waits: bool = False
    handles: str = ""


def meet(ranks: Iterable[int], call: str) -> None:
    """Waits on the host until all of these processes have called it, before they run a collective.

    So a collective of this call never meets one of another call. It returns at once where gshard's
    rendezvous did not join the processes. `call` names the call and is the same on all of them.

    Raises:
      GShardError: the processes make different calls.
      ConnectionError: one of them has ended.
    """
    for wait in meeting_points:
        wait(ranks, call)


meeting_points: list[Callable[[Iterable[int], str], None]] = []  # that of the watchdog


def called(what: str, number: int, result: Any) -> None:
    """Notes a call that the devices have not finished yet; not one in a trace of the user's."""
    global _last_call
    if not isinstance(result, core.Tracer):
        _last_call = Call(what, number, result, time.monotonic())


def last_call() -> Call | None:
    """The call noted last."""
    return _last_call


def running() -> list[doing]:
    """What runs now, in the order in which it began."""
    return list(_running)


def saved(path: str) -> None:
    """Notes a complete checkpoint."""
    global _last_saved
    _last_saved = path


def last_saved() -> str:
    """The complete checkpoint noted last; empty if there is none."""
    return _last_saved


def script_has_ended(failed: bool) -> None:
    """Notes that this process runs its exit functions, perhaps after an error."""
    global _script_ended, _script_failed
    _script_ended, _script_failed = True, failed


def last_words() -> str:
    """What a process says of itself at its end."""
    how = "has ended with an error" if _script_failed else "at the end of its script"
    return f"{how}, {_after()}"


def place(unfinished: Call | None) -> Place:
    """Returns where this process is; `unfinished` is a call that its devices have not finished."""
    now, main = time.monotonic(), threading.main_thread().ident
    own = [x for x in running() if x.thread == main]
    others = [x for x in running() if x.thread != main]
    waits, line, handles = all(x.waits for x in running()), main_line(), handled(main)
    busy = not all(x.waits for x in {x.thread: x for x in running()}.values())  # now, in a thread
    if own and not _script_ended:
        text, since = f"{own[-1]}{at(line)}", now - own[-1].began
        return Place(text, since, busy, only_waits=waits, handles=handles)
    if unfinished is not None:
        text, since = f"in {unfinished}{at(line)}", now - unfinished.began
        return Place(text, since, busy, only_waits=waits, handles=handles)
    if others:
        return Place(f"{others[0]}, in the background", now - others[0].began, busy)
    since = now - (_BEGAN if _last_call is None else _last_call.began)
    if _script_ended:  # one that has failed ends soon
        return Place(last_words(), since, has_ended=not _script_failed)
    return Place(f"{_after()}{at(line)}", since, handles=handles)


def _after() -> str:
    return "before its first step" if _last_call is None else f"after {_last_call}"


def main_line() -> str:
    """The line of the user's code at which the main thread is."""
    main = threading.main_thread().ident
    return "" if main is None else user_line(sys._current_frames().get(main))


def user_line(frame: FrameType | None) -> str:
    """The innermost line of the user's own code, such as `train.py:12`; empty if there is none."""
    for found in _frames(frame):
        file = found.f_code.co_filename
        if not is_library_frame(found) and not file.startswith(("<", *_OTHER_CODE)):
            return f"{file}:{found.f_lineno}"
    return ""


def handling(thread: int | None) -> BaseException | None:
    """The exception that a thread handles: it is in an `except` or `finally`."""
    found: Any = sys._current_exceptions().get(thread or 0)
    return found[1] if isinstance(found, tuple) else found  # a tuple in Python 3.11


def handled(thread: int | None) -> str:
    """`, while it handles ValueError: no column x`, or nothing."""
    error = handling(thread)
    return "" if error is None else f", while it handles {name_of(error)}"


def name_of(error: BaseException) -> str:
    """`ValueError: no column x`, short, of an exception that another thread handles."""
    name = type(error).__name__
    if not error.args or not all(isinstance(x, str | int | float) for x in error.args):
        return name  # the text may be that of an array, which waits for the devices
    text = next(iter(str(error).splitlines()), "")
    return f"{name}: {text[:_LONGEST_ERROR]}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def at(line: str) -> str:
    """`, at train.py:12`, or nothing where the line is not known."""
    return f", at {line}" if line else ""


def wait_until_ready(call: Call) -> None:
    """Waits until the devices have finished a call, or until nothing more can be known of it."""
    try:
        jax.block_until_ready(call.result)
    except Exception:  # it failed, or was donated; whoever reads it learns of that
        pass
