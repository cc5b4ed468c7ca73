"""`x[jnp.arange(examples), y]`: local where the indices are known, and never a wrong number."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.train.global_loss.placed import Case, check, check_free, integers, numbers

X, Y = numbers(12, 5), integers(12, high=5)
SQUARE = numbers(12, 12)
OWN = "0 0 > 0; 0 R > 0; R 0 > 0"


ROWS = jnp.arange(12)
GRID = jnp.broadcast_to(ROWS[:, None], (12, 12))
MASK, NONE = jnp.tril(jnp.ones((12, 5), bool)), jnp.zeros((), bool)


def blocks(x, y):
    """The operand is in two blocks."""
    both = jnp.concatenate([x, x * 2])
    return both[jnp.arange(24), jnp.concatenate([y, y])]


CASES = [
    Case("own", lambda x, y: x[jnp.arange(12), y], [X, Y], OWN),
    Case("own, unsigned", lambda x, y: x[jnp.arange(12, dtype=jnp.uint32), y], [X, Y], OWN),
    Case(
        "own, of all columns",
        lambda x, y: x[jnp.arange(12)[:, None], y],
        [X, integers(12, 3, high=5)],
        OWN,
    ),
    Case(
        "own, in three dimensions",
        lambda x, y: x[jnp.arange(12), y, :2],
        [numbers(12, 5, 4), Y],
        OWN,
    ),
    Case(
        "own, in the second column",
        lambda x, y: x[y, jnp.arange(12)],
        [X.T, Y],
        "1 0 > 0; 1 R > 0; R 0 > 0",
    ),
    Case(
        "own, after a broadcast",
        lambda x, y: x[jnp.arange(12)[:, None].repeat(3, 1), y],
        [X, integers(12, 3, high=5)],
    ),
    Case("own, of NumPy", lambda x, y: x[np.arange(12), y], [X, Y], OWN),
    Case(
        "own, of NumPy, of all columns",
        lambda x, y: x[np.mgrid[:12, :3][0], y],
        [X, integers(12, 3, high=5)],
        OWN,
    ),
    Case(
        "own, of jnp.ogrid",
        lambda x, y: x[jnp.ogrid[:12, :1][0], y],
        [X, integers(12, 3, high=5)],
        OWN,
    ),
    Case(
        "own, after a reshape",
        lambda x, y: x[checkpoint_name(jnp.arange(12).reshape(-1, 1), "rows"), y],
        [X, integers(12, 3, high=5)],
        OWN,
    ),
    Case("own, of a closed-over array", lambda x, y: x[ROWS, y], [X, Y], OWN),
    Case(
        "transposed by a reshape",
        lambda x, y: x[lax.reshape(GRID, (12, 12), dimensions=(1, 0)), y],
        [X, integers(12, 12, high=5)],
    ),
    Case(
        "beside masks that the loss closes over",
        lambda x, y: jnp.where(MASK, x, 0)[jnp.where(NONE, y, 0), y] + jnp.where(NONE, x.sum(), 1),
        [X, Y],
    ),
    Case("own, both columns", lambda x, y: x[jnp.arange(12), jnp.arange(12)] + y, [SQUARE, Y]),
    Case("only the position", lambda x, y: x[jnp.arange(12)] * y[:, None], [X, numbers(12)]),
    Case("added", lambda x, y: x.at[jnp.arange(12), y].add(1.0), [X, Y]),
    Case("shifted by one", lambda x, y: x[jnp.arange(12) + 1, y], [X, Y]),
    Case("a multiple", lambda x, y: x[2 * jnp.arange(12), y], [X, Y]),
    Case("of NumPy, shifted", lambda x, y: x[(np.arange(12) + 1) % 12, y], [X, Y]),
    Case("of NumPy, half of them", lambda x, y: x[np.arange(6), y[:6]], [X, Y]),
    Case(
        "in two dimensions",
        lambda x, y: x[jnp.arange(12).reshape(6, 2), y.reshape(6, 2)],
        [X, Y],
    ),
    Case("shifted", lambda x, y: x[jnp.arange(12) - 1, y], [X, Y]),
    Case("backwards", lambda x, y: x[11 - jnp.arange(12), y], [X, Y]),
    Case("half of them", lambda x, y: x[jnp.arange(6), y[:6]], [X, Y]),
    Case("of fewer rows than indices", lambda x, y: x[jnp.arange(12) % 6, y], [numbers(6, 5), Y]),
    Case("out of bounds", lambda x, y: x[jnp.arange(12), y + 3], [numbers(6, 5), Y]),
    Case(
        "along the other dimension",
        lambda x, y: x[jnp.arange(12)[None, :], y],
        [SQUARE, integers(12, 12, high=12)],
    ),
    Case("in blocks", blocks, [X, Y]),
    Case("bytes", lambda x, y: x[jnp.arange(12, dtype=jnp.int8).astype(jnp.int32), y], [X, Y]),
    Case("chosen by the batch", lambda x, y: x[jnp.where(y > 2, jnp.arange(12), 0), y], [X, Y]),
    Case(
        "compared with another bound",
        lambda x, y: x[jnp.where(jnp.arange(12) < 5, jnp.arange(12), 3), y],
        [X, Y],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_are_those_of_the_function(case):
    check(case.f, case.args, case.ways(3, most=4), 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_however_the_operands_are_held(case):
    check(case.f, case.args, case.ways(3), 3)


@pytest.mark.parametrize("case", [case for case in CASES if case.free], ids=str)
def test_no_collective_is_needed(case):
    check_free(case)


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_a_dtype_that_cannot_hold_every_index(dtype):
    """Of 3072 examples the last ones wrap around in int8, and are rounded in float16."""
    y = integers(3072, high=2)
    x = np.arange(6144, dtype=np.float32).reshape(3072, 2) / 6144
    f = lambda x, y: x[jnp.arange(3072, dtype=dtype).astype(jnp.int32), y]  # noqa: E731
    check(f, [x, y], [c for c in Case("", f, [x, y], partial=False).ways(3)], 3)
