"""Experts that drop no token: rows sorted by expert, as products over groups of rows take them.

Letters: G groups of T tokens of width D; E experts, of which a token goes to K; R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.named_calls import call_by_name
from gshard._util.pytree import flatten, subscript
from gshard._util.validation import check_choice, shown
from gshard.expert.routing import Routing, check_tokens

By = Literal["gather", "all_to_all"]


@dataclass(frozen=True)
class Call:
    """A call of `dropless` in a traced loss.

    Attributes:
      fun, by: as `dropless` takes them.
      structure: the tree of its parameters.
      exchange: sends rows to the devices of their experts, as `train.comm.ragged.RowExchange`;
        None where a device has the tokens of all its experts.
    """

    fun: Callable[..., Any]
    structure: Any
    by: By
    exchange: Any = None

    def __call__(self, arrays: Sequence[Any]) -> jax.Array:
        """Calls it for the experts and tokens that a device has; `arrays` as in `_add_up`.

        By a name that the evaluation of the loss finds.
        """

        def call(*arrays: Any) -> jax.Array:
            return _add_up(self, arrays) if self.exchange is None else _send(self, arrays)

        return call_by_name("gshard.expert.dropless", call, arrays, lambda *_: self)

    def outputs(self, leaves: Sequence[Any], rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Returns what `fun` makes of rows that are sorted by expert, of the shape that it must."""
        y = self.fun(jax.tree.unflatten(self.structure, leaves), rows, sizes)
        if not isinstance(y, (jax.Array, np.ndarray)):
            raise GShardError(
                f"dropless: fun returned {shown(y)}. Return one array ({len(rows)}, width), a row "
                "for each row."
            )
        y = jnp.asarray(y)
        if y.ndim != 2 or len(y) != len(rows):
            raise GShardError(
                f"dropless: fun returned shape {y.shape} for rows of shape {rows.shape}. Return an "
                f"array ({len(rows)}, width), a row for each row."
            )
        return y


def dropless(
    fun: Callable[[Any, jax.Array, jax.Array], Any],
    params: Any,
    x: Any,
    routing: Routing,
    *,
    by: By = "gather",
) -> jax.Array:
    """Sends every token to all of its experts, and adds up their outputs.

    Where `dispatch` gives each expert the same number of slots, here the tokens of all experts
    are rows of one array, sorted by expert, and `fun` multiplies them by `jax.lax.ragged_dot`. So
    no token is dropped, and no slot is empty.

    Where the parameters are kept on a mesh axis, `by` says how tokens reach the devices of their
    experts. It changes no number but by rounding.

    Args:
      fun: called as `fun(params, rows, sizes)` with `rows` (R, D) sorted by expert and int32
        `sizes` (E,), the rows of each expert. The rows after those of the last expert are zero,
        and what `fun` returns for them is not used. Returns (R, D'), of each row by itself. On
        several devices, E and R are those of one device, whose experts are numbered from 0: what
        differs between experts belongs in `params`.
      params: a tree of arrays with E on dimension 0.
      x: (G, T, D), the tokens.
      routing: of these tokens, by `route` with `capacity_factor=None`, or any other in which no
        token has the same expert twice (else the result may be NaN).
      by: "gather": an all-gather gives each device the tokens of all devices of the axis, and a
        reduce-scatter returns the sums. "all_to_all": each token is sent only to its own experts,
        and comes back, by `jax.lax.ragged_all_to_all`. XLA does not have that on CPU, where the
        rows are all-gathered instead.

    Returns:
      (G, T, D') in the dtype of what `fun` returns: the sum over the experts of each token, by the
      weights of the routing.

    Raises:
      GShardError: an array has another shape, the routing drops tokens, `fun` closes over
        parameters, these are kept on another dimension than 0, or `by` is none of these.

    Example:
      >>> def experts(params, rows, sizes):
      ...     return jax.lax.ragged_dot(rows, params["kernel"], sizes)
      >>> params = {"kernel": jnp.ones((4, 16, 16))}
      >>> routing = gshard.expert.route(jnp.zeros((2, 8, 4)), 2, capacity_factor=None)
      >>> gshard.expert.dropless(experts, params, jnp.ones((2, 8, 16)), routing).shape
      (2, 8, 16)

    Source: MegaBlocks (Gale et al., 2022), section 4, for rows sorted by expert.
    """
    check_choice("by", by, get_args(By))
    x = check_tokens(x, routing)
    tokens = x.shape[1]
    if routing.capacity < tokens:
        raise GShardError(
            f"The routing lets an expert take {routing.capacity} of the {tokens} tokens of a "
            "group. dropless has no capacity: pass capacity_factor=None to route."
        )
    if not callable(fun):
        raise GShardError(
            f"dropless({shown(fun)}, ...): pass a function of parameters, rows and sizes first."
        )
    paths, leaves, structure = flatten(params)
    for path, leaf in zip(paths, leaves, strict=True):
        if jnp.shape(leaf)[:1] != (routing.experts,):
            raise GShardError(
                f"params{subscript(path)} has shape {jnp.shape(leaf)}: dimension 0 must be the "
                f"{routing.experts} experts of the routing."
            )
    if not leaves:
        raise GShardError(f"params={shown(params)} has no array: pass those of the experts.")
    arrays = [*leaves, x, routing.indices, routing.weights, jnp.int32(0)]
    return Call(fun, structure, by)(arrays)


