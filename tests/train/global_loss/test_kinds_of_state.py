"""Losses of the global batch with further state: collections, NNX, keys, counters, scaling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from tests.sharding import test_model_axes as tensor_parallel
from tests.tiers import quick
from tests.train.global_loss.test_steps import (
    CLASSES,
    INPUTS,
    KEY,
    LEVELS,
    STEPS,
    batch,
    close,
    masked,
    mesh_of,
    optimizer,
    params,
    penalized,
)
from tests.train_state import test_fp8 as fp8


class Net(nn.Module):
    """Normalizes with batch statistics, drops, and counts examples."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        seen = self.variable("counters", "examples", lambda: jnp.zeros((), jnp.int32))
        largest = self.variable("counters", "largest", lambda: jnp.zeros(()))
        if not self.is_initializing():
            seen.value += len(x)
            largest.value = jnp.maximum(largest.value, jnp.abs(x).max())
        x = nn.Dense(26, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.8)(x)
        x = nn.Dropout(0.3, deterministic=False)(nn.relu(x))
        return nn.Dense(CLASSES)(x)


class State(TrainState):
    batch_stats: Any
    counters: Any
    old_key: Any


def cross_entropy(z: Any, b: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(z, b["y"])


def linen_loss(
    p: Any, b: Any, *, batch_stats: Any, counters: Any, old_key: Any, rng: Any
) -> tuple[Any, Any]:
    """A masked mean, with examples that an old-style key of the state mixes noise into."""
    variables = {"params": p, "batch_stats": batch_stats, "counters": counters}
    x = b["x"] + 0.1 * jax.random.normal(old_key, b["x"].shape)
    names = ["batch_stats", "counters"]
    z, new = Net().apply(variables, x, rngs={"dropout": rng}, mutable=names)
    loss = (cross_entropy(z, b) * b["mask"]).sum() / b["mask"].sum()
    return loss, ({"right": (z.argmax(-1) == b["y"]).sum()}, new)


@pytest.mark.parametrize(
    ("level", "devices", "replica"),
    quick([(x, *n) for x in LEVELS for n in ((3, 1), (8, 2))], [("p_g_os", 8, 2), ("os_g", 3, 1)]),
)
def test_linen_state(level, devices, replica):
    """Statistics, counters and masks are those of one device."""
    keys = {"params": KEY, "dropout": KEY}
    start = Net().init(keys, jnp.zeros((2, INPUTS)))
    tx, old = optimizer(), jax.random.PRNGKey(3)
    state = State.create(apply_fn=None, tx=tx, old_key=old, **start)
    state, plan = gshard.shard_train_state(
        state, mesh_of(devices, replica), level, min_shard_size=16
    )
    step = gshard.make_train_step(
        linen_loss, plan, has_aux=True, mutable=("batch_stats", "counters"), rng=KEY
    )

    @jax.jit
    def alone(p: Any, opt: Any, more: Any, b: Any, i: Any) -> Any:
        def loss(p: Any) -> Any:
            key = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(old), i))
            rng = jax.random.fold_in(KEY, i)
            return linen_loss(p, b, **more, old_key=key, rng=rng)

        (value, (aux, more)), grads = jax.value_and_grad(loss, has_aux=True)(p)
        updates, opt = tx.update(grads, opt, p)
        return optax.apply_updates(p, updates), opt, more, (value, aux)

    p, more = start["params"], {k: start[k] for k in ("batch_stats", "counters")}
    opt, examples = tx.init(p), devices * 4
    for i in range(STEPS):
        b = batch(i, examples)
        state, metrics = step(state, b)
        p, opt, more, wanted = alone(p, opt, more, b, i)
        close((metrics["loss"], metrics["aux"]), wanted)
    plain = plan.unwrap(state)
    assert int(plain.counters["examples"]) == STEPS * examples
    close({"batch_stats": plain.batch_stats, "counters": plain.counters}, more)
    close(plain.params, p, 1e-4)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(INPUTS, 26, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(26, momentum=0.8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(26, CLASSES, rngs=rngs)
        self.seen = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.right = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, b: Any) -> Any:
        z = self.last(self.drop(jax.nn.relu(self.norm(self.first(b["x"])))))
        self.seen[...] += len(b["x"])
        self.right[...] += (z.argmax(-1) == b["y"]).sum()
        return z


def nnx_loss(model: Model, b: Any) -> Any:
    losses = cross_entropy(model(b), b)
    return (losses * b["mask"]).sum() / b["mask"].sum()


@pytest.mark.parametrize("level", quick(LEVELS, ["p_g_os"]))
def test_nnx_state(level):
    """Batch statistics, dropout and counts."""
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    pair = (model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param))
    (model, ours), plan = gshard.shard_train_state(pair, mesh_of(5), level, min_shard_size=16)
    theirs = nnx.Optimizer(other, optimizer(), wrt=nnx.Param)
    step = gshard.make_train_step(nnx_loss, plan)

    @nnx.jit
    def alone(model: Any, optimizer: Any, b: Any) -> Any:
        loss, grads = nnx.value_and_grad(nnx_loss)(model, b)
        optimizer.update(model, grads)
        return loss

    for i in range(STEPS):
        b = batch(i, 20)
        close(step(model, ours, b)["loss"], alone(other, theirs, b))
    kept = nnx.to_pure_dict(nnx.state(other, nnx.BatchStat))
    assert int(kept["seen"]) == STEPS * 20
    model = plan.unwrap((model, ours))[0]
    close(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), kept)
    wanted = nnx.to_pure_dict(nnx.state(other, nnx.Param))
    close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), wanted, 1e-4)


