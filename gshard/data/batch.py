"""Makes global batches: every process passes its own examples, which are put in sequence.

Examples are sharded over the data axes of the mesh, contiguous on each device, and dimension 1 over
its sequence axis. A batch is any pytree; its arrays share their leading dimension, and scalars are
replicated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.dtypes import canonicalize_dtype
from jax.sharding import NamedSharding

from gshard._util.arguments import named_arguments
from gshard._util.errors import GShardError
from gshard._util.pytree import (
    REGISTER,
    check_array,
    check_fits,
    flatten,
    lists_of_numbers,
    subscript,
    why_not_numeric,
)
from gshard._util.validation import shown
from gshard.data.consistency import compare_batches
from gshard.distributed.agree import spans_processes
from gshard.sharding.batch_specs import spec_of
from gshard.sharding.plan import Plan
from gshard.sharding.validate import refuse_abstract_mesh


@named_arguments({"plan": "It is called as shard_batch(batch, plan)."})
def shard_batch(batch: Any, plan: Plan) -> Any:
    """Places this process's examples on its devices, as part of the global batch.

    Several processes compare the form of their batches (tree, dtypes, shapes) whenever it changes.
    In the first calls of a plan they also compare the data, and warn if processes that must have
    different examples gave the same.

    Args:
      batch: arrays with this process's examples in their leading dimension, with full sequences;
        with one process that is the global batch. A JAX array that already spans all devices of
        the mesh is kept.
      plan: the plan of `shard_train_state`.

    Returns:
      A tree of the same structure, of global arrays.

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
    refuse_iterator(batch)
    mesh = plan.mesh
    sharding = NamedSharding(mesh, plan.batch_spec)
    leaves = jax.tree.leaves(batch)
    placed = [_is_global(x, sharding) for x in leaves]
    if placed and all(placed):
        _refuse_deleted(batch, leaves)
        return batch
    local, fault = batch, None
    if any(placed):
        pairs = zip(*flatten(batch)[:2], placed, strict=True)
        local = {path: x for path, x, is_placed in pairs if not is_placed}
    try:
        _refuse_deleted(batch, leaves)
        check_leaves(local, keys=not mesh.is_multi_process)
        if not any(placed) or any(np.ndim(x) for x in local.values()):
            groups = "groups of devices that share sequences"
            what = "devices" if plan.group.sequence == 1 else groups
            count = check_examples(local, local_positions(plan), 1, what)
            if any(placed):
                _check_global_arrays(batch, placed, count, plan)
        plan.sequence_dims(batch)
    except GShardError as error:
        fault = error
    # The others wait in a collective, so they get this process's error before it is raised.
    if spans_processes(plan):
        compare_batches(local, plan, positions_by_process(plan), fault)
    if fault is not None:
        raise fault
    return put_batch(batch, plan)


