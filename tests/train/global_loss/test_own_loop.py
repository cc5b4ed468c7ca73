"""`value_and_grad`, evaluation and micro-batches of their own, with losses of the global batch."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from examples.gpt import GPT
from tests.tiers import quick
from tests.train.global_loss.test_steps import (
    LEVELS,
    LOSSES,
    STEPS,
    batch,
    close,
    integer_count,
    logits,
    losses,
    masked,
    normalized,
    numbered,
    optimizer,
    params,
    penalized,
    sharded,
    with_aux,
)


@pytest.mark.filterwarnings("ignore:micro_batches=.* runs forward once more")  # "balanced"
@pytest.mark.parametrize(
    ("name", "level", "k"),
    quick(
        [
            (name, x, k)
            for name in LOSSES
            for x in LEVELS
            for k in (1, 4)
            if LOSSES[name][1] or k == 1
        ],
        [("masked mean", "p_g_os", 4), ("batch statistics", "os_g", 1)],
    ),
)
def test_an_own_loop(name, level, k):
    """Loss, aux and gradient."""
    aux = partial(with_aux, LOSSES[name][0])
    state, plan = sharded(level, 3)
    gradient = jax.jit(gshard.value_and_grad(aux, plan, has_aux=True, micro_batches=k))
    b = batch(0, 36)
    found, grads = gradient(state.params, gshard.shard_batch(b, plan))
    wanted, expected = jax.jit(jax.value_and_grad(aux, has_aux=True))(params(), b)
    close(found, jax.tree.map(jnp.asarray, wanted))
    close(unpadded(grads, plan), expected, 1e-4)


def unpadded(grads: Any, plan: Any) -> Any:
    return jax.tree.map(lambda layout, g: layout.unpad(np.asarray(g)), plan.grads, grads)


@pytest.mark.parametrize("level", quick(LEVELS, ["os_g"]))
@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [masked, integer_count], ids=lambda f: f.__name__)
def test_separate_calls_are_one_batch(level, k, loss):
    """Masked means of two calls: the counts of both calls together divide both sums."""
    state, plan = sharded(level, 3)
    names = ("accuracy", "right", "counted", "mean", "penalty")

    def aux(p: Any, b: Any) -> Any:
        value, found = with_aux(loss, p, b)
        return value, {name: found[name] for name in names}

    call = gshard.value_and_grad(aux, plan, sync=False, has_aux=True, micro_batches=k)

    @jax.jit
    def both(p: Any, one: Any, other: Any) -> Any:
        total = call(p, one)[1] + call(p, other)[1]
        return gshard.reduce_gradients(total, plan)

    parts = [batch(0, 24), batch(1, 24)]
    (value, found), grads = both(state.params, *(gshard.shard_batch(b, plan) for b in parts))
    whole = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    (wanted, seen), expected = jax.jit(jax.value_and_grad(aux, has_aux=True))(params(), whole)
    close(value, wanted)
    close(unpadded(grads, plan), expected, 1e-4)
    for name in names:
        close(found[name], seen[name])


@pytest.mark.parametrize("level", quick(LEVELS, ["p_g_os"]))
def test_evaluation(level):
    """Scalars, sums, extremes, integers, and arrays with and without a dimension of examples."""

    def measures(p: Any, b: Any) -> Any:
        z = logits(p, b)
        each = losses(p, b)
        return {
            "mean": each.mean(),
            "masked": masked(p, b),
            "sum": each.sum(),
            "top": z.max(),
            "least": z.argmin(),
            "right": (z.argmax(-1) == b["y"]).sum(),
            "any": jnp.any(z > 1),
            "examples": len(z),
            "each": each,
            "guess": z.argmax(-1),
            "classes": z.T,
            "doubled": jnp.concatenate([z, -z]),
            "ranks": jnp.argsort(each),
            "half": each[: len(each) // 2],
            "matrix": z.T @ z,
            "table": jnp.ones(len(each)),
            "params": p["s"] * 2,
            "merged": jnp.stack([each, 2 * each]).reshape(-1),
        }

    state, plan = sharded(level, 8, 2)
    found = gshard.make_eval_step(measures, plan)(state, batch(0, 24))
    wanted = jax.jit(measures)(params(), batch(0, 24))
    close(found, jax.tree.map(jnp.asarray, wanted))


@pytest.mark.parametrize("loss", [normalized, penalized, masked, numbered])
@pytest.mark.parametrize("level", quick(LEVELS, ["os_g"]))
def test_per_micro_batch_is_a_loop_over_micro_batches(level, loss):
    """Micro-batch j consists of slice j of every device's examples."""
    devices, k, n = 3, 4, 3
    state, plan = sharded(level, devices)
    step = gshard.make_train_step(
        loss, plan, micro_batches=k, loss_semantics="per_micro_batch", donate=False
    )
    tx, p = optimizer(), params()
    opt, gradient, update = tx.init(p), jax.jit(jax.value_and_grad(loss)), jax.jit(tx.update)
    for i in range(STEPS):
        b = batch(i, devices * k * n)
        state, metrics = step(state, b)
        found = []
        for j in range(k):
            of = jax.tree.map(lambda x, j=j: x.reshape(devices, k, n, *x.shape[1:])[:, j], b)
            found.append(gradient(p, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of)))
        value, grads = jax.tree.map(lambda *x: sum(x) / k, *found)
        updates, opt = update(grads, opt, p)
        p = optax.apply_updates(p, updates)
        close(metrics["loss"], value)
    close(plan.unwrap(state).params, p, 1e-4)


