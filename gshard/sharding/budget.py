"""What a plan promises: bytes at rest and elements moved. The only file with formulas.

Source: ZeRO (Rajbhandari et al., 2020), sections 5 and 7, counted leaf by leaf, padding included.
Everything that reports a figure (tests, the demo, `audit`) calls `promise`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.validation import check_integer, shown
from gshard.sharding.layout import Layout
from gshard.sharding.level import check_accumulate

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan


@dataclass(frozen=True)
class Traffic:
    """Elements that one kind of collective moves per device and step.

    Attributes:
      kind: `all-gather`, `reduce-scatter` or `all-reduce`.
      purpose: `gather`, `scatter`, `publish`, `reduce`, or `extras` (what is not trained, made
        whole for the loss).
      elements: full size of what is moved, times executions: the output of an all-gather, the input
        of a reduce-scatter or all-reduce.
      wire_bytes: bytes that a device sends, by the ring algorithms, in the dtypes of the plan: of
        parameters for what is gathered and published, of gradients for what is reduced. A loss
        that casts divided parameters moves what it casts them to.
      at_most: a bound, not a count: a leaf that the backward does not need is gathered once less.
    """

    kind: str
    purpose: str
    elements: int
    wire_bytes: int
    at_most: bool = False


@dataclass(frozen=True)
class Budget:
    """Bytes and elements that a plan promises for one device and one step.

    Attributes:
      level: name of the level.
      group_size: devices in the shard group (N).
      resident: bytes per device of `params`, of the `gradients` that the micro-batch loop carries,
        of the `optimizer` state with master copies and counts, and of `extras` (frozen parameters,
        batch statistics, an average).
      communicated: one entry per kind and purpose. Scalars (losses, norms) and what an optimizer
        itself communicates are not in it.
      host: bytes in the host's memory for one device, of the same parts; 0 without `offload=`.
    """

    level: str
    group_size: int
    resident: dict[str, int]
    communicated: tuple[Traffic, ...]
    host: dict[str, int] = field(default_factory=dict)

    def elements(self, kind: str) -> int:
        """Elements that collectives of one kind move."""
        return sum(m.elements for m in self.communicated if m.kind == kind)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in one step."""
        return sum(m.wire_bytes for m in self.communicated)


def budget(
    plan: Plan,
    *,
    micro_batches: int = 1,
    accumulate: str = "level",
    reshard_after_forward: bool | int = True,
) -> Budget:
    """What `plan` promises for a step of `micro_batches` micro-batches.

    Counts every leaf once a pass. A stack of layers that several scans walk moves once for each.

    Args:
      plan: of `shard_train_state`.
      micro_batches: k, 1 or more.
      accumulate: as in `make_train_step`.
      reshard_after_forward: as in `make_train_step`.
    """
    if not hasattr(plan, "grads"):
        raise GShardError(f"promise(plan) was called with {shown(plan)}.")
    accumulate = accumulation(plan, micro_batches, accumulate)
    reshard = resharding(plan, reshard_after_forward)
    # What a device sees: over the user's own axes its part is all there is.
    stored, reduced, non_trainable = (
        [layout.local() for layout in jax.tree.leaves(tree)]
        for tree in (plan.params, plan.grads, plan.non_trainable)
    )
    carried = [r.replicated() if accumulate == "local" else r for r in reduced]
    totals: dict[tuple[str, str, bool], tuple[int, int]] = {}
    moved = [
        movement
        for s, r in zip(stored, reduced, strict=True)
        for movement in _moved(s, r, micro_batches, accumulate, reshard)
    ]
    for (
        extra
    ) in non_trainable:  # for the forward and again for the backward, where the loss reads it
        if extra.dim is not None:
            amounts = _times(micro_batches, *_gathers(extra, reshard))
            moved.append(("all-gather", "non_trainable", *amounts, True))
    for kind, purpose, elements, sent, at_most in moved:
        key = (kind, purpose, at_most)
        before = totals.get(key, (0, 0))
        totals[key] = (before[0] + elements, before[1] + sent)
    optimizer = jax.tree.leaves(plan.layouts.opt_state)
    held = {
        "params": stored,
        "gradients": carried,
        "optimizer": optimizer,
        "non_trainable": non_trainable,
    }
    return Budget(
        plan.level.name,
        plan.group.size,
        {name: _bytes(layouts, on_host=False) for name, layouts in held.items()},
        tuple(Traffic(k, p, n, sent, most) for (k, p, most), (n, sent) in totals.items() if n),
        {name: _bytes(layouts, on_host=True) for name, layouts in held.items()},
    )


def _bytes(layouts: Iterable[Layout], on_host: bool) -> int:
    return sum(x.bytes_per_device for x in layouts if x.on_host == on_host)


