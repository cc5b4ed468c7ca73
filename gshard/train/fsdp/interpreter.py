"""Gather at first use: a loss on whole parameters, evaluated with divided ones.

The loss is traced to a jaxpr and evaluated equation by equation. A divided leaf stays divided
through casts (so that the compute dtype travels), into `jit`, `checkpoint` and the scanned inputs
of `scan`, and is gathered where something first needs it whole. Hence a scanned model holds one
layer at a time, and a `checkpoint` gathers again in the backward pass. The model is not changed.

What a leaf is here: `divided_leaf`; how its gradient leaves: `use`; which leaves move together:
`layer_buckets`; how the backward pass gathers again: `whole_again`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from gshard._util.errors import some, warn
from gshard._util.jaxpr import (
    CHECKPOINTS,
    JIT,
    VIEWS,
    bind,
    body_of,
    evaluate,
    in_scope,
    scan_sizes,
)
from gshard.train.fsdp import constraints
from gshard.train.fsdp.gather_bucket import Scope
from gshard.train.fsdp.gather_spec import Use
from gshard.train.fsdp.lazy_param import LazyParam
from gshard.train.fsdp.regather import gathered, hold_back, on_gathered, saves_operands
from gshard.train.fsdp.use_analysis import Places, by_first_use, move_layers_together


def with_sharded_params(
    fun: Callable[..., Any],
    uses: Sequence[Use | None],
    axes: Sequence[str],
    leaves: Sequence[jax.Array],
    taps: Sequence[jax.Array],
    *args: Any,
    scope: Scope,
    prepare: Callable[[Any, list[Any], Callable[..., Any]], list[Any]] | None = None,
) -> Any:
    """`fun(whole leaves, *args)`, its leaves made whole at their first use.

    Runs inside a `shard_map` over the data axes.

    Args:
      fun: takes a list of whole leaves, then `args`; returns a pytree of arrays.
      uses: one per leaf; None for a leaf that is given whole and differentiated as it is.
      axes: the data axes, which `fun` may not constrain.
      leaves: this device's parts (or wholes).
      taps: one per leaf, `use.tap()`; ignored where the use is None.
      *args: further pytrees of arrays, for `fun`.
      scope: when leaves are gathered; a context that is open.
      prepare: `prepare(jaxpr, inputs, trace)` gives the inputs that the traced `fun` is evaluated
        with; `trace(*args)` is its jaxpr for other arguments.
    """
    values = [
        leaf if use is None else LazyParam.alone(use, leaf, tap, scope)
        for use, leaf, tap in zip(uses, leaves, taps, strict=True)
    ]
    abstract = [
        jax.ShapeDtypeStruct(leaf.shape if use is None else use.stored.shape, leaf.dtype)
        for use, leaf in zip(uses, leaves, strict=True)
    ]
    try:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(abstract, *args)
    except ValueError as error:
        constraints.explain(error, axes)
        raise
    constraints.refuse(closed.jaxpr, axes)
    scope.order = by_first_use(closed.jaxpr)
    inputs = [*values, *jax.tree.leaves(args)]
    if prepare is not None:

        def trace(*args: Any) -> Any:
            return jax.make_jaxpr(fun)(abstract, *args).jaxpr

        inputs = prepare(closed.jaxpr, inputs, trace)
    out = _evaluate_scope(Places(closed.jaxpr), closed.consts, inputs, scope)
    scope.end_forward()
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _evaluate_scope(
    places: Places, consts: Sequence[Any], args: Sequence[Any], scope: Scope
) -> list[Any]:
    """Evaluates one scope; the results are whole."""
    often = Counter(id(x) for x in args if isinstance(x, LazyParam))
    # Given twice, it is used by more than the scope can see of either.
    args = [gathered(x) if often[id(x)] > 1 else x for x in args]
    move_layers_together(places, args, scope.bucket_size)
    return _evaluate(places, consts, args, scope)


def _evaluate(
    places: Places, consts: Sequence[Any], args: Sequence[Any], scope: Scope
) -> list[Any]:
    """Evaluates a scope, or what a `jit` within it calls; the results are whole."""

    def settle(variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Values of variables; a leaf that would be gathered more than once is gathered now."""
        settled = []
        for v, value in zip(variables, values, strict=True):
            if isinstance(value, LazyParam):
                value.used_once &= places.uses(v) <= 1
                value = value.whole() if places.several(v) else value
            settled.append(value)
        return settled

    def run(eqn: Any, values: list[Any]) -> list[Any]:
        with in_scope(eqn, "loss"):
            results = _evaluate_equation(eqn, values, scope, places)
        return settle(eqn.outvars, results)

    jaxpr = places.jaxpr
    results = evaluate(jaxpr, consts, settle(jaxpr.invars, args), run)
    return [gathered(x) for x in results]


def _evaluate_equation(eqn: Any, values: list[Any], scope: Scope, places: Places) -> Sequence[Any]:
    if not any(isinstance(v, LazyParam) for v in values):
        return bind(eqn, values)
    name = eqn.primitive.name
    if name == "convert_element_type" and values[0].of is None:
        return [values[0].cast(eqn.params["new_dtype"])]
    if name in (*VIEWS, "convert_element_type") and len(values) == 1:
        return [values[0].seen(eqn)]
    if name == JIT:
        return _evaluate(places.within(eqn), body_of(eqn)[1], values, scope)
    if name in CHECKPOINTS:
        return _evaluate_checkpoint(eqn, values, scope, places.within(eqn))
    if name == "scan":
        return _evaluate_scan(eqn, values, scope, places.within(eqn))
    return on_gathered(partial(bind, eqn), values, scope, saves_operands(eqn))


