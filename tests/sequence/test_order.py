"""Positions, neighbouring tokens, sums and means of a sharded sequence are those of one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from gshard import sequence

P = jax.P
DEVICES = [2, 3, 5, 8]


def over(devices: int, fun: Any, *arrays: Any, order: str = "contiguous", out: Any = None) -> Any:
    """A function of slices, on whole sequences in their own order."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("sequence",))
    spec = P(None, "sequence")
    zigzag = order == "zigzag"
    if zigzag:
        arrays = tuple(sequence.zigzag(x, devices) for x in arrays)
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=spec, out_specs=spec if out is None else out, check_vma=False
    )
    found = jax.jit(mapped)(*arrays)
    return sequence.unzigzag(found, devices) if zigzag and out is None else found


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("devices", DEVICES)
def test_positions(devices, order):
    x = np.zeros((1, 6 * devices, 2))
    positions = partial(sequence.positions, order=order)
    for of in (positions, lambda x: positions(x.shape[1])):
        found = over(devices, lambda x, of=of: of(x)[None], x, order=order)
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found[0], np.arange(6 * devices))


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("tokens", [2, 6])
def test_next_and_previous_tokens(devices, order, tokens):
    x = np.random.default_rng(0).integers(1, 99, (3, tokens * devices))
    left = partial(sequence.shift_left, fill=-7, order=order)
    right = partial(sequence.shift_right, fill=-7, order=order)
    edge = np.full((3, 1), -7)
    np.testing.assert_array_equal(
        over(devices, left, x, order=order), np.concatenate([x[:, 1:], edge], 1)
    )
    np.testing.assert_array_equal(
        over(devices, right, x, order=order), np.concatenate([edge, x[:, :-1]], 1)
    )


def test_shifts_of_embeddings_and_their_gradients():
    x, d_out = np.random.default_rng(0).normal(size=(2, 2, 12, 3)).astype(np.float32)
    for order in ("contiguous", "zigzag"):
        shift = partial(over, 3, partial(sequence.shift_left, order=order), order=order)
        d_x = jax.vjp(shift, jnp.asarray(x))[1](jnp.asarray(d_out))[0]
        expected = np.concatenate([np.zeros((2, 1, 3)), d_out[:, :-1]], 1)
        np.testing.assert_array_equal(d_x, expected)


def test_a_slice_of_one_token():
    x = np.arange(5)[None]
    np.testing.assert_array_equal(over(5, sequence.shift_left, x), [[1, 2, 3, 4, 0]])


@pytest.mark.parametrize("devices", DEVICES)
def test_which_slice_and_how_many(devices):
    found = over(
        devices,
        lambda x: x * 0 + sequence.index() + 10 * sequence.size(),
        np.zeros((1, devices), int),
    )
    np.testing.assert_array_equal(found[0], np.arange(devices) + 10 * devices)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_zigzag_and_back(kind, dim):
    x = kind(np.random.default_rng(0).normal(size=(12, 12, 12)))
    found = sequence.zigzag(x, 3, dim=dim)
    assert type(found) is type(x)
    slices = np.split(np.asarray(x), 6, dim)
    expected = np.concatenate([slices[i] for i in (0, 5, 1, 4, 2, 3)], dim)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(sequence.unzigzag(found, 3, dim=dim), x)
    assert sequence.zigzag(x, 1, dim=dim) is x


REDUCTIONS = {
    "sum": (sequence.sum, lambda x: x.sum(1)),
    "mean": (sequence.mean, lambda x: x.mean(1)),
    "norm": (sequence.norm, lambda x: jnp.linalg.norm(x, axis=1)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_and_their_gradients(name):
    ours, plain = REDUCTIONS[name]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 12, 5)), jnp.float32)
    d_out = jnp.asarray(rng.normal(size=(2, 5)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("sequence",))
    spec = P(None, "sequence")

    def both(x, d_out):  # each device has its share of the gradient of the result
        out, back = jax.vjp(ours, x)
        return out, back(d_out * sequence.index() / 6)[0]

    mapped = jax.shard_map(
        both, mesh=mesh, in_specs=(spec, P()), out_specs=(P(), spec), check_vma=False
    )
    expected, back = jax.vjp(plain, x)
    for found, wanted in zip(jax.jit(mapped)(x, d_out), (expected, *back(d_out)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours(x, keepdims=True)[:, 0], expected, rtol=1e-6)


def test_a_mean_of_tokens_that_count():
    rng = np.random.default_rng(0)
    x, where = rng.normal(size=(2, 12, 5)).astype(np.float32), rng.random((2, 12, 1)) < 0.4
    where[:, :3] = False  # none of device 0
    mean = lambda x, where: sequence.mean(x, where=where)  # noqa: E731
    found = over(4, mean, x, where, out=P())
    np.testing.assert_allclose(found, x.mean(1, where=where), rtol=1e-5)
    counted = over(4, lambda x: sequence.mean(x, keepdims=True), np.ones((1, 8), int), out=P())
    assert counted.dtype == jnp.float32 and counted.tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float16])
def test_a_norm_of_integers_does_not_overflow(dtype):
    x = np.array([100, 100], dtype) if dtype != np.int32 else np.array([50_000, 50_000], dtype)
    np.testing.assert_allclose(sequence.norm(x, dim=0), np.linalg.norm(x.astype(float)), rtol=1e-3)
