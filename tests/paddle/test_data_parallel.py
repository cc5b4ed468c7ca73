"""`DataParallel`: buckets, accumulation, unused parameters; rows differ on every device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard.analysis.hlo import read_program
from tests.paddle.test_group_sharded import (
    WIDTH,
    Net,
    assert_same,
    loss_fn,
    on_one_device,
    rows,
    whole,
)
from tests.tiers import quick


def step(model, optimizer):
    optimizer.update(model, model.grads)
    model.clear_gradients()


@pytest.mark.parametrize("devices", quick([1, 3, 8], [3, 8]))
def test_every_third_step_reduces(devices):
    """D1: two of three calls stay local; losses and parameters are those of a local run."""
    model = gshard.paddle.DataParallel(
        Net(), group=gshard.distributed.new_group(list(range(devices)))
    )
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    local = Net()
    its = nnx.Optimizer(local, optax.sgd(1e-2), wrt=nnx.Param)
    total = None
    for i in range(9):
        batch = rows(24, i)
        wanted, grads = nnx.value_and_grad(loss_fn)(local, jax.tree.map(jnp.asarray, batch))
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        if i % 3 < 2:
            with model.no_sync():
                loss = model.backward(loss_fn, batch).mean()
        else:
            loss = model.backward(loss_fn, batch)
            step(model, optimizer)
            its.update(local, total)
            total = None
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert_same(model.state_dict(), whole(local))


def test_two_optimizers_of_parts_train_in_turn():
    """As the networks of a GAN; NNX alone computes what is wanted."""
    model, local = gshard.paddle.DataParallel(Net()), Net()
    parts = [nnx.All(nnx.Param, nnx.PathContains(name)) for name in ("first", "last")]
    ours, its = (
        [nnx.Optimizer(x, optax.adam(0.1), wrt=wrt) for wrt in parts] for x in (model, local)
    )
    for i in range(4):
        model.backward(loss_fn, rows(16, i))
        step(model, ours[i % 2])
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, parts[i % 2]))(local, rows(16, i))
        its[i % 2].update(local, grads)
    assert_same(model.state_dict(), whole(local))


class Branches(nnx.Module):
    """A branch that differs by device, a parameter that none uses, and a buffer."""

    def __init__(self):
        rngs = nnx.Rngs(2)
        self.left = nnx.Linear(13, 7, rngs=rngs)
        self.right = nnx.Linear(13, 7, rngs=rngs)
        self.unused = nnx.Linear(3, 3, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        # Each row decides; so on some devices one side has no gradient at all.
        return jnp.where(x[:, :1] > 0, self.left(x), jnp.tanh(self.right(x)))


def test_branches_unused_parameters_and_buffers():
    """D2, D3, D4: local calls then one that reduces, against a reduction each time."""
    batches = [rows(16, seed) for seed in range(5)]
    for batch in batches:
        batch["x"][:4, 0] = np.abs(batch["x"][:4, 0])  # the first two devices go left
    with pytest.warns(gshard.GShardWarning, match=r"does not use unused/bias, unused/kernel"):
        lazy = gshard.paddle.DataParallel(Branches(), find_unused_parameters=True)
        lazy.backward(loss_fn, batches[0])
    lazy.clear_gradients()
    eager = gshard.paddle.DataParallel(Branches())
    for i, batch in enumerate(batches):
        eager.backward(loss_fn, batch)
        if i < 4:
            with lazy.no_sync():
                lazy.backward(loss_fn, batch)
        else:
            lazy.backward(loss_fn, batch)
    grads = [dict(nnx.to_flat_state(m.grads)) for m in (lazy, eager)]
    for path, x in grads[0].items():
        np.testing.assert_allclose(x[...], grads[1][path][...], rtol=1e-5, atol=1e-6)
        shards = [np.asarray(s.data) for s in x[...].addressable_shards]
        assert all((s == shards[0]).all() for s in shards)  # every device has the same
        assert (path[0] == "unused") == (not np.any(x[...]))
    assert int(eager.calls[...]) == 5


@jax.custom_vjp
def my_tanh(x):
    return jnp.tanh(x)


my_tanh.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda y, dy: (dy * (1 - jnp.square(y)),))


def my_loss(model, batch):
    return (model(my_tanh(batch["x"])) ** 2).mean()


def test_an_operator_with_its_own_backward():
    """D6: `no_sync` and a manual reduction are automatic synchronisation."""
    models = [gshard.paddle.DataParallel(Net()) for _ in range(2)]
    optimizers = [nnx.Optimizer(m, optax.sgd(0.01), wrt=nnx.Param) for m in models]
    for i in range(10):
        batch = rows(16, i)
        with models[0].no_sync():
            models[0].backward(my_loss, batch)
        with pytest.raises(gshard.GShardError, match="not been reduced"):
            assert models[0].grads
        gshard.paddle.fused_allreduce_gradients(list(models[0].parameters()), None)
        models[1].backward(my_loss, batch)
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
    assert_same(models[0].state_dict(), models[1].state_dict(), rtol=1e-6, atol=1e-6)
    _, wanted = on_one_device([rows(16, i) for i in range(10)], tx=optax.sgd(0.01), loss=my_loss)
    assert_same(models[0].state_dict(), wanted)


class Deep(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(9)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def deep_loss(model, batch):
    return (model(batch) ** 2).mean()


def reduced(model):
    """MB of each all-reduce, in the order of the program; scalars left out."""
    batch = np.ones((8, 256), np.float32)
    found = read_program(model.backward.lower(deep_loss, batch).compile().as_text()).collectives
    assert {c.kind for c in found} == {"all-reduce"}
    sizes = [sum(a.bytes for a in c.operands if a.elements > 1) / 2**20 for c in found]
    return [size for size in sizes if size]


def test_buckets_stay_apart_and_the_last_is_small():
    """Nine layers of 0.25 MB."""
    sizes = reduced(
        gshard.paddle.DataParallel(Deep(), comm_buffer_size=1, last_comm_buffer_size=0.26)
    )
    assert sum(sizes) == pytest.approx(9 * 0.251, rel=1e-2)
    assert max(sizes) <= 1 and sizes[-1] <= 0.26 and len(sizes) == 5
    assert len(reduced(gshard.paddle.DataParallel(Deep(), comm_buffer_size=0))) == 1  # XLA's choice


def test_it_is_the_model_and_a_data_parallel():
    net = Net()
    model = gshard.paddle.DataParallel(net, last_comm_buffer_size=1.5)
    assert isinstance(model, Net) and isinstance(model, gshard.paddle.DataParallel)
    assert model.middle.out_features == WIDTH and len(model.parameters()) == 8
    assert model.scale_loss(3.0) == 3.0 and model.apply_collective_grads() is None
    assert_same(model.state_dict(), whole(net), rtol=0, atol=0)
    other = gshard.paddle.DataParallel(Net(4))
    other.set_dict(model.state_dict())
    other.load_dict(model.state_dict())
    assert_same(other.state_dict(), whole(net), rtol=0, atol=0)
    np.testing.assert_allclose(other(rows(5, 0)["x"]), net(rows(5, 0)["x"]), rtol=1e-5, atol=1e-6)


def weighted(model, batch):
    return gshard.Weighted(loss_fn(model, batch) * 8.0, 8.0)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda: gshard.paddle.DataParallel(3), "is not a model"),
        (lambda: gshard.paddle.DataParallel(nnx.Dropout(0.1)), "no nnx.Param"),
        (lambda: gshard.paddle.DataParallel(Net(), comm_buffer_size=2.5), "comm_buffer_size"),
        (
            lambda: gshard.paddle.DataParallel(Net(), last_comm_buffer_size=0),
            "last_comm_buffer_size",
        ),
        (lambda: gshard.paddle.DataParallel(Net(), find_unused_parameters=1), "True or False"),
        (lambda: gshard.paddle.DataParallel(gshard.paddle.DataParallel(Net())), "wrapped already"),
        (lambda: gshard.paddle.fused_allreduce_gradients([], hcg=3), "pass None"),
    ],
)
def test_bad_input(act, says):
    with pytest.raises(gshard.GShardError, match=says):
        act()


def test_a_weighted_loss_cannot_stay_local():
    model = gshard.paddle.DataParallel(Net())
    model.backward(weighted, rows(16, 0))
    with model.no_sync(), pytest.raises(gshard.GShardError, match="Weighted"):
        model.backward(weighted, rows(16, 0))
