"""Reads ahead: a thread does the work for the next items while the current one is used."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_EXIT_TIMEOUT = 10.0  # seconds for which the interpreter waits at its end for a running thread

_stop_functions: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = (
    weakref.WeakKeyDictionary()
)


class StoppedError(Exception):
    """Nobody waits for the item that is worked on."""


def map_ahead(
    items: Iterator[T], work: Callable[[T, Callable[[], None]], Any], most: int
) -> Iterator[tuple[T, Any]]:
    """Yields each item with the result of `work`, which a thread runs up to `most` items ahead.

    An error is raised when its item is due. When the iterator is dropped, the thread ends after its
    current item, or where `work` calls its second argument, which raises a `StoppedError` then. It
    is a daemon: a script that ends waits at most 10 s for it.
    """
    if not most:
        for item in items:
            yield item, work(item, lambda: None)
        return
    results: SimpleQueue[tuple[Any, Any, BaseException | None] | None] = SimpleQueue()
    room, stopped = threading.Semaphore(most), threading.Event()

    def go_on() -> None:
        if stopped.is_set():
            raise StoppedError

    def run() -> None:
        for item in items:
            room.acquire()
            if stopped.is_set():
                return
            try:
                results.put((item, work(item, go_on), None))
            except BaseException as error:  # raised where the item is due
                results.put((item, None, error))
                return
        results.put(None)

    def stop() -> None:
        stopped.set()
        room.release()

    thread = threading.Thread(target=run, name="gshard-loader", daemon=True)
    _stop_functions[thread] = stop
    try:
        thread.start()
        while (found := results.get()) is not None:
            item, result, error = found
            if error is not None:
                raise error
            room.release()
            yield item, result
    finally:  # also when the iterator is dropped
        stop()


def _stop_threads() -> None:
    # A thread that is still inside XLA when the interpreter exits would crash the process.
    running = [thread for thread in list(_stop_functions) if thread.is_alive()]
    for thread in running:
        _stop_functions[thread]()
    for thread in running:
        thread.join(_EXIT_TIMEOUT)


atexit.register(_stop_threads)
