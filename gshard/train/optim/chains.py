"""Finds the chains of an update: what connects gathered operands with results read elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gshard.train.optim.traced_update import TracedEquation

_SHARE = 16  # how many times larger the other operands are of chains that share a small one


@dataclass
class Chain:
    """The equations between gathered operands and the results that are read elsewhere.

    Attributes:
      steps: the equations.
      copies: values of the gathered operands.
      sources: the values that these are gathered from.
      given: values that every device has, such as coefficients and step counts. Some are gathered
        copies that several chains read.
      results: values that other equations read, or outputs of the update.
    """

    steps: list[TracedEquation] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


def chains_of(
    steps: Sequence[TracedEquation],
    sources: Mapping[int, int],
    known: set[int],
    outputs: Sequence[int],
) -> list[Chain]:
    """Returns the connected parts of the equations that run on gathered operands.

    Where a gathered operand is computed from a result of the same part, that is two chains, one
    after the other.

    Args:
      steps: the equations of an update, in order.
      sources: for every gathered copy the value that it is gathered from.
      known: values that are written into the program.
      outputs: results of the update.
    """
    own = [step for step in steps if step.replicated]
    made = {i for step in own for i in step.outs}
    rank: dict[int, int] = {}  # how many chains a value comes after
    part_of: dict[Any, Any] = {}  # for a value of a rank another one of its part, or itself
    readers: dict[tuple[int, int], list[Any]] = {}  # of a copy, by rank: values of their parts
    size: dict[int, int] = {}

    def find(x: Any) -> Any:
        while part_of.setdefault(x, x) != x:
            part_of[x] = x = part_of[part_of[x]]
        return x

    for step in steps:
        before = ((sources.get(i, i), not step.replicated and i in made) for i in step.ins)
        now = max((rank.get(i, 0) + leaves for i, leaves in before), default=0)
        rank.update(dict.fromkeys(step.outs, now))
        if not step.replicated:
            continue
        size |= step.sizes
        for i in step.ins:
            if i in sources:
                readers.setdefault((i, now), []).append((step.outs[0], now))
            elif i in made and rank[i] == now:
                part_of[find((i, now))] = find((step.outs[0], now))
        for i in step.outs:
            part_of[find((i, now))] = find((step.outs[0], now))
    shared = _join_readers(readers, size, part_of, find)
    chains: dict[Any, Chain] = {}
    for step in own:
        chains.setdefault(find((step.outs[0], rank[step.outs[0]])), Chain()).steps.append(step)
    for chain in chains.values():
        inside = {i for step in chain.steps for i in step.outs}
        reads = dict.fromkeys(i for step in chain.steps for i in step.ins if i not in inside)
        chain.copies = [i for i in reads if i in sources and i not in shared]
        chain.sources = [sources[i] for i in chain.copies]
        own_copies = {*chain.copies}
        chain.given = [i for i in reads if i not in own_copies and i not in known]
    found = list(chains.values())
    uses = Counter(outputs)
    for step in steps:
        uses.update(() if step.replicated else set(step.ins))
    uses.update(i for chain in found for i in chain.given)
    _add_what_follows(found, steps, uses, known)
    for chain in found:
        chain.results = [i for step in chain.steps for i in step.outs if uses[i]]
    return [x for x in found if x.results and x.copies and not any(uses[i] for i in x.copies)]


def _join_readers(
    readers: Mapping[tuple[int, int], Sequence[Any]],
    size: Mapping[int, int],
    part_of: dict[Any, Any],
    find: Callable[[Any], Any],
) -> set[int]:
    """Joins the parts that read the same gathered copy; returns copies that join none.

    These are small next to what each of the parts reads besides, such as coefficients of all
    matrices: every device gets them, and the parts remain chains of their own.
    """
    largest: dict[Any, int] = {}  # copy of a part
    shared: set[int] = set()
    for copy, now in sorted(readers, key=lambda x: -size[x[0]]):
        parts = dict.fromkeys(map(find, readers[copy, now]))
        own = [largest.get(part, 0) for part in parts]
        if copy in shared or (len(parts) > 1 and size[copy] * _SHARE <= min(own)):
            shared.add(copy)
            continue
        for part in parts:
            part_of[part] = find((copy, now))
        largest[find((copy, now))] = max(size[copy], *own)
    return shared


def _add_what_follows(
    chains: Sequence[Chain],
    steps: Sequence[TracedEquation],
    uses: Counter[int],
    known: set[int],
) -> None:
    """Adds equations that read a chain's results alone, where it then has no more to send back.

    Such as the sum that follows the last product of Newton-Schulz. `uses` counts who reads a value
    outside of chains.
    """
    chain_of = {i: x for x in chains for step in x.steps for i in step.outs}
    for step in steps:
        read = {i for i in step.ins if i not in known}
        of = {id(chain_of.get(i)): chain_of.get(i) for i in read}
        (chain, *others) = of.values() or (None,)
        if step.replicated or step.has_product or not step.can_be_mapped or others or not chain:
            continue
        left = sum(step.sizes[i] for i in read if uses[i] == 1)
        if len(step.outs) == 1 and step.sizes[step.outs[0]] <= left:
            chain.steps.append(step)
            uses.subtract(read)
            chain_of[step.outs[0]] = chain


def in_waves(
    chains: Sequence[Chain],
    steps: Sequence[TracedEquation],
    sources: Mapping[int, int],
    known: set[int],
) -> list[list[Chain]]:
    """Returns the chains in waves: none needs a result of its own wave or of a later one.

    Chains that wait for their own results are left out.
    """
    owned = {id(step) for chain in chains for step in chain.steps}
    rest = [step for step in steps if id(step) not in owned]
    pending, waves, known = list(chains), [], set(known)

    def ready(values: Sequence[int]) -> bool:
        return all(sources.get(i, i) in known for i in values)

    while True:
        later = []
        for step in rest:
            if ready(step.ins):
                known.update(step.outs)
            else:
                later.append(step)
        rest = later
        wave = [x for x in pending if ready(x.sources) and ready(x.given)]
        if not wave:
            return waves
        waves.append(wave)
        ready_now = set(map(id, wave))
        pending = [x for x in pending if id(x) not in ready_now]
        known.update(i for chain in wave for step in chain.steps for i in step.outs)
