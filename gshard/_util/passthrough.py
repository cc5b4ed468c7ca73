"""Which outputs of a traced function are inputs that it passes through unchanged."""

from __future__ import annotations

from typing import Any

from jax.extend import core

from gshard._util.jaxpr import body_of, scan_sizes

_IDENTITIES = {"copy", "copy_p", "optimization_barrier", "transpose"}


def sources(jaxpr: Any) -> list[int | None]:
    """For every output the position of the input that it is, or None where it was computed.

    Sees through calls (jit, remat, ...) and scans, which hand on what they were given.
    """
    known: dict[Any, tuple[int, list[int]]] = {  # the input, and how its dimensions lie
        var: (position, list(range(var.aval.ndim))) for position, var in enumerate(jaxpr.invars)
    }
    for eqn in jaxpr.eqns:
        for out, position in zip(eqn.outvars, _through(eqn), strict=True):
            given = None if position is None else eqn.invars[position]
            if isinstance(given, core.Var) and given in known:
                source, dims = known[given]
                turned = eqn.params.get("permutation", range(len(dims)))
                known[out] = (source, [dims[i] for i in turned])
    found = [known.get(var) if isinstance(var, core.Var) else None for var in jaxpr.outvars]
    return [x[0] if x and x[1] == sorted(x[1]) else None for x in found]


def _through(eqn: Any) -> list[int | None]:
    """For every output of an equation the position of the operand that it is, or None."""
    nothing: list[int | None] = [None] * len(eqn.outvars)
    if eqn.primitive.name in _IDENTITIES:
        return list(range(len(eqn.outvars)))
    if eqn.primitive.name == "scan":
        return _through_scan(eqn)
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    if inner is None or len(inner.invars) != len(eqn.invars):
        return nothing
    return sources(inner) if len(inner.outvars) == len(eqn.outvars) else nothing


def _through_scan(eqn: Any) -> list[int | None]:
    """A carry that every turn hands on, and stacked outputs that are the stacked inputs."""
    consts, carries, _ = scan_sizes(eqn)
    found: list[int | None] = []
    for out, given in enumerate(sources(body_of(eqn)[0])):
        kept = given == consts + out if out < carries else (given or 0) >= consts + carries
        found.append(given if kept else None)
    return found
