"""Inside transforms of JAX, under its modes, in threads and with other devices."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gshard
from tests.misuses.small import ADAM, BATCH, alone, kept, linen, loss_fn, params, shard
from tests.misuses.table import raw, refused, right


def fresh(level: str = "os", **options: Any) -> Any:
    """A state and a step that nobody has compiled."""
    state, plan = shard(level=level)
    return state, gshard.make_train_step(loss_fn, plan, **options)


def strict_loss(params: Any, batch: Any) -> jax.Array:
    """The same loss, without a promotion."""
    return jnp.square(batch["x"] @ params["w"] + params["b"][None] - batch["y"]).mean()


def under(mode: Any, steps: int = 2) -> Any:
    """Everything from the plan to some steps, under a mode of JAX."""

    def misuse(_):
        tx = optax.sgd(0.1)
        state = linen(tx)
        with mode():
            state, plan = shard(state, "p_g_os")
            step = gshard.make_train_step(strict_loss, plan)
            for _ in range(steps):
                state, _ = step(state, BATCH)
            found = gshard.full_params(state)
        return found, alone(steps=steps, tx=tx)

    return misuse


def jitted(_):
    state, step = fresh()
    new, metrics = jax.jit(lambda s, b: step(s, b))(state, BATCH)
    return gshard.full_params(new), alone()


def jitted_itself(_):
    state, step = fresh()
    return gshard.full_params(jax.jit(step)(state, BATCH)[0]), alone()


def jit_of_an_eval_step(_):
    state, plan, _ = kept()
    return jax.jit(gshard.make_eval_step(loss_fn, plan))(state, BATCH), loss_fn(params(), BATCH)


def scanned(_):
    state, step = fresh()
    batches = jax.tree.map(lambda x: jnp.stack([x, x]), BATCH)
    new, _ = jax.jit(lambda s: jax.lax.scan(step, s, batches))(state)
    return gshard.full_params(new), alone(steps=2)


def looped(_):
    state, step = fresh()
    new = jax.jit(lambda s: jax.lax.fori_loop(0, 2, lambda _, s: step(s, BATCH)[0], s))(state)
    return gshard.full_params(new), alone(steps=2)


def branched(_):
    state, step = fresh()

    def one(s, go):
        return jax.lax.cond(go, lambda s: step(s, BATCH)[0], lambda s: s, s)

    return gshard.full_params(jax.jit(one)(state, True)), alone()


def mapped(_):
    """Two batches at once: losses of both."""
    state, step = fresh()
    batches = jax.tree.map(lambda x: jnp.stack([x, x]), BATCH)
    losses = jax.jit(jax.vmap(lambda b: step(state, b)[1]["loss"]))(batches)
    return losses, np.full(2, loss_fn(params(), BATCH))


def differentiated(_):
    state, step = fresh()
    value = lambda b: step(state, b)[1]["loss"]  # noqa: E731
    return jax.jit(jax.grad(value))(BATCH), jax.grad(lambda b: loss_fn(params(), b))(BATCH)


def abstract(_):
    state, step = fresh()
    out = jax.eval_shape(step, state, BATCH)[1]["loss"]
    return out.shape == () and out.dtype == jnp.float32, True


def printed(_):
    state, step = fresh()
    return "shard_map" in str(jax.make_jaxpr(step)(state, BATCH)), True


def pmapped(_):
    state, step = fresh()
    batches = jax.tree.map(lambda x: np.tile(x, (32, 1)).reshape(8, 64, *x.shape[1:]), BATCH)
    jax.pmap(lambda b: step(state, b)[1])(batches)


def in_a_shard_map(_):
    state, plan, _ = kept()
    step = gshard.make_train_step(loss_fn, plan)
    spec = jax.P("shard")
    f = lambda b: step(state, b)[1]["loss"]  # noqa: E731
    jax.shard_map(f, mesh=plan.mesh, in_specs=spec, out_specs=jax.P(), check_vma=False)(
        jax.tree.map(lambda x: np.tile(x, (32, 1)), BATCH)
    )


def called_back(_):
    """A step in a callback of a compiled program, which would wait for itself."""
    state, _, step = kept()
    step(state, BATCH)
    state = kept()[0]

    def back(x):
        return np.float32(step(state, BATCH)[1]["loss"])

    f = lambda x: jax.pure_callback(back, jax.ShapeDtypeStruct((), jnp.float32), x)  # noqa: E731
    return jax.jit(f)(jnp.ones(())), loss_fn(params(), BATCH)


def in_threads(_):
    """Two threads step states of their own with one step."""
    found: dict[int, Any] = {}
    step = kept()[2]
    step(kept()[0], BATCH)
    states = [kept()[0], kept()[0]]

    def run(i):
        found[i] = gshard.full_params(step(states[i], BATCH)[0])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return [found[0], found[1]], [alone()] * 2


def one_state_in_threads(_):
    """Two threads step the same state: one of them comes too late."""
    state, _, step = kept()
    errors: list[Exception] = []
    gate = threading.Barrier(2)

    def run():
        gate.wait()
        try:
            step(state, BATCH)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    (error,) = errors
    raise error


def cleared(_):
    state, _, step = kept()
    state, _ = step(state, BATCH)
    jax.clear_caches()
    state, _ = step(state, BATCH)
    return gshard.full_params(state), alone(steps=2)


def pickled_step(_):
    pickle.dumps(kept()[2])


def copied_step(_):
    state, _, step = kept()
    return gshard.full_params(copy.deepcopy(step)(state, BATCH)[0]), alone()


def copied_plan(_):
    plan = copy.deepcopy(kept()[1])
    state, _ = gshard.make_train_step(loss_fn, plan)(kept()[0], BATCH)
    return gshard.full_params(state), alone()


def restored_under_transfer_guard(folder):
    """What a checkpoint, and then a file of weights, gives back."""
    state, file = kept("p_g_os")[0], folder / "x.safetensors"
    with jax.transfer_guard("disallow"), gshard.Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(1, state)
        state = checkpointer.restore(like=state).state
        gshard.save_safetensors(state, file)
        return gshard.full_params(gshard.load_safetensors(state, file)), params()


def x64_later(_):
    """64 bits are turned on between sharding and the step."""
    state, step = fresh()
    with jax.enable_x64(True):
        state, _ = step(state, BATCH)
    return gshard.full_params(state), alone()


def x64(_):
    """64 bits from the start: parameters of float64 stay so."""
    with jax.enable_x64(True):
        own = jax.tree.map(np.float64, params())
        state, plan = shard((own, ADAM), min_shard_size=0)
        step = gshard.make_train_step(loss_fn, plan, micro_batches=2)
        state, _ = step(state, jax.tree.map(np.float64, BATCH))
        full = gshard.full_params(state)
        assert full["w"].dtype == np.float64
        return full, alone()


def nan_under_debug_nans(_):
    with jax.debug_nans(True):
        state, step = fresh()
        step(state, {**BATCH, "x": BATCH["x"] * np.nan})


def own_error_under_debug_nans(_):
    def loss(*_):
        raise RuntimeError("the server is down")

    with jax.debug_nans(True):
        state, plan = shard()
        gshard.make_train_step(loss, plan)(state, BATCH)


def jit_twice(_):
    """The user's jit donates the state that the step donates."""
    state, step = fresh()
    f = jax.jit(lambda s, b: step(s, b), donate_argnums=0)
    state, _ = f(state, BATCH)
    state, _ = f(state, BATCH)
    return gshard.full_params(state), alone(steps=2)


