"""The user's own loop equals `make_train_step`, keeps every layout and compiles once."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from tests import reference
from tests.tiers import quick
from tests.zoo import SEGMENT_SIZE, ZOO, cross_entropy, feature_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

LEVELS = ("dp", "os", "os_g", "p_g_os")
ROWS, DEVICES, STEPS = 40, 5, 3  # 5 devices: most leaves are padded


def mesh():
    return gshard.make_mesh(devices=jax.devices()[:DEVICES])


def optimizer():
    return reference.OPTIMIZERS["adamw"]()


def arrays(state: Any) -> list[jax.Array]:
    """Every array of a Linen state or of an NNX pair."""
    return jax.tree.leaves(nnx.state(state) if isinstance(state, tuple) else state)


def shardings(state: Any) -> list[jax.sharding.Sharding]:
    return [x.sharding for x in arrays(state) if isinstance(x, jax.Array)]


def assert_layouts(state: Any, placed: list[jax.sharding.Sharding], plan: gshard.Plan) -> None:
    """Each array keeps its sharding, and the components of the state have those of the plan."""
    now = shardings(state)
    assert len(now) == len(placed)
    for array, before, after in zip(arrays(state), placed, now, strict=True):
        assert after.is_equivalent_to(before, array.ndim), (array.shape, before, after)
    if isinstance(state, tuple):
        params, opt_state = nnx.state(state[0], nnx.Param), state[1].opt_state
    else:
        params, opt_state = state.params, state.opt_state
    for part, planned in (
        (params, plan.shardings.params),
        (opt_state, plan.shardings.opt_state),
    ):
        leaves = jax.tree.leaves(part)
        for leaf, want in zip(leaves, jax.tree.leaves(planned), strict=True):
            assert leaf.sharding.is_equivalent_to(want, leaf.ndim), (leaf.shape, want)


def some_part_is_divided(plan: gshard.Plan) -> bool:
    return any(
        not s.is_fully_replicated
        for s in jax.tree.leaves((plan.shardings.params, plan.shardings.opt_state))
    )


def run_step(name: str, level: str, micro_batches: int) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Losses and parameters after `STEPS` of `make_train_step`."""
    model = ZOO[name]
    state, plan = gshard.shard_train_state(
        model.state(optimizer()), mesh(), level, **model.options()
    )
    placed = shardings(state)
    step, losses = gshard.make_train_step(model.loss, plan, micro_batches=micro_batches), []
    for i in range(STEPS):
        batch = model.batch(0, ROWS, i)
        if model.kind == "nnx":
            metrics = step(*state, batch)
        else:
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert_layouts(state, placed, plan)
    assert step.jitted._cache_size() == 1
    return losses, reference.flat(gshard.full_params(state))


