"""Codes and scales of the optimizer state: how far off they are, and that decoding is stable."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.sharding.quantized_array import BLOCK, QuantizedArray, block_sizes, decoded, encoded

encode = jax.jit(QuantizedArray.encode, static_argnums=(1, 2, 3))
decode = jax.jit(QuantizedArray.decode)
# Shape, dimension of the blocks, and the number of shards of that dimension.
CASES = [
    ((7, 300), 1, 1),
    ((1000, 3), 0, 8),
    ((6553,), 0, 3),
    ((5, 257, 4), 1, 1),
    ((2, 512), 1, 2),
    ((4, 1), 1, 1),
]
VALUES = {
    "signed": lambda x: x,
    "squares": lambda x: x * x,
    "ten decades": lambda x: x * np.exp(8 * np.sin(50 * x)),
    "one entry": lambda x: np.where(x == x.max(), x, 0),
    "zeros": lambda x: 0 * x,
    "negative": lambda x: -abs(x),
    "large": lambda x: x * np.float32(1e37),
    "small": lambda x: x * np.float32(1e-22),
}


def values(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    x = np.random.default_rng(len(kind)).normal(size=shape).astype(np.float32)
    return VALUES[kind](x).astype(np.float32)


def largest_by_entry(x: np.ndarray, axis: int, shards: int) -> np.ndarray:
    """The largest magnitude of each entry's block, written with loops."""
    length, _, block = block_sizes(x.shape[axis], shards)
    x = np.moveaxis(abs(x), axis, 0)
    found = np.zeros_like(x)
    for shard in range(0, len(x), length):
        end = min(shard + length, len(x))
        for start in range(shard, end, block):
            stop = min(start + block, end)
            found[start:stop] = x[start:stop].max(0)
    return np.moveaxis(found, 0, axis)


@pytest.mark.parametrize("shape, axis, shards", CASES)
@pytest.mark.parametrize("kind", VALUES)
def test_every_entry_is_rounded_to_one_of_the_two_next_codes(kind, shape, axis, shards):
    x = values(kind, shape)
    found = np.asarray(decode(encode(x, axis, shards, "float32")), np.float64)
    largest = largest_by_entry(x, axis, shards).astype(np.float64)
    # Steps of the square root with both signs; those of the fourth root are nowhere longer.
    root = np.sqrt(abs(x) / np.where(largest == 0, 1, largest))
    step = 1.001 / 127
    assert (abs(found - x) <= largest * (step * (2 * root + step) + 1e-6)).all()


@pytest.mark.parametrize("shape, axis, shards", [*CASES, ((4096, 256), 1, 1)])
@pytest.mark.parametrize("kind", VALUES)
def test_decoded_arrays_get_the_same_codes_again(kind, shape, axis, shards):
    first = encode(values(kind, shape), axis, shards, "float32")
    again = encode(decode(first), axis, shards, "float32")
    np.testing.assert_array_equal(first.codes, again.codes)
    np.testing.assert_array_equal(first.scales, again.scales)


def test_second_moments_have_finer_codes_and_never_become_zero():
    x = np.float32(10.0) ** -np.arange(30, dtype=np.float32)
    found = np.asarray(decode(encode(x, 0, 1, "float32")))
    assert (found > 0).all()
    large = x >= 1e-4  # of these, fourth roots keep one digit
    assert (abs(found[large] - x[large]) <= 0.09 * x[large]).all()
    signed = encode(np.append(x, -x), 0, 1, "float32").decode()
    assert (np.asarray(signed)[5:30] == 0).all()


@pytest.mark.parametrize("kind", ["signed", "squares"])
def test_the_mean_of_an_entry_is_its_value(kind):
    x = np.tile(values(kind, (1, 256)), (2000, 1))
    largest = abs(x[0]).argmax()  # 2,000 blocks of the same scale, with values that differ a little
    x *= 1 + 1e-3 * np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    x[:, largest] = x[0, largest]
    found = np.asarray(encode(x, 1, 1, "float32").decode(), np.float64)
    root = np.sqrt(abs(x[0]) / abs(x[0, largest]))
    step = abs(x[0, largest]) / 127 * (2 * root + 1 / 127)
    assert (abs(found - x).max(0) > 0.5 * step)[root > 0.1].any()  # it is no rounding to nearest
    assert (abs((found - x).mean(0)) <= 5 * step / 2 / 2000**0.5).all()


