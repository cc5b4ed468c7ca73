"""How a divided dimension passes through the equations of a traced function.

A value is whole (None), divided on one dimension, or divided in a way that is not followed
(`UNKNOWN`). What is found decides only what moves, never the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from gshard._util.jaxpr import body_of, called, opened, scan_sizes

UNKNOWN = -1
Dim = int | None

# They take the matrices in the last two dimensions whole; all before are batches.
_OF_MATRICES = frozenset({
    "cholesky", "cholesky_update", "custom_linear_solve", "eig", "eigh", "geqp3", "geqrf",
    "hessenberg", "householder_product", "lu", "ormqr", "qr", "ragged_dot", "ragged_dot_general",
    "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve",
})  # fmt: skip
PRODUCTS = _OF_MATRICES | {"dot_general"}
_RESHAPES = ("reshape", "squeeze", "expand_dims")


def flow(eqn: Any, dims: Sequence[Dim]) -> tuple[list[Dim], float]:
    """The divided dimension of every output, and what products inside move.

    That is the elements that a ring sends where results are summed over devices, twice their size,
    loops counted; infinite where XLA would gather, or nobody knows how often a loop turns.

    Args:
      eqn: an equation.
      dims: the divided dimension of every operand.
    """
    name = eqn.primitive.name
    if all(dim is None for dim in dims):
        return [None] * len(eqn.outvars), 0
    if name == "cond":
        found = [_body(opened(branch)[0], dims[1:]) for branch in eqn.params["branches"]]
        joined = [join(*several) for several in zip(*(outs for outs, _ in found), strict=True)]
        return joined, max(moved for _, moved in found)
    if name == "scan":
        body, _ = body_of(eqn)
        fixed, carried, _ = scan_sizes(eqn)
        layers = [_inside(dim) for dim in dims[fixed + carried :]]
        outs, moved = _loop(body, dims[:fixed], dims[fixed : fixed + carried], layers)
        outside = [dim if dim is None or dim == UNKNOWN else dim + 1 for dim in outs[carried:]]
        return [*outs[:carried], *outside], moved * max(1, eqn.params["length"])
    if name == "while":
        asked, fixed = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        mine, carry = dims[asked : asked + fixed], dims[asked + fixed :]
        outs, moved = _loop(opened(eqn.params["body_jaxpr"])[0], mine, carry, [])
        every = [join(a, b) for a, b in zip(carry, outs, strict=True)]
        _, more = _body(opened(eqn.params["cond_jaxpr"])[0], [*dims[:asked], *every])
        return outs, math.inf if moved + more else 0
    inner = called(eqn)
    if inner is not None:
        return _body(inner[0], dims)
    shapes = [v.aval.shape for v in eqn.invars]
    if name in _OF_MATRICES:
        return _of_matrices(eqn, shapes, dims)
    outs = [
        None if math.prod(v.aval.shape) == 1 else _through(eqn, shapes, dims, v.aval.shape)
        for v in eqn.outvars
    ]
    return outs, _moved(eqn, shapes, dims) if name == "dot_general" else 0


def join(*dims: Dim) -> Dim:
    """What is divided in one case or another, taken as one."""
    found = {dim for dim in dims if dim is not None}
    return UNKNOWN if len(found) > 1 else next(iter(found), None)


def back(eqn: Any, dim: Dim) -> list[Dim]:
    """How the operands lie of which the one result is to be divided on `dim`; None: not known."""
    out, name = eqn.outvars[0].aval.shape, eqn.primitive.name
    found: list[Dim] = []
    for shape in (v.aval.shape for v in eqn.invars):
        if dim is None or dim == UNKNOWN:
            found.append(None)
        elif name == "transpose":
            found.append(eqn.params["permutation"][dim])
        elif name in _RESHAPES:
            found.append(_reshaped(out, dim, shape))
        else:
            found.append(dim if shape == out else None)
    return found


def _body(jaxpr: Any, dims: Sequence[Dim]) -> tuple[list[Dim], float]:
    known: dict[Any, Dim] = dict(zip(jaxpr.invars, dims, strict=True))
    moved = 0
    for eqn in jaxpr.eqns:
        outs, more = flow(eqn, [_of(v, known) for v in eqn.invars])
        known.update(zip(eqn.outvars, outs, strict=True))
        moved += more
    return [_of(v, known) for v in jaxpr.outvars], moved


def _of(v: Any, known: dict[Any, Dim]) -> Dim:
    return None if hasattr(v, "val") else known.get(v)  # a literal cannot be hashed


def _loop(
    body: Any, fixed: Sequence[Dim], carry: Sequence[Dim], layers: Sequence[Dim]
) -> tuple[list[Dim], float]:
    """What holds for every turn of a loop, and what one turn moves."""
    while True:
        outs, moved = _body(body, [*fixed, *carry, *layers])
        after = [join(a, b) for a, b in zip(carry, outs, strict=False)]
        if after == list(carry):
            return outs, moved
        carry = after


def _inside(dim: Dim) -> Dim:
    """A scanned operand's dimension inside the loop, where the leading one is gone."""
    if dim == 0:  # the divided one itself: each device has some of the turns
        return UNKNOWN
    return dim if dim is None or dim == UNKNOWN else dim - 1


