"""`reshard_after_forward`: what is kept of a gathered leaf for the backward pass."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard.analysis.hlo import read_program
from tests.ahead_of_time import found_by
from tests.tiers import quick
from tests.train.fsdp.test_interpreter import (
    LAYERS,
    LOSSES,
    D,
    cross_entropy,
    layer,
    one_device,
    params,
    rows,
)

MESHES = {"4": {"shard": 4}, "6": {"shard": 6}, "2x4": {"a": 2, "b": 4}, "4x2": {"a": 4, "b": 2}}
# On 2x4 half of the last axis, all of it; on 4x2 the last axis and half of the one before it.
SUB_GROUPS = [("4", 2), ("6", 3), ("6", 2), ("2x4", 2), ("2x4", 4), ("4x2", 2), ("4x2", 4)]
QUICK_GROUPS = [("6", 3), ("2x4", 2), ("4x2", 4)]


def divided(loss, shape, reshard, **options):
    n = int(np.prod(list(shape.values())))
    mesh = gshard.make_mesh(shape, devices=jax.devices()[:n])
    state, plan = gshard.shard_train_state(
        (params(), optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=16, scan_axes={"stack": 0}
    )
    made = gshard.value_and_grad(loss, plan, reshard_after_forward=reshard, **options)
    return jax.jit(made), state, plan


def batch():
    """Other rows for every device, of each mesh."""
    return {k: np.concatenate([rows(seed)[k] for seed in range(3)]) for k in rows()}


def assert_gradients(loss, shape, reshard, tolerance=3e-6, **options):
    fun, state, plan = divided(loss, shape, reshard, **options)
    given = batch()
    value, grads = fun(state.params, given)
    expected_value, expected = one_device(loss, params(), given)
    np.testing.assert_allclose(value, expected_value, rtol=2e-6)
    for name, layout in plan.grads.items():
        largest = np.abs(expected[name]).max()
        error = np.abs(layout.unpad(np.asarray(grads[name])) - expected[name]).max()
        assert error <= tolerance * largest, (name, error / largest)


QUICK = {"unrolled": False, "scan": 2, "scan, checkpoint": False, "tied": 2}


@pytest.mark.parametrize(
    "name, reshard", quick(itertools.product(LOSSES, (False, 2)), list(QUICK.items()))
)
def test_the_gradients_of_one_device(name, reshard):
    rounding = {"tolerance": 1e-5} if "complex" in name else {}  # it almost vanishes there
    assert_gradients(LOSSES[name], MESHES["4"], reshard, **rounding)


@pytest.mark.parametrize("mesh, n", quick(SUB_GROUPS, QUICK_GROUPS))
@pytest.mark.parametrize("name", quick(QUICK, ["unrolled"]))
def test_shards_of_any_sub_group_are_gathered_in_order(name, mesh, n):
    assert_gradients(LOSSES[name], MESHES[mesh], n)


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_micro_batches(reshard):
    assert_gradients(LOSSES["unrolled"], MESHES["4"], reshard, micro_batches=2)


def distinct(p, batch):
    """Every layer a leaf of its own, used through a view; the last one outside any product."""
    x = p["embed"][batch["ids"]]
    for i in range(LAYERS):
        x = layer(x, p[f"layer_{i}"].T.reshape(D, D))
    return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])


def of_distinct_leaves():
    given = params()
    stack = given.pop("stack")
    return given | {f"layer_{i}": w for i, w in enumerate(stack)}


def lowered(reshard):
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(
        (of_distinct_leaves(), optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=32
    )
    fun = gshard.value_and_grad(distinct, plan, reshard_after_forward=reshard)
    return jax.jit(fun).lower(state.params, rows()), plan


def test_an_unrolled_model_without_remat_gathers_again_what_its_backward_needs():
    """Every kernel twice, the last one and the table once; scattered once each."""
    whole, plan = lowered(False)
    assert plan.params["bias"].dim is None
    again, _ = lowered(True)
    between, _ = lowered(2)
    kernels = LAYERS + 1
    for found, gathers in ((whole, kernels + 1), (again, 2 * kernels)):
        assert found.as_text().count('"stablehlo.all_gather"') == gathers
    # Across and within for each leaf, and for kernels but the last one within once more.
    assert between.as_text().count('"stablehlo.all_gather"') == 3 * kernels + 1
    for found in (whole, again, between):
        assert found.as_text().count('"stablehlo.reduce_scatter"') == kernels + 1


def test_a_gather_waits_for_what_comes_before_its_use():
    """Else a compiler may gather everything first, or keep the first gather for the backward.

    The first layer follows the table, which is used with numbers of tokens: nothing to wait for.
    """
    barriers = [
        lowered(reshard)[0].as_text().count("stablehlo.optimization_barrier")
        for reshard in (True, False)
    ]
    assert barriers == [LAYERS + LAYERS, LAYERS]


@pytest.mark.parametrize("reshard", [True, False, 2, 4, 1])
@pytest.mark.parametrize("name", ["scan", "scan, checkpoint", "unrolled"])
def test_it_stays_within_the_budget(name, reshard):
    fun, state, plan = divided(LOSSES[name], MESHES["4"], reshard)
    found = gshard.audit(fun, state.params, batch(), plan=plan)
    budgeted = gshard.budget(plan, reshard_after_forward=reshard)
    assert found.elements("all-gather") <= budgeted.elements("all-gather")
    kept = gshard.budget(plan, reshard_after_forward=False).elements("all-gather")
    assert found.elements("all-gather") >= kept


@pytest.mark.parametrize("name", ["scan", "scan, checkpoint"])
def test_false_keeps_the_layers_of_a_scan_and_a_number_a_share_of_them(name):
    def gathers(reshard):
        fun, state, _ = divided(LOSSES[name], MESHES["4"], reshard)
        text = fun.lower(state.params, batch()).compile().as_text()
        found = [x for x in read_program(text).collectives if x.kind == "all-gather"]
        return sorted(x.elements for x in found if x.times == LAYERS)

    assert gathers(False) == [D * D]
    assert gathers(True) == [D * D] * 2
    assert gathers(2) == [D * D // 2, D * D, D * D]


@pytest.mark.parametrize(
    "reshard, words",
    [
        (3, ("reshard_after_forward=3", "sub-groups of 3", "divisor of 4")),
        (8, ("reshard_after_forward=8", "sub-groups of 8", "divisor of 4")),
        (0, ("reshard_after_forward=0", "1 or more")),
        ("yes", ("reshard_after_forward='yes'", "True", "False")),
    ],
)
def test_what_does_not_divide_the_group_is_refused(reshard, words):
    with pytest.raises(gshard.GShardError) as error:
        divided(LOSSES["scan"], MESHES["4"], reshard)
    assert all(word in str(error.value) for word in words)


def test_over_two_axes_a_sub_group_is_a_block_of_adjacent_devices():
    with pytest.raises(gshard.GShardError, match="2 x 4 dev.*sub-groups of 6.*divisor of 4, or"):
        divided(LOSSES["scan"], MESHES["2x4"], 6)


def test_it_says_that_it_changes_nothing_where_parameters_are_replicated():
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    _, plan = gshard.shard_train_state((params(), optax.sgd(0.1)), mesh, "os", min_shard_size=16)
    for option in ({"reshard_after_forward": False}, {"reshard_after_forward": 4}):
        with pytest.warns(gshard.GShardWarning, match="reshard_after_forward=.*at level 'os'"):
            gshard.make_train_step(LOSSES["scan"], plan, **option)
    alone = gshard.make_mesh(devices=jax.devices()[:1])
    _, plan = gshard.shard_train_state((params(), optax.sgd(0.1)), alone, "p_g_os")
    with pytest.warns(gshard.GShardWarning, match="prefetch=False changes nothing on one device"):
        gshard.make_train_step(LOSSES["scan"], plan, prefetch=False)


def test_a_train_step_counts_it_in_its_promise():
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(
        (params(), optax.adam(0.1)), mesh, "p_g_os", min_shard_size=16, scan_axes={"stack": 0}
    )
    found = []
    for reshard in (True, False):
        step = gshard.make_train_step(LOSSES["scan"], plan, reshard_after_forward=reshard)
        found.append(step.budget.elements("all-gather"))
    assert found[0] == 2 * found[1] > 0


@jax.checkpoint
def block(x, w):
    return jnp.tanh(x @ w)


def power_iteration(w):
    def turn(c):
        return c[0] + 1, c[1] @ c[1] / jnp.linalg.norm(c[1])

    return jax.lax.while_loop(lambda c: c[0] < 3, turn, (0, w))[1]


def views_in_checkpoints(x, w):
    for _ in range(3):
        x = block(x, w.T)
    return x


def casts_of_views(x, w):
    for _ in range(3):
        x = jnp.tanh(x @ w.T.astype(jnp.bfloat16).astype(jnp.float32))
    return x


def returned_by_a_call(x, w):
    x, w = jax.jit(lambda x, w: (jnp.tanh(x @ w), w))(x, w)
    return block(x, w)


HARD = {
    "what has no derivative, in a loop that has none": lambda x, w: (
        x @ power_iteration(jnp.sign(w))
    ),
    "a copy that is not differentiated": lambda x, w: x @ power_iteration(jax.lax.stop_gradient(w)),
    "views given to checkpoints": views_in_checkpoints,
    "here, and a view in a checkpoint": lambda x, w: block(x @ w, w.T),
    "casts of views": casts_of_views,
    "returned by a call": returned_by_a_call,
    "several calls": lambda x, w: jax.jit(layer)(jax.jit(layer)(x, w), w),
    "computed from it": lambda x, w: x @ jnp.concatenate([w, w[:, ::-1]], 1)[:, :D],
}


# The others are close to one of these.
QUICK_HARD = [
    "a copy that is not differentiated",
    "here, and a view in a checkpoint",
    "casts of views",
    "returned by a call",
    "computed from it",
]


@pytest.mark.parametrize("reshard", quick([True, 2], [True]))
@pytest.mark.parametrize("name", quick(HARD, QUICK_HARD))
def test_unusual_uses_keep_their_gradient_and_the_promise(name, reshard):
    def loss(p, batch):
        x = HARD[name](p["embed"][batch["ids"]], p["stack"][0])
        return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])

    def on_kernel(p, batch):  # the same with a leaf of its own
        x = HARD[name](p["embed"][batch["ids"]], p["kernel"])
        return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])

    assert_gradients(loss, MESHES["4"], reshard, 2e-2 if "casts" in name else 5e-6)
    given = {**params(), "kernel": params()["stack"][0]}
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(
        (given, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=16
    )
    fun = jax.jit(gshard.value_and_grad(on_kernel, plan, reshard_after_forward=reshard))
    with jax.checking_leaks():
        fun.lower(state.params, batch())
    found = gshard.audit(fun, state.params, batch(), plan=plan)
    budgeted = gshard.budget(plan, reshard_after_forward=reshard)
    for kind in ("all-gather", "reduce-scatter"):
        assert found.elements(kind) <= budgeted.elements(kind)


def test_a_parameter_of_several_uses_stays_gathered_between_them():
    """Gathered again for each, it would move more than promised; a penalty would gather all."""

    def penalised(p, batch):
        return distinct(p, batch) + 1e-4 * sum((w**2).sum() for w in p.values())

    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(
        (of_distinct_leaves(), optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=32
    )
    text = jax.jit(gshard.value_and_grad(penalised, plan)).lower(state.params, batch()).as_text()
    assert text.count('"stablehlo.all_gather"') == LAYERS + 2
    assert "stablehlo.optimization_barrier" not in text


def test_a_weight_that_a_recurrence_closes_over_is_gathered_again_once():
    """By its backward pass, which the last product comes before."""

    def recurrent(p, batch):
        x = p["embed"][batch["ids"]]

        def cell(h, x):
            return jnp.tanh(h @ p["layer_0"] + x), None

        h, _ = jax.lax.scan(cell, jnp.zeros((x.shape[0], D)), jnp.swapaxes(x, 0, 1))
        return cross_entropy(h @ p["out"] + p["bias"], batch["labels"][:, 0])

    given = {
        k: w for k, w in of_distinct_leaves().items() if k in ("embed", "layer_0", "out", "bias")
    }
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(
        (given, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=32
    )
    counts = []
    for reshard in (False, True):
        options = {"reshard_after_forward": reshard, "bucket_size": 0}
        fun = jax.jit(gshard.value_and_grad(recurrent, plan, **options))
        _, grads = fun(state.params, batch())
        expected = jax.grad(recurrent)(given, batch())
        for name in given:
            np.testing.assert_allclose(grads[name], expected[name], rtol=0, atol=2e-6)
        counts.append(fun.lower(state.params, batch()).as_text().count('"stablehlo.all_gather"'))
    assert counts == [3, 4]


def test_without_prefetch_a_gather_waits_for_its_own_operands_and_changes_no_bit():
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(
        (of_distinct_leaves(), optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=32
    )
    found, texts = [], []
    for sync in (False, True):
        fun = jax.jit(gshard.value_and_grad(distinct, plan, prefetch=not sync))
        found.append(jax.tree.leaves(fun(state.params, batch())))
        texts.append(fun.lower(state.params, batch()).as_text())
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)
    # The first layer waits too, for the rows of the table that it is used with.
    counts = [text.count("stablehlo.optimization_barrier") for text in texts]
    assert counts == [2 * LAYERS, 2 * LAYERS + 1]
    with pytest.raises(gshard.GShardError, match="prefetch='no' must be True or False"):
        gshard.value_and_grad(distinct, plan, prefetch="no")


@pytest.mark.slow
def test_two_layers_are_gathered_at_a_time_on_a_gpu():
    """Compiled for eight H100s, without one: what the schedule holds and overlaps."""
    found = found_by("train.fsdp.layers_on_gpu", "h100:1x8")
    layers = 8
    # The backward pass has the last one still, and no use of the first: nothing is before it.
    assert found["default"]["gathers"] == found["sync"]["gathers"] == 2 * layers - 2
    assert found["kept"]["gathers"] == layers
    assert found["default"]["whole"] == 2 and found["sync"]["whole"] == 1
    # Most overlap with the product before; without prefetch with a gradient's at most.
    assert found["default"]["spans"] >= 10 > layers // 2 >= found["sync"]["spans"]
    assert found["default"]["temp"] <= 0.6 * found["kept"]["temp"]
