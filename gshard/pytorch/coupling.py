"""Checks in an optimizer's trace whether its result for one tensor depends on another tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import optax

from gshard._util.errors import GShardError, some
from gshard._util.jaxpr import all_equations
from gshard._util.jaxpr_dataflow import flow, flow_inside
from gshard._util.pytree import flatten
from gshard.pytorch.state_dict import parameter_of

_RANDOM = ("random_", "threefry")
_Of = frozenset[int]
_NOBODY: _Of = frozenset()


def refuse_coupled(tx: optax.GradientTransformation, params: Any, name: str) -> None:
    """Refuses an optimizer that cannot run tensor by tensor, and says what couples the tensors.

    Args:
      tx: the optimizer.
      params: the abstract parameters.
      name: the name of the optimizer, for the message.

    Raises:
      GShardError: an update, or the state of one parameter, depends on another parameter.
    """
    names = flatten(params)[0]
    state = jax.eval_shape(tx.init, params)
    closed, out = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
    each = [frozenset({i}) for i in range(len(names))]

    def of_state(tree: Any) -> list[_Of]:
        found = parameter_of(tree, params)
        return [_NOBODY if i is None else frozenset({i}) for i in found]

    drawn = [e for e in all_equations(closed.jaxpr) if e.primitive.name.startswith(_RANDOM)]
    if drawn:
        raise GShardError(
            f"partition='greedy' updates every tensor on one device alone, and {name} draws random "
            f"numbers for all together, in {_transform_of(drawn[0])}. Take partition='even'."
        )
    inputs = [*each, *of_state(state), *each]
    blame: list[str] = []
    found = dependence(closed.jaxpr, inputs, blame)
    allowed = [*each, *of_state(out[1])]
    wrong = [
        flatten(out)[0][i]
        for i, (has, may) in enumerate(zip(found, allowed, strict=True))
        if not has <= may
    ]
    if wrong:
        by = f", in {blame[0]}" if blame else ""
        raise GShardError(
            f"partition='greedy' updates every tensor on one device alone, and in {name} the "
            f"result for one depends on others{by} ({some(wrong, most=2)}). Take "
            "partition='even', which computes what one device does; or clip the gradients before "
            "step()."
        )


def dependence(jaxpr: Any, inputs: Sequence[_Of], blame: list[str]) -> list[_Of]:
    """Returns what each output depends on; `blame` gets the first operation that couples two."""
    return flow(jaxpr, inputs, partial(_through, blame), _NOBODY)


def _through(blame: list[str], eqn: Any, given: list[_Of]) -> list[_Of]:
    name = eqn.primitive.name
    if name != "while":
        follow = partial(dependence, blame=blame)
        outs = flow_inside(eqn, given, follow, _NOBODY.union)
        if outs is not None:
            return [given[0] | of for of in outs] if name == "cond" else outs
    together = _NOBODY.union(*given)
    if len(together) > 1 and all(len(of) < 2 for of in given) and not blame:
        blame.append(_transform_of(eqn))
    return [together] * len(eqn.outvars)


def _transform_of(eqn: Any) -> str:
    """Returns the name of the optax transformation whose update made an equation."""
    frames = getattr(eqn.source_info.traceback, "frames", [])
    for frame in frames:
        outer, inside, _ = frame.function_name.partition(".<locals>.")
        if inside and "update" in frame.function_name:
            return outer
    return frames[0].function_name if frames else eqn.primitive.name