def _of_matrices(eqn: Any, shapes: Sequence[Any], dims: Sequence[Dim]) -> tuple[list[Dim], float]:
    """Nothing moves where every device has batches of its own."""
    batches, divided = len(shapes[0]) - 2, {dim for dim in dims if dim is not None}
    if all(0 <= dim < batches for dim in divided):
        return [join(*divided)] * len(eqn.outvars), 0
    return [UNKNOWN] * len(eqn.outvars), math.inf


def _through(eqn: Any, shapes: Sequence[Any], dims: Sequence[Dim], out: Sequence[int]) -> Dim:
    name = eqn.primitive.name
    if name == "dot_general":
        return join(*_of_product(eqn, shapes, dims))
    found: list[Dim] = []
    for shape, dim in zip(shapes, dims, strict=True):
        if dim is None or dim == UNKNOWN:
            found.append(dim)
        elif "axes" in eqn.params:  # reductions
            axes = eqn.params["axes"]
            found.append(None if dim in axes else dim - sum(axis < dim for axis in axes))
        elif name == "transpose":
            found.append(eqn.params["permutation"].index(dim))
        elif name == "broadcast_in_dim":
            found.append(eqn.params["broadcast_dimensions"][dim])
        elif name in _RESHAPES:
            found.append(_reshaped(shape, dim, out))
        else:
            same = len(shape) == len(out) and shape[dim] == out[dim]
            found.append(dim if same else UNKNOWN)
    return join(*found)


def _reshaped(shape: Sequence[int], dim: int, out: Sequence[int]) -> Dim:
    before = math.prod(shape[:dim])
    places = (d for d in range(len(out)) if math.prod(out[:d]) == before)
    return next((d for d in places if out[d] == shape[dim]), UNKNOWN)


def _of_product(eqn: Any, shapes: Sequence[Any], dims: Sequence[Dim]) -> list[Dim]:
    """Where the divided dimension of each operand is in the product; None where it is summed."""
    contracted, batches = eqn.params["dimension_numbers"]
    found: list[Dim] = []
    start = len(batches[0])
    for shape, dim, summed, batch in zip(shapes, dims, contracted, batches, strict=True):
        free = [d for d in range(len(shape)) if d not in (*summed, *batch)]
        if dim in batch:
            found.append(list(batch).index(dim))
        elif dim in free:
            found.append(start + free.index(dim))
        else:
            found.append(UNKNOWN if dim == UNKNOWN else None)
        start += len(free)
    return found


def _moved(eqn: Any, shapes: Sequence[Any], dims: Sequence[Dim]) -> float:
    """What a product moves: see `flow`.

    Nothing where every device has batches of its own, or rows of its own for a factor that is
    whole; nor for a vector.
    """
    contracted, batches = eqn.params["dimension_numbers"]
    for shape, summed, batch in zip(shapes, contracted, batches, strict=True):
        rest = math.prod(shape[d] for d in summed)
        free = math.prod(shape) // max(1, rest * math.prod(shape[d] for d in batch))
        if free <= 1 or rest <= 1:
            return 0
    places = zip(_of_product(eqn, shapes, dims), dims, strict=True)
    kept = {place for place, dim in places if dim is not None}
    if kept == {None}:
        return 2 * math.prod(eqn.outvars[0].aval.shape)
    return math.inf if len(kept) > 1 or UNKNOWN in kept else 0


_IDENTITIES = {"copy", "copy_p", "optimization_barrier", "transpose"}


def sources(jaxpr: Any) -> list[int | None]:
    """For every output the position of the input that it is, or None where it was computed.

    Sees through calls (jit, remat, ...) and scans, which hand on what they were given.
    """
    known: dict[Any, tuple[int, list[int]]] = {  # the input, and how its dimensions lie
        var: (position, list(range(var.aval.ndim))) for position, var in enumerate(jaxpr.invars)
    }
    for eqn in jaxpr.eqns:
        for out, position in zip(eqn.outvars, _forwarded_inputs(eqn), strict=True):
            given = None if position is None else eqn.invars[position]
            if isinstance(given, core.Var) and given in known:
                source, dims = known[given]
                turned = eqn.params.get("permutation", range(len(dims)))
                known[out] = (source, [dims[i] for i in turned])
    found = [known.get(var) if isinstance(var, core.Var) else None for var in jaxpr.outvars]
    return [x[0] if x and x[1] == sorted(x[1]) else None for x in found]


def _forwarded_inputs(eqn: Any) -> list[int | None]:
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
