"""Quantized collectives by value: the error of one gather and of one sum, and the same bits."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard import make_mesh
from gshard.sharding.group import data_group
from gshard.sharding.layout import Layout
from gshard.sharding.quantized import LARGEST, BlockCodes
from gshard.train.comm import collectives, quantized
from tests.tiers import quick

DTYPES = tuple(LARGEST)
INTEGERS = ("int8", "int4")
MESHES = [
    {"a": 3},
    {"a": 5},
    {"a": 8},
    {"a": 2, "b": 3},
    {"a": 4, "b": 2},
    {"a": 2, "b": 2, "c": 2},
]
# shape, sharded dimension, dimension of the blocks (from the end): odd sizes, blocks before and
# after the sharded dimension, more than one block, a block count that divides nothing
LEAVES = [((16, 33), 0, -1), ((40, 24), 1, -2), ((7, 9, 300), 1, -1), ((5, 257, 4), 2, -2)]


def spread(shape, seed):
    """Values of very different size, as the entries of a gradient are."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=shape) * 3)).astype(np.float32)


def steps(x, how):
    """The largest step between neighbouring codes that each entry may have, by its block."""
    dim = how.dim + x.ndim
    length = how.blocks(x.shape[dim])[1]
    blocks = np.arange(x.shape[dim]) // length
    largest = np.stack(
        [np.abs(np.compress(blocks == b, x, axis=dim)).max(axis=dim) for b in blocks], axis=dim
    )
    return largest / LARGEST[how.dtype] * (1 + 2.0**-8) * (1 + 2.0**-8)


@partial(jax.jit, static_argnums=1)
def there_and_back(x, how, seed=None):
    packed = quantized.quantize(x, how, seed)
    assert packed.dtype == jnp.uint8
    assert packed.shape == how.packed_shape(x.shape)
    return quantized.dequantize(packed, how, x.shape[how.dim])


def decoded(x, how, seed=None):
    return np.array(there_and_back(x, how, seed))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    size=st.sampled_from([1, 2, 31, 33, 256, 257, 509, 768]),
    at=st.integers(0, 2),
    seed=st.integers(0, 99),
    block=st.sampled_from([32, 48, 256]),
)
def test_an_entry_is_off_by_half_a_step_at_most(dtype, shape, size, at, seed, block):
    shape[at % len(shape)] = size
    how = BlockCodes(dtype, at % len(shape) - len(shape), block=block)
    x = spread(shape, seed)
    error = np.abs(decoded(x, how) - x)
    half = steps(x, how) / 2
    if dtype not in INTEGERS:  # half a last place of the entry, or of the smallest number
        bits = {"float8_e4m3fn": (3, -9), "float8_e5m2": (2, -16)}[dtype]
        half = np.maximum(np.abs(x) * 2.0 ** -(bits[0] + 1), half * 2.0 ** bits[1])
    assert (error <= half * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    ("block", "size", "blocks"),
    [(256, 261, (3, 87)), (256, 257, (2, 129)), (32, 33, (2, 17)), (64, 261, (5, 53))],
)
def test_shorter_blocks_are_as_few_as_can_be(block, size, blocks):
    assert BlockCodes("int8", -1, block=block).blocks(size) == blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_entry_makes_its_block_non_finite_and_no_other(dtype):
    how = BlockCodes(dtype, -1, block=8)
    for bad in (np.inf, -np.inf, np.nan):
        x = spread((3, 24), 0)
        x[1, 9] = bad
        found = decoded(x, how)
        assert not np.isfinite(found[1, 8:16]).any()
        found[1, 8:16] = 0
        assert np.isfinite(found).all()
    assert not decoded(np.zeros((2, 24), np.float32), how).any()


