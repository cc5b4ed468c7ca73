"""Equations that call a function with its own derivative: `jax.custom_jvp`, `jax.custom_vjp`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.jaxpr import bind, evaluate, opened

CUSTOM = ("custom_jvp_call", "custom_vjp_call")
_closed_over: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by jaxpr


class CustomCall:
    """The operands and results of a call that have a derivative.

    Attributes:
      operands, results: the types of all of them.
      of_operands, of_results: the positions of those that have a derivative.
    """

    def __init__(self, eqn: Any):
        self.eqn = eqn
        self.operands = [v.aval for v in eqn.invars]
        self.results = [v.aval for v in eqn.outvars]
        # JAX has no derivative of a custom_vjp by what it closes over, which comes first.
        closed = eqn.params["num_consts"] if eqn.primitive.name == "custom_vjp_call" else 0
        closed = max(closed, _closed_over.get(self._body(), 0))
        self.of_operands = [i for i, x in enumerate(self.operands) if i >= closed and _inexact(x)]
        self.of_results = [i for i, x in enumerate(self.results) if _inexact(x)]

    def called(self, operands: Sequence[Any]) -> Callable[..., Any]:
        """Returns the call as a function of the operands that have a derivative."""

        def call(*some: Any) -> Any:
            return list(bind(self.eqn, replaced(operands, self.of_operands, some)))

        return call

    def jvp(self, primals: Any, tangents: Any) -> list[Any]:
        """Returns results and their derivatives, from operands and theirs."""
        at = chosen(primals, self.of_operands)
        out, d_out = jax.jvp(self.called(primals), at, tangents)
        return [*out, *chosen(d_out, self.of_results)]

    def vjp(self, *operands: Any) -> tuple[list[Any], Any]:
        """Returns results, and what transposes the derivative: a tree of residuals."""
        return jax.vjp(self.called(operands), *chosen(operands, self.of_operands))

    def traced(self, trace: Callable[[], Any]) -> Any:
        """Returns what `trace`, which calls `vjp` once, returns.

        `jax.vmap` of a `jax.jit` of a custom_vjp loses how many operands it closes over: the first
        are left out until JAX accepts the others. Their number is kept for the next call of this
        equation, in which JAX would fail after such an attempt.
        """
        while True:
            try:
                return trace()
            except Exception as error:  # it is not in jax.errors
                if type(error).__name__ != "CustomVJPException" or not self.of_operands:
                    raise
                _closed_over[self._body()] = self.of_operands.pop(0) + 1

    def guarded(self, operands: Sequence[Any]) -> list[Any]:
        """Returns the operands; a derivative by what the function closes over is an error."""
        left_out = [_inexact(x) and i not in self.of_operands for i, x in enumerate(self.operands)]
        return [_constant(x) if out else x for x, out in zip(operands, left_out, strict=True)]

    def _body(self) -> Any:
        return opened(self.eqn.params["call_jaxpr"])[0]

    def transposed(self, function: Any, cotangents: Any) -> Any:
        """Calls such a function with the cotangents of the results that have a derivative."""
        zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in self.results]
        return function(replaced(zeros, self.of_results, cotangents))


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
    """Returns an array by which nothing is differentiated."""
    return x


@_constant.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    raise GShardError(
        "a function with jax.custom_vjp closes over an array that depends on the parameters, and "
        "has no derivative with respect to it. Pass the array as an argument of the function."
    )


def rebuilt(eqn: Any, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns the function of an equation, with its own derivative.

    `change` replaces the jaxprs (which are not closed) of both. They are traced as the call was, in
    its context.
    """
    call, tree, residual_avals = CustomCall(eqn), list[Any](), list[Any]()
    n, at = len(call.results), call.of_operands

    def forward(operands: Any) -> Any:
        out, transposed = call.vjp(*operands)
        residuals, structure = jax.tree.flatten(transposed)
        tree[:] = [structure]
        return [*out, *residuals]

    def changed(fun: Callable[..., Any], *avals: Any) -> Callable[..., list[Any]]:
        with eqn.ctx.manager:
            closed = jax.make_jaxpr(fun)(*map(inputs_like, avals))
        if fun is forward:
            residual_avals[:] = [v.aval for v in closed.jaxpr.outvars[n:]]
        body = change(closed.jaxpr)
        return lambda *args: evaluate(body, closed.consts, jax.tree.leaves(args))

    def plain(*arrays: Any) -> list[Any]:
        body, consts = opened(eqn.params["call_jaxpr"])
        return evaluate(change(body), consts, arrays)

    if eqn.primitive.name == "custom_jvp_call":
        function = jax.custom_jvp(plain)

        def derivative(primals: Any, tangents: Any) -> Any:
            both = changed(call.jvp, call.operands, chosen(call.operands, at))
            found = both(primals, [jnp.asarray(x) for x in chosen(tangents, at)])
            out, d_out = found[:n], found[n:]
            return out, replaced(no_tangents(out), call.of_results, d_out)

        function.defjvp(derivative)
        return function

    def with_residuals(*arrays: Any) -> Any:
        found = call.traced(lambda: changed(forward, call.operands))(arrays)
        return found[:n], found[n:]

    def backward(residuals: Any, cotangents: Any) -> Any:
        return call.transposed(jax.tree.unflatten(tree[0], residuals), cotangents)

    def transposed(residuals: Any, cotangents: Any) -> Any:
        given = chosen(cotangents, call.of_results)
        avals = chosen(call.results, call.of_results)
        found = changed(backward, residual_avals, avals)(residuals, given)
        return tuple(replaced(no_tangents(call.operands), at, found))

    function = jax.custom_vjp(plain)
    function.defvjp(with_residuals, transposed)
    return function


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def replaced(values: Sequence[Any], at: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Returns the values with new ones at these positions."""
    out = list(values)
    for i, x in zip(at, new, strict=True):
        out[i] = x
    return out


def chosen(values: Sequence[Any], at: Sequence[int]) -> list[Any]:
    """Returns the values at these positions."""
    return [values[i] for i in at]


def inputs_like(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes, and the axes of a `shard_map` over which arrays vary."""
    return [_input_like(x) for x in avals]


def _input_like(x: Any) -> jax.ShapeDtypeStruct:
    varies = x.manual_axis_type
    if varies is None or varies.empty:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    # what varies names axes of a mesh, which is that of its sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, manual_axis_type=varies)


def no_tangents(arrays: Sequence[Any]) -> list[Any]:
    """Returns the tangents of arrays without a derivative."""
    return [np.zeros(jnp.shape(x), jax.dtypes.float0) for x in arrays]
