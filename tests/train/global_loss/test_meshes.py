"""How losses reduce entries and examples, on meshes of every kind, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from tests.experts import KEEP, batch, every_token, params, worst

EXAMPLES, TOKENS, CLASSES = 24, 12, 40
MESHES = {
    "3 devices": {"devices": jax.devices()[:3]},
    "replica 2": {"devices": jax.devices()[:4], "replica": 2},
    "sequence 3": {"devices": jax.devices()[:6], "sequence": 3},
    "expert 4": {"expert": 4},
    "sequence 2, expert 2": {"sequence": 2, "expert": 2},
    "replica 2, sequence 2, expert 2": {"replica": 2, "sequence": 2, "expert": 2},
}
REDUCED: dict[str, Callable[[jax.Array, jax.Array, Any], jax.Array]] = {
    "mean": lambda ce, z, b: ce.mean(),
    "sum": lambda ce, z, b: ce.sum() / 100,
    "mean of sums": lambda ce, z, b: ce.sum(1).mean(),
    "size": lambda ce, z, b: ce.sum() / b["y"].size,
    "masked entries": lambda ce, z, b: over(ce, b["mask"]),
    "where=": lambda ce, z, b: jnp.mean(ce, where=b["mask"] > 0),
    "masked in each example": lambda ce, z, b: (
        (ce * b["mask"]).sum(1) / (b["mask"].sum(1) + 1e-6)
    ).mean(),
    "masked examples": lambda ce, z, b: over(ce.mean(1), b["keep"]),
    "counted examples": lambda ce, z, b: (
        (ce.mean(1) * b["keep"]).sum() / jnp.maximum((b["keep"] > 0).sum(), 1)
    ),
    "mask of examples for entries": lambda ce, z, b: over(
        ce, jnp.broadcast_to(b["keep"][:, None], ce.shape)
    ),
    "average": lambda ce, z, b: jnp.average(ce.mean(1), weights=b["keep"] + 0.3),
    "two quotients": lambda ce, z, b: over(ce, b["mask"]) + over((z**2).mean((1, 2)), b["keep"]),
    "classes weighted by their number": lambda ce, z, b: over(
        ce, (1 / (1 + jax.nn.one_hot(b["y"], CLASSES).sum((0, 1))))[b["y"]]
    ),
    "confident entries": lambda ce, z, b: over(ce, (z.max(-1) > 0.5).astype(z.dtype)),
    "jit": lambda ce, z, b: jax.jit(over)(ce, b["mask"]),
    "root": lambda ce, z, b: jnp.sqrt((z**2).mean()),
    "standard deviation": lambda ce, z, b: z.std(),
    "variance over examples": lambda ce, z, b: ce.mean(1).var(),
    "maximum": lambda ce, z, b: ce.mean() + z.max(),
    "quotient of losses": lambda ce, z, b: ce.sum() / (z**2).sum(),
    "balance": lambda ce, z, b: (jax.nn.softmax(z).mean((0, 1)) ** 2).sum(),
    "checkpoint": lambda ce, z, b: jax.checkpoint(over)(ce, b["mask"]),
}
ONE_BATCH = [*REDUCED][-7:]  # micro-batches are refused


def over(x: jax.Array, weights: jax.Array) -> jax.Array:
    return (x * weights).sum() / weights.sum()


def loss_of(name: str) -> Callable[[Any, Any], jax.Array]:
    def loss(p: Any, b: Any) -> jax.Array:
        h = p["embed"][b["x"]]
        z = (h + every_token(p, h)) @ p["head"]
        ce = optax.softmax_cross_entropy_with_integer_labels(z, b["y"])
        return REDUCED[name](ce, z, b)

    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("micro_batches", "mesh"),
    [*((1, mesh) for mesh in MESHES), (2, "3 devices"), (2, "sequence 2, expert 2")],
)
def test_every_reduction_has_the_loss_and_gradient_of_one_device(micro_batches, mesh):
    given: Any = batch(examples=EXAMPLES, tokens=TOKENS)
    given["keep"] = (np.arange(EXAMPLES) % 3 > 0).astype(np.float32)
    p, keep = params(), KEEP if "expert" in mesh else None
    state, plan = gshard.shard_train_state(
        (p, optax.sgd(0.1)), gshard.make_mesh(**MESHES[mesh]), "p_g_os", min_shard_size=0, keep=keep
    )
    wrong, refused = {}, []
    for name in REDUCED:
        loss = loss_of(name)
        grad = gshard.value_and_grad(loss, plan, micro_batches=micro_batches)
        try:
            found, grads = jax.jit(grad)(state.params, given)
        except gshard.GShardError as error:
            assert "micro-batches" in str(error), name
            refused.append(name)
            continue
        value, wanted = jax.value_and_grad(loss)(p, given)
        off = max(abs(float(found - value)) / float(value), worst(grads, wanted))
        if off > 2e-5:  # rounding; a wrong weight is above 1e-3
            wrong[name] = off
    assert not wrong
    assert refused == (ONE_BATCH if micro_batches > 1 else [])