def test_stochastic_rounding_has_the_value_as_its_mean():
    how = BlockCodes("int4", -1, stochastic=True)
    x = spread((3, 250), 1)
    root = jnp.uint32(7)
    every = np.stack([decoded(x, how, quantized.fold(root, i)) for i in range(400)])
    step = steps(x, how)
    assert (np.abs(every - x) <= step * (1 + 1e-5)).all()
    # The variance of one rounding is at most a quarter of a step squared; six deviations.
    assert (np.abs(every.mean(axis=0) - x) <= 6 * 0.5 * step / np.sqrt(400)).all()
    assert len({one.tobytes() for one in every}) == 400
    again = decoded(x, how, quantized.fold(root, 3))
    np.testing.assert_array_equal(again, every[3])
    # neighbours in a row and in a column are rounded independently of each other
    up = (every > x).astype(float)
    up -= up.mean(axis=0)
    for one, other in ((up[:, :, 1:], up[:, :, :-1]), (up[:, 1:], up[:, :-1])):
        assert abs((one * other).mean()) < 5e-3


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_largest_entry_of_a_block_has_a_code(dtype):
    how = BlockCodes(dtype, -1, stochastic=True)
    # a scale just below the middle of two bfloat16, which would round down without a margin
    x = np.full((4, 256), LARGEST[dtype] * (1 + 0.9 * 2.0**-9), np.float32)
    assert (np.abs(decoded(x, how, jnp.uint32(1)) - x) <= 1.02).all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_largest_code_is_not_rounded_up(dtype):
    how = BlockCodes(dtype, -1, stochastic=True)
    x = np.full((1, 64), LARGEST[dtype] / 1024, np.float32)  # codes that are exact
    # of this seed entry 44 draws the largest number below 1, and 7 plus it is 8 in float32
    np.testing.assert_array_equal(decoded(x, how, jnp.uint32(149155)), x)


def layouts(mesh, dtype, stochastic=False):
    group, found = data_group(mesh), []
    for i, (shape, dim, block_dim) in enumerate(LEAVES):
        how = BlockCodes(dtype, block_dim, stochastic)
        plain = Layout(f"x{i}", shape, np.dtype("float32"), dim, group, None, "")
        found.append(dataclasses.replace(plain, gathered_as=how, scattered_as=how))
    return found


def on_devices(mesh, fun, args, before, after):
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
    return jax.jit(mapped)(*args)


def stored(mesh, places, full):
    return [
        jax.device_put(place.pad(x), jax.sharding.NamedSharding(mesh, place.spec))
        for place, x in zip(places, full, strict=True)
    ]


def shards(x, place):
    return np.split(place.pad(x), place.group.size, axis=place.dim)


@pytest.mark.parametrize("dtype", quick(DTYPES, ["int8"]))
@pytest.mark.parametrize("sizes", quick(MESHES, [{"a": 3}, {"a": 2, "b": 3}]), ids=str)
def test_every_device_gathers_the_same_bits_in_any_way(sizes, dtype):
    mesh = make_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    places = layouts(mesh, dtype)
    full = [spread(place.shape, i) for i, place in enumerate(places)]
    halves = list(sizes.values())[-1]  # devices of a sub-group: the minor axis

    def every_way(xs):
        pairs = list(zip(xs, places, strict=True))
        kept = [collectives.gather_across(x, p, halves) for x, p in pairs]
        assert {x.dtype for x in kept} == {np.dtype("uint8")}
        by_halves = [
            collectives.gather_within(x, p, halves) for x, p in zip(kept, places, strict=True)
        ]
        alone = [collectives.gather(x, p) for x, p in pairs]
        found = [alone, collectives.gather_bucket(xs, places), by_halves]
        return jax.tree.map(lambda x: x[None], found)

    found = on_devices(
        mesh,
        every_way,
        (stored(mesh, places, full),),
        ([p.spec for p in places],),
        jax.P(tuple(sizes)),
    )
    for way in found:
        for x, place, whole in zip(way, places, full, strict=True):
            parts = [decoded(part, place.gathered_as) for part in shards(whole, place)]
            expected = place.unpad(np.concatenate(parts, axis=place.dim))
            assert not np.array_equal(expected, whole)  # it was quantized
            for one in np.asarray(x):  # bit by bit, on every device, the owner included
                np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("dtype", quick(DTYPES, ["int4"]))
