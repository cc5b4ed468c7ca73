"""Attention of a slice of queries to a slice of keys, block by block, in both directions.

No array of all scores is made: a block of queries meets a block of keys at a time, and the softmax
is accumulated online (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao 2023, FlashAttention-2,
arXiv 2307.08691, section 3.1). Which pairs of blocks meet is known before the program runs.

Letters in names: B sequences, q queries, k keys, K heads of keys and values, each for G heads of
queries, E features, F features of a key and its value in one array. Dimension 1 is of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # a score; -inf would give NaN where all keys of a block are masked
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Masking:
    """What a query attends to, by positions: all, those before it, those near it."""

    causal: bool
    window: int | None

    def meets(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
        """Whether some query attends to some key; (first, last) positions of both."""
        if self.causal and queries[1] < keys[0]:
            return False
        if self.window is None:
            return True
        ahead = keys[0] - queries[1]
        return queries[0] - keys[1] < self.window and ahead < self.window


@dataclass(frozen=True)
class Blocks:
    """How a slice is cut into blocks: `parts` of `length` tokens, each into `count` of `size`.

    In zig-zag order a slice has two parts. The last block of a part may be padded.
    """

    parts: int
    length: int
    count: int
    size: int

    @classmethod
    def of(cls, tokens: int, parts: int, most: int) -> Blocks:
        """Equal blocks of at most `most` tokens; padded only if that needs far fewer of them."""
        length = tokens // parts
        fewest = -(-length // most)
        even = (n for n in range(fewest, 2 * fewest) if length % n == 0)
        count = next(even, fewest)
        return cls(parts, length, count, -(-length // count))

    @property
    def padding(self) -> int:
        """Tokens that are added to each part."""
        return self.count * self.size - self.length

    def padded(self, x: jax.Array, dim: int = 1, value: int = 0) -> jax.Array:
        """A slice whose parts are padded to full blocks."""
        if not self.padding:
            return x
        before, after = x.shape[:dim], x.shape[dim + 1 :]
        widths = [(0, 0)] * x.ndim
        widths.insert(dim + 1, (0, self.padding))
        x = jnp.pad(
            x.reshape(*before, self.parts, self.length, *after), widths, constant_values=value
        )
        return x.reshape(*before, -1, *after)

    def unpadded(self, x: jax.Array) -> jax.Array:
        """The tokens of a padded slice."""
        if not self.padding:
            return x
        before, after = x.shape[:1], x.shape[2:]
        x = x.reshape(*before, self.parts, self.count * self.size, *after)
        return x[:, :, : self.length].reshape(*before, -1, *after)

    def take(self, x: jax.Array, i: Any, dim: int = 1) -> jax.Array:
        """Block `i` of a padded slice."""
        return lax.dynamic_slice_in_dim(x, i * self.size, self.size, dim)

    def put(self, x: jax.Array, block: jax.Array, i: Any) -> jax.Array:
        """A padded slice with another block `i`."""
        return lax.dynamic_update_slice_in_dim(x, block, i * self.size, 1)

    def all_pairs(self, of_queries: Sequence[int], of_keys: Sequence[int]) -> Pairs:
        """Every block of some parts of the queries with every block of some parts of the keys."""
        n = range(self.count)
        return tuple(
            (a * self.count + i, b * self.count + j)
            for a in of_queries
            for i in n
            for b in of_keys
            for j in n
        )

    def near_pairs(self, masking: Masking, distance: int, part: int = 0) -> Pairs:
        """The pairs of one part that meet; the queries start `distance` after the keys."""
        spans = [
            (i * self.size, min((i + 1) * self.size, self.length) - 1) for i in range(self.count)
        ]
        return tuple(
            (part * self.count + i, part * self.count + j)
            for i, (first, last) in enumerate(spans)
            for j, keys in enumerate(spans)
            if masking.meets((distance + first, distance + last), keys)
        )


class Queries(NamedTuple):
    """A padded slice of queries."""

    q_BxqxKxGxE: jax.Array
    positions_q: jax.Array
    segments_Bxq: jax.Array | None


class Keys(NamedTuple):
    """A padded slice of keys and values; `mask` is (B or 1, K or 1, G or 1, q, k)."""

    kv_BxkxKxF: jax.Array
    positions_k: jax.Array
    segments_Bxk: jax.Array | None
    mask: jax.Array | None


class Known(NamedTuple):
    """What the backward pass knows of a padded slice of queries.

    `mean` is the sum over features of the output times its gradient (FlashAttention-2, section
    3.1.2).
    """

    d_out_BxqxKxGxE: jax.Array
    normaliser_BxqxKxG: jax.Array
    mean_BxqxKxG: jax.Array


class Softmax(NamedTuple):
    """Sums of weighted values and of weights, relative to the largest score so far."""

    sum_BxqxKxGxE: jax.Array
    weights_BxqxKxG: jax.Array
    largest_BxqxKxG: jax.Array

    @classmethod
    def empty(cls, like_BxqxKxGxE: jax.Array, features: int) -> Softmax:
        """No key has been seen."""
        dtype = accumulated(like_BxqxKxGxE.dtype)
        nothing = jnp.zeros_like(like_BxqxKxGxE[..., :1], dtype)
        one = nothing[..., 0]
        return cls(jnp.broadcast_to(nothing, (*one.shape, features)), one, one + MASKED)

    def output(self) -> tuple[jax.Array, jax.Array]:
        """The weighted mean of the values, and the logarithm of the sum of exponentials.

        Both are 0 for a query that attends to no key.
        """
        none = self.weights_BxqxKxG == 0
        weights = jnp.where(none, 1, self.weights_BxqxKxG)
        normaliser = jnp.where(none, 0, self.largest_BxqxKxG + jnp.log(weights))
        return self.sum_BxqxKxGxE / weights[..., None], normaliser


def accumulated(dtype: Any) -> Any:
    """The dtype of sums: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=accumulated(a.dtype))


