"""Finds the inputs of a traced loss from which each of its random keys is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gshard._util.jaxpr import VIEWS
from gshard._util.jaxpr_dataflow import flow, flow_inside

DEVICE = -1  # stands for the index of the device, among the positions of inputs
_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator")


@dataclass(frozen=True)
class _Origin:
    """Positions of the inputs that a value is computed from, and of the one that it equals."""

    inputs: frozenset[int] = frozenset()
    itself: int | None = None


@dataclass
class Draws:
    """The random numbers of a traced loss.

    Attributes:
      raw: positions of inputs that are used as old-style keys, as they are.
      drawn: for each draw the positions of the inputs that its key is computed from, and its shape.
    """

    raw: set[int] = field(default_factory=set)
    drawn: list[tuple[frozenset[int], tuple[int, ...]]] = field(default_factory=list)

    def without(self, inputs: set[int]) -> list[tuple[int, ...]]:
        """Returns the shapes of the draws whose key is computed from none of these inputs."""
        return [shape for origin, shape in self.drawn if origin.isdisjoint(inputs)]


def draws_of(jaxpr: Any) -> Draws:
    """Returns the draws of a jaxpr, including those of its inner jaxprs."""
    found = Draws()
    inputs = [_Origin(frozenset({i}), i) for i in range(len(jaxpr.invars))]
    flow(jaxpr, inputs, partial(_through, found), _Origin())
    return found


def _through(found: Draws, eqn: Any, given: Sequence[_Origin]) -> list[_Origin]:
    """Returns the origins of an equation's results, and adds its draws to `found`."""
    name, inside = eqn.primitive.name, list[Draws]()

    def follow(jaxpr: Any, origins: Sequence[_Origin]) -> list[_Origin]:
        inside.append(Draws())
        return flow(jaxpr, origins, partial(_through, inside[-1]), _Origin())

    outs = flow_inside(eqn, given, follow, _joined, slice_of=lambda x: _Origin(x.inputs))
    if outs is not None:
        # A loop is followed several times; the last pass counts.
        for draws in inside if name == "cond" else inside[-1:]:
            found.raw |= draws.raw
            found.drawn += draws.drawn
        return outs
    if name == "random_wrap" and given[0].itself is not None:
        found.raw.add(given[0].itself)
    inputs = frozenset().union(*(x.inputs for x in given))
    if name == "axis_index":
        inputs |= {DEVICE}
    if name in _DRAWS:
        found.drawn.append((inputs, eqn.outvars[0].aval.shape))
    itself = given[0].itself if name in VIEWS and len(given) == 1 else None
    return [_Origin(inputs, itself) for _ in eqn.outvars]


def _joined(*origins: _Origin) -> _Origin:
    same = len({x.itself for x in origins}) == 1
    inputs = frozenset().union(*(x.inputs for x in origins))
    return _Origin(inputs, origins[0].itself if same else None)