@pytest.mark.parametrize("sizes", quick(MESHES, [{"a": 3}, {"a": 2, "b": 3}]), ids=str)
def test_a_scatter_adds_half_a_step_for_each_term_of_each_hop(sizes, dtype):
    n = int(np.prod(list(sizes.values())))
    mesh = make_mesh(sizes, devices=jax.devices()[:n])
    places = layouts(mesh, dtype)
    terms = [
        np.stack([spread(p.shape, 50 * i + d) for d in range(n)]) for i, p in enumerate(places)
    ]

    def both(xs):
        xs = [x[0] for x in xs]
        alone = [collectives.scatter(x, p) for x, p in zip(xs, places, strict=True)]
        return alone, collectives.scatter_bucket(xs, places)

    axes, specs = tuple(sizes), [p.spec for p in places]
    alone, together = on_devices(mesh, both, (terms,), (jax.P(axes),), (specs, specs))
    for x, y, term, place in zip(alone, together, terms, places, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        found, expected = place.unpad(np.asarray(x)), term.astype(np.float64).sum(0)
        # What is rounded later is at most the sum of what was rounded before, with its errors.
        coarse = 1 / LARGEST[dtype] if dtype in INTEGERS else 2.0**-3
        size = np.abs(term).max(axis=tuple(range(1, term.ndim))).sum()
        bound = size * coarse / 2 * (1 + coarse) ** len(sizes) * len(sizes) * 1.1
        assert np.abs(found - expected).max() <= bound
        assert np.abs(found - expected).max() > 0
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.9


def test_a_stochastic_scatter_is_unbiased_and_known_by_its_seed():
    mesh = make_mesh({"a": 2, "b": 3}, devices=jax.devices()[:6])
    places = layouts(mesh, "int4", stochastic=True)[:2]
    terms = [
        np.stack([spread(p.shape, 50 * i + d) for d in range(6)]) for i, p in enumerate(places)
    ]

    def sums(xs, seed):
        xs = [x[0] for x in xs]
        alone = [collectives.scatter(x, p, seed) for x, p in zip(xs, places, strict=True)]
        return alone, collectives.scatter_bucket(xs, places, seed)

    specs = [p.spec for p in places]
    mapped = jax.jit(
        jax.shard_map(
            sums,
            mesh=mesh,
            in_specs=(jax.P(("a", "b")), jax.P()),
            out_specs=(specs, specs),
            check_vma=False,
        )
    )
    every = []
    for i in range(60):
        alone, together = mapped(terms, jnp.uint32(i))
        for x, y in zip(alone, together, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        every.append([np.asarray(x) for x in alone])
    again = mapped(terms, jnp.uint32(5))[0]
    for i, (term, place) in enumerate(zip(terms, places, strict=True)):
        np.testing.assert_array_equal(np.asarray(again[i]), every[5][i])
        found = np.stack([place.unpad(one[i]) for one in every]).astype(np.float64)
        expected = term.astype(np.float64).sum(0)
        one, mean = np.abs(found[0] - expected).mean(), np.abs(found.mean(0) - expected).mean()
        assert mean < one / 4  # sqrt(60) is 7.7; nearest rounding would stay at one


def test_devices_round_independently_of_each_other():
    mesh = make_mesh({"a": 8})
    place = layouts(mesh, "int4", stochastic=True)[0]
    term = spread(place.shape, 3)

    def total(x, seed):
        return collectives.scatter(x, place, seed)

    args = (term, jnp.uint32(1))
    found = on_devices(mesh, total, args, (jax.P(), jax.P()), place.spec)
    error = np.abs(place.unpad(np.asarray(found)) - 8 * term).mean()
    one = np.abs(decoded(term, place.scattered_as, jnp.uint32(1)) - term).mean()
    assert error < 0.6 * 8 * one  # sqrt(8) of them would be 0.35; if all round alike it is 1
