"""Evaluates a traced loss with sharded parameters, and all-gathers each at its first use.

A parameter stays sharded through casts, so that it is gathered in the compute dtype. A scanned
model has one gathered layer at a time, and a `checkpoint` gathers again in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.errors import some, warn
from gshard._util.jaxpr import (
    CHECKPOINT,
    JIT,
    VIEWS,
    Bindings,
    abstract,
    body_of,
    in_scope,
    scan_sizes,
)
from gshard.train.comm.quantized import fold
from gshard.train.fsdp.gather_bucket import GatherScope, GatherSpec
from gshard.train.fsdp.lazy_param import (
    LazyParam,
    apply_gathered,
    gathered,
    order_gathers,
    saves_operands,
)
from gshard.train.fsdp.trace_loss import trace_loss
from gshard.train.fsdp.use_analysis import ParamUses, by_first_use, share_buckets_of_layers

_TO_COMPLEX = ("complex", "fft", "eig")  # their operands may be real


def with_sharded_params(
    fun: Callable[..., Any],
    specs: Sequence[GatherSpec | None],
    axes: Sequence[str],
    leaves: Sequence[jax.Array],
    grad_sinks: Sequence[jax.Array],
    *args: Any,
    scope: GatherScope,
    prepare: Callable[[Any, list[Any], Callable[..., Any]], list[Any]] | None = None,
) -> Any:
    """Evaluates `fun(params, *args)` with sharded parameters, all-gathered at their first use.

    Runs inside a `shard_map` over the data axes `axes`. `specs` are
    None for parameters that are replicated, and differentiated as they are. `prepare(jaxpr, inputs,
    trace)` may replace the inputs; `trace(*args)` is the jaxpr for other arguments.
    """
    values = [
        leaf if spec is None else LazyParam.alone(spec, leaf, grad_sink, scope)
        for spec, leaf, grad_sink in zip(specs, leaves, grad_sinks, strict=True)
    ]
    full = [
        abstract(leaf.shape if spec is None else spec.stored.shape, leaf.dtype)
        for spec, leaf in zip(specs, leaves, strict=True)
    ]
    (jaxpr, consts), shapes = trace_loss(fun, axes, full, *args)
    scope.order = by_first_use(jaxpr)
    inputs = [*values, *jax.tree.leaves(args)]
    if prepare is not None:

        def trace(*args: Any) -> Any:
            return trace_loss(fun, axes, full, *args)[0][0]

        inputs = prepare(jaxpr, inputs, trace)
    uses = ParamUses(jaxpr, differentiated=jaxpr.invars[: len(values)])
    out = _evaluate_scope(uses, consts, inputs, scope)
    scope.end_forward()
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _evaluate_scope(
    uses: ParamUses, consts: Sequence[Any], args: Sequence[Any], scope: GatherScope
) -> list[Any]:
    """Evaluates one scope; the results are full arrays."""
    often = Counter(id(x) for x in args if isinstance(x, LazyParam))
    # A parameter that is given twice has more uses than the scope sees of either input.
    args = [gathered(x) if often[id(x)] > 1 else x for x in args]
    share_buckets_of_layers(uses, args, scope.bucket_size)
    return _evaluate(uses, consts, args, scope)


def _evaluate(
    uses: ParamUses, consts: Sequence[Any], args: Sequence[Any], scope: GatherScope
) -> list[Any]:
    """Evaluates a scope, or what a `jit` inside it calls; the results are full arrays."""

    def settle(variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Gathers parameters that would otherwise be gathered more than once."""
        settled = []
        for v, value in zip(variables, values, strict=True):
            if isinstance(value, LazyParam):
                value.used_once &= uses.count(v) <= 1
                value = value.all_gather() if uses.gathered_repeatedly(v) else value
            settled.append(value)
        return settled

    def run(eqn: Any, values: list[Any]) -> list[Any]:
        with in_scope(eqn, "loss"):
            results = _evaluate_equation(eqn, values, scope, uses)
        return settle(eqn.outvars, results)

    jaxpr, args = uses.jaxpr, settle(uses.jaxpr.invars, args)
    env = Bindings([*jaxpr.constvars, *jaxpr.invars], [*consts, *args])
    given = zip(jaxpr.invars, args, strict=True)
    for part in uses.runs(v for v, x in given if isinstance(x, LazyParam)):
        if part.call is None:
            for eqn in part.eqns:
                env.run(eqn, run)
            continue
        with in_scope(part.eqns[0], "loss"), part.eqns[0].ctx.manager:
            env.write(part.outputs, part.call(env.read(part.inputs)))
    return [gathered(x) for x in env.read(jaxpr.outvars)]


