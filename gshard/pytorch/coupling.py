"""Checks in an optimizer's trace whether its result for one tensor depends on another tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import optax

from gshard._util.errors import GShardError, some, warn
from gshard._util.jaxpr import all_equations
from gshard._util.jaxpr_dataflow import flow, flow_inside
from gshard._util.pytree import flatten
from gshard.pytorch.state_dict import parameter_of

_RANDOM = ("random_", "threefry")
_Of = frozenset[int]  # positions of parameters
_NONE: _Of = frozenset()


def refuse_coupled(tx: optax.GradientTransformation, params: Any, name: str) -> None:
    """Refuses an optimizer that cannot update tensor by tensor; `params` are abstract."""
    jaxpr, wrong, where = _coupled(tx, params)
    random = [e for e in all_equations(jaxpr) if e.primitive.name.startswith(_RANDOM)]
    if random:
        raise GShardError(
            f"partition='greedy' updates each tensor on one device, but {name} draws random "
            f"numbers for all tensors together, in {_transform_of(random[0])}. Use "
            "partition='even'."
        )
    if wrong:
        raise GShardError(
            f"partition='greedy' updates each tensor on one device, but in {name} the result for "
            f"one tensor depends on others{where} ({some(wrong, most=2)}). Use partition='even', "
            "which matches single-device training; or clip the gradients before step()."
        )


def warn_of_coupled(tx: optax.GradientTransformation, params: Any, name: str) -> None:
    """Warns of an optimizer that couples tensors, given one of several parameter groups."""
    _, wrong, where = _coupled(tx, params)
    if wrong:
        warn(
            f"in {name} the result for one tensor depends on others{where}, and each parameter "
            "group is updated by itself, from its own gradients alone. If that is a clip by the "
            "global norm, it is by the norm of one group. To clip over all, clip between backward "
            "and step: clip = optax.clip_by_global_norm(1.0); model.grads, _ = "
            "clip.update(model.grads, clip.init(None)). Or use one group, with mask= of "
            "optax.adamw for weight decay."
        )


def _coupled(tx: optax.GradientTransformation, params: Any) -> tuple[Any, list[str], str]:
    """Returns the jaxpr of an update, results that depend on other tensors, and by what."""
    state = jax.eval_shape(tx.init, params)
    closed, out = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    each = [frozenset({i}) for i in range(len(jax.tree.leaves(params)))]

    def of_state(tree: Any) -> list[_Of]:
        return [_NONE if i is None else each[i] for i in parameter_of(tree, params)]

    blame: list[str] = []
    found = dependence(closed.jaxpr, [*each, *of_state(state), *each], blame)
    allowed = [*each, *of_state(out[1])]
    pairs = zip(flatten(out)[0], found, allowed, strict=True)
    wrong = [path for path, has, may in pairs if not has <= may]
    return closed.jaxpr, wrong, f", in {blame[0]}" if blame else ""


def dependence(jaxpr: Any, inputs: Sequence[_Of], blame: list[str]) -> list[_Of]:
    """Returns what each output depends on; `blame` gets the first operation that couples two."""
    return flow(jaxpr, inputs, partial(_through, blame), _NONE)


def _through(blame: list[str], eqn: Any, given: list[_Of]) -> list[_Of]:
    name = eqn.primitive.name
    if name != "while":
        follow = partial(dependence, blame=blame)
        outs = flow_inside(eqn, given, follow, _NONE.union)
        if outs is not None:
            return [given[0] | of for of in outs] if name == "cond" else outs
    together = _NONE.union(*given)
    if len(together) > 1 and all(len(of) < 2 for of in given) and not blame:
        blame.append(_transform_of(eqn))
    return [together] * len(eqn.outvars)


def _transform_of(eqn: Any) -> str:
    """Returns the name of the optax transformation whose update made an equation."""
    frames = getattr(eqn.source_info.traceback, "frames", [])
    for frame in frames:
        outer, _, last = frame.function_name.rpartition(".")
        if outer and "update" in last:  # a function of a transformation, or a method
            return outer.split(".<locals>")[0]
    return frames[0].function_name if frames else eqn.primitive.name
