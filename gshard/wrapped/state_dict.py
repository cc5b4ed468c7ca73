"""State dicts: full logical arrays by dotted name, and how they are set in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from os.path import commonprefix
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from gshard._util.arrays import is_key
from gshard._util.errors import GShardError, some, warn
from gshard._util.pytree import check_unique, flatten
from gshard._util.validation import shown
from gshard.distributed.agree import by_value, find_differences, first_difference
from gshard.sharding.group import data_group
from gshard.sharding.host_arrays import full_on_host
from gshard.sharding.layout import Layout, all_replicated
from gshard.sharding.mesh import make_mesh
from gshard.train.same_state import checksum

NamedArrays = dict[str, tuple[jax.Array, Layout]]  # arrays as stored


def state_dict(target: Any) -> dict[str, Any]:
    """Returns the state of a model or an optimizer, wrapped or not, as full NumPy arrays.

    Args:
      target: an NNX module or an `nnx.Optimizer`.

    Returns:
      Arrays by dotted path. Names and values do not depend on the level or on wrapping.

    Raises:
      GShardError: `target` is neither a model nor an optimizer of NNX.

    Example:
      >>> from flax import nnx
      >>> net = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
      >>> gshard.paddle.state_dict(net)["kernel"].shape
      (64, 32)
    """
    return full_values(_stored(target, "state_dict"))


def set_state_dict(target: Any, values: Any) -> None:
    """Sets a model or an optimizer, wrapped or not, to the values of a state dict.

    Args:
      target: an NNX module or an `nnx.Optimizer`, changed in place.
      values: what `state_dict` returned, or what `load` read back. Missing and unknown names give
        a warning for a model, and an error for an optimizer.

    Raises:
      GShardError: a value has another shape than the target's, or the names are not those of the
        optimizer. Nothing is changed.

    Example:
      >>> from flax import nnx
      >>> net, other = (nnx.Linear(64, 32, rngs=nnx.Rngs(seed)) for seed in (0, 1))
      >>> gshard.paddle.set_state_dict(other, gshard.paddle.state_dict(net))
      >>> bool((other.kernel[...] == net.kernel[...]).all())
      True
    """
    stored = _stored(target, "set_state_dict")
    if isinstance(target, nnx.Module):
        set_model(target, values, stored)
    else:
        check_optimizer_values(values, stored)
        set_values(target, values, stored)


def _stored(target: Any, call: str) -> NamedArrays:
    if hasattr(target, "_gshard_named"):
        return target._gshard_named()
    if isinstance(target, nnx.Optimizer):
        tree: Any = {"step": target.step.get_value(), "inner": nnx.as_pure(target.opt_state)}
    elif isinstance(target, nnx.Module):
        tree = nnx.as_pure(nnx.state(target))
    elif hasattr(target, call):
        raise GShardError(f"{call}: call target.{call}(...) of {type(target).__name__} instead.")
    else:
        raise GShardError(
            f"{call}: {shown(target)} is neither a model nor an optimizer of NNX. The variables of "
            "a Linen module are a tree already: save(variables, path)."
        )
    alone = data_group(make_mesh(devices=jax.devices()[:1]))
    return name_arrays((tree, all_replicated(tree, alone)))


def name_arrays(*pairs: tuple[Any, Any]) -> NamedArrays:
    """Returns the arrays of trees with their layouts, by dotted path; two must not be the same."""
    found = [
        (path.replace("/", "."), (x, layout))
        for tree, layouts in pairs
        for path, x, layout in zip(*flatten(tree)[:2], jax.tree.leaves(layouts), strict=True)
    ]
    check_unique([name for name, _ in found], "names of the state dict")
    return dict(found)


def full_values(stored: NamedArrays) -> dict[str, np.ndarray]:
    """Returns the logical values, gathered one after the other; for a PRNG key, its data."""
    full = {name: full_on_host(x, layout) for name, (x, layout) in stored.items()}
    return {
        name: np.asarray(jax.random.key_data(x) if is_key(x) else x) for name, x in full.items()
    }


def check(values: Any, stored: NamedArrays, what: str) -> tuple[list[str], list[str]]:
    """Returns the names that a state dict lacks, and its names that are not known.

    Raises:
      GShardError: `values` is not a state dict, or a value has another shape.
    """
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise GShardError(f"{what}: {shown(values)} is not a state dict, a mapping from names.")
    wrong = []
    for name, (x, layout) in stored.items():
        shape = jax.random.key_data(x).shape if is_key(x) else layout.shape
        if name in values and (error := misfit(values[name], shape, x.dtype)):
            wrong.append(f"{name} {error}")
    if wrong:
        raise GShardError(f"{what}: {some(wrong, most=3)}. Nothing was changed.")
    return [name for name in stored if name not in values], [n for n in values if n not in stored]


def misfit(value: Any, shape: tuple[int, ...], dtype: Any) -> str:
    """Says why a value cannot replace an array of this shape and dtype; empty if it can."""
    value = np.asarray(value)
    if not is_numeric(value):
        return "is not an array of numbers"
    if np.iscomplexobj(value) and not jnp.issubdtype(dtype, np.complexfloating):
        return "is complex"
    if jnp.issubdtype(dtype, np.integer):
        limits = jnp.iinfo(dtype)
        if np.any(np.asarray(value, np.float64) % 1):
            return f"has fractions, and {dtype} is wanted"
        if np.any((value < limits.min) | (value > limits.max)):
            return f"has numbers outside the range of {dtype}"
    return "" if value.shape == shape else f"has shape {value.shape}, and {shape} is wanted"


def is_numeric(x: np.ndarray) -> bool:
    """Whether an array contains numbers or booleans."""
    return jnp.issubdtype(x.dtype, np.number) or x.dtype == np.bool_


def differing_names(missing: list[str], unknown: list[str], whose: str) -> str:
    """Describes what `check` returned, for a message; empty if nothing differs."""
    both = [("it lacks", missing), (f"{whose} does not know", unknown)]
    return "; ".join(f"{what} {some(names)}" for what, names in both if names)


def advice_on_names(values: Mapping[str, Any], stored: NamedArrays) -> str:
    """Says what else a state dict is, or what can be done with it."""
    inner = [any(name.startswith("inner.") for name in names) for names in (values, stored)]
    if values.keys() >= {"state", "param_groups"} or inner == [True, False]:
        return " It is the state of an optimizer."
    modules = [name.removesuffix("weight") for name in values if name.endswith("weight")]
    if any(x + own in stored for x in modules for own in ("kernel", "scale", "embedding")):
        return (
            " Its names are another library's: weight is kernel, scale or embedding here. Rename "
            "them, and transpose the kernels of PyTorch's linear layers (Paddle's need no change)."
        )
    for name, entry in values.items():
        if isinstance(entry, Mapping) and stored.keys() & entry.keys():
            return f" Its entry {name!r} has such names: pass that entry."
        start, _, rest = name.partition(".")
        if name not in stored and rest in stored:
            short = f"{{name.removeprefix('{start}.'): x for name, x in state_dict.items()}}"
            return f" Its names begin with '{start}.', which the target's do not: pass {short}."
    return ""


def advice_on_strict(values: Mapping[str, Any], stored: NamedArrays) -> str:
    """`advice_on_names`, or that the names that both have can be set."""
    advice = advice_on_names(values, stored)
    if not advice and stored.keys() & values.keys():
        return " With strict=False the names that both have are set."
    return advice


def set_model(model: Any, values: Any, stored: NamedArrays) -> tuple[list[str], list[str]]:
    """Sets the arrays that both have, and warns of the others; returns the result of `check`."""
    missing, unknown = check(values, stored, "set_state_dict")
    advice = advice_on_names(values, stored)
    set_values(model, values, stored)
    if strange := differing_names(missing, unknown, "the model"):
        warn(f"set_state_dict: {strange}.{advice}")
    return missing, unknown


def check_optimizer_values(values: Any, stored: NamedArrays) -> None:
    """Raises a `GShardError` unless the state dict has exactly the optimizer's arrays."""
    found = check(values, stored, "set_state_dict of the optimizer")
    if strange := differing_names(*found, "this optimizer"):
        raise GShardError(
            f"set_state_dict: the state is another optimizer's: {strange}."
            f"{advice_on_names(values, stored)} Nothing was changed."
        )


