"""The evaluator of jaxprs, and the forward pass over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from gshard._util.jaxpr import bind, evaluate
from gshard._util.jaxpr_dataflow import flow, flow_inside

X = jnp.arange(3.0)


def test_evaluate_gives_what_the_function_gives():
    closed = jax.make_jaxpr(lambda x: (jax.jit(jnp.sin)(x) + X, 2.0))(X)
    found = evaluate(closed.jaxpr, closed.consts, [X])
    assert found[0].tolist() == (jnp.sin(X) + X).tolist() and float(found[1]) == 2


def test_evaluate_lets_a_handler_replace_equations():
    def handler(eqn, values):
        return [values[0] * 10] if eqn.primitive.name == "sin" else bind(eqn, values)

    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(X)
    assert evaluate(closed.jaxpr, closed.consts, [X], handler)[0].tolist() == [1, 11, 21]


def test_a_backward_pass_of_the_users_may_index_a_constant():
    """JAX gives it arrays of its own, which a traced index is allowed for."""

    @jax.custom_vjp
    def by_times(x, times):
        return x * times.sum()

    def backward(times, cotangent):
        total = jax.lax.fori_loop(0, len(times), lambda i, c: c + times[i], 0.0)
        return cotangent * total, jnp.zeros_like(times)

    by_times.defvjp(lambda x, times: (by_times(x, times), times), backward)
    closed = jax.make_jaxpr(lambda x: by_times(x, jnp.array([0.0, 0.5])))(X)
    found = jax.grad(lambda x: evaluate(closed.jaxpr, closed.consts, [x])[0].sum())(X)
    assert found.tolist() == [0.5, 0.5, 0.5]


def inputs_of(jaxpr, values):
    """The inputs that each result is computed from."""

    def transfer(eqn, values):
        outs = flow_inside(eqn, values, inputs_of, frozenset().union)
        return outs or [frozenset().union(*values)] * len(eqn.outvars)

    return flow(jaxpr, values, transfer, frozenset())


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x, y, z: (x + y, 1.0), [{0, 1}, set()]),
        (lambda x, y, z: jax.jit(lambda a, b: (b, a))(x, z), [{2}, {0}]),
        (lambda x, y, z: jax.lax.cond(True, lambda: x, lambda: y), [{0, 1}]),
        # The stacked output has the first carry of every iteration.
        (
            lambda x, y, z: jax.lax.scan(
                lambda c, _: ((c[1], c[2], c[2]), c[0]), (x, y, z), None, 4
            ),
            [{1, 2}, {2}, {2}, {0, 1, 2}],
        ),
        (
            lambda x, y, z: jax.lax.fori_loop(0, 4, lambda i, c: (c[1], c[0] * z), (x, y)),
            [{0, 1, 2}, {0, 1, 2}],
        ),
    ],
)
def test_flow_follows_calls_branches_and_loops(fun, expected):
    jaxpr = jax.make_jaxpr(fun)(X, X, X).jaxpr
    found = inputs_of(jaxpr, [frozenset({i}) for i in range(3)])
    assert [set(x) for x in found if x is not None][-len(expected) :] == expected
