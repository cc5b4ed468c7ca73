"""A `jax.shard_map` inside the loss: over model axes it works, over data axes it is refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from tests.train.fsdp.test_trace_loss import X, assert_same_step, ignored, one_step

HERE = __file__.rsplit("/", 1)[-1]


def over_model(body, mesh, in_specs, out_specs, check_vma=True):
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={"model"},
        check_vma=check_vma,
    )


COLUMNS, BOTH = (jax.P(), jax.P(None, "model")), (jax.P(), jax.P())


def mlp(mesh, check_vma, params, x):
    """Columns of the first layer and rows of the second, in a loop with its own derivatives."""

    def body(x, w):
        step = jax.checkpoint(lambda y: jax.lax.psum(jax.nn.relu(y @ w) @ w.T, "model") / 8)
        return jax.lax.scan(lambda y, _: (step(y), None), x, None, 2)[0]

    mapped = over_model(body, mesh, COLUMNS, jax.P(), check_vma)
    return jnp.square(jax.jit(mapped)(x, params["w"])).mean()


def plain_mlp(params, x):
    for _ in range(2):
        x = jax.nn.relu(x @ params["w"]) @ params["w"].T / 8
    return jnp.square(x).mean()


def centred(mesh, check_vma, params, x):
    """With a sum over the examples inside."""

    def body(x, w):
        return jnp.tanh(x @ w - (x @ w).mean(0))

    return over_model(body, mesh, COLUMNS, COLUMNS[1], check_vma)(x, params["w"]).mean()


def plain_centred(params, x):
    return jnp.tanh(x @ params["w"] - (x @ params["w"]).mean(0)).mean()


def joined(mesh, check_vma, params, x):
    """With other collectives, and the examples themselves split over the model axis."""

    def body(x, w):
        h = x @ w
        largest = jax.lax.pmax(jax.lax.stop_gradient(h).max(-1), "model")
        return largest, jax.lax.all_gather(h, "model", axis=1, tiled=True)

    largest, h = over_model(body, mesh, COLUMNS, BOTH, check_vma=False)(x, params["w"])
    rows = over_model(jnp.sin, mesh, jax.P("model"), jax.P("model"), check_vma)(h)
    return (rows * (h - largest[:, None])).mean()


def plain_joined(params, x):
    h = x @ params["w"]
    return (jnp.sin(h) * (h - jax.lax.stop_gradient(h).max(-1, keepdims=True))).mean()


MAPPED = [(mlp, plain_mlp, []), (centred, plain_centred, [16]), (joined, plain_joined, [512])]


@ignored
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("level", ["dp", "os_g", "p_g_os"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("loss, plain, sizes", MAPPED)
def test_a_shard_map_over_the_users_own_axes(loss, plain, sizes, named, level, check_vma):
    """In the plan's mesh, or the one that is known there; the examples stay where they are."""
    mesh = gshard.make_mesh(extra={"model": 2})
    mapped = partial(loss, mesh if named else None, check_vma)
    assert_same_step(mapped, plain, mesh, level=level)
    params = {"w": np.ones((8, 8), np.float32)}
    state, plan = gshard.shard_train_state((params, optax.sgd(1.0)), mesh, level, min_shard_size=8)
    step = gshard.make_train_step(mapped, plan)
    step.lower(state, X)
    assert [x.size for x in step.loss_transfers] == sizes


@ignored
@pytest.mark.parametrize(
    "options", [{"micro_batches": 2}, {"loss_semantics": "per_device", "micro_batches": 2}]
)
@pytest.mark.parametrize("named", [True, False])
def test_a_shard_map_of_another_kind_of_loss(named, options):
    mesh = gshard.make_mesh(extra={"model": 2})
    assert_same_step(partial(mlp, mesh if named else None, True), plain_mlp, mesh, **options)


def gathered(mesh, check_vma, params, x):
    """With something that needs the examples of all devices."""

    def body(x, w):
        return jnp.cumsum(jnp.tanh(x @ w), 0)

    return (over_model(body, mesh, COLUMNS, COLUMNS[1], check_vma)(x, params["w"]) ** 2).mean()


