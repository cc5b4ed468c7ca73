"""A sharded parameter inside the traced loss, all-gathered lazily at its first use.

Without rematerialization by the user, JAX would save the gathered parameters for the backward pass.
With `reshard_after_forward` (ZeRO, section 7.2.2) the shards are saved instead, and the backward
pass gathers them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from gshard._util.jaxpr import bind, with_inner
from gshard.sharding.layout import DEVICE
from gshard.train.fsdp.gather_bucket import GatherBucket, GatherScope, GatherSpec
from gshard.train.optim.offload import to_device

# Primitives whose backward pass uses their operands as they are.
_SAVING = {"dot_general", "conv_general_dilated", "ragged_dot_general", "custom_vjp_call", "scan"}


class LazyParam:
    """A sharded parameter, all-gathered once per scope however often it is used there."""

    def __init__(self, bucket: GatherBucket, index: int = 0):
        self.bucket: GatherBucket = bucket
        self.index: int = index
        self.base: LazyParam | None = None  # the parameter of which this one is a view
        self.view: Any = None  # the equation of `VIEWS` that makes it from `base`
        self.used_once = True  # else it is kept gathered between its uses and their derivatives
        self._in_dtype: LazyParam | None = None

    @classmethod
    def alone(
        cls, spec: GatherSpec, stored: jax.Array, grad_sink: jax.Array, scope: GatherScope
    ) -> LazyParam:
        """Makes a parameter in a bucket of its own."""
        return cls(GatherBucket([spec], [stored], [grad_sink], scope))

    @property
    def spec(self) -> GatherSpec:
        """How it is all-gathered, and how its gradient is reduce-scattered."""
        return self.bucket.specs[self.index]

    @property
    def stored(self) -> jax.Array:
        """This device's shard."""
        return self.bucket.stored[self.index]

    @property
    def dtype(self) -> Any:
        """The dtype that the full parameter has, in which it is all-gathered unless quantized."""
        return self.spec.stored.dtype if self._is_packed else self.stored.dtype

    @property
    def _is_packed(self) -> bool:
        """Whether `stored` are the codes and scales that a sub-group keeps."""
        return self.spec.keeps_packed and self.spec.from_subgroup

    @property
    def grad_sink(self) -> jax.Array:
        """The input that receives its gradient."""
        return self.bucket.grad_sinks[self.index]

    @property
    def regathers(self) -> bool:
        """Whether the backward pass of its use gathers it again."""
        return self.used_once and bool(self.spec.reshard) and self.spec.stored.dim is not None

    @property
    def is_ordered(self) -> bool:
        """Whether its all-gather waits for earlier values; it does not if used several times."""
        return self.bucket.gathered is None and (self.used_once or len(self.bucket.specs) > 1)

    def all_gather(self) -> jax.Array:
        """Returns the full parameter, all-gathered at the first call."""
        if self.base is None:
            return self.bucket.all_gather()[self.index]
        return bind(self.view, [self.base.all_gather()])[0]

    def regather(self, after: Sequence[jax.Array]) -> jax.Array:
        """Re-gathers the parameter for the backward pass, after `after` is available."""
        if self.base is None:
            return self.bucket.regather(self.index, after)
        return bind(self.view, [self.base.regather(after)])[0]

    def cast(self, dtype: Any) -> LazyParam:
        """Returns the parameter in another dtype, in which it is then all-gathered."""
        if self._in_dtype is None or self._in_dtype.dtype != dtype:
            layout = self.spec.stored.in_memory(DEVICE)
            if layout.gathered_as is not None:  # for what unpacks it
                layout = dataclasses.replace(layout, dtype=dtype)
            spec = dataclasses.replace(self.spec, stored=layout)
            stored = to_device(self.stored, self.spec.stored)
            stored = stored if self._is_packed else stored.astype(dtype)
            sink = self.grad_sink if spec.converts else self.grad_sink.astype(dtype)
            self._in_dtype = LazyParam.alone(spec, stored, sink, self.bucket.scope)
        return self._in_dtype

    def with_gradient_in(self, dtype: Any) -> LazyParam:
        """Returns the same parameter with its gradient in `dtype`, if that is the smaller one."""
        sink = self.grad_sink
        if self.spec.converts or dtype is None or dtype.itemsize >= sink.dtype.itemsize:
            return self
        return LazyParam.alone(self.spec, self.stored, sink.astype(dtype), self.bucket.scope)

    def with_view(self, view: Any) -> LazyParam:
        """Returns the view of the parameter that one equation of `VIEWS` makes."""
        param = LazyParam(self.bucket, self.index)
        param.base, param.view, param.used_once = self, view, self.used_once
        return param

    def scope_inputs(self, layer: bool) -> tuple[jax.Array, jax.Array]:
        """Returns the arrays to pass to another scope; `layer` is true for a scan over layers."""
        kept = self.spec.subgroup_size and not layer
        return (self.bucket.kept if kept else self.bucket.stored)[self.index], self.grad_sink

    def in_scope(
        self, layer: bool, stored: jax.Array, grad_sink: jax.Array, scope: GatherScope
    ) -> LazyParam:
        """Returns the same parameter, or one layer of it, in a scope that was given its arrays."""
        spec = self.spec
        if layer:
            spec = spec.of_one_layer()
        elif spec.subgroup_size and not spec.from_subgroup:
            spec = dataclasses.replace(
                spec, stored=spec.stored.in_memory(DEVICE), from_subgroup=True
            )
        return LazyParam.alone(spec, stored, grad_sink, scope)


