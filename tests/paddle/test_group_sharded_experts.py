"""Mixtures of experts whose expert groups are part of the shard group, as Paddle trains them.

The model and the numbers are those of Paddle's test/collective/fleet/dygraph_group_fsdp_moe.py:
two layers of 4 experts, 8 tokens for each device, and each token goes to the expert that its router
weighs most. Paddle compares the losses of its stages over 10 steps bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from tests.tiers import quick

LAYERS, WIDTH, INNER, EXPERTS, TOKENS, STEPS = 2, 16, 32, 4, 8, 10
LEVELS = ("os", "os_g", "p_g_os")


def start() -> Any:
    rng = np.random.default_rng(2026)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32)

    def layer() -> Any:
        experts = {"up": normal(EXPERTS, WIDTH, INNER), "down": normal(EXPERTS, INNER, WIDTH)}
        return {"router": normal(WIDTH, EXPERTS), "experts": experts}

    return {f"layer {i}": layer() for i in range(LAYERS)}


def batch(step: int, devices: int) -> Any:
    """Other tokens on each device."""
    rng = np.random.default_rng(step)
    shape = devices * TOKENS, WIDTH
    return {name: rng.normal(size=shape).astype(np.float32) for name in ("x", "y")}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Every expert computes every token, and those that did not choose it are masked."""
    x = batch["x"]
    for layer in params.values():
        weights = jax.nn.softmax(x.astype(jnp.float32) @ layer["router"].astype(jnp.float32))
        best, dtype = weights.argmax(-1), layer["experts"]["up"].dtype
        mask = jnp.where(best[:, None] == jnp.arange(EXPERTS), weights, 0).astype(dtype)
        inner = jax.nn.relu(jnp.einsum("td,edf->etf", x.astype(dtype), layer["experts"]["up"]))
        outputs = jnp.einsum("etf,efd->etd", inner, layer["experts"]["down"])
        x = x + jnp.einsum("te,etd->td", mask, outputs)
    return jnp.square(x.astype(jnp.float32) - batch["y"]).mean()


@functools.cache
def losses(devices: int, experts: int, level: str, precision: str | None) -> tuple[float, ...]:
    """Of each step; on one device without experts to keep."""
    on = jax.devices()[: devices if experts > 1 else 1]
    mesh = gshard.make_mesh(**({"expert": experts} if experts > 1 else {}), devices=on)
    keep = {"experts/": ("expert", 0)} if experts > 1 else None
    tx = optax.adamw(1e-3, weight_decay=0.0)
    options: dict[str, Any] = {"keep": keep, "precision": precision, "min_shard_size": 0}
    state, plan = gshard.shard_train_state((start(), tx), mesh, level, **options)
    step, found = gshard.make_train_step(loss_fn, plan), list[float]()
    for i in range(STEPS):
        state, metrics = step(state, batch(i, devices))
        found.append(float(metrics["loss"]))
    if experts > 1:
        up = plan.params["layer 1"]["experts"]["up"]
        others = devices // experts if level == "p_g_os" else 1
        assert up.shard_shape[0] == EXPERTS // experts
        assert int(np.prod(up.shard_shape)) == EXPERTS * WIDTH * INNER // experts // others
    return tuple(found)


GROUPS = {"2 devices": (2, 2), "2 groups of 2": (4, 2), "1 group of 4": (4, 4)}


@pytest.mark.parametrize("precision", quick([None, "bfloat16"], [None]))
@pytest.mark.parametrize("groups", quick(GROUPS, ["2 groups of 2"]))
def test_losses_of_all_levels_are_equal_bit_for_bit(groups, precision):
    of_level = {level: losses(*GROUPS[groups], level, precision) for level in LEVELS}
    assert of_level["os"] == of_level["os_g"] == of_level["p_g_os"]
    assert len(set(of_level["os"])) == STEPS


@pytest.mark.parametrize("precision", quick([None, "bfloat16"], [None]))
@pytest.mark.parametrize("groups", quick(GROUPS, ["2 groups of 2"]))
def test_losses_are_those_of_one_device(groups, precision):
    """In bfloat16 gradients are rounded before they are summed over the groups, to 8 bits.

    The loss is then far nearer than its own rounding would be, 2^-9 of it.
    """
    devices, experts = GROUPS[groups]
    found = np.array(losses(devices, experts, "p_g_os", precision))
    wanted = np.array(losses(devices, 1, "os", precision))
    assert np.abs(found - wanted).max() < (2e-6 if precision is None else 2**-12 * wanted.max())
