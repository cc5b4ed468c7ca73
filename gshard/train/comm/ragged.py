"""An exchange of rows in which each device sends any number of them to each other device.

The tokens of experts without capacity are such rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import linear_call


@dataclass(frozen=True)
class RowExchange:
    """Sends rows between the devices of a mesh axis.

    Attributes:
      axis: its name.
      parts: its devices.
      native: whether XLA has a ragged all-to-all for these devices. If not, each device
        all-gathers all rows, and takes its own.
    """

    axis: str
    parts: int
    native: bool

    @property
    def index(self) -> jax.Array:
        """Of this device on the axis."""
        return lax.axis_index(self.axis)

    def of_all(self, x: jax.Array) -> jax.Array:
        """Returns a few numbers of each device, along a new dimension 0.

        By a sum: the TPU compiler turns so small an all-gather into one anyway, and drops the name
        that an audit reads.
        """
        own = jnp.zeros((self.parts, *x.shape), x.dtype).at[self.index].set(x)
        return lax.psum(own, self.axis)

    def send(self, rows: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
        """Sends rows to other devices.

        Args:
          rows: (n, D), first those for the first device.
          sizes: (parts, parts) int32, the same on all devices: `sizes[i, j]` rows go from device
            i to device j.
          length: rows of the result, at least as many as a device receives.

        Returns:
          (length, D), first what the first device sent; zeros after what was sent.
        """
        n = len(rows)
        sent = linear_call(
            lambda sizes, rows: self._exchanged(rows, sizes, length),
            lambda sizes, cotangent: self._exchanged(cotangent, sizes.T, n),
            sizes,
            rows,
        )
        return checkpoint_name(sent, "expert_exchange")

    def _exchanged(self, rows: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
        result = jnp.zeros((length, *rows.shape[1:]), rows.dtype)
        starts = jnp.cumsum(sizes, 1) - sizes  # on the senders
        ends = jnp.cumsum(sizes, 0) - sizes  # on the receivers
        me = self.index
        exchange = lax.ragged_all_to_all if self.native else ragged_all_to_all
        given = rows, result, starts[me], sizes[me], ends[me], sizes[:, me]
        return exchange(*given, axis_name=self.axis)


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """Returns what `jax.lax.ragged_all_to_all` would, for one slice to each device.

    By all-gathers. A slice arrives only if its sender and its receiver give it the same size.
    """
    me = lax.axis_index(axis_name)
    rows = lax.all_gather(operand, axis_name)
    given = input_offsets, send_sizes, output_offsets
    start, sent, to = (lax.all_gather(x, axis_name)[:, me] for x in given)
    size = jnp.where(sent == recv_sizes, sent, 0)
    at = jnp.arange(len(output))[:, None]
    inside = (at >= to) & (at < to + size)  # (length, devices)
    sender = jnp.argmax(inside, 1)
    found = rows[sender, start[sender] + at[:, 0] - to[sender]]
    return jnp.where(inside.any(1)[:, None], found, output)
