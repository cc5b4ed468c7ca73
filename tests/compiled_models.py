"""Setups for `test_compiled`: a stack of layers, and functions that end their process."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import gshard


def stack(width: int = 256, layers: int = 4, scope: str = "") -> gshard.TrainSetup:
    def init() -> TrainState:
        params = {"w": jnp.zeros((layers, width, width))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        with jax.named_scope(scope) if scope else nullcontext():
            return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0].mean()

    print('{"stage": "what a model prints is no message"}')
    row = jax.ShapeDtypeStruct((1, width), jnp.float32)
    return gshard.TrainSetup(init, loss, row, shard={"scan_axes": {"w": 0}})


def aborts() -> None:
    print("F1123 00:49:21.2 2406 mesh.cc:12] Check failed: 2 == 3 no such torus", file=sys.stderr)
    os.abort()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves() -> None:
    os._exit(3)


def wrong_loss() -> gshard.TrainSetup:
    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        raise TypeError("a loss that was never right")

    return gshard.TrainSetup(({"w": jnp.zeros((8, 8))}, optax.sgd(1.0)), loss, jnp.zeros((1, 8)))


def sleeps(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def sleeps_in_child(path: str) -> gshard.TrainSetup:
    if os.getsid(0) == os.getpid():  # the process that compiles leads a session
        sleeps(path)
    return stack()