def _moved(
    stored: Layout, reduced: Layout, micro_batches: int, accumulate: str, reshard: bool | int
) -> Iterator[tuple[str, str, int, int, bool]]:
    """(kind, purpose, elements, bytes sent, at most) of one leaf in one step."""
    sums = micro_batches if accumulate == "sync" else 1
    if reduced.dim is None:
        if reduced.group.devices > 1:
            yield "all-reduce", "reduce", *_times(sums, *_all_reduce(reduced, reduced.size)), False
        return
    scatters = 1 if accumulate == "local" else micro_batches
    yield "reduce-scatter", "scatter", *_times(scatters, *_hops(reduced, reduced)), False
    if reduced.group.replicas > 1:
        part = reduced.stored_size // reduced.group.size
        yield "all-reduce", "reduce", *_times(sums, *_all_reduce(reduced, part, True)), False
    if stored.dim is None:
        yield "all-gather", "update", *_hops(reduced, stored), False
    else:  # for the forward and again for the backward
        yield "all-gather", "gather", *_times(micro_batches, *_gathers(stored, reshard)), True


def _times(n: int, elements: int, sent: int) -> tuple[int, int]:
    return n * elements, n * sent


def _all_reduce(layout: Layout, elements: int, of_copies: bool = False) -> tuple[int, int]:
    """Elements and bytes sent of a sum over all devices, or over the copies of a part."""
    n = layout.group.replicas if of_copies else layout.group.devices
    return elements, 2 * (n - 1) * elements * layout.dtype.itemsize // n


def _hops(layout: Layout, moved: Layout) -> tuple[int, int]:
    """Elements and bytes sent of one gather or scatter in the dtype of `moved`.

    One hop per shard axis, each smaller than the last. Whatever the hops are, (N-1)/N is sent.
    """
    sizes = layout.group.sizes
    elements = sum(layout.stored_size // math.prod(sizes[:i]) for i in range(len(sizes)))
    sent = layout.stored_size - layout.stored_size // layout.group.size
    return elements, sent * moved.dtype.itemsize


def _gathers(layout: Layout, reshard: bool | int) -> tuple[int, int]:
    """Elements and bytes sent of the gathers of one leaf for a forward and a backward pass."""
    if isinstance(reshard, bool):
        return _times(2 if reshard else 1, *_hops(layout, layout))
    size, elements, sent = layout.stored_size // layout.group.size, 0, 0
    across, within = layout.group.sub_group(reshard)
    for times, hops in ((1, across), (2, within)):
        for hop in hops:
            sent += times * size * (hop.size - 1)
            size *= hop.size
            elements += times * size
    return elements, sent * layout.dtype.itemsize


def resharding(plan: Plan, reshard_after_forward: bool | int) -> bool | int:
    """`True`, `False`, or how many neighbours keep a leaf between them after the forward pass.

    Raises:
      GShardError: it is neither, or does not divide the group.
    """
    if isinstance(reshard_after_forward, (bool, np.bool_)):
        return bool(reshard_after_forward)
    try:
        n = check_integer("reshard_after_forward", reshard_after_forward, 1)
        plan.group.sub_group(n)
    except GShardError as error:
        raise GShardError(
            f"reshard_after_forward={shown(reshard_after_forward)}: pass True (parts are kept for "
            "the backward pass), False (whole parameters are), or how many neighbours keep each "
            f"between them: {error}"
        ) from None
    return {plan.group.size: True, 1: False}.get(n, n)


def accumulation(plan: Plan, micro_batches: int, accumulate: str, sync: bool = True) -> str:
    """`local`, `scatter` or `sync`: how gradients accumulate over micro-batches.

    One micro-batch that is all is scattered as it arises at every level that divides the optimizer
    state, unless `local` was asked for; without `sync` more may come in later calls.

    Raises:
      GShardError: `accumulate` is unknown, or would reduce what `sync=False` is not to reduce.
    """
    check_integer("micro_batches", micro_batches, 1)
    check_accumulate(accumulate)
    if accumulate == "sync" and not sync:
        raise GShardError(
            "accumulate='sync' reduces the gradient of every micro-batch over all devices, and "
            "sync=False asks for gradients that are not reduced. Choose accumulate='local' or "
            "'scatter', or leave out sync=False."
        )
    if micro_batches == 1 and sync and accumulate != "local":
        return "scatter"
    return plan.level.accumulate if accumulate == "level" else accumulate


def largest_layer(plan: Plan) -> int:
    """Bytes of the largest layer that is gathered: one of a scanned stack, or a leaf by itself."""
    stacks: dict[str, int] = {}
    alone = 0
    for leaf in map(lambda x: x.local(), jax.tree.leaves(plan.params)):
        if leaf.dim is None:
            continue
        size = leaf.stored_size * leaf.dtype.itemsize
        if leaf.scan_dim is None:
            alone = max(alone, size)
        else:
            stack = f"{leaf.path.split('/')[0]} {leaf.shape[leaf.scan_dim]}"
            stacks[stack] = stacks.get(stack, 0) + size // leaf.shape[leaf.scan_dim]
    return max([alone, *stacks.values()])
