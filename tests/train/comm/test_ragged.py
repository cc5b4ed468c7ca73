"""Rows that each device sends to each other device, another number to each."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard import make_mesh
from gshard._util.jaxpr import all_equations
from gshard.train.comm.ragged import RowExchange, ragged_all_to_all
from tests.ahead_of_time import found_by


def on_devices(count, fun, *arrays):
    """Calls a function on each device with its entry of arrays, and returns what each returns."""
    mesh = make_mesh({"x": count}, devices=jax.devices()[:count])
    each = lambda *xs: fun(*(x[0] for x in xs))[None]  # noqa: E731
    specs = {"in_specs": jax.P("x"), "out_specs": jax.P("x")}
    return np.asarray(jax.jit(jax.shard_map(each, mesh=mesh, check_vma=False, **specs))(*arrays))


def test_the_substitute_on_cpu_is_what_the_documentation_of_jax_says():
    """Its example: two devices, and a slice from each to each."""
    operand, output = np.array([[1, 2, 2], [3, 4, 0]]), np.zeros((2, 4), int)
    starts, sizes = np.array([[0, 1], [0, 1]]), np.array([[1, 2], [1, 1]])
    to, received = np.array([[0, 0], [1, 2]]), np.array([[1, 1], [2, 1]])
    call = functools.partial(ragged_all_to_all, axis_name="x")
    wide = operand[..., None], output[..., None]  # rows have a width
    found = on_devices(2, call, *wide, starts, sizes, to, received)
    np.testing.assert_array_equal(found[..., 0], [[1, 3, 0, 0], [2, 2, 4, 0]])


@pytest.mark.parametrize("devices", [1, 3, 5, 8])
def test_rows_arrive_in_the_order_of_the_senders_and_go_back(devices):
    rng = np.random.default_rng(devices)
    sizes = rng.integers(0, 4, (devices, devices)).astype(np.int32)
    sizes[0, -1] = 0
    n, length = int(sizes.sum(1).max()) + 1, int(sizes.sum(0).max()) + 2
    rows = rng.normal(size=(devices, n, 3)).astype(np.float32)
    wanted, back = np.zeros((devices, length, 3)), np.zeros(rows.shape)
    arrived, left = np.zeros(devices, int), np.zeros(devices, int)
    for i in range(devices):
        for j in range(devices):
            for _ in range(sizes[i, j]):
                wanted[j, arrived[j]] = rows[i, left[i]]
                back[i, left[i]] = np.cos(rows[i, left[i]])
                arrived[j], left[i] = arrived[j] + 1, left[i] + 1
    exchange = RowExchange("x", devices, native=False)

    def sent(rows):
        return exchange.send(rows, jnp.asarray(sizes), length)

    np.testing.assert_array_equal(on_devices(devices, sent, rows), wanted)
    gradient = jax.grad(lambda rows: jnp.sin(sent(rows)).sum())
    np.testing.assert_allclose(on_devices(devices, gradient, rows), back, rtol=1e-6)


def collectives_of(fun, native):
    """How often each is in the program of value and gradient of the sum of a function of rows."""
    mesh = make_mesh({"x": 4}, devices=jax.devices()[:4])
    exchange = RowExchange("x", 4, native)

    def both(rows):
        sent = lambda rows: exchange.send(rows, jnp.ones((4, 4), jnp.int32), 9)  # noqa: E731
        return sum(jax.value_and_grad(fun(lambda rows: jnp.sin(sent(rows)).sum()))(rows))

    specs = {"in_specs": jax.P("x"), "out_specs": jax.P("x")}
    mapped = jax.shard_map(both, mesh=mesh, check_vma=False, **specs)
    program = jax.make_jaxpr(mapped)(np.ones((20, 3), np.float32)).jaxpr
    return Counter(eqn.primitive.name for eqn in all_equations(program))


def test_where_xla_has_the_operation_no_row_is_gathered():
    """A ragged all-to-all of the rows there, and of their cotangents back."""
    found = collectives_of(lambda fun: fun, native=True)
    assert found["ragged_all_to_all"] == 2 and found["all_gather"] == 0
    found = collectives_of(lambda fun: fun, native=False)
    assert found["ragged_all_to_all"] == 0 and found["all_gather"] == 2 * 4


@pytest.mark.parametrize("names", [(), ("expert_exchange",)])
def test_rows_that_are_saved_by_their_name_are_not_sent_again(names):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    found = collectives_of(functools.partial(jax.checkpoint, policy=policy), native=True)
    assert found["ragged_all_to_all"] == (2 if names else 3)


@pytest.mark.parametrize("target", ["h100:1x8", "tpu-v5e:2x4"])
def test_a_step_with_experts_compiles_for_accelerators(target):
    """Rows are sent to their experts and back, and their cotangents; none is all-gathered."""
    found = found_by("train.comm.dropless_ahead_of_time", target)
    assert found["exceeded"] == []
    assert found["ragged-all-to-all"] == (4 + 3) * found["rows"]  # the batch has no cotangent
    assert found["all-gather"] == 0
