"""Traces a loss inside the `shard_map` over the data axes, and removes its hints over these axes.

There every device has its own examples and full parameters, so that a sharding constraint over a
data axis says nothing, and JAX refuses it. A loss that JAX refuses there is traced as on a single
device: in the user's mesh, where axes that it lacks have size 1, or else without a mesh, where Flax
makes no constraints from names. `constraints` then moves it back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType

from gshard._util.errors import GShardError, warn
from gshard._util.jaxpr import abstract_like
from gshard._util.tracebacks import line_of_error
from gshard.sharding.padded_storage import explain_shapes, warn_of_padding
from gshard.sharding.topology import SEQUENCE
from gshard.train.fsdp.constraints import Change, bracketed, other_mesh, shard_map_error

_ABOUT_MESHES = re.compile(
    r"with_sharding_constraint|not found in mesh|\bshard_map\b|[Cc]ontext mesh|"
    "only valid for values of rank"
)
_EXPLICIT = re.compile(r"PartitionSpec passed to|AxisType is not allowed|under a mesh context")
_DIFFER = re.compile(r"must have (equal|identical) types")
_MISSING = re.compile(r"axis: (\S+) of (P\(.*?\)) is not found in mesh")
_MUTATED = re.compile(r"Cannot mutate (\w+) from a different trace level")  # Flax's
_UNBOUND = re.compile(r"unbound axis name: ([^\s.]+)")


def trace_loss(fun: Callable[..., Any], axes: Sequence[str], *args: Any) -> tuple[Any, Any]:
    """Returns the jaxpr of `fun(*args)` and its constants, and the shapes of its results.

    Runs inside a `shard_map` over the data axes `axes`. An axis name that nothing binds, such as
    that of a `BatchNorm(axis_name="batch")`, stands for those of the examples.
    """
    here = jax.sharding.get_abstract_mesh()
    model_axes = [name for name in here.axis_names if name not in axes]
    sizes = dict(zip(here.axis_names, here.axis_sizes, strict=True))
    unbound: dict[str, int] = {}
    places: list[str] = []  # of what is unbound
    missing: dict[str, Exception] = {}  # axes that the mesh lacks
    refused: list[Exception] = []
    examples = [axis for axis in axes if axis != SEQUENCE]
    mesh: AbstractMesh | None = None

    def next_mesh() -> AbstractMesh:
        return _mesh_of_user(here, missing) if mesh is None else AbstractMesh((), ())

    while True:
        is_last = mesh is not None and mesh.empty
        context = nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)
        make = jax.make_jaxpr(fun, axis_env=list(unbound.items()), return_shape=True)
        try:
            with context:
                closed, shapes = make(
                    *(args if mesh is None else jax.tree.map(abstract_like, args))
                )
            other = other_mesh(closed.jaxpr, here if mesh is None else mesh)
            if other is None or is_last:
                break
            refused.append(ValueError(f"the constraint is over {other}, which is another mesh"))
            mesh = next_mesh()
        except NameError as error:
            name = _UNBOUND.search(str(error))
            if name is None or name[1] in unbound:
                raise
            unbound[name[1]] = math.prod(sizes[axis] for axis in examples)
            places.append(f"the axis {name[1]!r}{_line_of(error)}")
        except (ValueError, RuntimeError) as error:
            if isinstance(error, GShardError):
                raise
            if not _ABOUT_MESHES.search(str(error)):
                explain_shapes(error)
                if _EXPLICIT.search(str(error)):
                    raise _explicit_refusal(error) from error
                raise
            if is_last:
                raise _refusal(refused, error, axes) from error
            name = _MISSING.search(str(error))
            if name is not None and name[1] not in missing:
                missing[name[1]] = error
                mesh = _mesh_of_user(here, missing)
            else:
                mesh = next_mesh()
            refused.append(error)
        except TypeError as error:  # types of a loop also differ by mesh, which JAX does not print
            if not _DIFFER.search(str(error)) or is_last:
                explain_shapes(error)
                raise
            refused.append(error)
            mesh = next_mesh()
        except Exception as error:
            if places:
                _warn_of_unbound(places, examples)
            if found := _MUTATED.search(str(error)):
                raise _mutation_refusal(found[1], error) from error
            explain_shapes(error)
            raise
    ignored = model_axes if is_last else []
    if places:
        _warn_of_unbound(places, examples)
    if missing:
        _warn_of_missing(list(missing.values()), ignored)
    if ignored and not missing and "passed to shard_map" not in str(refused[0]):
        _warn_of_ignored(refused[0], ignored)
    warn_of_padding(closed.consts)
    change = Change(tuple(axes), here, frozenset(unbound), mesh is not None)
    return (change(_without_unused(closed.jaxpr)), closed.consts), shapes


def _without_unused(jaxpr: Any) -> Any:
    """Leaves out the equations that no result needs, such as of metrics that a loss drops.

    Compilers do so too. They would be counted and refused, and taken for uses of a parameter.
    Bodies of calls stay as they are: some are recognized by their identity.
    """
    used = {v for v in jaxpr.outvars if isinstance(v, Var)}
    kept: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(v for v in eqn.invars if isinstance(v, Var))
            kept.append(eqn)
    return jaxpr.replace(eqns=kept[::-1])


def _mesh_of_user(here: AbstractMesh, missing: Sequence[str] | dict[str, Any]) -> AbstractMesh:
    """Returns the mesh outside of the `shard_map`, with missing axes of size 1."""
    names = (*here.axis_names, *missing)
    sizes = (*here.axis_sizes, *[1] * len(missing))
    types = tuple(AxisType.Auto if t == AxisType.Manual else t for t in here.axis_types)
    types = (*types, *[AxisType.Auto] * len(missing))
    return here.update(axis_sizes=sizes, axis_names=names, axis_types=types)


def _warn_of_unbound(places: Sequence[str], axes: Sequence[str]) -> None:
    names, it = ("this name", "it") if len(places) == 1 else ("these names", "each")
    warn(
        f"the loss communicates over {' and '.join(places)}, but no mesh axis has {names}: "
        f"gshard takes {it} to mean the data axes {tuple(axes)}. To say so explicitly, pass "
        "axis_name=plan.data_axes."
    )


def _warn_of_missing(errors: Sequence[Exception], ignored: Sequence[str]) -> None:
    """Warns of constraints over axes that the mesh lacks, and of ones over model axes."""
    found = [(x[1], f"{x[2]}{_line_of(e)}") for e in errors if (x := _MISSING.search(str(e)))]
    names = list(dict.fromkeys(repr(name) for name, _ in found))
    where = " and ".join(dict.fromkeys(place for _, place in found))
    what, that, the = ("constraint is", "that axis", "name")
    if len(names) > 1:
        what, that, the = ("constraints are", "these axes", "names")
    warn(
        f"the model constrains an array to {where}, and the mesh has no axis "
        f"{' or '.join(names)}: the {what} ignored.{_also_ignored(ignored)} Give the mesh {that} "
        f"(gshard.make_mesh({{{names[0]}: {jax.device_count()}}}) if it carries examples, else "
        f"extra=), or remove the {the} from the model."
    )


def _warn_of_ignored(error: Exception, ignored: Sequence[str]) -> None:
    warn(
        f"JAX refuses a sharding constraint inside the loss{_line_of(error)}."
        f"{_also_ignored(ignored)} To keep the constraints, leave data axes out of their names, "
        "and give a layer that flattens its kernel the names for the flat kernel. JAX says: "
        f"{error}"
    )


def _also_ignored(model_axes: Sequence[str]) -> str:
    if not model_axes:
        return ""
    return (
        " All constraints that Flax makes from names are ignored with it, including those over "
        f"{', '.join(model_axes)} alone; parameters keep their layouts."
    )


def _refusal(errors: Sequence[Exception], last: Exception, axes: Sequence[str]) -> GShardError:
    """Returns a readable error for a loss that JAX refuses with a mesh, and at last without one."""
    for one in (errors[0], last):
        if "shard_map" in str(one):
            return shard_map_error(_line_of(one), axes)
    return GShardError(
        f"JAX refuses a sharding constraint of the loss{_line_of(last)}, even without gshard. "
        f"gshard ignores the data axes {tuple(axes)} in it; the rest must fit the array. JAX says: "
        f"{errors[-1]}"
    )


def _explicit_refusal(error: Exception) -> GShardError:
    """Returns a readable error for a loss that is written for a mesh with explicit axes."""
    spec = re.search(r"P\(.*?\)", str(error))
    return GShardError(
        f"the loss asks for a sharding{f' {spec[0]}' if spec else ''}{_line_of(error)} with "
        "out_sharding=, jax.sharding.reshard or jax.sharding.auto_axes. These need mesh axes of "
        "type Explicit, and those of gshard are Auto. Leave it out, or turn off the sharding "
        "configuration of the model: gshard shards parameters and examples by itself. Activations "
        "can be sharded over axes without data by jax.lax.with_sharding_constraint."
    )


def _mutation_refusal(what: str, error: Exception) -> GShardError:
    """Returns a readable error for a loss that changes an NNX object outside of it."""
    return GShardError(
        f"the function changes what it closes over, the {what} of an NNX object{_line_of(error)}. "
        "The function runs only while JAX traces it, so such a change would be lost. Return the "
        "new values from the function (from a loss: as aux, with has_aux=True), and update the "
        "object after the step. Put an nnx.Rngs in the model."
    )


def _line_of(error: Exception) -> str:
    """` (file:line)` of the user's code that an error was raised from; empty where not known."""
    return bracketed(line_of_error(error))