@pytest.mark.parametrize(
    ("name", "level"),
    quick(
        itertools.product(["linen_mlp", "linen_gpt_scan"], LEVELS),
        [("linen_mlp", "dp"), ("linen_mlp", "os"), ("linen_mlp", "p_g_os")],
    ),
)
def test_linen_loop(name, level):
    model, micro_batches = ZOO[name], 2 if level == "os_g" else 1
    state, plan = gshard.shard_train_state(
        model.state(optimizer()), mesh(), level, **model.options()
    )
    assert some_part_is_divided(plan) == (level != "dp")
    value_and_grad = gshard.value_and_grad(model.loss, plan, micro_batches=micro_batches)

    @jax.jit
    def train_step(state, batch):
        loss, grads = value_and_grad(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    placed, losses = shardings(state), []
    for i in range(STEPS):
        state, loss = train_step(state, model.batch(0, ROWS, i))
        losses.append(float(loss))
    assert_layouts(state, placed, plan)
    assert train_step._cache_size() == 1
    assert int(state.step) == STEPS
    check_against_step(name, level, micro_batches, losses, state)


@pytest.mark.parametrize(
    ("name", "level"),
    quick(
        itertools.product(["nnx_mlp", "nnx_gpt_scan"], LEVELS),
        [("nnx_mlp", "os_g"), ("nnx_mlp", "p_g_os")],
    ),
)
def test_nnx_loop(name, level):
    model, micro_batches = ZOO[name], 2 if level == "os_g" else 1
    state, plan = gshard.shard_train_state(
        model.state(optimizer()), mesh(), level, **model.options()
    )
    value_and_grad = gshard.value_and_grad(model.loss, plan, micro_batches=micro_batches)

    @nnx.jit
    def train_step(net, optimizer, batch):
        loss, grads = value_and_grad(net, batch)
        optimizer.update(net, grads)
        return loss

    placed, losses = shardings(state), []
    for i in range(STEPS):
        losses.append(float(train_step(*state, model.batch(0, ROWS, i))))
    assert_layouts(state, placed, plan)
    assert train_step.jitted_fn._cache_size() == 1
    assert int(state[1].step[...]) == STEPS
    check_against_step(name, level, micro_batches, losses, state)


def check_against_step(name, level, micro_batches, losses, state) -> None:
    """The loop's numbers are those of `make_train_step`."""
    expected_losses, expected = run_step(name, level, micro_batches)
    reference.assert_same_values(losses, expected_losses, 1e-6)
    reference.assert_same_leaves(
        reference.flat(gshard.full_params(state)),
        expected,
        1e-6,
        relative_to="tree",
        without=ZOO[name].zero,
    )


# A subclass with more fields: batch statistics that the loss changes, an average of the parameters


class Averaged(TrainState):
    batch_stats: Any = None
    ema: Any = None


class Normed(nn.Module):
    """BatchNorm over the rows of all devices."""

    axes: tuple[str, ...] | None

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.tanh(nn.Dense(29)(x))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axes)(x)
        return nn.Dense(11)(x)


def averaged_state() -> Averaged:
    variables = Normed(None).init(jax.random.key(0), np.zeros((2, 7), np.float32), train=False)
    params = variables["params"]
    ema = jax.tree.map(jnp.copy, params)
    return Averaged.create(
        apply_fn=None,
        params=params,
        tx=optimizer(),
        batch_stats=variables["batch_stats"],
        ema=ema,
    )


def normed_loss(axes):
    module = Normed(axes)

    def loss(params, batch, *, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = module.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"]), new

    return loss


def after_one_device() -> tuple[list[float], Averaged]:
    state = averaged_state()
    loss = normed_loss(None)

    @jax.jit
    def train_step(state, batch):
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, new), grads = gradient(state.params, batch, batch_stats=state.batch_stats)
        state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
        return averaged(state), value

    losses = []
    for i in range(STEPS):
        state, value = train_step(state, feature_rows(0, ROWS, i))
        losses.append(float(value))
    return losses, state


def averaged(state: Averaged) -> Averaged:
    ema = jax.tree.map(lambda old, new: 0.5 * old + 0.5 * new, state.ema, state.params)
    return state.replace(ema=ema)


@pytest.mark.parametrize("level", quick(LEVELS, ["os_g", "p_g_os"]))
def test_a_subclass_with_more_fields(level):
    state, plan = gshard.shard_train_state(
        averaged_state(), mesh(), level, min_shard_size=SEGMENT_SIZE
    )
    loss = normed_loss(plan.data_axes)
    value_and_grad = gshard.value_and_grad(loss, plan, mutable="batch_stats")

    @jax.jit
    def train_step(state, batch):
        (value, new), grads = value_and_grad(state.params, batch, batch_stats=state.batch_stats)
        return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), value

    placed, losses = shardings(state), []
    for i in range(STEPS):
        state, value = train_step(state, feature_rows(0, ROWS, i))
        losses.append(float(value))
    assert type(state) is Averaged
    assert_layouts(state, placed, plan)
    assert train_step._cache_size() == 1

    expected_losses, expected = after_one_device()
    reference.assert_same_values(losses, expected_losses, 5e-6)
    for found, want in (
        (gshard.full_params(state), expected.params),
        (plan.unwrap(state).batch_stats, expected.batch_stats),
    ):
        reference.assert_same_leaves(
            reference.flat(found), reference.flat(want), 1e-5, relative_to="tree", without=()
        )

    step_state, step_plan = gshard.shard_train_state(
        averaged_state(), mesh(), level, min_shard_size=SEGMENT_SIZE
    )
    step = gshard.make_train_step(loss, step_plan, mutable="batch_stats")
    step_losses = []
    for i in range(STEPS):
        step_state, metrics = step(step_state, feature_rows(0, ROWS, i))
        step_losses.append(float(metrics["loss"]))
    assert_layouts(step_state, placed, step_plan)
    reference.assert_same_values(step_losses, losses, 1e-6)
    reference.assert_same_leaves(
        reference.flat(step_state.batch_stats),
        reference.flat(state.batch_stats),
        1e-6,
        relative_to="tree",
    )


