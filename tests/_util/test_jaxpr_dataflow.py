"""Which outputs are inputs unchanged, and the warning when a loss writes into its parameters."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard._util.jaxpr_dataflow import sources

X, XS = np.ones(3, np.float32), np.ones((4, 3), np.float32)


def scan(body, reverse=False):
    return lambda carry, xs: jax.lax.scan(body, carry, xs, reverse=reverse)


@pytest.mark.parametrize(
    ("fun", "args", "expected"),
    [
        (lambda x, y: (y, x), (X, X), [1, 0]),
        (lambda x, y: (x + 0, y), (X, X), [None, 1]),
        (lambda x, y: (1.0, jnp.zeros(3)), (X, X), [None, None]),
        (jax.jit(lambda x, y: (y, x * 2)), (X, X), [1, None]),
        (jax.checkpoint(lambda x, y: (y, x * 2)), (X, X), [1, None]),
        (lambda x, y: jax.checkpoint(jax.jit(lambda a, b: (b, a)))(y, x), (X, X), [0, 1]),
        (scan(lambda c, x: (c, x)), (X, XS), [0, 1]),
        (scan(lambda c, x: (c, x), reverse=True), (X, XS), [0, 1]),
        (scan(lambda c, x: (c + 1, x)), (X, XS), [None, 1]),
        (scan(lambda c, x: (c, x + c)), (X, XS), [0, None]),
        (scan(lambda c, x: (x, c)), (X, XS), [None, None]),
        (scan(lambda c, x: ((c[1], c[0]), x)), ((X, X), XS), [None, None, 2]),
        (lambda x, y: jax.lax.scan(lambda c, _: (c, x), y, None, 4), (X, X), [1, None]),
        (lambda x, y: (x.T.T, y.T), (XS, XS), [0, None]),
        (lambda x, y: (jax.lax.scan(lambda c, x: (c, x), x, y.T)[1].T, y), (X, XS.T), [1, 1]),
        (lambda x, y: jax.lax.cond(x[0] > 0, lambda: x, lambda: y), (X, X), [None]),
    ],
)
def test_sources(fun, args, expected):
    assert sources(jax.make_jaxpr(fun)(*args).jaxpr) == expected


class Layer(nnx.Module):
    """Writes into its kernel where `writes` is set."""

    def __init__(self, rngs, writes):
        self.kernel = nnx.Param(rngs.normal((8, 8)))
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.writes = writes

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        y = jnp.tanh(x @ self.kernel[...])
        if self.writes:
            self.kernel[...] = self.kernel[...] * 2
        return y


class Plain(nnx.Module):
    def __init__(self, rngs, writes):
        self.layer = Layer(rngs, writes)

    def __call__(self, x):
        return self.layer(x)


class Remat(Plain):
    def __call__(self, x):
        return nnx.remat(lambda layer, x: layer(x))(self.layer, x)


class Scan(nnx.Module):
    def __init__(self, rngs, writes):
        make = nnx.vmap(lambda rngs: Layer(rngs, writes), in_axes=0, out_axes=0)
        self.layer = make(rngs.split(3))

    def __call__(self, x):
        step = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return step(self.layer, x)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("make", [Plain, Remat, Scan])
def test_a_loss_that_writes_into_its_parameters_is_reported(make, writes):
    model = make(nnx.Rngs(0), writes)
    state = (model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
    state, plan = gshard.shard_train_state(
        state, gshard.make_mesh(), "os", min_shard_size=1, scan_axes={"layer": 0}
    )
    step = gshard.make_train_step(lambda m, batch: (m(batch) ** 2).mean(), plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*state, np.ones((8, 8), np.float32))
    messages = [str(w.message) for w in caught]
    assert len(messages) == writes, messages
    assert all("writes into the parameters layer/kernel, as" in m for m in messages)
    assert float(state[0].layer.calls[...].max()) == 1
