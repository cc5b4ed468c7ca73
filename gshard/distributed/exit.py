"""How a process leaves its job: immediately when it fails, cleanly when it is preempted.

At exit JAX waits up to minutes for all other processes, which wait in a collective for this one;
then C++ ends them. So a failed process ends itself before JAX's exit functions run: its sockets
close, and the others notice. `atexit` functions that were registered after gshard was imported run
first; earlier ones, like JAX's, do not run.

Before a machine is taken away, its processes get SIGTERM, or SIGUSR1 if a Slurm job script asks for
it. All processes of the job then stop at the same call, on which JAX's coordinator agrees, wherever
the signal arrived.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from traceback import extract_tb
from types import TracebackType
from typing import Any, TypeVar

import jax  # its exit function, registered by this import, must run after the one here
from jax.experimental import multihost_utils

from gshard._util.cgroup import contents
from gshard._util.errors import CallOrderError, GShardError
from gshard._util.tracebacks import is_library
from gshard._util.validation import shown
from gshard.distributed import unfinished

Batch = TypeVar("Batch")

# EX_TEMPFAIL of sysexits.h, "try again later".
PREEMPTED_EXIT_CODE = 75

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# What a collective or JAX's coordinator says when another process has gone, not in an INFO
# line of C++ (I0000 ...). No more than that: the words are looked for in what the user's program
# prints, too.
LOST_PEER = re.compile(
    r"^(?!I\d{4} ).*(gloo [\w -]{1,40} failed|coordination service|distributed service detected|"
    r"remote process exited|nccl(remote|system)error|lost its connection to another one|"
    r"process \d+ has left the job)",
    re.IGNORECASE | re.MULTILINE,
)

_THREADS_TIMEOUT = 8.0  # seconds that `atexit` functions and other threads have to end
_FORK_GRACE = 30  # seconds that a forked child has after SIGTERM

_code = 0
_calls = 0  # of `preempted`
_told = False  # by `preempted`, to stop
_signal_received = False  # no Event: a handler may be interrupted by itself
_alarm_before: Any = None  # the handler of SIGALRM that a signal has replaced
_listening = False


def at_exit_with(code: int) -> None:
    """Makes this process exit with `code`, when it ends, without waiting for others.

    Threads that still run do not delay the exit, since the other processes would wait for them too;
    but a save that is under way does.
    """
    global _code
    _code = code & 0xFF or 1  # what the system keeps of a code; 0 would be a success
    unfinished.exits_with_error()
    began = time.monotonic()

    def exit_late() -> None:
        time.sleep(_THREADS_TIMEOUT)
        unfinished.wait(began)
        _exit_now()

    threading.Thread(target=exit_late, daemon=True).start()


@atexit.register
def _exit_now() -> None:
    if _code:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # nobody reads it any more, or it is closed
                pass
        os._exit(_code)


def exit_when_it_fails() -> None:
    """Makes an uncaught exception end this process immediately from now on."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if unfinished.is_exiting():  # the watchdog ends a job that hangs, and has said why
            return
        at_exit_with(130 if issubclass(kind, KeyboardInterrupt) else 1)
        if not LOST_PEER.search(str(error)):
            return before(kind, error, traceback)
        # One paragraph, since the frames of JAX do not explain a lost process.
        at = [x for x in extract_tb(traceback) if not is_library(x.filename)]
        where = f" in {at[-1].filename}, line {at[-1].lineno}" if at else ""
        print(
            f"gshard: this process lost its connection to another one{where}: "
            f"{str(error).splitlines()[0]}. The reason is probably in the log of the process that "
            "ended first.",
            file=sys.stderr,
            flush=True,
        )

    sys.excepthook = hook


def preempted() -> bool:
    """Whether the job is to stop: the same answer on every process in the same step.

    Call it once a step, on every process. After the first call, SIGTERM no longer ends this
    process: save, and call `sys.exit(PREEMPTED_EXIT_CODE)`, before the sender of the signal kills
    the process (30 s with `gshard launch`). SIGUSR1 counts as SIGTERM from then on, and in a job of
    several processes from `initialize` on, unless the program has a handler for it.

    Returns:
      True once any process of the job has received such a signal.

    Raises:
      GShardError: with several processes, where JAX's preemption service is turned off; alone, for
        a first call from another thread than the main one.

    Example:
      >>> def train(step, state, batches, save):
      ...     for batch in batches:
      ...         state, metrics = step(state, batch)
      ...         if gshard.distributed.preempted():
      ...             save(state)
      ...             raise SystemExit(gshard.distributed.PREEMPTED_EXIT_CODE)
    """
    global _calls, _told
    _calls += 1
    _listen()
    if _told:  # JAX says so only at the call on which its coordinator agreed
        return True
    if jax.process_count() == 1:
        _told = _signal_received
        return _told
    try:
        _told = multihost_utils.reached_preemption_sync_point(_calls)
        return _told
    except RuntimeError as error:
        raise CallOrderError(
            f"preempted(): {error} With several processes it needs JAX's preemption service, "
            "which jax_enable_preemption_service=False turns off."
        ) from error


