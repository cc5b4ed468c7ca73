"""Tensors that one device each has updated, sent to all: one by one, or in rows.

Nothing is copied on the way in: a global array that every device should hold whole is made of what
the devices have, the owner the new value and the others the old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gshard.sharding.plan import Plan
from gshard.train.comm.collectives import from_owners, rows_of_all


class FromOwners:
    """Sends new parameters from their owners to all devices.

    Attributes:
      devices: of the group, in the order of owners.
      local: those of this process.
      elements: sent to every device; in rows with padding, else all-reduced, at twice the price.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[Any],
        owners: Sequence[int | None],
        leaves: Sequence[jax.Array],
        rows: bool,
    ):
        """Prepares for some parameters.

        Args:
          plan: level `dp`.
          devices: of the group.
          owners: of each leaf; None: it stays what it is.
          leaves: the parameters.
          rows: an owner's tensors of one dtype are one row, and rows are gathered at once, padded
            to the longest; else one all-reduce a tensor.
        """
        self._plan, self._owners, self.devices = plan, owners, list(devices)
        self.local = [d for d in self.devices if d.process_index == jax.process_index()]
        self._lengths = _row_lengths(leaves, owners) if rows else {}
        sizes = [x.size for x, owner in zip(leaves, owners, strict=True) if owner is not None]
        self.elements = len(self.devices) * sum(self._lengths.values()) if rows else sum(sizes)
        self._send = jax.jit(self._from_rows if rows else self._from_each)
        self._one = jax.jit(self._from_one, static_argnums=0)

    def pack(self, new: Mapping[int, jax.Array]) -> list[jax.Array]:
        """An owner's new tensors, by position, as a row `(1, length)` a dtype, if in rows."""
        rows = []
        for dtype, length in self._lengths.items():
            own = [jnp.zeros(0, dtype), *(x.ravel() for x in new.values() if x.dtype == dtype)]
            row = jnp.concatenate(own)
            rows.append(jnp.pad(row, (0, length - row.size))[None])
        return rows

    def send(
        self,
        params: Sequence[jax.Array],
        old: Sequence[Mapping[Any, jax.Array]],
        new: Mapping[Any, Mapping[int, jax.Array]],
        rows: Mapping[Any, Sequence[jax.Array]],
    ) -> list[jax.Array]:
        """The new parameters on every device.

        Args:
          params: the old ones.
          old: the same by device.
          new: by device of this process, its tensors by position.
          rows: by device, what `pack` made of them.
        """
        return self._send(self._rows(rows) if self._lengths else self._each(old, new), params)

    def lower(self, params: Sequence[jax.Array]) -> jax.stages.Lowered:
        """What is sent, lowered."""
        sharding = NamedSharding(self._plan.mesh, self._plan.batch_spec)
        rows = [
            jax.ShapeDtypeStruct((len(self.devices), length), dtype, sharding=sharding)
            for dtype, length in self._lengths.items()
        ]
        return self._send.lower(rows or params, params)

    def one(self, owner: int, x: jax.Array | None, like: Any) -> np.ndarray:
        """One array from its owner, in the host memory of every process.

        Args:
          owner: its place among the devices.
          x: what the owner has; None where that is another process's.
          like: its shape and dtype.
        """
        if len(self.local) == len(self.devices):
            return np.array(x)
        each: list[Any] = [
            x if d == self.devices[owner] else jax.device_put(np.zeros(like.shape, like.dtype), d)
            for d in self.local
        ]
        whole = jax.make_array_from_single_device_arrays(like.shape, self._plan.sharding(), each)
        return np.array(self._one(owner, whole).addressable_data(0))

    def _rows(self, rows: Mapping[Any, Sequence[jax.Array]]) -> list[jax.Array]:
        sharding = NamedSharding(self._plan.mesh, self._plan.batch_spec)
        return [
            jax.make_array_from_single_device_arrays(
                (len(self.devices), length), sharding, [rows[d][k] for d in self.local]
            )
            for k, length in enumerate(self._lengths.values())
        ]

    def _each(
        self, old: Sequence[Mapping[Any, jax.Array]], new: Mapping[Any, Mapping[int, jax.Array]]
    ) -> list[jax.Array]:
        sharding, found = self._plan.sharding(), []
        for i, of in enumerate(old):
            each = [new[d].get(i, of[d]) for d in self.local]
            found.append(jax.make_array_from_single_device_arrays(each[0].shape, sharding, each))
        return found

    def _on_devices(self, fun: Any, spec: Any, sent: Any, params: Sequence[jax.Array]) -> Any:
        return jax.shard_map(
            fun,
            mesh=self._plan.mesh,
            in_specs=(spec, jax.P()),
            out_specs=jax.P(),
            check_vma=False,
        )(sent, params)

    def _from_each(self, sent: Sequence[jax.Array], params: Sequence[jax.Array]) -> list[jax.Array]:
        owned = [(i, owner) for i, owner in enumerate(self._owners) if owner is not None]

        def on_device(sent: list[jax.Array], params: list[jax.Array]) -> list[jax.Array]:
            out, owners = list(params), [owner for _, owner in owned]
            found = from_owners([sent[i] for i, _ in owned], owners, self._plan.group.axes)
            for (i, _), x in zip(owned, found, strict=True):
                out[i] = x
            return out

        return self._on_devices(on_device, jax.P(), sent, params)

    def _from_one(self, owner: int, x: jax.Array) -> jax.Array:
        axes = self._plan.group.axes
        return self._on_devices(lambda xs, _: from_owners(xs, [owner], axes), jax.P(), [x], [])[0]

    def _from_rows(self, rows: Sequence[jax.Array], params: Sequence[jax.Array]) -> list[jax.Array]:
        def on_device(rows: list[jax.Array], params: list[jax.Array]) -> list[jax.Array]:
            found = [rows_of_all(row[0], self._plan.group.axes) for row in rows]
            of = dict(zip(self._lengths, found, strict=True))
            out, begin = list(params), Counter()
            for i, (x, owner) in enumerate(zip(params, self._owners, strict=True)):
                if owner is not None:
                    start = begin[x.dtype, owner]
                    out[i] = of[x.dtype][owner, start : start + x.size].reshape(x.shape)
                    begin[x.dtype, owner] += x.size
            return out

        return self._on_devices(on_device, self._plan.batch_spec, rows, params)


def by_device(x: jax.Array) -> dict[Any, jax.Array]:
    """What each device of this process has of an array."""
    return {shard.device: shard.data for shard in x.addressable_shards}


def _row_lengths(leaves: Sequence[jax.Array], owners: Sequence[int | None]) -> dict[Any, int]:
    """By dtype, elements of the owner that has most."""
    totals: Counter[Any] = Counter()
    for x, owner in zip(leaves, owners, strict=True):
        if owner is not None:
            totals[x.dtype, owner] += x.size
    found: dict[Any, int] = {}
    for (dtype, _), size in totals.items():
        found[dtype] = max(found.get(dtype, 0), size)
    return found