def _evaluate_equation(
    eqn: Any, values: list[Any], scope: GatherScope, uses: ParamUses
) -> Sequence[Any]:
    if not any(isinstance(v, LazyParam) for v in values):
        return uses.bind(eqn, values)
    name = eqn.primitive.name
    if name == "convert_element_type" and values[0].base is None:
        return [values[0].cast(eqn.params["new_dtype"])]
    if name in (*VIEWS, "convert_element_type") and len(values) == 1:
        return [values[0].with_view(eqn)]
    if name == JIT:
        return _evaluate(uses.inside(eqn), body_of(eqn)[1], values, scope)
    if name == CHECKPOINT:
        return _evaluate_checkpoint(eqn, values, scope, uses.inside(eqn))
    if name == "scan":
        return _evaluate_scan(eqn, values, scope, uses.inside(eqn))
    return apply_gathered(partial(uses.bind, eqn), values, scope, saves_operands(eqn))


def _evaluate_checkpoint(
    eqn: Any, values: list[Any], scope: GatherScope, uses: ParamUses
) -> Sequence[Any]:
    """Rebuilds it with the all-gather inside, which happens again in the backward pass."""
    _, consts = body_of(eqn)
    order_gathers(values, scope)
    # A parameter that is kept gathered, or is a view, is gathered now.
    flat, restore = _pass_to_scope(
        [
            v.all_gather()
            if isinstance(v, LazyParam) and (v.base is not None or not v.spec.reshard)
            else v
            for v in values
        ]
    )

    def run(seed: Any, token: jax.Array, *flat: Any) -> tuple[Sequence[Any], jax.Array]:
        within = scope.rematerialized(seed)
        within.token, within.awaited = token, scope.awaited
        return _evaluate_scope(uses, consts, restore(flat, within), within), within.token

    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    results, scope.token = jax.checkpoint(run, **options)(scope.seed, scope.token, *flat)
    return results


def _evaluate_scan(
    eqn: Any, values: list[Any], scope: GatherScope, uses: ParamUses
) -> Sequence[Any]:
    """Rebuilds it with scanned parameters all-gathered in its body, and others before it."""
    body, consts = body_of(eqn)
    fixed, carried, _ = scan_sizes(eqn)
    first = fixed + carried
    _warn_of_sharded_stacks(values[first:])
    layers = []
    for x, v in zip(values[first:], body.invars[first:], strict=True):
        if isinstance(x, LazyParam):
            # The stack of gradients that a scan makes stays in the dtype of its layers.
            layered = x.spec.scannable and x.base is None
            x = x.with_gradient_in(uses.only_cast(v)) if layered else x.all_gather()
        layers.append(x)
    # Compilers break ties by the order of operands, so pass them in the order in which gradients
    # are computed, not by name.
    order = [i - first for i in reversed(by_first_use(body)) if i >= first]
    flat, restore = _pass_to_scope(layers, order)
    again = [v for v in layers if isinstance(v, LazyParam) and v.spec.reshard]

    def scan(values: Sequence[Any]) -> Sequence[Any]:
        def step(carry: Any, given: Any) -> tuple[Any, Any]:
            x, seed = given
            within = scope.rematerialized(seed)
            args = [*values[:fixed], *carry, *restore(x, within)]
            out = _evaluate_scope(uses, consts, args, within)
            return out[:carried], out[carried:]

        if again and not _has_checkpoint(body):
            step = jax.checkpoint(step, policy=_keep_all_but_layers(again), prevent_cse=False)
        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        seeds = fold(scope.seed, jnp.arange(options["length"]))  # a layer has its own
        xs = values[first:], seeds
        carry, stacked = jax.lax.scan(step, values[fixed:first], xs, **options)
        return [*carry, *stacked]

    results = apply_gathered(scan, [*values[:first], *flat], scope, saves_operands(eqn))
    # A backward loop waits if one of its operands does. It is given zeros for carries that nothing
    # uses, but not for stacked results.
    waiting = carried or len(results)
    return [*scope.order_backward_loop(results[:waiting]), *results[waiting:]]


