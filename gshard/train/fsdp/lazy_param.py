"""A sharded parameter inside the traced loss, all-gathered lazily at its first use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from gshard._util.jaxpr import bind
from gshard.sharding.layout import DEVICE
from gshard.train.fsdp.gather_bucket import GatherBucket, GatherScope, GatherSpec
from gshard.train.optim.offload import to_device


class LazyParam:
    """A sharded parameter, all-gathered once per scope however often it is used there.

    Attributes:
      bucket: the parameters that are all-gathered with it.
      index: its position in the bucket.
      base: another parameter, of which this one is a view; or None.
      view: the equation of `VIEWS` that makes it from `base`.
      used_once: it has one use. With several uses the gathered parameter is kept between them, and
        for their derivatives.
    """

    def __init__(self, bucket: GatherBucket, index: int = 0):
        self.bucket, self.index = bucket, index
        self.base: LazyParam | None = None
        self.view: Any = None
        self.used_once = True
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
        """The dtype in which it is all-gathered."""
        return self.stored.dtype

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
        """Whether its all-gather waits for earlier values.

        It does not when it is gathered already, or alone in its bucket and used several times.
        """
        return not self.bucket.is_gathered and (self.used_once or len(self.bucket.specs) > 1)

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
            spec = dataclasses.replace(self.spec, stored=self.spec.stored.in_memory(DEVICE))
            stored = to_device(self.stored, self.spec.stored).astype(dtype)
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
