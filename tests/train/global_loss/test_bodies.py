"""Loops, branches, rematerialization and own derivatives, for every way to hold the operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from gshard import GShardError
from tests.train.global_loss.placed import (
    AXIS,
    Case,
    Placed,
    check,
    check_free,
    integers,
    numbers,
    placements,
)

X, Y, W = numbers(12, 5), numbers(12, 5, seed=1), numbers(5, 5, seed=2)
STEPS = numbers(3, 12, 5)


def recurrent(h, xs, w):
    """The carry is a batch."""

    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h.sum(1)

    return lax.scan(step, h, xs)


def from_zeros(xs, w):
    """The carry starts replicated: one becomes sharded, one a partial sum, one stays."""

    def step(carry, x):
        h, total, n = carry
        h = jnp.tanh(h @ w + x)
        return (h, total + h.sum(), n + 1), total * 2

    return lax.scan(step, (jnp.zeros((12, 5)), 0.0, 0), xs)


def normalized(xs):
    """A carry that is a partial sum after one iteration, and is squared in the next."""

    def step(total, x):
        return total + x.sum() / (1.0 + total**2), None

    return lax.scan(step, 0.5, xs)[0]


def swapped(x, y):
    """Carries that change their places: one placement for both, in the end."""

    def step(carry, _):
        a, b = carry
        return (b * 1.5, a + 1.0), None

    return lax.scan(step, (x, y), None, length=3)[0]


def transposed(x):
    """The carry is sharded on another dimension after every iteration."""
    return lax.scan(lambda c, _: (jnp.sin(c.T), None), x, None, length=3)[0]


def turned(x):
    """The carry would be sharded on one dimension and on the other, in turn."""
    return lax.scan(lambda c, _: (jnp.sin(c.T) + x, None), jnp.zeros((12, 12)), None, length=3)[0]


def per_example(x, w):
    return lax.map(lambda row: jnp.tanh(row @ w).sum() * row, x)


def per_example_reversed(x, y):
    return lax.scan(lambda _, xy: (None, xy[0] * xy[1]), None, (x, y), reverse=True)[1]


def running(x):
    """Examples one after the other: the carry needs all."""
    return lax.scan(lambda c, row: (c * 0.5 + row, c.sum()), jnp.zeros(5), x)


def repeated(x):
    return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * (i + 1.0), x)


def until(x):
    """How often depends on all examples."""

    def small(c):
        return c[0].sum() < 90.0

    return lax.while_loop(small, lambda c: (c[0] * 1.3, c[1] + 1, c[2] + c[0].mean()), (x, 0, 0.0))


def branches(p, x, y):
    """One result sharded or not, one a partial sum or not."""

    def one(x, y):
        return x * 2, x.sum(0), x.sum(), y.T

    def other(x, y):
        return jnp.ones((12, 5)), jnp.ones(5), 3.0, x.T * y.T

    return lax.cond(p > 0, one, other, x, y)


def switched(p, x):
    return lax.switch(p, [jnp.sin, lambda x: x.T.T * x.mean(), lambda x: x * 0 + 1], x)


def on_the_batch(x):
    """A predicate of all examples."""
    return lax.cond(x.mean() > 0.2, lambda x: x.mean() * x, lambda x: x, x)


def running_sum(x):
    """Of examples, from Python numbers."""
    step = lambda c, row: ((c[0] + jnp.sin(row).sum(), c[1] + 2), None)  # noqa: E731
    return lax.scan(step, (0.0, 1), x)[0]


def by_platform(x):
    """A branch for another platform, which cannot be compiled for this one."""

    def elsewhere(x):
        block = pl.pallas_call(
            lambda x, out: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
        )
        return block(x)

    @jax.custom_jvp
    def twice(x):
        return lax.platform_dependent(x, cpu=lambda x: x * 2, default=elsewhere)

    twice.defjvp(lambda x, dx: (twice(*x), 2 * dx[0]))
    return twice(x)


def remat(x, w):
    f = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), (x @ w).sum(0), w * 2))
    return f(jnp.sin(x), w)


def nested(xs, w):
    """A loop around rematerialization, a branch and a loop."""

    @jax.checkpoint
    def block(h, x):
        h = lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ w + x), h)
        return lax.cond(h.sum() > 0, lambda h: h - h.mean(0), lambda h: h, h)

    return lax.scan(lambda h, x: (block(h, x), h.sum()), jnp.zeros((12, 5)), xs)


@jax.custom_jvp
def centered(x, n):
    return x - x.mean(0) * n


@centered.defjvp
def _(primals, tangents):
    (x, n), (dx, _) = primals, tangents
    return centered(x, n), 2.0 * dx + x.max() * dx.mean(0) * jnp.arange(12.0)[:, None]


@jax.custom_vjp
def product(x, w):
    return x @ w, jnp.sum(x)


def _forward(x, w):
    return product(x, w), (x, w, jnp.arange(12.0)[:, None] * x)


def _backward(saved, cotangents):
    """Not the derivative: one that looks at the whole batch, and at positions."""
    x, w, weighted = saved
    y, total = cotangents
    mean = y.mean(0)
    return y @ w.T + mean @ w.T + total * jnp.arange(12.0)[:, None], weighted.T @ y * x.max()


product.defvjp(_forward, _backward)


@jax.custom_vjp
def scaled(x, at):
    return x * at[:, None]


scaled.defvjp(
    lambda x, at: (scaled(x, at), at),
    lambda at, c: (c * at.sum() + c.sum(0), np.zeros(at.shape, jax.dtypes.float0)),
)


TABLE = jnp.linspace(0.5, 2.0, 5)


@jax.custom_vjp
def by_table(x):
    """Closes over an array, which JAX makes an operand, and has no derivative by it."""
    return x * TABLE


by_table.defvjp(lambda x: (x * TABLE, None), lambda _, c: (c * TABLE + c.mean(0),))


@jax.custom_vjp
def tabled(x):
    """The same for one example, under `jax.vmap`."""
    return x * TABLE


tabled.defvjp(lambda x: (x * TABLE, None), lambda _, c: (c * TABLE,))


def in_a_loop(xs, w):
    """Own derivatives inside a loop and rematerialization."""
    step = jax.checkpoint(lambda h, x: centered(product(h + x, w)[0], 1))
    return lax.scan(lambda h, x: (step(h, x), None), jnp.zeros((12, 5)), xs)[0]


SCALAR = integers(low=1, high=2)
CASES = [
    Case("recurrent", recurrent, [X, STEPS, W], "0 1 R > 0 1; R 1 R > 0 1; 0.2 R R > 0.2 1.2"),
    Case("from zeros", from_zeros, [STEPS, W], "1 R > 0 P R P; 1.2 R > 0.2 P R P"),
    Case("normalized", normalized, [STEPS]),
    Case("swapped", swapped, [X, Y], "0 0 > 0; 0 R > 0"),
    Case("transposed", transposed, [numbers(12, 12)]),
    Case("turned", turned, [numbers(12, 12)]),
    Case("per example", per_example, [X, W], "0 R > 0"),
    Case("per example, reversed", per_example_reversed, [X, Y], "0 0 > 0; R 0 > 0"),
    Case("running", running, [X]),
    Case("repeated", repeated, [X], "0 > 0; 0.2 > 0.2"),
    Case("until", until, [X], grads=False),
    Case("branches", branches, [SCALAR, X, Y], "R 0 0 > 0 P P 1; R 0 R > 0 P P 1"),
    Case("the other branch", branches, [SCALAR - 1, X, Y], "R 0 0 > 0 P P 1"),
    Case("switched", switched, [SCALAR, X]),
    Case("on the batch", on_the_batch, [X]),
    Case("by platform", by_platform, [X]),
    Case("running sum", running_sum, [X], "0 > P P"),
    Case("remat", remat, [X, W], "0 R > 0 P R; 0.2 R > 0.2 P R"),
    Case("nested", nested, [STEPS, W]),
    Case("custom_jvp", lambda x: centered(x, 1.0), [X]),
    # JAX's vmap, not shard_map, adds up cotangents of what no part has for itself: no partial sums
    Case("custom_vjp", product, [X, W], "0 R > 0 P", partial=False),
    Case("custom_vjp that closes over a table", by_table, [X], partial=False),
    Case("custom_vjp under vmap of jit", jax.vmap(jax.jit(tabled)), [X], "0 > 0", partial=False),
    Case(
        "custom_vjp under vmap of checkpoint",
        jax.vmap(jax.checkpoint(tabled)),
        [X],
        "0 > 0",
        partial=False,
    ),
    Case(
        "custom_vjp of integers",
        scaled,
        [X, integers(12)],
        "0 0 > 0; 0 R > 0; 0.2 R > 0.2",
        partial=False,
        most=3,
    ),
    Case("own derivatives in a loop", in_a_loop, [STEPS, W]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_are_those_of_the_function(case):
    check(case.f, case.args, case.ways(3, most=4), 3, case.like, case.grads)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_however_the_operands_are_held(case):
    check(case.f, case.args, case.ways(3), 3, case.like, case.grads)


@pytest.mark.parametrize("case", [case for case in CASES if case.free], ids=str)
def test_no_collective_is_needed(case):
    check_free(case)


def test_collectives_of_a_loop_count_as_often_as_it_runs():
    placed = Placed(normalized, [STEPS], 3)
    placed.held([STEPS], placements("1"))
    assert {(x.kind, x.times) for x in placed.transfers} == {("sum", 3)}


# ---- collectives of the loss itself ---------------------------------------------------------


def own(f):
    """Traces `f` with the axis, as a step does."""
    placed = Placed.__new__(Placed)
    placed.closed = jax.make_jaxpr(f, axis_env=[(AXIS, 3)])(X)
    placed.parts = 3
    return placed


REFUSED = {
    "psum": lambda x: lax.psum(x, AXIS),
    "index": lambda x: x * lax.axis_index(AXIS),
    "permutation": lambda x: lax.ppermute(x.sum(), AXIS, [(0, 1), (1, 2), (2, 0)]),
    "index in a loop of nothing": lambda x: (
        x * lax.fori_loop(0, 3, lambda i, c: c + lax.axis_index(AXIS), 0)
    ),
    "psum in a loop over examples": lambda x: lax.map(lambda row: lax.psum(row, AXIS), x),
    "index in a loop over examples": lambda x: lax.map(lambda row: row * lax.axis_index(AXIS), x),
    "psum in a loop": lambda x: lax.scan(lambda c, _: (lax.psum(c, AXIS), None), x, None, 2)[0],
    "psum in a branch": lambda x: lax.cond(
        x.sum() > 0, lambda x: lax.psum(x, AXIS), lambda x: x, x
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_collective_of_examples_is_refused(name):
    placed = own(REFUSED[name])
    with pytest.raises(GShardError, match=r"at .*test_bodies.py:\d+ runs over"):
        placed.held([X], placements("0"))


def test_a_collective_of_sums_is_as_written():
    placed = own(lambda x: lax.pmean(x.mean(), AXIS))
    out = jax.vmap(lambda *xs: placed.part(placements("0"), [None], *xs)[1], axis_name=AXIS)(
        X.reshape(3, 4, 5)
    )
    np.testing.assert_allclose(out[0], np.full(3, X.mean()), rtol=1e-6)
