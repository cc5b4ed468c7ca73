"""Reads and evaluates traced functions (jaxprs), whose parameters differ between JAX versions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Literal
from jax.sharding import NamedSharding

from gshard._util.tracebacks import is_library

Handler = Callable[[Any, list[Any]], Sequence[Any]]

JIT = "jit"
# For `jax.jit(inline=)`: the call is one equation of the trace, and what it calls is lowered as if
# there were no call (up to JAX 0.11 XLA removes the call). Each equation more takes time to trace.
INLINE_LATE: Any = getattr(getattr(jax, "Inline", None), "JAX_LATE", False)
VIEWS = ("transpose", "reshape", "squeeze", "reduce_precision", "copy")  # elements as they are
CHECKPOINT = "remat2"
CUSTOM_VJP = "custom_vjp_call"
COLLECTIVES = {  # primitives, and HLO's names of what they do
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}
_PLAIN = frozenset({bool, int, float, str, type(None)})  # parameters without a jaxpr
CALLED = (JIT, "closed_call", "eval_jaxpr")  # the last two are one: before and since JAX 0.12
_CALLS = (*CALLED, CHECKPOINT, "custom_jvp_call", CUSTOM_VJP, "linear_call")
_BODIES = ("jaxpr", "call_jaxpr", "callee")  # parameters in which calls have an inner jaxpr


def body_of(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the inner jaxpr of an equation that has one, and its constants."""
    return opened(next(eqn.params[name] for name in _BODIES if name in eqn.params))


