"""`by_examples`: states that a function acts on each example by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError
from gshard._util.jaxpr import JIT
from gshard._util.named_calls import behind_call, call_by_name
from gshard._util.validation import shown
from gshard.train.global_loss.placement import REPLICATED, sharded
from gshard.train.global_loss.registry import Decision, Given, rule


@dataclass
class _Call:
    """A function of flat arguments, and which of them have the examples on dimension 0."""

    fun: Callable[..., Any]
    mapped: Sequence[bool]
    closes: bool  # over traced values


def by_examples(fun: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    """States that `fun` acts on each example by itself, so that a loss need not gather for it.

    gshard knows how the operations of JAX treat the examples of a batch. A kernel of your own
    (Pallas, `jax.pure_callback`, `jax.ffi`) is opaque: the examples of all devices are gathered for
    it. Wrapped, it runs on each device's own examples. The result is wrong if `fun` mixes examples.
    Under `jax.vmap` or `jax.grad` inside the loss it has no effect: examples are gathered. A
    `jax.custom_vjp` in `fun` receives the gradient of a parameter from each device's examples, and
    so must be linear in it.

    Args:
      fun: a function of arrays. Every array that it returns has the examples on dimension 0.
      in_axes: as in `jax.vmap`, 0 or None for each positional argument or leaf of one: 0 where
        dimension 0 holds the examples, None for parameters and tables.

    Returns:
      The same function, outside of gshard as well.

    Raises:
      GShardError: at the call, for other axes, and for results without the examples; in a loss, if
        `fun` closes over traced values: pass them as arguments.

    Example:
      >>> attention = gshard.by_examples(lambda q, k, scale: q * k * scale, in_axes=(0, 0, None))
      >>> attention(np.ones((8, 4)), np.ones((8, 4)), 2.0).shape
      (8, 4)
    """
    if not callable(fun):
        raise GShardError(f"by_examples({shown(fun)}): pass a function of arrays.")
    place = getattr(fun, "__qualname__", repr(fun))

    @functools.wraps(fun)
    def wrapped(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        axes = _axes(in_axes, args, place)
        sizes = {jnp.shape(x)[:1] for x, axis in zip(leaves, axes, strict=True) if axis == 0}
        if len(sizes) != 1 or () in sizes:
            raise GShardError(
                f"by_examples({place}): arguments with in_axes=0 need one number of examples on "
                f"dimension 0; their shapes begin with {sorted(sizes)}. Pass in_axes=None for "
                "parameters."
            )
        out_structure: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            out, tree = jax.tree.flatten(fun(*jax.tree.unflatten(structure, leaves)))
            out_structure[:] = [tree]
            return out

        def call(_: Any, jaxpr: Any) -> _Call:
            return _Call(flat, [x == 0 for x in axes], len(jaxpr.in_avals) > len(leaves))

        out = call_by_name(f"by_examples({place})", flat, leaves, call)
        wrong = [x.shape for x in out if (x.shape[:1],) != tuple(sizes)]
        if wrong:
            raise GShardError(
                f"by_examples({place}): a result has shape {wrong[0]}, and {sizes.pop()[0]} "
                "examples went in. Return arrays with the examples on dimension 0."
            )
        return jax.tree.unflatten(out_structure[0], out)

    return wrapped


def _axes(in_axes: Any, args: tuple[Any, ...], place: str) -> list[Any]:
    """Returns one axis for each leaf of the arguments."""
    axes = in_axes if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
    try:
        spread = jax.tree.broadcast(tuple(axes), args, is_leaf=lambda x: x is None)
    except ValueError:
        spread = None
    leaves = jax.tree.leaves(spread, is_leaf=lambda x: x is None)
    if spread is None or any(axis not in (0, None) for axis in leaves):
        raise GShardError(
            f"by_examples({place}): in_axes={shown(in_axes)} does not fit {len(args)} arguments. "
            "Give 0 or None for each."
        )
    return leaves


def is_by_examples(eqn: Any) -> bool:
    """Whether an equation is a call that `by_examples` wrapped, as it was wrapped."""
    call = behind_call(eqn, _Call, transformed=True)
    return call is not None and (call.closes or behind_call(eqn, _Call) is not None)


@rule(JIT)
def _called(given: Given) -> Decision | None:
    """Every device calls the function with its own examples, and with their full sequences."""
    call = behind_call(given.eqn, _Call, transformed=True)
    if call is None or not is_by_examples(given.eqn):
        return None
    if not given.evaluator.of_examples:
        return given.all(REPLICATED)
    if call.closes:
        raise GShardError(
            f"{given.evaluator.place(given.eqn)} closes over traced values, such as parameters. "
            "Pass them as arguments, with in_axes=None."
        )
    wanted = [sharded(0) if mapped else REPLICATED for mapped in call.mapped]
    results = [sharded(0)] * len(given.eqn.outvars)

    def run(values: list[Any]) -> list[Any]:
        if not given.evaluator.exchanges:
            return call.fun(*values)
        axes = tuple(0 if mapped else None for mapped in call.mapped)
        return by_examples(call.fun, axes)(*values)  # for the evaluation over the other axes

    return Decision(wanted, results, run=run)
