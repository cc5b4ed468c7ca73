"""Which experts a token goes to, and the arrays of tokens that each expert gets.

Letters: G groups of T tokens of width D; E experts, of which a token goes to K; C tokens that an
expert takes of one group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gshard._util.errors import GShardError, warn
from gshard._util.validation import check_choice, check_integer, shown

Score = Literal["softmax", "sigmoid"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Where the tokens of each group go, as `route` decides it.

    Attributes:
      indices: int32 (G, T, K), the experts of each token, the best first, each at most once.
      weights: float32 (G, T, K), by which the outputs of these experts are added up.
      places: int32 (G, T, K), how many earlier tokens of the group go to the same expert.
      experts: E.
      capacity: C; an assignment whose place is C or above is dropped.

    Example:
      >>> routing = gshard.expert.route(jnp.zeros((2, 8, 4)), 2)
      >>> routing.capacity, routing.indices.shape
      (5, (2, 8, 2))
    """

    indices: jax.Array
    weights: jax.Array
    places: jax.Array
    experts: int = field(metadata={"static": True})
    capacity: int = field(metadata={"static": True})

    @property
    def taken(self) -> jax.Array:
        """Booleans (G, T, K): which assignments are not dropped."""
        return self.places < self.capacity


def route(
    logits: Any,
    k: int,
    *,
    capacity_factor: float | None = 1.25,
    score: Score = "softmax",
    bias: Any = None,
    normalize: bool | None = None,
) -> Routing:
    """Chooses the `k` best experts of each token, and the token's position among those of each.

    An expert takes at most `C = ceil(T * k / E * capacity_factor)` tokens of each group: its fair
    share times a factor (GShard, Lepikhin et al., 2020, section 2.2; Switch Transformers, Fedus et
    al., 2021, section 2.2). Earlier tokens come first, so that none depends on a later one. A group
    is one entry of dimension 0, usually a sequence, so which tokens are dropped does not depend on
    the number of devices.

    Args:
      logits: (G, T, E), what the router computes for each token; used in float32.
      k: experts of a token, 1 to E.
      capacity_factor: as above; None for experts that take every token of a group. A factor with
        which more than half of the assignments are always dropped gives a warning.
      score: `"softmax"` over the experts, or `"sigmoid"` of each (DeepSeek-V3, arXiv 2412.19437,
        section 2.1.2).
      bias: (E,), added to the scores for the choice alone, and not to the weights (`update_bias`).
      normalize: divide the weights of a token by their sum. By default with `k` above 1: a single
        weight would become 1, whose gradient is 0, so that the router would not train.

    Returns:
      A `Routing`, with gradients to the logits through its weights.

    Raises:
      GShardError: an array has another shape, or a number is out of range.

    Example:
      >>> routing = gshard.expert.route(jnp.array([[[0.0, 2.0, 1.0]]]), 2)
      >>> routing.indices
      Array([[[1, 2]]], dtype=int32)
    """
    logits = jnp.asarray(logits)
    if logits.ndim != 3:
        raise GShardError(
            f"logits has shape {logits.shape}: pass (groups, tokens, experts), such as (batch, "
            "length, experts). Of one group, logits[None]."
        )
    check_choice("score", score, get_args(Score))
    _, tokens, experts = logits.shape
    k = check_integer("k", k, 1)
    if k > experts:
        raise GShardError(f"k={k} is more than the {experts} experts of the logits.")
    logits = logits.astype(jnp.float32)
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    chosen_by = jax.lax.stop_gradient(scores)
    if bias is not None:
        if jnp.shape(bias) != (experts,):
            raise GShardError(
                f"bias has shape {jnp.shape(bias)}, not ({experts},), one entry per expert."
            )
        chosen_by = chosen_by + jax.lax.stop_gradient(jnp.asarray(bias, jnp.float32))
    _, indices = jax.lax.top_k(chosen_by, k)
    # Saved with the rows that are sent by it: computed again, a near tie might go another way.
    indices = checkpoint_name(indices, "expert_exchange")
    chosen = jax.nn.one_hot(indices, experts, dtype=jnp.float32)  # (G, T, K, E)
    weights = jnp.sum(chosen * scores[..., None, :], -1)
    divides = k > 1 if normalize is None else normalize
    if divides:
        weights = weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-20)
    goes = jnp.sum(chosen, 2).astype(jnp.int32)  # (G, T, E), 0 or 1
    before = jnp.cumsum(goes, 1) - goes
    places = jnp.sum(chosen.astype(jnp.int32) * before[..., None, :], -1)
    capacity = _capacity(tokens, k, experts, capacity_factor)
    return Routing(indices, weights, places, experts, capacity)


def places_of(tokens: int, k: int, experts: int, factor: Any) -> int:
    """`ceil(tokens * k / experts * factor)` as on paper, where floats give 111 for 110."""
    return min(tokens, math.ceil(Fraction(tokens * k, experts) * Fraction(str(factor))))


