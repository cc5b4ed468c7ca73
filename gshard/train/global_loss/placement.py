"""How the devices hold one value of a loss that was traced for the global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from gshard._util.arrays import is_key
from gshard.train.comm.examples import mirrored


@dataclass(frozen=True)
class Placement:
    """Replicated, sharded on one dimension, or a partial sum.

    Attributes:
      kind: `partial`: the values of all parts add up to the global value.
      dim: the sharded dimension. Its size is `outer * parts * n`; part i holds `[:, i, :]`, or in
        zig-zag order `[::2, i, :]` and `[1::2, parts - 1 - i, :]`.
      outer: 1 where a part is one contiguous slice.
      kept: whether it is sharded because a parameter stays on its devices.
    """

    kind: Literal["replicated", "sharded", "partial"]
    dim: int = -1
    outer: int = 1
    kept: bool = field(default=False, compare=False)

    @property
    def is_sharded(self) -> bool:
        """Whether a part holds a slice."""
        return self.kind == "sharded"

    def on(self, dim: int) -> Placement:
        """Returns the same slices on another dimension."""
        return Placement("sharded", dim, self.outer, self.kept)

    def __str__(self) -> str:
        inner = "" if self.outer == 1 else f" in each of {self.outer} blocks"
        return f"sharded on dimension {self.dim}{inner}" if self.is_sharded else self.kind


REPLICATED, PARTIAL = Placement("replicated"), Placement("partial")


def sharded(dim: int, outer: int = 1) -> Placement:
    """Returns the placement of a value that is sharded on `dim`."""
    return Placement("sharded", dim, outer)


def first_sharded(placements: Sequence[Placement]) -> Placement:
    """Returns the first placement that is sharded."""
    return next(p for p in placements if p.is_sharded)


def agree(placements: Sequence[Placement], allowed: Placement) -> bool:
    """Whether all sharded placements are the allowed one."""
    return all(p == allowed for p in placements if p.is_sharded)


@dataclass(frozen=True)
class Partition:
    """The parts that the global batch is split into, and the one that this device works on.

    Attributes:
      parts: devices times micro-batches.
      index: of this part, int32 scalar.
      zigzag: whether the order of the parts is reversed in every second of the `outer` blocks.
      shared: whether another partition shares the same dimensions afterwards.
    """

    parts: int
    index: jax.Array
    zigzag: bool = False
    shared: bool = False

    def fits(self, shape: Sequence[int], placement: Placement) -> bool:
        """Whether an array of this global shape can be placed so."""
        if not placement.is_sharded:
            return True
        d, unit = placement.dim, placement.outer * self.parts
        if self.zigzag and placement.outer % 2:
            return False
        return 0 <= d < len(shape) and shape[d] > 0 and shape[d] % unit == 0

    def local_shape(self, shape: Sequence[int], placement: Placement) -> tuple[int, ...]:
        """Returns the shape of one part of an array of this global shape."""
        d = placement.dim if placement.is_sharded else None
        return tuple(n // self.parts if i == d else n for i, n in enumerate(shape))

    def part_of(self, x: jax.Array, placement: Placement) -> jax.Array:
        """Slices this part from a full array."""
        if is_key(x):
            data = self.part_of(jax.random.key_data(x), placement)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        d, outer, shape = placement.dim, placement.outer, x.shape
        n = shape[d] // (outer * self.parts)
        if outer == 1 and not self.shared:
            return lax.dynamic_slice_in_dim(x, self.index * n, n, axis=d)
        blocks = x.reshape(*shape[:d], outer, self.parts, n, *shape[d + 1 :])
        blocks = mirrored(blocks, d) if self.zigzag else blocks
        mine = lax.dynamic_index_in_dim(blocks, self.index, d + 1, keepdims=False)
        return mine.reshape(self.local_shape(shape, placement))

    def positions(self, shape: Sequence[int], placement: Placement) -> jax.Array:
        """Returns the position in the full array of each entry of a part, along its dimension.

        `shape` is that of the full array; uint32 of the shape of a part.
        """
        local = self.local_shape(shape, placement)
        n = local[placement.dim] // placement.outer
        here = lax.broadcasted_iota(jnp.uint32, local, placement.dim)
        index = self.index.astype(jnp.uint32)
        if placement.outer == 1:
            return here + index * jnp.uint32(n)
        block, within = here // jnp.uint32(n), here % jnp.uint32(n)
        if self.zigzag:
            index = jnp.where(block % 2 == 0, index, jnp.uint32(self.parts - 1) - index)
        return (block * jnp.uint32(self.parts) + index) * jnp.uint32(n) + within


def size_in_bytes(aval: Any) -> int:
    """Returns the bytes of an array; a typed key counts as 8."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)
