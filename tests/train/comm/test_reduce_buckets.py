"""All-reduces of gradients in buckets: separate, in the order of the backward pass."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.analysis.hlo import read_program
from gshard.train.comm import buckets, collectives
from gshard.train.fsdp.use_analysis import by_first_use
from tests.ahead_of_time import found_by
from tests.tiers import quick

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=40),
    st.integers(1, 400),
    st.integers(1, 400),
)
def test_turns_keep_the_order_and_the_sizes(sizes, most, ends):
    found = buckets.ordered_buckets(sizes, most, ends)
    assert [i for turn in found for i in turn] == list(range(len(sizes)))
    for i, turn in enumerate(found):
        assert turn
        at_most = min(most, ends) if i in (0, len(found) - 1) else most
        assert len(turn) == 1 or sum(sizes[j] for j in turn) <= at_most


def test_no_buckets_are_one_collective():
    assert buckets.ordered_buckets([5, 5, 5], 0, 1) == [[0, 1, 2]]


def summed(leaves, size, ends, devices=3):
    """`leaves` differ by device along their first dimension."""
    mesh = gshard.make_mesh({"a": devices}, devices=jax.devices()[:devices])

    def on_device(xs):
        return collectives.reduce_bucket_by_bucket([x[0] for x in xs], ("a",), size, ends)

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=(jax.P("a"),), out_specs=jax.P(), check_vma=False
    )
    return jax.jit(mapped)(leaves)


@pytest.mark.parametrize("size", [0, 30, 2**23])
def test_sums_of_every_shape_and_dtype(size):
    rng = np.random.default_rng(0)
    shapes = [(), (0,), (7,), (4, 6), (2, 3, 5), (64,), (0, 3), ()]
    dtypes = ["float32", "bfloat16", "complex64", "float16", "int32"]
    leaves = [
        jnp.asarray(rng.integers(-9, 9, (3, *shape))).astype(dtypes[i % len(dtypes)])
        for i, shape in enumerate([*shapes, *shapes])
    ]
    for x, total in zip(leaves, summed(leaves, size, 10), strict=True):
        assert total.dtype == x.dtype
        np.testing.assert_array_equal(
            np.asarray(total, np.complex64), np.asarray(x, np.complex64).sum(0)
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_leaf(bad):
    leaves = [np.full((3, 40), x, np.float32) for x in (1, bad, 2, 3)]
    sums = summed(leaves, 64, 16)
    for total, want in zip(sums, (3, bad, 6, 9), strict=True):
        np.testing.assert_array_equal(total, np.full(40, want, np.float32))


def layered(params, x):
    """Layers whose names sort against the order of their use."""
    for name in ("z", "m", "a"):
        x = jnp.tanh(x @ params[name]["kernel"]) + params[name]["bias"]
    return jnp.square(x).mean()


WIDTHS = {"z": (16, 24), "m": (24, 40), "a": (40, 8)}
PARAMS = {
    name: {"kernel": np.ones(shape, np.float32) / 9, "bias": np.zeros(shape[1], np.float32)}
    for name, shape in WIDTHS.items()
}


def step_of(devices, level="dp", replica=1, **options):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices], replica=replica)
    state, plan = gshard.shard_train_state(
        (PARAMS, optax.adamw(1e-2)), mesh, level, min_shard_size=64
    )
    rows = np.random.default_rng(1).normal(size=(30 if devices % 2 else 32, 16))
    batch = gshard.shard_batch(rows.astype(np.float32), plan)
    return gshard.make_train_step(layered, plan, **options), state, batch


def all_reduced(step, state, batch):
    """Elements of the arrays that each all-reduce sums, in the order of the program; no scalars."""
    found = read_program(step.lower(state, batch).compile().as_text()).collectives
    sums = [c for c in found if c.kind == "all-reduce"]
    arrays = [[a.elements for a in c.operands if a.elements > 1] for c in sums]
    return [one for one in arrays if one]


def test_buckets_stay_apart_and_the_first_gradients_go_first():
    found = all_reduced(*step_of(8, bucket_size=1000))
    # a's bias and kernel with m's bias, packed but for the large ones; m's kernel; z.
    assert [sum(one) for one in found] == [8 + 320 + 40, 960, 24 + 384]
    (free,) = all_reduced(*step_of(8, bucket_size=0))  # as XLA on CPU will have it
    assert sorted(free) == [8, 24, 40, 320, 384, 960]


def test_by_default_xla_merges_all_reduces_on_cpu(monkeypatch):
    (arrays,) = all_reduced(*step_of(8))
    assert sorted(arrays) == [8, 24, 40, 320, 384, 960]  # none is packed
    group = step_of(8)[0].plan.group
    assert buckets.default_reduce_bucket(group) == 0
    monkeypatch.setattr(buckets, "uses_gloo", lambda: True)
    assert buckets.default_reduce_bucket(group) == buckets.BUCKET_SIZE
    monkeypatch.undo()
    on_gpu = dataclasses.replace(group, platform="gpu")
    assert buckets.default_reduce_bucket(on_gpu) == buckets.BUCKET_SIZE


def test_sums_over_replicas_are_apart_too():
    found = all_reduced(*step_of(8, "p_g_os", 2, bucket_size=250))
    of_parts = [sum(one) for one in found]
    # Shards over the replicas in buckets, and replicated leaves (below min_shard_size).
    assert sorted(of_parts) == sorted([960 // 4, 320 // 4, 384 // 4, 8 + 40 + 24])


@pytest.mark.parametrize(
    ("devices", "replica", "level"),
    quick(
        [(*mesh, level) for mesh in ((3, 1), (5, 1), (8, 2)) for level in ("dp", "os", "p_g_os")],
        [(3, 1, "os"), (5, 1, "p_g_os"), (8, 2, "dp")],
    ),
)
def test_turns_change_no_number(devices, replica, level):
    states = []
    for size in (0, 100, 1000, 2**23):
        step, state, batch = step_of(devices, level, replica, bucket_size=size)
        for _ in range(3):
            state, metrics = step(state, batch)
        norm = metrics.pop("grad_norm")  # a sum that XLA fuses otherwise
        states.append(([np.asarray(x) for x in jax.tree.leaves((state, metrics))], norm))
    (leaves, norm), *others = states
    for other, its_norm in others:
        np.testing.assert_allclose(its_norm, norm, rtol=1e-6)
        for x, want in zip(other, leaves, strict=True):
            np.testing.assert_array_equal(x, want)


def test_order_of_first_uses():
    def fun(unused, late, cast, early, kept, last):
        wide = cast.astype(jnp.float32)
        x = jax.jit(lambda x, y: x @ y)(jnp.ones((4, 4)), early)
        x = jax.checkpoint(lambda x, y: jnp.sin(x) * y.T)(x, kept)
        return x @ wide + late, last

    one = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    half = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    closed = jax.make_jaxpr(fun)(one, one, half, one, one, one)
    assert by_first_use(closed.jaxpr) == [3, 4, 2, 1, 0, 5]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x8", "tpu-v5e:2x4"])
def test_turns_stay_apart_on(target):
    found = found_by("train.comm.all_reduces_ahead_of_time", target)
    layer, (turns, beside), (free, _) = found["layer"], found["turns"], found["free"]
    assert len(turns) == 9  # the bias that is ready first, then a layer at a time
    assert turns[0] < layer / 1000 and max(turns) <= layer
    if target.startswith("h100"):
        assert beside == 7  # each but the first and the last overlaps with a product
    else:
        assert len(free) == 2 and free[1] > 6 * layer  # XLA would wait for all
