"""`LatestState`: the state that a step returned last, which an interrupt (Ctrl-C) does not lose.

The caller's state is donated when the program starts, and the new one is not the caller's before
the call has returned and the result is assigned. `KeyboardInterrupt` may be raised at any point in
between, and after it in any function of the caller that has not returned the state yet.

So the handler of SIGINT waits, if the state is donated and the results are not there yet. They are
kept until the new state is complete. After that only weak references remain, so that a dropped
state is freed; the handler makes them strong before it raises `KeyboardInterrupt`.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
from jax import core

from gshard.train_state.components import Components, Kind

_all: weakref.WeakSet[LatestState] = weakref.WeakSet()


class LatestState:
    """The last state of one step; `run` and then `complete` are a call of it."""

    def __init__(self, kind: Kind):
        self._kind = kind
        self._given: tuple[Any, Any] | None = None  # the state of a call, and its structure
        self._running: list[Any] = []  # its leaves, while the program runs in the main thread
        self._interrupted = False  # meanwhile
        self._results: tuple[Any, ...] | None = None  # until the state is complete
        self._returned: tuple[weakref.ref[Any], ...] = ()  # the state, or model and optimizer
        self._kept: Any = None  # the same, from an interrupt to the next call
        _all.add(self)

    def run(
        self, program: Callable[..., Any], state: Any, leaves: list[Any], structure: Any, *more: Any
    ) -> tuple[Any, ...]:
        """Returns what the program returns: the leaves of the new state first."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:
            _handle_interrupts()
        self._given = state, structure
        self._running = leaves if in_main else []
        try:
            self._results = results = program(leaves, structure, *more)
            return results
        finally:
            self._running = []
            if self._results is None:
                self._given = None
            if self._interrupted:
                self._interrupted = False
                raise KeyboardInterrupt

    def complete(self, parts: Components | None = None) -> Any:
        """Puts the results into the state: returns the new one, or None if it changed in place.

        `parts` are the results as components, if they are known. Does nothing if there are no
        results. May be interrupted, and called again.
        """
        if self._results is None or self._given is None:
            return None
        state, structure = self._given
        found: Any = jax.tree.unflatten(structure, self._results[0]) if parts is None else parts
        new = self._kind.update(state, found)
        owners: Sequence[Any] = state if new is None else (new,)
        with suppress(TypeError):  # an object of the user's own without weak references
            self._returned = tuple(map(weakref.ref, owners))
        self._kept = self._given = self._results = None
        return new

    def after_interrupt(self) -> None:
        """Completes what an interrupted call has left, before the next one."""
        if self._results is not None:
            if isinstance(self._results[0][-1], core.Tracer):  # of a trace that has ended
                self._results = self._given = None
            self._kept = self.complete()

    def get(self) -> Any:
        """Returns the state; None if there is none, nobody has it, or it was donated."""
        self.after_interrupt()
        found = self._kept if self._kept is not None else self._alive()
        if found is None:
            return None
        arrays = [x for x in jax.tree.leaves(self._kind.split(found)) if isinstance(x, jax.Array)]
        return None if any(x.is_deleted() for x in arrays) else found

    def release(self) -> None:
        """Forgets the state."""
        self._given = self._results = self._kept = None
        self._returned = ()

    def interrupt(self) -> bool:
        """Keeps the state, which somebody still has; returns whether the interrupt has to wait.

        A call may already have donated arrays that do not say so yet. Only the first one, which
        compiles for long, is taken at its word, and so is any at the second Ctrl-C.
        """
        starts = bool(self._running) and bool(self._returned) and not self._interrupted
        if starts or any(isinstance(x, jax.Array) and x.is_deleted() for x in self._running):
            self._interrupted = True
            return True
        if self._results is None and self._kept is None:
            self._kept = self._alive()
        return False

    def _alive(self) -> Any:
        owners = [reference() for reference in self._returned]
        if not owners or any(x is None for x in owners):
            return None
        return tuple(owners) if len(owners) > 1 else owners[0]


def _handle_interrupts() -> None:
    """Installs the handler; one of SIGINT that somebody else has installed stays."""
    # IPython installs Python's own handler again for every cell.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: Any) -> None:
    waits = [latest.interrupt() for latest in list(_all)]
    if not any(waits):
        signal.default_int_handler(number, frame)
