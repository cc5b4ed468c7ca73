"""Removes a loss's hints over data axes, and moves what it says of model axes to the mesh here.

The loss runs inside a `shard_map` over the data axes, where a sharding constraint over a data axis
says nothing, and JAX refuses it. `trace_loss` may therefore trace it in another mesh; then every
variable and equation moves to this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from gshard._util.custom_calls import CUSTOM, inputs_like, rebuilt
from gshard._util.errors import GShardError
from gshard._util.jaxpr import all_equations, primitives, user_line, with_inner
from gshard.sharding.group import entry_axes
from gshard.sharding.topology import SEQUENCE

_CONSTRAINT = "sharding_constraint"


@dataclasses.dataclass(frozen=True)
class Change:
    """What becomes of an equation of the loss that refers to the mesh.

    Attributes:
      axes: the data axes.
      mesh: in the context of the `shard_map` over them.
      unbound: names that stand for the axes of the examples.
      moved: whether the loss was traced in another mesh.
      hints: whether functions with their own derivative may have hints in it.
    """

    axes: tuple[str, ...]
    mesh: AbstractMesh
    unbound: frozenset[str]
    moved: bool
    hints: bool = False

    @property
    def examples(self) -> tuple[str, ...]:
        """The data axes that examples are sharded over."""
        return tuple(axis for axis in self.axes if axis != SEQUENCE)

    def __call__(self, jaxpr: Any) -> Any:
        """Returns a jaxpr, which is not closed, with changed equations.

        Raises:
          GShardError: it has a `shard_map` over data axes, or takes an index along several.
        """
        every = ((eqn, outer) for outer in jaxpr.eqns for eqn in with_inner(outer))
        found = [eqn for eqn, outer in every if self.applies(eqn, outer)]
        if not found and not self.moved:
            return jaxpr
        hints = self.moved or any(_spec_of(eqn) is not None for eqn in found)
        return _rewritten(jaxpr, dataclasses.replace(self, hints=self.hints or hints))

    def applies(self, eqn: Any, outer: Any = None) -> bool:
        """Whether the equation itself changes; refuses a `shard_map` that cannot be.

        `outer` is the equation of the loss that it is in.
        """
        if eqn.primitive.name == "shard_map":
            self._check_shard_map(eqn, outer)
        spec = _spec_of(eqn)
        if spec is not None:
            return self.moved or bool(_axes_of(spec) - self._kept)
        return bool(self.unbound) and not self.unbound.isdisjoint(_names(eqn))

    def of(self, eqn: Any) -> Any:
        """Returns the changed equation; None for one whose operand is its result."""
        params = dict(eqn.params)
        spec = _spec_of(eqn)
        if not self.applies(eqn):
            return eqn
        if spec is not None:
            if _axes_of(spec) and not _axes_of(spec) & self._kept:
                return None
            params |= {"sharding": self._here(spec), "context_mesh": self.mesh}
        else:
            if eqn.primitive.name == "axis_index" and len(self.examples) > 1:
                raise GShardError(
                    f"the loss calls jax.lax.axis_index({_names(eqn)[0]!r})"
                    f"{bracketed(user_line(eqn))}, but the mesh has several data axes: use "
                    f"jax.lax.axis_index({self.examples})."
                )
            params |= {k: self._bound(params[k]) for k in ("axes", "axis_name") if k in params}
        return eqn.replace(params=params)

    def of_effect(self, effect: Any) -> list[Any]:
        """Returns an effect of a jaxpr, for every axis that its name stands for."""
        if getattr(effect, "name", None) not in self.unbound:
            return [effect]
        return [dataclasses.replace(effect, name=axis) for axis in self.examples]

    def inside(self, eqn: Any) -> Change:
        """Returns the change of the equation's inner jaxprs."""
        if eqn.primitive.name != "shard_map":
            return self
        manual = _manual(eqn)
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        types = tuple(AxisType.Manual if name in manual else kind for name, kind in kinds)
        return dataclasses.replace(self, mesh=self.mesh.update(axis_types=types))

    def of_mesh(self, value: Any) -> Any:
        """Returns a mesh, or a sharding, as it is here; anything else as it is."""
        if isinstance(value, NamedSharding):
            return self._here(value.spec)
        return self.mesh if isinstance(value, (AbstractMesh, Mesh)) else value

    def _here(self, spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, jax.P(*map(self._of_model_axes, spec)))

    @property
    def _kept(self) -> set[str]:
        """The model axes that a constraint may name."""
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return {name for name, kind in kinds if kind != AxisType.Manual} - set(self.axes)

    def _of_model_axes(self, entry: Any) -> Any:
        rest = tuple(axis for axis in entry_axes(entry) if axis in self._kept)
        return rest if len(rest) < len(entry_axes(entry)) else entry

    def _bound(self, names: Any) -> Any:
        if not isinstance(names, (tuple, list)):
            several = self.examples if len(self.examples) > 1 else next(iter(self.examples))
            return several if names in self.unbound else names
        every = [self.examples if name in self.unbound else (name,) for name in names]
        return tuple(name for several in every for name in several)

    def _check_shard_map(self, eqn: Any, outer: Any) -> None:
        """Refuses a `shard_map` over data axes, or over axes that the mesh lacks."""
        mesh, sizes = eqn.params["mesh"].shape, self.mesh.shape
        if _manual(eqn) & set(self.axes) or any(mesh[a] != sizes.get(a) for a in _manual(eqn)):
            # in a `jit` its own has no frames
            lines = (user_line(x) for x in (*with_inner(eqn), outer) if x is not None)
            raise shard_map_error(bracketed(next(filter(None, lines), "")), self.axes)


