"""How parameters are all-gathered: each by its spec, in buckets, in the order of one scope.

Most parameters are alone in their bucket; small ones of one layer share it.

The gradient of a parameter arrives at its *gradient sink*, a second input of zeros that nothing
reads. A sink shaped like the shard receives the reduce-scattered gradient, one shaped like the full
parameter receives the local gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gshard.sharding.layout import Layout
from gshard.train.comm.buckets import keep_dimension_order, layer_names
from gshard.train.comm.collectives import (
    gather,
    gather_across,
    gather_bucket,
    gather_within,
    scatter,
    scatter_bucket,
)
from gshard.train.fsdp.backward_order import after_scatters, new_token, scattered
from gshard.train.optim.offload import to_device


@dataclass(frozen=True)
class GatherSpec:
    """How a parameter is all-gathered, and how its gradient is reduce-scattered."""

    stored: Layout  # all-gathered when it is sharded
    reduced: Layout  # of the gradient at its sink, reduce-scattered when it is sharded
    purpose: str = "gather"  # that a budget counts the all-gather under
    converts: bool = False  # reduce-scatters in the dtype of `reduced`, else in the gradient's
    reshard: bool | int = True  # re-gathers in the backward pass; a number: from that many devices
    from_subgroup: bool = False  # the parameter is given as the shard that a sub-group keeps
    layer: str = ""  # by `layer_names`; small parameters of one layer share a bucket
    of_stack: bool = False  # one layer of a stack, in the body of a scan

    @property
    def scannable(self) -> bool:
        """Whether a scan over dimension 0 can take the parameter sharded."""
        others = self.stored.model_axes and self.stored.model_axes[0]
        return self.stored.dim != 0 and self.reduced.dim != 0 and not others

    @property
    def sharded_layout(self) -> Layout:
        """The layout that is all-gathered, or the one that is reduce-scattered if none is."""
        return self.reduced if self.stored.dim is None else self.stored

    @property
    def bucket_key(self) -> tuple[Any, ...]:
        """What parameters of one bucket have in common, besides their dtype."""
        groups = [None if x.dim is None else x.group for x in (self.stored, self.reduced)]
        quantized = (self.stored.gathered_as is None, self.reduced.scattered_as is None)
        others = self.converts and self.reduced.dtype, bool(self.reshard)
        return self.purpose, *groups, *others, *quantized

    def of_one_layer(self) -> GatherSpec:
        """Returns the spec of one layer of a stack, in the body of a scan."""
        stored, reduced = self.stored.layer(), self.reduced.layer()
        return dataclasses.replace(self, stored=stored, reduced=reduced, layer="", of_stack=True)

    def grad_sink(self) -> jax.Array:
        """Makes the zeros that receive the gradient."""
        return jnp.zeros(self.reduced.shard_shape, self.reduced.dtype)

    @property
    def subgroup_size(self) -> int:
        """Devices that keep the parameter among them for the backward pass; 0: the shard group."""
        return 0 if isinstance(self.reshard, bool) or self.stored.dim is None else self.reshard

    @property
    def keeps_packed(self) -> bool:
        """Whether the codes and scales of a sub-group's shard are kept for the backward pass."""
        return bool(self.subgroup_size) and self.stored.gathered_as is not None

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the array kept for the backward pass, before its all-gather."""
        shape = list(self.stored.shard_shape)
        if self.subgroup_size:
            shape[self.stored.dim or 0] *= self.stored.group.size // self.subgroup_size
        if self.keeps_packed and (how := self.stored.gathered_as) is not None:
            ranks = self.stored.shape[how.dim] // (size := self.stored.local().shape[how.dim])
            shape[how.dim] = ranks * how.packed_shape((size,))[0]
        return tuple(shape)


def gather_specs(
    stored: Sequence[Layout],
    reduced: Sequence[Layout],
    purpose: str = "gather",
    converts: bool = False,
    reshard: bool | int = True,
) -> list[GatherSpec | None]:
    """Returns the specs of the leaves of one tree, None for a leaf that is not communicated."""
    names = layer_names([layout.path for layout in stored])
    specs = [
        GatherSpec(s.inside(), r.inside(), purpose, converts, s.dim is None or reshard, layer=layer)
        for s, r, layer in zip(stored, reduced, names, strict=True)
    ]
    return [None if s.stored.dim is None and s.reduced.dim is None else s for s in specs]


def grad_sinks(leaves: Sequence[jax.Array], specs: Sequence[GatherSpec | None]) -> list[jax.Array]:
    """Returns the arrays to differentiate at: gradient sinks, and leaves without communication."""
    return [x if s is None else s.grad_sink() for x, s in zip(leaves, specs, strict=True)]


class GatherBucket:
    """Parameters that are all-gathered at the first use of one of them.

    The backward pass re-gathers them together, and reduce-scatters their gradients together once
    the last gradient is computed. Their specs differ in their layouts only, which are of one group.
    """

    def __init__(
        self,
        specs: Sequence[GatherSpec],
        stored: Sequence[jax.Array],
        grad_sinks: Sequence[jax.Array],
        scope: GatherScope,
    ):
        self.specs: tuple[GatherSpec, ...] = tuple(specs)
        self.stored = list(stored)
        self.scope: GatherScope = scope
        self.grad_sinks: list[jax.Array] = list(grad_sinks)
        if scope.saves:
            scope.buckets.append(self)
        self._kept: list[jax.Array] | None = None
        self.gathered: list[jax.Array] | None = None  # by the forward pass
        self.to_regather: set[int] = set()  # indices that the backward pass needs in full
        self._regathered: dict[int, jax.Array] = {}

    @property
    def kept(self) -> list[jax.Array]:
        """What is kept for the backward pass: this device's shards, or those of a sub-group."""
        if self._kept is None:
            self._kept = [_kept_shard(s, x) for s, x in zip(self.specs, self.stored, strict=True)]
        return self._kept

    def all_gather(self) -> list[jax.Array]:
        """Returns the full parameters, gathered at the first call."""
        result = self.gathered
        if result is None:
            scope = self.scope
            found: Any = _gather_and_scatter(
                self.specs, scope, self.kept, self.grad_sinks, scope.seed, scope.token
            )
            result, self.scope.token = found
            self.gathered = result
        return result

    def wait(self, after: Sequence[jax.Array]) -> None:
        """Delays the all-gather until `after` is available."""
        if after and self._kept is None and self.specs[0].stored.dim is not None:
            after = jax.lax.stop_gradient(list(after))
            self.stored, _ = jax.lax.optimization_barrier((self.stored, after))

    @property
    def is_regathered(self) -> bool:
        """Whether the backward pass has gathered all that it needs of this bucket."""
        return self.to_regather == self._regathered.keys()

    def regather(self, i: int, after: Sequence[jax.Array]) -> jax.Array:
        """Re-gathers the bucket at the first call, after `after` is available; returns leaf `i`."""
        if not self.is_regathered:
            indices = sorted(self.to_regather)
            specs = [self.specs[j] for j in indices]
            by_subgroup = bool(specs[0].subgroup_size)
            saved = [(self.kept if by_subgroup else self.stored)[j] for j in indices]
            # Without an order XLA would find the first gather, and keep its result.
            saved, _ = jax.lax.optimization_barrier((saved, list(after)))
            if not by_subgroup:
                saved = to_device(saved, [spec.stored for spec in specs])
            self._regathered = dict(zip(indices, _gather_kept(specs, saved), strict=True))
        return self._regathered[i]

    def end_forward(self) -> None:
        """Releases what only the forward pass needs."""
        self.grad_sinks = []
        self.gathered = None


