"""The backward pass of a loop: reduce-scatters that it waits for, and the order of its operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Literal

import gshard
from gshard._util.jaxpr import CHECKPOINT, JIT, body_of, with_inner
from gshard.train.fsdp.gather_bucket import GatherScope, gather_specs, grad_sinks
from gshard.train.fsdp.interpreter import with_sharded_params
from tests.train.fsdp.test_interpreter import cross_entropy, layer, params, rows, scanned


def scatters(eqn, size):
    """Whether an equation reduce-scatters, here or inside, a gradient of so many elements."""
    return any(
        one.primitive.name == "reduce_scatter" and one.invars[0].aval.size == size
        for one in with_inner(eqn)
    )


def inlined(jaxpr, known=None):
    """Equations, those of called functions in their place; with what they read and write."""
    known = {} if known is None else known
    for eqn in jaxpr.eqns:
        given = [known.get(v, v) for v in eqn.invars if not isinstance(v, Literal)]
        if eqn.primitive.name not in (JIT, CHECKPOINT):
            yield eqn, given, eqn.outvars
            continue
        inner = body_of(eqn)[0]
        known.update(
            (own, known.get(v, v))
            for own, v in zip(inner.invars, eqn.invars, strict=True)
            if not isinstance(v, Literal)
        )
        yield from inlined(inner, known)
        results = zip(eqn.outvars, inner.outvars, strict=True)
        known.update((v, known.get(o, o)) for v, o in results if not isinstance(o, Literal))


def ancestors(jaxpr, eqn):
    """The equations that the operands of one of them are computed from."""
    every, found = list(inlined(jaxpr)), []
    at = next(i for i, (one, *_) in enumerate(every) if one is eqn)
    needed = set(every[at][1])
    for one, given, results in reversed(every[:at]):
        if not needed.isdisjoint(results):
            found.append(one)
            needed.update(given)
    return found


def head_in_a_checkpoint(p, batch):
    x = p["embed"][batch["ids"]]
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, p["stack"])
    head = jax.checkpoint(lambda x, w: cross_entropy(x @ w + p["bias"], batch["labels"]))
    return head(x, p["out"])


def from_numbers(p, batch):
    """Nothing is gathered before the loop, so that nothing is reduce-scattered after it."""
    x = jax.nn.one_hot(batch["ids"] % 16, 16)
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, p["stack"])
    return cross_entropy(x @ p["out"] + p["bias"], batch["labels"]) + 0 * p["embed"].sum()


def with_integers_and_an_unused_stack(p, batch):
    def body(carry, w):
        x, i = carry
        x = layer(x, w)
        return (x, i + 1), x

    start = p["embed"][batch["ids"]], 0
    (x, i), _ = jax.lax.scan(body, start, p["stack"])
    return cross_entropy(x @ p["out"] * i + p["bias"], batch["labels"])


LOOPS = {
    "scan": scanned(layer),
    "scan, checkpoint": scanned(jax.checkpoint(layer)),
    "head in a checkpoint": head_in_a_checkpoint,
    "from numbers": from_numbers,
    "integers, unused stack": with_integers_and_an_unused_stack,
}
HEAD = params()["out"].size


def on_devices_alone(loss, given, n=4):
    """Value and gradients without the step, which on CPU makes all loops wait for collectives."""
    mesh = gshard.make_mesh(devices=jax.devices()[:n])
    _, plan = gshard.shard_train_state(
        (given, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=16, scan_axes={"stack.*": 0}
    )
    layouts, structure = jax.tree.flatten(plan.params)
    specs = gather_specs(layouts, layouts)

    def on_device(leaves, batch):
        def at(sinks):
            share = with_sharded_params(of_leaves, specs, ["shard"], leaves, sinks, batch,
                                        scope=scope)  # fmt: skip
            return share / n

        def of_leaves(leaves, batch):
            return loss(jax.tree.unflatten(structure, leaves), batch)

        with GatherScope(sync=False, bucket_size=0) as scope:
            return jax.value_and_grad(at)(grad_sinks(leaves, specs))

    stored = [x.data_spec for x in layouts]
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(stored, jax.P("shard")),
                        out_specs=(jax.P(), stored), check_vma=False)  # fmt: skip
    return run, layouts


def program_of(loss, given, batch):
    """The jaxpr that runs on each device."""
    run, _ = on_devices_alone(loss, given)
    (found,) = jax.make_jaxpr(run)(jax.tree.leaves(given), batch).jaxpr.eqns
    return found.params["jaxpr"]


def backward_loop(jaxpr):
    (loop,) = [x for x in jaxpr.eqns if x.primitive.name == "scan" and x.params["reverse"]]
    return loop


@pytest.mark.parametrize("name", LOOPS)
def test_the_gradient_of_the_head_is_scattered_before_the_backward_loop(name):
    jaxpr = program_of(LOOPS[name], params(), rows())
    loop = backward_loop(jaxpr)
    assert sum(scatters(x, HEAD) for x, *_ in inlined(jaxpr)) == 1
    assert any(scatters(x, HEAD) for x in ancestors(jaxpr, loop))
    assert not scatters(loop, HEAD) and scatters(loop, 16 * 16)


def test_a_backward_loop_is_given_no_zeros_for_a_stack_that_nothing_uses():
    jaxpr = program_of(LOOPS["integers, unused stack"], params(), rows())
    zeros = [x for x in jaxpr.eqns if x.primitive.name == "broadcast_in_dim"]
    assert zeros and (6, 2, 5, 16) not in [x.outvars[0].aval.shape for x in zeros]


@pytest.mark.parametrize("name", LOOPS)
def test_what_waits_for_the_head_has_the_gradients_of_one_device(name):
    run, layouts = on_devices_alone(LOOPS[name], params())
    _, found = jax.jit(run)(jax.tree.leaves(params()), rows())
    expected = jax.tree.leaves(jax.grad(LOOPS[name])(params(), rows()))
    for x, right, layout in zip(found, expected, layouts, strict=True):
        x = layout.unpad(np.asarray(x)) if layout.dim is not None else np.asarray(x)
        np.testing.assert_allclose(x, right, atol=2e-6)


# ---- the order of a loop's operands --------------------------------------------------------------


def mlp_of(up, down):
    """A loss with two stacks that have these names."""

    def loss(p, batch):
        x = p["embed"][batch["ids"]]
        stacks = {"a": p[up], "b": p[down]}
        body = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w["a"]) @ w["b"], None))
        x, _ = jax.lax.scan(body, x, stacks)
        return cross_entropy(x @ p["out"] + p["bias"], batch["labels"])

    rng = np.random.default_rng(0)
    kernels = [
        rng.normal(size=shape).astype(np.float32) / 4 for shape in ((3, 16, 48), (3, 48, 16))
    ]
    plain = {name: x for name, x in params().items() if name != "stack"}
    return loss, plain | {up: kernels[0], down: kernels[1]}


def test_the_operands_of_a_loop_do_not_depend_on_names():
    """They are in the order of the gradients: the last kernel and its sink, then the first."""
    found = []
    for names in (("stack_1", "stack_2"), ("stack_2", "stack_1")):
        loss, given = mlp_of(*names)
        jaxpr = program_of(loss, given, rows())
        loops = [x for x in jaxpr.eqns if x.primitive.name == "scan"]
        found.append([[v.aval.shape for v in x.invars] for x in loops])
    assert found[0] == found[1]
    forward, _ = found[0]
    shards = [shape for shape in forward if len(shape) == 3 and shape[0] == 3]
    assert shards == [(3, 12, 16)] * 2 + [(3, 4, 48)] * 2
