"""Compares the copies of replicated parameters, bit by bit, every few steps.

Replicas start equal and make the same updates, so they stay equal unless a device computes or
remembers something wrong, which is called silent data corruption. Nothing else would notice: each
replica goes on with its own parameters, and their mean gradient looks as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import AbstractMesh

from gshard._util.errors import some, warn
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.late_checks import late_checks


class ReplicaCheck:
    """Compares the replicated parameters of a plan after every `every`th call of a step."""

    def __init__(self, plan: Plan, every: int | None):
        self._plan, self._every, self._count = plan, every, 0
        if every is None or isinstance(plan.mesh, AbstractMesh):
            self._every = None
            return
        self._devices = list(plan.mesh.devices.flat)
        layouts: list[Layout] = jax.tree.leaves(plan.params)
        owners = [_owners(layout.spec, plan.mesh) for layout in layouts]
        self._chosen = [
            i for i, layout in enumerate(layouts) if _has_copies(owners[i]) and not layout.on_host
        ]
        self._paths = [layouts[i].path for i in self._chosen]
        self._owners = [owners[i] for i in self._chosen]
        if not self._chosen:
            warn(
                f"check_replicas={every} compares nothing: no parameter is stored on several "
                "devices. Leave it out, or use replicas: make_mesh(replica=2)."
            )
            self._every = None
            return
        mapped = jax.shard_map(
            lambda leaves: jnp.stack([_sum_of_bits(x) for x in leaves])[None],
            mesh=plan.mesh,
            in_specs=([layouts[i].spec for i in self._chosen],),
            out_specs=jax.P(plan.mesh.axis_names),
            check_vma=False,
        )
        self._sums = jax.jit(mapped, out_shardings=plan.sharding())

    def after_call(self, params: Any, step: Any) -> None:
        """Starts a comparison if it is time for one; it is checked two calls later."""
        if self._every is None or isinstance(step, core.Tracer):
            return
        self._count += 1
        if self._count % self._every == 0:
            leaves = jax.tree.leaves(params)
            with jax.disable_jit(False):  # else each process has its own sums alone
                sums = self._sums([leaves[i] for i in self._chosen])
            late_checks(self._plan).add(partial(self._fault_of, sums, self._count))

    def _fault_of(self, sums: jax.Array, call: int) -> str:
        table = np.asarray(sums)
        for column, path, owners in zip(table.T, self._paths, self._owners, strict=True):
            _, first, of_device = np.unique(owners, return_index=True, return_inverse=True)
            if (column == column[first][of_device]).all():
                continue
            for owner in dict.fromkeys(owners):
                group = [i for i, x in enumerate(owners) if x == owner]
                counts = Counter(column[i] for i in group).most_common()
                if len(counts) == 1:
                    continue
                odd = [self._devices[i] for i in group if column[i] != counts[0][0]]
                names = some(f"{d} (process {d.process_index})" for d in odd)
                tie = counts[0][1] == counts[1][1]
                return (
                    f"after call {call} of this step the parameter {path} on {names} is not equal "
                    f"to that on {len(group) - len(odd)} other device"
                    f"{'s' * (len(group) - len(odd) > 1)} which should hold the same bits"
                    f"{', and it is not known which is right' * tie}. A device has computed or "
                    "stored something wrong, or the copies were not equal when training began "
                    "(check_replicas=1 finds the call). Test the device, and run without it."
                )
        return ""


def _has_copies(owners: Sequence[int]) -> bool:
    return len(set(owners)) < len(owners)


def _owners(spec: jax.P, mesh: Any) -> list[int]:
    """By device, in the order of the mesh, which shard it holds; equal numbers are copies."""
    used = {n for entry in spec for n in (entry if isinstance(entry, tuple) else (entry,)) if n}
    index = np.zeros(mesh.axis_sizes, np.int64)
    for axis, (name, size) in enumerate(zip(mesh.axis_names, mesh.axis_sizes, strict=True)):
        if name in used:
            shape = [size if a == axis else 1 for a in range(index.ndim)]
            index = index * size + np.arange(size).reshape(shape)
    return index.reshape(-1).tolist()


def _sum_of_bits(x: jax.Array) -> jax.Array:
    """The sum of an array's bits as uint32 numbers, which any single changed bit changes."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, unsigned).reshape(-1).astype(jnp.uint32)
    while bits.size > 2**16:  # XLA on CPU adds arrays several times as fast as it reduces integers
        half = bits.size // 2
        rest, bits = bits[2 * half :], bits[:half] + bits[half : 2 * half]
        bits = jnp.concatenate([bits, rest]) if rest.size else bits
    return jnp.sum(bits, dtype=jnp.uint32)
