"""Traces a loss inside the `shard_map` over the data axes, and removes its hints over these axes.

There every device has its own examples and full parameters, so that a sharding constraint over a
data axis says nothing, and JAX refuses it. A loss that JAX refuses in the context of the mesh is
traced without one, as on a single device: Flax then makes no constraints from names. Constraints
that carry a mesh of their own (`NamedSharding`) are rewritten.
"""

from __future__ import annotations

import dataclasses
import math
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from gshard._util.errors import GShardError, warn
from gshard._util.jaxpr import all_equations, is_library, user_line, with_inner
from gshard.sharding.mesh import entry_axes

_ABOUT_MESHES = re.compile(
    r"with_sharding_constraint|not found in mesh|\bshard_map\b|context mesh|values of rank"
)
_EXPLICIT = re.compile(r"PartitionSpec passed to|AxisType is not allowed|under a mesh context")
_MISSING = re.compile(r"axis: (\S+) of (P\(.*?\)) is not found in mesh")
_UNBOUND = re.compile(r"unbound axis name: ([^\s.]+)")


def trace_loss(fun: Callable[..., Any], axes: Sequence[str], *args: Any) -> tuple[Any, Any]:
    """Returns the jaxpr of `fun(*args)` and its constants, and the shapes of its results.

    Runs inside a `shard_map` over the data axes `axes`. An axis name that nothing binds, such as
    that of a `BatchNorm(axis_name="batch")`, stands for all of them.
    """
    here = jax.sharding.get_abstract_mesh()
    sizes = dict(zip(here.axis_names, here.axis_sizes, strict=True))
    unbound: dict[str, int] = {}
    refused: Exception | None = None
    while True:
        context = nullcontext() if refused is None else _no_mesh()
        make = jax.make_jaxpr(fun, axis_env=list(unbound.items()), return_shape=True)
        try:
            with context:
                closed, shapes = make(*args)
            break
        except NameError as error:
            name = _UNBOUND.search(str(error))
            if name is None or name[1] in unbound:
                raise
            unbound[name[1]] = math.prod(sizes[axis] for axis in axes)
            _warn_of_unbound(name[1], axes, _line_of(error))
        except (ValueError, RuntimeError) as error:
            if isinstance(error, GShardError):
                raise
            if not _ABOUT_MESHES.search(str(error)):
                if _EXPLICIT.search(str(error)):
                    raise _explicit_refusal(error) from error
                raise
            if refused is not None:
                raise _refusal(refused, error, axes) from error
            refused = error
    if refused is not None:
        _warn_of_ignored(refused, [name for name in here.axis_names if name not in axes])
    change = _Change(tuple(axes), here, frozenset(unbound))
    if any(change.applies(eqn) for eqn in all_equations(closed.jaxpr)):
        return (_rewritten(closed.jaxpr, change), closed.consts), shapes
    return (closed.jaxpr, closed.consts), shapes


def _no_mesh() -> Any:
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


@dataclasses.dataclass(frozen=True)
class _Change:
    """What becomes of an equation of the loss that refers to the mesh."""

    axes: tuple[str, ...]  # the data axes
    mesh: AbstractMesh  # in the context of the `shard_map` over them
    unbound: frozenset[str]  # names that stand for all data axes

    def applies(self, eqn: Any) -> bool:
        """Whether the equation changes; refuses a `shard_map` that cannot be."""
        if eqn.primitive.name == "shard_map":
            _check_shard_map(eqn, self.axes)
            return False
        named = self._constrained(eqn)
        return bool(named & set(self.axes)) or bool(self.unbound & set(_names(eqn)))

    def __call__(self, eqn: Any) -> Any:
        """Returns the changed equation; None for one whose operand is its result."""
        if not self.applies(eqn):
            return eqn
        params = dict(eqn.params)
        if eqn.primitive.name == "sharding_constraint":
            if not self._constrained(eqn) - set(self.axes):
                return None
            old = params["sharding"]
            spec = jax.P(*(self._without_data_axes(entry) for entry in old.spec))
            params |= {"sharding": NamedSharding(old.mesh, spec), "context_mesh": self.mesh}
        else:
            if eqn.primitive.name == "axis_index" and len(self.axes) > 1:
                raise GShardError(
                    f"the loss takes its index along {_names(eqn)[0]!r}"
                    f"{_bracketed(user_line(eqn))}, and the mesh has several data axes: use "
                    f"jax.lax.axis_index({self.axes})."
                )
            params |= {k: self._bound(params[k]) for k in ("axes", "axis_name") if k in params}
        return eqn.replace(params=params)

    def of_effect(self, effect: Any) -> list[Any]:
        """Returns an effect of a jaxpr, for every axis that its name stands for."""
        if getattr(effect, "name", None) not in self.unbound:
            return [effect]
        return [dataclasses.replace(effect, name=axis) for axis in self.axes]

    def _constrained(self, eqn: Any) -> set[str]:
        sharding = eqn.params.get("sharding")
        if eqn.primitive.name != "sharding_constraint" or not isinstance(sharding, NamedSharding):
            return set()
        return {axis for entry in sharding.spec for axis in entry_axes(entry)}

    def _without_data_axes(self, entry: Any) -> Any:
        rest = tuple(axis for axis in entry_axes(entry) if axis not in self.axes)
        return rest if len(rest) < len(entry_axes(entry)) else entry

    def _bound(self, names: Any) -> Any:
        if not isinstance(names, (tuple, list)):
            several = self.axes if len(self.axes) > 1 else next(iter(self.axes))
            return several if names in self.unbound else names
        every = [self.axes if name in self.unbound else (name,) for name in names]
        return tuple(name for several in every for name in several)


