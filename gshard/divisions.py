"""How a divided dimension passes through the equations of a traced function.

A value is whole (None), divided on one dimension, or divided in a way that is not followed
(`UNKNOWN`). What is found decides only what moves, never the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gshard.equations import body_of, called, opened, scan_sizes

UNKNOWN = -1
Dim = int | None

# They take the matrices in the last two dimensions whole; all before are batches.
_OF_MATRICES = frozenset({
    "cholesky", "custom_linear_solve", "eig", "eigh", "geqp3", "geqrf", "hessenberg",
    "householder_product", "lu", "qr", "schur", "svd", "triangular_solve", "tridiagonal",
})  # fmt: skip
_RESHAPES = ("reshape", "squeeze", "expand_dims")
# Newton-Schulz sums five times or ten, and each time moves its result twice.
_MUCH_SMALLER = 32
PRODUCTS = _OF_MATRICES | {"dot_general"}


def flow(eqn: Any, dims: Sequence[Dim]) -> tuple[list[Dim], bool]:
    """The divided dimension of every output, and whether a product inside wants whole operands.

    Args:
      eqn: an equation.
      dims: the divided dimension of every operand.
    """
    name = eqn.primitive.name
    if all(dim is None for dim in dims):
        return [None] * len(eqn.outvars), False
    if name == "cond":
        found = [_body(opened(branch)[0], dims[1:]) for branch in eqn.params["branches"]]
        joined = [join(*several) for several in zip(*(outs for outs, _ in found), strict=True)]
        return joined, any(wants for _, wants in found)
    if name == "scan":
        body, _ = body_of(eqn)
        fixed, carried, _ = scan_sizes(eqn)
        layers = [_next(dim, -1) for dim in dims[fixed + carried :]]
        outs, wants = _loop(body, dims[:fixed], dims[fixed : fixed + carried], layers)
        return [*outs[:carried], *(_next(dim, 1) for dim in outs[carried:])], wants
    if name == "while":
        fixed = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        mine = dims[eqn.params["cond_nconsts"] : fixed]
        return _loop(opened(eqn.params["body_jaxpr"])[0], mine, dims[fixed:], [])
    inner = called(eqn)
    if inner is not None:
        return _body(inner[0], dims)
    shapes = [v.aval.shape for v in eqn.invars]
    outs = [
        None if math.prod(v.aval.shape) == 1 else _through(eqn, shapes, dims, v.aval.shape)
        for v in eqn.outvars
    ]
    return outs, _wants_whole(eqn, shapes, dims)


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


def _body(jaxpr: Any, dims: Sequence[Dim]) -> tuple[list[Dim], bool]:
    known: dict[Any, Dim] = dict(zip(jaxpr.invars, dims, strict=True))
    wants = False
    for eqn in jaxpr.eqns:
        outs, more = flow(eqn, [_of(v, known) for v in eqn.invars])
        known.update(zip(eqn.outvars, outs, strict=True))
        wants |= more
    return [_of(v, known) for v in jaxpr.outvars], wants


def _of(v: Any, known: dict[Any, Dim]) -> Dim:
    return None if hasattr(v, "val") else known.get(v)  # a literal cannot be hashed


def _loop(
    body: Any, fixed: Sequence[Dim], carry: Sequence[Dim], layers: Sequence[Dim]
) -> tuple[list[Dim], bool]:
    """What holds for every turn of a loop."""
    while True:
        outs, wants = _body(body, [*fixed, *carry, *layers])
        after = [join(a, b) for a, b in zip(carry, outs, strict=False)]
        if after == list(carry):
            return outs, wants
        carry = after


def _next(dim: Dim, by: int) -> Dim:
    """The dimension where one in front is gone (the divided one may be it) or new."""
    return dim if dim is None or dim == UNKNOWN else dim + by


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


def _wants_whole(eqn: Any, shapes: Sequence[Any], dims: Sequence[Dim]) -> bool:
    """Whether XLA would gather for a product, maybe more than once.

    Not where every device has batches of its own, or rows of its own for a factor that is whole;
    nor where it sums into what is much smaller: that costs less than gathering.
    """
    if eqn.primitive.name in _OF_MATRICES:
        return any(
            dim is not None and (dim == UNKNOWN or dim >= len(shape) - 2)
            for shape, dim in zip(shapes, dims, strict=True)
        )
    if eqn.primitive.name != "dot_general":
        return False
    contracted, batches = eqn.params["dimension_numbers"]
    for shape, summed, batch in zip(shapes, contracted, batches, strict=True):
        rest = math.prod(shape[d] for d in summed)
        free = math.prod(shape) // max(1, rest * math.prod(shape[d] for d in batch))
        if free <= 1 or rest <= 1:
            return False
    places = zip(_of_product(eqn, shapes, dims), dims, strict=True)
    kept = {place for place, dim in places if dim is not None}
    if kept == {None}:
        sizes = (math.prod(x) for x, dim in zip(shapes, dims, strict=True) if dim is not None)
        return math.prod(eqn.outvars[0].aval.shape) * _MUCH_SMALLER > sum(sizes)
    return len(kept) > 1 or UNKNOWN in kept
