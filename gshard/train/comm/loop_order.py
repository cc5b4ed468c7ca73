"""Makes collectives wait for the loops before them that have some, on CPU devices.

XLA:CPU starts the collectives of a program in its order, but of a loop only the start counts: a
collective behind the loop may run while those of the loop still do. Devices then meet in different
collectives, so that the process aborts, waits for ever, or exchanges the wrong data (openxla/xla,
`xla/runtime/execution_graph.cc`; seen with JAX 0.12.0.1, and possible since 0.10.2). A collective
that reads a value of the loop waits for its end. GPUs and TPUs run collectives one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from gshard._util.jaxpr import (
    COLLECTIVES,
    Bindings,
    abstract_like,
    bind,
    bind_inlined,
    body_of,
    called,
    evaluate,
    in_scope,
    opened,
    scan_sizes,
    with_inner,
)
from gshard.sharding.mesh import Group

_LOOPS = ("scan", "while", "cond")  # what XLA runs as a program within the program


def in_loop_order(fun: Callable[..., Any], group: Group) -> Callable[..., Any]:
    """Returns `fun`, which runs on one device, with collectives that wait for loops before them.

    Where no collective could overtake a loop, and on other platforms, it is the same program.
    """
    if group.platform != "cpu" or group.devices == 1:
        return fun

    @wraps(fun)
    def ordered(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(jax.jit(fun), return_shape=True)(*args)
        out = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), _call)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return ordered


def _call(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    inner = called(eqn)
    if inner is None or not _is_unordered(inner[0]):
        return bind_inlined(eqn, values)
    return _evaluate(*inner, values)


def _communicates(eqn: Any) -> bool:
    return any(x.primitive.name in COLLECTIVES for x in with_inner(eqn))


def _is_loop(eqn: Any) -> bool:
    """Whether it is a loop with collectives, or calls one."""
    return any(x.primitive.name in _LOOPS and _communicates(x) for x in with_inner(eqn))


def _bodies(eqn: Any) -> dict[str, Any]:
    """The jaxprs among an equation's parameters, by name: one, or a tuple of branches."""
    found = {}
    for name, value in eqn.params.items():
        first = value[0] if isinstance(value, (tuple, list)) and value else value
        if hasattr(getattr(first, "jaxpr", first), "eqns"):
            found[name] = value
    return found


def _is_unordered(jaxpr: Any, inner: bool = False) -> bool:
    """Whether a collective could overtake a loop, here or in an inner jaxpr."""
    if not any(_is_loop(eqn) for eqn in jaxpr.eqns):
        return False
    waits, outputs = _waits(jaxpr)
    return any([*waits, outputs and not inner]) or any(
        _is_unordered(opened(x)[0], inner=True)
        for eqn in jaxpr.eqns
        for body in _bodies(eqn).values()
        for x in (body if isinstance(body, (tuple, list)) else (body,))
    )


def _waits(jaxpr: Any) -> tuple[list[list[Any]], list[Any]]:
    """Returns the variables that each equation, and that the results, must wait for.

    A collective waits for the last loop, and a loop for all collectives since the last one, unless
    it reads something that was computed from them.
    """
    waits: list[list[Any]] = [[] for _ in jaxpr.eqns]
    loop, behind, since = None, set(), []
    for i, eqn in enumerate(jaxpr.eqns):
        flags = _in(behind, [v for v in eqn.invars if not isinstance(v, Literal)])
        if _communicates(eqn):
            # Each of several operations must wait; a loop is one.
            waiting = any(flags) if eqn.primitive.name in _LOOPS else flags and all(flags)
            if loop is not None and not waiting:
                waits[i].append(loop)
                behind.update(eqn.outvars)
            token = _token(eqn)
            if _is_loop(eqn):
                before = _ancestors(jaxpr, i)
                waits[i] += [v for v in since if v not in before]
                loop, behind, since = token, set(_computed(eqn)), []
            elif token is not None:
                since.append(token)
        behind.update(_behind(eqn, _in(behind, eqn.invars)))
    late = [v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in behind]
    return waits, [loop] if loop is not None and late else []


def _in(found: set[Any], variables: Sequence[Any]) -> list[bool]:
    """Of each variable or literal, whether it is in the set."""
    return [not isinstance(v, Literal) and v in found for v in variables]