def set_values(target: Any, values: Mapping[str, Any], stored: NamedArrays) -> None:
    """Sets Variables of a model or an optimizer one by one, in their layouts.

    `stored` is emptied, so that at most one value exists twice at a time.

    Raises:
      GShardError: a process gives other values than the others.
    """
    compare_values(values, stored)
    put_values(target, values, stored)


def compare_values(values: Mapping[str, Any], stored: NamedArrays) -> None:
    """Compares the values of all processes, since each sets its shards from its own.

    Raises:
      GShardError: a process gives other values than the others.
    """
    shardings = [getattr(x, "sharding", None) for x, _ in stored.values()]
    named = [x.mesh for x in shardings if isinstance(x, jax.NamedSharding)]
    meshes = [x for x in named if isinstance(x, Mesh)]
    if not meshes or not meshes[0].is_multi_process or jax.process_count() == 1:
        return
    dtypes = {name: np.uint32 if is_key(x) else x.dtype for name, (x, _) in stored.items()}
    given = ((name, np.asarray(values[name], dtypes[name])) for name in stored if name in values)
    refuse_different(given, meshes[0])


def refuse_different(values: Iterable[tuple[str, np.ndarray]], mesh: Mesh) -> None:
    """Raises a `GShardError` on all processes of a mesh if these values of theirs differ."""
    lines = [f"{name} (checksum {checksum(x)})" for name, x in values]
    if find_differences("values", {"values": lines}, mesh):
        given = by_value(first_difference(lines, mesh))
        raise GShardError(
            f"the processes set different values: {given}. Nothing was changed. Load the same file "
            "on every process, or send the values of process 0 to the others with "
            "jax.experimental.multihost_utils.broadcast_one_to_all."
        )


