"""Gather at first use: what stays sharded, what is gathered inside, and right gradients."""

from __future__ import annotations

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard._util.jaxpr import all_equations
from gshard.analysis.hlo import read_program
from tests.tiers import quick

D, LAYERS, ROWS = 16, 6, 8


def params(seed=0):
    rng = np.random.default_rng(seed)

    def random(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    return {
        "stack": random(LAYERS, D, D),
        "embed": random(32, D),
        "out": random(D, 24),
        "bias": random(1, 24)[0],
    }


def rows(seed=1):
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, 32, (ROWS, 5)).astype(np.int32),
        "labels": rng.integers(0, 24, (ROWS, 5)).astype(np.int32),
    }


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def scanned(body):
    def loss(p, batch):
        x = p["embed"][batch["ids"]]
        x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, p["stack"])
        return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])

    return loss


def layer(x, w):
    return x + jnp.tanh(x @ w)


def unrolled(p, batch):
    x = p["embed"][batch["ids"]]
    for i in range(LAYERS):
        x = layer(x, p["stack"][i])
    return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])


def tied(p, batch):
    x = p["embed"][batch["ids"]]
    logits = x @ p["embed"].T + jnp.tanh(x) @ p["embed"].T
    return cross_entropy(logits[..., :24] @ (p["out"].T @ p["out"]) + p["bias"], batch["labels"])


def cast(p, batch):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
    return scanned(layer)(half, batch).astype(jnp.float32)


def conditional(p, batch):
    x = p["embed"][batch["ids"]]
    x = jax.lax.cond(
        p["bias"].sum() > 0, lambda x: x @ p["stack"][0], lambda x: x @ p["stack"][1], x
    )
    x = jax.lax.fori_loop(0, 2, lambda i, x: layer(x, p["stack"][i]), x)
    return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])


@jax.custom_vjp
def times(x, w):
    return x @ w


times.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, jnp.einsum("abi,abj->ij", r[0], g))
)


def custom(p, batch):
    x = jax.jit(layer)(p["embed"][batch["ids"]], p["stack"][2])
    return cross_entropy(times(x, p["out"]) + p["bias"], batch["labels"])


def shared_by_checkpoints(p, batch):
    block = jax.checkpoint(lambda x: x + jnp.tanh(x @ p["stack"][0]) @ p["stack"][1])
    x = p["embed"][batch["ids"]]
    for _ in range(3):
        x = block(x)
    return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])


def penalised(loss):
    return lambda p, batch: loss(p, batch) + 1e-2 * sum((w**2).sum() for w in p.values())


def two_scans(p, batch):
    x = p["embed"][batch["ids"]]
    for _ in range(2):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, p["stack"])
    return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])


def tied_in_half(p, batch):
    x = p["embed"].astype(jnp.bfloat16)[batch["ids"]]
    for w in p["stack"]:
        x = layer(x, w)
    logits = (x @ p["embed"].astype(jnp.bfloat16).T)[..., :24] + x @ p["out"] + p["bias"]
    return cross_entropy(logits, batch["labels"])


def rotated(x, w):
    """A layer with complex activations, as of a state space model."""
    y = x @ w
    return jnp.tanh((jnp.exp(1j * w[0]) * jax.lax.complex(y, jnp.fft.rfft(x).real.sum() + y)).real)


LOSSES = {
    "unrolled": unrolled,
    "scan": scanned(layer),
    "scan, checkpoint": scanned(jax.checkpoint(layer)),
    "scan of a transpose": scanned(lambda x, w: layer(x, w.T)),
    "reverse scan, unroll 2": lambda p, b: cross_entropy(
        jax.lax.scan(
            lambda x, w: (layer(x, w), x.sum()),
            p["embed"][b["ids"]],
            p["stack"],
            reverse=True,
            unroll=2,
        )[0]
        @ p["out"],
        b["labels"],
    ),
    "checkpoint": jax.checkpoint(unrolled),
    "tied": tied,
    "conditional and loop": conditional,
    "custom gradient": custom,
    "shared by checkpoints": shared_by_checkpoints,
    "checkpoint and penalty": penalised(jax.checkpoint(unrolled)),
    "scan and penalty": penalised(scanned(layer)),
    "two scans": two_scans,
    "scan of complex numbers": scanned(rotated),
    "walked and closed over": lambda p, b: walked_and_indexed(p, b),
}


