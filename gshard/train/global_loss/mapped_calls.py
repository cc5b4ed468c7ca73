"""Operations of `gshard.sequence` under `jax.vmap`: the mapped dimension is one of the batch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.jaxpr import abstract_like, all_equations
from gshard.sequence.view import Call, full_sequences
from gshard.sharding.topology import SEQUENCE

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MOST = 32  # ways to map the operands that are compared


@dataclass(frozen=True)
class MappedDims:
    """The mapped dimension of each operand, None for one without, and that of the result."""

    operands: tuple[int | None, ...]
    result: int

    def folded(self, run: Callable[..., Any], like: Sequence[Any]) -> Callable[..., Any]:
        """Runs an operation on a batch with the mapped dimension in it; `like` are its operands.

        The batch is the outer dimension: its examples may be sharded.
        """
        batch = max(x.shape[0] for x in like if x.ndim)

        def of_mapped(*arrays: Any) -> Any:
            pairs = zip(arrays, self.operands, strict=True)
            size = next(x.shape[dim] for x, dim in pairs if dim is not None)

            def fold(x: Any, dim: int | None, own: Any) -> Any:
                if not own.ndim or (dim is None and own.shape[0] != batch):
                    return x
                x = jnp.expand_dims(x, 1) if dim is None else jnp.moveaxis(x, dim, 1)
                x = jnp.broadcast_to(x, (batch, size, *x.shape[2:]))
                return x.reshape(batch * size, *x.shape[2:])

            out = run(*map(fold, arrays, self.operands, like))
            return jnp.moveaxis(out.reshape(batch, size, *out.shape[1:]), 1, self.result)

        return of_mapped


def mapped_dims(eqn: Any, call: Call) -> MappedDims | None:
    """Returns which dimensions `jax.vmap` has mapped, where it made this equation of a call."""
    jaxpr = eqn.params["jaxpr"]
    if jaxpr not in call.mapped:
        call.mapped[jaxpr] = _mapped_dims(eqn, call)
    return call.mapped[jaxpr]


def _mapped_dims(eqn: Any, call: Call) -> MappedDims | None:
    own, given = call.jaxpr.in_avals, [v.aval for v in eqn.invars]
    if len(own) != len(given) or len(eqn.outvars) != 1:
        return None
    ways = [_ways(x.shape, y.shape) for x, y in zip(given, own, strict=True)]
    wanted = _text(eqn)
    for dims in itertools.islice(itertools.product(*ways), _MOST):
        sizes = {x.shape[d] for x, d in zip(given, dims, strict=True) if d is not None}
        scalars = any(d is not None and not y.ndim for d, y in zip(dims, own, strict=True))
        if len(sizes) != 1 or scalars:
            continue
        with full_sequences(SEQUENCE):
            traced = jax.make_jaxpr(jax.vmap(call.traced, dims))(*map(abstract_like, given)).jaxpr
        inner = [e for e in all_equations(traced) if e.params.get("name") == eqn.params["name"]]
        if len(inner) != 1 or _text(inner[0]) != wanted:
            continue
        moves = [e for e in traced.eqns if e.primitive.name == "transpose"]
        result = moves[0].params["permutation"][0] if moves else 0
        return MappedDims(dims, result)
    return None


def _ways(mapped: Sequence[int], own: Sequence[int]) -> list[int | None]:
    """The dimensions that may have been added to a shape."""
    if tuple(mapped) == tuple(own):
        return [None]
    mapped = list(mapped)
    return [d for d in range(len(mapped)) if [*mapped[:d], *mapped[d + 1 :]] == list(own)]


def _text(eqn: Any) -> str:
    return _ADDRESS.sub("", str(eqn.params["jaxpr"]))
