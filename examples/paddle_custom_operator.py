"""Paddle's recipe for an operator with its own backward pass, on JAX.

    python -m examples.paddle_custom_operator

JAX needs no recipe: `dp.backward` alone gives the same. The two ways are compared at every step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gshard


@jax.custom_vjp
def my_tanh(x: jax.Array) -> jax.Array:
    """tanh, whose backward pass is written by hand."""
    return jnp.tanh(x)


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jnp.tanh(x)
    return y, y


def _backward(y: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    return (dy * (1 - jnp.square(y)),)


my_tanh.defvjp(_forward, _backward)


class SimpleNet(nnx.Module):
    """The operator, then a layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(examples, 2) to (examples, 2)."""
        return self.linear(my_tanh(x))


def loss_fn(model: SimpleNet, x: jax.Array) -> jax.Array:
    """The mean output."""
    return model(x).mean()


def main(steps: int = 10) -> float:
    """The largest difference of a parameter between the two ways."""
    by_hand, automatic = (gshard.paddle.DataParallel(SimpleNet(nnx.Rngs(0))) for _ in range(2))
    steppers = [nnx.Optimizer(m, optax.sgd(0.01), wrt=nnx.Param) for m in (by_hand, automatic)]
    for step in range(steps):
        x = np.random.default_rng(step).normal(size=(16, 2)).astype(np.float32)
        with by_hand.no_sync():
            by_hand.backward(loss_fn, x)
        gshard.paddle.fused_allreduce_gradients(by_hand.parameters(), None)
        automatic.backward(loss_fn, x)
        for model, optimizer in zip((by_hand, automatic), steppers, strict=True):
            optimizer.update(model, model.grads)
            model.clear_gradients()
    ours, theirs = by_hand.state_dict(), automatic.state_dict()
    apart = max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
    print(f"{steps} steps; largest difference of a parameter: {apart:.1e}")
    return apart


if __name__ == "__main__":
    gshard.virtual_devices(8)
    main()