def one_device(loss, p, batch):
    return jax.jit(jax.value_and_grad(loss))(p, batch)


def divided(loss, level, n=4, rules=None, **options):
    mesh = gshard.make_mesh(devices=jax.devices()[:n])
    state, plan = gshard.shard_train_state(
        (params(), optax.sgd(0.1)),
        mesh,
        level,
        min_shard_size=16,
        scan_axes={"stack": 0},
        rules=rules,
    )
    fun = jax.jit(gshard.value_and_grad(loss, plan, **options))
    return fun, state, plan


def assert_gradients(loss, level, **options):
    fun, state, plan = divided(loss, level, **options)
    value, grads = fun(state.params, rows())
    expected_value, expected = one_device(loss, params(), rows())
    np.testing.assert_allclose(value, expected_value, rtol=2e-6)
    for name, layout in plan.grads.items():
        largest = np.abs(expected[name]).max()
        error = np.abs(layout.unpad(np.asarray(grads[name])) - expected[name]).max()
        assert error <= 2e-6 * largest, (name, error / largest)


QUICK_OS_G = ("unrolled", "scan", "scan, checkpoint", "conditional and loop")


@pytest.mark.parametrize(
    ("name", "level"),
    quick(
        itertools.product(LOSSES, ["os_g", "p_g_os"]),
        [*((name, "os_g") for name in QUICK_OS_G), *((name, "p_g_os") for name in LOSSES)],
    ),
)
def test_gradients_are_those_of_one_device(name, level):
    assert_gradients(LOSSES[name], level)


@pytest.mark.parametrize("level", quick(["os_g", "p_g_os"], ["p_g_os"]))
def test_a_stack_sharded_on_its_layers_is_gathered_before_the_scan(level):
    assert_gradients(LOSSES["scan"], level, n=2, rules=lambda leaf: None)
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    # Without scan_axes nobody knows that dimension 0 counts layers, and a rule may divide it.
    state, plan = gshard.shard_train_state(
        (params(), optax.sgd(0.1)), mesh, level, min_shard_size=16, rules={"stack": 0}
    )
    assert plan.grads["stack"].dim == 0
    what = {
        "os_g": "full stack of gradients is reduce-scattered after",
        "p_g_os": "full stack is all-gathered before",
    }
    with pytest.warns(
        gshard.GShardWarning,
        match=f"scan iterates over dimension 0 of stack.*{what[level]} the scan.*scan_axes",
    ):
        _, grads = jax.jit(gshard.value_and_grad(LOSSES["scan"], plan))(state.params, rows())
    _, expected = one_device(LOSSES["scan"], params(), rows())
    np.testing.assert_allclose(grads["stack"], expected["stack"], atol=2e-6)


@pytest.mark.parametrize("level", quick(["os_g", "p_g_os"], ["p_g_os"]))
@pytest.mark.parametrize("axis", [0, 1])
def test_a_transposed_stack_is_gathered_before_the_scan_and_that_is_said(level, axis):
    """Whatever `scan_axes` says: the advice to set it would change nothing."""
    transposed = {**params(), "stack": np.moveaxis(params()["stack"], 0, 1)}

    def loss(p, batch):
        return LOSSES["scan"]({**p, "stack": jnp.moveaxis(p["stack"], 1, 0)}, batch)

    state, plan = gshard.shard_train_state(
        (transposed, optax.sgd(0.1)), gshard.make_mesh(), level, scan_axes={"stack": axis},
        min_shard_size=16,
    )  # fmt: skip
    with pytest.warns(gshard.GShardWarning, match="over stack transposed or reshaped: the") as seen:
        _, grads = jax.jit(gshard.value_and_grad(loss, plan))(state.params, rows())
    assert len(seen) == 1
    full = plan.unwrap(state.replace(params=grads)).params["stack"]
    _, expected = one_device(loss, transposed, rows())
    np.testing.assert_allclose(full, expected["stack"], atol=2e-6)


