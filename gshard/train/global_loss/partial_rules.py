"""Rules that keep a partial sum partial: equations that are linear in it.

Elsewhere a partial sum is summed over the devices first. A replicated operand that is added counts
once: on the first part.
"""

from __future__ import annotations

import jax.numpy as jnp

from gshard.train.global_loss.placement import PARTIAL, REPLICATED
from gshard.train.global_loss.registry import Decision, Given, partial_rule


@partial_rule("neg", "reduce_sum", "reshape", "reshard", "broadcast_in_dim", "transpose", "squeeze")
@partial_rule("copy", "real", "imag", "slice", "stop_gradient", "name", "rev", "split", "cumsum")
@partial_rule("sharding_constraint", "unstack")
def linear(given: Given) -> Decision | None:
    """Of one operand, the first; others are sizes."""
    if given.eqn.invars[0].aval.dtype == jnp.bool_ or given.placements[0] != PARTIAL:
        return None
    others = [REPLICATED] * (len(given.placements) - 1)
    return Decision([PARTIAL, *others], [PARTIAL] * len(given.eqn.outvars))


@partial_rule("convert_element_type")
def convert(given: Given) -> Decision | None:
    """To a float of at least 32 bits, or no narrower than before. Integers may not wrap.

    To the same dtype a loop converts what it carries, if that began as a Python number.
    """
    old, new = given.eqn.invars[0].aval.dtype, given.eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(new, jnp.inexact) or old == jnp.bool_:
        return given.all(PARTIAL) if old == new != jnp.bool_ else None
    if jnp.issubdtype(old, jnp.integer):
        known = given.positions[0]
        exact = new.itemsize >= 4 or (known and known.bound or 0) <= 2 ** (jnp.finfo(new).nmant + 1)
        fits = known is not None and known.bound is not None and exact
    else:
        fits = new.itemsize >= min(old.itemsize, 4)
    return given.all(PARTIAL) if fits else None


@partial_rule("add", "sub", "add_any", "concatenate", "stack")
def added(given: Given) -> Decision | None:
    """Also with replicated operands."""
    return given.all(PARTIAL) if given.eqn.outvars[0].aval.dtype != jnp.bool_ else None


@partial_rule("mul", "dot_general")
def multiplied(given: Given) -> Decision | None:
    """By a replicated factor. A sum of integers is multiplied in its own dtype, where it wraps."""
    old, new = given.eqn.invars[0].aval.dtype, given.eqn.outvars[0].aval.dtype
    if given.placements.count(PARTIAL) > 1 or new == jnp.bool_:
        return None
    if jnp.issubdtype(old, jnp.integer) and new != old:
        return None
    return Decision(given.placements, [PARTIAL])


@partial_rule("div")
def divided(given: Given) -> Decision | None:
    """By a replicated divisor; of integers it would round every part."""
    if not jnp.issubdtype(given.eqn.outvars[0].aval.dtype, jnp.inexact):
        return None
    return Decision([PARTIAL, REPLICATED], [PARTIAL]) if _is_first(given) else None


@partial_rule("select_n")
def selected(given: Given) -> Decision | None:
    """By a replicated predicate."""
    if given.placements[0] != REPLICATED or given.eqn.outvars[0].aval.dtype == jnp.bool_:
        return None
    cases = [PARTIAL] * (len(given.placements) - 1)
    return Decision([REPLICATED, *cases], [PARTIAL])


def _is_first(given: Given) -> bool:
    return given.placements[0] == PARTIAL and given.placements[1] != PARTIAL