def shard_map_error(line: str, axes: Sequence[str]) -> GShardError:
    """The error for a `shard_map` in the loss that is not over model axes alone."""
    return GShardError(
        f"the loss calls jax.shard_map{line} over a data axis {tuple(axes)}, or in another mesh "
        "than that of the plan. Inside the loss every device has its own examples and full "
        "parameters: call the function without shard_map. For your own axes name them: "
        'jax.shard_map(..., axis_names={"model"}).'
    )


def bracketed(line: str) -> str:
    """` (line)`; empty where it is not known."""
    return f" ({line})" if line else ""


def other_mesh(jaxpr: Any, here: AbstractMesh) -> AbstractMesh | None:
    """The mesh of the first constraint whose result has a mesh other than this in its type.

    JAX accepts it, and may refuse what is computed from it, such as the gradient of a `relu`.
    """
    for eqn in all_equations(jaxpr) if _CONSTRAINT in primitives(jaxpr) else ():
        if _spec_of(eqn) is not None:
            mesh = eqn.outvars[0].aval.sharding.mesh
            if not mesh.empty and mesh != here:
                return mesh
    return None


def _manual(eqn: Any) -> set[str]:
    """The axes that a `shard_map` is over."""
    return set(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ())))


def _spec_of(eqn: Any) -> Any:
    """The `PartitionSpec` of a sharding constraint, if it is one of a mesh."""
    if eqn.primitive.name != _CONSTRAINT:
        return None
    sharding = eqn.params["sharding"]
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def _axes_of(spec: Any) -> set[str]:
    return {axis for entry in spec for axis in entry_axes(entry)}


def _names(eqn: Any) -> tuple[Any, ...]:
    """The axis names of a collective; () for anything else."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def _rewritten(jaxpr: Any, change: Change) -> Any:
    """Returns a jaxpr, which is not closed, with changed equations, also of inner jaxprs."""
    known = _moved(jaxpr, change.mesh) if change.moved else {}

    def read(variables: Sequence[Any]) -> list[Any]:
        return [_number(v) if isinstance(v, Literal) else known.get(v, v) for v in variables]

    def rewritten(value: Any, change: Change) -> Any:
        if hasattr(value, "jaxpr") and hasattr(value, "consts"):
            return value.replace(jaxpr=_rewritten(value.jaxpr, change))
        if hasattr(value, "eqns"):
            return _rewritten(value, change)
        if type(value) in (tuple, list):
            return type(value)(rewritten(x, change) for x in value)
        return change.of_mesh(value) if change.moved else value

    eqns = []
    for eqn in jaxpr.eqns:
        new = change.of(eqn.replace(invars=read(eqn.invars)))
        if new is None:
            known[eqn.outvars[0]] = read(eqn.invars)[0]
            continue
        inside = change.inside(eqn)
        params = {k: rewritten(x, change if k == "mesh" else inside) for k, x in new.params.items()}
        new = new.replace(params=params, outvars=read(eqn.outvars))
        eqns.append(_in_context(eqn, new, change) if change.hints else new)
    effects = {new for effect in jaxpr.effects for new in change.of_effect(effect)}
    ends = {name: read(getattr(jaxpr, name)) for name in ("constvars", "invars", "outvars")}
    return jaxpr.replace(eqns=eqns, effects=effects, **ends)


def _moved(jaxpr: Any, mesh: AbstractMesh) -> dict[Var, Var]:
    """Returns variables in the context of this mesh for those of a jaxpr."""
    old = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]

    def moved(aval: Any) -> Any:
        return aval.update(sharding=NamedSharding(mesh, aval.sharding.spec))

    return {v: Var(moved(v.aval)) for v in old if hasattr(v.aval, "sharding")}


def _number(literal: Literal) -> Literal:
    """Returns a literal that is in no mesh."""
    if isinstance(literal.val, (bool, int, float, complex)):
        return literal
    return Literal(np.array(literal.val), literal.aval)


def _in_context(old: Any, new: Any, change: Change) -> Any:
    """Returns a changed equation for the context of this mesh."""
    with old.ctx.manager, jax.sharding.use_abstract_mesh(change.mesh):
        if old.primitive.name in CUSTOM:  # its derivative is traced when it is needed
            avals = inputs_like([x.aval for x in new.invars])
            found = jax.make_jaxpr(rebuilt(old, change))(*avals).jaxpr.eqns
        else:
            found = jax.make_jaxpr(lax.neg)(0.0).jaxpr.eqns
    params = found[0].params if old.primitive.name in CUSTOM else new.params
    return new.replace(params=params, ctx=found[0].ctx)