def _add_up(call: Call, arrays: Sequence[Any]) -> jax.Array:
    """What some experts add to each token.

    `arrays` are their parameters, tokens (G, T, D), indices and weights (G, T, K) of all experts,
    and the number of the first of these experts.
    """
    *leaves, x, indices, weights, first = arrays
    experts, (groups, tokens, k) = leaves[0].shape[0], indices.shape
    # A token has each expert at most once.
    most = groups * tokens * min(k, experts)
    expert = indices.reshape(-1) - first
    own = (expert >= 0) & (expert < experts)
    expert = jnp.where(own, expert, experts)
    order = jnp.argsort(expert, stable=True)[:most]
    sizes = jnp.bincount(expert, length=experts + 1)[:experts].astype(jnp.int32)
    taken, token = own[order][:, None], order // k
    rows = jnp.where(taken, x.reshape(groups * tokens, -1)[token], 0)
    y = call.outputs(leaves, rows, sizes)
    weights = weights.reshape(-1)[order].astype(y.dtype)
    y = jnp.where(taken, y, 0) * weights[:, None]
    wide = jnp.promote_types(y.dtype, jnp.float32)
    total = jnp.zeros((groups * tokens, y.shape[1]), wide).at[token].add(y.astype(wide))
    if k > experts:  # a token with the same expert twice has too few rows
        total = jnp.where(jnp.sum(sizes) > most, jnp.nan, total)
    return total.astype(y.dtype).reshape(groups, tokens, -1)


def _send(call: Call, arrays: Sequence[Any]) -> jax.Array:
    """As `_add_up`, for this device's tokens, which are sent to the devices of their experts."""
    *leaves, x, indices, weights, _ = arrays
    exchange, experts, (groups, tokens, k) = call.exchange, len(leaves[0]), indices.shape
    parts = exchange.parts
    assigned = groups * tokens * k
    most = parts * groups * tokens * min(k, experts)  # as if all had their tokens here
    expert = indices.reshape(-1)
    expert = jnp.where(expert < 0, parts * experts, expert)  # of none, as in `_add_up`
    order = jnp.argsort(expert, stable=True)
    rows = x.reshape(groups * tokens, -1)[order // k]
    counts = jnp.bincount(expert, length=parts * experts).astype(jnp.int32)
    counts = exchange.of_all(counts).reshape(parts, parts, experts)  # [sender, receiver]
    fits = (counts.sum((0, 2)) <= most).all()  # else a token has the same expert twice
    counts = jnp.where(fits, counts, 0)
    sizes = counts.sum(-1, dtype=jnp.int32)
    received = exchange.send(rows, sizes, most)

    own = counts[:, exchange.index]
    number = jnp.tile(jnp.arange(experts), parts)  # the rows of each sender are sorted by expert
    number = jnp.repeat(number, own.reshape(-1), total_repeat_length=most)
    taken = jnp.arange(most) < own.sum()
    by_expert = jnp.argsort(jnp.where(taken, number, experts), stable=True)
    y = call.outputs(leaves, received[by_expert], own.sum(0, dtype=jnp.int32))
    y = jnp.where(taken[:, None], y, 0)[jnp.argsort(by_expert)]
    y = exchange.send(y, sizes.T, assigned)[jnp.argsort(order)]

    y = y.reshape(groups, tokens, k, -1) * weights[..., None].astype(y.dtype)
    total = y.sum(2, dtype=jnp.promote_types(y.dtype, jnp.float32))
    return jnp.where(fits, total, jnp.nan).astype(y.dtype)
