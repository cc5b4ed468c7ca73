"""Contractions, convolutions, windows and decompositions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.train.global_loss.placed import Case, booleans, integers, numbers

X = numbers(12, 5)
MATRICES = numbers(12, 3, 3) / 4 + np.eye(3, dtype=np.float32)


def contracted(lhs, rhs, batch=((), ())):
    return lambda x, y: lax.dot_general(x, y, ((lhs, rhs), batch))


def dot_of_booleans(x, y):
    found = lax.dot(x, y)
    return found.T, lax.select_n(x[:, :5], found, ~found), found.astype(jnp.float32)


def convolution(spec=("NCW", "OIW", "NCW"), **options):
    return lambda x, y: lax.conv_general_dilated(
        x, y, (1,), "SAME", dimension_numbers=spec, **options
    )


def windows(shape, strides=(1, 1), padding="VALID", **options):
    def f(x):
        both = [(x, 0.0, lax.add), (x, -jnp.inf, lax.max), (x, jnp.inf, lax.min)]
        return [lax.reduce_window(*three, shape, strides, padding, **options) for three in both]

    return f


def own_window(x):
    def mixed(a, b):
        return a + b * 1.0

    return lax.reduce_window(lax.stop_gradient(x), 0.0, mixed, (1, 2), (1, 1), "VALID")


def pooled_gradient(x, y):
    """The trace of its derivative has select_and_scatter_add, and that of a jvp the gather."""
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")  # noqa: E731
    back = jax.vjp(pool, x)[1](y)[0]
    return back, jax.jvp(pool, (x,), (jnp.sin(x),))[1]


def decompositions(x):
    positive = x @ jnp.swapaxes(x, 1, 2) + jnp.eye(3)
    q, r = jnp.linalg.qr(x)
    lu, _, _ = lax.linalg.lu(x)
    return [lax.linalg.cholesky(positive), q, r, lu]


def spectra(x):
    symmetric = x + jnp.swapaxes(x, 1, 2)
    return [jnp.linalg.eigh(symmetric)[0], jnp.linalg.svd(x, compute_uv=False)]


def solve(x, y):
    return lax.linalg.triangular_solve(x, y, left_side=True, lower=True)


def solve_rows(x, y):
    return lax.linalg.triangular_solve(x, y, left_side=False, lower=True)


def householder(x):
    taus = lax.stop_gradient(x[:, :, :, 0])
    return lax.linalg.householder_product(lax.stop_gradient(x), taus)


CASES = [
    Case(
        "dot",
        lambda x, y: x @ y,
        [X, numbers(5, 12, seed=2)],
        "0 R > 0; R 1 > 1; R 1.2 > 1.2; P R > P; R P > P",
    ),
    Case(
        "dot: right first",
        contracted((1,), (1,)),
        [X, numbers(6, 5, seed=2)],
        "0 R > 0; R 0 > 1; R 0.2 > 1.2",
    ),
    Case(
        "dot: contracted",
        contracted((0,), (0,)),
        [X, numbers(12, 4)],
        "0 0 > P; 0 R > P; R 0.2 > P",
    ),
    Case(
        "dot: batch",
        contracted((3,), (2,), ((1, 0), (3, 0))),
        [numbers(2, 12, 6, 5), numbers(2, 4, 5, 12)],
        "1 3 > 0; 1 R > 0; R 3.2 > 0.2; 2 R > 2; 2.2 R > 2.2",
    ),
    Case(
        "dot: free of the right",
        contracted((2,), (0,), ((0,), (2,))),
        [numbers(2, 4, 5), numbers(5, 12, 2)],
        "R 1 > 2; R 1.2 > 2.2",
    ),
    Case(
        "dot of integers",
        lambda x, y: x @ y,
        [integers(5, 12), integers(12, 4)],
        "1 0 > P; P R > P",
    ),
    Case("dot of booleans", dot_of_booleans, [booleans(5, 12), booleans(12, 5, seed=1)], "R R > R"),
    Case(
        "convolution", convolution(), [numbers(12, 3, 8), numbers(4, 3, 3)], "0 R > 0; 0.2 R > 0.2"
    ),
    Case(
        "convolution: other order",
        convolution(("CWN", "WIO", "WNC")),
        [numbers(5, 8, 12), numbers(3, 5, 4)],
        "2 R > 1; 2.2 R > 1.2",
    ),
    Case(
        "convolution: features",
        convolution(),
        [numbers(5, 12, 8), numbers(4, 12, 3)],
        "1 1 > P; 1.2 1.2 > P",
    ),
    Case(
        "convolution: groups",
        convolution(feature_group_count=2),
        [numbers(5, 24, 8), numbers(4, 12, 3)],
    ),
    Case(
        "convolution: batch groups",
        convolution(batch_group_count=2),
        [numbers(12, 3, 8), numbers(4, 3, 3)],
    ),
    Case(
        "convolution: gradient",
        lambda x, y: jax.grad(lambda w: jnp.sum(convolution()(x, w) ** 2))(y),
        [numbers(12, 3, 8), numbers(4, 3, 3)],
        "0 R > P",
    ),
    Case("windows", windows((1, 2)), [X], "0 > 0; 0.2 > 0.2"),
    Case(
        "windows: stride and padding",
        windows((1, 2), (1, 2), ((0, 0), (1, 1))),
        [X],
        "0 > 0; 0.2 > 0.2",
    ),
    Case("windows: examples", windows((2, 1)), [X]),
    Case("windows: four examples", windows((4, 1)), [X]),
    Case("windows: strides", windows((1, 1), (2, 1)), [X]),
    Case("windows: padded", windows((1, 1), (1, 1), ((2, 1), (0, 0))), [X]),
    Case("windows: dilated", windows((1, 2), base_dilation=(2, 1)), [X], grads=False),
    Case("windows: any function", own_window, [X], "0 > 0"),
    Case(
        "windows: derivatives",
        pooled_gradient,
        [numbers(12, 6), numbers(12, 3)],
        "0 0 > 0; 0.2 0.2 > 0.2",
    ),
    Case("decompositions", decompositions, [MATRICES], "0 > 0; 0.2 > 0.2", like=2e-3),
    Case("spectra", spectra, [MATRICES], "0 > 0", like=2e-3),
    Case(
        "decompose one",
        lambda x: lax.linalg.cholesky(x @ x.T + jnp.eye(12)),
        [numbers(12, 12)],
        like=2e-3,
    ),
    Case("triangular solve", solve, [MATRICES, numbers(12, 3, 2)], "0 0 > 0; 0 R > 0", like=2e-3),
    Case("solve with columns", solve, [MATRICES[0], numbers(3, 12)], "R 1 > 1", like=2e-3),
    Case("solve with rows", solve_rows, [MATRICES[0], numbers(12, 3)], "R 0 > 0", like=2e-3),
    Case("householder", householder, [numbers(6, 3, 3, 3)], like=2e-3, grads=False),
    Case("fft", lambda x: abs(jnp.fft.fft(x)), [numbers(12, 4)], "0 > 0; 0.2 > 0.2"),
    Case("fft along examples", lambda x: abs(jnp.fft.fft(x, axis=0)), [numbers(12, 5)]),
]
