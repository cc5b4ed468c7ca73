"""Computes equal chains of matrix products once: each on one device, which owns it.

A *chain* is what connects gathered operands of an update with the results that are read elsewhere:
for Muon the Newton-Schulz iteration of one matrix. On gathered operands every device would compute
all chains. Chains that are the same program on the same shapes form a group here: their operands go
to owners by an all-to-all, each owner computes its own, and the results come back as shards.
A chain that treats the layers of a stack alike counts as one for each layer.

Source: the idea of one owner per matrix is that of distributed Muon (Liu et al., 2025, "Muon is
scalable for LLM training", section 2.3), which gathers to owners instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard._util.arrays import padded
from gshard._util.errors import GShardError
from gshard._util.jaxpr import evaluate, primitives, product_flops
from gshard._util.jaxpr_text import exact_text
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.comm.buckets import BUCKET_SIZE
from gshard.train.comm.owners import from_items, from_owners, in_items, own_items, to_owners
from gshard.train.global_loss.decide import placements_of
from gshard.train.global_loss.evaluator import GlobalEvaluator
from gshard.train.global_loss.placement import REPLICATED, sharded
from gshard.train.global_loss.shape_rules import ENTRY_BY_ENTRY
from gshard.train.optim.chains import Chain

_BATCHED = frozenset(ENTRY_BY_ENTRY) - {"threefry2x32"} | frozenset(
    """argmax argmin broadcast_in_dim cholesky closed_call concatenate cumsum custom_jvp_call
    custom_linear_solve custom_vjp_call dot_general dynamic_slice eigh eval_jaxpr
    householder_product iota jit lu optimization_barrier pad qr reduce_and reduce_max reduce_min
    reduce_or reduce_prod reduce_sum reshape rev scan slice split squeeze svd transpose
    triangular_solve""".split()
)


@dataclass(frozen=True)
class Item:
    """The program of one item: of a chain, or of one layer of a chain on stacks.

    Attributes:
      closed: the jaxpr of `(*indices, *copies, *given)`; `indices` are those of the layer.
      dims: the dimensions of all copies that are split into items.
      counts: their sizes.
      result_dims: for every result the dimensions that they become.
    """

    closed: Any
    dims: tuple[int, ...]
    counts: tuple[int, ...]
    result_dims: tuple[tuple[int, ...], ...]

    @property
    def batches(self) -> bool:
        """Whether several items can be computed at once with the results of each by itself.

        Not so branches and loops that depend on values, random bits and calls of other libraries.
        """
        names = primitives(self.closed.jaxpr)
        return all(name in _BATCHED and not name.startswith("random_") for name in names)


def item_of(
    run: Callable[..., list[Any]],
    copies: Sequence[jax.ShapeDtypeStruct],
    given: Sequence[jax.ShapeDtypeStruct],
    taken: Sequence[int | None],
) -> Item:
    """Returns the program of one item of a chain, `run(*copies, *given)`.

    `taken` are the sharded dimensions of the copies; a dimension of items is another one.
    """
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(*copies, *given)
    dims, found = [], [[] for _ in shapes]
    for d in range(min(x.ndim for x in copies)):
        sizes = {x.shape[d] for x in copies}
        if max(x.ndim for x in copies) < 3 or len(sizes) > 1 or sizes <= {0, 1} or d in taken:
            continue
        split = _of_one_index(closed, len(dims), copies, given, d)
        if split is not None:
            closed, copies, placed = split
            dims.append((d, sizes.pop()))
            for so_far, place in zip(found, placed, strict=True):
                so_far.append(place)
    split_dims, counts = zip(*dims, strict=True) if dims else ((), ())
    return Item(closed, split_dims, counts, tuple(map(tuple, found)))


def _of_one_index(
    closed: Any,
    indices: int,
    copies: Sequence[jax.ShapeDtypeStruct],
    given: Sequence[jax.ShapeDtypeStruct],
    dim: int,
) -> tuple[Any, list[jax.ShapeDtypeStruct], list[int]] | None:
    """Returns the program of one entry along a dimension, its copies, and where results have it.

    None where entries mix. These are the rules for examples of a batch, of which each is a
    micro-batch: what needs all examples is an error.
    """
    size, placed = copies[0].shape[dim], []

    def of_entry(*args: Any) -> list[Any]:
        before, index, arrays = args[:indices], args[indices], args[indices + 1 :]
        evaluator = GlobalEvaluator((), 1, size, index)
        places = [REPLICATED] * indices + [sharded(dim)] * len(copies) + [REPLICATED] * len(given)
        outs, _ = placements_of(evaluator, closed.jaxpr, places)
        if not all(place.is_sharded and place.outer == 1 for place in outs):
            raise GShardError("a result is not one of each entry")
        placed.extend(place.dim for place in outs)
        return evaluator.arrays(closed.jaxpr, closed.consts, places, [*before, *arrays], outs)

    ones = [x.update(shape=(*x.shape[:dim], 1, *x.shape[dim + 1 :])) for x in copies]
    numbers = [jax.ShapeDtypeStruct((), jnp.int32)] * (indices + 1)
    try:
        return jax.make_jaxpr(of_entry)(*numbers, *ones, *given), ones, placed
    except Exception:  # of a rule, or of JAX
        return None  # it stays one item


@dataclass
class OwnedGroup:
    """Equal chains, whose items are shared among the devices.

    Attributes:
      chains: the chains.
      item: the program of one item.
      operands: the layouts of what each chain reads.
      results: the layouts of its results; one without a sharded dimension is all-gathered.
      replicas: how many replicas share the items.
    """

    chains: list[Chain]
    item: Item
    operands: list[Layout]
    results: list[Layout]
    replicas: int

    @property
    def items(self) -> int:
        """How many items all chains have."""
        return len(self.chains) * math.prod(self.item.counts)

    @property
    def flops(self) -> int:
        """FLOP of matrix products that each device computes."""
        return self._own * sum(map(product_flops, self.item.closed.jaxpr.eqns))

    @property
    def sent(self) -> int:
        """Elements that all-to-alls send, per device and once for each axis."""
        group, many = self.operands[0].group, math.prod(self.item.counts)
        moved = [
            x.stored_size // many for x in (*self.operands, *self.results) if x.dim is not None
        ]
        return self._own * sum(moved) * len(group.hops)

    @property
    def _own(self) -> int:
        """How many items every device owns."""
        return -(-self.items // (self.operands[0].group.size * self.replicas))

    @property
    def reads(self) -> set[int]:
        """All values that the chains read."""
        return {i for chain in self.chains for i in (*chain.sources, *chain.given)}

    def __call__(
        self, values: Mapping[int, Any], plan: Plan, after: Any = None
    ) -> dict[int, jax.Array]:
        """Returns the results by value, from values in the global view, once `after` is known."""
        sources = [[values[i] for i in chain.sources] for chain in self.chains]
        columns = zip(*(chain.given for chain in self.chains), strict=True)
        given = [
            [values[i] for i in (column if len(set(column)) > 1 else column[:1])]
            for column in columns
        ]  # of all chains, or one value that they share
        sources = [plan.pin(x, self.operands) for x in sources]
        if after is not None:
            sources, _ = jax.lax.optimization_barrier((sources, after))
        found = jax.shard_map(
            self._on_device,
            mesh=plan.mesh,
            in_specs=([[x.spec for x in self.operands]] * len(sources), jax.P()),
            out_specs=[[x.spec for x in self.results]] * len(sources),
            check_vma=False,
        )(sources, given)
        # Otherwise XLA slices a full result where it is read, and keeps it in memory until then.
        found = jax.lax.optimization_barrier(found)
        return {
            i: layout.unpad(x)
            for chain, xs in zip(self.chains, found, strict=True)
            for i, layout, x in zip(chain.results, self.results, xs, strict=True)
        }

    def _on_device(
        self, shards: list[list[jax.Array]], given: list[list[Any]]
    ) -> list[list[jax.Array]]:
        group, item = self.operands[0].group, self.item
        full = []
        for layout, *several in zip(self.operands, *shards, strict=True):
            stack = self._filled(jnp.concatenate([in_items(x, item.dims) for x in several]))
            if layout.dim is None:
                full.append(own_items(stack, group, self.replicas))
                continue
            own = to_owners(stack, layout.dim + 1, group, self.replicas)
            size = layout.shape[layout.dim]
            full.append(jax.lax.slice_in_dim(own, 0, size, axis=layout.dim + 1))
        numbers = np.indices((len(self.chains), *item.counts)).reshape(1 + len(item.counts), -1).T
        own = own_items(self._filled(jnp.asarray(numbers, jnp.int32)), group, self.replicas)
        stacks = [xs[0] if len(xs) == 1 else jnp.stack(xs) for xs in given]

        def compute(given_of: Any) -> list[Any]:
            number, arrays = given_of
            pairs = zip(stacks, given, strict=True)
            rest = [x if len(xs) == 1 else x[number[0]] for x, xs in pairs]
            args = [*(number[1 + i] for i in range(len(item.counts))), *arrays, *rest]
            return evaluate(item.closed.jaxpr, item.closed.consts, args)

        batch = max(1, BUCKET_SIZE // max(math.prod(x.shape[1:]) for x in full))
        if len(own) == 1:
            found = [x[None] for x in compute(jax.tree.map(lambda x: x[0], (own, full)))]
        elif not item.batches:
            found = jax.lax.map(compute, (own, full))
        elif len(own) <= batch:
            found = jax.vmap(compute)((own, full))
        else:
            found = jax.lax.map(compute, (own, full), batch_size=batch)
        out = [
            self._sent_back(x, layout, dims)
            for x, layout, dims in zip(found, self.results, item.result_dims, strict=True)
        ]
        return [list(xs) for xs in zip(*out, strict=True)]

    def _filled(self, items: jax.Array) -> jax.Array:
        """Repeats the last item until every device owns as many."""
        missing = -len(items) % (self.operands[0].group.size * self.replicas)
        return jnp.concatenate([items, *[items[-1:]] * missing]) if missing else items

    def _sent_back(self, own: jax.Array, layout: Layout, dims: tuple[int, ...]) -> list[jax.Array]:
        """Returns one result of every chain, as this device stores it."""
        dim = layout.dim
        if dim is not None:
            own = padded(own, dim + 1, layout.stored_shape[dim])
        x = from_owners(own, None if dim is None else dim + 1, layout.group, self.replicas)
        x = x[: self.items].reshape(len(self.chains), -1, *x.shape[1:])
        return [from_items(items, dims, self.item.counts) for items in x]


def groups_of(
    waves: Sequence[Sequence[Chain]],
    program: Callable[[Chain], Callable[..., list[Any]]],
    avals: Sequence[Any],
    layout: Callable[[int], Layout],
    result: Callable[[int], Layout],
) -> list[OwnedGroup]:
    """Returns groups of equal chains with at least two items, in the order to compute them.

    `layout` and `result` give the layouts of what a chain reads, and of its results.
    """
    found, known = [], dict[Any, Any]()
    for wave in waves:
        equal: dict[Any, OwnedGroup] = {}
        for chain in wave:
            copies, given = (
                [
                    jax.ShapeDtypeStruct(
                        avals[i].shape, avals[i].dtype, weak_type=avals[i].weak_type
                    )
                    for i in values
                ]
                for values in (chain.copies, chain.given)
            )
            operands = [layout(i) for i in chain.sources]
            item = item_of(program(chain), copies, given, [x.dim for x in operands])
            results = [
                x.replicated() if x.dim in dims else x
                for x, dims in zip(map(result, chain.results), item.result_dims, strict=True)
            ]
            key = exact_text(item.closed, known), item.dims, item.counts, *operands, *results
            equal.setdefault(key, OwnedGroup([], item, operands, results, 1)).chains.append(chain)
        for group in equal.values():
            if group.items > 1:
                found += _in_rounds(group)
    return found


def _in_rounds(group: OwnedGroup) -> list[OwnedGroup]:
    """Splits a group into rounds in which every device has a bucket of arrays, or one array."""
    where, own = group.operands[0].group, math.prod(group.item.counts)
    size = max(x.size for x in group.operands) // own
    devices = where.size
    if -(-group.items // where.devices) < -(-group.items // devices):
        group.replicas, devices = where.replicas, where.devices
    chains = devices // math.gcd(devices, own)  # the fewest that share the devices evenly
    chains *= max(1, max(1, BUCKET_SIZE // size) * devices // (chains * own))
    return [
        dataclasses.replace(group, chains=group.chains[i : i + chains])
        for i in range(0, len(group.chains), chains)
    ]
