"""Experts that drop no token, in steps: on slices of sequences, in scans, and where refused."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import gshard
from tests.experts import (
    DATA_EXPERT,
    KEEP,
    D,
    E,
    F,
    K,
    batch,
    dropless,
    mean_loss,
    params,
    sharded,
    worst,
)
from tests.tiers import quick

LOSS = mean_loss("dropless", balance=True)
SENT = mean_loss("dropless, sent", balance=True)  # by all-to-alls
SEQUENCES = {
    "sequence": ({"shape": {"data": 4}, "sequence": 2}, None, "contiguous", 6),
    "zig-zag": ({"shape": {"data": 4}, "sequence": 2}, None, "zigzag", 8),
    "sequence and expert": ({"sequence": 2, "expert": 2}, KEEP, "contiguous", 6),
    "zig-zag and expert": ({"sequence": 2, "expert": 2}, KEEP, "zigzag", 8),
    "all": ({"sequence": 2, "expert": 2, "replica": 2}, KEEP, "contiguous", 6),
    "3 of 6 devices": (
        {"shape": {"data": 2, "expert": 3}, "devices": jax.devices()[:6]},
        KEEP,
        "contiguous",
        5,
    ),
}


def check(loss: Any, given: Any, mesh: Any, p: Any = None, keep: Any = KEEP, **options) -> None:
    """No warning, and loss and gradient are those of one device."""
    p = params() if p is None else p
    order = options.pop("sequence_order", "contiguous")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, plan = sharded(mesh, "p_g_os", p, keep=keep, sequence_order=order)
        value, grads = jax.jit(gshard.value_and_grad(loss, plan, **options))(state.params, given)
    wanted, reference = jax.jit(jax.value_and_grad(loss))(p, given)
    assert abs(float(value) - float(wanted)) < 2e-6 and worst(grads, reference) < 2e-6


@pytest.mark.parametrize("loss", [LOSS, SENT], ids=["gathered", "sent"])
@pytest.mark.parametrize("name", quick(SEQUENCES, ["zig-zag and expert"]))
def test_tokens_of_slices_of_sequences(name, loss):
    mesh, keep, order, tokens = SEQUENCES[name]
    p = params(experts=12) if name == "3 of 6 devices" else None
    check(loss, batch(tokens=tokens), mesh, p, keep, sequence_order=order)


def layers(p: Any, given: Any, by: Any = "gather") -> jax.Array:
    """Three layers in a scan, rematerialized."""

    @jax.checkpoint
    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return h + dropless(p, h, by), None

    h = jnp.tanh(p["embed"][given["x"]])
    h, _ = jax.lax.scan(layer, h, {"router": p["router"], "experts": p["experts"]})
    losses = optax.softmax_cross_entropy_with_integer_labels(h @ p["head"], given["y"])
    return (losses * given["mask"]).sum() / given["mask"].sum()


@pytest.mark.parametrize(
    ("micro_batches", "by"),
    quick([(1, "gather"), (3, "gather"), (1, "all_to_all"), (3, "all_to_all")], [(3, "gather")]),
)
def test_scanned_layers_of_a_masked_mean(micro_batches, by):
    p = params()
    stacks = {
        k: jax.tree.map(lambda x: np.stack([x, x / 2, -x]), p[k]) for k in ("router", "experts")
    }
    keep = {"experts/": ("expert", 1)}
    loss = functools.partial(layers, by=by)
    check(loss, batch(), DATA_EXPERT, {**p, **stacks}, keep, micro_batches=micro_batches)


@pytest.mark.parametrize("by", ["gather", "all_to_all"])
@pytest.mark.parametrize("skew", [0.0, 50.0])
def test_tokens_that_all_go_to_the_experts_of_one_device(skew, by):
    """Or to all of them. The experts of the first device are 0 and 1."""
    p, used = params(), []
    p["bias"] = -skew * np.arange(E, dtype=np.float32)

    def loss(p, given):
        h = jnp.tanh(p["embed"][given["x"]])

        def experts(p, rows, sizes):
            return jax.lax.ragged_dot(rows, p["up"], sizes)

        routing = gshard.expert.route(h @ p["router"] + p["bias"], K, capacity_factor=None)
        used.append(routing.indices)
        return jnp.square(gshard.expert.dropless(experts, p["experts"], h, routing, by=by)).mean()

    del p["experts"]["down"], p["head"]
    loss(p, batch())
    assert len(np.unique(used[0])) == (E if skew == 0 else K)
    check(loss, batch(), DATA_EXPERT, p)


@pytest.mark.parametrize("micro_batches", quick([1, 2], []))
def test_experts_that_are_not_kept(micro_batches):
    mesh = {"shape": {"data": 4}, "devices": jax.devices()[:4]}
    loss = LOSS if micro_batches == 1 else mean_loss("dropless")  # without one more forward pass
    check(loss, batch(), mesh, keep=None, micro_batches=micro_batches)


def test_what_a_kernel_leaves_in_the_rows_of_no_expert_changes_nothing():
    def loss(p, given):
        def experts(p, rows, sizes):
            inner = jnp.tanh(jax.lax.ragged_dot(rows, p["up"], sizes))
            y = jax.lax.ragged_dot(inner, p["down"], sizes)
            return jnp.where((jnp.arange(len(rows)) < sizes.sum())[:, None], y, jnp.nan)

        h = jnp.tanh(p["embed"][given["x"]])
        routing = gshard.expert.route(h @ p["router"], K, capacity_factor=None)
        h += gshard.expert.dropless(experts, p["experts"], h, routing)
        return jnp.square(h @ p["head"]).mean()

    check(loss, batch(), DATA_EXPERT)


def test_tokens_are_gathered_and_no_expert_is():
    state, plan = sharded(DATA_EXPERT, "p_g_os")
    step = gshard.make_train_step(LOSS, plan)
    audit = gshard.audit(step, state, batch())
    assert audit.exceeded == ()
    tokens = 24 * 6 // 2  # of the devices of one expert axis
    operation = "gshard.expert.dropless"
    found = {(x.kind, x.elements, x.times) for x in step.loss_transfers if x.operation == operation}
    assert found == {("all-gather", tokens * D, 1), ("all-gather", tokens * K, 2)}
    sums = {(x.kind, x.elements) for x in step.loss_transfers if x.kind == "reduce-scatter"}
    assert sums == {("reduce-scatter", tokens * D)}
    lines = {x.line for x in step.loss_transfers if x.operation == operation}
    assert len(lines) == 1 and next(iter(lines)).startswith("experts.py:")
    over = [x for x in audit.collectives if "expert" in (x.axes or ()) and x.purpose == "gather"]
    assert sum(x.elements for x in over) < E * D * F // 2  # the embedding and the head alone


def test_tokens_are_sent_to_their_experts_alone():
    """Traced for GPUs: two ragged all-to-alls over the axis, of the rows of one device."""
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    options = {"keep": KEEP, "min_shard_size": 0}
    state, plan = gshard.shard_train_state((params(), optax.sgd(0.1)), mesh, "p_g_os", **options)
    step = gshard.make_train_step(SENT, plan)
    given = jax.eval_shape(lambda x: x, batch())
    with pytest.raises(ValueError, match="AbstractMesh"):  # it is traced, and not compiled
        step.lower(state, given)
    of_axis = [x for x in step.loss_transfers if x.axes == ("expert",)]
    sent = [x for x in of_axis if x.kind == "ragged-all-to-all"]
    rows = 24 * 6 // 8 * K
    assert [(x.elements, x.times) for x in sent] == [(rows * D, 2)]
    assert max(x.elements for x in of_axis if x not in sent) < rows * D


@pytest.mark.parametrize("by", ["gather", "all_to_all"])
def test_an_index_out_of_range_is_no_expert(by):
    """Such as -1 for padding: that token gets nothing, and computes nothing."""

    def loss(p, given):
        h = jnp.tanh(p["embed"][given["x"]])
        routing = gshard.expert.route(h @ p["router"], K, capacity_factor=None)
        none = jnp.where(given["y"] % 2 == 0, -1, E)[..., None]
        indices = jnp.where(given["mask"][..., None] > 0, routing.indices, none)
        routing = dataclasses.replace(routing, indices=indices)
        kernel = {"up": p["experts"]["up"]}
        experts = lambda p, rows, sizes: jax.lax.ragged_dot(rows, p["up"], sizes)  # noqa: E731
        return jnp.square(gshard.expert.dropless(experts, kernel, h, routing, by=by)).mean()

    p = params()
    del p["experts"]["down"], p["head"]
    check(loss, batch(), DATA_EXPERT, p)


@pytest.mark.parametrize("by", ["gather", "all_to_all"])
def test_an_expert_that_a_token_has_twice_is_not_counted_once(by):
    """Devices with one expert have one row for each token."""

    def loss(p, given):
        h = jnp.tanh(p["embed"][given["x"]])
        all_first = jnp.zeros((*given["x"].shape, K), jnp.int32)
        weights = jnp.ones(all_first.shape, jnp.float32)
        twice = gshard.expert.Routing(all_first, weights, all_first, E, given["x"].shape[1])
        kernel = {"up": p["experts"]["up"]}
        experts = lambda p, rows, sizes: jax.lax.ragged_dot(rows, p["up"], sizes)  # noqa: E731
        return gshard.expert.dropless(experts, kernel, h, twice, by=by).mean()

    assert np.isfinite(loss(params(), batch()))  # a device with all experts has enough rows
    state, plan = sharded({"expert": 8}, "os")
    assert np.isnan(gshard.value_and_grad(loss, plan)(state.params, batch())[0])


def test_parameters_that_are_kept_on_another_dimension_are_refused():
    keep = {"up": ("expert", 2), "down": ("expert", 1)}
    state, plan = sharded(DATA_EXPERT, "os", keep=keep)
    said = (
        r"dropless at .*kept on dimension [12], and the experts are dimension 0. .*\('expert', 0\)"
    )
    with pytest.raises(gshard.GShardError, match=said):
        gshard.value_and_grad(LOSS, plan)(state.params, batch())


def test_a_function_that_closes_over_parameters_is_refused():
    def loss(p, given):
        h = jnp.tanh(p["embed"][given["x"]])
        routing = gshard.expert.route(h @ p["router"], K, capacity_factor=None)

        def experts(q, rows, sizes):
            return jax.lax.ragged_dot(rows * p["head"][0, 0], q["up"], sizes)

        return jnp.square(gshard.expert.dropless(experts, p["experts"], h, routing)).mean()

    state, plan = sharded(DATA_EXPERT, "os")
    with pytest.raises(gshard.GShardError, match=r"test_dropless.*closes over traced values. Pass"):
        gshard.value_and_grad(loss, plan)(state.params, batch())


def test_a_gradient_inside_the_loss_gathers_the_experts_with_a_warning():
    def loss(p, given):
        fixed = jax.lax.stop_gradient(p)  # JAX has no second derivative of ragged_dot
        inner = jax.grad(lambda q: LOSS({**fixed, "experts": q}, given))(fixed["experts"])
        return LOSS(p, given) + sum(jnp.square(x).sum() for x in jax.tree.leaves(inner))

    state, plan = sharded(DATA_EXPERT, "os")
    with pytest.warns(gshard.GShardWarning, match="all-gathers a parameter that is kept on 'exp"):
        value, grads = gshard.value_and_grad(loss, plan)(state.params, batch())
    wanted, reference = jax.value_and_grad(loss)(params(), batch())
    assert abs(float(value) - float(wanted)) < 2e-6 and worst(grads, reference) < 2e-6
