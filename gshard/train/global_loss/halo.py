"""Convolutions over a sharded sequence: each device gets a few positions of its neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from gshard._util.jaxpr import JIT, bind, body_of
from gshard.train.comm.examples import with_neighbors
from gshard.train.global_loss.placement import REPLICATED
from gshard.train.global_loss.registry import Decision, Given

_CONVOLUTION = "conv_general_dilated"


def convolution_over_positions(given: Given) -> Decision | None:
    """Of stride 1, where its padding keeps the length and neighbors have all positions it needs.

    Padding in front and behind is as long as the kernel without one position, dilated.
    """
    params, partition = given.params, given.partition
    numbers, (place, kernel) = params["dimension_numbers"], given.placements
    if given.evaluator.of_examples or kernel != REPLICATED or not place.is_sharded:
        return None
    if place.dim not in numbers.lhs_spec[2:] or place.outer != (2 if partition.zigzag else 1):
        return None
    at = numbers.lhs_spec[2:].index(place.dim)
    before, after = params["padding"][at]
    size = given.local(given.shapes[0], place)[place.dim] // place.outer
    reach = (given.shapes[1][numbers.rhs_spec[2 + at]] - 1) * params["rhs_dilation"][at]
    ones = params["window_strides"][at] == params["lhs_dilation"][at] == 1
    if not ones or min(before, after) < 0 or before + after != reach or max(before, after) > size:
        return None
    padding = [*params["padding"]]
    padding[at] = (0, 0)
    out_dim, axis = numbers.out_spec[2 + at], given.evaluator.axes[0]

    def run(values: list[Any]) -> list[Any]:
        x, kernel = values
        slices = with_neighbors(x, place.dim, before, after, axis, partition.zigzag)
        found = [bind(given.eqn, [x, kernel], padding=tuple(padding))[0] for x in slices]
        return [jnp.concatenate(found, out_dim) if len(found) > 1 else found[0]]

    return Decision(given.placements, [place.on(out_dim)], run=run)


def with_padding(jaxpr: Any) -> Any:
    """Returns a jaxpr in which convolutions pad by themselves what was padded with zeros for them.

    Flax pads by `jnp.pad` for `padding="CAUSAL"`, and the padded length is no multiple of anything.
    """
    if not any(eqn.primitive.name == _CONVOLUTION for eqn in jaxpr.eqns):
        return jaxpr
    eqns, padded = [], {}
    for eqn in jaxpr.eqns:
        config = _zeros_added(eqn)
        if config is not None:
            padded[eqn.outvars[0]] = eqn.invars[0], config
        x = eqn.invars[0] if eqn.primitive.name == _CONVOLUTION else None
        if x is not None and not isinstance(x, Literal) and x in padded:
            eqn = _padding_itself(eqn, *padded[x])
        eqns.append(eqn)
    used = {v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)}
    used |= {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    kept = [x for x in eqns if not x.outvars or x.outvars[0] not in padded.keys() - used]
    return jaxpr.replace(eqns=kept)


def _zeros_added(eqn: Any) -> Sequence[tuple[int, int, int]] | None:
    """The configuration of a `pad` with zeros, or of one in a `jit`; None for anything else."""
    value = eqn.invars[1] if len(eqn.invars) == 2 else None
    if not isinstance(value, Literal) or value.val != 0:
        return None
    if eqn.primitive.name == "pad":
        return eqn.params["padding_config"]
    if eqn.primitive.name != JIT:
        return None
    body, _ = body_of(eqn)
    if not body.eqns or body.eqns[-1].outvars != body.outvars:
        return None
    *casts, last = body.eqns
    if last.primitive.name != "pad" or last.invars[0] is not body.invars[0]:
        return None
    zeros = [body.invars[1], *(cast.outvars[0] for cast in casts)]
    if any(x.primitive.name != "convert_element_type" or x.invars[0] not in zeros for x in casts):
        return None
    return last.params["padding_config"] if last.invars[1] in zeros else None


def _padding_itself(eqn: Any, x: Any, config: Sequence[tuple[int, int, int]]) -> Any:
    """The same convolution of what was not padded yet, if it can pad that."""
    spec, params = eqn.params["dimension_numbers"].lhs_spec, eqn.params
    more = [config[dim] for dim in spec[2:]]
    if any(min(*entry) < 0 or entry[2] for entry in config) or min(map(min, params["padding"])) < 0:
        return eqn
    if any(config[dim][:2] != (0, 0) for dim in spec[:2]) or set(params["lhs_dilation"]) != {1}:
        return eqn
    padding = [(a + c, b + d) for (a, b), (c, d, _) in zip(params["padding"], more, strict=True)]
    padding = tuple((int(a), int(b)) for a, b in padding)
    return eqn.replace(invars=[x, eqn.invars[1]], params={**params, "padding": padding})
