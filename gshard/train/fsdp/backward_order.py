"""Makes the backward pass of a loop wait until gradients are reduce-scattered.

A full gradient takes memory until then, and nothing but the optimizer needs its shard: a compiler
may reduce-scatter it long after it is computed, such as after the backward pass of all layers.

So a scalar, the token, is passed from one all-gather to the next. The backward pass computes its
cotangent from the last all-gather to the first, each with the reduce-scatters so far, and what a
backward loop starts from is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def new_token() -> jax.Array:
    """Returns the token before the first all-gather; its cotangents are 0 too."""
    return jnp.float32(0)


def scattered(shards: Sequence[jax.Array], token: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Returns shards that one reduce-scatter made, and the token's cotangent, known after it."""
    known, token = jax.lax.optimization_barrier((list(shards), token))
    return list(known), token


def after_scatters(results: Sequence[Any], token: jax.Array) -> tuple[list[Any], jax.Array]:
    """Returns results of a loop, and the token.

    Their cotangents wait until the gradients of all parameters that are gathered later are
    reduce-scattered.
    """
    which = [i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
    results = list(results)
    found: Any = _wait([results[i] for i in which], token)
    waiting, token = found
    for i, x in zip(which, waiting, strict=True):
        results[i] = x
    return results, token


@jax.custom_vjp
def _wait(results: list[jax.Array], token: jax.Array) -> Any:
    return results, token


def _forward(results: list[jax.Array], token: jax.Array) -> tuple[Any, None]:
    return (results, token), None


def _backward(_: None, cotangents: tuple[list[jax.Array], jax.Array]) -> Any:
    results, token = cotangents
    # A difference and not a barrier, which compilers leave out if nothing else uses the token.
    # Subtracted, 0 changes no bit, also of -0.0.
    return [x - token.astype(x.dtype) for x in results], token


_wait.defvjp(_forward, _backward)
