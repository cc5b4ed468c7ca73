"""Rows of which a device sends another number to each device: those of experts without capacity."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name


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

        A sum: the TPU compiler makes one of so small an all-gather, without the name that an audit
        reads.
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
        sent = _send(rows, sizes, (len(rows), length), self)
        return checkpoint_name(sent, "expert_exchange")


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _send(
    rows: jax.Array, sizes: jax.Array, lengths: tuple[int, int], over: RowExchange
) -> jax.Array:
    result = jnp.zeros((lengths[1], *rows.shape[1:]), rows.dtype)
    starts = jnp.cumsum(sizes, 1) - sizes  # on the senders
    ends = jnp.cumsum(sizes, 0) - sizes  # on the receivers
    me = over.index
    exchange = lax.ragged_all_to_all if over.native else ragged_all_to_all
    given = rows, result, starts[me], sizes[me], ends[me], sizes[:, me]
    return exchange(*given, axis_name=over.axis)


def _forward(
    rows: jax.Array, sizes: jax.Array, lengths: tuple[int, int], over: RowExchange
) -> tuple[jax.Array, jax.Array]:
    return _send(rows, sizes, lengths, over), sizes


def _backward(
    lengths: tuple[int, int], over: RowExchange, sizes: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, None]:
    """What was received goes back the same way."""
    return _send(cotangent, sizes.T, (lengths[1], lengths[0]), over), None


_send.defvjp(_forward, _backward)


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
    """Returns what `jax.lax.ragged_all_to_all` does of these arguments, by all-gathers.

    For one slice to each device. `send_sizes` is what the others have in `recv_sizes`.
    """
    me = lax.axis_index(axis_name)
    rows = lax.all_gather(operand, axis_name)
    start, to = (lax.all_gather(x, axis_name)[:, me] for x in (input_offsets, output_offsets))
    at = jnp.arange(len(output))[:, None]
    inside = (at >= to) & (at < to + recv_sizes)  # (length, devices)
    sender = jnp.argmax(inside, 1)
    found = rows[sender, start[sender] + at[:, 0] - to[sender]]
    return jnp.where(inside.any(1)[:, None], found, output)
