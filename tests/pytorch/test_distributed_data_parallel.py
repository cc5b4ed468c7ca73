"""`gshard.pytorch.DistributedDataParallel`: PyTorch's arguments, and its `load_state_dict`."""

from __future__ import annotations

import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard.pytorch import DistributedDataParallel, ZeroRedundancyOptimizer
from gshard.wrapped import accumulation


class Net(nnx.Module):
    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def loss_fn(model, batch):
    return jnp.mean(model(batch) ** 2)


def batch(devices: int, step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(4 * devices, 8)).astype(np.float32)


@pytest.mark.parametrize("devices", [3, 8])
def test_the_numbers_are_those_of_one_device(devices):
    group = gshard.distributed.new_group(list(range(devices)))
    ddp = DistributedDataParallel(
        Net(), device_ids=[0], process_group=group, bucket_cap_mb=1, static_graph=True
    )
    assert isinstance(ddp, DistributedDataParallel) and isinstance(ddp, Net)
    assert ddp.plan.group.devices == devices
    opt = ZeroRedundancyOptimizer(ddp.parameters(), optax.adam, lr=0.01)
    alone = Net()
    optimizer = nnx.Optimizer(alone, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit
    def step_alone(alone, optimizer, batch):
        expected, grads = nnx.value_and_grad(loss_fn)(alone, batch)
        optimizer.update(alone, grads)
        return expected

    for step in range(4):
        loss = ddp.backward(loss_fn, batch(devices, step))
        opt.step()
        opt.zero_grad()
        expected = step_alone(alone, optimizer, batch(devices, step))
        np.testing.assert_allclose(loss, expected, rtol=2e-6)
    for name, x in ddp.state_dict().items():
        np.testing.assert_allclose(x, gshard.paddle.state_dict(alone)[name], atol=2e-6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"comm_buffer_size": 1}, "It is bucket_cap_mb= here"),
        ({"bucket_cap": 1}, "Did you mean 'bucket_cap_mb'?"),
        ({"process_group": "all"}, "process_group='all'"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1"),
        ({"broadcast_buffers": False}, "buffers become their mean over devices"),
        ({"dim": 0}, "along the first dimension"),
        ({"check_reduction": True}, "no effect in PyTorch either"),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(given, said):
    with pytest.raises(gshard.GShardError, match=re.escape(said)):
        DistributedDataParallel(Net(), **given)


@pytest.mark.parametrize(
    ("name", "said"),
    [("device_ids", "group= names the devices"), ("bucket_cap_mb", "It is comm_buffer_size= here")],
)
def test_arguments_of_pytorch_are_named_by_the_class_of_paddle(name, said):
    with pytest.raises(gshard.ArgumentTypeError, match=name) as error:
        gshard.paddle.DataParallel(Net(), **{name: 1})
    assert said in str(error.value)


def test_options_are_passed_on():
    counts = {}
    for size in (0, 25):
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=size)
        lowered = ddp.backward.lower(loss_fn, batch(8, 0)).as_text()
        counts[size] = len(re.findall(r"all_reduce|psum", lowered))
    assert counts[0] > counts[25]
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
    with pytest.warns(gshard.GShardWarning, match=r"does not use last"):
        ddp.backward(lambda m, b: jnp.mean(m.first(b)), batch(8, 0))


def test_a_subclass_is_refused():
    class Mine(DistributedDataParallel):
        pass

    with pytest.raises(gshard.GShardError, match="Subclass the model"):
        Mine(Net())


def test_load_state_dict_is_strict_as_in_pytorch():
    ddp, other = DistributedDataParallel(Net(0)), DistributedDataParallel(Net(1))
    values = ddp.state_dict()
    assert other.load_state_dict(values) == ([], [])
    assert all((x == values[name]).all() for name, x in other.state_dict().items())

    strange = {f"module.{name}": x + 1 for name, x in values.items()}
    with pytest.raises(gshard.GShardError, match=r"lacks .*does not know module\.first"):
        other.load_state_dict(strange)
    part = {"last.bias": values["last.bias"] + 1, "more": np.ones(1)}
    with pytest.raises(gshard.GShardError, match="Nothing was changed"):
        other.load_state_dict(part)
    assert (other.state_dict()["last.bias"] == values["last.bias"]).all()
    found = other.load_state_dict(part, strict=False)
    assert "first.kernel" in found.missing_keys and found.unexpected_keys == ["more"]
    assert (other.state_dict()["last.bias"] == part["last.bias"]).all()


class Loss:
    def __call__(self, model, batch):
        return loss_fn(model, batch)


@pytest.mark.parametrize(
    "makes",
    [
        lambda: [lambda m, b: jnp.mean(m(b) ** 2) for _ in range(3)],
        lambda: [partial(loss_fn) for _ in range(3)],
        lambda: [Loss() for _ in range(3)],
    ],
    ids=["lambda", "partial", "object"],
)
def test_a_loss_made_in_the_loop_is_said_to_compile_each_time(makes):
    ddp = DistributedDataParallel(Net())
    x = batch(jax.device_count(), 0)
    losses = makes()
    with warnings.catch_warnings():
        warnings.simplefilter("error", gshard.GShardWarning)
        for _ in range(3):
            ddp.backward(losses[0], x)
        ddp.backward(losses[1], x)
    with pytest.warns(gshard.GShardWarning, match=r"as a new function three times.*outside"):
        ddp.backward(losses[2], x)


def test_the_losses_that_were_used_last_are_kept_compiled(monkeypatch):
    monkeypatch.setattr(accumulation, "MANY", 2)
    ddp, x, traced = DistributedDataParallel(Net()), batch(jax.device_count(), 0), []

    def first(model, batch):
        traced.append("first")
        return loss_fn(model, batch)

    def second(model, batch):
        return 2 * loss_fn(model, batch)

    def third(model, batch):
        return 3 * loss_fn(model, batch)

    for loss in (first, second, first):
        ddp.backward(loss, x)
    count = len(traced)
    with pytest.warns(gshard.GShardWarning, match="more than 2 losses"):
        ddp.backward(third, x)
    ddp.backward(first, x)
    assert len(traced) == count