def test_what_cannot_be_is_refused_with_the_line():
    state, plan = sharded("os_g", 4)

    def fails(loss: Any, words: str, **options: Any) -> None:
        step = gshard.make_train_step(loss, plan, **options)
        with pytest.raises(gshard.GShardError, match=re.escape(__file__) + r":\d+" + words):
            step(state, batch(0, 32))

    def rmse(p: Any, b: Any) -> Any:
        return jnp.sqrt(jnp.square(losses(p, b)).mean())

    fails(rmse, " needs all examples.*per_micro_batch", micro_batches=2)

    recomputed = jax.checkpoint(lambda p, b: losses(p, b).sum() / b["mask"].sum())
    fails(recomputed, " divides inside jax.checkpoint.*divide them outside", micro_batches=2)

    def printed(p: Any, b: Any) -> Any:
        loss = losses(p, b).mean()
        jax.debug.print("loss {}", loss)
        return loss

    fails(printed, " needs a value computed from all examples.*after the step", micro_batches=2)

    def pairs(p: Any, b: Any) -> Any:
        z = logits(p, b)
        return (z @ z.T).mean()

    fails(pairs, r".*more than gather_limit", gather_limit=16)

    def summed(p: Any, b: Any) -> Any:
        return jax.lax.psum(losses(p, b), "shard").mean()

    fails(summed, ".*per_device")

    def numbered(p: Any, b: Any) -> Any:
        return losses(p, b).mean() * jax.lax.axis_index("shard")

    fails(numbered, ".*per_device")

    def hidden_in_a_body(p: Any, b: Any) -> Any:
        @jax.checkpoint
        def scaled(s: Any) -> Any:
            return s * jax.lax.axis_index("shard")

        return losses(p, b).mean() * scaled(p["s"]).sum()

    fails(hidden_in_a_body, ".*per_device")

    def mapped(p: Any, b: Any) -> Any:
        each = jax.lax.map(lambda x: jax.lax.psum(x, "shard"), losses(p, b))
        return each.mean()

    fails(mapped, ".*per_device")


class Language(nn.Module):
    """The GPT of `examples/` with dropout."""

    @nn.compact
    def __call__(self, text: Any) -> Any:
        z = GPT(width=32, layers=3, heads=2, scan=True, remat=True)(text)
        return nn.Dropout(0.2, deterministic=not self.has_rng("dropout"))(z)


def token_losses(p: Any, text: Any, key: Any = None) -> Any:
    rngs = {} if key is None else {"dropout": key}
    z = Language().apply({"params": p}, text[:, :-1], rngs=rngs)
    targets = text[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(z, targets), (targets > 90) * 1.0


def texts(step: int, examples: int) -> np.ndarray:
    rng = np.random.default_rng(step)
    top = np.linspace(92, 256, examples).astype(int)[:, None]
    return (rng.integers(0, 10**6, (examples, 9)) % top).astype(np.uint8)


def language_params() -> Any:
    return Language().init(jax.random.key(0), texts(0, 1)[:, :-1])["params"]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "k"), [(8, 1), (4, 2)])
