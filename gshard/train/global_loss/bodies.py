"""Rules of equations with a body: loops, branches, rematerialization and `shard_map`.

The body is rebuilt from its own rules. What a loop carries keeps one placement for all iterations:
the first that its body gives back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gshard._util.jaxpr import CHECKPOINT, body_of, evaluate, opened, scan_sizes
from gshard.sharding.group import entry_axes
from gshard.train.comm.examples import extreme_of_examples
from gshard.train.global_loss.decide import placements_of
from gshard.train.global_loss.own_collectives import check_body_as_traced
from gshard.train.global_loss.placement import (
    PARTIAL,
    REPLICATED,
    Placement,
    agree,
    first_sharded,
)
from gshard.train.global_loss.registry import Decision, Evaluator, Given, rule


def _joined(given: Given, shape: Sequence[int], one: Placement, other: Placement) -> Placement:
    """Returns a placement that both can be converted to without a gather, where there is one."""
    if one == other:
        return one
    slices = [p for p in (one, other) if p.is_sharded]
    if not slices:
        return PARTIAL
    alone = len(slices) == 1 and PARTIAL not in (one, other)
    return slices[0] if alone and given.partition.fits(shape, slices[0]) else REPLICATED


def _carried(
    given: Given,
    body: Any,
    fixed: Sequence[Placement],
    carry: Sequence[Placement],
    scanned: Sequence[Placement] = (),
) -> tuple[list[Placement], list[Placement]]:
    """Returns placements of the carry that every iteration keeps, and those of other results.

    A value moves from replicated to sharded or partial, and from there to replicated for good.
    """
    carry, settled = list(carry), set[int]()
    while True:
        outs, _ = placements_of(given.evaluator, body, [*fixed, *carry, *scanned])
        new = []
        for i, (old, out) in enumerate(zip(carry, outs, strict=False)):
            joined = (
                REPLICATED if i in settled else _joined(given, body.outvars[i].aval.shape, old, out)
            )
            if old != REPLICATED and joined == REPLICATED:
                settled.add(i)
            new.append(joined)
        if new == carry:
            return carry, outs[len(carry) :]
        carry = new


@rule("scan")
def scan(given: Given) -> Decision | None:
    """The scanned dimension is replicated, unless every iteration works on a part by itself."""
    body, consts = body_of(given.eqn)
    fixed, carried, _ = scan_sizes(given.eqn)
    first = fixed + carried
    consts_at, carry_at = given.placements[:fixed], given.placements[fixed:first]
    scanned_at = given.placements[first:]
    if any(p.is_sharded and p.dim == 0 for p in scanned_at):
        return _map_of_parts(given, fixed, carried)
    inside = [p.on(p.dim - 1) if p.is_sharded else p for p in scanned_at]
    carry_at, out_at = _carried(given, body, consts_at, carry_at, inside)
    options = {name: given.params[name] for name in ("length", "reverse", "unroll")}
    evaluator = given.evaluator

    def run(values: list[Any]) -> list[Any]:
        def step(carry: Any, x: Any) -> Any:
            arrays = [*values[:fixed], *carry, *x]
            places = [*consts_at, *carry_at, *inside]
            out = evaluator.arrays(body, consts, places, arrays, [*carry_at, *out_at])
            return out[:carried], out[carried:]

        with evaluator.repeated(given.params["length"]):
            carry, out = lax.scan(step, values[fixed:first], values[first:], **options)
        return [*carry, *out]

    stacked = [p.on(p.dim + 1) if p.is_sharded else p for p in out_at]
    return Decision([*consts_at, *carry_at, *scanned_at], [*carry_at, *stacked], run=run)


def _map_of_parts(given: Given, fixed: int, carried: int) -> Decision | None:
    """`lax.map` over examples or slices, also with running sums: each part runs its iterations."""
    first = fixed + carried
    others, sums, scanned = (
        given.placements[start:stop] for start, stop in ((0, fixed), (fixed, first), (first, None))
    )
    place = first_sharded(scanned)
    body, consts = body_of(given.eqn)
    if any(p != REPLICATED for p in others) or not agree(scanned, place):
        return None
    if PARTIAL in scanned or any(p.is_sharded for p in sums):
        return None
    if not all(_is_running_sum(body, fixed + i, i) for i in range(carried)):
        return None
    check_body_as_traced(given, of_examples=True)
    options = {name: given.params[name] for name in ("reverse", "unroll")}

    def run(values: list[Any]) -> list[Any]:
        def step(carry: list[Any], x: Any) -> Any:
            out = evaluate(body, consts, [*values[:fixed], *carry, *x])
            return out[:carried], out[carried:]

        length = given.params["length"] // given.partition.parts
        carry, out = lax.scan(step, values[fixed:first], values[first:], length=length, **options)
        return [*carry, *out]

    partial = [PARTIAL] * carried
    results = [*partial, *[place] * (len(given.eqn.outvars) - carried)]
    return Decision([*others, *partial, *[place] * len(scanned)], results, run=run)


def _is_running_sum(body: Any, at: int, result: int) -> bool:
    """Whether an iteration only adds to this operand, and does not use it otherwise."""
    variable = body.invars[at]
    if not jnp.issubdtype(variable.aval.dtype, jnp.number):
        return False
    while True:
        uses = [eqn for eqn in body.eqns if any(v is variable for v in eqn.invars)]
        if len(uses) != 1 or sum(v is variable for v in body.outvars):
            return False
        (eqn,) = uses
        if eqn.primitive.name != "convert_element_type":
            break
        # To the same dtype a loop converts what it carries, if that began as a Python number.
        if eqn.outvars[0].aval.dtype != variable.aval.dtype:
            return False
        (variable,) = eqn.outvars
    adds = eqn.primitive.name in ("add", "add_any")
    once = sum(v is variable for v in eqn.invars) == 1
    last = eqn.outvars[0] is body.outvars[result]
    uses_after = any(eqn.outvars[0] is v for x in body.eqns for v in x.invars)
    returned = sum(v is eqn.outvars[0] for v in body.outvars)
    return adds and once and last and not uses_after and returned == 1


@rule("while")
def while_(given: Given) -> Decision | None:
    """The condition is replicated, so that all devices run as many iterations.

    `jax.vmap` makes loops whose examples stop one by one: each device loops for its own.
    """
    params, evaluator = given.params, given.evaluator
    test, test_consts = opened(params["cond_jaxpr"])
    body, body_consts = opened(params["body_jaxpr"])
    n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_test, of_body = given.placements[:n], given.placements[n:m]
    carry_at, _ = _carried(given, body, of_body, given.placements[m:])
    place, dims = REPLICATED, tuple(range(len(test.outvars[0].aval.shape)))
    if dims:
        (place,), _ = placements_of(evaluator, test, [*of_test, *carry_at])
        carry_at = [place] * len(carry_at)
        if not place.is_sharded or _carried(given, body, of_body, carry_at)[0] != carry_at:
            return None

    def run(values: list[Any]) -> Any:
        def active(carry: Any) -> Any:
            arrays, places = [*values[:n], *carry], [*of_test, *carry_at]
            return evaluator.arrays(test, test_consts, places, arrays, [place])[0]

        def step(carry: Any) -> Any:
            arrays, places = [*values[n:m], *carry], [*of_body, *carry_at]
            new = evaluator.arrays(body, body_consts, places, arrays, carry_at)
            if not dims:
                return new
            on = active(carry)
            return [
                jnp.where(jnp.expand_dims(on, tuple(range(on.ndim, x.ndim))), x, old)
                for x, old in zip(new, carry, strict=True)
            ]

        together = bool(dims) and _communicates(evaluator, step, values[m:])

        def go_on(carry: Any) -> Any:
            on = active(carry)
            if together:  # a device that stops would leave the others waiting
                return extreme_of_examples(on, dims, True, evaluator.axes)
            return jnp.any(on) if dims else on

        with evaluator.repeated(None):
            return lax.while_loop(go_on, step, values[m:])

    return Decision([*of_test, *of_body, *carry_at], carry_at, run=run)


def _communicates(evaluator: Evaluator, fun: Any, *args: Any) -> bool:
    before = len(evaluator.transfers)
    jax.eval_shape(fun, *args)
    found = len(evaluator.transfers) > before
    del evaluator.transfers[before:]
    return found


@rule("cond")
def cond(given: Given) -> Decision | None:
    """The predicate is replicated, so that all devices take the same branch."""
    branches = [opened(branch) for branch in given.params["branches"]]
    platforms = given.params.get("branches_platforms")  # of `lax.platform_dependent`
    inside, evaluator = given.placements[1:], given.evaluator
    found = [placements_of(evaluator, body, inside)[0] for body, _ in branches]
    outs = found[0]
    for more in found[1:]:
        shapes = [v.aval.shape for v in given.eqn.outvars]
        outs = [_joined(given, *three) for three in zip(shapes, outs, more, strict=True)]

    def run(values: list[Any]) -> Any:
        def branch(body: Any, consts: Any, *arrays: Any) -> Any:
            return evaluator.arrays(body, consts, inside, arrays, outs)

        cases = [partial(branch, *pair) for pair in branches]
        if platforms is not None:  # only the branch of this platform is compiled
            by_name = {n: f for names, f in zip(platforms, cases, strict=True) for n in names or ()}
            default = next((f for x, f in zip(platforms, cases, strict=True) if x is None), None)
            return lax.platform_dependent(*values[1:], default=default, **by_name)
        chosen = values[0].astype(jnp.int32) if values[0].dtype == jnp.bool_ else values[0]
        return lax.switch(chosen, cases, *values[1:])

    return Decision([REPLICATED, *inside], outs, run=run)


@rule(CHECKPOINT)
def checkpoint(given: Given) -> Decision:
    """Rebuilt around the same body, with the same policy."""
    body, consts = body_of(given.eqn)
    places, evaluator = given.placements, given.evaluator
    outs, _ = placements_of(evaluator, body, places)
    options = {name: given.params[name] for name in ("policy", "prevent_cse")}

    def run(values: list[Any]) -> Any:
        def inside(*arrays: Any) -> Any:
            return evaluator.arrays(body, consts, places, arrays, outs)

        return jax.checkpoint(inside, **options)(*values)

    return Decision(places, outs, run=run)


@rule("shard_map")
def shard_map(given: Given) -> Decision | None:
    """Over model axes: the examples stay sharded on a dimension that those axes do not split.

    With `check_vma` nothing is gathered inside: by its type it would vary over the data axes, over
    which nothing outside does.
    """
    params, places, evaluator = given.params, given.placements, given.evaluator
    body, consts = body_of(given.eqn)
    if not all(map(_unsplit, places, params["in_specs"])):
        return None
    before = evaluator.gathers
    outs, _ = placements_of(evaluator, body, places)
    if params["check_vma"] and evaluator.gathers > before:
        return None
    if not all(map(_unsplit, outs, params["out_specs"])):
        return None

    def inside(index: Any, *arrays: Any) -> Any:
        with evaluator.indexed(index, given.eqn):
            return evaluator.arrays(body, consts, places, arrays, outs)

    def run(values: list[Any]) -> Any:
        mapped = jax.shard_map(
            inside,
            in_specs=(jax.P(), *params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return mapped(given.partition.index, *values)

    return Decision(places, outs, run=run)


def _unsplit(place: Placement, spec: Any) -> bool:
    """Whether a `PartitionSpec` leaves the sharded dimension as it is."""
    entry = spec[place.dim] if place.is_sharded and place.dim < len(spec) else None
    return not entry_axes(entry)
