"""Forward passes over traced functions, which follow what is known of inputs to the results.

`flow` runs a pass over a jaxpr, `flow_inside` over the inner jaxprs of one equation. `inputs_used`
finds the inputs that results depend on, `sources` the results that are inputs unchanged, and
`sharded_dims` the dimension on which a value is sharded: None if it is replicated, `UNKNOWN` if it
is sharded in a way that is not followed. The latter decides only what is communicated, never the
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

from jax.extend import core

from gshard._util.jaxpr import body_of, called, opened, scan_sizes

UNKNOWN = -1
Dim = int | None

# They need full matrices in the last two dimensions; all dimensions before are batches.
_OF_MATRICES = frozenset({
    "cholesky", "cholesky_update", "custom_linear_solve", "eig", "eigh", "geqp3", "geqrf",
    "hessenberg", "householder_product", "lu", "ormqr", "qr", "ragged_dot_general",
    "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve",
})  # fmt: skip
PRODUCTS = _OF_MATRICES | {"dot_general"}
_RESHAPES = ("reshape", "squeeze")


def flow(
    jaxpr: Any,
    inputs: Sequence[Any],
    transfer: Callable[[Any, list[Any]], Sequence[Any]],
    unknown: Any = None,
) -> list[Any]:
    """Follows what is known of the inputs of a jaxpr, which is not closed, to its results.

    `transfer(eqn, values)` gives what is known of the results of an equation; of constants and
    literals it is `unknown`.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variables: Sequence[Any]) -> list[Any]:
        return [known.get(v, unknown) if isinstance(v, core.Var) else unknown for v in variables]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, transfer(eqn, read(eqn.invars)), strict=True))
    return read(jaxpr.outvars)


def flow_inside(
    eqn: Any,
    values: Sequence[Any],
    follow: Callable[[Any, Sequence[Any]], list[Any]],
    join: Callable[..., Any],
    slice_of: Callable[[Any], Any] = lambda value: value,
    stack_of: Callable[[Any], Any] = lambda value: value,
) -> list[Any] | None:
    """What is known of the results of a call, `cond`, `scan` or `while`; None for anything else.

    `follow(jaxpr, values)` runs the pass over an inner jaxpr: for loops until what is known of the
    carried values no longer changes, the last time with the final values. `join(*values)` is what
    holds for each of several values, `slice_of` what is known of one slice of a scanned operand,
    and `stack_of` of the stack of a scan's outputs.
    """
    if (inner := called(eqn)) is not None:
        return follow(inner[0], values)
    if eqn.primitive.name == "cond":
        branches = [follow(opened(branch)[0], values[1:]) for branch in eqn.params["branches"]]
        return [join(*several) for several in zip(*branches, strict=True)]
    if eqn.primitive.name == "scan":
        body, (consts, carried, _) = body_of(eqn)[0], scan_sizes(eqn)
        slices = [slice_of(value) for value in values[consts + carried :]]
    elif eqn.primitive.name == "while":
        body, slices = opened(eqn.params["body_jaxpr"])[0], []
        values = values[eqn.params["cond_nconsts"] :]
        consts, carried = eqn.params["body_nconsts"], len(eqn.outvars)
    else:
        return None
    carry = list(values[consts : consts + carried])
    while True:
        outs = follow(body, [*values[:consts], *carry, *slices])
        joined = [join(before, after) for before, after in zip(carry, outs, strict=False)]
        if joined == carry:
            return [*outs[:carried], *map(stack_of, outs[carried:])]
        carry = joined


def inputs_used(jaxpr: Any, inputs: Sequence[Set[int]] | None = None) -> list[Set[int]]:
    """The positions of the inputs that each output of a jaxpr may depend on.

    It looks into calls and `shard_map`, not into loops and branches.
    """

    def transfer(eqn: Any, given: list[Set[int]]) -> list[Set[int]]:
        inner = body_of(eqn) if eqn.primitive.name == "shard_map" else called(eqn)
        if inner is not None:
            return inputs_used(inner[0], given)
        return [frozenset().union(*given)] * len(eqn.outvars)

    own = [frozenset({i}) for i in range(len(jaxpr.invars))] if inputs is None else inputs
    return flow(jaxpr, own, transfer, frozenset())


