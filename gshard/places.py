"""In how many places a traced loss needs a leaf, which decides whether it moves once for all."""

from __future__ import annotations

from typing import Any

from jax.extend import core

from gshard.equations import CHECKPOINTS, JITS, body_of, scan_sizes


class Places:
    """The uses of every value of one scope, found in one walk over its equations."""

    def __init__(self, jaxpr: Any):
        self._jaxpr = jaxpr
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
        places, scans = self._count(var)
        return places > 1 or (places == 1 and scans > 0)

    def _count(self, var: Any) -> tuple[int, int]:
        """Scopes and casts that need a value (this scope itself is one), and scans that walk it."""
        here, others, scans = var in self._returned, 0, 0
        scopes: set[int] = set()
        for eqn, position in self._users.get(var, ()):
            name = eqn.primitive.name
            if name in JITS:
                body, _ = body_of(eqn)
                if id(eqn) not in self._inner:
                    self._inner[id(eqn)] = Places(body)
                more = self._inner[id(eqn)]._count(body.invars[position])
                others, scans = others + more[0], scans + more[1]
            elif name in CHECKPOINTS or name == "convert_element_type":
                others += id(eqn) not in scopes
                scopes.add(id(eqn))
            elif name == "scan" and position >= sum(scan_sizes(eqn)[:2]):
                scans += 1
            else:
                here = True
        return here + others, scans