def test_a_moment_follows_gradients_that_become_smaller():
    """As in float32, to which a change of 0.2 % is not too small; half have no gradient at all."""
    decay, block = 0.998, 256
    size = jnp.where(jnp.arange(block) % 4 == 1, 0.1, jnp.where(jnp.arange(block) % 4 == 3, 0, 1))

    def moments(stored):
        def step(x, i):
            g = jax.random.normal(jax.random.key(i), (8, block)) * jnp.where(i > 300, size, 1)
            first, second = decoded(x)
            x = 0.9 * first + 0.1 * g, decay * second + (1 - decay) * g * g
            return (tuple(map(q, x)) if stored else x), None

        q = partial(QuantizedArray.encode, axis=1, shards=1, dtype="float32")
        x = (jnp.zeros((8, block)),) * 2
        return decoded(jax.lax.scan(step, tuple(map(q, x)) if stored else x, jnp.arange(2000))[0])

    first, second = jax.jit(moments, static_argnums=0)(True)
    exact = jax.jit(moments, static_argnums=0)(False)[1]
    ratio = np.asarray(jnp.sqrt(second / exact))
    for start in (0, 1):
        part = np.median(ratio[:, start::4])
        assert 0.9 < part < 1.1, (start, part)
    assert (first[:, 3::4] == 0).all()


@pytest.mark.parametrize("shape, axis, shards", CASES)
def test_numpy_decodes_as_jax_does(shape, axis, shards):
    x = encode(values("signed", shape), axis, shards, "float32")
    on_host = jax.tree.map(np.asarray, x).decode()
    assert type(on_host) is np.ndarray
    np.testing.assert_allclose(on_host, x.decode(), rtol=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_no_block_crosses_the_border_of_a_shard(shards):
    x = np.ones((shards * 300, 2), np.float32)
    x[300:] = 1e-6  # of the other shards
    found = encode(x, 0, shards, "float32")
    assert found.scales.shape == (2 * shards if shards > 1 else 2, 2)
    exact = np.asarray(found.decode()) == x
    assert exact[:300].all()
    assert exact[300:].all() == (shards > 1 or len(x) == 300)


def test_storage_is_about_a_byte_and_blocks_are_no_longer_than_256():
    x = encode(np.ones((128, 1024), np.float32), 1, 1, "float32")
    assert x.codes.dtype == jnp.int8 and x.scales.dtype == jnp.float32
    assert sum(a.nbytes for a in jax.tree.leaves(x)) == x.codes.size * (1 + 4 / BLOCK)
    assert all(block_sizes(n, 1)[2] <= BLOCK for n in range(1, 2000))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_an_entry_that_is_not_finite_is_not_finite(bad):
    x = np.ones(1024, np.float32)
    x[700] = bad
    found = np.isfinite(np.asarray(decode(encode(x, 0, 1, "float32"))))
    assert found.sum() == 768 and not found[512:768].any()


def test_dtypes_and_trees_are_kept():
    x = jnp.asarray(values("signed", (300, 5)), jnp.bfloat16)
    q = partial(encode, axis=0, shards=1, dtype="bfloat16")
    like = {"a": (q(x=x), 3), "b": None}
    tree = encoded({"a": (x, 4), "b": None}, like)
    assert jax.tree.structure(tree) == jax.tree.structure(like)
    back = decoded(tree)
    assert back["a"][0].dtype == jnp.bfloat16 and back["a"][1] == 4
    plain = {"a": x}
    assert encoded(plain, {"a": 0}) is plain


def test_an_array_says_what_it_is_and_numpy_reads_its_values():
    q = encode(values("signed", (7, 300)), 1, 1, "float32")
    assert repr(q) == (
        "QuantizedArray(float32[7, 300] in 8 bits, in blocks along dimension 1; decode() returns "
        "its values)"
    )
    np.testing.assert_allclose(np.asarray(q), q.decode(), rtol=1e-6)
    assert "QuantizedArray(float32[]" in repr(jax.tree.map(lambda x: None, q))