def test_a_gpt_with_a_masked_mean_and_dropout(devices, k):
    def loss(p: Any, text: Any) -> Any:
        each, mask = token_losses(p, text, jax.random.key(4))
        return (each * mask).sum() / mask.sum()

    tx, p = optax.sgd(0.1, momentum=0.9), language_params()
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    state, plan = gshard.shard_train_state((p, tx), mesh, "p_g_os", min_shard_size=64)
    step = gshard.make_train_step(loss, plan, micro_batches=k)
    opt, gradient = tx.init(p), jax.jit(jax.value_and_grad(loss))
    for i in range(STEPS):
        text = texts(i, 2 * devices * k)
        state, metrics = step(state, text)
        value, grads = gradient(p, text)
        updates, opt = tx.update(grads, opt, p)
        p = optax.apply_updates(p, updates)
        close(metrics["loss"], value)
    close(plan.unwrap(state).params, p, 1e-4)


@pytest.mark.parametrize("kind", ["mean", "masked"])
def test_means_communicate_no_more_than_per_device(kind):
    """The compiled step of a GPT at `p_g_os`, against a mean or a `Weighted` of each device."""

    def loss(semantics: str, p: Any, text: Any) -> Any:
        each, mask = token_losses(p, text)
        if kind == "mean":
            return each.mean()
        sums = ((each * mask).sum(), mask.sum())
        return sums[0] / sums[1] if semantics == "global" else gshard.Weighted(*sums)

    counts = {}
    for semantics in ("global", "per_device"):
        state, plan = gshard.shard_train_state(
            (language_params(), optax.sgd(0.1)), gshard.make_mesh(), "p_g_os", min_shard_size=64
        )
        step = gshard.make_train_step(
            partial(loss, semantics), plan, loss_semantics=semantics, check_loss=False
        )
        text = step.lower(state, texts(0, 16)).compile().as_text()
        found = re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text)
        counts[semantics] = {name: found.count(name) for name in sorted(set(found))}
    assert counts["global"].keys() <= counts["per_device"].keys()
    more = {k: v for k, v in counts["global"].items() if v > counts["per_device"][k]}
    assert counts["global"]["all-gather"] > 0 and not more, counts


def test_outputs_of_single_examples_are_not_averaged_over_micro_batches():
    state, plan = sharded("os_g", 4)
    loss = lambda p, b: (losses(p, b).mean(), {"each": losses(p, b)})  # noqa: E731
    options = {"micro_batches": 2, "loss_semantics": "per_micro_batch", "has_aux": True}
    with pytest.raises(gshard.GShardError, match="an entry for each example.*make_eval_step"):
        gshard.make_train_step(loss, plan, **options)(state, batch(0, 32))


@pytest.mark.parametrize("of_each", [lambda f: jax.vmap(jax.jit(f)), lambda f: f])
def test_what_a_custom_vjp_closes_over_has_no_derivative(of_each):
    """JAX says so too; under vmap of jit the number of these operands is lost there."""
    state, plan = sharded("os", 4)

    def loss(p: Any, b: Any) -> Any:
        table = jax.tree.leaves(p)[0].mean() * jnp.ones(())

        @jax.custom_vjp
        def scaled(x: Any) -> Any:
            return x * table

        scaled.defvjp(lambda x: (scaled(x), None), lambda _, c: (c,))
        return of_each(scaled)(losses(p, b)).mean()

    with pytest.raises(gshard.GShardError, match="closes over an array that depends on the param"):
        gshard.make_train_step(loss, plan)(state, batch(0, 32))


def test_a_value_of_the_loss_in_the_backward_pass_of_a_custom_vjp_is_explained():
    """JAX's derivative, which is made along with the loss, still has the value."""
    state, plan = sharded("os", 4)

    def loss(p: Any, b: Any) -> Any:
        found = losses(p, b)
        mean = jax.lax.stop_gradient(found.mean())

        @jax.custom_vjp
        def centred(x: Any) -> Any:
            return ((x - mean) ** 2).mean()

        centred.defvjp(lambda x: (centred(x), x), lambda x, c: (2 * c * (x - mean) / x.size,))
        return centred(found)

    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        gshard.make_train_step(loss, plan)(state, batch(0, 32))
    assert "Make the value above an argument" in " ".join(raised.value.__notes__)