def _evaluate_checkpoint(
    eqn: Any, values: list[Any], scope: Scope, places: Places
) -> Sequence[Any]:
    """Rebuilt, so that the gather is inside and happens again in the backward pass."""
    _, consts = body_of(eqn)
    hold_back(values, scope)
    flat, restore = _open([_kept(v) for v in values])

    def evaluate(*flat: Any) -> Sequence[Any]:
        within = scope.computed_again()
        return _evaluate_scope(places, consts, restore(flat, within), within)

    again = jax.checkpoint(
        evaluate,
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )
    return again(*flat)


def _evaluate_scan(eqn: Any, values: list[Any], scope: Scope, places: Places) -> Sequence[Any]:
    """Rebuilt with the gather of scanned leaves in its body; other leaves are gathered before."""
    body, consts = body_of(eqn)
    fixed, carried, _ = scan_sizes(eqn)
    _warn_of_divided_stacks(values[fixed + carried :])
    layers = [
        v if not isinstance(v, LazyParam) or (v.use.scannable and v.of is None) else v.whole()
        for v in values[fixed + carried :]
    ]
    # The stack of gradients that a scan makes stays in the dtype of its layers.
    layers = [
        x.with_gradient_in(places.moves_in(v)) if isinstance(x, LazyParam) else x
        for x, v in zip(layers, body.invars[fixed + carried :], strict=True)
    ]
    flat, restore = _open(layers, layer=True)
    again = [v for v in layers if isinstance(v, LazyParam) and v.use.reshard]

    def scan(values: Sequence[Any]) -> Sequence[Any]:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            within = scope.computed_again()
            args = [*values[:fixed], *carry, *restore(x, within)]
            out = _evaluate_scope(places, consts, args, within)
            return out[:carried], out[carried:]

        if again and not _has_checkpoint(body):
            step = jax.checkpoint(step, policy=_keep_all_but_layers(again), prevent_cse=False)
        carry, stacked = jax.lax.scan(
            step,
            list(values[fixed : fixed + carried]),
            list(values[fixed + carried :]),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *stacked]

    return on_gathered(scan, [*values[: fixed + carried], *flat], scope, saves_operands(eqn))


def _warn_of_divided_stacks(values: Sequence[Any]) -> None:
    """Not of those that a rule of the user divides there, knowing that a scan walks it."""
    uses = [v.use for v in values if isinstance(v, LazyParam) and not v.use.scannable]
    others = [use.stored.path for use in uses if use.stored.model_axes and use.stored.model_axes[0]]
    if others:
        warn(
            f"a scan walks dimension 0 of {some(others)}, which lies over your own mesh axis: the "
            "stack is made whole over the data axes before the scan, and not a layer at a time."
        )
    uses = [use for use in uses if use.stored.path not in others]
    paths = [use.reduced.path for use in uses if use.reduced.scan_dim != 0]
    if paths:
        warn(
            f"a scan walks dimension 0 of {some(paths)}, which is the divided one: the stack is "
            "made whole before the scan, and not a layer at a time. Name that dimension: "
            f"shard_train_state(..., scan_axes={{'^{paths[0]}$': 0}}), or a pattern for all."
        )


def _keep_all_but_layers(layers: Sequence[LazyParam]) -> Callable[..., bool]:
    """A `jax.checkpoint` policy: a layer made whole, and mere views of it, are made again.

    Else a scan would stack every layer that it made whole for its backward pass. A policy sees a
    primitive and the shapes it is given, so leaves made whole are known by those of part and tap.
    """
    uses = [v.use.of_one_layer() for v in layers]
    known = {(use.kept_shape, use.reduced.shard_shape) for use in uses}

    def policy(primitive: Any, *avals: Any, **_: Any) -> bool:
        if primitive.name.startswith("custom_vjp_call"):
            shapes, half = [aval.shape for aval in avals], len(avals) // 2
            pairs = set(zip(shapes[:half], shapes[half : 2 * half], strict=True))
            return not pairs or len(shapes) != 2 * half or not known.issuperset(pairs)
        if primitive.name == "device_put":  # a part that is fetched
            return avals[0].shape not in {use.stored.shard_shape for use in uses}
        if primitive.name == "convert_element_type":  # of a layer, and not of an activation
            return avals[0].size not in {use.stored.size for use in uses}
        return primitive.name not in (*VIEWS, "optimization_barrier")

    return policy


def _has_checkpoint(jaxpr: Any) -> bool:
    """Whether the user rematerialises in this scope; then what is kept is the user's choice."""
    return any(
        eqn.primitive.name in CHECKPOINTS
        or (eqn.primitive.name == JIT and _has_checkpoint(body_of(eqn)[0]))
        for eqn in jaxpr.eqns
    )


def _open(
    values: Sequence[Any], layer: bool = False
) -> tuple[list[Any], Callable[[Sequence[Any], Scope], list[Any]]]:
    """Flat arrays that may cross into another scope, and what makes them leaves again there.

    A leaf that is given twice crosses once, and is one leaf there.
    """
    leaves = {id(v): v for v in values if isinstance(v, LazyParam)}
    others = [v for v in values if not isinstance(v, LazyParam)]
    flat = [*others, *(x for v in leaves.values() for x in v.given(layer))]

    def restore(arrays: Sequence[Any], scope: Scope) -> list[Any]:
        rest = iter(arrays)
        first = [next(rest) for _ in others]
        there = {k: v.elsewhere(layer, next(rest), next(rest), scope) for k, v in leaves.items()}
        rest = iter(first)
        return [there[id(v)] if isinstance(v, LazyParam) else next(rest) for v in values]

    return flat, restore


def _kept(value: Any) -> Any:
    """Made whole where that is kept for the backward pass, or a mere view; else as it is."""
    kept = isinstance(value, LazyParam) and (value.of is not None or not value.use.reshard)
    return value.whole() if kept else value
