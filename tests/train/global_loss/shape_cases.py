"""Equations that reorder dimensions, reduce them, or work along them, and sums of partial sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.train.global_loss.placed import Case, booleans, integers, numbers

X, Y = numbers(12, 5), numbers(12, 5, seed=1)
WIDE, TALL = numbers(5, 12), numbers(12, 5)
CUBE = numbers(12, 3, 4)
TIES = np.round(numbers(12, 5) * 3)


def along(x):
    names = "cumsum cumprod cummax cummin cumlogsumexp".split()
    out = [getattr(lax, name)(x, axis=1) for name in names]
    return [
        *out,
        lax.rev(x, (1,)),
        lax.sort(x, dimension=1),
        *lax.top_k(x, 2),
        *lax.approx_max_k(x, 2),
    ]


def along_examples(x):
    return lax.cumsum(x), lax.rev(x, (0,)), lax.sort(x, dimension=0), lax.rev(x, (0, 1))


def reduced(axes):
    def f(x):
        i = jnp.floor(lax.stop_gradient(x * 9) + 0.5).astype(jnp.int32)
        out = [lax.reduce_sum(x, axes), lax.reduce_max(x, axes), lax.reduce_min(x, axes)]
        out += [lax.reduce_and(x > 0.5, axes), lax.reduce_or(x > 0.8, axes)]
        out += [lax.reduce_max(i, axes), lax.reduce_min(i, axes), lax.reduce_sum(i, axes)]
        return [*out, lax.reduce_max(x > 0.5, axes), lax.reduce_min(x > 0.5, axes)]

    return f


def reduced_in_no_short_way(axes):
    def f(x):
        i = jnp.floor(lax.stop_gradient(x * 9) + 0.5).astype(jnp.int32)
        b = i > 3
        found = [lax.argmax(x, axis, jnp.int32) for axis in axes]
        found += [lax.argmin(x, axis, jnp.int32) for axis in axes]
        bits = [lax.reduce_or(i, axes), lax.reduce_and(i, axes), lax.reduce_xor(b, axes)]
        return [*found, lax.reduce_prod(x, axes), lax.reduce_xor(i, axes), *bits]

    return f


def with_nan(x):
    x = jnp.where(jnp.arange(12)[:, None] == 7, jnp.nan, x)
    return jnp.nan_to_num(lax.reduce_max(x, (0,)), nan=5.0)


def of_vmap(*collectives):
    """Over the axis name of a `jax.vmap`."""
    each = lambda row: [collective(row, "row") for collective in collectives]  # noqa: E731
    return jax.vmap(each, axis_name="row", out_axes=None)


CASES = [
    Case(
        "broadcast",
        lambda x: jnp.broadcast_to(x[None, :, None], (2, 12, 4, 5)),
        [X],
        "0 > 1; 0.2 > 1.2; P > P",
    ),
    Case("reshape: merge", lambda x: x.reshape(60), [X], "0 > 0; 0.2 > 0.2; P > P"),
    Case("reshape: merge into blocks", lambda x: x.reshape(60), [WIDE], "1 > 0.5; 1.2 > 0.10"),
    Case("reshape: split", lambda x: x.reshape(6, 2, 5), [X], "0 > 0; 0.2 > 0.2"),
    Case("reshape: split blocks", lambda x: x.reshape(2, 6, 5), [X], "0.2 > 1"),
    Case("reshape: through a size that is shared", lambda x: x.reshape(4, 3, 5), [X]),
    Case("reshape: ones", lambda x: x.reshape(1, 12, 1, 5), [X], "0 > 1; 0.2 > 1.2"),
    Case("reshape: regroup", lambda x: x.reshape(4, 18), [numbers(2, 36)], "1.2 > 1"),
    Case(
        "reshape: transposed and back",
        lambda x: x.T.reshape(60).reshape(5, 12).T,
        [X],
        "0 > 0; 0.2 > 0.2",
    ),
    Case("reshape with dimensions", lambda x: lax.reshape(x, (60,), dimensions=(1, 0)), [X]),
    Case(
        "squeeze",
        lambda x: lax.squeeze(x, (0, 2)),
        [numbers(1, 12, 1, 5)],
        "1 > 0; 1.2 > 0.2; P > P",
    ),
    Case("transpose", lambda x: x.transpose(2, 0, 1), [CUBE], "0 > 1; 0.2 > 1.2; 1 > 2; P > P"),
    Case("split", lambda x: lax.split(x, (6, 6)), [TALL], "0.2 > 0; P > P"),
    Case("split unevenly", lambda x: lax.split(x, (4, 8)), [TALL]),
    Case("unstack", lambda x: jnp.unstack(x, axis=1), [CUBE], "0 > 0; 0.2 > 0.2; P > P"),
    Case("unstack the first", lambda x: jnp.unstack(x), [WIDE], "1 > 0; 1.2 > 0.2"),
    Case("unstack examples", lambda x: jnp.unstack(x), [TALL]),
    Case("split another", lambda x: lax.split(x, (2, 3), axis=1), [TALL], "0 > 0; 0.2 > 0.2"),
    Case(
        "concatenate",
        lambda x, y: lax.concatenate([x, y], 0),
        [X, Y],
        "0 0 > 0.2; 0.2 0.2 > 0.4; R P > P; P P > P",
    ),
    Case("concatenate one", lambda x: lax.concatenate([x, x, x], 0), [X], "0 > 0.3"),
    Case("concatenate unlike", lambda x, y: lax.concatenate([x, y], 0), [X, numbers(6, 5)]),
    Case(
        "concatenate another",
        lambda x, y: lax.concatenate([x, y], 1),
        [X, numbers(12, 2)],
        "0 0 > 0; 0 R > 0; R 0.2 > 0.2",
    ),
    Case("stack", lambda x, y: jnp.stack([x, y]), [X, Y], "0 0 > 1; R 0.2 > 1.2; P R > P"),
    Case("stack after", lambda x, y: jnp.stack([x, y], 1), [X, Y], "0 0 > 0; 0.2 R > 0.2"),
    Case("pad", lambda x: lax.pad(x, 0.5, ((0, 0, 0), (1, 2, 1))), [X], "0 > 0; 0.2 > 0.2"),
    Case("tile", lambda x: [jnp.tile(x, (1, 3)), jnp.tile(x, (2, 1, 1))], [X], "0 > 0 1"),
    Case("tile examples", lambda x: jnp.tile(x, (2, 1)), [X]),
    Case("pad examples", lambda x: lax.pad(x, 0.5, ((0, 6, 0), (0, 0, 0))), [X]),
    Case(
        "pad with an operand",
        lambda x, y: lax.pad(x, y, ((0, 0, 0), (1, 0, 0))),
        [X, numbers()],
        "0 R > 0",
    ),
    Case("along", along, [X], "0 > 0; 0.2 > 0.2"),
    Case("along examples", along_examples, [X]),
    Case(
        "sort pairs",
        lambda x, y: lax.sort([x, y], dimension=1, num_keys=1),
        [X, Y],
        "0 0 > 0; 0 R > 0",
    ),
    Case("reduce", reduced((1,)), [X], "0 > 0; 0.2 > 0.2"),
    Case("reduce before", reduced((0,)), [WIDE], "1 > 0; 1.2 > 0.2"),
    Case("reduce examples", reduced((0,)), [TIES], partial=False),
    Case("reduce all", reduced((0, 1)), [TIES], partial=False),
    Case("sum", lambda x: x.sum((0, 2)), [CUBE], "0 > P; 0.2 > P; 1 > 0; P > P"),
    Case("sum of vmap", of_vmap(lax.psum), [X], "0 > P; 0.2 > P"),
    Case("sum of vmap, of others", of_vmap(lax.psum), [X.T], "1 > 0; 1.2 > 0.2"),
    Case("extremes of vmap", of_vmap(lax.pmax, lax.pmin), [X], grads=False, partial=False),
    Case(
        "extreme of complex",
        lambda x, y: abs(lax.reduce_max(lax.complex(x, y), (0,))),
        [X, Y],
        grads=False,
    ),
    Case("extreme of NaN", with_nan, [X], grads=False),
    Case("reduce otherwise", reduced_in_no_short_way((1,)), [X], "0 > 0; 0.2 > 0.2"),
    Case("reduce examples otherwise", reduced_in_no_short_way((0,)), [X]),
    Case(
        "linear",
        lambda x: [-x, x[:, 1:3], x[2:4], x.T, lax.rev(x, (0,)), lax.cumsum(x)],
        [X],
        "P > P",
    ),
    Case(
        "sums",
        lambda x, y: [x + y, x - y, y - x, jnp.concatenate([x, y])],
        [X, Y],
        "P R > P; R P > P; P P > P",
    ),
    Case("factors", lambda x, y: [x * y, x @ y.T], [X, Y], "P R > P; R P > P"),
    Case("square of a sum", lambda x: x * x, [X]),
    Case("quotient", lambda x, y: x / y, [X, Y], "P R > P"),
    Case("quotient of sums", lambda x, y: x.sum() / y.sum(), [X, Y], "0 R > P; P R > P"),
    Case(
        "quotient by a count", lambda x, y: x.sum() / lax.stop_gradient(y).sum(), [X, Y], "0 R > P"
    ),
    Case(
        "quotient of integers",
        lambda x, y: lax.div(x, y),
        [integers(12, low=1), integers(12, low=1)],
        "0 0 > 0",
    ),
    Case(
        "parts of a complex sum",
        lambda x, y: [lax.complex(x, y).sum(0).real, lax.complex(x, y).sum(0).imag],
        [X, Y],
        "0 0 > P",
    ),
    Case("narrower", lambda x: x.sum(0).astype(jnp.bfloat16).astype(jnp.float32), [X], grads=False),
    Case(
        "floating product of integers",
        lambda x: lax.dot_general(
            x, jnp.ones(12, jnp.int32), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ),
        [integers(12)],
        "0 > P",
    ),
    Case("boolean of a sum", lambda x: [x > 3, x.astype(bool)], [integers(12)]),
    Case("any of booleans", lambda x: x.any(0) | x.all(), [booleans(12, 5)]),
]
