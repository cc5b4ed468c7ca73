"""Slices, gathers and scatters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.train.global_loss.placed import Case, integers, numbers

X = numbers(12, 5)
TABLE = numbers(7, 5)
ROWS = integers(12, high=7)
COLUMNS = integers(12, high=5)


def update(kind):
    return lambda x, at, y: getattr(x.at[at], kind)(y)


def per_example(kind):
    """Every example into itself: a batching dimension."""
    return lambda x, at, y: jax.vmap(lambda x, i, y: getattr(x.at[i], kind)(y))(x, at, y)


def into_own_rows(x, at, y):
    rows = jnp.arange(12)
    return (
        x.at[rows, at].add(y),
        x.at[rows, at].set(y),
        x.T.at[at, rows].multiply(y, unique_indices=True).T,
    )


def windows_of_rows(x, at, y):
    """From row i on, over the border of a device."""
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    both = jnp.concatenate([jnp.arange(12)[:, None], at[:, None]], 1)
    return lax.scatter_add(x, both, y, numbers, mode="clip")


def whole_window(x, at, y):
    return [x.at[:, at].set(y), x.at[:, at].multiply(y), x.at[:, at].add(y)]


def inner_batch(x, at):
    """The batching dimension is not the first one of the operand or of the indices."""
    return jax.vmap(lambda x, i: x[i], (1, 1), 1)(x, at)


def batch_of_the_indices(x, at):
    """The batch is dimension 1 of the operand, and dimension 0 of the indices."""
    numbers = lax.GatherDimensionNumbers((), (0,), (0,), (1,), (0,))
    return lax.gather(x, at[..., None], numbers, (1, 1))


def partial_window(x, y):
    """A window of 6 of 12 columns."""
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    at = jnp.zeros((1, 1), jnp.int32)
    return lax.scatter_add(x, at, y, numbers)


def two_columns(table, at):
    return table[at[:, 0], at[:, 1]]


def slices(x):
    return [x[:6], x[6:], x[3:6], x[::2], x[1:], x[:, 1:4:2]]


def slices_of_blocks(x):
    """Halves of two blocks."""
    both = jnp.concatenate([x, x * 2], 0)
    return both[:12], both[12:]


def embedding_gradient(table, at, y):
    return jax.grad(lambda t: jnp.sum(t[at] * y))(table)


CASES = [
    Case("slices", slices, [X]),
    Case("slice: another", lambda x: x[:, 1:4:2], [X], "0 > 0; 0.2 > 0.2; P > P"),
    Case("slice: a block", lambda x: x[6:], [X], "0.2 > 0; P > P"),
    Case("slice: two of four blocks", lambda x: jnp.concatenate([x, x])[6:18], [X], "0.2 > 0.2"),
    Case("slices of blocks", slices_of_blocks, [X], "0 > 0; 0.2 > 0.2"),
    Case(
        "dynamic slice",
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, 1),
        [X, integers()],
        "0 R > 0; 0.2 R > 0.2",
    ),
    Case(
        "dynamic slice: examples",
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 6, 0),
        [X, integers()],
    ),
    Case(
        "dynamic update",
        lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 1),
        [X, numbers(12, 2), integers()],
        "0 0 R > 0; 0.2 R R > 0.2; R 0 R > 0",
    ),
    Case(
        "dynamic update: examples",
        lambda x, y, i: lax.dynamic_update_slice_in_dim(x, y, i, 0),
        [X, numbers(6, 5), integers()],
    ),
    Case("lookup", lambda x, at: x[at], [TABLE, ROWS], "R 0 > 0; R 0.2 > 0.2"),
    Case(
        "lookup of rows and columns",
        lambda x, at: x[:, at],
        [X, integers(6, high=5)],
        "0 R > 0; R 0 > 1; R 0.2 > 1.2; 0.2 R > 0.2",
    ),
    Case(
        "lookup: many",
        lambda x, at: x[at],
        [TABLE, integers(4, 12, high=7)],
        "R 1 > 1; R 1.2 > 1.2",
    ),
    Case("lookup: two columns", two_columns, [TABLE, integers(12, 2, high=5)], "R 0 > 0"),
    Case(
        "lookup: columns of the indices",
        lambda x, at: x[at[0], at[1]],
        [TABLE, integers(2, 12, high=5)],
        "R 1 > 0",
    ),
    Case(
        "lookup: the words of an index",
        lambda x, at: lax.gather(
            x, at, lax.GatherDimensionNumbers((), (0, 1, 2), (0, 1, 2)), (1, 1, 1)
        ),
        [numbers(2, 2, 2), integers(5, 3, high=2)],
    ),
    Case(
        "lookup: out of bounds",
        lambda x, at: [x[at - 3], x.at[at].get(mode="fill", fill_value=2.0)],
        [numbers(5, 3), integers(12)],
        "R 0 > 0",
    ),
    Case(
        "windows of examples",
        lambda x, at: jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, 6))(at),
        [X, integers(3, high=6)],
        "R 0 > 0",
    ),
    Case(
        "take along",
        lambda x, at: jnp.take_along_axis(x, at[:, None], 1),
        [X, COLUMNS],
        "0 0 > 0; 0 R > 0; R 0 > 0; 0.2 0.2 > 0.2",
    ),
    Case(
        "take along: inner batch",
        inner_batch,
        [numbers(5, 12), integers(4, 12, high=5)],
        "1 1 > 1; 1.2 R > 1.2; R 1 > 1",
    ),
    Case(
        "gather: batch of the indices",
        batch_of_the_indices,
        [numbers(5, 12), integers(12, 12, high=5)],
        "1 0 > 0; 1.2 R > 0.2; R 0 > 0",
    ),
    Case("permuted examples", lambda x, at: x[at], [X, integers(12, high=12)], "R 0 > 0"),
    Case("one example", lambda x, at: x[at], [X, integers()]),
    Case(
        "scatter: each its own",
        per_example("set"),
        [X, COLUMNS, numbers(12)],
        "0 0 0 > 0; R 0 0 > 0; 0 R R > 0; 0.2 0.2 R > 0.2",
    ),
    Case(
        "scatter-mul: each its own", per_example("multiply"), [X, COLUMNS, numbers(12)], "0 0 0 > 0"
    ),
    Case(
        "scatter-sub: each its own", per_example("subtract"), [X, COLUMNS, numbers(12)], "0 0 0 > 0"
    ),
    Case(
        "scatter-max: each its own",
        per_example("max"),
        [X, COLUMNS, numbers(12)],
        "0 0 0 > 0",
        grads=False,
    ),
    Case(
        "scatter-min: each its own",
        per_example("min"),
        [X, COLUMNS, numbers(12)],
        "0 0 0 > 0",
        grads=False,
    ),
    Case(
        "scatter-add: each its own",
        per_example("add"),
        [X, COLUMNS, numbers(12)],
        "0 0 0 > 0; R 0 R > 0",
    ),
    Case(
        "scatter: into own rows",
        into_own_rows,
        [X, COLUMNS, numbers(12)],
        "0 0 0 > 0 0 0; 0 0 R > 0 0 0; R 0 0 > 0 0 0",
    ),
    Case(
        "scatter: windows of two rows",
        windows_of_rows,
        [numbers(12, 5), integers(12, high=4), numbers(12, 2, 1)],
    ),
    Case(
        "scatter: into the first rows",
        lambda x, at, y: x.at[jnp.arange(12), at].set(y),
        [numbers(15, 5), COLUMNS, numbers(12)],
    ),
    Case(
        "scatter: into rows in another order",
        lambda x, at, y: x.at[jnp.arange(12)[::-1], at].set(y),
        [X, COLUMNS, numbers(12)],
    ),
    Case(
        "scatter: whole in a window",
        whole_window,
        [X, integers(), numbers(12)],
        "0 R 0 > 0; 0.2 R R > 0.2; R R 0 > 0",
    ),
    Case("scatter: part of a window", partial_window, [numbers(3, 12), numbers(1, 6)]),
    Case(
        "scatter: many windows",
        lambda x, at, y: x.at[:, at].add(y),
        [X, integers(6, high=5), numbers(12, 6)],
        "0 R 0 > 0; R 0 R > P; R 0.2 1.2 > P; R R 1 > P",
    ),
    Case(
        "scatter-add",
        update("add"),
        [TABLE, ROWS, numbers(12, 5)],
        "R 0 0 > P; R 0 R > P; R R 0 > P; R 0.2 0.2 > P",
    ),
    Case(
        "scatter-add: many",
        update("add"),
        [TABLE, integers(4, 12, high=7), numbers(4, 12, 5)],
        "R 1 1 > P; R R 1.2 > P",
    ),
    Case("scatter-sub", update("subtract"), [TABLE, ROWS, numbers(12, 5)]),
    Case(
        "scatter: places that are shared", update("max"), [TABLE, ROWS, numbers(12, 5)], grads=False
    ),
    Case("scatter: examples", update("add"), [X, integers(4, high=12), numbers(4, 5)]),
    Case("embedding: gradient", embedding_gradient, [TABLE, ROWS, numbers(12, 5)], "R 0 0 > P"),
    Case("segments", lambda x, at: jax.ops.segment_sum(x, at, 7), [X, ROWS], "0 0 > P; 0 R > P"),
]
