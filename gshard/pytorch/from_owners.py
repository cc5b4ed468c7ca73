"""Sends updated parameters from the devices that own them to all devices.

One all-reduce per tensor, or with buckets one all-gather per dtype: of rows that are padded to the
owner with most elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gshard._util.arrays import replicated_value
from gshard.sharding.plan import Plan
from gshard.train.comm.collectives import all_gather_vector, broadcast_from_owners


class FromOwners:
    """Sends new parameters from their owners to all devices.

    Attributes:
      devices: the devices of the group, in the order of owners.
      local: those of this process, by their index in the group.
      elements: elements sent to every device: all-gathered as padded rows, or else all-reduced at
        twice the cost.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[Any],
        owners: Sequence[int | None],
        rows: bool,
    ):
        """`rows` concatenates an owner's tensors of one dtype, and all-gathers the rows at once."""
        self.devices: Sequence[Any] = devices
        self._plan = plan
        rank = jax.process_index()
        self.local: dict[int, Any] = {
            i: d for i, d in enumerate(devices) if d.process_index == rank
        }
        self._indices = [i for i, owner in enumerate(owners) if owner is not None]
        self._owners = tuple(owner for owner in owners if owner is not None)
        layouts = jax.tree.leaves(plan.params)
        self._leaves = [plan.abstract(layouts[i]) for i in self._indices]
        ends: Counter[Any] = Counter()
        self._starts = []  # of each tensor in the row of its owner
        for x, owner in zip(self._leaves, self._owners, strict=True):
            self._starts.append(ends[x.dtype, owner])
            ends[x.dtype, owner] += x.size
        self._lengths: dict[Any, int] = {}
        if rows:
            for (dtype, _), size in ends.items():
                self._lengths[dtype] = max(self._lengths.get(dtype, 0), size)
        self.elements: int = len(devices) * sum(self._lengths.values()) if rows else ends.total()
        self._by_row = NamedSharding(plan.mesh, plan.device_spec)
        self._gather = jax.jit(self._from_rows)
        self._broadcast = jax.jit(self._from_each, static_argnums=0)

    def pack(self, new: Mapping[int, jax.Array]) -> list[jax.Array]:
        """Packs an owner's new tensors into one row `(1, length)` per dtype, if rows are used."""
        rows = []
        for dtype, length in self._lengths.items():
            own = [jnp.zeros(0, dtype), *(x.ravel() for x in new.values() if x.dtype == dtype)]
            row = jnp.concatenate(own)
            rows.append(jnp.pad(row, (0, length - row.size))[None])
        return rows

    def send(
        self,
        params: Sequence[jax.Array],
        new: Mapping[int, Mapping[int, jax.Array]],
        rows: Mapping[int, Sequence[jax.Array]],
    ) -> list[jax.Array]:
        """Returns all parameters on every device, from the old ones and what each owner has.

        By the index of the owner, `new` has its new tensors by position, and `rows` their rows.
        """
        join = jax.make_array_from_single_device_arrays
        if self._lengths:
            found = self._gather(
                [
                    join((len(self.devices), n), self._by_row, [rows[d][k] for d in self.local])
                    for k, n in enumerate(self._lengths.values())
                ]
            )
        else:
            sent = []
            for i in self._indices:
                old = {shard.device: shard.data for shard in params[i].addressable_shards}
                each = [new[place].get(i, old[d]) for place, d in self.local.items()]
                sent.append(join(each[0].shape, self._plan.sharding(), each))
            found = self._broadcast(self._owners, sent)
        out = list(params)
        for i, x in zip(self._indices, found, strict=True):
            out[i] = x
        return out

    def lower(self) -> jax.stages.Lowered:
        """Returns the lowered collectives."""
        if not self._lengths:
            return self._broadcast.lower(self._owners, self._leaves)
        rows = [
            jax.ShapeDtypeStruct((len(self.devices), length), dtype, sharding=self._by_row)
            for dtype, length in self._lengths.items()
        ]
        return self._gather.lower(rows)

    def one(self, owner: int, x: jax.Array | None, like: Any) -> np.ndarray:
        """Copies one array into the host memory of every process; only its owner's has `x`."""
        if len(self.local) == len(self.devices):
            return np.array(x)
        each: list[Any] = [
            x if place == owner else jax.device_put(np.zeros(like.shape, like.dtype), d)
            for place, d in self.local.items()
        ]
        full = jax.make_array_from_single_device_arrays(like.shape, self._plan.sharding(), each)
        return np.array(replicated_value(self._broadcast((owner,), [full])[0]))

    def _from_each(self, owners: tuple[int, ...], sent: list[jax.Array]) -> list[jax.Array]:
        """Returns full arrays, each with the value that its owner has."""
        broadcast = partial(broadcast_from_owners, owners=owners, axes=self._plan.group.axes)
        return self._on_devices(broadcast, jax.P(), sent)

    def _from_rows(self, rows: list[jax.Array]) -> list[jax.Array]:
        """Returns the full tensors of all owners."""

        def on_device(rows: list[jax.Array]) -> list[jax.Array]:
            found = [all_gather_vector(row[0], self._plan.group.axes) for row in rows]
            of = dict(zip(self._lengths, found, strict=True))
            return [
                of[x.dtype][owner, start : start + x.size].reshape(x.shape)
                for x, owner, start in zip(self._leaves, self._owners, self._starts, strict=True)
            ]

        return self._on_devices(on_device, self._plan.device_spec, rows)

    def _on_devices(self, fun: Any, spec: Any, sent: list[jax.Array]) -> list[jax.Array]:
        return jax.shard_map(
            fun, mesh=self._plan.mesh, in_specs=(spec,), out_specs=jax.P(), check_vma=False
        )(sent)
