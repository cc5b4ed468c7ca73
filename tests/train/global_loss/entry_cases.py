"""Equations that act entry by entry, and random keys."""

from __future__ import annotations

import jax
import jax.extend.core.primitives as primitives
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p

from tests.train.global_loss.placed import Case, booleans, integers, numbers

MESH = jax.make_mesh((1,), ("one",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
X, Y = numbers(12, 5), numbers(12, 5, seed=1)
INTS, OTHERS = integers(12, 5, low=1), integers(12, 5, low=1, seed=1)
KEYS = integers(12, 2, high=2**31, dtype=np.uint32)
ONE_KEY = np.array([3, 5], np.uint32)


def unary(x):
    names = """abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf
    erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin
    sinh sqrt square tan tanh stop_gradient""".split()
    others = [
        lax.acosh(x + 1.5),
        lax.integer_pow(x, 3),
        lax.reduce_precision(x, 5, 10),
        x.astype(jnp.bfloat16).astype(jnp.float32),
        jnp.copy(x),
        jnp.log2(x),
        jnp.polyval(jnp.array([3.0, 1.0, 2.0]), x),
        checkpoint_name(x, "x"),
        lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    ]
    return [getattr(lax, name)(x) for name in names] + others


def binary(x, y):
    names = "add sub mul div max min atan2 rem pow eq ne lt le gt ge".split()
    out = [getattr(lax, name)(x, y) for name in names]
    return [*out, lax.nextafter(lax.stop_gradient(x), lax.stop_gradient(y))]


def special(x, y):
    x, y = 1.0 + x, 2.0 + y
    orders = [getattr(primitives, f"{name}_to_p").bind(x, y) for name in ("eq", "le", "lt")]
    others = [
        lax.igamma(x, y),
        lax.igammac(x, y),
        lax.igamma_grad_a(x, y),
        lax.betainc(x, y, x / 4),
    ]
    return [*orders, *others, lax.polygamma(jnp.floor(x), y), lax.zeta(x + 1, y)]


def derivative(x):
    """Its trace adds cotangents (`add_any`)."""
    return jax.grad(lambda x: jnp.sum(x * jnp.sin(x) + jnp.tanh(x)))(x)


def complex_numbers(x, y):
    z = lax.complex(x, y)
    return [z, lax.conj(z), lax.real(z), lax.imag(z), abs(z)]


def bits(x, y):
    names = "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic"
    out = [getattr(lax, name)(x, y) for name in [*names.split(), "shift_right_logical", "rem"]]
    return [*out, lax.bitwise_not(x), lax.population_count(x), lax.clz(x), lax.mulhi(x, y)]


def threefry(x, y):
    word = x.astype(jnp.uint32)
    return threefry2x32_p.bind(word, word + 1, y.astype(jnp.uint32), word)


def keys_of_seeds(seeds):
    return jax.random.key_data(jax.vmap(jax.random.key)(seeds))


def fold(data, numbers):
    keys = jax.random.wrap_key_data(data)
    return jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, numbers))


def keys(data):
    keys = jax.random.wrap_key_data(data)
    halves = jax.vmap(jax.random.split)(jax.random.clone(keys))
    noise = jax.vmap(lambda k: jax.random.normal(k, (5,)))(keys)
    return jax.random.key_data(keys), jax.random.key_data(halves), noise


def gamma(data, x):
    return jax.random.gamma(jax.random.wrap_key_data(data), x)


def gamma_of_keys(data, x):
    return jax.vmap(jax.random.gamma)(jax.random.wrap_key_data(data), x)


def gamma_from_nothing(data, x):
    return x * jax.random.gamma(jax.random.wrap_key_data(data), 2.0, x.shape)