def put_batch(batch: Any, plan: Plan, copy: bool = True) -> Any:
    """Places this process's examples on its devices, without comparison or communication.

    With `copy=False` nobody else may write into the NumPy arrays: JAX may share their memory on a
    CPU, and reads it later on a GPU, when the caller of `shard_batch` may have filled it again.
    """
    dims = plan.sequence_dims(batch)

    def put(x: Any, dim: int | None) -> jax.Array:
        sharded = NamedSharding(plan.mesh, spec_of(x, dim, plan.group))
        if _is_global(x, sharded):
            return x
        if not plan.mesh.is_multi_process:
            x = np.array(x) if copy and isinstance(x, np.ndarray) else x
            return jax.device_put(x, sharded)
        if isinstance(x, (int, float, complex)):
            with jax.transfer_guard("allow"), jax.disable_jit(False):
                return _placed_number(sharded)(x)
        x = np.array(x) if copy else np.asarray(x)
        if not x.ndim:
            return jax.make_array_from_callback((), sharded, lambda _: x)
        # By index in the data group, since processes may have different numbers of devices.
        mine = sorted(positions_by_process(plan)[jax.process_index()])
        each = x.shape[0] // len(mine)

        def local_shard(index: Any) -> np.ndarray:
            first = mine.index((index[0].start or 0) // each) * each
            return x[(slice(first, first + each), *index[1:])]

        shape = (each * plan.group.batch_shards, *x.shape[1:])
        return jax.make_array_from_callback(shape, sharded, local_shard)

    leaves, structure = jax.tree.flatten(batch)
    return structure.unflatten(map(put, leaves, dims))


@functools.cache
def _placed_number(sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    """A function that places a Python number, whose dtype stays weak, as in one process."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def local_positions(plan: Plan) -> int:
    """Returns the number of shards of the examples for which this process has a device."""
    return len(positions_by_process(plan).get(jax.process_index(), ()))


def positions_by_process(plan: Plan) -> dict[int, set[int]]:
    """Returns, by process, the shards of the examples for which it has a device."""
    return _positions(NamedSharding(plan.mesh, plan.batch_spec), plan.group.batch_shards)


@functools.lru_cache(maxsize=64)  # every step calls it
def _positions(sharding: NamedSharding, count: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for device, index in sharding.devices_indices_map((count,)).items():
        found.setdefault(device.process_index, set()).add(index[0].start or 0)
    return found


def check_plan(plan: Any, call: str) -> None:
    """Checks that a plan can place a batch."""
    if not isinstance(plan, Plan):
        raise GShardError(
            f"{call} was called with {shown(plan)} as the plan. Pass the plan that "
            "gshard.shard_train_state returned."
        )
    refuse_abstract_mesh(plan.mesh, call)


def refuse_iterator(batch: Any) -> None:
    """Refuses an iterator over batches, of which JAX warns as a leaf."""
    if isinstance(batch, Iterator):
        raise GShardError(
            f"the batch is {shown(batch)}, which gives batches one by one: pass one of them, such "
            "as next(batches), or iterate over gshard.global_batches(batches, plan)."
        )


def check_leaves(batch: Any, keys: bool = True) -> None:
    """Checks that the leaves are numeric, or with `keys` also PRNG keys of `jax.random`."""
    for path, x in zip(*flatten(batch)[:2], strict=True):
        dtype, where = getattr(x, "dtype", None), f"batch{subscript(path)}"
        if isinstance(x, jax.ShapeDtypeStruct):
            raise GShardError(f"{where} is abstract and has no values: pass NumPy or JAX arrays.")
        if dtype is not None and type(x) is not np.ndarray:
            check_array(x, where)
        if dtype is None:
            if not isinstance(x, (bool, int, float, complex)):
                fix = "pass NumPy or JAX arrays."
                if isinstance(x, (str, bytes)):
                    fix = "leave it out, since a step takes NumPy and JAX arrays."
                if dataclasses.is_dataclass(x):
                    fix = REGISTER
                raise GShardError(f"{where} is {shown(x)}: {fix}")
        elif not (keys and jnp.issubdtype(dtype, jax.dtypes.prng_key)):
            if why := why_not_numeric(dtype):
                raise GShardError(f"{where} {why}: pass numbers.")
        if type(x) is np.ndarray and (x.dtype.char in "gG" or not x.dtype.isnative):
            check_array(x, where)
        if isinstance(x, (int, np.ndarray, np.generic)):
            check_fits(x, canonicalize_dtype(jnp.result_type(x)), where)


def _refuse_deleted(batch: Any, leaves: Sequence[Any]) -> None:
    """Refuses deleted arrays by path; paths are made only then, since each step calls this."""
    arrays = (x for x in leaves if isinstance(x, jax.Array))
    if any(not isinstance(x, core.Tracer) and x.is_deleted() for x in arrays):
        for path, x in zip(*flatten(batch)[:2], strict=True):
            if isinstance(x, jax.Array):
                check_array(x, f"batch{subscript(path)}")


def _check_global_arrays(batch: Any, placed: list[bool], count: int, plan: Plan) -> None:
    """Compares the global arrays of a batch with this process's examples in the same tree."""
    total = count // local_positions(plan) * plan.group.batch_shards
    for path, x, is_placed in zip(*flatten(batch)[:2], placed, strict=True):
        if is_placed and x.ndim and x.shape[0] != total:
            raise GShardError(
                f"batch{subscript(path)} is a global array of {x.shape[0]} examples, but the "
                f"{count} examples that this process gave in other arrays make a global batch of "
                f"{total}. All arrays of a batch share their leading dimension."
            )


def check_has_examples(positions: int) -> None:
    """Refuses a process that has a device for none of the shards of the examples."""
    if not positions:
        raise GShardError(
            "this process has no device in the mesh of the plan, so it has no examples. Leave it "
            "out of the loop, or make the mesh of all devices."
        )


def check_examples(batch: Any, devices: int, micro_batches: int, what: str = "devices") -> int:
    """Returns the number of examples, checked to be a multiple of devices times micro-batches.

    `what` names the devices in the error.
    """
    check_has_examples(devices)
    pairs = zip(*flatten(batch)[:2], strict=True)
    counts = {path: x.shape[0] for path, x in pairs if jnp.ndim(x)}
    if not counts:
        raise GShardError(
            "the batch has no array with examples: pass a tree with at least one (Python lists are "
            "trees too: make them arrays). For a loss that draws its own samples, pass a number "
            "for each: np.arange(1024), of which every process passes its part."
        )
    first, count = next(iter(counts.items()))
    # Only a list of numbers has leaves without a dimension.
    some_numbers = len(counts) < len(jax.tree.leaves(batch))
    for path, x in lists_of_numbers(batch) if some_numbers else ():
        if len(x) == count:
            raise GShardError(
                f"batch{subscript(path)} is a list with an entry for each of the {count} examples. "
                "Every number in it would be an array of its own: make it one, np.asarray(...)."
            )
    for path, n in counts.items():
        if n != count:
            from gshard.train_state.nnx import refuse_modules  # imports NNX, which takes a while

            refuse_modules(batch)
            raise GShardError(
                f"batch{subscript(path)} has {_examples(n)} and batch{subscript(first)} has "
                f"{count}. All arrays of a batch must have the same number of examples, along "
                "their leading dimension: transpose an array that has them elsewhere, np.stack a "
                "list of examples, and give those that belong together, such as two answers to "
                "compare, one entry: (pairs, 2, ...). Pad graphs to one size, stack them, and "
                "jax.vmap the loss over them. An array without one entry per example, such as "
                "class weights, does not belong in a batch: make it a field of the train state "
                "(with NNX, a Variable of the model), or let the loss close over it. A random key "
                "goes into a batch as a typed scalar, jax.random.key(seed)."
            )
    unit = devices * micro_batches
    if count % unit or not count:
        nearest = max(unit, count // unit * unit)
        over, fewer = f"the {devices} {what}", ""
        if micro_batches > 1:
            over = f"{devices} {what} x {micro_batches} micro-batches = {unit}"
            fewer = ", or fewer micro-batches"
        found, filled = "no examples", ""
        if count:
            found = f"{_examples(count)}, which is not a multiple of {over}"
            filled = (
                ". gshard.DataLoader(pad_last=True) fills the last batch; another loader may drop "
                "it (drop_remainder=True)"
            )
        raise GShardError(
            f"batch{subscript(first)} has {found}. Use {nearest} or {nearest + unit} "
            f"examples{fewer}{filled}."
        )
    return count


def _examples(count: int) -> str:
    return f"{count} example" if count == 1 else f"{count} examples"


def _is_global(x: Any, sharding: NamedSharding) -> bool:
    """Whether an array is already placed on the devices of the mesh."""
    if isinstance(x, core.Tracer):  # a step inside the user's own jit
        return True
    if not isinstance(x, jax.Array) or x.sharding.device_set != sharding.device_set:
        return False
    own: Any = sharding.mesh
    mesh: Any = getattr(x.sharding, "mesh", own)  # a program takes one order of the devices
    return mesh is own or [*mesh.devices.flat] == [*own.devices.flat]
