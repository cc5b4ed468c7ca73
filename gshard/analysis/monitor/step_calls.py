"""Follows the train steps of this process: numbers, batches, and the time that goes elsewhere."""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import jax

from gshard._util import activity
from gshard.train.train_step import TrainStep

Program = tuple[TrainStep, Any, tuple[Any, ...]]  # a step, and the structure and form of its batch

_RECENT = 8  # calls of which one may be told apart by the count that it returned
_COMPILE = ("backend_compile_duration", "jaxpr_to_mlir_module_duration")


class StepCalls:
    """An observer (`events.Observer`) that adds up the calls of train steps until they are taken.

    Attributes:
      began: when the first step began, and what had been spent by then; None before it.
      calls: number of the steps in the life of the state, skipped ones included; None if unknown.
      skipped: how many were skipped before the last call, and with it, which is on the devices.
      programs: how often each step ran with a batch of each form.
    """

    def __init__(self) -> None:
        self.began: tuple[float, dict[str, float]] | None = None
        self.calls: int | None = None
        self.skipped: tuple[Any, Any] = (0, 0)
        self._recent = deque[tuple[Any, Any]](maxlen=_RECENT)  # what it returned; skipped before
        self._logged: Any = 0  # how many were skipped, as the last `info` says
        self.programs: Counter[Program] = Counter()
        self._before = (0.0, 0.0)
        self._is_real = False  # no trace of the user's
        watch_compilation()

    def before(self, number: int) -> None:
        """Notes the time."""
        now = time.monotonic()
        self.began = self.began or (now, dict(activity.spent))
        self._before = now, activity.spent.get("compile", 0.0)

    def after(self, number: int, calls: int, skipped: tuple[Any, Any]) -> None:
        """Counts a call; the first one with a form of arguments is traced and compiled."""
        began, compiled = self._before
        if activity.spent.get("compile", 0.0) > compiled:
            activity.spent["compile"] = compiled + time.monotonic() - began
        if self.calls is None:
            self._logged = skipped[0]
        self.calls, self.skipped, self._is_real = calls, skipped, True

    def ran(self, step: TrainStep, batch: Any, info: dict[str, Any]) -> None:
        """Notes the form of the batch, not the batch itself."""
        if self._is_real:
            leaves, tree = jax.tree.flatten(batch)
            self.programs[step, tree, tuple(map(_form, leaves))] += 1
            self._recent.append((info["skipped_steps"], self.skipped[0]))
        self._is_real = False

    def skips_of(self, info: Mapping[str, Any]) -> tuple[Any, Any]:
        """How many steps were skipped before the one that returned `info`, and with it.

        That need not be the last call; nor is a call seen that is part of the user's own jit.
        """
        if (now := info.get("skipped_steps")) is None:
            return self.skipped
        before = next((x for returned, x in self._recent if returned is now), self._logged)
        self._logged = now
        return before, now

    def take(self) -> Counter[Program]:
        """Returns the programs, and forgets them."""
        taken, self.programs = self.programs, Counter()
        self.skipped = self.skipped[1], self.skipped[1]
        return taken


def steps_of(programs: Counter[Program]) -> int:
    """How many steps these calls are: of several in turn, as for a GAN, the calls of one."""
    calls = Counter[TrainStep]()
    for (step, *_), number in programs.items():
        calls[step] += number
    return max(calls.values(), default=1)


def _form(x: jax.Array) -> Any:
    return x.shape, x.dtype, x.sharding  # they compare faster than a `ShapeDtypeStruct`


def batch_of(program: Program) -> Any:
    """The abstract batch of a program."""
    _, tree, forms = program
    leaves = [jax.ShapeDtypeStruct(shape, dtype, sharding=s) for shape, dtype, s in forms]
    return jax.tree.unflatten(tree, leaves)


@functools.cache
def watch_compilation() -> None:
    """Adds the time of all compilations of this process from now on to `activity.spent`."""

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith(_COMPILE):
            activity.spent["compile"] = activity.spent.get("compile", 0.0) + duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