def share_bucket(params: Sequence[LazyParam]) -> None:
    """Moves parameters that are not gathered yet into one bucket, and so into one all-gather."""
    stored, sinks = [param.stored for param in params], [param.grad_sink for param in params]
    scope = params[0].bucket.scope
    bucket = GatherBucket([param.spec for param in params], stored, sinks, scope)
    for index, param in enumerate(params):
        param.bucket, param.index = bucket, index


def saves_operands(eqn: Any) -> bool:
    """Whether an equation has a backward pass that uses its operands as they are."""
    return eqn.primitive.name in _SAVING and not any(
        inner.primitive.name == "while" or "callback" in inner.primitive.name
        for inner in with_inner(eqn)
    )


def apply_gathered(
    fun: Callable[[Sequence[Any]], Sequence[Any]],
    values: Sequence[Any],
    scope: GatherScope,
    saves: bool,
) -> Sequence[Any]:
    """Calls `fun` with gathered parameters; only shards are kept if its backward pass `saves`."""
    order_gathers(values, scope)
    reshards = [isinstance(v, LazyParam) and v.regathers for v in values]
    if not (saves and scope.saves and any(reshards)):
        return fun([gathered(v) for v in values])
    params = [v for v, one in zip(values, reshards, strict=True) if one]
    others = [gathered(v) for v, one in zip(values, reshards, strict=True) if not one]

    def call(others: Sequence[Any], full: Sequence[Any]) -> Sequence[Any]:
        rest, leaves = iter(others), iter(full)
        return fun([next(leaves if one else rest) for one in reshards])

    def forward(others: Sequence[Any], full: Sequence[Any]) -> tuple[Any, Any]:
        out, pullback = jax.vjp(call, others, full)
        saved, structure = jax.tree.flatten(pullback)
        which = [next((i for i, w in enumerate(full) if w is x), None) for x in saved]
        rest = [x for x, i in zip(saved, which, strict=True) if i is None]
        for i in which:
            if i is not None:
                params[i].bucket.to_regather.add(params[i].index)
        backward = partial(_regather_and_differentiate, params, scope, which, structure)
        return out, jax.tree_util.Partial(backward, rest, list(full))

    run = jax.custom_vjp(call)
    run.defvjp(forward, lambda backward, cotangents: backward(cotangents))
    return run(others, [v.all_gather() for v in params])


def order_gathers(values: Sequence[Any], scope: GatherScope) -> None:
    """Makes the all-gathers of one use wait for the values that must be available before."""
    scope.record_use([v for v in values if not isinstance(v, LazyParam)])
    buckets = {v.bucket: None for v in values if isinstance(v, LazyParam) and v.is_ordered}
    if buckets:
        after = scope.forward_dependencies()
        for bucket in buckets:
            bucket.wait(after)


def _regather_and_differentiate(
    params: Sequence[LazyParam],
    scope: GatherScope,
    which: Sequence[int | None],
    structure: Any,
    rest: Sequence[Any],
    full: Sequence[Any],
    cotangents: Sequence[Any],
) -> Any:
    """Runs what `jax.vjp` returned, after re-gathering the parameters among its saved arrays.

    Those of the last use of the forward pass are still gathered. `which` says for each saved array
    which parameter it is; None for one of `rest`.
    """
    buckets = {params[i].bucket for i in which if i is not None}
    is_last = len(buckets) == 1 and scope.is_last_of_forward(next(iter(buckets)))
    # A use of parameters that are all re-gathered already is no gather, nor is one of none.
    there = not is_last and all(bucket.is_regathered for bucket in buckets)
    after = () if there else scope.backward_dependencies(cotangents)
    others = iter(rest)

    def full_param(i: int) -> Any:
        return full[i] if is_last else params[i].regather(after)

    saved = [next(others) if i is None else full_param(i) for i in which]
    return jax.tree.unflatten(structure, saved)(cotangents)


def gathered(value: Any) -> Any:
    """Returns the full array of a parameter, and anything else as it is."""
    return value.all_gather() if isinstance(value, LazyParam) else value
