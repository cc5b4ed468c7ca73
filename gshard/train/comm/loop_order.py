"""Makes a collective wait for earlier loops that contain collectives, on CPU devices.

XLA:CPU starts the collectives of a program in order, but orders only the start of a loop: a
collective after the loop may run while the loop's own collectives still run. Devices then join
different collectives, so that the process aborts, waits for ever, or exchanges the wrong data
(openxla/xla, `xla/runtime/execution_graph.cc`; seen with JAX 0.12.0.1, and possible since 0.10.2).
A collective that reads a result of the loop waits for its end. GPUs and TPUs run collectives one by
one.
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
    INLINE_LATE,
    Bindings,
    abstract_like,
    all_equations,
    bind_in_scope,
    body_of,
    called,
    inner_jaxprs,
    opened,
    primitives,
    scan_sizes,
    with_inner,
)
from gshard._util.jaxpr_dataflow import flow, sources
from gshard.sharding.group import Group

_LOOPS = ("scan", "while", "cond")  # what XLA runs as a program within the program


def in_loop_order(fun: Callable[..., Any], group: Group) -> Callable[..., Any]:
    """Returns `fun`, which runs on each device, with collectives that wait for earlier loops.

    Where no collective could overtake a loop, and on other platforms, it is the same program. Not
    ordered are collectives of a call that do not use its operands, those that XLA moves out of a
    loop because they do not change in it, and those that XLA inserts.
    """
    if group.platform != "cpu" or group.devices == 1:
        return fun

    @wraps(fun)
    def ordered(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        if not _is_unordered(closed.jaxpr):  # `fun` was traced above, and JAX reuses that
            return jax.jit(fun, inline=INLINE_LATE)(*args)
        out = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return ordered


def _communicates(eqn: Any) -> bool:
    return any(x.primitive.name in COLLECTIVES for x in with_inner(eqn))


def _is_loop(eqn: Any) -> bool:
    """Whether it is a loop that contains collectives, or a call that contains such a loop."""
    return any(x.primitive.name in _LOOPS and _communicates(x) for x in with_inner(eqn))


def _is_unordered(jaxpr: Any, inner: bool = False) -> bool:
    """Whether a collective could overtake a loop, here or in an inner jaxpr."""
    if primitives(jaxpr).isdisjoint(_LOOPS):
        return False
    loops = (eqn for eqn in all_equations(jaxpr) if eqn.primitive.name in _LOOPS)
    if not any(map(_communicates, loops)):
        return False
    waits, outputs = _waits(jaxpr)
    return any([*waits, outputs and not inner]) or any(
        _is_unordered(body, inner=True) for eqn in jaxpr.eqns for body in inner_jaxprs(eqn)
    )


def _waits(jaxpr: Any) -> tuple[list[list[Any]], list[Any]]:
    """Returns the variables that each equation, and that the results, must wait for.

    A collective waits for the last loop, and a loop for all collectives since the last one, unless
    the waiting equation reads something that was computed from what it waits for.
    """
    waits: list[list[Any]] = [[] for _ in jaxpr.eqns]
    loop: list[Any] = []  # results of the last one
    behind: set[Any] = set()  # what is computed from it
    since: list[Any] = []  # results of collectives after it
    for i, eqn in enumerate(jaxpr.eqns):
        flags = _in(behind, [v for v in eqn.invars if not isinstance(v, Literal)])
        if _communicates(eqn):
            # Each of several operations must wait; a loop is one.
            waiting = any(flags) if eqn.primitive.name in _LOOPS else flags and all(flags)
            if loop and not waiting:
                waits[i] += loop
                behind.update(eqn.outvars)
            computed = _computed(eqn)
            tokens = _tokens(eqn, computed)
            if tokens and _is_loop(eqn):
                before = _ancestors(jaxpr, i)
                waits[i] += [v for v in since if v not in before]
                # Of a call with several results some may not come from its loop.
                is_whole = eqn.primitive.name in _LOOPS or len(eqn.outvars) == 1
                loop, behind, since = tokens, set(computed if is_whole else ()), []
            else:
                since += tokens
        flags = _behind(eqn, _in(behind, eqn.invars))
        behind.update(v for v, flag in zip(eqn.outvars, flags, strict=True) if flag)
    late = [v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in behind]
    return waits, loop if late else []


def _in(found: set[Any], variables: Sequence[Any]) -> list[bool]:
    """Of each variable or literal, whether it is in the set."""
    return [not isinstance(v, Literal) and v in found for v in variables]


def _behind(eqn: Any, flags: Sequence[bool]) -> Sequence[bool]:
    """Of each result of an equation, whether it is computed from an operand with a flag."""
    if eqn.primitive.name == "optimization_barrier":  # which XLA removes
        return flags
    if (inner := called(eqn)) is not None:
        return flow(inner[0], flags, _behind, False)
    return [any(flags)] * len(eqn.outvars)


def _ancestors(jaxpr: Any, i: int) -> set[Any]:
    """The variables that an equation's inputs are computed from, and these."""
    found = {v for v in jaxpr.eqns[i].invars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns[:i]):
        flags = _in(found, eqn.outvars)
        if eqn.primitive.name != "optimization_barrier":
            flags = [any(flags)] * len(eqn.invars)
        pairs = zip(eqn.invars, flags, strict=True)
        found.update(v for v, flag in pairs if flag and not isinstance(v, Literal))
    return found


