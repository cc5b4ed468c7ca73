"""Where a traced loss needs a leaf: whether it moves once for all, and what moves with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from jax.extend import core

from gshard._util.jaxpr import CHECKPOINTS, JIT, VIEWS, body_of, called, scan_sizes
from gshard._util.jaxpr_dataflow import flow
from gshard.train.comm.buckets import assign_buckets
from gshard.train.fsdp.lazy_param import LazyParam, move_together


def by_first_use(jaxpr: Any) -> list[int]:
    """The inputs of a jaxpr in the order of their first uses, then those that nothing uses."""
    found: dict[int, None] = {}

    def transfer(eqn: Any, given: list[int | None]) -> Sequence[int | None]:
        """Follows the inputs that operands are, cast or through a view; other uses are found."""
        known = [i for i in given if i is not None]
        inner = called(eqn)
        if inner and len(inner[0].invars) == len(eqn.invars):
            flow(inner[0], given, transfer)
        elif eqn.primitive.name in (*VIEWS, "convert_element_type"):
            return known[-1:] or [None]
        else:
            found.update(dict.fromkeys(known))
        return [None] * len(eqn.outvars)

    flow(jaxpr, range(len(jaxpr.invars)), transfer)
    return [*found, *(i for i in range(len(jaxpr.invars)) if i not in found)]


# A value that is an input, cast or through views: the input, its casts, whether it is a view.
_Seen = tuple[Any, tuple[Any, ...], bool]


class Places:
    """The uses of every value of one scope, found in one walk over its equations.

    Attributes:
      jaxpr: of the scope.
    """

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self._users: dict[Any, list[tuple[Any, int]]] = {}
        for eqn in jaxpr.eqns:
            for position, v in enumerate(eqn.invars):
                if isinstance(v, core.Var):
                    self._users.setdefault(v, []).append((eqn, position))
        self._returned = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
        self._inner: dict[int, Places] = {}

    def several(self, var: Any) -> bool:
        """Whether a leaf would move more than once: whole here, and again inside another scope.

        Then it is made whole at once, for all of them. Scans alone keep it divided, layer by layer.
        """
        here, others, scans = self._count(var)
        places = here + others
        return places > 1 or (places == 1 and scans > 0)

    def uses(self, var: Any) -> int:
        """How many operands of this scope's equations a value is, itself or as a mere view."""
        found = int(var in self._returned)
        for eqn, position in self._users.get(var, ()):
            if eqn.primitive.name == JIT:
                found += self.within(eqn).uses(body_of(eqn)[0].invars[position])
            elif eqn.primitive.name in (*VIEWS, "convert_element_type"):
                found += self.uses(eqn.outvars[0])
            else:
                found += 1
        return found

    def moves_in(self, var: Any) -> Any:
        """The dtype that a value is cast to before its only use, in whatever scope; else None."""
        users = self._users.get(var, ())
        if len(users) != 1 or var in self._returned:
            return None
        ((eqn, position),) = users
        if eqn.primitive.name in (JIT, *CHECKPOINTS):
            return self.within(eqn).moves_in(body_of(eqn)[0].invars[position])
        cast = eqn.primitive.name == "convert_element_type"
        return eqn.params["new_dtype"] if cast else None

    def whole_here(self) -> dict[Any, list[Any]]:
        """Inputs that this scope itself makes whole, in the order of their first uses.

        For each the dtypes that it is cast to before: none, or one after the other. Left out is
        what `several` or a return makes whole before its first use, itself or as a cast or a view.
        """
        found: dict[Any, list[Any] | None] = {}
        self._follow([(v, (), False) for v in self.jaxpr.invars], found)
        return {v: list(casts) for v, casts in found.items() if casts is not None}

    def _follow(self, given: Sequence[_Seen | None], found: dict[Any, Any]) -> None:
        """Adds to `found`; `given` says which inputs of this scope are parameters."""

        def meet(v: Any, seen: _Seen | None) -> _Seen | None:
            if seen and (v in self._returned or self.several(v)):
                found[seen[0]] = None
            return seen

        def transfer(eqn: Any, values: list[_Seen | None]) -> list[_Seen | None]:
            name = eqn.primitive.name
            nothing: list[_Seen | None] = [None] * len(eqn.outvars)
            if name == JIT and any(values):
                self.within(eqn)._follow(values, found)
            if name == JIT or name in CHECKPOINTS:
                return nothing
            if name == "scan":
                values = values[: sum(scan_sizes(eqn)[:2])]
            for leaf, casts, viewed in filter(None, values):
                if name == "convert_element_type" and not viewed:
                    (out,) = eqn.outvars
                    return [meet(out, (leaf, (*casts, out.aval.dtype), False))]
                if name in (*VIEWS, "convert_element_type"):
                    return [meet(eqn.outvars[0], (leaf, casts, True))]
                found.setdefault(leaf, casts)
            return nothing

        inputs = [meet(v, seen) for v, seen in zip(self.jaxpr.invars, given, strict=True)]
        flow(self.jaxpr, inputs, transfer)

    def within(self, eqn: Any) -> Places:
        """Those of the scope that an equation opens."""
        if id(eqn) not in self._inner:
            self._inner[id(eqn)] = Places(body_of(eqn)[0])
        return self._inner[id(eqn)]

    def _count(self, var: Any) -> tuple[bool, int, int]:
        """Whether this scope needs a value, other scopes and casts that do, scans that walk it."""
        here, others, scans = var in self._returned, 0, 0
        scopes: set[int] = set()
        for eqn, position in self._users.get(var, ()):
            name = eqn.primitive.name
            if name == JIT:
                more = self.within(eqn)._count(body_of(eqn)[0].invars[position])
                here, others, scans = here or more[0], others + more[1], scans + more[2]
            elif name in CHECKPOINTS or name == "convert_element_type":
                others += id(eqn) not in scopes
                scopes.add(id(eqn))
            elif name == "scan" and position >= sum(scan_sizes(eqn)[:2]):
                scans += 1
            else:
                here = True
        return here, others, scans


def move_layers_together(places: Places, args: Sequence[Any], bucket_size: int) -> None:
    """Puts leaves among the inputs of a scope into common buckets.

    Args:
      places: of the scope; nothing of it is evaluated yet.
      args: its inputs.
      bucket_size: elements of one bucket.
    """
    given = zip(places.jaxpr.invars, args, strict=True)
    leaves = {v: x for v, x in given if isinstance(x, LazyParam)}
    if len(leaves) < 2 or not bucket_size:
        return
    found = [
        (leaves[v], casts)
        for v, casts in places.whole_here().items()
        if v in leaves and len(casts) < 2 and not leaves[v].use.neighbours
    ]
    sizes = [leaf.use.moved.local().stored_size for leaf, _ in found]
    runs = [list(run) for _, run in groupby(found, key=lambda one: one[0].use.layer)]
    kinds = [
        (i, leaf.use.kind, casts[0] if casts else leaf.dtype)
        for i, run in enumerate(runs)
        for leaf, casts in run
    ]
    for bucket in assign_buckets(sizes, kinds, bucket_size):
        if len(bucket) > 1:
            members = [found[i] for i in bucket]
            move_together([leaf.cast(casts[0]) if casts else leaf for leaf, casts in members])