def trained(loss: Callable[..., Any], level: Any, devices: int, examples: int, **options: Any):
    """Losses and parameters after some steps; options of the step, and of the state in `shard`."""
    shard = options.pop("shard", {})
    state, plan = gshard.shard_train_state(
        (params(), optimizer()), mesh_of(devices), level, min_shard_size=16, **shard
    )
    step, seen = gshard.make_train_step(loss, plan, **options), []
    for i in range(STEPS):
        state, metrics = step(state, batch(i, examples))
        seen.append(metrics)
    return seen, plan.unwrap(state).params


@pytest.mark.parametrize("k", [1, 4])
def test_a_scaled_loss_skips_no_more_steps_than_one_device(k):
    """float16: gradients of sums over examples would overflow where those of the mean do not."""

    def loss(p: Any, b: Any) -> Any:
        return penalized(p, b) if k == 1 else masked(p, b)

    scaler = gshard.GradScaler(init_loss_scaling=2.0**13)
    options = {"shard": {"precision": "float16"}, "scaler": scaler, "micro_batches": k}
    seen, _ = trained(loss, "p_g_os", 2, 2 * k * 64, **options)
    assert [int(m["skipped_steps"]) for m in seen] == [0] * STEPS


@pytest.mark.parametrize(
    ("options", "loss", "k"),
    quick(
        [
            ({"precision": "bfloat16"}, masked, 4),
            ({"frozen": "^w$"}, masked, 1),
            ({"frozen": "^w$"}, penalized, 4),
            ({"offload": True}, masked, 4),
        ],
        [({"frozen": "^w$"}, penalized, 4)],
    ),
)
def test_options_of_the_state(options, loss, k):
    """Against the same plan on one device."""
    found = trained(loss, "p_g_os", 4, 16 * k, micro_batches=k, shard=options)
    alone = trained(loss, "p_g_os", 1, 16 * k, shard=options)
    exact = "precision" not in options
    for ours, theirs in zip(found[0], alone[0], strict=True):
        close(ours["loss"], theirs["loss"], 2e-5 if exact else 1e-2)
    close(found[1], alone[1], 1e-4 if exact else 3e-2)


@pytest.mark.parametrize("level", quick(LEVELS, ["os_g"]))
def test_fp8_statistics(level):
    """A masked mean with a guard: the statistics are those of one device's gradients."""
    examples = 24

    def loss(variables: Any, b: Any) -> Any:
        errors = jnp.square(fp8.Net().apply(variables, b["x"]) - b["y"]).sum(-1)
        count = jnp.maximum(b["mask"].sum(), 1)
        return (errors * b["mask"]).sum() / count + (errors * b["mask"]).sum() / b["mask"].sum()

    @jax.jit
    def alone(state: Any, b: Any) -> Any:
        return state.apply_gradients(grads=jax.grad(loss)(state.params, b))

    plain, (state, plan) = fp8.fresh(), fp8.divided(level, 3)
    step = gshard.make_train_step(loss, plan, donate=False)
    for i in range(STEPS):
        plain, state = alone(plain, fp8.batch(i, examples)), step(state, fp8.batch(i, examples))[0]
    fp8.assert_same(gshard.full_params(state), fp8.flat(plain.params))


