"""The text of a traced program: the same for the same program, another for another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard._util.jaxpr_text import lines_of, plain

X = np.arange(6.0, dtype=np.float32)


def text(fun, *args):
    return [line.text for line in lines_of(jax.make_jaxpr(fun)(*(args or (X,))))]


def with_callback(x):
    return jax.pure_callback(lambda x: np.sin(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def custom(x):
    return x * 2


custom.defvjp(lambda x: (x * 2, x), lambda x, g: (g * x,))

FUNCTIONS = {
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + y, jnp.sin(c)), 0.0, x),
    "cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "remat": jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x).sum())(x)),
    "custom": jax.grad(lambda x: custom(x).sum()),
    "callback": with_callback,
    "constants": lambda x: x * jnp.asarray(X + 1) + jax.random.normal(jax.random.key(3), (6,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_in_a_text_is_of_this_process(name):
    lines = text(FUNCTIONS[name])
    jax.clear_caches()  # inner jaxprs are other objects, traced again
    assert text(FUNCTIONS[name]) == lines
    assert not any("0x" in line or "function" in line.replace("function,", "") for line in lines)


def test_equal_inner_programs_need_not_be_one_object():
    def inner(x):
        return jnp.sin(x) * 2

    one, other, third = (jax.jit(lambda x: inner(x)) for _ in range(3))
    assert text(lambda x: one(x) + one(x)) == text(lambda x: other(x) + third(x))
    assert text(lambda x: one(x) + one(x)) != text(lambda x: one(x) + jax.jit(jnp.cos)(x))


DIFFERENT = {
    "a literal": (lambda x: x * 2, lambda x: x * 3),
    "a constant": (lambda x: x * jnp.asarray(X), lambda x: x * jnp.asarray(X + 1)),
    "a numpy constant": (lambda x: x * X, lambda x: x * X[::-1]),
    "a parameter": (lambda x: x.sum(keepdims=True), lambda x: x.sum()),
    "an inner literal": (
        lambda x: jax.lax.scan(lambda c, y: (c + y, 1.0), 0.0, x),
        lambda x: jax.lax.scan(lambda c, y: (c + y, 2.0), 0.0, x),
    ),
    "an argument": (lambda x, y: x - y, lambda x, y: y - x),
    "an output": (lambda x, y: (x, y), lambda x, y: (y, x)),
    "an effect": (
        lambda x: x,
        lambda x: (jax.experimental.io_callback(print, None, x), x)[1],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_program_has_another_text(name):
    one, other = DIFFERENT[name]
    args = (X, X) if name in ("an argument", "an output") else (X,)
    assert text(one, *args) != text(other, *args)


def test_what_is_only_printed_does_not_count():
    def prints(x):
        jax.debug.print("{y}", y=jnp.sin(x).sum())
        return x * 2

    assert text(prints) == text(lambda x: x * 2)

    def prints_inside(x):
        jax.jit(lambda y: jax.debug.print("{y}", y=y))(x)
        jax.lax.cond(x.sum() > 0, lambda y: jax.debug.print("{y}", y=y), lambda y: None, x)
        return x * 2

    assert text(prints_inside) == text(lambda x: x * 2)


def test_sets_have_an_order():
    assert plain({"b", "a", "c"}) == plain({"c", "b", "a"}) == "{a, b, c}"
    assert plain("<function f at 0x7f00>") == "<function f>"
