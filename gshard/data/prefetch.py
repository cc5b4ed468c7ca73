"""Runs work ahead in one thread, by a bounded number of items."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
LEAVE = 1.0
"""Seconds that the interpreter waits at its end for a piece that is being worked on."""

_running: weakref.WeakSet[_Worker] = weakref.WeakSet()


def map_ahead(items: Iterator[T], work: Callable[[T], Any], most: int) -> Iterator[tuple[T, Any]]:
    """Yields each item with the result of `work`, which runs up to `most` items ahead.

    An error is raised when its item is due. When the iterator is dropped, the thread ends after its
    current item; it is a daemon, so that a script that fails does not wait for it.
    """
    if not most:
        for item in items:
            yield item, work(item)
        return
    worker = _Worker(items, work, most)
    _running.add(worker)
    worker.thread.start()
    try:
        while (found := worker.done.get()) is not None:
            item, result, error = found
            if error is not None:
                raise error
            worker.room.release()
            yield item, result
    finally:  # also when the iterator is dropped
        worker.stop()


class _Worker:
    """The thread, and the queue and semaphore that it shares with the iterator."""

    def __init__(self, items: Iterator[Any], work: Callable[[Any], Any], most: int):
        self.done: SimpleQueue[tuple[Any, Any, BaseException | None] | None] = SimpleQueue()
        self.room = threading.Semaphore(most)
        self._over = threading.Event()
        arguments = (items, work, self.room, self.done, self._over)
        self.thread = threading.Thread(
            target=_run, args=arguments, name="gshard-loader", daemon=True
        )

    def stop(self) -> None:
        self._over.set()
        self.room.release()


def _run(
    items: Iterator[Any],
    work: Callable[[Any], Any],
    room: threading.Semaphore,
    done: SimpleQueue[Any],
    over: threading.Event,
) -> None:
    while room.acquire() and not over.is_set():
        item = next(items, None)
        if item is None:
            done.put(None)
            return
        try:
            done.put((item, work(item), None))
        except BaseException as error:  # raised where the item is due
            done.put((item, None, error))
            return


def _leave() -> None:
    # A thread that is still inside XLA when the interpreter exits would crash the process.
    workers = [worker for worker in _running if worker.thread.is_alive()]
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.thread.join(LEAVE)


atexit.register(_leave)
