"""`value_and_grad`, `reduce_gradients`, and what an optimizer is given."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gshard
from tests.misuses.small import BATCH, alone, kept, loss_fn, params, shard
from tests.misuses.table import raw, refused, right, warned


def grads_of(state: Any, plan: Any, loss: Any = loss_fn, **options: Any) -> Any:
    return jax.jit(gshard.value_and_grad(loss, plan, **options))(state.params, BATCH)[1]


def with_grads(make: Any) -> Any:
    state, plan, _ = kept()
    return state.apply_gradients(grads=make(state, plan))


def added_twice(_):
    state, plan, _ = kept()
    local = grads_of(state, plan, sync=False)
    gshard.reduce_gradients(local.grads, plan)


def of_two_plans(_):
    state, plan, _ = kept()
    local = jax.jit(gshard.value_and_grad(loss_fn, plan, sync=False))(state.params, BATCH)[1]
    other = shard(mesh=gshard.make_mesh(devices=jax.devices()[:4]))[1]
    gshard.reduce_gradients(local, other)


def summed_of_two_kinds(_):
    state, plan, _ = kept("os_g")
    one = grads_of(state, plan, sync=False, accumulate="local")
    two = grads_of(state, plan, sync=False, accumulate="scatter")
    return one + two


def of_unpadded(_):
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    plan = shard(level="p_g_os", mesh=mesh, rules={"w": 1})[1]
    gshard.value_and_grad(loss_fn, plan)(params(), {k: v[:15] for k, v in BATCH.items()})


def updated_by_hand(_):
    """`optax` on a sharded state, without its `apply_gradients`."""
    state, plan, _ = kept("p_g_os")
    grads = grads_of(state, plan)
    updates, inner = state.tx.update(grads, state.opt_state, state.params)
    new = state.replace(params=optax.apply_updates(state.params, updates), opt_state=inner)
    return gshard.full_params(new), alone()


def plain_grad(_):
    """`jax.grad` of a sharded state without gshard: XLA finds the gradients."""
    state, _, _ = kept("os")
    grads = jax.jit(jax.grad(loss_fn))(state.params, BATCH)
    return gshard.full_params(state.apply_gradients(grads=grads)), alone()


def smoothed(p, b, *, smoothing=0.0):
    return loss_fn(p, b) * (1 + smoothing)


def grad_of_smoothed(loss: Any = smoothed) -> Any:
    return gshard.value_and_grad(loss, kept()[1])


def counting_shapes(p, b):
    return loss_fn(p, b), {"examples": len(b["x"])}


def counting_over_calls(_):
    """Of 16 and 8 examples."""
    state, plan, _ = kept()

    def counting(p, b):
        return loss_fn(p, b), {"examples": gshard.Reduced(len(b["x"]), "sum")}

    grad = gshard.value_and_grad(counting, plan, sync=False, has_aux=True)
    half = {name: x[:8] for name, x in BATCH.items()}
    total = grad(state.params, BATCH)[1] + grad(state.params, half)[1]
    return gshard.reduce_gradients(total, plan)[0][1]["examples"], 24


ROWS = {
    "gradients of another tree": refused(
        lambda _: with_grads(lambda s, p: {"v": s.params["w"]}), "gradients", "missing", "added"
    ),
    "no gradients": raw(lambda _: with_grads(lambda s, p: None), TypeError, "NoneType"),
    "the loss and its gradients": refused(
        lambda _: with_grads(lambda s, p: (jnp.ones(()), s.params)), "gradients"
    ),
    "gradients of other shapes": refused(
        lambda _: with_grads(lambda s, p: jax.tree.map(lambda x: x[:1], s.params)), "gradients"
    ),
    "gradients that are not reduced": refused(
        lambda _: with_grads(lambda s, p: grads_of(s, p, sync=False)), "gshard.reduce_gradients"
    ),
    "gradients reduced twice": refused(
        lambda _: gshard.reduce_gradients(grads_of(*kept()[:2]), kept()[1]), "reduced already"
    ),
    "the arrays of local gradients": refused(added_twice, "value_and_grad(loss_fn, plan, sync"),
    "gradients and plan are swapped": refused(
        lambda _: gshard.reduce_gradients(kept()[1], grads_of(*kept()[:2], sync=False)),
        "reduce_gradients",
    ),
    "local gradients of another mesh": refused(of_two_plans, "local gradient of", "shape"),
    "local gradients of two kinds are added": refused(summed_of_two_kinds, "were added to"),
    "a number of examples, for several calls": warned(
        lambda _: grads_of(*kept()[:2], counting_shapes, sync=False, has_aux=True),
        *("int32[]", "of several calls, only the last", 'gshard.Reduced(x, "sum")'),
    ),
    "a number of examples, for several calls, as a sum": right(counting_over_calls),
    "local gradients and a number are added": refused(
        lambda _: grads_of(*kept()[:2], sync=False) + 1, "were added to 1"
    ),
    "local gradients are divided": refused(
        lambda _: grads_of(*kept()[:2], sync=False) / 2, "LocalGradients"
    ),
    "value_and_grad is given a state": refused(
        lambda _: gshard.value_and_grad(loss_fn, kept()[1])(kept()[0], BATCH), "Pass state.params"
    ),
    "value_and_grad is given plain parameters": right(
        lambda _: (
            gshard.value_and_grad(loss_fn, kept()[1])(params(), BATCH)[1],
            jax.grad(loss_fn)(params(), BATCH),
        )
    ),
    "value_and_grad of a loss of the parameters alone, as in JAX": refused(
        lambda _: gshard.value_and_grad(loss_fn, kept()[1])(kept()[0].params),
        *("needs the argument batch=", "f(params, batch)"),
        error=gshard.ArgumentTypeError,
    ),
    "value_and_grad is given the batch by name": refused(
        lambda _: gshard.value_and_grad(loss_fn, kept()[1])(params(), batch=BATCH),
        "f(params, batch)",
        error=gshard.ArgumentTypeError,
    ),
    "value_and_grad is given a key in third place": refused(
        lambda _: gshard.value_and_grad(loss_fn, kept()[1])(params(), BATCH, jax.random.key(0)),
        "f(params, batch, rng=key)",
        error=gshard.ArgumentTypeError,
    ),
    "value_and_grad is given a misspelt keyword of the loss": refused(
        lambda _: grad_of_smoothed()(params(), BATCH, smoothin=1.0),
        *("takes no smoothin", "Did you mean 'smoothing'?"),
    ),
    "value_and_grad is given a keyword of a loss that takes any": right(
        lambda _: (
            grad_of_smoothed(lambda p, b, **more: smoothed(p, b, **more))(
                params(), BATCH, smoothing=1.0
            )[0],
            2 * loss_fn(params(), BATCH),
        )
    ),
    "value_and_grad is given a keyword that a partial has bound": right(
        lambda _: (
            grad_of_smoothed(functools.partial(smoothed, smoothing=3.0))(
                params(), BATCH, smoothing=1.0
            )[0],
            2 * loss_fn(params(), BATCH),
        )
    ),
    "value_and_grad without a plan": refused(
        lambda _: gshard.value_and_grad(loss_fn),
        "value_and_grad(loss_fn, plan)",
        error=gshard.ArgumentTypeError,
    ),
    "value_and_grad of unpadded parameters": refused(
        of_unpadded, "has shape (16, 8)", "(16, 9)", "state.params"
    ),
    "the optimizer is called by hand": right(updated_by_hand),
    "gradients of jax.grad": right(plain_grad),
}
