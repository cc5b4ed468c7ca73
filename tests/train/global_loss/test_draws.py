"""Random bits of a part are those that one device draws, and so are iotas and constants."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.random import threefry2x32_p

import gshard
from gshard._util.jaxpr import all_equations
from gshard.train.global_loss.draws import _product, random_bits_part
from gshard.train.global_loss.placement import Partition, sharded
from tests.train.global_loss.placed import Placed, check, numbers, placements, split

WORDS = np.array([7, 2**31 + 5], np.uint32)


def taken(f, shape):
    """What `f` makes from nothing meets a sharded operand."""
    return lambda words, x: f(jax.random.wrap_key_data(words), shape) * x


SOURCES = {
    "uint8": lambda key, shape: jax.random.bits(key, shape, jnp.uint8).astype(jnp.float32),
    "uint16": lambda key, shape: jax.random.bits(key, shape, jnp.uint16).astype(jnp.float32),
    "uint32": lambda key, shape: jax.random.bits(key, shape, jnp.uint32).astype(jnp.float32),
    "mask": lambda key, shape: jax.random.bernoulli(key, 0.5, shape).astype(jnp.float32),
    "mask over a dimension": lambda key, shape: jnp.broadcast_to(
        jax.random.bernoulli(key, 0.5, (*shape[:-1], 1)), shape
    ).astype(float),
    "normal": jax.random.normal,
    "iota": lambda key, shape: jnp.arange(np.prod(shape), dtype=float).reshape(shape),
    "iota of a dimension": lambda key, shape: jax.lax.broadcasted_iota(float, shape, 1),
    "narrow iota": lambda key, shape: jax.lax.broadcasted_iota(jnp.int8, shape, 0) * 1.0,
    "ones": lambda key, shape: jnp.ones(shape) * 3.0,
    "a row": lambda key, shape: jnp.broadcast_to(jnp.arange(float(shape[-1])), shape),
    "chosen": lambda key, shape: jnp.where(
        jnp.arange(shape[0])[:, None, None] > 5, jax.random.uniform(key, shape), 0.5
    ),
}
LOCAL = [name for name in SOURCES if name != "iota"]


@pytest.mark.parametrize("name", SOURCES)
def test_numbers_of_a_part(name):
    shape = (12, 12, 2)
    rows = [placements(f"R {word}") for word in ("0", "0.2", "0.4", "1", "1.2")]
    check(taken(SOURCES[name], shape), [WORDS, numbers(*shape)], rows, 3)


@pytest.mark.parametrize("name", LOCAL)
def test_a_part_is_made_without_the_others(name):
    shape, places = (12, 12, 2), placements("R 0.2")
    args = [WORDS, numbers(*shape)]
    placed = Placed(lambda *args: taken(SOURCES[name], shape)(*args).sum(), args, 3)
    stacked = [split(x, place, 3) for x, place in zip(args, places, strict=True)]
    made = jax.make_jaxpr(lambda *xs: placed.all_parts(places, [None], xs)[0])(*stacked)
    sizes = [v.aval.size for eqn in made.jaxpr.eqns for v in eqn.outvars]
    assert not placed.transfers
    assert max(sizes) <= 12 * 12 * 2  # of three parts; full arrays would have three times as many


def test_product_of_64_bits():
    edges = [0, 1, 2, 3, 0xFFFF, 0x10000, 0x10001, 2**31, 2**32 - 1, 123456789]
    for factor in edges:
        high, low = _product(jnp.asarray(edges, jnp.uint32), factor)
        found = [(int(h) << 32) | int(w) for h, w in zip(high, low, strict=True)]
        assert found == [x * factor for x in edges]


@pytest.mark.parametrize(("dim", "outer"), [*itertools.product((0, 1), (1, 2))])
def test_positions_beyond_32_bits(dim, outer):
    """Of more than 2 ** 32 numbers, the part of one of 2 ** 16 devices."""
    shape = [2**9, 2**9, 2**8 + 1]
    shape[dim] = 2**17 * outer
    index, parts = 2**16 - 3, 2**16
    out = SimpleNamespace(aval=jax.ShapeDtypeStruct(shape, jnp.uint32))
    eqn = SimpleNamespace(outvars=[out])
    key = jax.random.wrap_key_data(WORDS)
    partition = Partition(parts, jnp.int32(index))
    found = np.asarray(random_bits_part(eqn, key, partition, sharded(dim, outer)))
    n = shape[dim] // (outer * parts)
    mine = np.array([(o * parts + index) * n + k for o in range(outer) for k in range(n)])
    grid = [np.arange(size, dtype=np.uint64) for size in shape]
    grid[dim] = mine.astype(np.uint64)
    a, b, c = np.meshgrid(*grid, indexing="ij")
    position = (a * np.uint64(shape[1]) + b) * np.uint64(shape[2]) + c
    assert position.max() > 2**32
    high, low = (position >> np.uint64(32)).astype(np.uint32), position.astype(np.uint32)
    one, two = (jnp.full(position.shape, word) for word in WORDS)
    wanted = np.bitwise_xor(*threefry2x32_p.bind(one, two, jnp.asarray(high), jnp.asarray(low)))
    np.testing.assert_array_equal(found, wanted)


def test_with_a_sequence_axis_a_device_draws_its_own_bits_alone():
    """The bits are those of a part after the evaluation over the one axis and over the other."""
    params, x = {"w": jnp.ones((4, 4))}, np.ones((8, 64, 4), np.float32)

    def loss(p, x):
        kept = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
        return jnp.where(kept, x @ p["w"], 0).mean()

    mesh = gshard.make_mesh(sequence=2)
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "os", min_shard_size=0)
    value_and_grad, batch = gshard.value_and_grad(loss, plan), gshard.shard_batch(x, plan)
    traced = jax.make_jaxpr(value_and_grad)(state.params, batch)
    drawn = [e for e in all_equations(traced.jaxpr) if e.primitive is threefry2x32_p]
    assert [v.aval.shape for e in drawn for v in e.outvars] == [(2, 32, 4)] * 2
    assert float(value_and_grad(state.params, batch)[0]) == pytest.approx(float(loss(params, x)))
