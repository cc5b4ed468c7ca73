"""Moments of an optimizer in 8 bits: codes in blocks, and one float32 scale for each block.

Codes are not linear, since a moment's entries differ by many powers of ten within a block: those of
a block with both signs are square roots, those of a block without negative entries (a second
moment) are fourth roots, relative to the largest entry. So the smallest code above zero is 6e-5 and
2e-10 of the largest entry. With linear codes training diverges.

An entry is rounded up or down at random, so that the mean of its decoded value is the entry. Adam's
second moment changes by 0.1 % in a step, codes are 1.6 % apart or more: rounded to the nearest code
it would never fall. What is random is a function of the entry's own bits, which differ in every
step, so that no seed is needed and a restarted training computes the same codes.

Source: 8-bit optimizers via block-wise quantization (Dettmers et al., 2022), sections 2.1 and 2.2;
stochastic rounding: Gupta et al. (2015), section 3.1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard._util.arrays import padded
from gshard._util.random_bits import mixed, uniform

BLOCK = 256  # entries with a common scale, at most
_SIGNED, _UNSIGNED = 127.0, 255.0  # the largest codes
_EXACT = 2.0**-12  # an entry that is nearer to a code, in steps, is rounded to it: it was decoded
# Relative to the largest entry: negative entries that are smaller are as good as zero. A larger one
# gets a code below 0, so that decoded blocks are encoded to the same codes again.
_NEGLIGIBLE = (1 - _EXACT / 2) / _SIGNED**2
_TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray:
    """An array of the optimizer state in 8 bits; `decode()` returns its values.

    Attributes:
      codes: int8, of the shape of the array.
      scales: float32, of the same shape but for `axis`: one for each block along it. A positive one
        says that its block has entries of both signs.
      axis: the dimension that blocks are along.
      shards: in how many equal pieces `axis` is sharded; no block crosses their borders.
      dtype: name of the dtype of the decoded array.
    """

    codes: Any
    scales: Any
    axis: int = field(metadata={"static": True})
    shards: int = field(metadata={"static": True})
    dtype: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded array."""
        return tuple(self.codes.shape)

    def __repr__(self) -> str:
        sizes = list(getattr(self.codes, "shape", ()))
        return (
            f"QuantizedArray({self.dtype}{sizes} in 8 bits, in blocks along dimension {self.axis}; "
            "decode() returns its values)"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the values on the host, for `np.asarray`."""
        return np.asarray(jax.device_get(self).decode(), dtype)

    def decode(self) -> Any:
        """Returns the array, in NumPy where the codes are NumPy's."""
        xp = np if isinstance(self.codes, np.ndarray) else jnp
        codes = self._in_blocks(self.codes, xp).astype(np.float32)
        count = self.scales.shape[self.axis] // self.shards
        scales = self._reshaped(self.scales, (self.shards, count, 1))
        root = codes / np.float32(_SIGNED)
        signed = root * abs(root)
        root = (codes + np.float32(_UNSIGNED - _SIGNED)) / np.float32(_UNSIGNED)
        unsigned = root * root * root * root
        values = abs(scales) * xp.where(scales > 0, signed, unsigned)
        return self._without_blocks(values).astype(self.dtype)

    @classmethod
    def encode(cls, x: Any, axis: int, shards: int, dtype: str) -> QuantizedArray:
        """Encodes an array; one that was decoded in float32 gets the codes that it had.

        A block with an entry that is not finite is not finite as a whole.
        """
        self = cls(x, None, axis, shards, dtype)
        blocks = self._in_blocks(x.astype(jnp.float32), jnp)
        dim = axis + 2
        low = blocks.min(dim, keepdims=True)
        largest = jnp.maximum(blocks.max(dim, keepdims=True), -low)
        largest = jnp.where(largest < _TINY, 0.0, largest)  # XLA rounds smaller results to 0
        has_both = low < -largest * _NEGLIGIBLE
        ratio = abs(blocks) / jnp.where(largest == 0, 1.0, largest)
        root = jnp.sqrt(ratio)
        random = uniform(mixed(lax.bitcast_convert_type(blocks, jnp.uint32)))
        signed = _rounded(ratio, root, 2, _SIGNED, random) * jnp.sign(blocks)
        # A second moment must not become 0: a first one is divided by its square root.
        least = (blocks > 0) & (largest > 0)
        unsigned = jnp.maximum(_rounded(ratio, jnp.sqrt(root), 4, _UNSIGNED, random), least)
        unsigned = jnp.where(blocks < 0, 0.0, unsigned) - (_UNSIGNED - _SIGNED)
        codes = jnp.where(has_both, signed, unsigned).astype(jnp.int8)
        scales = jnp.where(has_both, largest, -largest)
        count = scales.shape[axis] * scales.shape[axis + 1]
        scales = scales.reshape(*x.shape[:axis], count, *x.shape[axis + 1 :])
        return dataclasses.replace(self, codes=self._without_blocks(codes), scales=scales)

    def keeping(self, before: QuantizedArray, x: Any) -> QuantizedArray:
        """Takes over the blocks of `before` that decode to what is encoded here, `x`.

        A value that was rounded to a narrow dtype lies between two codes, and encoding it again
        might draw the other.
        """
        differ = self._in_blocks(x != before.decode(), jnp)
        changed = differ.any(self.axis + 2, keepdims=True)
        of_codes = self._without_blocks(jnp.broadcast_to(changed, differ.shape))
        return dataclasses.replace(
            self,
            codes=jnp.where(of_codes, self.codes, before.codes),
            scales=jnp.where(changed.reshape(self.scales.shape), self.scales, before.scales),
        )

    def _in_blocks(self, x: Any, xp: Any) -> Any:
        """Returns `x` with `axis` as three dimensions: shards, blocks, and entries of a block."""
        length, count, block = block_sizes(x.shape[self.axis], self.shards)
        x = padded(x, self.axis, self.shards * length, xp)
        if count * block > length:
            x = self._reshaped(x, (self.shards, length))
            x = padded(x, self.axis + 1, count * block, xp)
            return x.reshape(*self.shape[: self.axis], self.shards, count, block, *self._after)
        return self._reshaped(x, (self.shards, count, block))

    def _without_blocks(self, x: Any) -> Any:
        """Undoes `_in_blocks`."""
        size = self.shape[self.axis]
        length, count, block = block_sizes(size, self.shards)
        before = self.shape[: self.axis]
        if count * block > length:
            x = x.reshape(*before, self.shards, count * block, *self._after)
            x = _cut(x, self.axis + 1, length)
        return _cut(x.reshape(*before, self.shards * length, *self._after), self.axis, size)

    def _reshaped(self, x: Any, sizes: tuple[int, ...]) -> Any:
        return x.reshape(*self.shape[: self.axis], *sizes, *self._after)

    @property
    def _after(self) -> tuple[int, ...]:
        return self.shape[self.axis + 1 :]


def block_sizes(size: int, shards: int) -> tuple[int, int, int]:
    """Entries of a shard along a dimension of this size, its number of blocks, and their length."""
    length = -(-size // shards)
    count = -(-length // BLOCK)
    return length, count, -(-length // count)


def _rounded(ratio: Any, root: Any, power: int, most: float, random: Any) -> Any:
    """Rounds to codes, so that the mean of `(code / most)**power` is `ratio`, in [0, 1].

    `root` is that root of `ratio`, and `random` is in [0, 1).
    """
    code = jnp.floor(most * root)
    low, high = (code / most) ** power, ((code + 1) / most) ** power
    return code + (_EXACT + (1 - 2 * _EXACT) * random < (ratio - low) / (high - low))


def is_quantized(x: Any) -> bool:
    """Whether this is a `QuantizedArray`, for `is_leaf=`."""
    return isinstance(x, QuantizedArray)


def quantized_arrays(tree: Any) -> list[QuantizedArray]:
    """Returns the quantized arrays of a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_quantized) if is_quantized(x)]


def decoded(tree: Any) -> Any:
    """Returns a tree with its quantized arrays decoded."""
    return jax.tree.map(lambda x: x.decode() if is_quantized(x) else x, tree, is_leaf=is_quantized)


def encoded(tree: Any, like: Any, before: Any = None) -> Any:
    """Returns a tree with the arrays quantized that are quantized in `like`, a tree of anything.

    What has not changed since `before`, an encoded tree, keeps its codes.
    """
    places, structure = jax.tree.flatten(like, is_leaf=is_quantized)
    if not any(map(is_quantized, places)):
        return tree
    old = places if before is None else jax.tree.leaves(before, is_leaf=is_quantized)

    def encode(x: Any, q: Any, old: Any) -> Any:
        if not is_quantized(q):
            return x
        new = QuantizedArray.encode(x, q.axis, q.shards, q.dtype)
        is_exact = q.dtype == "float32"  # encoding what was decoded gives the same codes
        return new if before is None or is_exact else new.keeping(old, x)

    leaves = zip(jax.tree.leaves(tree), places, old, strict=True)
    return structure.unflatten(encode(*of_one) for of_one in leaves)


def _cut(x: Any, axis: int, size: int) -> Any:
    return x if x.shape[axis] == size else x[(slice(None),) * axis + (slice(size),)]
