"""A traced function as a list of steps on numbered values, which can run in another order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import core as jax_core
from jax.extend import core

from gshard._util.jaxpr import bind, called, with_inner

# Where the user says how something lies, XLA has to see it.
_PLACED = ("sharding_constraint", "shard_map", "reshard")


@dataclass
class Step:
    """One equation.

    Attributes:
      eqn: the equation.
      ins: numbers of its operands.
      outs: numbers of its results.
      free: it may run inside a `shard_map`.
      holds: it is or holds a primitive of those that calls are opened for.
      whole: it is to run on whole values, on every device.
      branches: of a `cond`, to be run in place of its own.
    """

    eqn: Any
    ins: list[int]
    outs: list[int]
    free: bool
    holds: bool
    whole: bool = False
    branches: Sequence[Callable[[Sequence[Any]], Any]] = ()

    def run(self, values: dict[int, Any]) -> None:
        """Adds the results to the values."""
        given = [values[i] for i in self.ins]
        with jax.named_scope(str(self.eqn.source_info.name_stack) or "update"):
            results = (
                jax.lax.switch(given[0], self.branches, given[1:])
                if self.branches
                else bind(self.eqn, given)
            )
        values.update(zip(self.outs, results, strict=True))


class Traced:
    """The steps of a jaxpr in order, those of the calls that hold certain primitives among them.

    Attributes:
      steps: of all equations.
      avals: shape and dtype of every value.
      inputs: numbers of the inputs.
      outputs: numbers of the results.
      literals: values that are known.
      consts: arrays that the function closed over.
      foreign: those of them whose layout is not known, such as a batch.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any], opened: Collection[str]):
        self.steps: list[Step] = []
        self.avals: list[Any] = []
        self.literals: dict[int, Any] = {}
        self.consts: dict[int, Any] = {}
        self.foreign: set[int] = set()
        self.inputs = [self.new(v.aval) for v in jaxpr.invars]
        self.outputs = self._open(jaxpr, consts, self.inputs, opened)

    def new(self, aval: Any) -> int:
        """The number of a new value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def bytes(self, *values: int) -> int:
        """Of whole values."""
        return sum(self.avals[i].size * self.avals[i].dtype.itemsize for i in values)

    def computed_from(self, values: Iterable[int]) -> set[int]:
        """These values and all that depends on them."""
        found = set(values)
        for step in self.steps:
            if not found.isdisjoint(step.ins):
                found.update(step.outs)
        return found

    def _open(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int], opened: Collection[str]
    ) -> list[int]:
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(v: Any) -> int:
            if not isinstance(v, core.Literal):
                return known[v]
            i = self.new(v.aval)
            self.literals[i] = v.val
            return i

        for v, const in zip(jaxpr.constvars, consts, strict=True):
            i = known[v] = self.new(v.aval)
            self.consts[i] = const
            if v.aval.size > 1 and isinstance(const, jax_core.Tracer):
                self.foreign.add(i)
        for eqn in jaxpr.eqns:
            ins, body = [read(v) for v in eqn.invars], called(eqn)
            holds = any(inner.primitive.name in opened for inner in with_inner(eqn))
            if body and holds:
                outs = self._open(*body, ins, opened)
            else:
                outs = [self.new(v.aval) for v in eqn.outvars]
                self.steps.append(Step(eqn, ins, outs, _is_free(eqn), holds))
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]


def _is_free(eqn: Any) -> bool:
    return not any(inner.effects or inner.primitive.name in _PLACED for inner in with_inner(eqn))