def _kept_shard(spec: GatherSpec, stored: jax.Array) -> jax.Array:
    shard = to_device(stored, spec.stored)
    if spec.subgroup_size and not spec.from_subgroup:
        shard = _in_dimension_order(shard, spec)
        return gather_across(shard, spec.stored, spec.subgroup_size, spec.purpose)
    return shard


def _in_dimension_order(shard: jax.Array, spec: GatherSpec) -> jax.Array:
    """Transposes a layer of a stack now: a collective wants its sharded dimension first."""
    transposes = spec.of_stack and spec.stored.dim
    return keep_dimension_order(shard, spec.stored.group) if transposes else shard


def _gather_kept(specs: Sequence[GatherSpec], kept: Sequence[jax.Array]) -> list[jax.Array]:
    """Gathers the full parameters from the shards that are kept of them."""
    first = specs[0]
    if first.stored.dim is None:
        return list(kept)
    if len(specs) > 1:
        return gather_bucket(kept, [spec.stored for spec in specs], first.purpose)
    if first.subgroup_size:
        return [gather_within(kept[0], first.stored, first.subgroup_size, first.purpose)]
    return [gather(_in_dimension_order(kept[0], first), first.stored, first.purpose)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_and_scatter(
    specs: tuple[GatherSpec, ...],
    scope: GatherScope,
    kept: list[jax.Array],
    grad_sinks: Any,
    seed: jax.Array | None,
    token: jax.Array,
) -> tuple[list[jax.Array], jax.Array]:
    del scope, grad_sinks, seed
    return _gather_kept(specs, kept), token


def _forward(
    specs: tuple[GatherSpec, ...],
    scope: GatherScope,
    kept: list[jax.Array],
    grad_sinks: Any,
    seed: jax.Array | None,
    token: jax.Array,
) -> tuple[tuple[list[jax.Array], jax.Array], jax.Array | None]:
    if scope.saves:
        return (_gather_kept(specs, kept), token), seed
    # for a scan's policy to see
    return _gather_and_scatter(specs, scope, kept, grad_sinks, seed, token), seed


def _scatter_gradients(
    specs: tuple[GatherSpec, ...],
    scope: GatherScope,
    seed: jax.Array | None,
    cotangents: tuple[list[jax.Array], jax.Array],
) -> tuple[list[Any], list[Any], None, jax.Array]:
    full, token = cotangents
    grads = [_in_reduce_dtype(c, s) if s.converts else c for s, c in zip(specs, full, strict=True)]
    layouts = [spec.reduced for spec in specs]
    if layouts[0].dim is None:
        return _cotangents_of_kept(specs, full), grads, None, token
    if specs[0].purpose == "non_trainable":  # frozen: nobody reads the gradient
        return _cotangents_of_kept(specs, full), [None] * len(grads), None, token
    if len(specs) > 1:
        shards = scatter_bucket(grads, layouts, seed)
    else:
        shards = [scatter(grads[0], layouts[0], seed)]
    if scope.awaited:
        shards, token = scattered(shards, token)
    elif not scope.saves:
        # Else XLA on GPU moves it into the next iteration of a scan, and two layers' gradients are
        # alive at a time.
        shards = jax.lax.optimization_barrier(shards)
    if scope.saves:
        scope.scattered.append(shards[0])
    return _cotangents_of_kept(specs, full, shards), shards, None, token


def _in_reduce_dtype(x: jax.Array, spec: GatherSpec) -> jax.Array:
    # complex where the loss has cast a real parameter
    is_real = jnp.issubdtype(spec.reduced.dtype, jnp.floating)
    return (x.real if is_real else x).astype(spec.reduced.dtype)


def _cotangents_of_kept(
    specs: Sequence[GatherSpec], full: Sequence[jax.Array], shards: Sequence[jax.Array] = ()
) -> list[jax.Array | None]:
    """Returns the cotangents of the stored shards; `shards` are those of the gradients, if known.

    They are read only where the user differentiates what `value_and_grad` returns, and else dead
    code. NaN stands for a derivative that would need another collective.
    """
    found: list[jax.Array | None] = []
    for i, (spec, cotangent) in enumerate(zip(specs, full, strict=True)):
        if spec.keeps_packed:
            found.append(None)
        elif spec.stored.dim is None:
            found.append(cotangent)
        elif shards and shards[i].shape == spec.kept_shape:
            found.append(shards[i].astype(cotangent.dtype))
        else:
            found.append(jnp.full(spec.kept_shape, jnp.nan, cotangent.dtype))
    return found


_gather_and_scatter.defvjp(_forward, _scatter_gradients)


class GatherScope:
    """Orders the all-gathers of one scope, so that each starts shortly before its first use.

    A compiler that looks far ahead (XLA on GPU) would gather many parameters first, in an unrolled
    model all of them. On exit from this context, when all derivatives have been taken, its arrays
    are dropped, since JAX keeps it alive beyond its trace.

    With `sync` an all-gather starts when the other operands of its use are available; else it
    starts one use earlier, so that it overlaps with computation. `saves` is false in a scope whose
    forward pass is rematerialized. `seed` (uint32) is that of gradients that are rounded at random.
    """

    def __init__(
        self, sync: bool, bucket_size: int, saves: bool = True, seed: jax.Array | None = None
    ):
        self.seed: jax.Array | None = seed
        self.sync: bool = sync
        self.bucket_size: int = bucket_size
        self.saves: bool = saves
        self.token: jax.Array = new_token()  # after the latest all-gather
        self.awaited = False  # whether the backward pass of an earlier loop waits for it
        self.order: list[int] = []  # inputs of the loss by first use, once it is traced
        self._latest: Sequence[jax.Array] = ()
        self._forward: Sequence[jax.Array] = ()
        self._backward: Sequence[jax.Array] = ()
        self.scattered: list[jax.Array] = []
        self._last: GatherBucket | None = None
        self.buckets: list[GatherBucket] = []

    def rematerialized(self, seed: jax.Array | None) -> GatherScope:
        """A scope inside this one whose backward pass computes again what it needs."""
        return GatherScope(self.sync, self.bucket_size, saves=False, seed=seed)

    def record_use(self, operands: Sequence[Any]) -> None:
        """Records the other operands of the latest use; a broadcast of a scalar has none."""
        now = [x for x in operands if jnp.ndim(x) and _is_inexact(x)]
        self._latest = now or self._latest

    def forward_dependencies(self) -> Sequence[jax.Array]:
        """What must be available before the parameters of the latest use are gathered."""
        before, self._forward = self._forward, self._latest
        return self._latest if self.sync else before

    def is_last_of_forward(self, bucket: GatherBucket) -> bool:
        """True for the bucket used last in the forward; its backward needs no re-gather."""
        self._last = self._last or bucket
        return self._last is bucket

    def backward_dependencies(self, cotangents: Sequence[Any]) -> Sequence[jax.Array]:
        """What must be available before parameters are re-gathered for these cotangents."""
        now = [x for x in cotangents if _is_inexact(x)]
        before, self._backward = self._backward, now
        # Full gradients take memory until they are reduce-scattered: wait for all of them, or for
        # all but the latest.
        if self.sync:
            return [*now, *self.scattered[-1:]]
        return [*before, *self.scattered[-2:-1]]

    def order_backward_loop(self, results: Sequence[Any]) -> list[Any]:
        """Returns results of a loop, whose backward pass then waits for reduce-scatters.

        It takes long and needs much memory, so that no full gradient should be kept meanwhile.
        """
        self.awaited = True
        waiting, self.token = after_scatters(results, self.token)
        return waiting

    def end_forward(self) -> None:
        """Releases what only the forward pass needs; it belongs to the trace of that pass."""
        self._latest = self._forward = ()
        self.token = new_token()
        for bucket in self.buckets:
            bucket.end_forward()

    def __enter__(self) -> GatherScope:
        return self

    def __exit__(self, *_: object) -> None:
        self._backward, self.scattered = (), []
        for bucket in self.buckets:
            vars(bucket).clear()
        self.buckets = []


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