def _names(eqn: Any) -> tuple[Any, ...]:
    """The axis names of a collective; () for anything else."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def _rewritten(jaxpr: Any, change: _Change) -> Any:
    """Returns a jaxpr, which is not closed, with changed equations, also of inner jaxprs."""
    known: dict[Any, Any] = {}

    def read(variables: Sequence[Any]) -> list[Any]:
        return [known.get(v, v) if isinstance(v, Var) else v for v in variables]

    def inside(value: Any) -> Any:
        if hasattr(value, "jaxpr") and hasattr(value, "consts"):
            return value.replace(jaxpr=_rewritten(value.jaxpr, change))
        if hasattr(value, "eqns"):
            return _rewritten(value, change)
        return type(value)(map(inside, value)) if type(value) in (tuple, list) else value

    eqns = []
    for eqn in jaxpr.eqns:
        new = change(eqn.replace(invars=read(eqn.invars)))
        if new is None:
            known[eqn.outvars[0]] = read(eqn.invars)[0]
        else:
            eqns.append(new.replace(params={k: inside(x) for k, x in new.params.items()}))
    effects = {new for effect in jaxpr.effects for new in change.of_effect(effect)}
    return jaxpr.replace(eqns=eqns, outvars=read(jaxpr.outvars), effects=effects)


def _warn_of_unbound(name: str, axes: Sequence[str], line: str) -> None:
    warn(
        f"the loss communicates over the axis {name!r}{line}, which no mesh axis is called: it "
        f"stands for the data axes {tuple(axes)}. To say so yourself, pass "
        "axis_name=plan.data_axes."
    )


def _warn_of_ignored(error: Exception, model_axes: Sequence[str]) -> None:
    """Warns of a constraint over an axis that the mesh lacks, and of ones over model axes."""
    missing, others = _MISSING.search(str(error)), ""
    if model_axes:
        others = (
            " With it all are ignored that Flax makes from names, also those over "
            f"{', '.join(model_axes)} alone; parameters keep their layouts."
        )
    if missing:
        warn(
            f"the model constrains an array to {missing[2]}{_line_of(error)}, and the mesh has no "
            f"axis {missing[1]!r}: the constraint is ignored.{others} Give the mesh that axis "
            f"(gshard.make_mesh({{{missing[1]!r}: 8}}) if it carries examples, else extra=), or "
            "remove the name from the model."
        )
    elif model_axes and "shard_map" not in str(error):
        warn(
            f"JAX refuses a sharding constraint inside the loss{_line_of(error)}.{others} To keep "
            "those, leave data axes out of the names, and give a layer that flattens its kernel "
            f"the names of the flat one. JAX says: {error}"
        )


def _refusal(first: Exception, error: Exception, axes: Sequence[str]) -> GShardError:
    """Returns a readable error for a loss that JAX refuses with and without a mesh."""
    for one in (first, error):
        if "shard_map" in str(one):
            return _shard_map_refusal(_line_of(one), axes)
    spec = re.search(r"P\(.*?\)", str(first))
    return GShardError(
        f"the loss constrains a sharding to {spec[0] if spec else 'a PartitionSpec'}"
        f"{_line_of(error)}. Inside the loss every device has its own examples and full "
        f"parameters: there is nothing to constrain over the data axes {tuple(axes)}. Remove the "
        "constraint, name only axes that carry no data, or constrain to a "
        "NamedSharding(mesh, spec), of which data axes are ignored."
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


def _check_shard_map(eqn: Any, axes: Sequence[str]) -> None:
    """Refuses a `shard_map` over data axes, or in another mesh than that of the context."""
    mesh = eqn.params["mesh"]
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ()))
    if set(manual) & set(axes) or any(kinds.get(a) != AxisType.Manual for a in axes):
        lines = map(user_line, with_inner(eqn))  # in a `jit` its own has no frames
        raise _shard_map_refusal(_bracketed(next(filter(None, lines), "")), axes)


def _shard_map_refusal(line: str, axes: Sequence[str]) -> GShardError:
    return GShardError(
        f"the loss calls jax.shard_map{line} over a data axis {tuple(axes)}, or with mesh=. Inside "
        "the loss every device has its own examples and full parameters: call the function itself. "
        "Over your own axes leave out mesh=, which is known there: jax.shard_map(..., "
        'axis_names={"model"}).'
    )


def _line_of(error: Exception) -> str:
    """` (file:line)` of the user's code that an error was raised from; empty where not known."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    return _bracketed(f"{own[-1].filename}:{own[-1].lineno}" if own else "")


def _bracketed(line: str) -> str:
    return f" ({line})" if line else ""