def sharded_dims(eqn: Any, dims: Sequence[Dim]) -> tuple[list[Dim], float]:
    """The sharded dimension of every output, and what the products inside communicate.

    That is the number of elements that a ring sends where results are summed over devices, twice
    their size, times the iterations of loops; infinite where XLA would gather, or where the number
    of iterations is not known. `dims` are the sharded dimensions of the operands.
    """
    name = eqn.primitive.name
    if all(dim is None for dim in dims):
        return [None] * len(eqn.outvars), 0
    costs: list[float] = []

    def follow(jaxpr: Any, dims: Sequence[Dim]) -> list[Dim]:
        costs.append(0)

        def transfer(eqn: Any, dims: Sequence[Dim]) -> list[Dim]:
            outs, cost = sharded_dims(eqn, dims)
            costs[-1] += cost
            return outs

        return flow(jaxpr, dims, transfer)

    outs = flow_inside(eqn, dims, follow, join, partial(_shifted, -1), partial(_shifted, 1))
    if outs is not None:
        if name == "cond":
            return outs, max(costs)
        if name == "scan":
            return outs, costs[-1] * max(1, eqn.params["length"])
        if name == "while":
            asked, cost = eqn.params["cond_nconsts"], costs[-1]
            carry = map(join, dims[asked + eqn.params["body_nconsts"] :], outs)
            follow(opened(eqn.params["cond_jaxpr"])[0], [*dims[:asked], *carry])
            return outs, math.inf if cost + costs[-1] else 0
        return outs, costs[-1]
    shapes = [v.aval.shape for v in eqn.invars]
    if name in _OF_MATRICES:
        batches, sharded = len(shapes[0]) - 2, {dim for dim in dims if dim is not None}
        if all(0 <= dim < batches for dim in sharded):
            return [join(*sharded)] * len(eqn.outvars), 0  # every device has its own batches
        return [UNKNOWN] * len(eqn.outvars), math.inf
    outs = [_through(eqn, shapes, dims, v.aval.shape) for v in eqn.outvars]
    return outs, _product_traffic(eqn, shapes, dims) if name == "dot_general" else 0


def join(*dims: Dim) -> Dim:
    """The sharded dimension that holds in all of several cases."""
    found = {dim for dim in dims if dim is not None}
    return UNKNOWN if len(found) > 1 else next(iter(found), None)


def back(eqn: Any, dim: Dim) -> list[Dim]:
    """Sharded dimensions of the operands, for a result sharded on `dim`; None where not known."""
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


def _shifted(by: int, dim: Dim) -> Dim:
    """The dimension in a slice of a scanned array (-1), or in the stack of slices (+1).

    The dimension of the iterations, 0, becomes `UNKNOWN` in a slice.
    """
    return dim if dim is None or dim == UNKNOWN else dim + by


def _through(eqn: Any, shapes: Sequence[Any], dims: Sequence[Dim], out: Sequence[int]) -> Dim:
    name = eqn.primitive.name
    if math.prod(out) == 1:
        return None
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
    aligned = (d for d in range(len(out)) if math.prod(out[:d]) == before)
    return next((d for d in aligned if out[d] == shape[dim]), UNKNOWN)


def _of_product(eqn: Any, shapes: Sequence[Any], dims: Sequence[Dim]) -> list[Dim]:
    """The dimension of the product that each operand's sharded one becomes; None if summed."""
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


def _product_traffic(eqn: Any, shapes: Sequence[Any], dims: Sequence[Dim]) -> float:
    """What a product communicates, as in `sharded_dims`.

    Nothing if it is a vector, or if every device has batches or rows of its own.
    """
    contracted, batches = eqn.params["dimension_numbers"]
    for shape, summed, batch in zip(shapes, contracted, batches, strict=True):
        rest = math.prod(shape[d] for d in summed)
        free = math.prod(shape) // max(1, rest * math.prod(shape[d] for d in batch))
        if free <= 1 or rest <= 1:
            return 0
    pairs = zip(_of_product(eqn, shapes, dims), dims, strict=True)
    kept = {of_product for of_product, dim in pairs if dim is not None}
    if kept == {None}:
        return 2 * math.prod(eqn.outvars[0].aval.shape)
    return math.inf if len(kept) > 1 or UNKNOWN in kept else 0


_FORWARDS = {"copy", "optimization_barrier", "transpose"}
# The input that a value is, or a slice of one, with the order of its dimensions.
_Source = tuple[Any, tuple[int, ...]]


def sources(jaxpr: Any) -> list[int | None]:
    """For every output the position of the input that it is, or None where it was computed.

    Calls (jit, remat, ...) and scans may pass an input on.
    """
    inputs = [(i, tuple(range(v.aval.ndim))) for i, v in enumerate(jaxpr.invars)]
    found = flow(jaxpr, inputs, _source)
    return [x[0] if x and x[1] == tuple(sorted(x[1])) else None for x in found]


def _source(eqn: Any, values: list[_Source | None]) -> Sequence[_Source | None]:
    name = eqn.primitive.name
    if name in _FORWARDS:
        order = eqn.params.get("permutation")
        return [(x[0], tuple(x[1][d] for d in order)) if x and order else x for x in values]
    if name in ("cond", "while"):
        return [None] * len(eqn.outvars)
    follow = partial(flow, transfer=_source)
    outs = flow_inside(eqn, values, follow, if_equal, _slice_of, _stack_of)
    if outs and name == "scan":  # a carry that every iteration passes on
        consts, carried, _ = scan_sizes(eqn)
        outs[:carried] = map(if_equal, values[consts : consts + carried], outs)
    return outs or [None] * len(eqn.outvars)


def if_equal(first: Any, second: Any) -> Any:
    """The value of both, or None where they differ."""
    return first if first == second else None


def _slice_of(value: _Source | None) -> _Source | None:
    return value and (value, tuple(range(len(value[1]) - 1)))


def _stack_of(value: _Source | None) -> _Source | None:
    """The stacked input of which every iteration passes on its slice."""
    if value is None or isinstance(value[0], int) or value[1] != tuple(sorted(value[1])):
        return None
    return value[0]
