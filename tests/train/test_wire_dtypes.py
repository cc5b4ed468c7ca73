"""Steps that send parameters and gradients quantized: numbers, bits, bytes, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import gshard
from gshard.sharding.precision import Precision
from gshard.sharding.quantized import LARGEST
from gshard.train.comm import quantized
from tests.program_text import named_by_content
from tests.tiers import quick

WIDTH, OUT, LAYERS = 97, 70, 3  # no multiple of the devices
INT8 = gshard.Precision("float32", gather_dtype="int8", scatter_dtype="int8")
MESHES = [{"a": 3}, {"a": 5}, {"a": 8}, {"a": 2, "b": 4}]


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"layers": (LAYERS, WIDTH, WIDTH), "out": (WIDTH, OUT), "bias": (OUT,)}
    return {k: (rng.normal(size=s) / WIDTH**0.5).astype(np.float32) for k, s in shapes.items()}


def batch_of(rows, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (rows, WIDTH), "y": (rows, OUT)}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def loss_of(params, batch, remat=False):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    layer = jax.checkpoint(layer) if remat else layer
    x = jax.lax.scan(layer, batch["x"], params["layers"])[0]
    return jnp.mean((x @ params["out"] + params["bias"] - batch["y"]) ** 2)


def mesh_of(sizes):
    return gshard.make_mesh(sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def sharded(sizes, level, precision: Any = INT8, tx=None, **options):
    tx = optax.sgd(1.0) if tx is None else tx
    options = {"min_shard_size": 200, "scan_axes": {"layers": 0}, "precision": precision, **options}
    return gshard.shard_train_state((params_of(), tx), mesh_of(sizes), level, **options)


def seen_by_the_loss(plan, params):
    """The parameters that every device computes with: each shard rounded by its owner."""

    def rounded(layout, x):
        how = layout.gathered_as
        if layout.dim is None or how is None:
            return x
        shards = np.split(layout.pad(x), layout.group.size, axis=layout.dim)
        parts = [
            quantized.dequantize(quantized.quantize(jnp.asarray(part), how), how, x.shape[how.dim])
            for part in shards
        ]
        return np.asarray(layout.unpad(np.concatenate(parts, axis=layout.dim)))

    return jax.tree.map(rounded, plan.params, params)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize("sizes", quick(MESHES, [{"a": 3}]), ids=str)
def test_a_gradient_is_off_by_half_a_step_of_each_device(sizes, level, k):
    state, plan = sharded(sizes, level)
    devices, rows = plan.group.size, 4 * plan.group.size
    batch, params = batch_of(rows), params_of()
    step = gshard.make_train_step(loss_of, plan, micro_batches=k)
    new, metrics = step(state, batch)
    found = {name: params[name] - x for name, x in gshard.full_params(new).items()}

    at = seen_by_the_loss(plan, params)
    assert (at["out"] != params["out"]).any() == (level == "p_g_os")
    one = jax.jit(jax.value_and_grad(loss_of))
    value, exact = one(at, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    own = [
        one(at, {n: x.reshape(devices, 4, -1)[d] for n, x in batch.items()})[1]
        for d in range(devices)
    ]
    times = k if level != "os" else 1
    for name, g in exact.items():
        sent = next(x for x in jax.tree.leaves(plan.grads) if x.path == name).scattered_as
        assert (sent is None) == (name == "bias")
        # a device's gradient of a micro-batch may be larger than of all its examples: factor 2
        largest = sum(np.abs(x[name]).max() for x in own) / devices * (2 if k > 1 else 1)
        bound = (times * len(sizes) * largest / LARGEST["int8"] / 2 * 1.02) if sent else 0
        error = np.abs(found[name] - g).max()
        assert error <= bound + 2e-6 * np.abs(g).max(), name
        assert error > 0 or sent is None


GROUPS = [({"a": 8}, 4), ({"a": 2, "b": 3}, 3), ({"a": 5}, 5)]


@pytest.mark.parametrize("remat", quick([False, True], [True]))
@pytest.mark.parametrize("sizes, n", quick(GROUPS, [({"a": 2, "b": 3}, 3)]), ids=str)
def test_resharding_after_the_forward_changes_no_bit(sizes, n, remat):
    def after(reshard):
        state, plan = sharded(sizes, "p_g_os")
        step = gshard.make_train_step(
            lambda p, b: loss_of(p, b, remat), plan, reshard_after_forward=reshard
        )
        batch = batch_of(4 * plan.group.size)
        assert gshard.audit(step, state, batch).exceeded == ()
        return gshard.full_params(step(state, batch)[0])

    expected = after(True)
    for other in (n, False):
        jax.tree.map(np.testing.assert_array_equal, after(other), expected)


CAST = [
    lambda w: w.astype(jnp.bfloat16),  # before the all-gather
    lambda w: w.T.astype(jnp.bfloat16).T,  # of a view
]


@pytest.mark.parametrize("n", quick([True, 4], [4]))
@pytest.mark.parametrize("cast", CAST, ids=["cast", "view"])
def test_a_cast_parameter_is_sent_quantized_too(cast, n):
    def loss(p, b):
        def body(p, x):
            w = cast(p["out"])
            assert w.dtype == jnp.bfloat16
            return lax.dot(x.astype(jnp.bfloat16), w).astype(jnp.float32)

        return jnp.mean((jax.checkpoint(body)(p, b["x"]) + p["bias"] - b["y"]) ** 2)

    params = {k: x for k, x in params_of().items() if k != "layers"}
    batch = batch_of(32)

    def after(wire):
        state, plan = gshard.shard_train_state(
            (params, optax.sgd(1.0)), mesh_of({"a": 8}), "p_g_os", min_shard_size=200, wire=wire
        )
        step = gshard.make_train_step(loss, plan, reshard_after_forward=n)
        products = re.findall(r"dot_general.*:(.*)->", step.lower(state, batch).as_text())
        assert products and not any("xf32" in operands for operands in products)
        audit = gshard.audit(step, state, batch)
        assert audit.exceeded == ()
        sent = {row.dtype for row in audit.collectives if row.purpose == "gather"}
        assert sent == ({"u8"} if wire else {"f32"})  # XLA:CPU sends bfloat16 as float32
        return gshard.full_params(step(state, batch)[0])

    found, expected = after("int8"), after(None)
    change = np.abs(expected["out"] - params["out"]).max()
    assert 0 < np.abs(found["out"] - expected["out"]).max() < 0.05 * change


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize("sizes", quick(MESHES, [{"a": 8}]), ids=str)
@pytest.mark.parametrize("dtype", quick(list(LARGEST), ["int4"]))
def test_the_budget_is_what_the_program_sends(dtype, sizes, level):
    precision = Precision("float32", gather_dtype=dtype, scatter_dtype=dtype)
    state, plan = sharded(sizes, level, precision)
    batch = batch_of(8 * plan.group.size)
    for k in (1, 2):
        step = gshard.make_train_step(loss_of, plan, micro_batches=k)
        nodes = {"devices_per_node": 4} if plan.group.size == 8 else {}
        budget = gshard.budget(plan, micro_batches=k, **nodes)
        audit = gshard.audit(step, state, batch, budget=budget, **nodes)
        assert audit.exceeded == ()
        for purpose, kind in (("scatter", "reduce-scatter"), ("update", "all-gather")):
            rows = [x for x in audit.collectives if (x.purpose, x.kind) == (purpose, kind)]
            traffic = [x for x in budget.communicated if x.purpose == purpose]
            assert sum(x.elements for x in rows) == sum(x.elements for x in traffic)
            assert sum(x.wire_bytes for x in rows) == pytest.approx(
                sum(x.wire_bytes for x in traffic), abs=8
            )
            if nodes:
                assert sum(x.network_bytes for x in rows) == pytest.approx(
                    sum(x.network_bytes for x in traffic), abs=8
                )
        exact = gshard.budget(sharded(sizes, level, None)[1], micro_batches=k)
        for traffic in budget.communicated:
            plain = next(x for x in exact.communicated if x.purpose == traffic.purpose)
            share = traffic.wire_bytes / plain.wire_bytes
            most = {"scatter": 0.27, "gather": 0.27}.get(traffic.purpose, 1)  # of float32
            assert share <= (most / 2 + 0.01 if dtype == "int4" and most < 1 else most)


def trained(steps, start=None, **options):
    """State and plan after some steps, from the state of an earlier run if one is given."""
    precision = Precision("float32", gather_dtype="int8", scatter_dtype="int4")
    state, plan = sharded({"a": 2, "b": 2}, "p_g_os", precision, optax.adam(1e-2))
    step = gshard.make_train_step(loss_of, plan, **options)
    state = state if start is None else start(state)
    for i in range(*steps):
        state, _ = step(state, batch_of(16, i))
    return state, plan


def test_random_rounding_is_the_same_after_a_restart(tmp_path):
    whole = gshard.full_params(trained((0, 4))[0])
    half, _ = trained((0, 2))
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, half)

    def restored(state):
        with gshard.Checkpointer(tmp_path) as checkpointer:
            return checkpointer.restore(like=state).state

    again = gshard.full_params(trained((2, 4), restored)[0])
    jax.tree.map(np.testing.assert_array_equal, again, whole)


SHORT = gshard.Quantized("int8", block=32)


@pytest.mark.parametrize("sizes", quick(MESHES, [{"a": 3}]), ids=str)
def test_shorter_blocks_round_less_and_their_scales_are_counted(sizes):
    def after(dtype):
        precision = Precision("float32", gather_dtype=dtype, scatter_dtype=dtype)
        state, plan = sharded(sizes, "p_g_os", precision)
        step = gshard.make_train_step(loss_of, plan)
        audit = gshard.audit(step, state, batch_of(8 * plan.group.size))
        assert audit.exceeded == ()
        sent = sum(x.wire_bytes for x in audit.collectives if x.purpose in ("gather", "scatter"))
        at = seen_by_the_loss(plan, params_of())
        return sent, np.abs(at["layers"] - params_of()["layers"]).mean()

    (few, coarse), (more, fine) = after("int8"), after(SHORT)
    assert 1.02 * few < more < 1.07 * few
    assert 0 < fine < 0.9 * coarse


@pytest.mark.parametrize("dtype", ["int4", gshard.Quantized("int8", rounding="stochastic")])
def test_random_rounding_differs_by_step_micro_batch_and_layer(dtype):
    """Of the same examples: what is left of the difference is rounding."""

    precision = Precision("float32", scatter_dtype=dtype)
    state, plan = sharded({"a": 4}, "os_g", precision)
    step = gshard.make_train_step(loss_of, plan, donate=False)

    def gradient(number):
        new, _ = step(state.replace(step=state.step + number), batch_of(16))
        return {name: params_of()[name] - x for name, x in gshard.full_params(new).items()}

    exact = jax.jit(jax.grad(loss_of))(params_of(), batch_of(16))
    errors = [gradient(i)["out"] - exact["out"] for i in range(12)]
    again = gradient(3)["out"] - exact["out"]
    np.testing.assert_array_equal(again, errors[3])
    one, mean = (np.abs(x).mean() for x in (errors[0], np.mean(errors, axis=0)))
    assert mean < one / 2  # sqrt(12) is 3.5; the same rounding in each step would stay at one
    layers = gradient(0)["layers"] - np.asarray(exact["layers"])
    largest = np.abs(layers).max()
    assert (
        np.corrcoef(layers.reshape(LAYERS, -1) / largest).max(
            where=~np.eye(LAYERS, dtype=bool), initial=0
        )
        < 0.1
    )


def test_a_bad_gradient_is_skipped():
    state, plan = sharded({"a": 4}, "p_g_os")
    step = gshard.make_train_step(loss_of, plan)
    for bad in (np.inf, np.nan):
        batch = batch_of(16)
        batch["y"][3, 5] = bad
        before = gshard.full_params(state)
        state, metrics = step(state, batch)
        jax.tree.map(np.testing.assert_array_equal, gshard.full_params(state), before)
    assert int(metrics["skipped_steps"]) == 2


@pytest.mark.filterwarnings("ignore:.*wire_exceptions= has None for every sharded array")
@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_programs_without_it_stay_as_they_are(level):
    """Of a plan in which every array is excepted, which takes every place that looks for it."""
    excepted = dataclasses.replace(INT8, wire_exceptions={"": None})

    def text(precision):
        jax.clear_caches()  # else what was traced before is not traced again
        state, plan = sharded({"a": 2, "b": 2}, level, precision, optax.adam(1e-2))
        step = gshard.make_train_step(loss_of, plan, micro_batches=2)
        return named_by_content(step.lower(state, batch_of(16)).as_text()), state

    plain, _ = text(Precision("float32"))
    assert text(excepted)[0] == plain
    assert text(INT8)[0] != plain
