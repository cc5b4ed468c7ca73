"""Rules of functions with their own derivative: `jax.custom_jvp` and `jax.custom_vjp`.

The user's derivative is traced for the global batch and evaluated by the same rules. The cotangent
of a replicated value is a partial sum, since every device differentiates its share of the loss, and
that of a partial sum is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.custom_calls import CUSTOM, CustomCall, chosen, inputs_like, no_tangents, replaced
from gshard._util.jaxpr import bind, evaluate, opened
from gshard.sequence.view import full_sequences
from gshard.sharding.topology import SEQUENCE
from gshard.train.global_loss.decide import placements_of
from gshard.train.global_loss.messages import one_batch_error
from gshard.train.global_loss.placement import PARTIAL, REPLICATED, Placement
from gshard.train.global_loss.registry import Decision, Evaluator, Given, rule


@rule("custom_jvp_call")
def custom_jvp(given: Given) -> Decision:
    """The function and its derivative are both evaluated by the rules."""
    body, consts = opened(given.params["call_jaxpr"])
    places, evaluator = given.placements, given.evaluator
    outs, _ = placements_of(evaluator, body, places)
    call = CustomCall(given.eqn)

    def run(values: list[Any]) -> Any:
        @jax.custom_jvp
        def function(index: Any, *arrays: Any) -> Any:
            with evaluator.indexed(index, given.eqn):
                return evaluator.arrays(body, consts, places, arrays, outs)

        @function.defjvp
        def derivative(primals: Any, tangents: Any) -> Any:
            avals = inputs_like(call.operands)
            closed = _traced(evaluator, call.jvp, avals, chosen(avals, call.of_operands))
            given_at = [*places, *chosen(places, call.of_operands)]
            found_at = [*outs, *chosen(outs, call.of_results)]
            index, *primals = primals
            d_in = [jnp.asarray(x) for x in chosen(tangents[1:], call.of_operands)]
            with evaluator.indexed(index, given.eqn):
                found = evaluator.arrays(
                    closed.jaxpr, closed.consts, given_at, [*primals, *d_in], found_at
                )
            out, d_out = found[: len(outs)], found[len(outs) :]
            return out, replaced(no_tangents(out), call.of_results, d_out)

        return function(given.partition.index, *values)

    return Decision(places, outs, run=run)


@rule("custom_vjp_call")
def custom_vjp(given: Given) -> Decision:
    """The function and its transposed derivative are both evaluated by the rules."""
    places, evaluator = given.placements, given.evaluator
    body, consts = opened(given.params["call_jaxpr"])
    call, trees = CustomCall(given.eqn), list[Any]()
    count = len(call.results)
    statistics: list[bool] = []  # which residuals are

    def forward(*operands: Any) -> Any:
        out, transposed = call.vjp(*operands)
        residuals, tree = jax.tree.flatten(transposed)
        trees[:] = [tree]
        return [*out, *residuals]

    fwd = call.traced(lambda: _traced(evaluator, forward, *inputs_like(call.operands)))
    # Nothing differentiates the forward pass again, and it may call the function itself.
    fwd = jax.make_jaxpr(partial(_without_derivatives, fwd.jaxpr, fwd.consts))(
        *inputs_like(call.operands)
    )
    found_at, _ = placements_of(evaluator, fwd.jaxpr, places)
    outs, kept = found_at[:count], found_at[count:]
    residuals = [v.aval for v in fwd.jaxpr.outvars[count:]]

    def backward(residuals: Any, cotangents: Any) -> Any:
        return call.transposed(jax.tree.unflatten(trees[0], residuals), cotangents)

    def run(values: list[Any]) -> Any:
        @jax.custom_vjp
        def function(index: Any, *arrays: Any) -> Any:
            with evaluator.indexed(index, given.eqn, statistics=True):
                out = evaluator.arrays(body, consts, places, arrays, outs)
            if any(evaluator.returned):  # Flax drops its own here
                raise one_batch_error(evaluator, given.eqn)
            return out

        def with_residuals(index: Any, *arrays: Any) -> Any:
            with evaluator.indexed(index, given.eqn, statistics=True):
                out = evaluator.arrays(fwd.jaxpr, fwd.consts, places, arrays, found_at)
            statistics[:] = evaluator.returned[count:]
            return out[:count], (index, out[count:])

        def transposed(saved: Any, cotangents: Any) -> Any:
            index, saved = saved
            avals = inputs_like(residuals), inputs_like(chosen(call.results, call.of_results))
            back = _traced(evaluator, backward, *avals)
            given_at = [*kept, *map(_of_cotangent, chosen(outs, call.of_results))]
            arrays = [*saved, *chosen(cotangents, call.of_results)]
            wanted = [*map(_of_cotangent, chosen(places, call.of_operands))]
            with evaluator.indexed(index, given.eqn, statistics=True):
                found = evaluator.arrays(
                    back.jaxpr, back.consts, given_at, arrays, wanted, statistics
                )
            none = no_tangents([index, *values])
            return tuple(replaced(none, [i + 1 for i in call.of_operands], found))

        function.defvjp(with_residuals, transposed)
        return function(given.partition.index, *call.guarded(values))

    return Decision(places, outs, run=run)


def _traced(evaluator: Evaluator, derivative: Any, *args: Any) -> Any:
    """Traces a derivative as the loss itself: for full sequences, where those are sharded."""
    with nullcontext() if evaluator.of_examples else full_sequences(SEQUENCE):
        return jax.make_jaxpr(derivative)(*args)


def _without_derivatives(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates a jaxpr with functions of their own derivative as plain calls."""

    def run(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name not in CUSTOM:
            return bind(eqn, values)
        body, inner = opened(eqn.params["call_jaxpr"])
        return _without_derivatives(body, inner, *values)

    return evaluate(jaxpr, consts, args, run)


def _of_cotangent(place: Placement) -> Placement:
    return {REPLICATED: PARTIAL, PARTIAL: REPLICATED}.get(place, place)
