"""What XLA:CPU computes once for each way in which it is read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from gshard.analysis.memory.cpu import is_rounded, with_canonical_products, with_repeated
from gshard.analysis.memory.fusion import absorbs, fused
from gshard.analysis.memory.opening import program_of
from gshard.analysis.memory.program import NEW_CPU

X = jax.ShapeDtypeStruct((8, 4, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def repeated(function, *arguments):
    closed = jax.make_jaxpr(function)(*arguments)
    found = with_canonical_products(program_of(closed, [None] * len(arguments), True, "cpu"))
    return with_repeated(found, lambda op: op.name in ("add", "mul"), absorbs)


def made(found, name):
    return [op for op in found.ops if op.name == name]


def product(y, w):
    return y @ w  # of the rows, merged


def rows(y):
    return y.reshape(-1, y.shape[-1])


def outer(y, z):
    return jnp.einsum("btf,btg->fg", y, z)  # of the left one in another order


@pytest.mark.parametrize(
    ("make", "read", "times"),
    [
        (lambda x, z: x * 2, lambda y, z, w: (product(y, w), y.sum(0)), 2),
        (lambda x, z: x * x, lambda y, z, w: (product(y, w), y.sum(0)), 2),
        (lambda x, z: x + z, lambda y, z, w: (product(y, w), y.sum(0)), 1),  # of two, it is dear
        (lambda x, z: x + z, lambda y, z, w: (product(y, w), outer(y, z)), 2),
        (lambda x, z: x * 2, lambda y, z, w: (product(y, w), outer(y, z), y.sum(0)), 3),
        (lambda x, z: x * 2, lambda y, z, w: (product(y, w), product(y, w.T)), 1),
        (lambda x, z: x * 2, lambda y, z, w: (y, jnp.tanh(y)), 2),
        (lambda x, z: x * 2, lambda y, z, w: (rows(y).sum(0), y.sum(0)), 1),
        (lambda x, z: x * 2, lambda y, z, w: (rows(y) @ w, rows(y).sum(0)), 2),
        (lambda x, z: jnp.tanh(x), lambda y, z, w: (product(y, w), y.sum(0)), 1),
    ],
)
def test_what_is_cheap_is_computed_for_each_way_to_read_it(make, read, times):
    found = repeated(lambda x, z, w: read(make(x, z), z, w), X, X, W)
    ops = [op for name in ("add", "mul", "tanh") for op in made(found, name)]
    ops = [op for op in ops if set(op.ins) <= set(found.inputs) | {-1}]
    assert len(ops) == times
    assert len({out for op in ops for out in op.outs}) == times
    read_values = {i for op in found.ops for i in op.ins} | set(found.outputs)
    assert all(op.outs[0] in read_values for op in ops)


def test_only_what_is_read_in_its_layout_must_be_in_memory():
    found = repeated(lambda x, w: (product(x * 2, w), (x * 2).sum(0)), X, W)
    (product_,), (sum_,) = made(found, "dot_general"), made(found, "reduce_sum")
    held = {op.outs[0]: op.held for op in made(found, "mul")}
    assert not held[product_.ins[0]] and held[sum_.ins[0]]


def test_a_reduction_reads_what_is_in_memory_in_another_shape():
    found = repeated(lambda x: (jnp.tanh(x * 2), rows(x * 2).sum(0)), X)
    (sum_,) = made(found, "reduce_sum")
    (reshape,) = (op for op in found.ops if op.outs[0] == sum_.ins[0])
    held = {op.outs[0]: op.held for op in made(found, "mul")}
    assert sorted(held.values()) == [False, True] and held[reshape.ins[0]]


def test_a_collective_reads_the_shape_that_it_is_handed():
    """One sums, too, and its name begins as those of reductions do."""

    def function(x):
        return jax.lax.psum_scatter(rows(x * 2), "i", tiled=True), (x * 2).sum(0)

    closed = jax.make_jaxpr(function, axis_env=[("i", 2)])(X)
    found = with_repeated(program_of(closed, [None], True, "cpu"), lambda _: True, absorbs)
    assert len(made(found, "mul")) == 2


def test_what_a_barrier_holds_in_another_shape_is_in_memory():
    found = repeated(lambda x: (jax.lax.optimization_barrier(rows(x * 2)), jnp.tanh(x * 2)), X)
    (barrier,) = made(found, "optimization_barrier")
    (reshape,) = (op for op in found.ops if op.outs[0] == barrier.ins[0])
    held = {op.outs[0]: op.held for op in made(found, "mul")}
    assert sorted(held.values()) == [False, True] and held[reshape.ins[0]]


@pytest.mark.parametrize("barrier", [False, True])
def test_what_a_barrier_holds_is_in_memory(barrier):
    def function(x):
        y = x * 2
        return jnp.tanh(jax.lax.optimization_barrier(y) if barrier else y)

    (op,) = made(repeated(function, X), "mul")
    assert op.held == barrier


def test_a_change_of_shape_between_is_kept():
    found = repeated(lambda x, w: ((x * 2).reshape(32, 16) @ w, (x * 2).sum(0)), X, W)
    (product_,) = made(found, "dot_general")
    (reshape,) = (op for op in found.ops if op.outs[0] == product_.ins[0])
    assert reshape.name == "reshape" and found.values[product_.ins[0]].shape == (32, 16)
    assert len(made(found, "mul")) == 2


@pytest.mark.parametrize(
    ("function", "rounded"),
    [(lambda x: x * 2, True), (lambda x: jnp.maximum(x, 1), False), (jnp.transpose, False)],
)
def test_results_of_arithmetic_are_rounded_to_bfloat16(function, rounded):
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jax.ShapeDtypeStruct((8, 4), dtype)
        found = program_of(jax.make_jaxpr(function)(x), [None], True, "cpu")
        op = found.ops[-1]
        expected = NEW_CPU and rounded and dtype == jnp.bfloat16
        assert is_rounded(op, found.values[op.outs[0]]) == expected


def kernels(function, *arguments):
    closed = jax.make_jaxpr(function)(*arguments)
    whole = fused(program_of(closed, [None] * len(arguments), NEW_CPU, "cpu"), "cpu")
    return [kernel.op.name for kernel in whole.kernels]


def test_kernels_of_what_is_repeated():
    def read_twice(x, w):
        return product(x * 2, w), (x * 2).sum(0)

    def behind_a_barrier(x):
        return jnp.tanh(jax.lax.optimization_barrier(x * 2))

    assert kernels(read_twice, X, W).count("mul") == (2 if NEW_CPU else 1)
    assert kernels(behind_a_barrier, X).count("mul") == (1 if NEW_CPU else 0)


def test_kernels_of_what_is_rounded():
    def function(x):
        y = x * 2
        return y + 1, y + 3

    for dtype in (jnp.bfloat16, jnp.float32):
        found = kernels(function, jax.ShapeDtypeStruct((8, 4), dtype))
        assert found.count("mul") == (NEW_CPU and dtype == jnp.bfloat16)