def _behind(eqn: Any, flags: Sequence[bool]) -> list[Any]:
    """The results of an equation that are computed from inputs with a flag."""
    if eqn.primitive.name == "optimization_barrier":  # which XLA removes
        return [v for v, flag in zip(eqn.outvars, flags, strict=True) if flag]
    inner = called(eqn)
    if inner is None:
        return list(eqn.outvars) if any(flags) else []
    jaxpr, _ = inner
    found = {v for v, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    for x in jaxpr.eqns:
        found.update(_behind(x, _in(found, x.invars)))
    return [v for v, is_in in zip(eqn.outvars, _in(found, jaxpr.outvars), strict=True) if is_in]


def _ancestors(jaxpr: Any, i: int) -> set[Any]:
    """The variables that an equation's inputs are computed from, and these."""
    found = {v for v in jaxpr.eqns[i].invars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns[:i]):
        if any(_in(found, eqn.outvars)):
            found.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


def _computed(eqn: Any) -> list[Any]:
    """The results of an equation, without those that a scan passes on as they are."""
    if eqn.primitive.name != "scan":
        return list(eqn.outvars)
    body, _ = body_of(eqn)
    pairs = zip(eqn.outvars, body.outvars, strict=True)
    return [v for v, own in pairs if not isinstance(own, Literal) and own not in body.invars]


def _token(eqn: Any) -> Any:
    """A result of which one entry tells that an equation has ended; None if it has none."""
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    fit = [v for v in _computed(eqn) if v.aval.size]
    return next((v for kind in kinds for v in fit if jnp.issubdtype(v.aval.dtype, kind)), None)


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], inner: bool = False
) -> list[Any]:
    """Evaluates a jaxpr in order; one of an inner jaxpr ends as a whole."""
    env = Bindings([*jaxpr.constvars, *jaxpr.invars], [*consts, *args])
    waits, outputs = _waits(jaxpr)
    for eqn, tokens in zip(jaxpr.eqns, waits, strict=True):
        values = env.read(eqn.invars)
        if tokens:
            values = _after(eqn, values, env.read(tokens))
        with in_scope(eqn):
            changes = {k: _rebuilt(v) for k, v in _bodies(eqn).items() if _is_loop(eqn)}
            env.write(eqn.outvars, bind(eqn, values, **changes))
    out = env.read(jaxpr.outvars)
    if outputs and not inner:
        never = _never(env.read(outputs))
        out = [_tied(x, never) for x in out]
    return out


def _rebuilt(body: Any) -> Any:
    """An inner jaxpr, or a tuple of them, in order."""
    if isinstance(body, (tuple, list)):
        return type(body)(_rebuilt(x) for x in body)
    jaxpr, consts = opened(body)
    if not _is_unordered(jaxpr, inner=True):
        return body
    run = partial(_evaluate, jaxpr, consts, inner=True)
    made = jax.make_jaxpr(lambda *args: run(args))(*(abstract_like(v.aval) for v in jaxpr.invars))
    return made if hasattr(body, "consts") else made.jaxpr


def _after(eqn: Any, values: Sequence[Any], tokens: Sequence[Any]) -> list[Any]:
    """The operands of an equation, such that it starts after what the tokens are results of.

    A loop waits for all that it starts with, and reads the smallest of it; anything else may be
    several operations, so that each operand waits.
    """
    never, first, end = _never(tokens), 0, len(values)
    if eqn.primitive.name == "scan":
        constant, carried, _ = scan_sizes(eqn)
        first, end = (constant, constant + carried) if carried else (constant, end)
    elif eqn.primitive.name == "while":
        first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    elif eqn.primitive.name == "cond":
        end = 1
    return [_tied(x, never) if first <= i < end else x for i, x in enumerate(values)]


def _never(tokens: Sequence[Any]) -> jax.Array:
    """False, but the compiler does not know."""
    found = jnp.bool_(False)
    for x in tokens:
        one = lax.reshape(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), ())
        found |= one.astype(jnp.float32) > jnp.inf
    return found


def _tied(x: Any, never: jax.Array) -> Any:
    """`x`, which is only known once `never` is."""
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    other = -x if jnp.issubdtype(x.dtype, jnp.inexact) else ~x
    return lax.select(jnp.broadcast_to(never, x.shape), other, x)