@jax.custom_jvp
def over_largest(x: Any) -> Any:
    return x / jnp.abs(x).max()


@over_largest.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return over_largest(*primals), tangents[0] / jnp.abs(primals[0]).max()


def with_statistics(write: Callable[..., Any], back: Callable[..., Any], x: Any, old: Any) -> Any:
    """An identity whose derivative with respect to the history is a new one, as of Flax's fp8."""
    call = jax.custom_vjp(lambda x, history: x * 1)
    call.defvjp(
        lambda x, history: (x * 1, write(history, jnp.abs(x).max())),
        lambda new, d: (back(d), new),
    )
    return call(x, old)


@pytest.mark.parametrize(
    "write",
    [
        lambda history, top: jnp.concatenate([top[None], history[:-1]]),
        lambda history, top: jnp.where(jnp.arange(4) == 0, top, jnp.roll(history, 1)),
        lambda history, top: jnp.roll(history, 1).at[0].set(top),
    ],
    ids=["concatenate", "where", "set"],
)
def test_statistics_of_micro_batches(write):
    """The maximum of each is broadcast in some of these, and the last example has the largest."""
    x = np.arange(1, 13, dtype=np.float32)[:, None] * np.ones(3, np.float32)

    def loss(variables: Any, x: Any, after: Any = jnp.sin, back: Any = jnp.cos) -> Any:
        history = variables["_overwrite_with_gradient"]["history"]
        return after(with_statistics(write, back, x @ variables["params"]["w"], history)).mean()

    variables = {
        "params": {"w": jnp.ones((3, 2))},
        "_overwrite_with_gradient": {"history": jnp.zeros(4)},
    }
    state = TrainState.create(apply_fn=None, params=variables, tx=optax.sgd(0.1))
    state, plan = gshard.shard_train_state(state, mesh_of(3), "os", min_shard_size=1)
    step = gshard.make_train_step(loss, plan, micro_batches=2, donate=False)
    found = gshard.full_params(step(state, x)[0])["_overwrite_with_gradient"]["history"]
    np.testing.assert_array_equal(found, [36, 0, 0, 0])
    # maxima that are used otherwise are those of all examples
    largest = jax.custom_vjp(lambda x: jnp.abs(x).max())
    largest.defvjp(lambda x: (jnp.abs(x).max(), x), lambda x, d: (d * x,))
    cases = [
        ({"after": over_largest}, "reduce_max"),
        ({"after": largest}, "custom_vjp_call"),
        ({"back": lambda d: d * jnp.abs(d).max()}, "mul"),
    ]
    for used, place in cases:
        with pytest.raises(gshard.GShardError, match=f"{place} at .* needs all examples"):
            gshard.make_train_step(partial(loss, **used), plan, micro_batches=2)(state, x)


@pytest.mark.parametrize(
    ("mesh", "level", "k"),
    quick(
        [(m, x, k) for m in ("4x2", "2x2x2") for x in ("os_g", "p_g_os") for k in (1, 2)],
        [("4x2", "p_g_os", 1)],
    ),
)
def test_tensor_parallel(mesh, level, k):
    """A masked mean with batch statistics, beside a user's axis."""

    def loss(p: Any, b: Any) -> Any:
        z = tensor_parallel.Stacked().apply({"params": p}, b["x"])
        errors = jnp.square(z - b["y"]).mean(-1)
        if k == 1:
            errors += 0.1 * jnp.square(z - z.mean(0)).mean(-1) / (1 + z.max())
        counted = b["y"][:, 0] > 0.5
        return jnp.mean(errors, where=counted)

    tx, p = tensor_parallel.TX, tensor_parallel.initial()
    opt = tx.init(p)

    @jax.jit
    def alone(p: Any, opt: Any, b: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, b)
        updates, opt = tx.update(grads, opt, p)
        return value, optax.apply_updates(p, updates), opt

    state, plan = tensor_parallel.divided(mesh, level)
    step = gshard.make_train_step(loss, plan, micro_batches=k, donate=False)
    for i in range(STEPS):
        value, p, opt = alone(p, opt, tensor_parallel.batch(i))
        state, metrics = step(state, tensor_parallel.batch(i))
        close(metrics["loss"], value)
    close(nn.meta.unbox(plan.unwrap(state).params), p, 1e-4)