@pytest.mark.parametrize("level", quick(["os", "p_g_os"], ["os"]))
def test_an_average_of_the_parameters_in_the_loop(level):
    """It is sharded or replicated like the parameters, and so is what the user computes."""
    state, plan = gshard.shard_train_state(
        averaged_state(), mesh(), level, min_shard_size=SEGMENT_SIZE
    )
    value_and_grad = gshard.value_and_grad(normed_loss(plan.data_axes), plan, mutable="batch_stats")

    @jax.jit
    def train_step(state, batch):
        (value, new), grads = value_and_grad(state.params, batch, batch_stats=state.batch_stats)
        state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
        return averaged(state), value

    placed = shardings(state)
    for i in range(STEPS):
        state, _ = train_step(state, feature_rows(0, ROWS, i))
    assert_layouts(state, placed, plan)
    assert train_step._cache_size() == 1
    _, expected = after_one_device()
    reference.assert_same_leaves(
        reference.flat(plan.unwrap(state).ema),
        reference.flat(expected.ema),
        1e-5,
        relative_to="tree",
    )


def test_gradients_meet_plain_optax_functions_before_the_update():
    """A user's own norm and scaling between gradient and update: the layouts stay."""
    model = ZOO["linen_mlp"]
    state, plan = gshard.shard_train_state(
        model.state(optax.adam(1e-3)), mesh(), "p_g_os", **model.options()
    )
    value_and_grad = gshard.value_and_grad(model.loss, plan)

    @jax.jit
    def train_step(state, batch):
        _, grads = value_and_grad(state.params, batch)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g / norm, grads)
        return state.apply_gradients(grads=grads), norm

    placed, norms = shardings(state), []
    for i in range(STEPS):
        state, norm = train_step(state, model.batch(0, ROWS, i))
        norms.append(float(norm))
    assert_layouts(state, placed, plan)
    assert train_step._cache_size() == 1
    gradient = reference.gradient("linen_mlp", ROWS)[1]
    expected = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradient.values()))
    np.testing.assert_allclose(norms[0], expected, rtol=2e-6)


@pytest.mark.parametrize("name", ["target", "batch"])
def test_a_field_may_be_named_like_an_argument(name):
    """As the parameters of a target network are."""
    weights = np.arange(12, dtype=np.float32).reshape(4, 3)
    state, plan = gshard.shard_train_state(
        ({"w": weights}, optax.sgd(0.1)), mesh(), "p_g_os", min_shard_size=0
    )
    scope = {}
    exec(f"def loss(p, x, *, {name}): return ((x @ p['w']) * {name}).mean()", scope)
    x = np.ones((ROWS, 4), np.float32)
    value, _ = gshard.value_and_grad(scope["loss"], plan)(
        state.params, x, **{name: jnp.arange(3.0)}
    )
    wanted = scope["loss"]({"w": weights}, x, **{name: np.arange(3.0)})
    np.testing.assert_allclose(value, wanted, rtol=1e-6)


def looped(p, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]


def recomputed(p, x):
    return jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))(x, p["w"])


