"""Equations that repeat are differentiated once, and give the numbers of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from gshard._util import repeated
from gshard._util.jaxpr import JIT, evaluate
from gshard._util.repeated import RepeatedEquations


def run(fun: Callable[..., Any], *args: Any) -> Any:
    """Evaluates the trace of a function of which each equation may repeat."""
    closed = jax.make_jaxpr(fun)(*args)
    bind = RepeatedEquations(closed.jaxpr, closed.jaxpr.invars).bind
    return evaluate(closed.jaxpr, closed.consts, args, bind)[0]


def test_a_rule_is_applied_once() -> None:
    calls: list[int] = []
    twice = Primitive("twice_in_test")
    twice.def_abstract_eval(lambda x: x)

    def rule(primals: Any, tangents: Any) -> Any:
        calls.append(1)
        return twice.bind(*primals), 2.0 * tangents[0]

    ad.primitive_jvps[twice] = rule

    def fun(x: jax.Array) -> jax.Array:
        for _ in range(repeated.LEAST):
            x = twice.bind(x)
        return x.sum()

    found = jax.make_jaxpr(jax.grad(lambda x: run(fun, x)))(jnp.ones(3))
    assert len(calls) == 1
    # nothing of the calls is left in the trace
    assert JIT not in {eqn.primitive.name for eqn in found.jaxpr.eqns}


def test_parameters_that_are_equal_but_differ_are_told_apart() -> None:
    scaled = Primitive("scaled_in_test")
    scaled.def_abstract_eval(lambda x, by: x)
    mlir.register_lowering(scaled, mlir.lower_fun(lambda x, by: x, multiple_results=False))

    def rule(primals: Any, tangents: Any, by: Any) -> Any:
        return scaled.bind(*primals, by=by), tangents[0] * np.ravel(by)[-1]

    ad.primitive_jvps[scaled] = rule
    for by in (0.0, -0.0, ((1, 0.0),), ((1, -0.0),)):

        def fun(x: jax.Array, by: Any = by) -> jax.Array:
            return [scaled.bind(x, by=by) for _ in range(repeated.LEAST)][0]

        _, tangent = jax.jvp(lambda x, fun=fun: run(fun, x), (jnp.ones(()),), (jnp.ones(()),))
        assert np.signbit(tangent) == np.signbit(np.ravel(by)[-1])


def test_constants_that_are_equal_but_differ_are_told_apart() -> None:
    def fun(x: jax.Array) -> jax.Array:
        parts: list[jax.Array] = []
        for _ in range(repeated.LEAST):
            parts += [x * 0.0, x * -0.0, x * jnp.nan, x * jnp.float32(2), x * 3.0]
        return jnp.stack([1 / part for part in parts])

    x = jnp.arange(1.0, 4.0)
    np.testing.assert_array_equal(run(fun, x), fun(x))
    pulled = [jax.jacrev(f)(x) for f in (fun, lambda x: run(fun, x))]
    np.testing.assert_array_equal(*pulled)


def test_parameters_and_shapes_are_told_apart() -> None:
    def fun(x: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for _ in range(repeated.LEAST):
            for axis in (0, 1):
                total += jnp.tanh(jnp.sum(jnp.sort(x, axis=axis) ** 2, axis=axis)[0])
            total += jnp.sum(x[:2] ** 3) + jnp.sum(x.astype(jnp.bfloat16) ** 3).astype(x.dtype)
        return total

    x = jnp.sin(jnp.arange(12.0)).reshape(3, 4)
    for value, expected in zip(
        jax.value_and_grad(lambda x: run(fun, x))(x), jax.value_and_grad(fun)(x), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