def _computed(eqn: Any) -> list[Any]:
    """The results of an equation, without those that a scan passes on as they are."""
    if eqn.primitive.name != "scan":
        return list(eqn.outvars)
    body, _ = body_of(eqn)
    results = zip(eqn.outvars, body.outvars, sources(body), strict=True)
    return [v for v, own, i in results if i is None and not isinstance(own, Literal)]


def _tokens(eqn: Any, computed: Sequence[Any]) -> list[Any]:
    """Of the computed results, those that are known only when the collectives have ended."""
    own = jax.dtypes.extended
    fit = [v for v in computed if v.aval.size and not jnp.issubdtype(v.aval.dtype, own)]
    if eqn.primitive.name not in _LOOPS:
        return fit
    fit.sort(key=lambda v: not jnp.issubdtype(v.aval.dtype, jnp.inexact))  # XLA may know a counter
    return fit[:1]


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], inner: bool = False
) -> list[Any]:
    """Evaluates a jaxpr in order. Results of an inner one are not tied: XLA ends it as a whole."""
    env = Bindings([*jaxpr.constvars, *jaxpr.invars], [*consts, *args])
    waits, outputs = _waits(jaxpr)
    for eqn, tokens in zip(jaxpr.eqns, waits, strict=True):
        values = env.read(eqn.invars)
        if tokens:
            values = _after(eqn, values, env.read(tokens))
        known = eqn.primitive.name in _LOOPS or called(eqn) is not None
        changes = {k: _rebuilt(v) for k, v in eqn.params.items() if known and _is_loop(eqn)}
        env.write(eqn.outvars, bind_in_scope(eqn, values, **changes))
    out = env.read(jaxpr.outvars)
    if outputs and not inner:
        never = _never(env.read(outputs))
        out = [_tied(x, v.aval, never) for x, v in zip(out, jaxpr.outvars, strict=True)]
    return out


def _rebuilt(param: Any) -> Any:
    """A parameter of an equation, with the jaxprs in it in order."""
    if type(param) is tuple:  # such as branches
        return tuple(map(_rebuilt, param))
    jaxpr, consts = opened(param)
    if not hasattr(jaxpr, "eqns") or not _is_unordered(jaxpr, inner=True):
        return param
    run = partial(_evaluate, jaxpr, consts, inner=True)
    made = jax.make_jaxpr(lambda *args: run(args))(*(abstract_like(v.aval) for v in jaxpr.invars))
    return made if hasattr(param, "consts") else made.jaxpr


def _after(eqn: Any, values: Sequence[Any], tokens: Sequence[Any]) -> list[Any]:
    """The operands of an equation, changed so that it starts after the tokens are known.

    A loop starts when all of its operands are known, so its carry, or predicate, is enough.
    Anything else may be several operations, so that each operand waits.
    """
    never, first, end = _never(tokens), 0, len(values)
    if eqn.primitive.name == "scan":
        constant, carried, _ = scan_sizes(eqn)
        carry = eqn.invars[constant : constant + carried]
        # XLA may know a counter without the loop.
        if any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in carry):
            first, end = constant, constant + carried
    elif eqn.primitive.name == "while":
        first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    elif eqn.primitive.name == "cond":
        end = 1
    operands = enumerate(zip(values, eqn.invars, strict=True))
    return [_tied(x, v.aval, never) if first <= i < end else x for i, (x, v) in operands]


def _never(tokens: Sequence[Any]) -> jax.Array:
    """False, but the compiler does not know."""
    found = jnp.bool_(False)
    for x in tokens:
        one = lax.reshape(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), ())
        found |= jnp.real(one).astype(jnp.float32) > jnp.inf
    return found


def _tied(x: Any, aval: Any, never: jax.Array) -> jax.Array:
    """`x`, made to depend on `never`."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        return jax.random.wrap_key_data(_tied(data, data, never), impl=jax.random.key_impl(x))
    x = lax.convert_element_type(x, aval.dtype)  # of a literal
    other = -x if jnp.issubdtype(aval.dtype, jnp.inexact) else ~x
    return lax.select(jnp.broadcast_to(never, x.shape), other, x)
