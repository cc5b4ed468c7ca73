"""Which master copies are out of date, since their parameters were replaced.

An update makes a parameter from its master copy, by rounding. Where a parameter is not its copy,
rounded, the user has replaced it since (`state.replace(params=...)`), and it takes precedence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import NamedSharding

from gshard._util.errors import some, warn
from gshard._util.pytree import flatten
from gshard.sharding.layout import Layout


def where_replaced(copy: jax.Array, param: jax.Array) -> jax.Array:
    """Returns the copy, with the parameter's value where that is not the copy, rounded."""
    return jnp.where(copy.astype(param.dtype) == param, copy, param.astype(copy.dtype))


def latest_copies(plan: Any, params: Any, master: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the master copies of a `Plan`, new ones of parameters that were replaced.

    Tracers, deleted arrays and arrays of another plan are returned unchanged. Of several processes
    each sees its own shards alone, and none may run a program that the others do not: there a
    warning names the parameters, and the old copies are returned.
    """
    stored = dict(zip(*flatten(params)[:2], strict=True))
    layouts = {x.path: x for x in jax.tree.leaves(plan.params)}
    pairs = {
        path: (copy, _near(stored[path], plan))
        for path, copy in master.items()
        if path in plan.master and path in stored and _has_values(stored[path])
        if _has_values(copy) and _is_planned(copy, plan.master[path], plan)
    }

    def programs(path: str) -> Any:
        own = (dataclasses.replace(x[path], path="", reason="") for x in (plan.master, layouts))
        return _programs(plan.sharding(plan.master[path]), *own)

    with jax.transfer_guard("allow"):  # whoever calls this asks for it
        flags = {path: programs(path)[0](*pair) for path, pair in pairs.items()}
        replaced = [
            path
            for path, found in flags.items()
            if any(np.asarray(x.data).any() for x in found.addressable_shards)
        ]
        if replaced and plan.mesh.is_multi_process:
            warn(
                f"parameters were replaced since the last step ({some(replaced)}), and precision= "
                "keeps master copies of them, which with several processes still have the old "
                "values. Run a step first, or pass the new parameters to shard_train_state."
            )
            return dict(master)
        return {**master, **{path: programs(path)[1](*pairs[path]) for path in replaced}}


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
def _programs(sharding: NamedSharding, master: Layout, layout: Layout) -> tuple[Any, Any]:
    """Jitted functions of a copy and its parameter: whether they differ, and the new copy."""
    axes = sharding.mesh.axis_names

    def on_device(copy: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
        copy, param = (
            jax.device_put(x, jax.memory.Space.Device) if of.on_host else x
            for x, of in ((copy, master), (param, layout))
        )
        return copy, master.as_stored(param, "the parameters")

    def differ(copy: jax.Array, param: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda x, y: jnp.any((x.astype(y.dtype) != y) & ~(jnp.isnan(x) & jnp.isnan(y)))[None],
            mesh=sharding.mesh,
            in_specs=(sharding.spec, sharding.spec),
            out_specs=jax.P(axes),
            check_vma=False,
        )(*on_device(copy, param))

    def joined(copy: jax.Array, param: jax.Array) -> jax.Array:
        return where_replaced(*on_device(copy, param))

    return jax.jit(differ), jax.jit(joined, out_shardings=sharding)