def opened(body: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants, whether it is closed or not."""
    return (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())


def called(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The inner jaxpr of an equation that only calls it, and its constants; else None."""
    if eqn.primitive.name not in _CALLS:
        return None
    return body_of(eqn)


def abstract(shape: Sequence[int], dtype: Any, weak: bool = False) -> jax.ShapeDtypeStruct:
    """An array to trace with, which like every array has the mesh of the context in its type.

    Without it the type of an input differs from that of every result, so that code which compares
    the two (Equinox) fails, and JAX adds a `reshard` where both meet. The dtype of a Python number
    is weak: arrays that it is combined with keep theirs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, jax.P(*[None] * len(shape)))
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding, weak_type=weak)


def abstract_like(x: Any) -> jax.ShapeDtypeStruct:
    """An array to trace with, of the shape and dtype of `x`, in the mesh of this context."""
    return abstract(np.shape(x), x.dtype)


def bind(eqn: Any, values: Sequence[Any], **changes: Any) -> Sequence[Any]:
    """Evaluates one equation, in the context that it was traced in (`compute_on`, ...).

    `changes` replace parameters of the equation.
    """
    # a pair up to JAX 0.11, later a dict
    found = eqn.primitive.get_bind_params({**eqn.params, **changes})
    functions, params = found if isinstance(found, tuple) else ((), found)
    if eqn.primitive.name == CUSTOM_VJP:
        # Constants of a jaxpr may be NumPy arrays, and a backward pass of the user's may index one.
        values = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in values]
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *values, **params)
    return out if eqn.primitive.multiple_results else [out]


def in_scope(eqn: Any, default: str = "update") -> AbstractContextManager[Any]:
    """The named scope that an equation was traced in, or the default where there is none."""
    return jax.named_scope(str(eqn.source_info.name_stack) or default)


def bind_in_scope(eqn: Any, values: Sequence[Any], **changes: Any) -> Sequence[Any]:
    """Evaluates one equation like `bind`, in the named scope of the equation."""
    with in_scope(eqn):
        return bind(eqn, values, **changes)


def user_line(eqn: Any) -> str:
    """The file and line outside of libraries that an equation was traced at; empty if unknown."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):  # from the innermost
        if not is_library(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def as_traced(eqn: Any) -> AbstractContextManager[Any]:
    """Gives what is traced inside the user's line at which an equation was traced, if any."""
    if not user_line(eqn):
        return nullcontext()
    names = source_info_util.current_name_stack()
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=names)


class Bindings:
    """The values of a jaxpr's variables while its equations are evaluated."""

    def __init__(self, variables: Sequence[Any], values: Sequence[Any]):
        self._values = dict(zip(variables, values, strict=True))

    def read(self, variables: Sequence[Any]) -> list[Any]:
        """The values of variables and literals."""
        return [v.val if isinstance(v, Literal) else self._values[v] for v in variables]

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Sets the values of variables."""
        self._values.update(zip(variables, values, strict=True))

    def run(self, eqn: Any, handler: Handler | None = None) -> None:
        """Evaluates one equation; `handler` as in `evaluate`."""
        self.write(eqn.outvars, (handler or bind_in_scope)(eqn, self.read(eqn.invars)))


def evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], handler: Handler | None = None
) -> list[Any]:
    """Evaluates a jaxpr, which is not closed, equation by equation.

    `handler(eqn, values)` gives the results of an equation, by default `bind_in_scope`. `args` are
    arrays, or anything else that it understands.
    """
    env = Bindings([*jaxpr.constvars, *jaxpr.invars], [*consts, *args])
    for eqn in jaxpr.eqns:
        env.run(eqn, handler)
    return env.read(jaxpr.outvars)


def scan_sizes(eqn: Any) -> tuple[int, int, int]:
    """How many operands of a `scan` are constant, carried and scanned, in this order.

    The shapes tell: a scanned operand has one dimension more outside the body than inside.
    """
    body, _ = body_of(eqn)
    pairs = list(zip(eqn.invars, body.invars, strict=True))
    scanned = sum(len(outer.aval.shape) > len(inner.aval.shape) for outer, inner in pairs)
    carried = sum(
        len(outer.aval.shape) == len(inner.aval.shape)
        for outer, inner in zip(eqn.outvars, body.outvars, strict=True)
    )
    return len(pairs) - carried - scanned, carried, scanned


def product_flops(eqn: Any) -> int:
    """The FLOP of matrix products in an equation: two for each multiply-add.

    A loop of unknown length counts once, and of branches the one with the most.
    """
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2 * eqn.outvars[0].aval.size * math.prod(left[d] for d in contracted)
    if eqn.primitive.name == "custom_linear_solve":  # the others are for its derivative
        return sum(map(product_flops, opened(eqn.params["jaxprs"].solve)[0].eqns))
    found = [sum(map(product_flops, inner.eqns)) for inner in inner_jaxprs(eqn)]
    if eqn.primitive.name == "cond":
        return max(found, default=0)
    return sum(found) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)


def primitives(jaxpr: Any) -> set[str]:
    """The names of the primitives of all equations, also of those of inner jaxprs.

    Faster than `all_equations`, since jaxprs that are called many times are read once.
    """
    return {eqn.primitive.name for one in all_jaxprs(jaxpr) for eqn in one.eqns}


def dtypes(jaxpr: Any) -> set[Any]:
    """The dtypes of all arrays in a jaxpr and in its inner ones."""
    every = (v for one in all_jaxprs(jaxpr) for v in (*one.invars, *_results(one)))
    return {getattr(v.aval, "dtype", None) for v in every}


def all_jaxprs(jaxpr: Any) -> Iterator[Any]:
    """Iterates over a jaxpr and its inner ones; those that are called many times come once."""
    found, seen = [jaxpr], {jaxpr}
    while found:
        yield (one := found.pop())
        for eqn in one.eqns:
            for inner in inner_jaxprs(eqn) if eqn.params else ():
                if inner not in seen:
                    seen.add(inner)
                    found.append(inner)


def _results(jaxpr: Any) -> Iterator[Any]:
    return (v for eqn in jaxpr.eqns for v in eqn.outvars)


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Iterates over all equations, also those of inner jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_equations(inner)


def with_inner(eqn: Any) -> Iterator[Any]:
    """Iterates over an equation and those of its inner jaxprs."""
    yield eqn
    for inner in inner_jaxprs(eqn):
        yield from all_equations(inner)


def inner_jaxprs(eqn: Any) -> Sequence[Any]:
    """The jaxprs among an equation's parameters, not those inside them."""
    if eqn.primitive.name == JIT:  # most of those that have one
        return (eqn.params["jaxpr"].jaxpr,)
    found = []
    for value in eqn.params.values() if eqn.params else ():  # many have none, and there are many
        kind = value.__class__
        if kind in _PLAIN:
            continue
        for inner in value if kind is tuple or isinstance(value, (tuple, list)) else (value,):
            if inner.__class__ not in _PLAIN:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found.append(inner)
    return found
