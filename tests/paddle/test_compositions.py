"""`group_sharded_parallel` with optimizers that multiply matrices, and in fewer bits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from tests.tiers import quick
from tests.train import compositions
from tests.train.compositions import batch_of, loss_of, nnx_loss, params_of, relative

WIDTH = 130  # WIDTH^2 is above the threshold that this call has at "os" and "os_g"


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("level", quick(["os", "os_g", "p_g_os"], ["os_g"]))
def test_every_matrix_is_computed_once(level, own_loop):
    start = params_of(stacked=False, width=WIDTH)
    small = {"segment_size": 0} if level == "p_g_os" else {}
    model, optimizer, _ = gshard.paddle.group_sharded_parallel(
        compositions.Net(start), compositions.muon(), level, **small
    )
    products: Any = model.plan.update_products
    assert products.unshared == ()  # "out" has the shape of the others
    assert products.one_device == 4 * products.flops

    grad = gshard.value_and_grad(nnx_loss, model.plan)

    @nnx.jit
    def own(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.update(model, grad(model, batch)[1])

    params, leaves = start, None
    for i in range(2):
        batch = batch_of(i, WIDTH)
        if own_loop:
            own(model, optimizer, gshard.shard_batch(batch, model.plan))
        else:
            model.backward(nnx_loss, batch)
            optimizer.step()
            optimizer.clear_grad()
        leaves = leaves or compositions.first_leaves("muon", params)
        _, params, leaves = compositions.one_device("muon", False)(params, leaves, batch)
    found = model.state_dict()
    for name, x in params.items():
        assert relative(np.asarray(found[name]) - x, x - start[name]) <= 3e-5, name


@pytest.mark.parametrize("several", quick([False, True], [True]))
@pytest.mark.parametrize("level", quick(["os", "os_g", "p_g_os"], ["p_g_os"]))
def test_gradients_and_parameters_are_sent_in_8_bits(level, several):
    start = params_of(stacked=False, width=WIDTH)
    small = {"segment_size": 0} if level == "p_g_os" else {}
    model, optimizer, _ = gshard.paddle.group_sharded_parallel(
        compositions.Net(start), optax.sgd(0.1), level, wire="int8", **small
    )
    large = [x for x in jax.tree.leaves(model.plan.grads) if x.path != "bias"]
    assert large and all(x.scattered_as.dtype == "int8" for x in large)
    batch = batch_of(0, WIDTH)
    grads = jax.grad(loss_of)(start, batch)
    if several:  # two calls before the step
        with model.no_sync():
            model.backward(nnx_loss, batch)
    model.backward(nnx_loss, batch)
    optimizer.step()
    found = model.state_dict()
    for name, x in grads.items():
        change = (start[name] - np.asarray(found[name])) / (0.2 if several else 0.1)
        error = relative(change - x, x)
        assert error <= 0.03, (name, error)
        assert error > 1e-4 or name == "bias"


def test_what_cannot_be_sent_is_refused():
    net = compositions.Net(params_of(stacked=False, width=WIDTH))
    call = gshard.paddle.group_sharded_parallel
    with pytest.raises(gshard.GShardError, match=r"wire='int4' rounds.*Use wire='int8'"):
        call(net, optax.sgd(0.1), "os_g", wire="int4")
    with pytest.raises(gshard.GShardError, match="wire='fp8' may be one of two"):
        call(net, optax.sgd(0.1), "os_g", wire="fp8")
    with pytest.warns(gshard.GShardWarning, match="wire='int8' changes nothing.*'dp'"):
        call(net, optax.sgd(0.1), "dp", wire="int8")
