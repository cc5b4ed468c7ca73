"""Checks that all processes shard the same train state, before any of it is placed.

JAX does not check this: every process makes its shards of a global array from its own copy. With
another seed on each process, arrays that are sharded would mix several initializations, and
replicas would stay different for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype
from jax.sharding import AbstractMesh, Mesh

from gshard._util.arrays import is_key
from gshard._util.crc32 import crc32
from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten
from gshard._util.validation import check_integer
from gshard._util.version import versions
from gshard.distributed.agree import (
    all_gather_text,
    by_value,
    find_differences,
    first_difference,
    processes,
    spans_processes,
)
from gshard.distributed.broadcast import broadcast
from gshard.distributed.introduce import introduce
from gshard.sharding.plan import Plan, describe_sent
from gshard.train.optim.optimizer_info import optimizer_lines

_LIBRARIES = ("gshard", "jax", "jaxlib", "flax", "optax")
_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_default_matmul_precision")
ADVICE = {
    "versions": "Install the same versions for every process.",
    "JAX's settings": (
        "Set the same environment variables (JAX_...) and the same jax.config on every process."
    ),
    "the mesh": "Make the same mesh on every process.",
    "the use of the mesh axes": (
        "Give shard_train_state the same keep=, shard_axes=, replica_axes= and sequence_order= on "
        "every process."
    ),
    "the level": "Give the same level on every process.",
    "the plan": (
        "Make the same model and optimizer on every process, and give shard_train_state the same "
        "options (min_shard_size=, rules=, frozen=, precision=, wire=, offload=, ...)."
    ),
    "the optimizer": (
        "Make it with the same numbers, such as the learning rate, and the same transformations on "
        "every process."
    ),
    "the arrays": "Pass the same arguments on every process.",
    "broadcast_from": "Give the same broadcast_from= on every process.",
}


def check_source(source: Any, mesh: Any) -> None:
    """Checks the argument `broadcast_from=`."""
    if source is None:
        return
    rank = check_integer("broadcast_from", source, 0, ", the rank of a process")
    count = jax.process_count()
    if rank >= count:
        raise GShardError(
            f"broadcast_from={rank} is not the rank of a process: there are {count}, counted "
            "from 0. Give the rank of the process whose values all of them take, such as 0."
        )
    if isinstance(mesh, Mesh) and rank not in {d.process_index for d in mesh.devices.flat}:
        raise GShardError(
            f"broadcast_from={rank}: process {rank} has no device in the mesh. Give the rank of "
            "one that has."
        )


def agree_on_state(plan: Plan, values: Any, what: str, source: int | None) -> Any:
    """Compares plans and values over the processes of the plan's mesh, and returns the values.

    Every process of the mesh calls it; with one process it does nothing. `values` is a tree of
    arrays, concrete or abstract, and `what` says of what. With a `source`, values that differ
    become those of that process.

    Raises:
      GShardError: the processes differ, on all of them.
    """
    mesh: Any = plan.mesh
    if not spans_processes(plan):
        return values
    introduce(mesh)
    paths, leaves, structure = flatten(values)
    lines = [f"{path} {checksum(x)}" for path, x in zip(paths, leaves, strict=True)]
    forms = [f"{p} {_form(x)}" for p, x in zip(paths, leaves, strict=True)]
    facts = {
        **plan_facts(plan),
        "the optimizer": optimizer_lines(plan),
        "the arrays": forms,
        "broadcast_from": [str(source)],
        "values": lines,
    }
    differing = find_differences("state", facts, mesh)
    if not differing:
        return values
    if differing[0] != "values":
        given = by_value(first_difference(facts[differing[0]], mesh))
        raise GShardError(
            f"the processes do not shard the same train state. They differ in {differing[0]}: "
            f"{given}. {ADVICE[differing[0]]}"
        )
    texts = all_gather_text("\n".join(lines), mesh, what="shard_train_state")
    found = {rank: text.split("\n") for rank, text in texts.items()}
    first = found[min(found)]
    others = [rank for rank, own in found.items() if own != first]
    differ = [i for i in range(len(lines)) if any(own[i] != first[i] for own in found.values())]
    if source is not None:
        return structure.unflatten(_taken_from(source, leaves, differ, mesh))
    names = some([paths[i] or "the argument" for i in differ], 3)
    raise GShardError(
        f"the processes do not have the same values in {what}: {names} on {processes(others)} "
        f"{'differ' if len(differ) > 1 else 'differs'} from process {min(found)}. Use the "
        "same seed and the same files on every process, or pass "
        f"broadcast_from={min(found)} to shard_train_state: all processes then take the values of "
        f"process {min(found)}."
    )


def plan_facts(plan: Plan) -> dict[str, list[str]]:
    """What must be the same on every process of a plan, as lines of text by name."""
    mesh, layouts = plan.mesh, jax.tree.leaves(plan.layouts)
    grads = [describe_sent(x, x.scattered_as) for x in jax.tree.leaves(plan.grads)]
    lines = [
        f"{x.path} {x.dtype}{list(x.shape)} {describe_sent(x, x.gathered_as)}" for x in layouts
    ]
    ids = [] if isinstance(mesh, AbstractMesh) else [str(d.id) for d in mesh.devices.flat]
    return {
        "versions": _versions(),
        "JAX's settings": [f"{name}={getattr(jax.config, name)}" for name in _SETTINGS],
        "the mesh": [str(dict(mesh.shape)), *ids],
        "the use of the mesh axes": [
            f"data axes {plan.data_axes}, {plan.sequence_order} sequences"
        ],
        "the level": [plan.level.name],
        "the plan": [*lines, *grads],
    }


@functools.cache
def _versions() -> list[str]:
    return [f"{name} {x}" for name, x in versions().items() if name in _LIBRARIES]


def _is_array(x: Any) -> bool:
    """Whether a leaf has values; an init function can have other arguments too."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def _form(x: Any) -> str:
    if not _is_array(x) and not isinstance(x, jax.ShapeDtypeStruct):
        return repr(x) if isinstance(x, str) else type(x).__name__
    dtype = jnp.result_type(x)
    return f"{dtype if is_key(x) else canonicalize_dtype(dtype)}{list(np.shape(x))}"


def checksum(x: Any) -> str:
    """A checksum of an array's values; empty if it has none here, or is global already."""
    if not _is_array(x) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return ""
    return f"{crc32(_host(x).reshape(-1).view(np.uint8).data):08x}"


def _host(x: Any) -> np.ndarray:
    if is_key(x):
        x = jax.random.key_data(x)
    return np.asarray(x, canonicalize_dtype(jnp.result_type(x)), order="C")


def _taken_from(source: int, leaves: Sequence[Any], chosen: Sequence[int], mesh: Mesh) -> list[Any]:
    """Returns the leaves, those that are chosen with the values of process `source`."""
    out = list(leaves)
    taken = broadcast([_host(leaves[i]) for i in chosen], source, mesh)
    for i, x in zip(chosen, taken, strict=True):
        out[i] = x
        if is_key(leaves[i]):
            impl = jax.random.key_impl(leaves[i])
            out[i] = jax.random.wrap_key_data(jnp.asarray(x), impl=impl)
    return out
