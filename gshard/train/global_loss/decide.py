"""Decides how each equation is evaluated: by a rule, or with replicated operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import Literal

from gshard._util.jaxpr import CALLED, CHECKPOINT, CUSTOM_VJP, body_of, with_inner
from gshard.train.global_loss.by_examples import is_by_examples
from gshard.train.global_loss.exchange import decide_by_cost
from gshard.train.global_loss.expert_calls import decide_expert_call, expert_call
from gshard.train.global_loss.halo import with_padding
from gshard.train.global_loss.own_collectives import (
    check_body_as_traced,
    check_own_collective,
    is_own_collective,
)
from gshard.train.global_loss.placement import PARTIAL, REPLICATED, Placement, size_in_bytes
from gshard.train.global_loss.positions import Positions, of_literal, positions_of
from gshard.train.global_loss.registry import PARTIAL_RULES, RULES, Decision, Evaluator, Given
from gshard.train.global_loss.sequence_calls import decide_sequence_call, sequence_call

_KEEP_PARTIAL = ("scan", "cond", CHECKPOINT)  # they decide about their bodies


def is_inlined(evaluator: Evaluator, eqn: Any, placements: Sequence[Placement]) -> bool:
    """Whether an equation only calls a body, equation by equation."""
    if eqn.primitive.name not in CALLED or is_by_examples(eqn):
        return False
    calls = sequence_call(evaluator, eqn, placements), expert_call(eqn, placements)
    return calls == (None, None)


def decide(
    evaluator: Evaluator,
    eqn: Any,
    placements: Sequence[Placement],
    positions: Sequence[Positions | None] = (),
    depends: Sequence[bool] = (),
) -> Decision:
    """Returns how an equation is evaluated; there is always a way."""
    known = list(positions) or [None] * len(placements)
    given = Given(eqn, list(placements), known, evaluator, depends)
    found = decide_by_cost(given, _decide, _candidates) if evaluator.exchanges else _decide(given)
    pairs = zip(placements, found.operands, strict=True)
    evaluator.gathers += any(p.is_sharded and p != wanted for p, wanted in pairs)
    return found


def _decide(given: Given) -> Decision:
    if is_own_collective(given.eqn, given.evaluator.axes):
        check_own_collective(given)
        return given.all(REPLICATED)
    call = sequence_call(given.evaluator, given.eqn, given.placements)
    if call is not None:
        return decide_sequence_call(given, *call)
    dropless = expert_call(given.eqn, given.placements)
    if dropless is not None:
        return decide_expert_call(given, dropless)
    for attempt in _attempts(given):
        found = _by_rule(attempt)
        if found is not None:
            return found
    check_body_as_traced(given)
    return given.all(REPLICATED)


def _candidates(given: Given) -> Iterator[Decision]:
    """Every way to evaluate an equation by a rule, and that without one."""
    for attempt in _attempts(given):
        found = _by_rule(attempt)
        if found is not None:
            yield found
    yield given.all(REPLICATED)


def _attempts(given: Given) -> Iterator[Given]:
    """The placements to try: as they are, one partial sum, none, one sharded, all replicated."""
    yield given
    placements = given.placements
    partial = [i for i, p in enumerate(placements) if p == PARTIAL]
    if given.depends and given.evaluator.micro_batches > 1:  # others can be summed before
        partial.sort(key=lambda i: not given.depends[i])
    for i in partial if len(partial) > 1 else ():
        yield _with(given, [p if j == i else _summed(p) for j, p in enumerate(placements)])
    summed = [_summed(p) for p in placements]
    if partial:
        yield _with(given, summed)
    sizes = {
        i: size_in_bytes(given.eqn.invars[i].aval) for i, p in enumerate(summed) if p.is_sharded
    }
    for i in sorted(sizes, key=sizes.__getitem__, reverse=True) if len(sizes) > 1 else ():
        yield _with(given, [p if j == i else REPLICATED for j, p in enumerate(summed)])
    if sizes:
        yield _with(given, [REPLICATED] * len(summed))


def _by_rule(given: Given) -> Decision | None:
    partial = PARTIAL in given.placements
    name = given.eqn.primitive.name
    if partial and name not in _KEEP_PARTIAL:
        if any(p.is_sharded for p in given.placements):
            return None
        rule = PARTIAL_RULES.get(name)
    elif partial or any(p.is_sharded for p in given.placements) or _has_own_gradient(given.eqn):
        rule = RULES.get(name)
    else:
        return None
    found = rule(given) if rule is not None else None
    return found if found is not None and _fits(given, found) else None


def _has_own_gradient(eqn: Any) -> bool:
    """Whether an equation is a `custom_vjp`, or has one in a body that is differentiated.

    As it was traced, every device would call the user's backward pass with its share of the
    cotangent, and the results add up only if that pass is linear.
    """
    if eqn.primitive.name not in (*_KEEP_PARTIAL, CUSTOM_VJP):
        return False
    return any(inner.primitive.name == CUSTOM_VJP for inner in with_inner(eqn))


def _fits(given: Given, found: Decision) -> bool:
    pairs = [*zip(given.eqn.invars, found.operands, strict=True)]
    pairs += [*zip(given.eqn.outvars, found.results, strict=True)]
    return all(given.partition.fits(v.aval.shape, place) for v, place in pairs)


def placements_of(
    evaluator: Evaluator,
    jaxpr: Any,
    placements: Sequence[Placement],
    positions: Sequence[Positions | None] = (),
) -> tuple[list[Placement], list[Positions | None]]:
    """Returns how the results of a body will be held, without evaluating it."""
    places: dict[Any, Placement] = dict(zip(jaxpr.invars, placements, strict=True))
    known: dict[Any, Positions | None] = dict(zip(jaxpr.invars, positions, strict=False))

    def place_of(v: Any) -> Placement:
        return REPLICATED if isinstance(v, Literal) else places.get(v, REPLICATED)

    def fact_of(v: Any) -> Positions | None:
        return of_literal(v) if isinstance(v, Literal) else known.get(v)

    for eqn in (jaxpr if evaluator.of_examples else with_padding(jaxpr)).eqns:
        given, facts = [*map(place_of, eqn.invars)], [*map(fact_of, eqn.invars)]
        if is_inlined(evaluator, eqn, given):
            results, found = placements_of(evaluator, body_of(eqn)[0], given, facts)
        else:
            results = decide(evaluator, eqn, given, facts).results
            found = [positions_of(eqn, facts) if eqn.outvars else None]
        places.update(zip(eqn.outvars, results, strict=True))
        known.update(zip(eqn.outvars, found, strict=False))
    outs = jaxpr.outvars
    return [*map(place_of, outs)], [*map(fact_of, outs)]


def _summed(placement: Placement) -> Placement:
    return REPLICATED if placement == PARTIAL else placement


def _with(given: Given, placements: list[Placement]) -> Given:
    return replace(given, placements=placements)
