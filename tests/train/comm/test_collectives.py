"""Collectives by value: every order and every bucket, different data on every device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard import make_mesh
from gshard.sharding.group import data_group
from gshard.sharding.layout import Layout
from gshard.train.comm import buckets, collectives

MESHES = [{"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}]
SHAPES = [(16, 3), (5, 24), (13,), (7, 9, 2), (40, 40), (8,)]


def layouts(mesh, shapes=SHAPES, dtype="float32"):
    group = data_group(mesh)
    return [
        Layout(f"x{i}", shape, np.dtype(dtype), i % len(shape), group, None, "")
        for i, shape in enumerate(shapes)
    ]


def values(places, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(-50, 50, place.shape).astype(place.dtype) for place in places]


def put(mesh, places, wholes):
    return [
        jax.device_put(place.pad(x), jax.sharding.NamedSharding(mesh, place.spec))
        for place, x in zip(places, wholes, strict=True)
    ]


def on_devices(mesh, fun, args, before, after):
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
    return jax.jit(mapped)(*args)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_gather_puts_the_shards_in_order(sizes):
    mesh = make_mesh(sizes)
    places = layouts(mesh)
    wholes = values(places, 0)
    found = on_devices(
        mesh,
        lambda xs: [collectives.gather(x, p) for x, p in zip(xs, places, strict=True)],
        (put(mesh, places, wholes),),
        ([p.spec for p in places],),
        jax.P(),
    )
    for x, whole in zip(found, wholes, strict=True):
        for shard in x.addressable_shards:  # on every device, not only the first
            np.testing.assert_array_equal(np.asarray(shard.data), whole)


@pytest.mark.parametrize("bucket", [0, 64, 2**23])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_scatter_sums_and_keeps_order(sizes, bucket):
    mesh = make_mesh(sizes)
    places = layouts(mesh)
    each = [values(places, seed) for seed in range(8)]
    stacked = [np.stack([device[i] for device in each]) for i in range(len(places))]
    found = on_devices(
        mesh,
        lambda xs: collectives.scatter_leaves([x[0] for x in xs], places, bucket),
        (stacked,),
        (jax.P(mesh.axis_names),),
        [p.spec for p in places],
    )
    for x, place, stack in zip(found, places, stacked, strict=True):
        np.testing.assert_array_equal(place.unpad(np.asarray(x)), stack.sum(0))  # integers: exact


@pytest.mark.parametrize("bucket", [0, 64, 2**23])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_gather_in_buckets_equals_array_by_array(sizes, bucket):
    mesh = make_mesh(sizes)
    places = layouts(mesh)
    wholes = values(places, 1)
    found = on_devices(
        mesh,
        lambda xs: collectives.all_gather_updated(xs, places, bucket),
        (put(mesh, places, wholes),),
        ([p.spec for p in places],),
        jax.P(),
    )
    for x, whole in zip(found, wholes, strict=True):
        np.testing.assert_array_equal(np.asarray(x), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_layers_of_a_stack_keep_their_order(sizes, dtype, monkeypatch):
    monkeypatch.setattr(buckets, "LARGE_LAYER", 1)
    monkeypatch.setattr(buckets, "LAYERED_PLATFORMS", ("cpu",))
    mesh = make_mesh(sizes)
    places = layouts(mesh, [(5,), (3, 20), (2, 3, 13), (4, 8, 2)], dtype)
    wholes = values(places, 1)
    found = on_devices(
        mesh,
        lambda xs, old: collectives.all_gather_updated(xs, places, 2**20, into=old),
        (put(mesh, places, wholes), values(places, 2)),
        ([p.spec for p in places], jax.P()),
        jax.P(),
    )
    for x, whole in zip(found, wholes, strict=True):
        assert x.dtype == whole.dtype
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole)


@pytest.mark.parametrize("call", ["scatter_leaves", "all_gather_updated"])
def test_a_bucket_holds_one_dtype(call):
    """In a shared bucket the narrow leaf would be widened, and more would move."""
    mesh = make_mesh()
    places = [
        place
        for pair in zip(layouts(mesh), layouts(mesh, dtype="float16"), strict=True)
        for place in pair
    ]
    wholes = values(places, 3)
    scattering = call == "scatter_leaves"
    specs = [p.spec for p in places]
    found = on_devices(
        mesh,
        lambda xs: getattr(collectives, call)(xs, places, 2**20),
        (wholes if scattering else put(mesh, places, wholes),),
        ([jax.P()] * len(places) if scattering else specs,),
        specs if scattering else [jax.P()] * len(places),
    )
    for x, place, whole in zip(found, places, wholes, strict=True):
        assert x.dtype == place.dtype
        expected = whole * 8 if scattering else whole
        np.testing.assert_array_equal(place.unpad(np.asarray(x)), expected)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_local_shard_is_what_gather_puts_back(sizes):
    mesh = make_mesh(sizes)
    places = layouts(mesh)
    wholes = values(places, 2)
    found = on_devices(
        mesh,
        lambda xs: collectives.slice_shards(xs, places),
        (wholes,),
        (jax.P(),),
        [p.spec for p in places],
    )
    for x, place, whole in zip(found, places, wholes, strict=True):
        np.testing.assert_array_equal(np.asarray(x), place.pad(whole))


@pytest.mark.parametrize("bucket", [0, 64, 2**23])
def test_reduce_in_buckets_of_one_dtype(bucket):
    mesh = make_mesh({"a": 8})
    places = layouts(mesh) + layouts(mesh, [(4, 4), (3,)], "int32")
    stacked = [np.stack([values(places, seed)[i] for seed in range(8)]) for i in range(len(places))]
    found = on_devices(
        mesh,
        lambda xs: collectives.reduce_leaves([x[0] for x in xs], ("a",), bucket),
        (stacked,),
        (jax.P("a"),),
        jax.P(),
    )
    for x, stack in zip(found, stacked, strict=True):
        assert x.dtype == stack.dtype
        np.testing.assert_array_equal(np.asarray(x), stack.sum(0))


@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from("xy")), max_size=130),
    st.integers(0, 200),
)
@settings(max_examples=200, deadline=None)
def test_buckets_hold_every_leaf_once_and_are_bounded(leaves, most):
    sizes, kinds = [size for size, _ in leaves], [kind for _, kind in leaves]
    found = buckets.assign_buckets(sizes, kinds, most)
    assert sorted(i for bucket in found for i in bucket) == list(range(len(leaves)))
    for bucket in found:
        assert bucket == sorted(bucket)
        assert len(bucket) <= buckets.MAX_LEAVES
        assert len({kinds[i] for i in bucket}) == 1
        if len(bucket) > 1:
            assert sum(sizes[i] for i in bucket) <= most
            assert all(sizes[i] * 4 <= most for i in bucket)  # large ones go alone, without a copy


def test_small_neighbours_share_a_bucket():
    assert buckets.assign_buckets([1] * 120, ["x"] * 120, 1000) == [
        list(range(50)),
        list(range(50, 100)),
        list(range(100, 120)),
    ]
