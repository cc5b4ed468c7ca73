"""Finds which arrays of an optimizer state are not moments, or need all of their bits."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from gshard._util.jaxpr_dataflow import flow, flow_inside, inputs_used
from gshard._util.pytree import flatten
from gshard.sharding.precision import is_floating

_ROOTS = ("sqrt", "rsqrt", "pow", "log")  # not a number for negative operands
_SQUARES = ("square", "abs", "exp")


def no_moments(tx: optax.GradientTransformation, own: Any) -> dict[str, str]:
    """Says by path which arrays of an optimizer state are not moments, and why.

    Moments begin with constants, and each update changes them by gradients. Other arrays are

    * copies of the parameters (schedule-free optimizers, Prodigy, Lookahead), and means of them
      over the steps;
    * the last parameters and gradients, whose small differences L-BFGS needs;
    * moments of a centered RMSprop, which takes the square root of the second without the square of
      the first: rounding could make that negative.

    `own` are the abstract shards of the parameters that `tx` updates.
    """
    program, state = jax.make_jaxpr(tx.init, return_shape=True)(own)
    (paths, leaves, _), used = flatten(state), inputs_used(program.jaxpr)
    found = {
        path: "it begins with the parameter's values"
        for path, inputs in zip(paths, used, strict=True)
        if inputs
    }
    update, value = optax.with_extra_args_support(tx).update, jax.ShapeDtypeStruct((), jnp.float32)
    try:
        program = jax.make_jaxpr(lambda s, g, p, v: update(g, s, p, value=v))(
            state, own, own, value
        )
    except Exception:  # the user's own code, which may need what only a loop of one's own has
        return dict.fromkeys(paths, "its update needs arguments of your own loop") | found
    after = inputs_used(program.jaxpr)[-len(paths) or len(program.jaxpr.outvars) :]
    grads = range(len(paths), len(paths) + len(jax.tree.leaves(own)))
    for i, (path, inputs) in enumerate(zip(paths, after, strict=True)):
        if i not in inputs:
            found.setdefault(path, "each update replaces it")
        elif inputs.isdisjoint(grads):
            found.setdefault(path, "no gradient changes it")
    moments = {i for i, x in enumerate(leaves) if x.ndim and is_floating(x.dtype)}
    for i in _under_roots(program.jaxpr, moments):
        found.setdefault(paths[i], "the optimizer takes the root of a difference of it")
    return found


class _Uses(NamedTuple):
    """What a value is computed from, as positions of inputs."""

    all: Set[int] = frozenset()
    differences: Set[int] = frozenset()  # those in differences of several, which may be negative


def _under_roots(jaxpr: Any, moments: Set[int]) -> Set[int]:
    """The positions of the moments of which a root of a difference is taken."""
    found: set[int] = set()

    def follow(jaxpr: Any, inputs: Sequence[_Uses]) -> list[_Uses]:
        return flow(jaxpr, inputs, transfer, _Uses())

    def transfer(eqn: Any, given: list[_Uses]) -> list[_Uses]:
        if (outs := flow_inside(eqn, given, follow, _union)) is not None:
            return outs
        used, name = _union(*given), eqn.primitive.name
        if name in _ROOTS:
            found.update(given[0].differences)
        if name == "sub" and all(x.all for x in given) and given[0].all != given[1].all:
            used = _Uses(used.all, used.differences | used.all)
        elif _is_square(eqn):
            used = _Uses(used.all)
        return [used] * len(eqn.outvars)

    own = [frozenset({i} & moments) for i in range(len(jaxpr.invars))]
    follow(jaxpr, [_Uses(x) for x in own])
    return found


def _union(*values: _Uses) -> _Uses:
    return _Uses(*(frozenset().union(*sets) for sets in zip(*values, strict=True)))


def _is_square(eqn: Any) -> bool:
    """Whether the results of an equation are never negative."""
    name, given = eqn.primitive.name, eqn.invars
    if name in ("mul", "dot_general"):
        return isinstance(given[0], core.Var) and given[0] is given[1]
    return name in _SQUARES or (name == "integer_pow" and eqn.params["y"] % 2 == 0)