def plain_gathered(params, x):
    return (jnp.cumsum(jnp.tanh(x @ params["w"]), 0) ** 2).mean()


@ignored
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_shard_map_that_needs_all_examples(check_vma, level):
    mesh = gshard.make_mesh(extra={"model": 2})
    assert_same_step(partial(gathered, None, check_vma), plain_gathered, mesh, level=level)


def centred_by_name(combine, params, x):
    """With a mean, or a maximum, over the examples of `jax.vmap` and the model axis at once."""

    def body(x, w):
        def one(row):
            return jnp.tanh(row @ w) - combine(jax.lax.stop_gradient(row @ w), ("model", "batch"))

        return jax.vmap(one, axis_name="batch")(x)

    return over_model(body, None, COLUMNS, COLUMNS[1], False)(x, params["w"]).mean()


def plain_centred_by_name(reduce, params, x):
    h = x @ params["w"]
    halves = jax.lax.stop_gradient(h).reshape(len(h), 2, -1)
    return (jnp.tanh(h) - jnp.tile(reduce(halves, (0, 1)), 2)).mean()


@ignored
@pytest.mark.parametrize("combine, reduce", [(jax.lax.pmean, jnp.mean), (jax.lax.pmax, jnp.max)])
def test_names_of_vmap_and_of_model_axes_in_one_collective(combine, reduce):
    loss, plain = partial(centred_by_name, combine), partial(plain_centred_by_name, reduce)
    assert_same_step(loss, plain, gshard.make_mesh(extra={"model": 2}))


@ignored
def test_a_sum_over_data_and_model_axes_is_refused():
    def loss(params, x):
        sums = lambda x, w: jax.lax.psum((x @ w).sum(), ("shard", "model"))  # noqa: E731
        return over_model(sums, None, COLUMNS, jax.P(), False)(x, params["w"]) / 64

    words = rf"psum.* at .*{HERE}:\d+ runs over 'shard', a data axis"
    with pytest.raises(gshard.GShardError, match=words):
        one_step(loss, gshard.make_mesh(extra={"model": 2}))


@ignored
@pytest.mark.parametrize("spec", [jax.P("shard"), jax.P()])
@pytest.mark.parametrize("extra", [None, {"model": 2}])
def test_a_shard_map_over_data_axes_is_refused(spec, extra):
    mesh = gshard.make_mesh(extra=extra)

    def loss(params, x):
        inside = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(inside)(x @ params["w"]).mean()

    words = rf"calls jax.shard_map \(.*{HERE}:\d+\) over a data axis.*axis_names="
    with pytest.raises(gshard.GShardError, match=words):
        one_step(loss, mesh)


@ignored
def test_the_line_of_a_refused_shard_map():
    mesh = gshard.make_mesh(extra={"model": 2})

    def loss(params, x):
        inside = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        return inside(x @ params["w"]).mean()

    with pytest.raises(gshard.GShardError, match=rf"jax.shard_map \(.*{HERE}:\d+\)"):
        one_step(loss, mesh, loss_semantics="per_device")


EXPLICIT = {
    "einsum": lambda x, spec: jnp.einsum("ij->ij", x, out_sharding=spec),
    "zeros": lambda x, spec: x + jnp.zeros(x.shape, out_sharding=spec),
    "reshard": jax.sharding.reshard,
    "auto_axes": lambda x, spec: jax.sharding.auto_axes(jnp.tanh, out_sharding=spec)(x),
}


@pytest.mark.parametrize("axis", ["shard", "absent"])
@pytest.mark.parametrize("name", EXPLICIT)
def test_shardings_for_explicit_axes_are_refused(name, axis):
    def loss(params, x):
        return EXPLICIT[name](x @ params["w"], jax.P(axis, None)).mean()

    words = rf"asks for a sharding .*{HERE}:\d+\) with out_sharding=.*of type Explicit"
    with pytest.raises(gshard.GShardError, match=words):
        one_step(loss, gshard.make_mesh())