def sharded_in_jit(_):
    """The gradients of your own loop without jit."""
    state, plan, _ = kept("p_g_os")
    loss, grads = gshard.value_and_grad(loss_fn, plan)(state.params, BATCH)
    return gshard.full_params(state.apply_gradients(grads=grads)), alone()


def second_derivative(_):
    """A derivative of a gradient of gshard's."""
    state, plan, _ = kept()
    grad = gshard.value_and_grad(loss_fn, plan)
    total = lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(grad(p, BATCH)[1]))  # noqa: E731
    plain = lambda p: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss_fn)(p, BATCH)))  # noqa: E731
    return jax.jit(jax.grad(total))(state.params), jax.grad(plain)(params())


def in_loss(_):
    """A step of gshard inside a loss of gshard."""
    state, plan, step = kept()
    inner = kept()[0]

    def loss(p, b):
        return loss_fn(p, b) + 0 * step(inner, b)[1]["loss"]

    gshard.make_train_step(loss, plan)(state, BATCH)


def default_device(_):
    with jax.default_device(jax.devices()[3]):
        state, step = fresh("p_g_os")
        state, _ = step(state, BATCH)
    return gshard.full_params(state), alone()


def another_mesh_is_set(_):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        state, step = fresh("p_g_os")
        step(state, BATCH)