CASES = [
    Case("unary", unary, [X], "0 > 0; 0.2 > 0.2"),
    Case("binary", binary, [X, Y], "0 0 > 0; 0 R > 0; R 0.2 > 0.2", most=8),
    Case("special", special, [X, Y], "0 0 > 0; R 0.2 > 0.2", grads=False, most=4),
    Case("derivative", derivative, [X], "0 > 0"),
    Case("complex", complex_numbers, [X, Y], "0 0 > 0; 0.2 R > 0.2"),
    Case("bits", bits, [INTS, OTHERS], "0 0 > 0; 0.2 R > 0.2"),
    Case(
        "not",
        lambda x, y: [~x, x & y, x | y, x ^ y],
        [booleans(12), booleans(12, seed=1)],
        "0 R > 0",
    ),
    Case("threefry", threefry, [INTS, OTHERS], "0 0 > 0", partial=False),
    Case(
        "scalars", lambda x, y: [x + 1, 2 * x, x * y, y - x], [X, numbers()], "0 R > 0; R P > R R P"
    ),
    Case("size 1", lambda x, y: x * y, [X, numbers(12, 1)], "0 0 > 0; R 0 > 0; 0.2 R > 0.2"),
    Case(
        "size 1 along", lambda x, y: x * y, [numbers(5, 12), numbers(5, 1)], "1 R > 1; 1.2 R > 1.2"
    ),
    Case(
        "size 1 of both", lambda x, y: x * y, [numbers(12, 1), numbers(1, 12)], "0 R > 0; R 1 > 1"
    ),
    Case("clamp", lambda x: lax.clamp(0.3, x, 0.6), [X], "0 > 0"),
    Case("clamp by arrays", lax.clamp, [X / 2, Y, X], "0 0 0 > 0; R 0 R > 0"),
    Case(
        "select",
        lambda p, x, y: lax.select_n(p, x, y),
        [booleans(12, 5), X, Y],
        "0 0 0 > 0; 0 R R > 0; R 0 R > 0; R P R > P; R R P > P",
    ),
    Case(
        "select by scalar",
        lambda p, x, y: lax.select_n(p, x, y),
        [booleans(), X, Y],
        "R 0 0 > 0; R P P > P; R 0.2 R > 0.2",
    ),
    Case(
        "convert",
        lambda x: [x.astype(float), x.astype(jnp.bfloat16), x > 3],
        [integers(12)],
        "0 > 0",
    ),
    Case(
        "reshard",  # of JAX itself: in a mesh, `jnp.where(examples > 3, jnp.array([1]), examples)`
        lambda x: jax.sharding.reshard(x, jax.NamedSharding(MESH, jax.P())),
        [X],
        "0 > 0; 0.2 > 0.2; P > P",
    ),
    Case("widen", lambda x: x.astype(jnp.float32), [integers(12)], "0 > 0"),
    Case(
        "widen unsigned", lambda x: x.astype(jnp.float32), [integers(12, dtype=np.uint32)], "0 > 0"
    ),
    Case("widen bytes", lambda x: x.astype(jnp.float32), [integers(12, dtype=np.int8)], "0 > 0"),
    Case(
        "barrier", lambda x, y: lax.optimization_barrier((x, y)), [X, Y], "0 R > 0 R; 0 0.2 > 0 0.2"
    ),
    Case("bitcast", lambda x: lax.bitcast_convert_type(x, jnp.float32), [INTS], "0 > 0"),
    Case("bitcast to bytes", lambda x: lax.bitcast_convert_type(x, jnp.int8), [INTS]),
    Case("seeds", keys_of_seeds, [integers(12)], "0 > 0"),
    Case("fold in", fold, [KEYS, integers(12)], "0 0 > 0; 0.2 R > 0.2"),
    Case("keys", keys, [KEYS], "0 > 0; 0.2 > 0.2"),
    Case(
        "words",
        lambda x: jax.random.key_data(jax.random.wrap_key_data(x.T)),
        [integers(2, 12, dtype=np.uint32)],
        "1 > 0",
    ),
    Case("gamma", gamma, [ONE_KEY, numbers(12)]),
    Case("gamma of keys", gamma_of_keys, [KEYS, numbers(12)], "0 0 > 0; R 0 > 0"),
    Case("gamma from nothing", gamma_from_nothing, [ONE_KEY, numbers(12)], "R 0 > 0"),
]