def test_a_parameter_used_often_is_gathered_once_and_scattered_once():
    fun, state, _ = divided(tied, "p_g_os", bucket_size=0)
    text = fun.lower(state.params, rows()).as_text()
    assert text.count('"stablehlo.all_gather"') == 3  # embed, out, bias
    assert text.count('"stablehlo.reduce_scatter"') == 3


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize(
    "loss",
    [
        LOSSES["shared by checkpoints"],
        LOSSES["checkpoint and penalty"],
        LOSSES["scan and penalty"],
        tied_in_half,
    ],
    ids=["shared by checkpoints", "checkpoint and penalty", "scan and penalty", "tied, casts"],
)
def test_a_parameter_used_in_several_scopes_stays_within_the_budget(loss, level):
    fun, state, plan = divided(loss, level)
    report = gshard.audit(fun, state.params, rows(), plan=plan)
    budgeted = gshard.budget(plan)
    assert report.elements("reduce-scatter") == budgeted.elements("reduce-scatter") > 0
    assert report.elements("all-gather") <= budgeted.elements("all-gather")


def walked_and_indexed(p, batch):
    x = p["embed"][batch["ids"]]
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w) @ p["stack"][2], None), x, p["stack"])
    return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])


def test_a_stack_that_a_scan_iterates_over_and_closes_over_is_gathered_once():
    fun, state, plan = divided(walked_and_indexed, "p_g_os")
    report = gshard.audit(fun, state.params, rows(), plan=plan)
    assert report.elements("all-gather") <= gshard.budget(plan).elements("all-gather")
    text = fun.lower(state.params, rows()).compile().as_text()
    sizes = [x.elements for x in read_program(text).collectives if x.kind == "all-gather"]
    assert sizes.count(plan.params["stack"].size) == 1 and D * D not in sizes


def test_a_stack_of_two_scans_is_gathered_twice_and_stays_sharded():
    fun, state, plan = divided(two_scans, "p_g_os")
    text = fun.lower(state.params, rows()).compile().as_text()
    found = [x for x in read_program(text).collectives if x.kind == "all-gather"]
    assert sum(x.times for x in found if x.elements == D * D) == 4 * LAYERS
    assert all(x.elements != plan.params["stack"].size for x in found)


def test_a_cast_is_applied_to_the_local_shard_before_the_all_gather():
    fun, state, _ = divided(cast, "p_g_os")
    found = fun.lower(state.params, rows()).as_text().splitlines()
    types = [line for line in found if '"stablehlo.all_gather"' in line]
    assert types and all("bf16" in line.rsplit("->", 1)[1] for line in types)


@pytest.mark.parametrize(
    ("remat", "level"),
    quick(
        itertools.product([False, True], ["os_g", "p_g_os"]), [(False, "os_g"), (True, "p_g_os")]
    ),
)
def test_the_gradients_of_a_scan_are_stacked_in_the_dtype_of_their_reduction(remat, level):
    """Half of the memory; they become float32 after the loop, the same numbers."""

    def half(x, w):
        return layer(x, w.astype(jnp.bfloat16).T)

    def loss(p, batch):
        x = p["embed"][batch["ids"]].astype(jnp.bfloat16)
        body = jax.checkpoint(half) if remat else half
        x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, p["stack"])
        return cross_entropy(x.astype(jnp.float32) @ p["out"] + p["bias"], batch["labels"])

    fun, state, plan = divided(loss, level)
    part = (LAYERS, *plan.grads["stack"].layer().shard_shape)
    dtypes = {
        str(out.aval.dtype)
        for eqn in all_equations(jax.make_jaxpr(fun)(state.params, rows()).jaxpr)
        if eqn.primitive.name == "scan"
        for out in eqn.outvars
        if out.aval.shape == part
    }
    assert dtypes == {"bfloat16"}
    _, grads = fun(state.params, rows())
    assert grads["stack"].dtype == jnp.float32
    _, expected = one_device(loss, params(), rows())
    largest = np.abs(expected["stack"]).max()
    np.testing.assert_allclose(grads["stack"], expected["stack"], atol=2e-2 * largest)