def its_mesh_is_set(_):
    state, plan = shard(level="p_g_os")
    with jax.set_mesh(plan.mesh):
        state, _ = gshard.make_train_step(loss_fn, plan)(state, BATCH)
    return gshard.full_params(state), alone()


def explicit_mesh_is_set(_):
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        state, step = fresh("p_g_os")
        step(state, BATCH)


ROWS = {
    "a step inside a jit": right(jitted),
    "a step is jitted itself": right(jitted_itself),
    "an eval step is jitted": right(jit_of_an_eval_step),
    "a jit of your own donates the state as well": right(jit_twice),
    "a step inside a scan": right(scanned),
    "a step inside a fori_loop": right(looped),
    "a step inside a cond": right(branched),
    "a step is mapped by vmap": right(mapped),
    "a step is differentiated": right(differentiated),
    "the shapes of a step by eval_shape": right(abstract),
    "the jaxpr of a step": right(printed),
    "a step inside a pmap": refused(pmapped, "jax.pmap", "outside"),
    "a step inside a shard_map of the same mesh": refused(
        in_a_shard_map, "jax.shard_map", "outside"
    ),
    "a step inside a loss": refused(in_loss, "inside a loss", "outside"),
    "a step in a callback": right(called_back),
    "value_and_grad without a jit": right(sharded_in_jit),
    "a derivative of gradients": right(second_derivative),
    "one step, two threads, two states": right(in_threads),
    "one step, two threads, one state": refused(
        one_state_in_threads, "earlier step", error=gshard.DonatedStateError
    ),
    "compiled programs are thrown away": right(cleared),
    "a step is pickled": refused(pickled_step, "a step or a loader", "process that uses it"),
    "a step is copied by deepcopy": right(copied_step),
    "a plan is copied by deepcopy": right(copied_plan),
    "jax.disable_jit": right(under(jax.disable_jit, steps=1)),  # seconds for each
    "jax.debug_nans": right(under(lambda: jax.debug_nans(True))),
    "jax.debug_nans and a NaN": refused(nan_under_debug_nans, "jax_debug_nans", "the loss alone"),
    "an error of the loss under jax.debug_nans": raw(
        own_error_under_debug_nans, RuntimeError, "the server is down"
    ),
    "jax.debug_infs": right(under(lambda: jax.debug_infs(True))),
    "jax.checking_leaks": right(under(jax.checking_leaks)),
    "jax.transfer_guard('disallow')": right(under(lambda: jax.transfer_guard("disallow"))),
    "what was saved is read under jax.transfer_guard('disallow')": right(
        restored_under_transfer_guard
    ),
    "jax.numpy_rank_promotion('raise')": right(under(lambda: jax.numpy_rank_promotion("raise"))),
    "jax.numpy_dtype_promotion('strict')": right(
        under(lambda: jax.numpy_dtype_promotion("strict"))
    ),
    "jax.default_matmul_precision('highest')": right(
        under(lambda: jax.default_matmul_precision("highest"))
    ),
    "jax.default_prng_impl('rbg')": right(under(lambda: jax.default_prng_impl("rbg"))),
    "jax.threefry_partitionable(False)": right(under(lambda: jax.threefry_partitionable(False))),
    "jax.default_device": right(default_device),
    "jax.set_mesh with the mesh of the plan": right(its_mesh_is_set),
    "jax.set_mesh with another mesh": refused(another_mesh_is_set, "jax.set_mesh", "outside"),
    "jax.set_mesh with explicit axes": refused(explicit_mesh_is_set, "jax.set_mesh", "outside"),
    "jax.enable_x64 from the start": right(x64),
    "jax.enable_x64 after sharding": right(x64_later),
}