def put_values(target: Any, values: Mapping[str, Any], stored: NamedArrays) -> None:
    """As `set_values`, for values that need no comparison."""
    # Variables may have the same array, as after nnx.update(model.target, nnx.state(model.online)).
    at = defaultdict(list)
    for path, x in nnx.to_flat_state(nnx.state(target)):
        raw = x.get_raw_value() if isinstance(x, nnx.Variable) else x
        for i, (inner, leaf) in enumerate(zip(*flatten(raw)[:2], strict=True)):
            full = ".".join(map(str, (*path, *inner.split("/")))).rstrip(".")
            at[id(leaf)].append((full, path, x, i))
    for name in list(stored):
        old, layout = stored.pop(name)
        if name in values:
            places = at[id(old)]
            ends = [(_common_end(place[0], name), -len(place[0])) for place in places]
            _, path, variable, i = places.pop(ends.index(max(ends)))
            # A wrapped model's arrays may be elsewhere by now: they are put back.
            is_wrapped = hasattr(target, "_gshard_named")
            sharding = target.plan.sharding(layout) if is_wrapped else old.sharding
            new = _like(old, layout, np.asarray(values[name]), sharding)
            if isinstance(variable, nnx.Variable):
                leaves, structure = jax.tree.flatten(variable.get_raw_value())
                leaves[i] = new
                variable.set_raw_value(structure.unflatten(leaves))
            else:  # an array that is not in a Variable
                nnx.update(target, nnx.from_flat_state({path: new}))


def _common_end(path: str, name: str) -> int:
    """The length of what both end in: in an optimizer, `inner.x` is at `opt_state.x`."""
    return len(commonprefix([path[::-1], name[::-1]]))


def _like(old: Any, layout: Layout, value: np.ndarray, sharding: Any) -> jax.Array:
    if is_key(old):
        with jax.disable_jit(False):  # else JAX fails where it compares those of processes
            data = jax.device_put(value.astype(np.uint32), jax.random.key_data(old).sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))
    host = layout.pad(value.astype(old.dtype))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))