def _per_score(x_BxqxKxG: jax.Array) -> jax.Array:
    """A number for each query, to broadcast over scores (B, K, G, q, k)."""
    return x_BxqxKxG.transpose(0, 2, 3, 1)[..., None]


class Attend(NamedTuple):
    """Attention of one slice of queries to one slice of keys."""

    blocks: Blocks
    masking: Masking
    scale: float

    def _allowed(self, queries: Queries, keys: Keys, i: Any, j: Any) -> jax.Array | None:
        """Which queries of block i attend to which keys of block j; None for all."""
        take, found = self.blocks.take, []
        to = take(queries.positions_q, i, 0)[:, None]
        of = take(keys.positions_k, j, 0)[None, :]
        if self.masking.causal:
            found.append(of <= to)
        if self.masking.window is not None:
            near = to - of < self.masking.window
            found.append(near if self.masking.causal else near & (of - to < self.masking.window))
        if self.blocks.padding:
            found.append(of >= 0)
        if queries.segments_Bxq is not None and keys.segments_Bxk is not None:
            same = take(queries.segments_Bxq, i)[:, :, None] == take(keys.segments_Bxk, j)[:, None]
            found.append(same[:, None, None])
        if keys.mask is not None:
            found.append(take(take(keys.mask, i, 3), j, 4))
        if not found:
            return None
        allowed = found[0]
        for more in found[1:]:
            allowed = allowed & more
        return allowed

    def _block(self, queries: Queries, keys: Keys, i: Any, j: Any) -> Any:
        """Block i of the queries, block j of the keys and of the values, and their scores."""
        q_BxqxKxGxE = self.blocks.take(queries.q_BxqxKxGxE, i)
        kv_BxkxKxF = self.blocks.take(keys.kv_BxkxKxF, j)
        k_BxkxKxE, v_BxkxKxE = jnp.split(kv_BxkxKxF, [q_BxqxKxGxE.shape[-1]], -1)
        scores = _product("BqKGE,BkKE->BKGqk", q_BxqxKxGxE, k_BxkxKxE) * self.scale
        return q_BxqxKxGxE, k_BxkxKxE, v_BxkxKxE, scores

    def forward(self, queries: Queries, keys: Keys, seen: Softmax, pairs: Pairs) -> Softmax:
        """Adds what the queries see of some keys."""
        take, put = self.blocks.take, self.blocks.put

        def pair(seen: Softmax, ij: Any) -> tuple[Softmax, None]:
            i, j = ij
            _, _, v_BxkxKxE, scores = self._block(queries, keys, i, j)
            allowed = self._allowed(queries, keys, i, j)
            if allowed is not None:
                scores = jnp.where(allowed, scores, MASKED)
            old = Softmax(*(take(x, i) for x in seen))
            largest = jnp.maximum(old.largest_BxqxKxG, scores.max(-1).transpose(0, 3, 1, 2))
            weights = jnp.exp(scores - _per_score(largest))
            if allowed is not None:
                weights = jnp.where(allowed, weights, 0)
            values = _product("BKGqk,BkKE->BqKGE", weights.astype(v_BxkxKxE.dtype), v_BxkxKxE)
            rescaled = jnp.exp(old.largest_BxqxKxG - largest)
            new = Softmax(
                old.sum_BxqxKxGxE * rescaled[..., None] + values,
                old.weights_BxqxKxG * rescaled + weights.sum(-1).transpose(0, 3, 1, 2),
                largest,
            )
            return Softmax(*(put(x, y, i) for x, y in zip(seen, new, strict=True))), None

        return _over_pairs(pair, seen, pairs)

    def backward(
        self,
        queries: Queries,
        keys: Keys,
        known: Known,
        grads: tuple[jax.Array, jax.Array],
        pairs: Pairs,
    ) -> tuple[jax.Array, jax.Array]:
        """Adds what some pairs contribute to the gradients of the queries, and keys and values."""
        take, put = self.blocks.take, self.blocks.put

        def pair(grads: Any, ij: Any) -> tuple[Any, None]:
            (i, j), (d_q, d_kv) = ij, grads
            q_BxqxKxGxE, k_BxkxKxE, v_BxkxKxE, scores = self._block(queries, keys, i, j)
            d_out_BxqxKxGxE, normaliser, mean = (take(x, i) for x in known)
            weights = jnp.exp(scores - _per_score(normaliser))
            allowed = self._allowed(queries, keys, i, j)
            if allowed is not None:
                weights = jnp.where(allowed, weights, 0)
            d_weights = _product("BqKGE,BkKE->BKGqk", d_out_BxqxKxGxE, v_BxkxKxE)
            d_scores = weights * (d_weights - _per_score(mean)) * self.scale
            d_scores = d_scores.astype(q_BxqxKxGxE.dtype)
            weights = weights.astype(v_BxkxKxE.dtype)
            of_q = _product("BKGqk,BkKE->BqKGE", d_scores, k_BxkxKxE)
            of_k = _product("BKGqk,BqKGE->BkKE", d_scores, q_BxqxKxGxE)
            of_v = _product("BKGqk,BqKGE->BkKE", weights, d_out_BxqxKxGxE)
            d_q = put(d_q, take(d_q, i) + of_q, i)
            d_kv = put(d_kv, take(d_kv, j) + jnp.concatenate([of_k, of_v], -1), j)
            return (d_q, d_kv), None

        return _over_pairs(pair, grads, pairs)


def _over_pairs(pair: Any, carry: Any, pairs: Pairs) -> Any:
    """Runs over pairs of blocks, one after the other."""
    if len(pairs) <= 1:
        for one in pairs:
            carry, _ = pair(carry, one)
        return carry
    carry, _ = lax.scan(pair, carry, tuple(jnp.array(pairs, jnp.int32).T))
    return carry