@pytest.mark.parametrize("name, times", [("scan", 2), ("scan, checkpoint", 2)])
def test_a_scan_gathers_in_its_bodies_and_never_holds_the_stack(name, times):
    fun, state, plan = divided(LOSSES[name], "p_g_os")
    text = fun.lower(state.params, rows()).compile().as_text()
    found = [x for x in read_program(text).collectives if x.kind == "all-gather"]
    layers = [x for x in found if x.times == LAYERS]
    assert len(layers) == times and {x.elements for x in layers} == {D * D}
    assert all(x.elements != plan.params["stack"].size for x in found)


def test_micro_batches_gather_every_time_and_not_once_before_the_loop():
    fun, state, plan = divided(LOSSES["unrolled"], "p_g_os", n=2, micro_batches=4)
    report = gshard.audit(fun, state.params, rows(), plan=plan)
    psi = sum(
        layout.stored_size for layout in jax.tree.leaves(plan.params) if layout.dim is not None
    )
    assert 4 * psi <= report.elements("all-gather") <= 8 * psi, report


class Hazards(nnx.Module):
    """What slips past hooks on parameters: views of a kernel, weight norm, a shared Variable."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(32, D, rngs=rngs)
        self.a = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.WeightNorm(nnx.Linear(D, D, rngs=rngs), rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = jnp.tanh(x @ self.a.kernel[...].T) + x @ self.a.kernel[...].astype(jnp.float32)
        return self.embed.attend(self.norm(x))


@pytest.mark.parametrize("level", quick(["os_g", "p_g_os"], ["p_g_os"]))
def test_nnx_views_and_weight_norm(level):
    def loss(model, batch):
        return cross_entropy(model(batch["ids"]), batch["labels"])

    model = Hazards(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    _, expected = nnx.value_and_grad(loss)(Hazards(nnx.Rngs(0)), rows())
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    (model, optimizer), plan = gshard.shard_train_state(
        (model, optimizer), mesh, level, min_shard_size=8
    )
    with pytest.warns(gshard.GShardWarning, match="norm/layer_instance/kernel"):
        _, grads = nnx.jit(gshard.value_and_grad(loss, plan))(model, rows())
    layouts = jax.tree.leaves(plan.grads)
    for layout, found, right in zip(
        layouts, jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True
    ):
        largest = np.abs(right).max()
        assert np.abs(layout.unpad(np.asarray(found)) - right).max() <= 2e-6 * largest, layout.path


class Normed(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(32, D)(ids)
        x = nn.WeightNorm(nn.Dense(D))(x)
        return nn.Dense(24)(nn.Dense(D, name="twice")(jnp.tanh(x)))


@pytest.mark.parametrize("level", quick(["os_g", "p_g_os"], ["os_g"]))
def test_linen_weight_norm(level):
    model = Normed()
    start = model.init(jax.random.key(0), rows()["ids"])["params"]

    def loss(p, batch):
        return cross_entropy(model.apply({"params": p}, batch["ids"]), batch["labels"])

    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state((start, optax.sgd(0.1)), mesh, level, min_shard_size=8)
    _, grads = jax.jit(gshard.value_and_grad(loss, plan))(state.params, rows())
    _, expected = one_device(loss, start, rows())
    for layout, found, right in zip(
        *(jax.tree.leaves(tree) for tree in (plan.grads, grads, expected)), strict=True
    ):
        assert np.abs(layout.unpad(np.asarray(found)) - right).max() <= 2e-6 * np.abs(right).max()
