"""The first state of an optimizer, made without memory for its zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import core as jax_core
from jax.extend.core import Literal

from gshard._util.errors import GShardError
from gshard._util.jaxpr import JIT, bind, called, evaluate
from gshard._util.tracebacks import at_line


class NotMade(NamedTuple):
    """In place of the optimizer state of `(params, tx)`, until it is known what is trained."""


def initial(tx: Any, trained: Any) -> Any:
    """Makes the optimizer's first state; constants are views on the host that take no memory.

    Called as it is, `tx.init` compiles a program for every shape among the moments, and makes all
    of them in full on one device.
    """
    leaves = jax.tree.leaves(trained)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return _abstract(tx, trained)
    if any(isinstance(x, jax_core.Tracer) for x in leaves) or any(
        isinstance(x, jax.Array) and not x.is_fully_replicated for x in leaves
    ):  # zeros take the sharding of the parameters
        return tx.init(trained)
    try:
        closed, shapes = jax.make_jaxpr(tx.init, return_shape=True)(trained)
    except Exception:  # it reads values, or returns what is not an array
        return tx.init(trained)
    state = evaluate(closed.jaxpr, closed.consts, leaves, _on_host_where_constant)
    return jax.tree.unflatten(jax.tree.structure(shapes), state)


def _abstract(tx: Any, trained: Any) -> Any:
    try:
        return jax.eval_shape(tx.init, trained)
    except GShardError:
        raise
    except Exception as error:
        said = str(error).strip().split("\n")[0]
        raise GShardError(
            f"the optimizer's init fails{at_line(error)}: {type(error).__name__}: {said}"
        ) from error


def _on_host_where_constant(eqn: Any, values: list[Any]) -> Sequence[Any]:
    inner = called(eqn)
    if eqn.primitive.name == JIT and inner is not None:
        return evaluate(*inner, values, _on_host_where_constant)
    if eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal):
        (result,) = (v.aval for v in eqn.outvars)
        if isinstance(result.dtype, np.dtype) and not result.weak_type:  # NumPy has no weak types
            return [np.broadcast_to(np.asarray(values[0], result.dtype), result.shape)]
    return bind(eqn, values)