def was_preempted() -> bool:
    """Whether `preempted` has told this process to stop."""
    return _told


def until_preempted(
    batches: Iterable[Batch], last: Callable[[], object] | None = None
) -> Iterator[Batch]:
    """Yields the batches until the job is to stop; then calls `last` and exits the process.

    Every process stops before the same batch, which is not taken: in `last` the position of a
    `DataLoader` is that of the state. The exit code is `PREEMPTED_EXIT_CODE`, 75, which schedulers
    read as "try again later".

    Args:
      batches: any iterable, of the same length on every process.
      last: called once on every process before it exits, such as `lambda: save(state)`.

    Returns:
      An iterator over the batches.

    Raises:
      SystemExit: with the code 75, after `last`.

    Example:
      >>> def train(step, state, batches, save):
      ...     for batch in gshard.distributed.until_preempted(batches, last=lambda: save(state)):
      ...         state, metrics = step(state, batch)
    """
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise GShardError(
            f"until_preempted(batches): {shown(batches)} does not give batches one by one. Pass an "
            "iterable, such as a list, a loader or range(steps)."
        )
    if last is not None and not callable(last):
        raise GShardError(f"until_preempted(last={shown(last)}) is not a function.")

    def iterate() -> Iterator[Batch]:
        taken = iter(batches)
        # Asked first: the position of a loader is that of the batches it has given.
        while not preempted():
            try:
                batch = next(taken)
            except StopIteration:
                return
            yield batch
        if last is not None:
            last()
        sys.exit(PREEMPTED_EXIT_CODE)

    return iterate()


def _listen() -> None:
    global _listening
    if _listening:
        return
    alone = jax.process_count() == 1
    if threading.current_thread() is not threading.main_thread():
        if not alone:  # JAX listens for SIGTERM, in a thread of its own
            return
        raise CallOrderError(
            "preempted() listens for SIGTERM, which Python allows only in the main thread: call "
            "it there first."
        )
    # The signal may come again: from the scheduler, and from the launcher too.
    if alone and signal.signal(signal.SIGTERM, _note) is _end_late:
        if _alarm_before is not None:  # a forked child that asks by itself also ends by itself
            signal.alarm(0)
            signal.signal(signal.SIGALRM, _alarm_before)
    count_sigusr1_as_sigterm()
    _listening = True


def _note(number: int, frame: object) -> None:
    global _signal_received
    _signal_received = True


def _end_fork_late() -> None:
    """Ends a forked child some time after SIGTERM, where its parent goes on after that signal.

    A scheduler that sends it to all processes must not end a data worker before the last batch. But
    `multiprocessing.Pool` ends its workers with it, and waits for them. A child of a program of one
    process that calls `preempted` itself is not ended.
    """
    global _listening
    known = signal.getsignal(signal.SIGTERM)
    by_jax = known is signal.SIG_DFL and not is_default(signal.SIGTERM)
    if known is _note or by_jax:
        signal.signal(signal.SIGTERM, _end_late)
        _listening = False


def _end_late(number: int, frame: object) -> None:
    global _alarm_before
    _note(number, frame)  # it may still call `preempted`
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the program may have a handler
    _alarm_before = _alarm_before or before
    signal.alarm(_FORK_GRACE)


os.register_at_fork(after_in_child=_end_fork_late)


def count_sigusr1_as_sigterm() -> None:
    """From now on; the program's own handler stays, and in other threads nothing is changed."""
    if threading.current_thread() is threading.main_thread() and is_default(signal.SIGUSR1):
        signal.signal(signal.SIGUSR1, lambda number, frame: signal.raise_signal(signal.SIGTERM))


def is_default(number: int) -> bool:
    """Whether nobody handles a signal; `faulthandler` does it without Python's knowledge."""
    found = re.search(r"^SigCgt:\s*(\w+)$", contents(Path("/proc/self/status")), re.MULTILINE)
    is_caught = found is not None and int(found[1], 16) >> (number - 1) & 1
    return signal.getsignal(number) is signal.SIG_DFL and not is_caught
