"""Where the keys of a traced loss come from: an argument of it, or nowhere that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core

from gshard._util.jaxpr import VIEWS, body_of, called, opened, scan_sizes

DEVICE = -1  # the number of the device, in place of the position of an input
_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator")


@dataclass(frozen=True)
class _Origin:
    """Of a value: positions of the inputs it is computed from, and the one that it is, if any."""

    inputs: frozenset[int] = frozenset()
    itself: int | None = None

    def join(self, other: _Origin) -> _Origin:
        itself = self.itself if self.itself == other.itself else None
        return _Origin(self.inputs | other.inputs, itself)


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
        """Shapes of the draws whose key is computed from none of these inputs."""
        return [shape for origin, shape in self.drawn if origin.isdisjoint(inputs)]


def draws_of(jaxpr: Any) -> Draws:
    """The draws of a jaxpr, those of its inner jaxprs too."""
    found = Draws()
    _follow(jaxpr, [_Origin(frozenset({i}), i) for i in range(len(jaxpr.invars))], found)
    return found


def _follow(jaxpr: Any, origins: Sequence[_Origin], found: Draws) -> list[_Origin]:
    """The origins of the results; adds to `found`."""
    env = dict(zip(jaxpr.invars, origins, strict=True))

    def read(v: Any) -> _Origin:
        return _Origin() if isinstance(v, core.Literal) else env.get(v, _Origin())

    for eqn in jaxpr.eqns:
        outs = _through(eqn, [read(v) for v in eqn.invars], found)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _through(eqn: Any, given: list[_Origin], found: Draws) -> list[_Origin]:
    name = eqn.primitive.name
    inner = called(eqn)
    if inner is not None:
        return _follow(inner[0], given, found)
    if name == "cond":
        branches = [_follow(opened(b)[0], given[1:], found) for b in eqn.params["branches"]]
        return [_joined(several) for several in zip(*branches, strict=True)]
    if name == "scan":
        fixed, carried, _ = scan_sizes(eqn)
        first, layers = given[:fixed], given[fixed + carried :]
        return _loop(body_of(eqn)[0], first, given[fixed : fixed + carried], layers, found)
    if name == "while":
        asked, fixed = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body = opened(eqn.params["body_jaxpr"])[0]
        return _loop(body, given[asked : asked + fixed], given[asked + fixed :], [], found)
    if name == "random_wrap" and given[0].itself is not None:
        found.raw.add(given[0].itself)
    inputs = frozenset().union(*(x.inputs for x in given))
    if name == "axis_index":
        inputs |= {DEVICE}
    if name in _DRAWS:
        found.drawn.append((inputs, eqn.outvars[0].aval.shape))
    itself = given[0].itself if name in VIEWS and len(given) == 1 else None
    return [_Origin(inputs, itself) for _ in eqn.outvars]


def _loop(
    body: Any,
    fixed: Sequence[_Origin],
    carry: Sequence[_Origin],
    layers: Sequence[_Origin],
    found: Draws,
) -> list[_Origin]:
    """Followed until what it carries has no more origins."""
    # One slice of a stack is not the stack.
    layers = [_Origin(x.inputs) for x in layers]
    carry = list(carry)
    while True:
        outs = _follow(body, [*fixed, *carry, *layers], Draws())
        joined = [x.join(out) for x, out in zip(carry, outs, strict=False)]
        if joined == carry:
            return _follow(body, [*fixed, *carry, *layers], found)
        carry = joined


def _joined(several: Sequence[_Origin]) -> _Origin:
    first, *rest = several
    for other in rest:
        first = first.join(other)
    return first
