"""Checks that all processes compile the same program, before any of them runs it.

XLA does not check this: with another learning rate on one process each goes on with its own, and
with another level or loss the collectives of different programs meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import core
from jax.sharding import Mesh

from gshard._util import events
from gshard._util.activity import called, calling, doing
from gshard._util.errors import GShardError
from gshard._util.jaxpr import user_line
from gshard._util.jaxpr_text import lines_of, plain
from gshard.distributed.agree import by_value, find_differences, first_difference, spans_processes
from gshard.distributed.traced_losses import SAME_LOSS, is_noted, note_loss
from gshard.sharding.plan import Plan
from gshard.train.late_checks import late_checks
from gshard.train.same_state import ADVICE, plan_facts

_ADVICE = {
    **ADVICE,
    "the options": "Give the same options on every process.",
    "the traced program": SAME_LOSS,
}


T = TypeVar("T")
_MODULUS = 61
_SMALL = 2**16  # elements of an array that may be kept
_compared: dict[Any, int] = {}  # how many programs, by mesh
_ABOUT_TRACERS = (
    "gshard traces the loss before it differentiates it, so the functions of a jax.custom_vjp "
    "cannot use a value of the loss that is not passed to them. Make the value above an argument, "
    "and return it from the forward pass among the residuals if the backward pass needs it."
)


class ProgramCheck:
    """Compares a program at the first call of each form of arguments; nothing in one process.

    `what` is the name of the program in messages, `options` a dataclass.
    """

    def __init__(self, plan: Plan, what: str, options: Any = None):
        self._plan, self._what, self._options = plan, what, options
        self._is_on, self._late = spans_processes(plan), late_checks(plan)
        self._mesh = plan.mesh if isinstance(plan.mesh, Mesh) else None
        self._last: tuple[Any, Any, int] = (None, None, 0)
        self._seen: dict[Any, int] = {}
        self._is_new, self._is_traced, self._calls = False, False, 0

    def __call__(
        self, structure: Any, arguments: Any, trace: Callable[[], jax.stages.Traced]
    ) -> int:
        """Compares the program that `trace` traces, unless that was done, and returns a number.

        It is that of the program, changed by the order of the eval steps and backwards so far: the
        next train step compares it, since these have no reduction that could carry it.

        The program is known by `structure`, which is hashable, and the form of `arguments`. Inside
        a trace of the user's nothing is compared: it may be one of this process alone.
        """
        if not self._is_on:
            return 0
        leaves, tree = jax.tree.flatten(arguments)
        self._is_traced = any(isinstance(x, core.Tracer) for x in leaves)
        if self._is_traced:
            return 0
        form = tree, [(x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in leaves]
        if self._last[0] is structure and self._last[1] == form:
            self._is_new = False
            return self._last[2] + self._late.order
        key = (structure, tree, tuple(form[1]))
        self._is_new = key not in self._seen
        if self._is_new:
            with doing(f"tracing {self._what}"):
                traced = trace()
            compare_programs(self._plan, self._what, traced, self._options)
            # All processes of a mesh compare the same programs, so these are the same numbers.
            self._seen[key] = _compared[self._plan.mesh] = _compared.get(self._plan.mesh, 0) + 1
        self._last = structure, form, self._seen[key]
        return self._last[2] + self._late.order

    def run(
        self, program: Callable[..., T], *args: Any, small: Callable[[Any], Any] | None = None
    ) -> T:
        """Calls the program that was checked last, and notes the call for the watchdog.

        `small` selects a small array from the results, which is kept until the next call. It is the
        smallest one by default, unless that is large.
        """
        events.calling = self._what
        try:
            if not self._is_on:
                return program(*args)
            with self._noted():
                results = program(*args)
        except jax.errors.UnexpectedTracerError as error:
            error.add_note(_ABOUT_TRACERS)
            raise
        finally:
            events.calling = ""
        self._calls += 1
        if small is None:  # a train step tells by itself which one it is
            self._late.order = (5 * self._late.order + self._last[2]) % _MODULUS
        array = _smallest(results) if small is None else small(results)
        if array is not None:
            called(self._what, self._calls, array)
        return results

    def _noted(self) -> doing:
        if self._is_new or self._is_traced:
            return doing(f"compiling {self._what}")
        # It returns at once, but XLA:CPU runs a very small program in this thread.
        return calling(f"call {self._calls + 1} of {self._what}", waits=True, mesh=self._mesh)


def _smallest(results: Any) -> jax.Array | None:
    arrays = [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array) and x.size < _SMALL]
    return min(arrays, key=lambda x: x.size, default=None)


def note_program(plan: Plan, name: str, function: Callable[..., Any], *args: Any) -> None:
    """Notes a program that is a part of a user's own, for a comparison with other processes.

    It traces the function once more, for each form of arguments and for each trace of the user's.
    """
    if not spans_processes(plan):
        return
    leaves, tree = jax.tree.flatten(args)
    forms = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    form = " ".join(f"{x.dtype}{list(x.shape)}" for x in forms)
    if is_noted(plan, form, name) and not any(isinstance(x, core.Tracer) for x in leaves):
        return
    traced = jax.make_jaxpr(function)(*tree.unflatten(forms))
    note_loss(plan, form, name, [line.text for line in lines_of(traced)])


def compare_programs(plan: Plan, what: str, traced: jax.stages.Traced, options: Any = None) -> None:
    """Compares a traced program, its plan and its options over the processes of the plan's mesh.

    Raises:
      GShardError: they differ, on all processes; it says in what.
    """
    if not spans_processes(plan):
        return
    lines = lines_of(traced.jaxpr)
    fields = dataclasses.fields(options) if options is not None else ()
    facts = {
        **plan_facts(plan),
        "the options": [f"{x.name}={plain(getattr(options, x.name))}" for x in fields],
        "the traced program": [line.text for line in lines],
    }
    mesh: Any = plan.mesh
    differing = find_differences(
        "program", facts, mesh, f"the first call of {what} with these arguments"
    )
    if not differing:
        return
    name = differing[0]
    found = first_difference(facts[name], mesh)
    where = ""
    if name == "the traced program":
        places = {
            line.text: user_line(line.eqn) for line in reversed(lines) if line.eqn is not None
        }
        place = places.get(found[jax.process_index()])
        where = f" (here at {place})" if place else ""
        found = {rank: text.strip()[:200] for rank, text in found.items()}
    raise GShardError(
        f"the processes do not run the same program: {what} differs in {name}: {by_value(found)}"
        f"{where}. {_ADVICE[name]}"
    )