@pytest.mark.parametrize("of", [looped, recomputed])
@pytest.mark.parametrize(("level", "k"), [("dp", 1), ("os", 1), ("p_g_os", 1), ("p_g_os", 2)])
def test_what_it_returns_can_be_differentiated(level, k, of):
    """As for a gradient penalty, or a step through the gradient of an inner loop."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(2, 6, 6)), "v": rng.normal(size=6)}
    params = jax.tree.map(jnp.float32, params)
    x = rng.normal(size=(6, 6)).astype(np.float32)

    def loss(p, x):
        return jnp.square(of(p, x) @ p["v"] - x[:, 0]).mean()

    def penalty(value_and_grad):
        value, grads = value_and_grad
        return value + sum(jnp.square(g).sum() for g in jax.tree.leaves(grads))

    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, level, min_shard_size=0, scan_axes={"w": 0}
    )
    gradient = gshard.value_and_grad(loss, plan, micro_batches=k)
    found = jax.jit(jax.grad(lambda p: penalty(gradient(p, x))))(state.params)
    wanted = jax.jit(jax.grad(lambda p: penalty(jax.value_and_grad(loss)(p, x))))(params)
    for name, x in wanted.items():
        unpadded = np.asarray(found[name])[tuple(map(slice, x.shape))]
        np.testing.assert_allclose(unpadded, x, rtol=1e-4, atol=1e-5 * np.abs(x).max())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_it_returns_can_be_differentiated_by_weights_of_the_batch(dtype):
    """Also the sum of the weights, by which the loss is divided, depends on them."""
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(10, 5)).astype(dtype), np.float32(rng.uniform(1, 2, 10))
    params = {"v": jnp.asarray(rng.normal(size=5), dtype)}
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh(), "os", min_shard_size=0)

    def loss(p, b):
        return (b["w"] * jnp.square(b["x"] @ p["v"])).sum() / b["w"].sum()

    value_and_grad = gshard.value_and_grad(loss, plan)
    found = jax.jit(jax.grad(lambda w: value_and_grad(state.params, {"x": x, "w": w})[0]))(weights)
    wanted = jax.grad(lambda w: loss(params, {"x": x, "w": w}))(weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_numbers_of_python_are_arrays():
    rows, start = np.ones((ROWS, 4), np.float32), {"w": np.ones((4, 4), np.float32)}
    state, plan = gshard.shard_train_state((start, optax.sgd(0.1)), mesh(), "os", min_shard_size=0)

    def loss(p, b, *, factor=1.0):
        return jnp.mean((b["x"] @ p["w"]) ** 2) * b["scale"] * factor

    value_and_grad = gshard.value_and_grad(loss, plan)
    for function in (value_and_grad, jax.jit(lambda p, b: value_and_grad(p, {**b, "scale": 2.0}))):
        assert function(state.params, {"x": rows, "scale": 2.0})[0] == 32
    assert value_and_grad(state.params, {"x": rows, "scale": 1.0}, factor=0.5)[0] == 8
    for wrong in (True, "mean"):
        with pytest.raises(gshard.GShardError, match=r"functools.partial\(loss_fn, factor="):
            value_and_grad(state.params, {"x": rows, "scale": 1.0}, factor=wrong)
    with pytest.raises(gshard.GShardError, match=r"stats\['b'\] is True, not an array.* Make it"):
        value_and_grad(state.params, {"x": rows, "scale": 1.0}, stats={"a": rows, "b": True})

    def of_any_model(p, b, *, batch_stats):
        assert batch_stats is None
        return jnp.mean((b @ p["w"]) ** 2)

    found = gshard.value_and_grad(of_any_model, plan)(state.params, rows, batch_stats=None)
    assert found[0] == 16


def test_the_losses_of_a_call_that_is_not_reduced_are_shares_of_a_sum():
    """One device has the weight of them all; "per_device", each has its own loss."""
    rows = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4) / 100
    start = {"w": np.ones((4, 4), np.float32)}
    state, plan = gshard.shard_train_state((start, optax.sgd(0.1)), mesh(), "os", min_shard_size=0)

    def loss(p, b):
        return jnp.mean((b @ p["w"]) ** 2)

    shares, total = gshard.value_and_grad(loss, plan, sync=False)(state.params, rows)
    assert shares.shape == (DEVICES,)
    reduced = gshard.reduce_gradients(total, plan)[0]
    np.testing.assert_allclose(reduced, loss(start, rows), rtol=1e-6)
    np.testing.assert_allclose(shares.sum() / total.weight.sum(), reduced, rtol=1e-6)
    each = gshard.value_and_grad(loss, plan, sync=False, loss_semantics="per_device")
    losses = [loss(start, x) for x in np.split(rows, DEVICES)]
    np.testing.assert_allclose(each(state.params, rows)[0], losses, rtol=1e-6)
