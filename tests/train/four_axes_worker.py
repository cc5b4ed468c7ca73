"""A mesh of sequence, expert, shard and replica axes, two devices each (`test_experts_compose.py`).

python -m tests.train.four_axes_worker COORDINATOR PROCESSES RANK FILE LEVEL ORDER
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gshard
from tests.experts import D, batch, dispatched, params, sharded, worst

HEADS = 2


def loss_of(p: Any, given: Any) -> jax.Array:
    """Attention over the sequence, then experts."""
    h = jnp.tanh(p["embed"][given["x"]])
    q, k, v = jnp.einsum("btd,nde->nbte", h, p["qkv"]).reshape(3, *h.shape[:2], HEADS, D // HEADS)
    h = h + gshard.sequence.attention(q, k, v, causal=True).reshape(h.shape)
    out = (h + dispatched(p, h)) @ p["head"]
    return optax.softmax_cross_entropy_with_integer_labels(out, given["y"]).mean()


def main(level: str, order: str, file: str) -> None:
    rng = np.random.default_rng(2)
    qkv = (rng.normal(size=(3, D, D)) / D**0.5).astype(np.float32)
    p, given, tx = (
        {**params(), "qkv": qkv},
        batch(examples=16, tokens=8),
        optax.adam(1e-2, eps=1e-3),
    )
    value, reference = jax.jit(jax.value_and_grad(loss_of))(p, given)
    updates, _ = tx.update(reference, tx.init(p), p)
    stepped = optax.apply_updates(p, updates)
    mesh = {"sequence": 2, "expert": 2, "replica": 2}
    state, plan = sharded(mesh, level, p, tx, sequence_order=order)
    loss, grads = jax.jit(gshard.value_and_grad(loss_of, plan))(state.params, given)
    step = gshard.make_train_step(loss_of, plan)
    audit = gshard.audit(step, state, given)
    state, metrics = step(state, given)
    full = gshard.full_params(state)
    with tempfile.TemporaryDirectory() as folder:
        half = {"shape": {"data": 2, "expert": 4}, "devices": jax.devices()[:8]}
        other, _ = sharded(half, "os_g", p, tx)
        with gshard.Checkpointer(folder) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait()
            other = checkpointer.restore(like=other).state
    np.savez(
        file,
        sizes=list(plan.mesh.shape.values()),
        losses=[loss - value, metrics["loss"] - value],
        gradients=worst(grads, reference),
        parameters=worst(full, stepped),
        exceeded=list(audit.exceeded),
        sent_for=[x.purpose for x in audit.collectives],
        restored=worst(gshard.full_params(other), full),
        moments=worst(*(optax.tree.get(x.opt_state, "mu")["head"] for x in (other, state))),
    )


if __name__ == "__main__":
    main(*sys.argv[5:], sys.argv[4])
