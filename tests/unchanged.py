"""Train a few steps by gshard and on one device, and compare: for models and losses of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import gshard

DEVICES, EXAMPLES, STEPS = 3, 12, 2


@dataclass(frozen=True)
class Functional:
    """A model as a pytree of parameters.

    Attributes:
        params: the parameters.
        loss: (params, batch, rng=) -> the loss, or (loss, aux).
        batch: step -> a batch of `EXAMPLES`.
        rate: the learning rate.
        gathers: names of the operations for which the loss all-gathers.
        axis: the name of the shard axis, where annotations of the model name one.
        warns: a pattern of the warning to expect.
    """

    params: Any
    loss: Callable[..., Any]
    batch: Callable[[int], Any]
    rate: float = 0.1
    gathers: tuple[str, ...] = ()
    axis: str = "shard"
    warns: str = ""


def close(found: Any, wanted: Any, rtol: float = 2e-6) -> None:
    """Every leaf within `rtol` of its largest entry."""
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        name, y = jax.tree_util.keystr(path), np.asarray(y)
        exact = not np.issubdtype(y.dtype, np.floating)
        tolerance = 0 if exact or not y.size else rtol * np.abs(y).max() + 1e-6
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance, err_msg=name)


def assert_gathers(step: Any, wanted: tuple[str, ...], has_aux: bool) -> None:
    """The loss all-gathers for these operations only, and auxiliary outputs per example."""
    found = {x.operation for x in step.loss_transfers if x.kind == "gather"}
    assert found - ({"result"} if has_aux else set()) == set(wanted), step


def check_functional(
    case: Functional,
    level: str,
    micro_batches: int = 1,
    tx: optax.GradientTransformation | None = None,
    rtol: float = 2e-6,
) -> None:
    """`(params, tx)` at this level; auxiliary outputs too where there is one micro-batch."""
    with pytest.warns(gshard.GShardWarning, match=case.warns) if case.warns else nullcontext():
        _check_functional(case, level, micro_batches, tx, rtol)


def _check_functional(
    case: Functional,
    level: str,
    micro_batches: int,
    tx: optax.GradientTransformation | None,
    rtol: float,
) -> None:
    tx = tx or optax.sgd(case.rate, momentum=0.9)
    params, key = nn.unbox(case.params), jax.random.key(7)
    aux = isinstance(jax.eval_shape(case.loss, params, case.batch(0), rng=key), tuple)
    loss, has_aux = case.loss, aux
    if aux and micro_batches > 1:  # with one entry for each example
        loss, has_aux = lambda *args, **keys: case.loss(*args, **keys)[0], False
    mesh = gshard.make_mesh({case.axis: DEVICES}, devices=jax.devices()[:DEVICES])
    state, plan = gshard.shard_train_state((case.params, tx), mesh, level, min_shard_size=16)
    step = gshard.make_train_step(loss, plan, has_aux=has_aux, rng=key, micro_batches=micro_batches)

    @jax.jit
    def plain(params, opt_state, batch, rng):
        out, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, batch, rng=rng)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, out

    opt_state = tx.init(params)
    for i in range(STEPS):
        state, metrics = step(state, case.batch(i))
        params, opt_state, out = plain(params, opt_state, case.batch(i), jax.random.fold_in(key, i))
        value, outputs = out if has_aux else (out, None)
        np.testing.assert_allclose(metrics["loss"], value, rtol=rtol)
        if has_aux:
            close(metrics["aux"], outputs, 10 * rtol)
    assert_gathers(step, case.gathers, has_aux)
    close(nn.unbox(gshard.full_params(state)), params, rtol)


def three_devices() -> jax.sharding.Mesh:
    return gshard.make_mesh(devices=jax.devices()[:DEVICES])


@dataclass(frozen=True)
class Module:
    """An NNX model.

    Attributes:
        make: () -> a fresh model.
        loss: (model, batch) -> the loss, or (loss, aux).
        batch: step -> a batch of `EXAMPLES`.
        rate: the learning rate.
        micro_batches: how many the loss allows.
        wrt: the Variables that are trained.
        mesh: () -> the mesh.
        scan_axes: the dimensions of stacked layers, as in `gshard.shard_train_state`.
    """

    make: Callable[[], nnx.Module]
    loss: Callable[..., Any]
    batch: Callable[[int], Any]
    rate: float = 0.05
    micro_batches: int = 2
    wrt: Any = nnx.Param
    mesh: Callable[[], jax.sharding.Mesh] = three_devices
    scan_axes: Mapping[str, int] | None = None


def check_module(case: Module, level: str, micro_batches: int = 1, rtol: float = 2e-6) -> None:
    """An NNX pair at this level: the loss, and every Variable of the model."""

    def made():
        model = case.make()
        return model, nnx.Optimizer(model, optax.sgd(case.rate, momentum=0.9), wrt=case.wrt)

    plain, plain_optimizer = made()
    aux = isinstance(nnx.eval_shape(case.loss, plain, case.batch(0)), tuple)
    loss, has_aux = case.loss, aux
    if aux and micro_batches > 1:  # with one entry for each example
        loss, has_aux = lambda *args: case.loss(*args)[0], False
    (model, optimizer), plan = gshard.shard_train_state(
        made(), case.mesh(), level, min_shard_size=16, scan_axes=case.scan_axes
    )
    step = gshard.make_train_step(loss, plan, has_aux=has_aux, micro_batches=micro_batches)

    @nnx.jit
    def plain_step(model, optimizer, batch):
        grad = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, case.wrt), has_aux=has_aux)
        out, grads = grad(model, batch)
        optimizer.update(model, grads)
        return out

    for i in range(STEPS):
        metrics = step(model, optimizer, case.batch(i))
        out = plain_step(plain, plain_optimizer, case.batch(i))
        value, outputs = out if has_aux else (out, None)
        np.testing.assert_allclose(metrics["loss"], value, rtol=2 * rtol)
        if has_aux:
            close(metrics["aux"], outputs, 10 * rtol)
    assert_gathers(step, (), has_aux)
    close(nnx.state(plan.unwrap((model, optimizer))[0]), nnx.state(plain), rtol)
