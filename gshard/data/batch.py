"""Makes global batches: every process passes its own examples, which are put in sequence.

Examples are sharded over all data axes of the mesh, contiguous on each device. A batch is any
pytree; its arrays share their leading dimension, and scalars are replicated.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import AbstractMesh, NamedSharding

from gshard._util.errors import GShardError
from gshard._util.pytree import flatten, subscript, why_not_numeric
from gshard._util.validation import shown
from gshard.data.consistency import compare_batches
from gshard.sharding.plan import Plan


def shard_batch(batch: Any, plan: Plan) -> Any:
    """Places this process's examples on its devices, as part of the global batch.

    Several processes compare what they give whenever it differs from the call before, and warn at
    the first call of a plan when all of them give the same data.

    Args:
      batch: arrays with this process's examples in their leading dimension; with one process that
        is the global batch. A jax array that already spans all devices of the mesh is kept.
      plan: the plan of `shard_train_state`.

    Returns:
      The same tree of global arrays.

    Raises:
      GShardError: the number of examples is not a multiple of this process's devices, or the
        processes gave different arrays or numbers of examples.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> gshard.shard_batch(batch, plan)["x"].sharding.spec
      P('shard',)
    """
    check_plan(plan, "shard_batch(batch, plan)")
    mesh = plan.mesh
    rows = NamedSharding(mesh, plan.batch_spec)
    placed = [_is_global(x, rows) for x in jax.tree.leaves(batch)]
    if placed and all(placed):
        return batch
    local, fault = (_local_leaves(batch, placed) if any(placed) else batch), None
    try:
        check_leaves(local, keys=not mesh.is_multi_process)
        if not any(placed):
            check_examples(local, local_positions(plan), 1)
        elif any(np.ndim(x) for x in local.values()):
            _check_global_arrays(
                batch, placed, check_examples(local, local_positions(plan), 1), plan
            )
    except GShardError as error:
        fault = error
    # One process must not raise while the others wait for it in a collective: they are told.
    if mesh.is_multi_process and mesh.local_devices:
        compare_batches(local, plan, positions_by_process(plan), fault)
    if fault is not None:
        raise fault
    return put_batch(batch, plan)


def put_batch(batch: Any, plan: Plan, copy: bool = True) -> Any:
    """Places this process's examples on its devices, without comparison or communication.

    Args:
      batch: as in `shard_batch`, already checked on every process.
      plan: a plan with a concrete mesh.
      copy: False if nobody else writes into the NumPy arrays of the batch. JAX on CPU may share
        their memory, which the caller might fill with the next batch.

    Returns:
      The same tree of global arrays.
    """
    mesh = plan.mesh
    rows, whole = NamedSharding(mesh, plan.batch_spec), NamedSharding(mesh, jax.P())
    copy = copy and next(iter(rows.device_set)).platform == "cpu"
    if not rows.mesh.is_multi_process:

        def put_all(x: Any) -> jax.Array:
            if _is_global(x, rows):
                return x
            x = np.array(x) if copy and isinstance(x, np.ndarray) else x
            return jax.device_put(x, rows if np.ndim(x) else whole)

        return jax.tree.map(put_all, batch)
    # By index in the data group, since processes may have different numbers of devices.
    mine = sorted(positions_by_process(plan)[jax.process_index()])

    def put(x: Any) -> jax.Array:
        if _is_global(x, rows):
            return x
        x = np.array(x) if copy else np.asarray(x)
        if not x.ndim:
            return jax.make_array_from_callback((), whole, lambda _: x)
        each = x.shape[0] // len(mine)

        def part(index: Any) -> np.ndarray:
            first = mine.index((index[0].start or 0) // each) * each
            return x[first : first + each]

        shape = (each * plan.group.devices, *x.shape[1:])
        return jax.make_array_from_callback(shape, rows, part)

    return jax.tree.map(put, batch)


def local_positions(plan: Plan) -> int:
    """Returns the number of indices of the data group for which this process has a device."""
    return len(positions_by_process(plan).get(jax.process_index(), ()))


def positions_by_process(plan: Plan) -> dict[int, set[int]]:
    """Returns, by process, the indices of the data group for which it has a device."""
    return _positions(NamedSharding(plan.mesh, plan.batch_spec), plan.group.devices)


@functools.lru_cache(maxsize=64)  # every step calls it
def _positions(rows: NamedSharding, count: int) -> dict[int, set[int]]:
    at = rows.devices_indices_map((count,))
    found: dict[int, set[int]] = {}
    for device, index in at.items():
        found.setdefault(device.process_index, set()).add(index[0].start or 0)
    return found


def _local_leaves(batch: Any, placed: list[bool]) -> dict[str, Any]:
    """Returns, by path, the leaves that are not global yet."""
    paths, leaves, _ = flatten(batch)
    return {p: x for p, x, known in zip(paths, leaves, placed, strict=True) if not known}


def check_plan(plan: Any, call: str) -> None:
    """Checks that a plan can place a batch.

    Raises:
      GShardError: it is not a plan, or its mesh is abstract.
    """
    if not isinstance(plan, Plan):
        raise GShardError(f"{call} was called with {shown(plan)} as the plan.")
    if isinstance(plan.mesh, AbstractMesh):
        raise GShardError("the plan has an abstract mesh: it has no devices for a batch.")


def check_leaves(batch: Any, keys: bool = True) -> None:
    """Checks that the leaves are numeric, or with `keys` also PRNG keys of `jax.random`.

    Raises:
      GShardError: names the first leaf that is not.
    """
    for x in jax.tree.leaves(batch):
        dtype = getattr(x, "dtype", None)
        if dtype is None and isinstance(x, (bool, int, float, complex)):
            continue
        if keys and dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
            continue
        if dtype is None or why_not_numeric(dtype):
            paths, leaves, _ = flatten(batch)
            path = next(p for p, leaf in zip(paths, leaves, strict=True) if leaf is x)
            if dtype is None:
                raise GShardError(
                    f"batch{subscript(path)} is {shown(x)}: pass NumPy or JAX arrays."
                )
            raise GShardError(f"batch{subscript(path)} {why_not_numeric(dtype)}: pass numbers.")


def _check_global_arrays(batch: Any, placed: list[bool], rows: int, plan: Plan) -> None:
    """Checks the number of this process's examples against the global arrays in the same tree.

    Raises:
      GShardError: names a global array with another number of examples.
    """
    paths, leaves, _ = flatten(batch)
    whole = rows // local_positions(plan) * plan.group.devices
    for path, x, known in zip(paths, leaves, placed, strict=True):
        if known and x.ndim and x.shape[0] != whole:
            raise GShardError(
                f"batch{subscript(path)} is a global array of {x.shape[0]} rows, and the {rows} "
                f"rows of the arrays beside it, which are this process's own, make {whole}. All "
                "arrays of a batch share their leading dimension."
            )


def check_examples(batch: Any, devices: int, micro_batches: int) -> int:
    """Returns the number of examples, checked to be a multiple of devices times micro-batches.

    Raises:
      GShardError: names the array that does not fit.
    """
    paths, leaves, _ = flatten(batch)
    if not devices:
        raise GShardError("this process has no device in the mesh of the plan: it has no rows.")
    rows = {path: x.shape[0] for path, x in zip(paths, leaves, strict=True) if jnp.ndim(x)}
    if not rows:
        raise GShardError(
            "the batch has no array with rows: pass a tree with at least one (Python lists are "
            "trees too: make them arrays)."
        )
    first, count = next(iter(rows.items()))
    unit = devices * micro_batches
    for path, n in rows.items():
        if n != count:
            raise GShardError(
                f"batch{subscript(path)} has {n} rows and batch{subscript(first)} has {count}. All "
                "arrays of a batch share their leading dimension."
            )
    if count % unit or not count:
        nearest = max(unit, count // unit * unit)
        over, fewer = f"the {devices} devices", ""
        if micro_batches > 1:
            over = f"{devices} devices x {micro_batches} micro-batches = {unit}"
            fewer = ", or fewer micro-batches"
        found = f"{count} examples, which is not a multiple of {over}" if count else "no examples"
        raise GShardError(
            f"batch{subscript(first)} has {found}. Use {nearest} or {nearest + unit} "
            f"examples{fewer}."
        )
    return count


def _is_global(x: Any, rows: NamedSharding) -> bool:
    """Whether an array is already placed on the devices of the mesh."""
    if isinstance(x, core.Tracer):  # a step inside the user's own jit
        return True
    return isinstance(x, jax.Array) and x.sharding.device_set == rows.device_set
