"""How values lie in the global view: into how many parts each dimension is divided.

That follows from the layouts of the inputs, from constraints, and from what an operation does with
dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gshard.analysis.memory.program import FREE, RESHAPED, Value


def local_value(aval: Any, factors: tuple[int, ...] | None = None) -> Value:
    """What one device holds of an array that is divided so; padded where that does not go up."""
    factors = factors or (1,) * len(aval.shape)
    shape = tuple(-(-size // f) for size, f in zip(aval.shape, factors, strict=True))
    return Value(shape, aval.dtype, factors)


def factors_of(sharding: Any, ndim: int) -> tuple[int, ...]:
    """Into how many parts a sharding divides each of `ndim` dimensions."""
    spec = getattr(sharding, "spec", None)
    return factors_in(spec, sharding.mesh.shape, ndim) if spec is not None else (1,) * ndim


def factors_in(spec: Any, sizes: Mapping[str, int], ndim: int) -> tuple[int, ...]:
    """The factors of a spec on a mesh with axes of these sizes."""
    found = [1] * ndim
    for d, names in enumerate(spec):
        for name in (names,) if isinstance(names, str) else names or ():
            found[d] *= sizes[name]
    return tuple(found)


def out_factors(
    eqn: Any, ins: Sequence[int], aval: Any, values: Sequence[Value]
) -> tuple[int, ...]:
    """How a result lies in the global view: as its operands, dimension by dimension."""
    ndim, name, found = len(aval.shape), eqn.primitive.name, [1] * len(aval.shape)
    for place, i in enumerate(ins):
        if i == FREE:
            continue
        factors = values[i].factors
        if name == "broadcast_in_dim":
            to = eqn.params["broadcast_dimensions"]
        elif name == "transpose":
            to = [eqn.params["permutation"].index(d) for d in range(len(factors))]
        elif name.startswith("reduce_") and "axes" in eqn.params:
            rest = [d for d in range(len(factors)) if d not in eqn.params["axes"]]
            to = [rest.index(d) if d in rest else None for d in range(len(factors))]
        elif name == "dot_general":
            to = _dot_dims(eqn.params["dimension_numbers"], place, len(factors), ndim)
        elif name in RESHAPED:
            to = _reshaped(eqn.invars[0].aval.shape, aval.shape)
        else:
            to = range(len(factors)) if len(factors) == ndim else [None] * len(factors)
        for d, factor in zip(to, factors, strict=True):
            if d is not None and d < ndim and aval.shape[d] > 1:
                found[d] = max(found[d], factor)
    return tuple(found)


def _dot_dims(numbers: Any, place: int, ndim: int, out_ndim: int) -> list[int | None]:
    """Where the dimensions of an operand of a `dot_general` are in its result."""
    contract, batch = numbers
    taken = {*contract[place], *batch[place]}
    free = [d for d in range(ndim) if d not in taken]
    to = {d: k for k, d in enumerate(batch[place])}
    first = len(batch[0]) if place == 0 else out_ndim - len(free)
    to |= {d: first + k for k, d in enumerate(free)}
    return [to.get(d) for d in range(ndim)]


def _reshaped(old: Sequence[int], new: Sequence[int]) -> list[int | None]:
    """Where the dimensions of an array are after a reshape; None for one that is split or merged.

    A dimension that is split or merged is followed to the major one of what it becomes.
    """
    found: list[int | None] = [None] * len(old)
    i = j = 0
    while i < len(old) and j < len(new):
        left, right, first, to = old[i], new[j], i, j
        while left != right:
            if left < right and i + 1 < len(old):
                i += 1
                left *= old[i]
            elif j + 1 < len(new):
                j += 1
                right *= new[j]
            else:
                return found
        found[first] = to
        i, j = i + 1, j + 1
    return found
