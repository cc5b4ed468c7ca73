"""Meshes that follow the links: tori, several slices, hosts whose devices are not in order."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard.sharding import mesh as mesh_module
from gshard.sharding import nodes, topology
from gshard.sharding.group import data_group
from gshard.sharding.mesh import new_group
from gshard.sharding.topology import arrange, by_node
from gshard.wrapped.arguments import mesh_of
from tests.tiers import quick


def slices(count, torus):
    """TPU devices as JAX describes them, in any order."""
    found = [
        SimpleNamespace(platform="tpu", core_on_chip=0, coords=(*at, 0, 0)[:3], slice_index=i)
        for i in range(count)
        for at in itertools.product(*map(range, torus))
    ]
    random.Random(0).shuffle(found)
    return found


TABLE = [
    (1, (4, 4), 1, {}, {"shard_x": 4, "shard_y": 4}),
    (1, (16, 16), 4, {}, {"replica": 4, "shard_x": 4, "shard_y": 16}),
    (1, (16, 16), 32, {}, {"replica": 32, "shard": 8}),
    (1, (4, 4), 2, {}, {"replica": 2, "shard": 8}),  # two rows have a ring of their own
    (1, (4, 4), 16, {}, {"replica": 16, "shard": 1}),
    (1, (4, 4, 4), 1, {"model": 4}, {"shard_x": 4, "shard_y": 4, "model": 4}),
    (1, (8, 8), 2, {"a": 2, "b": 2}, {"replica": 2, "shard": 8, "a": 2, "b": 2}),
    (1, (8, 16), 2, {"model": 4}, {"replica": 2, "shard_x": 4, "shard_y": 4, "model": 4}),
    (2, (4, 4), 1, {}, {"shard_slice": 2, "shard_x": 4, "shard_y": 4}),
    (2, (4, 4), 2, {}, {"replica": 2, "shard_x": 4, "shard_y": 4}),
    (4, (4, 4), 2, {}, {"replica": 2, "shard_slice": 2, "shard_x": 4, "shard_y": 4}),
    (2, (4, 4), 4, {}, {"replica": 4, "shard": 8}),
    (3, (2, 4), 1, {}, {"shard_slice": 3, "shard": 8}),
    (2, (2, 2), 1, {"model": 2}, {"shard_slice": 2, "shard": 2, "model": 2}),
]


@pytest.mark.parametrize("count, torus, replica, extra, wanted", TABLE)
def test_axes_follow_the_torus_and_the_slices(count, torus, replica, extra, wanted):
    devices = slices(count, torus)
    found, names = arrange(devices, replica, extra)
    assert dict(zip(names, found.shape, strict=True)) == wanted
    assert sorted(map(id, found.flat)) == sorted(map(id, devices))
    of_slice = np.vectorize(lambda x: x.slice_index)(found)
    for axis, name in enumerate(names):
        for line in np.moveaxis(found, axis, -1).reshape(-1, found.shape[axis]):
            coords = np.array([x.coords for x in line])
            steps = np.abs(np.diff(coords, axis=0)).sum(axis=1)
            if name not in ("replica", "shard_slice"):
                assert len({x.slice_index for x in line}) == 1
            of_torus = name.startswith("shard_") and name != "shard_slice" and not extra
            if of_torus or (name == "model" and torus != (2, 2)):
                assert set(steps) <= {1}  # neighbours in the torus
    if replica > 1 and replica % count == 0:  # every replica is within a slice
        assert all(len(set(one.flat)) == 1 for one in of_slice)


def test_what_has_no_better_order():
    one = slices(1, (2, 4))
    assert arrange(one, 1, {}) is None  # one ring over all devices
    assert arrange(slices(1, (4, 4))[:-1], 1, {}) is None  # a part of a slice
    assert arrange(slices(2, (4, 4))[1:], 1, {}) is None  # slices that differ
    assert arrange(slices(1, (4, 4)), 3, {}) is None
    assert arrange(slices(2, (4, 4)), 1, {"model": 32}) is None
    assert arrange(jax.devices(), 1, {}) is None


def test_devices_of_a_node_become_neighbours():
    """As `srun --distribution=cyclic` gives ranks to hosts."""
    given = [SimpleNamespace(id=i, slice_index=i % 3) for i in range(9)]
    assert [x.id for x in by_node(given)] == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    assert by_node(jax.devices()) == jax.devices()


@pytest.fixture
def two_nodes(monkeypatch):
    """CPU devices say of no node: here odd and even ones are one each."""
    for module in (topology, nodes):
        monkeypatch.setattr(module, "node_of", lambda device: device.id % 2)


def test_the_mesh_and_its_shard_axes_follow_the_nodes(two_nodes):
    mesh = gshard.make_mesh()
    assert [x.id for x in mesh.devices.flat] == [0, 2, 4, 6, 1, 3, 5, 7]
    mesh = gshard.make_mesh(replica=2)
    assert [[x.id % 2 for x in row] for row in mesh.devices] == [[0] * 4, [1] * 4]
    mesh = gshard.make_mesh({"host": 2, "a": 2, "b": 2})
    group = data_group(mesh)
    assert group.shard == ("a", "b", "host") and group.across_nodes == 1
    assert [x.axis for x in group.hops] == ["host", "b", "a"]  # the smallest pieces
    across, within = group.sub_group(4)
    assert [x.axis for x in across] == ["host"]
    assert [x.axis for x in within] == ["b", "a"]
    across, within = group.sub_group(2)
    assert ([x.axis for x in across], [x.axis for x in within]) == (["host", "a"], ["b"])
    given = data_group(mesh, ("host", "a", "b"))
    assert given.shard == ("host", "a", "b") and given.across_nodes == 0


def test_an_error_names_sub_groups_that_exist(two_nodes):
    group = data_group(gshard.make_mesh({"host": 2, "a": 3}, devices=new_group([0, 2, 4, 1, 3, 5])))
    assert group.shard == ("a", "host")
    with pytest.raises(gshard.GShardError, match="Give a divisor of 3, or 3 times a divisor of 2"):
        group.sub_group(2)


@pytest.mark.parametrize("axis", ["shard", "shard_slice", "shard_x"])
def test_own_axes_have_names_of_their_own(axis):
    with pytest.raises(gshard.GShardError, match=f"extra= has an axis '{axis}'.*another"):
        gshard.make_mesh(extra={axis: 2})


def test_groups_of_devices_that_a_user_names_keep_them(monkeypatch):
    """On a torus too, where `make_mesh` would choose the replicas."""
    monkeypatch.setattr(mesh_module, "arrange", lambda *_: pytest.fail("arranged"))
    mesh, _ = mesh_of(new_group([0, 2]), new_group([0, 5]))
    assert [[x.id for x in row] for row in mesh.devices] == [[0, 2], [5, 7]]


def loss_fn(params, x):
    h = jax.numpy.tanh(x @ params["w1"] + params["b"])
    return jax.numpy.square(h @ params["w2"] - x).mean()


def problem():
    rng = np.random.default_rng(0)
    shapes = {"w1": (17, 40), "w2": (40, 17), "b": (40,)}
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    return params, rng.normal(size=(16, 17)).astype(np.float32)


CASES = list(itertools.product(["os", "os_g", "p_g_os"], [True, 4, 2]))


@pytest.mark.filterwarnings("ignore:reshard_after_forward=. changes nothing at level")
@pytest.mark.parametrize(
    "level, reshard", quick(CASES, [("os_g", True), ("p_g_os", 4), ("p_g_os", 2)])
)
def test_over_two_nodes_numbers_are_those_of_one_device(level, reshard, two_nodes):
    params, x = problem()
    tx = optax.adam(1e-2)
    mesh = gshard.make_mesh({"host": 2, "a": 2, "b": 2})
    state, plan = gshard.shard_train_state((params, tx), mesh, level, min_shard_size=0)
    assert plan.group.across_nodes == 1
    step = gshard.make_train_step(loss_fn, plan, reshard_after_forward=reshard)
    want, opt_state = params, tx.init(params)
    gradient, update = jax.jit(jax.grad(loss_fn)), jax.jit(tx.update)
    for _ in range(3):
        updates, opt_state = update(gradient(want, x), opt_state, want)
        want = optax.apply_updates(want, updates)
        state, _ = step(state, x)
    for name, x in gshard.full_params(state).items():
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-6)
    found, budget = gshard.audit(step, state, x), step.budget
    assert found.nodes == budget.nodes == 2
    assert not found.exceeded
    scattered = budget.network_bytes - sum(
        m.network_bytes for m in budget.communicated if m.kind == "all-gather"
    )
    # Of every gradient b a device has b/4 when it is summed between nodes, and sends half of it.
    assert found.network_bytes("reduce-scatter") == scattered
    stored = sum(x.stored_size for x in jax.tree.leaves(plan.grads)) * 4
    assert scattered == stored // 8
