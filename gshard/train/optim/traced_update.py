"""The equations of a traced update, with values known by numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import core as jax_core
from jax.extend import core

from gshard._util.jaxpr import bind, called, in_scope, with_inner
from gshard._util.jaxpr_dataflow import PRODUCTS

# Layouts that the user sets, which XLA has to see.
_LAYOUT_PRIMITIVES = ("sharding_constraint", "shard_map", "reshard")


@dataclass
class TracedEquation:
    """One equation, with its operands and results as numbers of values."""

    eqn: Any
    ins: list[int]
    outs: list[int]
    can_be_mapped: bool  # inside a `shard_map`
    has_product: bool  # is, or contains, a matrix product
    replicated: bool = False  # runs on gathered values, on every device
    branches: Sequence[Callable[[Sequence[Any]], Any]] = ()  # replace those of a `cond`

    def run(self, values: dict[int, Any]) -> None:
        """Evaluates the equation and adds its results to `values`."""
        given = [values[i] for i in self.ins]
        with in_scope(self.eqn):
            results = (
                jax.lax.switch(given[0], self.branches, given[1:])
                if self.branches
                else bind(self.eqn, given)
            )
        values.update(zip(self.outs, results, strict=True))


class TracedUpdate:
    """The equations of a jaxpr in order, with calls that contain matrix products inlined."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any]):
        self.steps: list[TracedEquation] = []
        self.avals: list[Any] = []  # shape and dtype of every value, by its number
        self.literals: dict[int, Any] = {}
        self.consts: dict[int, Any] = {}  # arrays that the function closed over
        self.unknown_layout: set[int] = set()  # constants of unknown layout, such as a batch
        self.inputs: list[int] = [self.add_value(v.aval) for v in jaxpr.invars]
        self.outputs: list[int] = self._add_equations(jaxpr, consts, self.inputs)

    def add_value(self, aval: Any) -> int:
        """Adds a value and returns its number."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def bytes(self, *values: int) -> int:
        """Returns the total size of these values, unsharded."""
        return sum(self.avals[i].size * self.avals[i].dtype.itemsize for i in values)

    def computed_from(self, values: Iterable[int]) -> set[int]:
        """Returns these values and all values that depend on them."""
        found = set(values)
        for step in self.steps:
            if not found.isdisjoint(step.ins):
                found.update(step.outs)
        return found

    def _add_equations(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(v: Any) -> int:
            if not isinstance(v, core.Literal):
                return known[v]
            i = self.add_value(v.aval)
            self.literals[i] = v.val
            return i

        for v, const in zip(jaxpr.constvars, consts, strict=True):
            i = known[v] = self.add_value(v.aval)
            self.consts[i] = const
            if v.aval.size > 1 and isinstance(const, jax_core.Tracer):
                self.unknown_layout.add(i)
        for eqn in jaxpr.eqns:
            ins, body = [read(v) for v in eqn.invars], called(eqn)
            has_product = any(inner.primitive.name in PRODUCTS for inner in with_inner(eqn))
            if body and has_product:
                outs = self._add_equations(*body, ins)
            else:
                outs = [self.add_value(v.aval) for v in eqn.outvars]
                can_be_mapped = not any(
                    inner.effects or inner.primitive.name in _LAYOUT_PRIMITIVES
                    for inner in with_inner(eqn)
                )
                self.steps.append(TracedEquation(eqn, ins, outs, can_be_mapped, has_product))
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]
