"""Which arrays of the host an update computes together: groups of a traced program.

What depends on no array of the host (a norm of the gradients, a count) is in no group; groups share
nothing else. With Adam each parameter's moments are one; an optimizer that mixes all of them makes
a single group of everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from gshard.sharding.layout import Layout

GROUP_SIZE = 2**24  # bytes on one device

# What is computed entry by entry, and so on a part of the rows as on all.
_ENTRYWISE = frozenset(
    "abs add add_any and atan2 cbrt ceil clamp convert_element_type copy cos device_put div eq erf "
    "exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg "
    "nextafter not or pow reduce_precision rem round rsqrt select_n sharding_constraint sign sin "
    "sqrt square stop_gradient sub tan tanh xor".split()
)


@dataclass(frozen=True)
class Group:
    """Equations that are computed with the same arrays of the host.

    Attributes:
      size: bytes of these arrays on one device.
      inputs: their places among the inputs.
      equations: their places in the program.
      turns: parts of the rows, along dimension 0, that are taken one after the other.
    """

    size: int
    inputs: list[int]
    equations: list[int]
    turns: int = 1

    def __add__(self, other: Group) -> Group:
        return Group(
            self.size + other.size,
            [*self.inputs, *other.inputs],
            sorted([*self.equations, *other.equations]),
        )


def groups_of(jaxpr: Any, layouts: Sequence[Layout]) -> list[Group]:
    """The groups of a program without `jit`, in its order, small neighbours packed together.

    Args:
      jaxpr: the program.
      layouts: of its inputs.
    """
    return _packed([_in_turns(group, jaxpr, layouts) for group in _apart(jaxpr, layouts)])


def variables(operands: Sequence[Any]) -> list[Any]:
    """Those operands that are no literals."""
    return [v for v in operands if isinstance(v, core.Var)]


def _apart(jaxpr: Any, layouts: Sequence[Layout]) -> list[Group]:
    """The smallest groups, in the order of the program."""
    group_of: dict[Any, int] = {}  # by variable
    groups: dict[int, Group] = {}
    members: dict[int, list[Any]] = {}
    for i, (var, layout) in enumerate(zip(jaxpr.invars, layouts, strict=True)):
        if layout.on_host:
            group_of[var], members[i] = i, [var]
            groups[i] = Group(layout.bytes_per_device, [i], [])
    for number, eqn in enumerate(jaxpr.eqns):
        known = {group_of[v] for v in variables(eqn.invars) if v in group_of}
        if not known:
            continue
        first, *others = sorted(known)
        for other in others:
            groups[first] += groups.pop(other)
            group_of.update(dict.fromkeys(members[other], first))
            members[first] += members.pop(other)
        groups[first].equations.append(number)
        group_of.update(dict.fromkeys(eqn.outvars, first))
        members[first] += eqn.outvars
    _take_in(list(groups.values()), jaxpr)
    return sorted(groups.values(), key=lambda group: group.equations)


def _take_in(groups: Sequence[Group], jaxpr: Any) -> None:
    """Adds to a group what it alone needs, such as squares of gradients: else they are all kept."""
    owner: dict[int, Group | None] = {n: group for group in groups for n in group.equations}
    users: dict[Any, list[Group | None]] = {v: [None] for v in variables(jaxpr.outvars)}
    for number in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[number]
        if number not in owner and eqn.primitive.name in _ENTRYWISE and eqn.outvars[0].aval.shape:
            found = [group for v in eqn.outvars for group in users.get(v, [])]
            only = found[0] if found else None
            if only is not None and all(group is only for group in found):
                owner[number] = only
                only.equations.insert(0, number)
        for v in variables(eqn.invars):
            users.setdefault(v, []).append(owner.get(number))


def _in_turns(group: Group, jaxpr: Any, layouts: Sequence[Layout]) -> Group:
    """The group in as many turns as `GROUP_SIZE` asks for, where its rows are independent."""
    shapes = {layouts[i].shape for i in group.inputs}
    if group.size <= GROUP_SIZE or len(shapes) > 1:
        return group
    places = [layouts[i] for i in group.inputs]
    if any(x.dim == 0 or x.padding or (x.user and x.user[0]) for x in places):
        return group
    if any(jaxpr.eqns[number].primitive.name not in _ENTRYWISE for number in group.equations):
        return group
    rows = shapes.pop()[0]
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and group.size <= n * GROUP_SIZE]
    return dataclasses.replace(group, turns=min(fitting, default=rows))


def _packed(groups: Sequence[Group]) -> list[Group]:
    """Neighbouring groups together, up to `GROUP_SIZE`."""
    packed: list[Group] = []
    for group in groups:
        if packed and packed[-1].size + group.size <= GROUP_SIZE:
            packed[-1] += group
        else:
            packed.append(group)
    return packed
