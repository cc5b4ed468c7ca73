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
from gshard._util.jaxpr import JIT, Bindings, body_of, evaluate
from gshard._util.repeated import RepeatedEquations


def run(fun: Callable[..., Any], *args: Any) -> Any:
    """Evaluates the trace of a function of which each equation may repeat."""
    closed = jax.make_jaxpr(fun)(*args)
    bind = RepeatedEquations(closed.jaxpr, closed.jaxpr.invars).bind
    return evaluate(closed.jaxpr, closed.consts, args, bind)[0]


def in_runs(fun: Callable[..., Any], *args: Any, alone: tuple[str, ...] = ()) -> tuple[Any, int]:
    """Evaluates the trace of a function run by run; also returns how many runs are one call."""
    closed = jax.make_jaxpr(fun)(*args)
    jaxpr, calls = closed.jaxpr, 0
    known = RepeatedEquations(jaxpr, jaxpr.invars)
    env = Bindings([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args])
    for part in known.runs(lambda eqn: eqn.primitive.name in alone):
        if part.call is None:
            for eqn in part.eqns:
                env.run(eqn, known.bind)
        else:
            assert not {eqn.primitive.name for eqn in part.eqns} & {*alone}
            env.write(part.outputs, part.call(env.read(part.inputs)))
            calls += 1
    return env.read(jaxpr.outvars)[0], calls


def layers(x: jax.Array, w: jax.Array) -> jax.Array:
    """Equal layers, whose results are also used long after; the last one differs."""
    kept, one = [], jnp.ones(())
    for i in range(2 * repeated.LEAST):
        normal = (x - x.mean(-1, keepdims=True)) * 2.0 + one
        x = jnp.sin(normal) @ w + x * 0.5
        kept.append(x if i % 2 else normal)
    return jnp.stack([part.sum() for part in kept]).sum() + jnp.cos(x).sum()


def test_a_run_that_repeats_is_one_call_with_the_same_derivative() -> None:
    x, w = (jnp.sin(jnp.arange(n * 3.0)).reshape(n, 3) for n in (2, 3))
    found, calls = in_runs(layers, x, w)
    assert calls >= repeated.LEAST
    np.testing.assert_allclose(found, layers(x, w), rtol=1e-6)
    both = [jax.grad(f, (0, 1))(x, w) for f in (layers, lambda *xs: in_runs(layers, *xs)[0])]
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    traced = jax.make_jaxpr(jax.grad(lambda x: in_runs(layers, x, w)[0]))(x)
    bare = jax.make_jaxpr(jax.grad(lambda x: layers(x, w)))(x)
    assert len(traced.jaxpr.eqns) < len(bare.jaxpr.eqns)
    alone, fewer = in_runs(layers, x, w, alone=("dot_general", "sin"))
    assert 0 < fewer
    np.testing.assert_allclose(alone, found, rtol=1e-6)


def test_the_trace_of_a_program_does_not_depend_on_what_was_traced_before() -> None:
    def fun(x: jax.Array) -> jax.Array:
        for _ in range(repeated.LEAST - 1):
            x = jnp.sin(x)
        return x

    texts = {str(jax.make_jaxpr(lambda x: run(fun, x))(jnp.ones(41))) for _ in range(3)}
    assert len(texts) == 1, texts


def test_runs_keep_to_one_named_scope() -> None:
    def fun(x: jax.Array) -> jax.Array:
        for i in range(repeated.LEAST):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.sin(x) * 2.0 + 1.0
        return x

    jaxpr = jax.make_jaxpr(fun)(jnp.ones(3)).jaxpr
    runs = [*RepeatedEquations(jaxpr, jaxpr.invars).runs(lambda _: False)]
    assert len(runs) == repeated.LEAST and all(part.call for part in runs)
    for i, part in enumerate(runs):
        assert {str(eqn.source_info.name_stack) for eqn in part.eqns} == {f"layer_{i}"}


def test_runs_that_differ_in_what_is_used_or_wired_are_told_apart() -> None:
    def fun(x: jax.Array, y: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for i in range(2 * repeated.LEAST):
            with jax.named_scope(f"layer_{i}"):
                a, b = x * y, x + y
                c = a - b if i % 2 else b - a
            total += (jnp.exp(c) + (a if i % 3 else b)).sum()
        return total

    x, y = jnp.sin(jnp.arange(3.0)), jnp.cos(jnp.arange(3.0))
    found, calls = in_runs(fun, x, y)
    assert calls
    np.testing.assert_allclose(found, fun(x, y), rtol=1e-6)
    grads = [jax.grad(f)(x, y) for f in (fun, lambda x, y: in_runs(fun, x, y)[0])]
    np.testing.assert_allclose(*grads, rtol=1e-6)


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
    # each call is one equation, and all of one kind have one body
    bodies = [body_of(eqn)[0] for eqn in found.jaxpr.eqns if eqn.primitive.name == JIT]
    bodies = [body for body in bodies if body.eqns[0].primitive == twice]
    assert len(bodies) == repeated.LEAST and len(set(map(id, bodies))) == 1


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
