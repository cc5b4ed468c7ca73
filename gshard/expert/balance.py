"""How evenly experts are used: losses, the bias of the choice, and what is dropped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError
from gshard.expert.routing import Routing, check_routing

SCOPE = "load_balancing_loss"  # by which an error about micro-batches finds it


def load(routing: Routing) -> jax.Array:
    """Counts the tokens that choose each expert, also those that are dropped.

    Args:
      routing: of all tokens of the batch.

    Returns:
      float32 (E,); counts of parts of a batch add up.

    Raises:
      GShardError: `routing` is not a `Routing`.

    Example:
      >>> gshard.expert.load(gshard.expert.route(jnp.array([[[0.0, 2.0, 1.0]]]), 2))
      Array([0., 1., 1.], dtype=float32)
    """
    check_routing(routing)
    return jnp.sum(_chosen(routing), (0, 1))


def dropped(routing: Routing) -> jax.Array:
    """Computes the fraction of assignments that found their expert full, as a metric.

    Args:
      routing: of all tokens of the batch.

    Returns:
      A float32 scalar from 0 to 1.

    Raises:
      GShardError: `routing` is not a `Routing`.

    Example:
      >>> float(gshard.expert.dropped(gshard.expert.route(jnp.zeros((1, 8, 4)), 1)))
      0.625
    """
    check_routing(routing)
    return jnp.mean(1 - routing.taken.astype(jnp.float32))


def load_balancing_loss(logits: Any, routing: Routing, *, by_group: bool = False) -> jax.Array:
    """Computes how unevenly experts are used: 1 if all alike, E / K if all tokens go to the same K.

    It is `E * sum_e f_e P_e`, where f_e is the fraction of choices that go to expert e and P_e the
    mean probability that the router gives it (Switch Transformers, Fedus et al., 2021, equation 4).
    Only the probability has a gradient.

    Args:
      logits: (G, T, E), those of the routing.
      routing: of these logits.
      by_group: the mean of the losses of single groups. Otherwise f and P are means over the whole
        batch: a step with several micro-batches runs the model forward once more for that.

    Returns:
      A float32 scalar.

    Raises:
      GShardError: the logits are not those of the routing.

    Example:
      >>> logits = jnp.zeros((2, 8, 4))
      >>> float(gshard.expert.load_balancing_loss(logits, gshard.expert.route(logits, 4)))
      1.0
    """
    check_routing(routing)
    logits = jnp.asarray(logits)
    groups, tokens, k = routing.indices.shape
    if logits.shape != (groups, tokens, routing.experts):
        raise GShardError(
            f"logits has shape {logits.shape}, and the routing is of {groups} groups of {tokens} "
            f"tokens and {routing.experts} experts: pass the logits that were routed."
        )
    over = 1 if by_group else (0, 1)
    with jax.named_scope(SCOPE):
        used = jnp.mean(_chosen(routing), over) / k
        wanted = jnp.mean(jax.nn.softmax(logits.astype(jnp.float32)), over)
        return routing.experts * jnp.mean(jnp.sum(used * wanted, -1))


def z_loss(logits: Any) -> jax.Array:
    """Computes the mean square of the logits' log-sum-exp, which keeps a router's logits small.

    Source: ST-MoE (Zoph et al., 2022), equation 5; it weighs 0.001 there.

    Args:
      logits: (..., E), what the router computes for each token.

    Returns:
      A float32 scalar.

    Example:
      >>> round(float(gshard.expert.z_loss(jnp.zeros((2, 8, 1)))), 3)
      0.0
    """
    logits = jnp.asarray(logits).astype(jnp.float32)
    return jnp.mean(jnp.square(jax.nn.logsumexp(logits, -1)))


def update_bias(bias: Any, load: Any, *, rate: float = 1e-3) -> jax.Array:
    """Raises the bias of experts that are used less than the mean, and lowers that of others.

    Source: loss-free balancing (Wang et al., 2024, arXiv 2408.15664, algorithm 1), as in
    DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). Nothing is differentiated. Give it the load of
    the whole batch: inside a loss of gshard `load` already sums over all examples; with several
    micro-batches return it as an auxiliary output, and update the bias after the step.

    Args:
      bias: float (E,), the `bias=` of `route`; zeros at first. Keep it in float32: in bfloat16 the
        default rate cannot increase an entry of 0.5, and decreases it by twice the rate.
      load: (E,), from `load`.
      rate: by how much an entry changes.

    Returns:
      The new bias, (E,).

    Raises:
      GShardError: both have different shapes, or the bias is of integers.

    Example:
      >>> gshard.expert.update_bias(jnp.zeros(3), jnp.array([4.0, 1.0, 1.0]), rate=0.1)
      Array([-0.1,  0.1,  0.1], dtype=float32)
    """
    bias, load = jnp.asarray(bias), jnp.asarray(load)
    if bias.ndim != 1 or bias.shape != load.shape:
        raise GShardError(
            f"bias has shape {bias.shape} and load {load.shape}: both have one entry per expert."
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise GShardError(f"bias has dtype {bias.dtype}: pass floating-point numbers.")
    change = rate * jnp.sign(jnp.mean(load.astype(jnp.float32)) - load)
    return jax.lax.stop_gradient(bias + change.astype(bias.dtype))


def _chosen(routing: Routing) -> jax.Array:
    """float32 (G, T, E): whether a token chooses an expert."""
    return jnp.sum(jax.nn.one_hot(routing.indices, routing.experts, dtype=jnp.float32), 2)
