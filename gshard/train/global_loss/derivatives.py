"""Rules of functions with their own derivative: `jax.custom_jvp` and `jax.custom_vjp`.

The user's derivative is traced for the global batch and evaluated by the same rules. The cotangent
of a replicated value is a partial sum, since every device differentiates its share of the loss, and
that of a partial sum is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.jaxpr import bind, evaluate, opened
from gshard.train.global_loss.decide import placements_of
from gshard.train.global_loss.placement import PARTIAL, REPLICATED, Placement
from gshard.train.global_loss.registry import Decision, Given, rule


class _Differentiable:
    """The operands and results of a call that have a derivative."""

    def __init__(self, given: Given):
        self.eqn = given.eqn
        self.operands = [v.aval for v in given.eqn.invars]
        self.results = [v.aval for v in given.eqn.outvars]
        self.of_operands = [i for i, x in enumerate(self.operands) if _inexact(x)]
        self.of_results = [i for i, x in enumerate(self.results) if _inexact(x)]

    def called(self, operands: Sequence[Any]) -> Callable[..., Any]:
        """Returns the call as a function of the operands that have a derivative."""

        def call(*some: Any) -> Any:
            return list(bind(self.eqn, _replaced(operands, self.of_operands, some)))

        return call


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _replaced(values: Sequence[Any], at: Sequence[int], new: Sequence[Any]) -> list[Any]:
    out = list(values)
    for i, x in zip(at, new, strict=True):
        out[i] = x
    return out


def _chosen(values: Sequence[Any], at: Sequence[int]) -> list[Any]:
    return [values[i] for i in at]


def _abstract(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def _no_tangents(arrays: Sequence[Any]) -> list[Any]:
    return [np.zeros(jnp.shape(x), jax.dtypes.float0) for x in arrays]


@rule("custom_jvp_call")
def custom_jvp(given: Given) -> Decision:
    """The function and its derivative are both evaluated by the rules."""
    body, consts = opened(given.params["call_jaxpr"])
    places, evaluator = given.placements, given.evaluator
    outs, _ = placements_of(evaluator, body, places)
    call = _Differentiable(given)

    def rule_of_user(primals: Any, tangents: Any) -> Any:
        at = _chosen(primals, call.of_operands)
        out, d_out = jax.jvp(call.called(primals), at, tangents)
        return [*out, *_chosen(d_out, call.of_results)]

    def run(values: list[Any]) -> Any:
        @jax.custom_jvp
        def function(index: Any, *arrays: Any) -> Any:
            with evaluator.indexed(index, given.eqn):
                return evaluator.arrays(body, consts, places, arrays, outs)

        @function.defjvp
        def derivative(primals: Any, tangents: Any) -> Any:
            avals = _abstract(call.operands)
            closed = jax.make_jaxpr(rule_of_user)(avals, _chosen(avals, call.of_operands))
            given_at = [*places, *_chosen(places, call.of_operands)]
            found_at = [*outs, *_chosen(outs, call.of_results)]
            index, *primals = primals
            d_in = [jnp.asarray(x) for x in _chosen(tangents[1:], call.of_operands)]
            with evaluator.indexed(index, given.eqn):
                found = evaluator.arrays(
                    closed.jaxpr, closed.consts, given_at, [*primals, *d_in], found_at
                )
            out, d_out = found[: len(outs)], found[len(outs) :]
            return out, _replaced(_no_tangents(out), call.of_results, d_out)

        return function(given.partition.index, *values)

    return Decision(places, outs, run=run)


_CUSTOM = ("custom_jvp_call", "custom_vjp_call")


@rule("custom_vjp_call")
def custom_vjp(given: Given) -> Decision:
    """The function and its transposed derivative are both evaluated by the rules."""
    places, evaluator = given.placements, given.evaluator
    body, consts = opened(given.params["call_jaxpr"])
    call, trees = _Differentiable(given), list[Any]()
    count = len(call.results)
    statistics: list[bool] = []  # which residuals are

    def forward(*operands: Any) -> Any:
        at = _chosen(operands, call.of_operands)
        out, transposed = jax.vjp(call.called(operands), *at)
        residuals, tree = jax.tree.flatten(transposed)
        trees[:] = [tree]
        return [*out, *residuals]

    fwd = jax.make_jaxpr(forward)(*_abstract(call.operands))
    # Nothing differentiates the forward pass again, and it may call the function itself.
    fwd = jax.make_jaxpr(partial(_without_derivatives, fwd.jaxpr, fwd.consts))(
        *_abstract(call.operands)
    )
    found_at, _ = placements_of(evaluator, fwd.jaxpr, places)
    outs, kept = found_at[:count], found_at[count:]
    residuals = [v.aval for v in fwd.jaxpr.outvars[count:]]

    def backward(residuals: Any, cotangents: Any) -> Any:
        zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in call.results]
        transposed = jax.tree.unflatten(trees[0], residuals)
        return transposed(_replaced(zeros, call.of_results, cotangents))

    def run(values: list[Any]) -> Any:
        @jax.custom_vjp
        def function(index: Any, *arrays: Any) -> Any:
            with evaluator.indexed(index, given.eqn):
                return evaluator.arrays(body, consts, places, arrays, outs)

        def with_residuals(index: Any, *arrays: Any) -> Any:
            with evaluator.indexed(index, given.eqn):
                out = evaluator.arrays(fwd.jaxpr, fwd.consts, places, arrays, found_at)
            statistics[:] = evaluator.returned[count:]
            return out[:count], (index, out[count:])

        def transposed(saved: Any, cotangents: Any) -> Any:
            index, saved = saved
            back = jax.make_jaxpr(backward)(
                _abstract(residuals), _abstract(_chosen(call.results, call.of_results))
            )
            given_at = [*kept, *map(_of_cotangent, _chosen(outs, call.of_results))]
            arrays = [*saved, *_chosen(cotangents, call.of_results)]
            wanted = [*map(_of_cotangent, _chosen(places, call.of_operands))]
            with evaluator.indexed(index, given.eqn):
                found = evaluator.arrays(
                    back.jaxpr, back.consts, given_at, arrays, wanted, statistics
                )
            none = _no_tangents([index, *values])
            return tuple(_replaced(none, [i + 1 for i in call.of_operands], found))

        function.defvjp(with_residuals, transposed)
        return function(given.partition.index, *values)

    return Decision(places, outs, run=run)


def _without_derivatives(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates a jaxpr with functions of their own derivative as plain calls."""

    def run(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name not in _CUSTOM:
            return bind(eqn, values)
        body, inner = opened(eqn.params["call_jaxpr"])
        return _without_derivatives(body, inner, *values)

    return evaluate(jaxpr, consts, args, run)


def _of_cotangent(place: Placement) -> Placement:
    return {REPLICATED: PARTIAL, PARTIAL: REPLICATED}.get(place, place)
