"""When gradients are reduced: after separate calls (`sync=False`), or each at once."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from tests.tiers import quick

LEVELS = ["dp", "os", "os_g", "p_g_os"]
CALLS = 3


def params():
    rng = np.random.default_rng(0)
    shapes = {"a": (7, 13), "b": (13, 5), "bias": (5,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def rows(call: int, count: int = 12):
    rng = np.random.default_rng(1 + call)
    return {
        "x": rng.normal(size=(count, 7)).astype(np.float32),
        "y": rng.normal(size=(count, 5)).astype(np.float32),
        "w": rng.integers(0, 4, count).astype(np.float32),
    }


def everything(count: int = 12):
    calls = [rows(call, count) for call in range(CALLS)]
    return jax.tree.map(lambda *xs: np.concatenate(xs), *calls)


def loss_fn(p, b):
    """Uneven weights, so that a mean of means is another number; and an aux."""
    out = jnp.tanh(b["x"] @ p["a"]) @ p["b"] + p["bias"]
    errors = ((out - b["y"]) ** 2).mean(-1)
    return gshard.Weighted((errors * b["w"]).sum(), b["w"].sum()), {"out": (out**2).mean()}


@jax.jit
def one_device(p, b):
    def mean(p):
        loss, _ = loss_fn(p, b)
        return loss.sum / loss.weight

    return jax.value_and_grad(mean)(p)


def meshes():
    devices = jax.devices()
    return {
        "3": gshard.make_mesh(devices=devices[:3]),
        "replica 2x2": gshard.make_mesh(replica=2, devices=devices[:4]),
    }


def divided(level, mesh="3"):
    return gshard.shard_train_state(
        TrainState.create(apply_fn=None, params=params(), tx=optax.adam(1e-2)),
        meshes()[mesh],
        level,
        min_shard_size=16,
    )


def assert_divided(grads, expected, plan):
    """Gradients are sharded as planned, and are those expected by path."""
    for layout, g in zip(jax.tree.leaves(plan.grads), jax.tree.leaves(grads), strict=True):
        want = expected[layout.path]
        assert g.sharding.is_equivalent_to(plan.sharding(layout), g.ndim)
        np.testing.assert_allclose(
            layout.unpad(np.asarray(g)), want, rtol=0, atol=2e-6 * np.abs(want).max()
        )


@pytest.mark.parametrize(
    ("level", "accumulate", "mesh"),
    quick(
        [
            *itertools.product(LEVELS, ["local", "scatter"], ["3"]),
            *itertools.product(["os_g", "p_g_os"], ["local", "scatter"], ["replica 2x2"]),
        ],
        [
            ("dp", "scatter", "3"),
            ("os", "local", "3"),
            ("os_g", "scatter", "3"),
            ("p_g_os", "local", "3"),
            ("os_g", "local", "replica 2x2"),
            ("p_g_os", "scatter", "replica 2x2"),
        ],
    ),
)
def test_several_calls_equal_one_with_all_examples(level, accumulate, mesh):
    state, plan = divided(level, mesh)
    call = gshard.value_and_grad(
        loss_fn, plan, sync=False, has_aux=True, accumulate=accumulate, micro_batches=1
    )

    @jax.jit
    def accumulated(p, batches):
        losses, total = call(p, batches[0])
        for b in batches[1:]:
            _, more = call(p, b)
            total = total + more
        return losses, total

    @jax.jit
    def end(state, total):
        (loss, aux), grads = gshard.reduce_gradients(total, plan)
        return state.apply_gradients(grads=grads), loss, aux, grads

    losses, total = accumulated(state.params, [rows(call) for call in range(CALLS)])
    assert losses.shape == (plan.group.devices,)
    new, loss, aux, grads = end(state, total)
    expected_loss, expected = one_device(params(), everything())
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert_divided(grads, expected, plan)
    # One call with all rows gives the same, aux weighted likewise.
    (once, whole_aux), _ = jax.jit(gshard.value_and_grad(loss_fn, plan, has_aux=True))(
        state.params, everything()
    )
    np.testing.assert_allclose(loss, once, rtol=2e-6)
    assert 0.5 < aux["out"] / whole_aux["out"] < 2
    tx = optax.adam(1e-2)
    updates, _ = jax.jit(tx.update)(expected, tx.init(params()), params())
    for path, x in gshard.full_params(new).items():
        np.testing.assert_allclose(x, params()[path] + updates[path], rtol=0, atol=2e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_a_local_call_moves_nothing_of_a_gradient(level):
    state, plan = divided(level)
    call = jax.jit(
        gshard.value_and_grad(loss_fn, plan, sync=False, has_aux=True, accumulate="local")
    )
    found = gshard.audit(call, state.params, gshard.shard_batch(rows(0), plan), plan=plan)
    assert {row.purpose for row in found.collectives} == (
        {"gather"} if level == "p_g_os" else set()
    )
    # The end moves what one synchronised step moves.
    _, total = call(state.params, rows(0))
    end = jax.jit(lambda total: gshard.reduce_gradients(total, plan))
    ended = gshard.audit(end, total, plan=plan)
    budgeted = gshard.budget(plan)
    for kind in ("reduce-scatter", "all-reduce"):
        assert ended.elements(kind) == budgeted.elements(kind)


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_a_scattered_call_keeps_one_part(level):
    state, plan = divided(level)
    call = jax.jit(gshard.value_and_grad(loss_fn, plan, sync=False, has_aux=True))
    _, total = call(state.params, rows(0))
    assert total.accumulate == "scatter"
    held = {
        layout.path: x.addressable_shards[0].data.nbytes
        for layout, x in zip(jax.tree.leaves(plan.grads), jax.tree.leaves(total.grads), strict=True)
    }
    assert held == {layout.path: layout.bytes_per_device for layout in jax.tree.leaves(plan.grads)}
    found = gshard.audit(call, state.params, gshard.shard_batch(rows(0), plan), plan=plan)
    assert found.elements("reduce-scatter") == gshard.budget(plan).elements("reduce-scatter")
    assert found.elements("all-reduce") == 0  # replicated leaves are reduced at the end


def test_calls_with_different_numbers_of_examples():
    """A plain mean weighs by its rows: a mean of means would be another number."""

    def mean(p, b):
        loss, _ = loss_fn(p, b | {"w": jnp.ones_like(b["w"])})
        return loss.sum / loss.weight

    batches = [rows(0, 6), rows(1, 24), rows(2, 12)]
    state, plan = divided("os_g")
    call = jax.jit(gshard.value_and_grad(mean, plan, sync=False, micro_batches=2))
    total = sum(call(state.params, b)[1] for b in batches)
    loss, grads = jax.jit(lambda total: gshard.reduce_gradients(total, plan))(total)
    everything = jax.tree.map(lambda *xs: np.concatenate(xs), *batches)
    expected, wanted = jax.value_and_grad(mean)(params(), everything)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    for layout, g in zip(jax.tree.leaves(plan.grads), jax.tree.leaves(grads), strict=True):
        want = wanted[layout.path]
        np.testing.assert_allclose(
            layout.unpad(np.asarray(g)), want, rtol=0, atol=2e-6 * np.abs(want).max()
        )


SYNCED = list(itertools.product(LEVELS, ["3", "replica 2x2"]))
QUICK = [("p_g_os", "replica 2x2")]


@pytest.mark.parametrize(
    ("level", "mesh"),
    quick(SYNCED, QUICK),
)
def test_every_micro_batch_is_reduced_at_once(level, mesh):
    """Over shard group and replicas, of every layout; nothing is left for the end."""
    state, plan = divided(level, mesh)
    options = dict(micro_batches=CALLS, accumulate="sync")
    call = jax.jit(gshard.value_and_grad(loss_fn, plan, has_aux=True, **options))
    batch = gshard.shard_batch(everything(), plan)
    found, budgeted = (
        gshard.audit(call, state.params, batch, plan=plan),
        gshard.budget(plan, **options),
    )
    for kind in ("reduce-scatter", "all-reduce"):
        assert found.elements(kind) == budgeted.elements(kind)
    moved = [row for row in found.collectives if row.purpose in ("scatter", "reduce")]
    assert moved and all(row.times == CALLS * row.count for row in moved)
    held = [layout.bytes_per_device for layout in jax.tree.leaves(plan.grads)]
    assert budgeted.resident["gradients"] == sum(held)

    (loss, _), grads = call(state.params, batch)
    expected_loss, expected = one_device(params(), everything())
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert_divided(grads, expected, plan)


def test_one_micro_batch_is_scattered_at_once_or_at_the_end_if_asked_to():
    state, plan = divided("os_g", "replica 2x2")
    programs = [lowered(state, plan, how) for how in ("level", "scatter", "sync")]
    assert programs[0] == programs[1] == programs[2] != lowered(state, plan, "local")


@pytest.mark.parametrize("level", LEVELS)
def test_one_micro_batch_that_waits_is_reduced_in_one_bucket(level):
    state, plan = divided(level, "3")
    options = dict(has_aux=True, accumulate="local")
    call = jax.jit(gshard.value_and_grad(loss_fn, plan, **options))
    batch = gshard.shard_batch(everything(), plan)
    found = gshard.audit(call, state.params, batch, plan=plan)
    moved = [row for row in found.collectives if row.purpose == "scatter"]
    assert [(row.kind, row.count) for row in moved] == [("reduce-scatter", 1)] * (level != "dp")
    (loss, _), grads = call(state.params, batch)
    expected_loss, expected = one_device(params(), everything())
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert_divided(grads, expected, plan)


def lowered(state, plan, accumulate, micro_batches=1):
    options = dict(has_aux=True, accumulate=accumulate, micro_batches=micro_batches)
    return gshard.make_train_step(loss_fn, plan, **options).lower(state, rows(0)).as_text()


@pytest.mark.parametrize(
    ("accumulate", "held"),
    [pytest.param("local", 0, marks=pytest.mark.slow), ("scatter", 2), ("sync", 3)],
)
def test_what_was_reduced_is_held_apart_from_the_sum(accumulate, held):
    """The compilers of TPU and GPU add up first and reduce once, unless a barrier is between."""
    state, plan = divided("os_g")
    text = lowered(state, plan, accumulate, micro_batches=2)
    assert text.count("optimization_barrier") == 1 + held  # one ties the leaves to the loop


def test_nnx_in_the_users_own_loop():
    def pair():
        model = nnx.Linear(7, 5, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def loss(model, b):
        return ((model(b["x"]) - b["y"]) ** 2).mean()

    (model, optimizer), plan = gshard.shard_train_state(
        pair(), meshes()["3"], "p_g_os", min_shard_size=1
    )
    call = gshard.value_and_grad(loss, plan, sync=False)

    @nnx.jit
    def accumulate(model, b, total):
        _, more = call(model, b)
        return more if total is None else total + more

    @nnx.jit
    def end(model, optimizer, total):
        value, grads = gshard.reduce_gradients(total, plan)
        optimizer.update(model, grads)
        return value

    total = None
    for i in range(CALLS):
        total = accumulate(model, rows(i), total)
    with pytest.raises(gshard.GShardError, match="reduce_gradients"):
        optimizer.update(model, total)
    value = end(model, optimizer, total)

    alone, plain = pair()
    expected, grads = nnx.value_and_grad(loss)(alone, everything())
    plain.update(alone, grads)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    found = gshard.full_params((model, optimizer))
    for x, want in zip(jax.tree.leaves(found), jax.tree.leaves(nnx.state(alone)), strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=2e-6)


def test_unreduced_gradients_are_refused_by_name():
    state, plan = divided("os")
    call = jax.jit(gshard.value_and_grad(loss_fn, plan, sync=False, has_aux=True))
    _, total = call(state.params, rows(0))
    for use in (
        lambda: state.apply_gradients(grads=total),
        lambda: state.tx.update(total, state.opt_state, state.params),
    ):
        with pytest.raises(gshard.GShardError, match="LocalGradients.*reduce_gradients"):
            use()
    (_, _), grads = jax.jit(gshard.value_and_grad(loss_fn, plan, has_aux=True))(
        state.params, rows(0)
    )
    with pytest.raises(gshard.GShardError, match="reduced already"):
        gshard.reduce_gradients(grads, plan)
    with pytest.raises(gshard.GShardError, match="added to a dict"):
        total + grads
    other = gshard.value_and_grad(loss_fn, plan, sync=False, has_aux=True, accumulate="scatter")
    with pytest.raises(gshard.GShardError, match="added to 1"):
        1 + total
    plain = gshard.value_and_grad(lambda p, b: loss_fn(p, b)[0], plan, sync=False)
    with pytest.raises(gshard.GShardError, match="same tree, aux and accumulation"):
        total + jax.jit(plain)(state.params, rows(0))[1]
    with pytest.raises(gshard.GShardError, match=r"\(local\) were added to .* \(scatter\)"):
        total + jax.jit(other)(state.params, rows(0))[1]
    _, elsewhere = divided("os", "replica 2x2")
    with pytest.raises(gshard.GShardError, match="the plan that it was made with"):
        gshard.reduce_gradients(total, elsewhere)
    with pytest.raises(gshard.GShardError, match="accumulate='sync' reduces .*leave out sync=Fal"):
        gshard.value_and_grad(loss_fn, plan, sync=False, accumulate="sync")
    with pytest.raises(gshard.GShardError, match="sync=0"):
        gshard.value_and_grad(loss_fn, plan, sync=0)