def _warn_of_sharded_stacks(values: Sequence[Any]) -> None:
    """Warns of stacks that are sharded, or in blocks, along the scanned dimension.

    Not of those whose dimension was named: a rule asked for that.
    """
    params = [v for v in values if isinstance(v, LazyParam)]
    views = [v.spec for v in params if v.base is not None]
    views = [x for x in views if x.stored.dim is not None or x.reduced.dim is not None]
    if views:
        warn(
            f"a scan iterates over {some(x.reduced.path for x in views)} transposed or reshaped: "
            f"the full stack{_what_is_moved(views)}, and not a layer at a time. Store the stack "
            "with its layers in dimension 0, and scan over it as it is."
        )
    specs = [v.spec for v in params if v.base is None and v.spec.scannable]
    paths = [x.reduced.path for x in specs if _codes(x) != _codes(x.of_one_layer())]
    if paths:
        warn(
            f"a scan iterates over dimension 0 of {some(paths)}, and the blocks of quantized "
            "arrays are along it, so their layers are sent unquantized. Name that dimension: "
            f"shard_train_state(..., scan_axes={{'^{paths[0]}$': 0}}), or a pattern for all."
        )
    specs = [v.spec for v in params if v.base is None and not v.spec.scannable]
    others = [x.path for x in (s.stored for s in specs) if x.model_axes and x.model_axes[0]]
    if others:
        warn(
            f"a scan iterates over dimension 0 of {some(others)}, which is sharded over your own "
            "mesh axis: the full stack is all-gathered over the data axes before the scan, and "
            "not a layer at a time. Shard another dimension over that axis."
        )
    specs = [x for x in specs if x.stored.path not in others and x.reduced.scan_dim != 0]
    if specs:
        paths = [spec.reduced.path for spec in specs]
        warn(
            f"a scan iterates over dimension 0 of {some(paths)}, which is the sharded one: the "
            f"full stack{_what_is_moved(specs)}, and not a layer at a time. Name that dimension: "
            f"shard_train_state(..., scan_axes={{'^{paths[0]}$': 0}}), or a pattern for all."
        )


def _codes(spec: GatherSpec) -> tuple[Any, Any]:
    return spec.stored.gathered_as, spec.reduced.scattered_as


def _what_is_moved(specs: Sequence[GatherSpec]) -> str:
    if any(spec.stored.dim is not None for spec in specs):
        return " is all-gathered before the scan"
    return " of gradients is reduce-scattered after the scan"


def _keep_all_but_layers(layers: Sequence[LazyParam]) -> Callable[..., bool]:
    """A `jax.checkpoint` policy that saves all but gathered layers, which a scan would stack.

    It sees a primitive and the shapes of its operands: all-gathers are known by those. Arrays of
    8-bit floats and complex ones are computed again: `jax.checkpoint` rounds what it saves with
    `lax.reduce_precision`, which makes NaN of the largest numbers of float8_e4m3fn, and refuses
    complex numbers (JAX 0.10.2).
    """
    specs = [v.spec.of_one_layer() for v in layers]
    known = {(spec.kept_shape, spec.reduced.shard_shape) for spec in specs}

    def policy(primitive: Any, *avals: Any, **params: Any) -> bool:
        named = map(params.get, ("new_dtype", "preferred_element_type"))
        results = [x for x in named if x is not None] or [aval.dtype for aval in avals]
        floats = [x for x in results if jnp.issubdtype(x, jnp.floating)]
        if any(jnp.finfo(x).bits == 8 for x in floats) or primitive.name in _TO_COMPLEX:
            return False
        if any(jnp.issubdtype(x, jnp.complexfloating) for x in results):
            return False
        if primitive.name.startswith("custom_vjp_call"):
            shapes = [aval.shape for aval in avals if aval.shape]  # without seed and token
            half = len(shapes) // 2
            pairs = set(zip(shapes[:half], shapes[half : 2 * half], strict=True))
            return not pairs or len(shapes) != 2 * half or not known.issuperset(pairs)
        if primitive.name == "device_put":  # a shard that is copied from the host
            return avals[0].shape not in {spec.stored.shard_shape for spec in specs}
        if primitive.name == "convert_element_type":  # of a layer, and not of an activation
            return avals[0].size not in {spec.stored.size for spec in specs}
        return primitive.name not in (*VIEWS, "optimization_barrier")

    return policy


def _has_checkpoint(jaxpr: Any) -> bool:
    """Whether the user rematerializes in this scope, and so chooses what is saved."""
    return any(
        eqn.primitive.name == CHECKPOINT
        or (eqn.primitive.name == JIT and _has_checkpoint(body_of(eqn)[0]))
        for eqn in jaxpr.eqns
    )


def _pass_to_scope(
    values: Sequence[Any], layers: Sequence[int] | None = None
) -> tuple[list[Any], Callable[[Sequence[Any], GatherScope], list[Any]]]:
    """Arrays to pass into another scope, each once, and what restores the values there.

    To the body of a scan stacks are passed, in the order `layers`, of which it has one layer each.
    """
    layer = layers is not None
    ordered = values if layers is None else [values[i] for i in layers]
    leaves = {id(v): v for v in ordered if isinstance(v, LazyParam)}
    others = [v for v in values if not isinstance(v, LazyParam)]
    flat = [*others, *(x for v in leaves.values() for x in v.scope_inputs(layer))]

    def restore(arrays: Sequence[Any], scope: GatherScope) -> list[Any]:
        rest = iter(arrays)
        first = [next(rest) for _ in others]
        there = {k: v.in_scope(layer, next(rest), next(rest), scope) for k, v in leaves.items()}
        rest = iter(first)
        return [there[id(v)] if isinstance(v, LazyParam) else next(rest) for v in values]

    return flat, restore
