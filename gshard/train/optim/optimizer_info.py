"""What a step records of its optimizer, and how that of a restore differs.

optax transformations are closures, so neither their names nor their hyperparameters can be read.
But the traced update shows what it does: its operations, and the numbers in it, such as a learning
rate. Numbers that are arrays of the optimizer state (`optax.inject_hyperparams`) are not among
them; they are restored like all arrays. JAX and optax may trace the same optimizer differently in
other versions, and then only the names of the state's classes are compared.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from gshard._util.errors import some
from gshard._util.jaxpr import all_equations
from gshard.sharding.plan import Plan

_MOST = 1000  # numbers that are recorded; schedules from tables have many
_infos: weakref.WeakKeyDictionary[Plan, dict[str, Any]] = weakref.WeakKeyDictionary()


def optimizer_info(plan: Plan) -> dict[str, Any]:
    """What is known of a plan's optimizer, as JSON values: the same for every level and mesh."""
    if plan not in _infos:
        _infos[plan] = _describe(plan)
    return _infos[plan]


def optimizer_lines(plan: Plan) -> list[str]:
    """The same as lines of text, for a comparison between processes."""
    info = optimizer_info(plan)
    names = {"state": "state", "numbers": "number", "operations": "operation"}
    lines = [f"{name} {x}" for key, name in names.items() for x in info.get(key, ())]
    return [*lines, f"order {info.get('trace')}"]


def difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Says how two optimizers differ, as far as that is known; empty if nothing does."""
    found = [_only("classes of the state", then, now, "state")]
    if then.get("versions") == now["versions"] and "numbers" in then and "numbers" in now:
        found += [_only("numbers of the update", then, now, "numbers")]
        found += [_only("operations of the update", then, now, "operations")]
        if not any(found) and then.get("trace", now["trace"]) != now["trace"]:
            found = ["the order of operations and numbers of the update"]
        same = then.get("parameters") == now["parameters"]  # else there are more operations
        if not any(found) and same and then["applied"] != now["applied"]:
            found = ["the parameters and moments to which the update applies its operations"]
    return "; ".join(filter(None, found))


def _only(what: str, then: Mapping[str, Any], now: Mapping[str, Any], key: str) -> str:
    before, after = ([str(x) for x in table.get(key, ())] for table in (then, now))
    gone, new = ([x for x in a if x not in b] for a, b in ((before, after), (after, before)))
    if not (gone or new):
        return ""
    sides = [(gone, "the checkpoint"), (new, "like=")]
    return f"{what}: " + ", ".join(f"{some(x)} only in {side}" for x, side in sides if x)


def _describe(plan: Plan) -> dict[str, Any]:
    def abstract(layout: Any) -> jax.ShapeDtypeStruct:
        floating = jnp.issubdtype(layout.dtype, jnp.floating)  # whatever the precision is
        return jax.ShapeDtypeStruct(layout.shape, jnp.float32 if floating else layout.dtype)

    tx = optax.with_extra_args_support(plan.tx)
    info: dict[str, Any] = {"versions": [jax.__version__, optax.__version__]}
    try:
        params = jax.tree.map(abstract, plan.params)
        state = jax.eval_shape(tx.init, params)
        info["state"] = sorted(_class_names(state))
        value = jax.ShapeDtypeStruct((), jnp.float32)
        traced = jax.make_jaxpr(lambda g, s, p, v: tx.update(g, s, p, value=v))(
            params, state, params, value
        )
    except Exception:  # the user's own code, which may need what is not there
        return info
    numbers = {_rounded(x) for x in traced.consts if _is_number(x)}
    operations: set[str] = set()
    lines: dict[str, None] = {}  # in order, each once: the same for any number of parameters
    variables = {x: i for i, x in enumerate(traced.jaxpr.invars)}
    applied = hashlib.blake2b(digest_size=8)
    for eqn in all_equations(traced.jaxpr):
        operations.add(eqn.primitive.name)
        scalars = [x.val for x in eqn.invars if isinstance(x, Literal)]
        own = [_rounded(x) for x in scalars if _is_number(x)]
        numbers |= {*own}
        line = f"{eqn.primitive.name} {own}"
        lines[line] = None
        operands = [x for x in (*eqn.invars, *eqn.outvars) if not isinstance(x, Literal)]
        numbered = [variables.setdefault(x, len(variables)) for x in operands]
        applied.update(f"{line} {numbered}\n".encode())
    trace = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    # NaN has no place in an order, and is not equal to itself.
    ordered = sorted(x for x in numbers if x == x)
    named = {"numbers": ordered[:_MOST], "operations": sorted(operations)}
    forms = [f"{x.path} {x.shape}" for x in jax.tree.leaves(plan.params)]
    parameters = hashlib.blake2b("\n".join(forms).encode(), digest_size=8).hexdigest()
    hashes = {"trace": trace, "applied": applied.hexdigest(), "parameters": parameters}
    return info | named | hashes


def _is_number(x: Any) -> bool:
    """Whether it is one real number, and no random key."""
    is_key = jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended)
    return np.size(x) == 1 and np.isrealobj(x) and not is_key


def _rounded(x: Any) -> float:
    """A number as it is read, whether it was traced as a float32 or as Python's own."""
    return float(f"{float(np.asarray(x).item()):.6g}")


def _class_names(state: Any) -> set[str]:
    """The names of the named tuples in an optimizer state."""
    if not isinstance(state, (tuple, list, dict)):
        return set()
    own = {type(state).__name__} if hasattr(state, "_fields") else set()
    inner = state.values() if isinstance(state, dict) else state
    return own.union(*map(_class_names, inner)) if inner else own
