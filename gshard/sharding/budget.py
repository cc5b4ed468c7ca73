"""The budget of a plan: bytes stored and elements communicated. All formulas are in this file.

Source: ZeRO (Rajbhandari et al., 2020), sections 5 and 7, counted leaf by leaf, padding included.
Everything that reports a figure (tests, the demo, `audit`) calls `budget`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import jax
import numpy as np
from rich.table import Table

from gshard._util.errors import GShardError
from gshard._util.html import html_of
from gshard._util.text import bytes_of, text_of, text_table
from gshard._util.validation import check_integer, shown
from gshard.sharding.group import Group, Hop
from gshard.sharding.layout import Layout
from gshard.sharding.level import Accumulate, check_accumulate
from gshard.sharding.nodes import Nodes, check_kind, nodes_of, sent_share
from gshard.sharding.plan import Plan, UpdateProducts

_UNSHARED_SHARE = 0.05  # of an optimizer's FLOP, from which a matrix is named


@dataclass(frozen=True)
class Traffic:
    """Elements that collectives of one kind and purpose communicate per device and step.

    Attributes:
      kind: `all-gather`, `reduce-scatter` or `all-reduce`.
      purpose: `gather` (parameters, for the loss), `scatter` and `reduce` (gradients), `update`
        (updated parameters), `non_trainable` (state that is not trained, for the loss), or `loss`
        (examples of other devices that the loss needs, in its forward pass).
      elements: full size of the arrays, times executions: the output of an all-gather, the input of
        a reduce-scatter or all-reduce. Of quantized arrays (`wire=`), the bytes of codes and scales
        together; their reduce-scatter is an all-to-all.
      wire_bytes: bytes that a device sends, by the ring algorithms, in the dtypes of the plan: of
        parameters where they are gathered, of gradients where they are reduced. A loss that casts
        sharded parameters communicates the dtype that it casts them to.
      at_most: whether this is an upper bound: a leaf that the backward pass does not need is
        gathered once less.
      network_bytes: how many of these bytes go to other nodes, over the network: the mean over the
        devices of a node. 0 on one node.
      at_least: whether some of it is in a loop of unknown length, of which one iteration counts.
      codes: how many of the elements are bytes of quantized arrays.
    """

    kind: str
    purpose: str
    elements: int
    wire_bytes: int
    at_most: bool = False
    network_bytes: int = 0
    at_least: bool = False
    codes: int = 0


class LossTransfer(Protocol):
    """A collective that a loss needs, over `axes` if they are given.

    `kind` is `gather`, HLO's name of a collective, or anything else for an all-reduce.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def elements(self) -> int: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102
    @property
    def times(self) -> int: ...  # noqa: D102
    @property
    def axes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def pairs(self) -> tuple[tuple[int, ...], ...] | None: ...  # noqa: D102
    @property
    def at_least(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class Budget:
    """Memory and traffic of one device in one step, as `budget` computes them from a plan.

    Attributes:
      level: name of the level.
      group_size: number of devices in the shard group (N).
      resident: bytes per device of `params`, of the `gradients` that the micro-batch loop carries,
        of the `optimizer` state with master copies and counts, and of `non_trainable` state (frozen
        parameters, batch statistics, an average).
      communicated: one entry per kind and purpose. Scalars (losses, norms) and what an optimizer
        itself communicates are not counted.
      host: bytes in host memory per device, by the same names; 0 without `offload=`.
      nodes: number of nodes, whose devices share fast links (NVLink, or those of a TPU slice).
      products: what an optimizer that multiplies matrices computes and sends; None if it has no
        products, or they were not asked for.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero2", min_shard_size=0)
      >>> found = gshard.budget(plan)
      >>> found.elements("reduce-scatter") == 64 * 32 + 32
      True
    """

    level: str
    group_size: int
    resident: dict[str, int]
    communicated: tuple[Traffic, ...]
    host: dict[str, int] = field(default_factory=dict)
    nodes: int = 1
    products: UpdateProducts | None = None

    def elements(self, kind: str) -> int:
        """Returns the number of elements that collectives of one kind communicate.

        Raises:
          GShardError: there is no such kind.
        """
        check_kind(kind)
        return sum(m.elements for m in self.communicated if m.kind == kind)

    @property
    def wire_bytes(self) -> int:
        """Number of bytes that a device sends in one step."""
        return sum(m.wire_bytes for m in self.communicated)

    @property
    def network_bytes(self) -> int:
        """Number of bytes that a device sends to other nodes in one step."""
        return sum(m.network_bytes for m in self.communicated)

    def __str__(self) -> str:
        return text_of(self._report())

    def _repr_html_(self) -> str:
        """What a notebook shows: the same as `print(budget)`."""
        return html_of(self._report())

    def _report(self) -> list[Table | str]:
        stored = self.resident | {f"{name} on host": n for name, n in self.host.items() if n}
        memory = text_table("Memory of one device", ("use",), ("bytes", "size"))
        for name, n in stored.items():
            memory.add_row(name, f"{n:,}", bytes_of(n))
        columns = ("elements", "sent", *(("between nodes",) if self.nodes > 1 else ()))
        sent = text_table("Communicated in one step", ("kind", "for"), columns)
        for m in self.communicated:
            elements = f"{'<= ' if m.at_most else '>= ' if m.at_least else ''}{m.elements:,}"
            amounts = (m.wire_bytes, m.network_bytes)[: len(columns) - 1]
            sent.add_row(m.kind, m.purpose, elements, *map(bytes_of, amounts))
        title = f"level {self.level}: {self.group_size} devices in the shard group"
        most = "at most " * any(m.at_most for m in self.communicated)
        total = f"sent by one device in one step: {most}{bytes_of(self.wire_bytes)}"
        if self.nodes > 1:
            total += f", {bytes_of(self.network_bytes)} of this between {self.nodes} nodes"
        return [title, memory, sent, total, *products_table(self.products)]


def products_table(products: UpdateProducts | None, found: int | None = None) -> list[Table]:
    """Returns a table of matrix products; `found` is the FLOP of the whole program."""
    if products is None:
        return []
    title = "Matrix products of the optimizer (no decompositions), per device and update"
    table = text_table(title, ("amount",), ("number",))
    table.add_row("FLOP", f"{products.flops:,}")
    if found is not None:
        table.add_row("FLOP of the whole program", f"{found:,}")
    table.add_row("FLOP without sharding", f"{products.one_device:,}")
    table.add_row("elements sent by all-to-all, in addition", f"{products.sent:,}")
    for name, flops in products.unshared:
        if flops >= _UNSHARED_SHARE * products.one_device:
            table.add_row(f"FLOP that every device repeats: {name}", f"{flops:,}")
    return [table]


def budget(
    plan: Plan,
    *,
    micro_batches: int = 1,
    accumulate: Accumulate = "level",
    reshard_after_forward: bool | int = True,
    loss_transfers: Iterable[LossTransfer] | None = (),
    devices_per_node: int | None = None,
    products: UpdateProducts | None = None,
    forward_passes: int = 0,
) -> Budget:
    """Computes the memory and traffic of a step from a plan, without compiling anything.

    Every array is counted once per pass. A stack of layers that several scans iterate over is
    gathered once for each.

    Args:
      plan: the plan that `shard_train_state` returned.
      micro_batches: number of micro-batches in a step, 1 or more.
      accumulate: as in `make_train_step`.
      reshard_after_forward: as in `make_train_step`.
      loss_transfers: what the loss needs of other devices' examples, `step.loss_transfers` after
        the first call. A plan does not know it; `step.budget` has it.
      devices_per_node: how many adjacent devices of the mesh share fast links, such as the 8 GPUs
        of a host. By default JAX says so of GPUs and TPUs; CPU devices are one node.
      products: what an optimizer such as Muon computes, `plan.update_products`, which traces an
        update; `step.budget` has it.
      forward_passes: number of forward passes over all micro-batches before the gradients. A loss
        takes one for each sum over the batch that is computed from parameters, as a warning says;
        `step.budget` has their number.

    Returns:
      A `Budget`, in bytes and elements per device.

    Raises:
      GShardError: `plan` is not a plan, an argument is out of range, or `loss_transfers` is None.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero3", min_shard_size=0)
      >>> gshard.budget(plan).resident["params"]
      1040
    """
    if not isinstance(plan, Plan):
        raise GShardError(
            f"budget(plan) was called with {shown(plan)}. Pass the plan that "
            "gshard.shard_train_state returned."
        )
    micro_batches = check_integer("micro_batches", micro_batches, 1)
    how = accumulation(plan, micro_batches, accumulate)
    reshard = resharding(plan, reshard_after_forward)
    forward_passes = check_integer("forward_passes", forward_passes, 0)
    nodes = nodes_of(plan.mesh, devices_per_node)
    # One device's view: it has only its shard over the model-parallel axes.
    stored, reduced, non_trainable = (
        [layout.local() for layout in jax.tree.leaves(tree)]
        for tree in (plan.params, plan.grads, plan.non_trainable)
    )
    layouts = {
        "params": stored,
        "gradients": [r.replicated() if how == "local" else r for r in reduced],
        "optimizer": jax.tree.leaves(plan.layouts.opt_state),
        "non_trainable": non_trainable,
    }
    passes = [(micro_batches, reshard)]
    if forward_passes:
        passes.append((micro_batches * forward_passes, False))
    communicated = [
        traffic
        for s, r in zip(stored, reduced, strict=True)
        for traffic in _traffic(s, r, micro_batches, how, passes, nodes)
    ] + [
        ("all-gather", "non_trainable", True, times, _gathers(x, kept, nodes), False)
        for x in non_trainable
        if x.dim is not None
        for times, kept in passes
    ]
    if loss_transfers is None:  # an attribute of a step that was not traced yet
        raise GShardError(
            "loss_transfers=None: this step has not been traced yet. Call it, or "
            "step.lower(state, batch), first."
        )
    loss_transfers = list(loss_transfers)
    losses = micro_batches * (1 + forward_passes)  # how often one is computed
    communicated += [_of_loss(x, plan.group, losses, nodes) for x in loss_transfers]
    in_loops = {(_kind_of(x), "loss") for x in loss_transfers if x.at_least}
    totals: dict[tuple[str, str, bool], tuple[int, int, Fraction | int, int]] = {}
    for kind, purpose, at_most, times, amounts, quantized in communicated:
        n, sent, network, codes = totals.get((kind, purpose, at_most), (0, 0, 0, 0))
        more, sends, between = amounts
        totals[kind, purpose, at_most] = (
            n + times * more, sent + times * sends, network + times * between,
            codes + times * more * quantized,
        )  # fmt: skip
    return Budget(
        plan.level.name,
        plan.group.size,
        {name: _bytes(found, on_host=False) for name, found in layouts.items()},
        tuple(
            Traffic(
                kind, purpose, n, sent, at_most, int(network), (kind, purpose) in in_loops, codes
            )
            for (kind, purpose, at_most), (n, sent, network, codes) in totals.items()
            if n
        ),
        {name: _bytes(found, on_host=True) for name, found in layouts.items()},
        nodes.count,
        products,
    )


def _bytes(layouts: Iterable[Layout], on_host: bool) -> int:
    return sum(x.bytes_per_device for x in layouts if x.on_host == on_host)


# Elements, bytes that a device sends, and bytes of these that it sends to other nodes.
_Amounts = tuple[int, int, Fraction | int]
# Kind, purpose, `at_most`, times per step, amounts, and whether the array is quantized.
_Entry = tuple[str, str, bool, int, _Amounts, bool]


def _traffic(
    stored: Layout,
    reduced: Layout,
    micro_batches: int,
    accumulate: str,
    passes: Sequence[tuple[int, bool | int]],
    nodes: Nodes,
) -> Iterator[_Entry]:
    """Yields the entries of one leaf's collectives.

    `passes` says how often a sharded parameter is gathered, and how it is resharded after that.
    """
    sums = micro_batches if accumulate == "sync" else 1
    group = reduced.group
    if reduced.dim is None:
        if group.devices > 1:
            amounts = _all_reduce(reduced, reduced.size, group.axes, nodes)
            yield "all-reduce", "reduce", False, sums, amounts, False
        return
    scatters = 1 if accumulate == "local" else micro_batches
    quantized = reduced.scattered_as is not None
    sent = reduced.packed(reduced.scattered_as)
    amounts = _hops(sent, sent, nodes, quantized)
    yield "reduce-scatter", "scatter", False, scatters, amounts, quantized
    if group.replicas > 1:
        amounts = _all_reduce(reduced, reduced.stored_size // group.size, group.replica, nodes)
        yield "all-reduce", "reduce", False, sums, amounts, False
    if stored.dim is None:
        yield "all-gather", "update", False, 1, _hops(reduced, stored, nodes), False
    else:
        quantized = stored.gathered_as is not None
        for times, reshard in passes:
            amounts = _gathers(stored, reshard, nodes)
            yield "all-gather", "gather", True, times, amounts, quantized


def _of_loss(transfer: LossTransfer, group: Group, micro_batches: int, nodes: Nodes) -> _Entry:
    kind = _kind_of(transfer)
    axes, sizes = transfer.axes or group.outer_axes, dict(nodes.axes)
    n = math.prod(sizes[axis] for axis in axes)
    sent = math.floor(sent_share(kind, n) * transfer.size)
    network = nodes.network_share_over(kind, axes, transfer.pairs) * transfer.size
    amounts = transfer.elements, sent, network
    return kind, "loss", False, transfer.times * micro_batches, amounts, False


def _kind_of(transfer: LossTransfer) -> str:
    kind = {"gather": "all-gather"}.get(transfer.kind, transfer.kind)
    return kind if "-" in kind else "all-reduce"


def _all_reduce(layout: Layout, elements: int, axes: tuple[str, ...], nodes: Nodes) -> _Amounts:
    """Returns the amounts of a sum over axes."""
    size, group = elements * layout.dtype.itemsize, layout.group
    n = group.devices if axes == group.axes else group.replicas
    return elements, 2 * (n - 1) * size // n, nodes.network_share_over("all-reduce", axes) * size


def _gathered(
    layout: Layout,
    width: int,
    hops: Iterable[tuple[int, Sequence[Hop]]],
    nodes: Nodes,
    kind: str = "all-gather",
) -> _Amounts:
    """Returns the amounts of gathers over some hops, each as often as is said.

    Each hop communicates more than the last: what the hops before it have gathered. A scatter, also
    one by all-to-alls (`kind`), is the same backwards. Over all hops a device sends (N-1)/N of the
    array.
    """
    size, elements, sent, network = layout.stored_size // layout.group.size, 0, 0, Fraction(0)
    for times, some in hops:
        for hop in some:
            sent += times * size * (hop.size - 1)
            size *= hop.size
            elements += times * size
            share = nodes.network_share_over(kind, (hop.axis,), hop.groups)
            network += times * size * share
    return elements, sent * width, network * width


def _hops(layout: Layout, moved: Layout, nodes: Nodes, quantized: bool = False) -> _Amounts:
    """Returns the amounts of one gather or scatter in the dtype of `moved`."""
    kind = "all-to-all" if quantized else "all-gather"
    return _gathered(layout, moved.dtype.itemsize, [(1, layout.group.hops)], nodes, kind)


def _gathers(layout: Layout, reshard: bool | int, nodes: Nodes) -> _Amounts:
    """Returns the amounts of one leaf's gathers for forward and backward pass."""
    layout = layout.packed(layout.gathered_as)
    if isinstance(reshard, bool):
        hops = [(2 if reshard else 1, layout.group.hops)]
    else:
        across, within = layout.group.sub_group(reshard)
        hops = [(1, across), (2, within)]
    return _gathered(layout, layout.dtype.itemsize, hops, nodes)


def resharding(plan: Plan, reshard_after_forward: bool | int) -> bool | int:
    """Checks `reshard_after_forward`: True, False, or the size of a sub-group that can exist."""
    if isinstance(reshard_after_forward, (bool, np.bool_)):
        return bool(reshard_after_forward)
    try:
        n = check_integer("reshard_after_forward", reshard_after_forward, 1)
        gathered = jax.tree.leaves((plan.params, plan.non_trainable))
        kept = {x.group for x in gathered if x.kept is not None and x.dim is not None}
        for group in kept | {plan.group}:  # that of a kept array has fewer devices
            if n not in (1, plan.group.size):
                group.sub_group(n)
    except GShardError as error:
        raise GShardError(
            f"reshard_after_forward={shown(reshard_after_forward)}: pass True (keep local shards "
            "for the backward pass), False (keep gathered parameters), or the number of devices in "
            f"a sub-group that keeps each parameter sharded among them: {error}"
        ) from None
    return {plan.group.size: True, 1: False}.get(n, n)


def accumulation(plan: Plan, micro_batches: int, accumulate: str, sync: bool = True) -> str:
    """Decides how gradients accumulate over micro-batches: `local`, `scatter` or `sync`.

    The gradient of a single micro-batch is scattered as soon as it is available at every level that
    shards the optimizer state, unless the user asked for `local`. With `sync=False` later calls may
    add more micro-batches.
    """
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


def largest_layer(plan: Plan, reshard_after_forward: bool | int = True) -> int:
    """Returns the bytes of the largest gathered layer, of a scanned stack or a single array.

    Without resharding after the forward pass, that of all layers together, since all are kept.
    """
    layers: dict[str, int] = {}  # arrays of one stack are gathered together
    kept = resharding(plan, reshard_after_forward) is False
    leaves = jax.tree.leaves((plan.params, plan.non_trainable))
    for leaf in (x.local() for x in leaves if x.dim is not None):
        name, count = leaf.path, 1
        if leaf.scan_dim is not None:
            count = 1 if kept else leaf.shape[leaf.scan_dim]
            name = f"{leaf.path.split('/')[0]} {count}"
        layers[name] = layers.get(name, 0) + leaf.stored_size * leaf.dtype.itemsize // count
    return sum(layers.values()) if kept else max(layers.values(), default=0)