def _capacity(tokens: int, k: int, experts: int, factor: Any) -> int:
    if factor is None:
        return tokens
    number = isinstance(factor, (int, float, np.integer, np.floating))
    if not number or isinstance(factor, bool) or not 0 < factor < math.inf:
        raise GShardError(
            f"capacity_factor={shown(factor)} must be a number above 0, such as 1.25, or None for "
            "experts that take every token."
        )
    capacity = places_of(tokens, k, experts, factor)
    if 2 * capacity * experts < tokens * k:
        lost = 1 - capacity * experts / (tokens * k)
        warn(
            f"capacity_factor={factor} drops at least {lost:.0%} of the assignments of tokens to "
            f"experts, even if all experts get equally many: each takes {capacity} of the {tokens} "
            "tokens of a group. Choose 1.0 or more, or None."
        )
    return capacity


def dispatch(x: Any, routing: Routing) -> jax.Array:
    """Returns the tokens that each expert takes of each group.

    Args:
      x: (G, T, D), the tokens.
      routing: of these tokens.

    Returns:
      (E, G, C, D) in the dtype of `x`; slots that no token has are zero. Multiply it with the
      parameters of the experts by a product in which E is a dimension of both
      (`jnp.einsum("egcd,edf->egcf", ...)`, `jax.vmap`, `nn.vmap`).

    Raises:
      GShardError: `x` does not have the groups and tokens of the routing, or `routing` is not one.

    Example:
      >>> routing = gshard.expert.route(jnp.zeros((2, 8, 4)), 2)
      >>> gshard.expert.dispatch(jnp.ones((2, 8, 16)), routing).shape
      (4, 2, 5, 16)
    """
    x = check_tokens(x, routing)
    groups, tokens, _ = x.shape
    slots = routing.experts * routing.capacity

    def one(x: jax.Array, at: jax.Array) -> jax.Array:
        # The token of each slot; the row of zeros after the last token for one that has none.
        source = jnp.broadcast_to(jnp.arange(tokens)[:, None], at.shape)
        token = jnp.full(slots, tokens).at[at.reshape(-1)].set(source.reshape(-1), mode="drop")
        return jnp.concatenate([x, jnp.zeros_like(x[:1])])[token]

    found = jax.vmap(one)(x, _slot(routing, slots))
    found = found.reshape(groups, routing.experts, routing.capacity, x.shape[-1])
    return found.transpose(1, 0, 2, 3)


def combine(y: Any, routing: Routing) -> jax.Array:
    """Adds up the experts' outputs for each token, by the weights of the routing.

    Args:
      y: (E, G, C, D), the outputs of the experts, at the slots of `dispatch`.
      routing: the same as for `dispatch`.

    Returns:
      (G, T, D) in the dtype of `y`. A dropped assignment adds nothing.

    Raises:
      GShardError: `y` has other experts, groups or slots, or `routing` is not one.

    Example:
      >>> routing = gshard.expert.route(jnp.zeros((2, 8, 4)), 2, capacity_factor=None)
      >>> x = gshard.expert.dispatch(jnp.ones((2, 8, 16)), routing)
      >>> float(gshard.expert.combine(x, routing).mean())
      1.0
    """
    check_routing(routing)
    y = jnp.asarray(y)
    wanted = (routing.experts, routing.indices.shape[0], routing.capacity)
    if y.ndim != 4 or y.shape[:3] != wanted:
        raise GShardError(
            f"y has shape {y.shape}, and dispatch gave {(*wanted, 'width')}: pass the outputs of "
            "the experts in the order of dispatch."
        )
    slots = routing.experts * routing.capacity
    rows = y.transpose(1, 0, 2, 3).reshape(wanted[1], slots, y.shape[-1])
    at = jnp.minimum(_slot(routing, slots), slots - 1)
    weights = jnp.where(routing.taken, routing.weights, 0).astype(y.dtype)
    found = jax.vmap(lambda rows, at: rows[at])(rows, at)  # (G, T, K, D)
    found = jnp.where(routing.taken[..., None], found, 0)  # another token's may be infinite
    return jnp.sum(weights[..., None] * found, 2)


def check_routing(routing: Any) -> None:
    """Refuses what `route` did not return."""
    if not isinstance(routing, Routing):
        raise GShardError(
            f"routing={shown(routing)} is not a Routing: pass what gshard.expert.route(logits, k) "
            "returned."
        )


def check_tokens(x: Any, routing: Routing) -> jax.Array:
    """Returns tokens as an array, which must be those of the routing."""
    check_routing(routing)
    x, (groups, tokens, _) = jnp.asarray(x), routing.indices.shape
    if x.ndim != 3 or x.shape[:2] != (groups, tokens):
        raise GShardError(
            f"x has shape {x.shape}, and the routing is of {groups} groups of {tokens} tokens: "
            f"pass ({groups}, {tokens}, width)."
        )
    return x


def _slot(routing: Routing, slots: int) -> jax.Array:
    """(G, T, K): the place of each assignment among those of all experts; `slots` if dropped."""
    at = routing.indices * routing.capacity + routing.places
    return jnp.where(routing.taken, at, slots)
