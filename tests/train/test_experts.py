"""Experts that are kept on their devices match single-device training, and none is gathered."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import gshard
from gshard.models import llama, moe
from gshard.sharding import padded_storage
from tests.experts import (
    DATA_EXPERT,
    MODELS,
    D,
    E,
    F,
    K,
    V,
    batch,
    clipped_adamw,
    every_token,
    masked_loss,
    mean_loss,
    one_hot,
    params,
    sharded,
    worst,
)
from tests.tiers import quick
from tests.train.sequence.models import forward

LEVELS = ("dp", "os", "os_g", "p_g_os")
MESHES: dict[str, dict[str, Any]] = {
    "data 2, expert 4": DATA_EXPERT,
    "shard 4, expert 2": {"expert": 2},
    "expert 8": {"expert": 8},
    "expert alone": {"shape": {"expert": 4}, "devices": jax.devices()[:4]},
    "replica 2, data 2, expert 2": {"shape": {"data": 2, "expert": 2}, "replica": 2},
    "expert first": {"shape": {"expert": 2, "data": 4}},
    "sequence 2, expert 4": {"sequence": 2, "expert": 4},
}
EVALUATED = {  # meshes, and the axes over which outputs of single examples stay sharded
    "data 2, expert 4": ("expert", "data"),
    "expert 8": ("expert", "shard"),
    "expert alone": ("expert",),
    "sequence 2, expert 4": ("expert", "shard"),
}
CASES = [
    *((level, "data 2, expert 4", "every token") for level in LEVELS),
    *((level, "data 2, expert 4", "one-hot") for level in LEVELS),
    *((level, "data 2, expert 4", "gshard.expert") for level in ("os", "p_g_os")),
    *(("p_g_os", mesh, "one-hot") for mesh in list(MESHES)[1:-1]),
    *((level, "data 2, expert 4", "dropless") for level in LEVELS),
    *(("p_g_os", mesh, "dropless") for mesh in list(MESHES)[1:-1]),
    *((level, "data 2, expert 4", "dropless, sent") for level in LEVELS),
    *(("p_g_os", mesh, "dropless, sent") for mesh in list(MESHES)[1:-1]),
    ("os", "replica 2, data 2, expert 2", "one-hot"),
    ("os_g", "expert 8", "every token"),
]
QUICK = [
    ("p_g_os", "data 2, expert 4", "one-hot"),
    ("os", "replica 2, data 2, expert 2", "one-hot"),
    ("p_g_os", "data 2, expert 4", "dropless"),
    ("os_g", "data 2, expert 4", "dropless, sent"),
]


def gradients_of(loss: Any, given: Any, plan: Any, state: Any, **options) -> tuple[float, float]:
    """How far loss and gradient are from those of one device."""
    value, grads = jax.jit(gshard.value_and_grad(loss, plan, **options))(state.params, given)
    wanted, reference = jax.jit(jax.value_and_grad(loss))(params(), given)
    return abs(float(value) - float(wanted)), worst(grads, reference)


@pytest.mark.parametrize(("level", "mesh", "model"), quick(CASES, QUICK))
def test_loss_and_gradient_are_those_of_one_device(level, mesh, model):
    state, plan = sharded(MESHES[mesh], level)
    loss, grad = gradients_of(mean_loss(model, balance=True), batch(), plan, state)
    assert loss < 2e-6 and grad < 2e-6


def test_a_maximum_over_all_micro_batches():
    def loss(p, batch):
        y = every_token(p, p["embed"][batch["x"]])
        return mean_loss("every token")(p, batch), {"largest": y.max(), "any": jnp.any(y > 0.1)}

    state, plan = sharded(DATA_EXPERT, "os")
    step = gshard.make_train_step(loss, plan, has_aux=True, micro_batches=3)
    found, wanted = step(state, batch())[1]["aux"], loss(params(), batch())[1]
    np.testing.assert_allclose(found["largest"], wanted["largest"], rtol=1e-5)
    assert found["any"] and wanted["any"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data 2, expert 4", "replica 2, data 2, expert 2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_dropped_tokens_and_the_load_are_those_of_one_device(mesh, micro_batches):
    def loss(p, given):
        h = jnp.tanh(p["embed"][given["x"]])
        routing = gshard.expert.route(h @ p["router"], K, capacity_factor=0.75)
        aux = {"dropped": gshard.expert.dropped(routing), "load": gshard.expert.load(routing)}
        return mean_loss("gshard.expert")(p, given), aux

    state, plan = sharded(MESHES[mesh], "p_g_os")
    step = gshard.make_train_step(loss, plan, has_aux=True, micro_batches=micro_batches)
    found, wanted = step(state, batch())[1]["aux"], loss(params(), batch())[1]
    np.testing.assert_array_equal(found["load"], wanted["load"])
    np.testing.assert_allclose(found["dropped"], wanted["dropped"], rtol=1e-6)
    assert 0.1 < wanted["dropped"] < 0.9 and wanted["load"].sum() == 24 * 6 * K


@pytest.mark.parametrize("accumulate", quick(["level", "local", "scatter", "sync"], ["scatter"]))
def test_micro_batches_of_a_masked_mean(accumulate):
    state, plan = sharded(DATA_EXPERT, "os_g")
    options = {"micro_batches": 3, "accumulate": accumulate}
    loss, grad = gradients_of(masked_loss, batch(), plan, state, **options)
    assert loss < 2e-6 and grad < 2e-6


@pytest.mark.parametrize("level", quick(LEVELS, ["dp"]))
def test_steps_with_clipping_are_those_of_one_device(level):
    loss, tx = mean_loss("one-hot", balance=True), clipped_adamw()
    state, plan = sharded(DATA_EXPERT, level)
    step = gshard.make_train_step(loss, plan)
    own = params()
    opt_state = tx.init(own)
    gradient, update = jax.jit(jax.value_and_grad(loss)), jax.jit(tx.update)
    for seed in range(3):
        value, grads = gradient(own, batch(seed))
        updates, opt_state = update(grads, opt_state, own)
        own = optax.apply_updates(own, updates)
        state, metrics = step(state, batch(seed))
        assert abs(float(metrics["loss"]) - float(value)) < 2e-6
        # the norm counts each shard once: it decides how much is clipped
        assert abs(float(metrics["grad_norm"]) / float(optax.tree.norm(grads)) - 1) < 2e-6
    assert worst(gshard.full_params(state), own) < 1e-5


def test_odd_devices_and_padding():
    p, mesh = params(experts=3), {"shape": {"expert": 3}, "devices": jax.devices()[:3]}
    state, plan = sharded(mesh, "p_g_os", p)
    loss, given = mean_loss("one-hot"), batch()
    value, grads = gshard.value_and_grad(loss, plan)(state.params, given)
    wanted, reference = jax.jit(jax.value_and_grad(loss))(p, given)
    assert abs(float(value) - float(wanted)) < 2e-6 and worst(grads, reference) < 2e-6
    assert plan.params["head"].padding and not plan.params["experts"]["up"].padding


def test_dropout_draws_what_one_device_draws():
    """The order of the examples is that of the global batch, and each has its own draws."""

    def loss(p, given, rng):
        h = jnp.tanh(p["embed"][given["x"]])
        h = h * jax.random.bernoulli(rng, 0.5, h.shape)
        out = (h + one_hot(p, h)) @ p["head"]
        return optax.softmax_cross_entropy_with_integer_labels(out, given["y"]).mean()

    state, plan = sharded(DATA_EXPERT, "os")
    key, given = jax.random.key(3), batch()
    value, grads = gshard.value_and_grad(loss, plan)(state.params, given, rng=key)
    wanted, reference = jax.value_and_grad(loss)(params(), given, key)
    assert abs(float(value) - float(wanted)) < 2e-6 and worst(grads, reference) < 2e-6


@pytest.mark.parametrize(
    "mesh", quick(list(EVALUATED), ["data 2, expert 4", "sequence 2, expert 4"])
)
def test_evaluation_keeps_the_order_of_the_examples(mesh):
    def evaluate(p, given):
        h = jnp.tanh(p["embed"][given["x"]])
        out = (h + one_hot(p, h)) @ p["head"]
        each = out.sum((1, 2))
        return {
            "each": each,
            "best": out.argmax(-1),
            "mean": out.mean(),
            "turned": each.reshape(4, -1).T,  # entries of several devices in one row
            "of parameters": p["head"].sum(0),
            "of experts": p["experts"]["up"].sum((1, 2)),
            "sum": gshard.Weighted(each.sum(), each.size),
        }

    state, plan = sharded(MESHES[mesh], "p_g_os")
    found = gshard.make_eval_step(evaluate, plan)(state, batch())
    wanted = evaluate(params(), batch())
    np.testing.assert_allclose(found["each"], wanted["each"], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found["best"], wanted["best"])
    for name in ("mean", "turned", "of parameters", "of experts"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-4)
        assert found[name].sharding.is_fully_replicated
    assert abs(float(found["sum"]) - float(wanted["each"].mean())) < 1e-4
    each = jax.NamedSharding(plan.mesh, jax.P(EVALUATED[mesh]))
    for name in ("each", "best"):
        assert found[name].sharding.is_equivalent_to(each, found[name].ndim)


def test_gradients_of_several_calls_are_weighed_by_their_examples():
    state, plan = sharded(DATA_EXPERT, "os_g")
    loss, given = mean_loss("one-hot"), batch()
    local = gshard.value_and_grad(loss, plan, sync=False)
    halves = [{k: x[at] for k, x in given.items()} for at in (slice(0, 8), slice(8, 24))]
    total = sum(local(state.params, half)[1] for half in halves)
    value, grads = gshard.reduce_gradients(total, plan)
    wanted, reference = jax.jit(jax.value_and_grad(loss))(params(), given)
    assert abs(float(value) - float(wanted)) < 2e-6 and worst(grads, reference) < 2e-6


def test_frozen_experts_stay_on_their_devices():
    loss, results = mean_loss("one-hot"), []
    one = {"devices": jax.devices()[:1]}
    for mesh, keep in ((one, None), (DATA_EXPERT, {"up": ("expert", 0)})):
        state, plan = sharded(mesh, "p_g_os", keep=keep, frozen="experts/up")
        step = gshard.make_train_step(loss, plan)
        for seed in range(2):
            state, metrics = step(state, batch(seed))
        results.append((float(metrics["loss"]), gshard.full_params(state)))
    assert abs(results[0][0] - results[1][0]) < 2e-6
    assert worst(results[1][1], jax.tree.map(np.asarray, results[0][1])) < 1e-5
    assert results[1][1]["experts"]["up"].shape == (E, D, F)


def gathers_over_expert(audit: gshard.Audit) -> dict[str, int]:
    """By purpose, elements that are gathered or scattered over the axis of the experts."""
    found: dict[str, int] = {}
    for row in audit.collectives:
        if row.kind in ("all-gather", "reduce-scatter") and "expert" in (row.axes or ()):
            found[row.purpose] = found.get(row.purpose, 0) + row.elements
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "micro_batches"), [*((x, 1) for x in MODELS), ("one-hot", 3)])
def test_the_budget_is_what_the_forward_pass_sends(model, micro_batches):
    state, plan = sharded(DATA_EXPERT, "p_g_os")
    step = gshard.make_train_step(mean_loss(model), plan, micro_batches=micro_batches)
    audit = gshard.audit(step, state, batch())
    sent = forward(step.budget.communicated)
    assert sent == forward(audit.collectives) and sent.total() > 0
    assert audit.exceeded == ()


def test_what_goes_over_the_other_axes_alone_is_budgeted_over_these():
    def loss(p, x):
        x = x / jnp.sqrt(1e-3 + jnp.square(x).mean(0))
        return jnp.square(jnp.einsum("bd,edf->ebf", x, p["experts"]["up"])).mean()

    p = {"experts": {"up": params()["experts"]["up"]}}
    state, plan = sharded(DATA_EXPERT, "os", p)
    step = gshard.make_train_step(loss, plan)
    audit = gshard.audit(step, state, np.ones((16, D), np.float32))
    sent = [
        sum(x.wire_bytes for x in rows if (x.kind, x.purpose) == ("all-reduce", "loss"))
        for rows in (
            [x for x in audit.collectives if not (x.backward or x.scalar)],
            step.budget.communicated,
        )
    ]
    assert sent[0] == sent[1] == 4 * D * (2 * 3 / 4 + 2 * 1 / 2)  # over 4 devices, then over 2


@pytest.mark.parametrize("level", quick(["os_g", "p_g_os"], ["p_g_os"]))
@pytest.mark.parametrize("model", ["one-hot", "gshard.expert"])
def test_no_expert_is_gathered_and_the_budget_is_what_is_sent(level, model):
    state, plan = sharded(DATA_EXPERT, level)
    step = gshard.make_train_step(mean_loss(model), plan)
    audit = gshard.audit(step, state, batch())
    rest = D * V * 2 + D * E  # embed, head, router
    found = gathers_over_expert(audit)
    assert sum(found.values()) <= 3 * rest + 1
    budget = step.budget
    assert audit.elements("reduce-scatter") == budget.elements("reduce-scatter")
    # An expert is scattered over "data" alone, all else over "data" and then half of it on.
    assert budget.elements("reduce-scatter") == 2 * E * D * F // 4 + rest + rest // 2
    exchanges = [x for x in step.loss_transfers if x.kind == "all-to-all"]
    assert len(exchanges) == 2 and {x.axes for x in exchanges} == {("expert",)}
    sent = sum(r.elements for r in audit.collectives if r.kind == "all-to-all")
    assert sent == 2 * sum(x.elements * x.times for x in exchanges)  # and backward


def test_no_expert_is_gathered_where_each_computes_every_token():
    state, plan = sharded(DATA_EXPERT, "os")
    step = gshard.make_train_step(mean_loss("every token"), plan)
    step.lower(state, batch(examples=96))
    tokens = 96 * 6 * D // 2  # of the devices of one expert axis
    assert tokens > E * D * F  # gathering the experts would send less
    assert {x.elements for x in step.loss_transfers if x.kind == "all-gather"} == {tokens}


def test_a_weight_that_must_be_gathered_is_named():
    def loss(p, given):
        chosen = p["experts"]["up"][given["x"][:, 0] % E]  # rows by index: no product
        return jnp.square(chosen).mean() + mean_loss("one-hot")(p, given)

    state, plan = sharded(DATA_EXPERT, "os")
    with pytest.warns(gshard.GShardWarning, match="all-gathers a parameter that is kept on 'exp"):
        value, grads = gshard.value_and_grad(loss, plan)(state.params, batch())
    wanted, reference = jax.value_and_grad(loss)(params(), batch())
    assert abs(float(value) - float(wanted)) < 2e-6 and worst(grads, reference) < 2e-6


@pytest.mark.parametrize("level", quick(LEVELS, ["p_g_os"]))
@pytest.mark.parametrize("begins", ["with the tokens", "with sums of tokens"])
def test_experts_in_a_scan_that_adds_to_what_it_begins_with(begins, level):
    """What it begins with has an entry for each example, and the sum over experts adds to it."""
    dims = (1, 2) if begins == "with sums of tokens" else ()

    def loss(p, given):
        h = jnp.tanh(p["embed"][given["x"]])
        weights = jnp.moveaxis(jax.nn.softmax(h @ p["router"]), -1, 0)

        def add(total, expert):
            w, own = expert
            y = w[..., None] * (jax.nn.silu(h @ own["up"]) @ own["down"])
            return total + y.sum(dims), None

        total, _ = jax.lax.scan(add, h.sum(dims), (weights, p["experts"]))
        return jnp.square(total).mean()

    state, plan = sharded(DATA_EXPERT, level)
    value, grads = jax.jit(gshard.value_and_grad(loss, plan))(state.params, batch())
    wanted, reference = jax.value_and_grad(loss)(params(), batch())
    assert abs(float(value) / float(wanted) - 1) < 2e-6
    assert worst({**grads, "head": 1}, {**reference, "head": 1}) < 2e-6


def test_layers_that_are_kept_in_place_of_experts_are_named():
    def loss(p, given):
        h = jnp.tanh(p["embed"][given["x"]])
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w @ w.T), None), h, p["experts"]["up"])
        return jnp.square(h @ p["head"]).mean()

    state, plan = sharded(DATA_EXPERT, "os")
    with pytest.warns(gshard.GShardWarning, match=r"over layers.*keep=.*\('expert', 1\)"):
        value, _ = gshard.value_and_grad(loss, plan)(state.params, batch())
    assert abs(float(value) - float(loss(params(), batch()))) < 2e-6


def line_of(mark: str) -> str:
    """The file and line of this file that ends in a comment."""
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(i for i, x in enumerate(lines, 1) if x.endswith(mark))}"


def test_what_crosses_the_other_axes_has_the_line_of_the_loss():
    """There the loss is traced a second time."""

    def loss(p, given):
        h = jnp.tanh(p["embed"][given["x"]])
        y = (h + every_token(p, h)) @ p["head"]
        return y.mean() * jnp.square(y).mean()  # two means

    state, plan = sharded(DATA_EXPERT, "os")
    at = re.escape(line_of("  # two means"))
    with pytest.raises(gshard.GShardError, match=f"at .*{at} needs all examples of the batch"):
        gshard.make_train_step(loss, plan, micro_batches=3)(state, batch())
    step = gshard.make_train_step(loss, plan)
    step.lower(state, batch())
    found = {x.line.rsplit("/", 1)[-1] for x in step.loss_transfers if x.operation == "mul"}
    assert found == {line_of("  # two means")}


def test_micro_batches_of_a_balancing_loss_run_the_model_once_more_and_say_so(monkeypatch):
    # JAX 0.12 closes over a constant of shape (8,), in which another test may have padded an array.
    monkeypatch.setattr(padded_storage, "_stored", {})

    def loss(p, given, by_group=False):
        h = jnp.tanh(p["embed"][given["x"]])
        logits = h @ p["router"]
        routing = gshard.expert.route(logits, 2)
        balance = gshard.expert.load_balancing_loss(logits, routing, by_group=by_group)
        return masked_loss(p, given) + balance

    state, plan = sharded(DATA_EXPERT, "os")
    with pytest.warns(gshard.GShardWarning, match=r"=3: mul at .*:\d+ needs .*by_group=True"):
        found, grad = gradients_of(loss, batch(), plan, state, micro_batches=3)
    assert found < 2e-6 and grad < 2e-6

    def in_a_loop(p, given):
        return jax.lax.scan(lambda x, _: (x + loss(p, given), None), 0.0, None, 2)[0]

    with pytest.raises(
        gshard.GShardError, match=r"load_balancing_loss .* 3 micro-.* by_group=True"
    ):
        gshard.make_train_step(in_a_loop, plan, micro_batches=3)(state, batch())


def test_examples_of_one_device_are_taken_without_a_gather_over_the_others():
    """A maximum over experts is on all of their devices, and each goes on with its examples."""

    def loss(p, given):
        h = jnp.tanh(p["embed"][given["x"]])
        y = jnp.einsum("btd,edf->betf", h, p["experts"]["up"])
        y = jnp.einsum("betf,efd->betd", jax.nn.silu(y), p["experts"]["down"]).max(1)
        out = (h @ p["router"] @ p["router"].T + y) @ p["head"]
        return optax.softmax_cross_entropy_with_integer_labels(out, given["y"]).mean()

    state, plan = sharded(DATA_EXPERT, "os")
    step = gshard.make_train_step(loss, plan, donate=False)
    step.lower(state, batch())
    assert {x.kind for x in step.loss_transfers} == {"all-gather", "all-reduce"}
    assert {x.axes for x in step.loss_transfers} == {("expert",)}
    found, grad = gradients_of(loss, batch(), plan, state)
    assert found < 2e-6 and grad < 2e-6


@pytest.mark.parametrize("remat", quick(["full", "none"], ["full"]))
def test_the_mixture_of_experts_that_comes_with_gshard(remat):
    """Scanned layers, rematerialized, with gate, up and down of all experts."""
    routing = moe.Routing(8, 2, 1.25, 16)
    model = moe.MoE(llama.Sizes(2, 32, 4, 2, 48, 64), routing, jnp.float32, moe.REMAT[remat])
    rng = np.random.default_rng(0)
    given = {"tokens": rng.integers(0, 64, (16, 32)), "next": rng.integers(0, 64, (16, 32))}
    start = model.init(jax.random.key(0), given["tokens"][:1], given["next"][:1])
    p = nn.meta.unbox(start["params"])

    def loss(p, given):
        return model.apply({"params": p}, given["tokens"], given["next"])

    keep = {"experts/(up|gate|down)": ("expert", 1)}
    state, plan = sharded(DATA_EXPERT, "p_g_os", p, keep=keep, scan_axes={"layers": 0})
    value, grads = jax.jit(gshard.value_and_grad(loss, plan))(state.params, given)
    wanted, reference = jax.jit(jax.value_and_grad(loss))(p, given)
    assert abs(float(value) - float(wanted)) < 2e-6 and worst(grads, reference) < 2e-6
    step = gshard.make_train_step(loss, plan)
    audit = gshard.audit(step, state, given)
    experts = sum(x.size for x in p["layers"]["experts"].values() if hasattr(x, "size"))
    found = gathers_over_expert(audit)
    others = sum(x.size for x in jax.tree.leaves(p)) - experts
    assert found["gather"] <= 2 * others < experts


class Mixture(nn.Module):
    """Experts whose metadata names the axis of the mesh."""

    @nn.compact
    def __call__(self, x):
        kept = nn.with_partitioning(nn.initializers.lecun_normal(), ("expert", None, None))
        p = {
            "router": self.param("router", nn.initializers.lecun_normal(), (D, E)),
            "experts": {
                "up": self.param("up", kept, (E, D, F)),
                "down": self.param("down", kept, (E, F, D)),
            },
        }
        h = jnp.tanh(nn.Embed(V, D)(x))
        return nn.Dense(V)(h + every_token(p, h))


def test_metadata_of_flax_keeps_experts():
    model = Mixture()
    start = model.init(jax.random.key(0), batch()["x"][:1])["params"]
    state, plan = sharded(DATA_EXPERT, "p_g_os", start, keep=None)

    def loss(p, given):
        out = model.apply({"params": p}, given["x"])
        return optax.softmax_cross_entropy_with_integer_labels(out, given["y"]).mean()

    assert plan.params["up"].value.kept == plan.params["down"].value.kept
    assert str(plan).count("kept on expert, dim 0 / 4") == 4  # parameter and gradient
    value, grads = gshard.value_and_grad(loss, plan)(state.params, batch())
    wanted, reference = jax.value_and_grad(loss)(start, batch())
    assert abs(float(value) - float(wanted)) < 2e-6 and worst(grads, reference) < 2e-6


def test_a_loss_of_each_device_is_refused():
    state, plan = sharded(DATA_EXPERT, "os")
    with pytest.raises(gshard.GShardError, match="loss_semantics='per_device': a device has some"):
        step = gshard.make_train_step(mean_loss("one-hot"), plan, loss_semantics="per_device")
        step(state, batch())


def test_tokens_that_are_saved_by_their_name_are_not_sent_again():
    """`expert_exchange` names what an all-to-all brings, for the policy of a `jax.checkpoint`."""
    counts = []
    for names in ((), ("expert_exchange",)):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        loss = jax.checkpoint(mean_loss("gshard.expert"), policy=policy)
        state, plan = sharded(DATA_EXPERT, "os")
        step = gshard.make_train_step(loss, plan)
        audit = gshard.audit(step, state, batch())
        counts.append(sum(r.times for r in audit.collectives if r.kind == "all-to-all"))
    assert counts == [6, 4]


def test_mixtral_on_256_devices_sends_a_fifth():
    """8 experts of 7B on an axis of 8, 4,096 tokens on each device, rematerialized layers."""
    setup, sent = moe.setup(precision="bfloat16"), {}
    for name, keep in (("gathered", None), ("kept", {"experts/(up|gate|down)": ("expert", 1)})):
        sizes = {"data": 32, "expert": 8} if keep else {"shard": 256}
        mesh = AbstractMesh(
            tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
        )
        state, plan = gshard.shard_train_state(
            setup.state, mesh, "p_g_os", keep=keep, **setup.shard
        )
        step = gshard.make_train_step(setup.loss_fn, plan, **setup.step)
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((256, *x.shape[1:]), x.dtype), setup.batch
        )
        with pytest.raises(ValueError, match="AbstractMesh"):  # it is traced, and not compiled
            step.lower(state, given)
        parameters = gshard.budget(plan).wire_bytes
        tokens = gshard.budget(plan, loss_transfers=step.loss_transfers).wire_bytes - parameters
        sent[name] = parameters + 3 * tokens  # forward, again, backward
    assert sent["gathered"] > 275e9
    assert sent["kept"] < 60e9


@pytest.mark.parametrize("axes", quick(["batch", "data", "expert", "expert data"], ["batch"]))
def test_a_mean_over_devices_is_one_over_the_batch(axes):
    """As a BatchNorm with an axis name takes one."""

    def loss(p, given, axes=None):
        h = jnp.tanh(p["embed"][given["x"]])
        mean = h.mean((0, 1))
        h = h - (mean if axes is None else jax.lax.pmean(mean, axes))
        return jnp.square(h + one_hot(p, h)).mean()

    state, plan = sharded(DATA_EXPERT, "os")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss communicates over the axis 'batch'")
        run = jax.jit(gshard.value_and_grad(partial(loss, axes=tuple(axes.split())), plan))
        value, grads = run(state.params, batch())
    wanted, reference = jax.value_and_grad(loss)(params(), batch())
    assert abs(float(value) - float(wanted)) < 2e-6
    # what no loss needs has no gradient
    found = {name: grads[name] for name in ("embed", "router", "experts")}
    assert worst(found, {name: reference[name] for name in found}) < 2e-6


def test_what_a_limit_refuses_names_a_way_that_works():
    state, plan = sharded(DATA_EXPERT, "os")
    step = gshard.make_train_step(mean_loss("every token"), plan, gather_limit=100)
    with pytest.raises(gshard.GShardError) as caught:
        step(state, batch())
    said = "as gshard.expert.dispatch does, pass by='all_to_all' to gshard.expert.dropless "
    assert f"{said}(GPU, TPU), or raise gather_limit=" in str(caught.value)
