"""Where a traced loss uses each parameter: first uses, repeated gathers and shared buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from jax.extend import core

from gshard._util.jaxpr import CHECKPOINT, JIT, VIEWS, bind, body_of, called, scan_sizes
from gshard._util.jaxpr_dataflow import flow
from gshard._util.repeated import RepeatedEquations, Run
from gshard.train.comm.buckets import assign_buckets
from gshard.train.fsdp.lazy_param import LazyParam, share_bucket


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


class ParamUses:
    """The uses of every value in one scope, which has a jaxpr.

    Args:
      jaxpr: not closed.
      differentiated: inputs that are differentiated while it is evaluated, and not by a scan or a
        checkpoint around it.

    Attributes:
      bind: evaluates one of its equations without sharded parameters.
    """

    def __init__(self, jaxpr: Any, differentiated: Sequence[Any] = ()):
        self.jaxpr = jaxpr
        self._repeated = RepeatedEquations(jaxpr, differentiated) if differentiated else None
        self.bind: Any = bind if self._repeated is None else self._repeated.bind
        self._users: dict[Any, list[tuple[Any, int]]] = {}
        for eqn in jaxpr.eqns:
            for position, v in enumerate(eqn.invars):
                if isinstance(v, core.Var):
                    self._users.setdefault(v, []).append((eqn, position))
        self._returned = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
        self._inner: dict[int, ParamUses] = {}

    def runs(self, sharded: Iterable[Any]) -> Iterable[Run]:
        """The equations in runs to evaluate; none with a sharded parameter is called with others.

        `sharded` are the inputs that are sharded.
        """
        if self._repeated is None:
            return [Run(self.jaxpr.eqns, [], [])]
        reached = set(sharded)

        def alone(eqn: Any) -> bool:
            given = any(isinstance(v, core.Var) and v in reached for v in eqn.invars)
            if given and eqn.primitive.name in (*VIEWS, "convert_element_type"):
                reached.update(eqn.outvars)
            return given

        return self._repeated.runs(alone)

    def gathered_repeatedly(self, var: Any) -> bool:
        """Whether a parameter would be gathered more than once, here and in other scopes.

        Used by scans alone it stays sharded, and is gathered layer by layer.
        """
        here, others, scans = self._gathers(var)
        gathers = here + others
        return gathers > 1 or (gathers == 1 and scans > 0)

    def count(self, var: Any) -> int:
        """How many operands of this scope's equations are the value or a view of it."""
        found = int(var in self._returned)
        for eqn, position in self._users.get(var, ()):
            if eqn.primitive.name == JIT:
                found += self.inside(eqn).count(body_of(eqn)[0].invars[position])
            elif eqn.primitive.name in (*VIEWS, "convert_element_type"):
                found += self.count(eqn.outvars[0])
            else:
                found += 1
        return found

    def only_cast(self, var: Any) -> Any:
        """The dtype that a value is cast to before its only use, in whatever scope; else None."""
        users = self._users.get(var, ())
        if len(users) != 1 or var in self._returned:
            return None
        ((eqn, position),) = users
        if eqn.primitive.name in (JIT, CHECKPOINT):
            return self.inside(eqn).only_cast(body_of(eqn)[0].invars[position])
        cast = eqn.primitive.name == "convert_element_type"
        return eqn.params["new_dtype"] if cast else None

    def gathered_here(self) -> dict[Any, list[Any]]:
        """Inputs that this scope gathers at their first use, in that order, and casts before it."""
        found: dict[Any, list[Any] | None] = {}
        self._follow([(v, (), False) for v in self.jaxpr.invars], found)
        return {v: list(casts) for v, casts in found.items() if casts is not None}

    def _follow(self, given: Sequence[_Seen | None], found: dict[Any, Any]) -> None:
        """Adds to `found`; `given` says which inputs of this scope are parameters."""

        def meet(v: Any, seen: _Seen | None) -> _Seen | None:
            if seen and (v in self._returned or self.gathered_repeatedly(v)):
                found[seen[0]] = None
            return seen

        def transfer(eqn: Any, values: list[_Seen | None]) -> list[_Seen | None]:
            name = eqn.primitive.name
            nothing: list[_Seen | None] = [None] * len(eqn.outvars)
            if name == JIT and any(values):
                self.inside(eqn)._follow(values, found)
            if name in (JIT, CHECKPOINT):
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

    def inside(self, eqn: Any) -> ParamUses:
        """The uses in the scope that an equation opens."""
        if id(eqn) not in self._inner:
            self._inner[id(eqn)] = ParamUses(body_of(eqn)[0])
        return self._inner[id(eqn)]

    def _gathers(self, var: Any) -> tuple[bool, int, int]:
        """Whether this scope gathers a value, how many other scopes do, how many scans slice it."""
        here, others, scans = var in self._returned, 0, 0
        scopes: set[int] = set()
        for eqn, position in self._users.get(var, ()):
            name = eqn.primitive.name
            if name == JIT:
                more = self.inside(eqn)._gathers(body_of(eqn)[0].invars[position])
                here, others, scans = here or more[0], others + more[1], scans + more[2]
            elif name in (CHECKPOINT, "convert_element_type"):
                others += id(eqn) not in scopes
                scopes.add(id(eqn))
            elif name == "scan" and position >= sum(scan_sizes(eqn)[:2]):
                scans += 1
            else:
                here = True
        return here, others, scans


def share_buckets_of_layers(uses: ParamUses, args: Sequence[Any], bucket_size: int) -> None:
    """Groups small sharded parameters of one layer, among the inputs of a scope to evaluate."""
    given = zip(uses.jaxpr.invars, args, strict=True)
    leaves = {v: x for v, x in given if isinstance(x, LazyParam)}
    if len(leaves) < 2 or not bucket_size:
        return
    found = [
        (leaves[v], casts)
        for v, casts in uses.gathered_here().items()
        if v in leaves and len(casts) < 2 and not leaves[v].spec.subgroup_size
    ]
    sizes = [leaf.spec.sharded_layout.local().stored_size for leaf, _ in found]
    runs = [list(run) for _, run in groupby(found, key=lambda one: one[0].spec.layer)]
    kinds = [
        (i, leaf.spec.bucket_key, casts[0] if casts else leaf.dtype)
        for i, run in enumerate(runs)
        for leaf, casts in run
    ]
    for bucket in assign_buckets(sizes, kinds, bucket_size):
        if len(bucket) > 1:
            members = [found[i] for i in bucket]
            share_bucket([leaf.cast(casts[0]) if casts else leaf for leaf, casts in members])
