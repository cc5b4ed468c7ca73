"""Which master copies are out of date, since their parameters were replaced.

An update makes a parameter from its master copy, by rounding. Where a parameter is not its copy,
rounded, the user has replaced it since (`state.replace(params=...)`), and it takes precedence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.sharding import NamedSharding, SingleDeviceSharding

from gshard._util.errors import some, warn
from gshard._util.pytree import flatten
from gshard.sharding.layout import Layout


def where_replaced(copy: jax.Array, param: jax.Array) -> jax.Array:
    """Returns the copy, with the parameter's value where that is not the copy, rounded."""
    return jnp.where(copy.astype(param.dtype) == param, copy, param.astype(copy.dtype))


def latest_copies(plan: Any, params: Any, master: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the master copies of a `Plan`, new ones of parameters that were replaced.

    Tracers, deleted arrays and arrays of another plan are returned unchanged. Each process makes
    its own shards of a new copy, without a program that the others would have to run too.
    """
    stored = dict(zip(*flatten(params)[:2], strict=True))
    layouts = {x.path: x for x in jax.tree.leaves(plan.params)}
    pairs = {
        path: (copy, _near(stored[path], plan))
        for path, copy in master.items()
        if path in plan.master and path in stored and _has_values(stored[path])
        if _has_values(copy) and _is_planned(copy, plan.master[path], plan)
    }

    def compare(path: str) -> jax.Array:
        own = (dataclasses.replace(x[path], path="", reason="") for x in (plan.master, layouts))
        return _comparison(plan.sharding(plan.master[path]), *own)(*pairs[path])

    with jax.transfer_guard("allow"):  # whoever calls this asks for it
        flags = {path: compare(path) for path in pairs}
        new = {
            path: _joined(*pairs[path])
            for path, found in flags.items()
            if any(np.asarray(x.data).any() for x in found.addressable_shards)
        }
    if kept := [path for path, copy in new.items() if copy is None]:
        warn(
            f"parameters were replaced since the last step ({some(kept)}) by arrays that are "
            "sharded otherwise over several processes, and precision= keeps master copies of them, "
            "which still have the old values. Place them as the state's were, with "
            "jax.device_put(new, old.sharding), or pass them to shard_train_state."
        )
    return {**master, **{path: copy for path, copy in new.items() if copy is not None}}


def _has_values(x: Any) -> bool:
    if isinstance(x, core.Tracer):
        return False
    return not x.is_deleted() if isinstance(x, jax.Array) else isinstance(x, np.ndarray)


def _is_planned(x: Any, layout: Layout, plan: Any) -> bool:
    sharding = getattr(x, "sharding", None)
    if x.shape != layout.stored_shape or not x.size or sharding is None:
        return False  # XLA compiles no `shard_map` of an empty array
    return sharding.is_equivalent_to(plan.sharding(layout), x.ndim)


def _near(x: Any, plan: Any) -> Any:
    """Returns the array on the devices of the plan, or on the host if it is on others."""
    if not isinstance(x, jax.Array) or not x.committed:
        return x
    return x if x.sharding.device_set == set(plan.mesh.devices.flat) else np.asarray(x)


@lru_cache(maxsize=256)
def _comparison(sharding: NamedSharding, master: Layout, layout: Layout) -> Any:
    """A jitted function of a copy and its parameter: for each device, whether they differ."""
    axes = sharding.mesh.axis_names

    def differ(copy: jax.Array, param: jax.Array) -> jax.Array:
        copy, param = (
            jax.device_put(x, jax.memory.Space.Device) if of.on_host else x
            for x, of in ((copy, master), (param, layout))
        )
        return jax.shard_map(
            lambda x, y: jnp.any((x.astype(y.dtype) != y) & ~(jnp.isnan(x) & jnp.isnan(y)))[None],
            mesh=sharding.mesh,
            in_specs=(sharding.spec, sharding.spec),
            out_specs=jax.P(axes),
            check_vma=False,
        )(copy, master.as_stored(param, "the parameters"))

    return jax.jit(differ)


def _joined(copy: jax.Array, param: Any) -> jax.Array | None:
    """Returns the copy with the new values of its parameter; None if this process lacks some."""
    new: list[jax.Array] = []
    for shard in copy.addressable_shards:
        values = _values_at(param, shard)
        if values is None:
            return None
        here = SingleDeviceSharding(shard.device)  # in its own memory, also what is on the host
        own, values = (jax.device_put(x, here) for x in (shard.data, values))
        new.append(jax.device_put(where_replaced(own, values), shard.data.sharding))
    return jax.make_array_from_single_device_arrays(copy.shape, copy.sharding, new)


def _values_at(param: Any, shard: Any) -> jax.Array | None:
    """Returns what a parameter has where a copy's shard is, padded as that is."""
    for values, index in _parts(param, shard.device):
        inner = tuple(
            slice((x.start or 0) - first, min(size if x.stop is None else x.stop, size) - first)
            for x, first, size in zip(
                shard.index, (x.start or 0 for x in index), param.shape, strict=True
            )
        )
        if all(x.start >= 0 and x.stop <= n for x, n in zip(inner, values.shape, strict=True)):
            sizes = zip(shard.data.shape, values[inner].shape, strict=True)
            zero = np.zeros((), values.dtype)
            return lax.pad(values[inner], zero, [(0, size - had, 0) for size, had in sizes])
    return None


def _parts(param: Any, device: Any) -> Iterator[tuple[Any, tuple[slice, ...]]]:
    """Yields the shards of a parameter on a device with their indices, then all of it."""
    if isinstance(param, jax.Array):
        yield from ((x.data, x.index) for x in param.addressable_shards if x.device == device)
        if not param.is_fully_addressable:
            return
    yield np.asarray(param), (slice(None),) * param.ndim
