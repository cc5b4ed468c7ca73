"""Preemption: a machine is about to be taken away, and SIGTERM says so.

All processes learn of it and stop at the same call, wherever the signal arrived. With several
processes JAX's coordinator agrees on the call; alone, a process hears the signal itself.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

from gshard._util.errors import CallOrderError, GShardError
from gshard._util.validation import shown
from gshard.distributed.exit import PREEMPTED_EXIT_CODE

Batch = TypeVar("Batch")

_calls = 0
_told = threading.Event()
_listening = False


def preempted() -> bool:
    """Whether the job was told to stop: the same answer on every process in the same step.

    Call it once a step, on every process. After the first call, SIGTERM no longer ends this
    process: save, and call `sys.exit(PREEMPTED_EXIT_CODE)`, before the sender of the signal kills
    the process (30 s with `gshard launch`).

    Returns:
      True once any process of the job has received SIGTERM.

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
    global _calls
    _calls += 1
    if jax.process_count() == 1:
        _listen()
        return _told.is_set()
    try:
        return multihost_utils.reached_preemption_sync_point(_calls)
    except RuntimeError as error:
        raise CallOrderError(
            f"preempted(): {error} With several processes it needs JAX's preemption service, "
            "which jax_enable_preemption_service=False turns off."
        ) from error


def until_preempted(
    batches: Iterable[Batch], last: Callable[[], object] | None = None
) -> Iterator[Batch]:
    """Yields the batches until the job is told to stop; then calls `last` and exits the process.

    Every process stops before the same batch. The exit code is `PREEMPTED_EXIT_CODE`, 75, which
    schedulers read as "try again later".

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
    if last is not None and not callable(last):
        raise GShardError(f"until_preempted(last={shown(last)}) is not a function.")
    return _until_preempted(batches, last)


def _until_preempted(
    batches: Iterable[Batch], last: Callable[[], object] | None
) -> Iterator[Batch]:
    for batch in batches:
        if preempted():
            if last is not None:
                last()
            sys.exit(PREEMPTED_EXIT_CODE)
        yield batch


def _listen() -> None:
    global _listening
    if _listening:
        return
    if threading.current_thread() is not threading.main_thread():
        raise CallOrderError(
            "preempted() listens for SIGTERM, which Python allows in the main thread alone: call "
            "it there first."
        )

    def hear(number: int, frame: object) -> None:
        _told.set()  # again and again: the scheduler may say it, and the launcher too

    signal.signal(signal.SIGTERM, hear)
    _listening = True
