"""Matrix products of an optimizer, on whole operands.

XLA divides each product of divided matrices anew and gathers for each: fifteen times in
Newton-Schulz. Here the update is traced. What its products need is gathered once, and what follows
from that alone, up to the last product, is computed whole on every device, in a `shard_map`, where
XLA cannot divide it again; each device keeps its part of the result. A product that needs nothing
of other devices (a stack that is divided on its layers) and all else is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend import core

from gshard._util.jaxpr_dataflow import PRODUCTS, UNKNOWN, Dim
from gshard.sharding.layout import Layout
from gshard.train.comm.buckets import BUFFER_MAX_SIZE
from gshard.train.comm.collectives import publish_leaves
from gshard.train.optim.traced import Step, Traced
from gshard.train.optim.wholes import Wholes

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan


def with_whole_products(
    fun: Callable[..., Any],
    plan: Plan,
    args: Sequence[Any],
    layouts: Sequence[Layout],
    results: Sequence[Layout],
) -> Any:
    """`fun(*args)` in the global view, its matrix products on whole operands.

    Args:
      fun: takes and returns pytrees of arrays of logical shape.
      plan: says how they are divided.
      args: pytrees of arrays.
      layouts: of all their leaves, in order.
      results: where the leaves of the result will lie.
    """
    # Traced without a mesh in its types: a derivative inside the `shard_map` meets another there.
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type), args
    )
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*abstract)
    flat = jax.tree.leaves(args)
    traced = Traced(closed.jaxpr, closed.consts, PRODUCTS)
    ends = [layout.dim for layout in results]
    update = _Update(traced, [layout.dim for layout in layouts], [], ends, [], plan)
    on_host = (i for i, x in zip(traced.inputs, layouts, strict=True) if x.on_host)
    update.in_order = traced.computed_from(on_host).isdisjoint(update.sources)
    out = update(flat) if update.gathers else core.jaxpr_as_fun(closed)(*flat)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


class _Update(Wholes):
    """A traced update that can be run.

    Attributes:
      in_order: buckets wait for each other. Where they are made of state on the host, they wait for
        that (`streaming`), and an order of their own would tie it together.
    """

    in_order = True

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The results; args in the global view."""
        inputs = zip(self._traced.inputs, args, strict=True)
        values = {**self._traced.literals, **self._traced.consts, **dict(inputs)}
        rest, waiting, ends = self._steps, list(self._sources), []
        while rest:
            later: list[Step] = []
            for step in rest:
                if step.whole or any(i not in values for i in step.ins):
                    later.append(step)
                else:
                    step.run(values)
            rest = self._run_whole(later, values, waiting, ends)
        return [values[i] for i in self._outputs]

    def _run_whole(
        self, rest: Sequence[Step], values: dict[int, Any], waiting: list[int], ends: list[Any]
    ) -> list[Step]:
        """Gathers a bucket and runs what can follow; returns the steps still to run.

        A bucket is gathered while the one before is computed with, and not earlier: two are whole.
        """
        copies, size = [], 0
        for i in [i for i in waiting if self._sources[i] in values]:
            size += self._traced.avals[i].size
            if copies and size > BUFFER_MAX_SIZE:
                break
            copies.append(i)
            waiting.remove(i)
        made, steps, later = set(copies), [], []
        for step in rest:
            if step.whole and all(i in made or i in values for i in step.ins):
                steps.append(step)
                made.update(step.outs)
            else:
                later.append(step)
        literals = self._traced.literals
        given = sorted({i for step in steps for i in step.ins} - made - set(literals))
        results = sorted(made & {i for step in later for i in step.ins}.union(self._outputs))
        if not results:
            return later
        sources = [self._sources[i] for i in copies]
        places = [self._layout(i, self._dims[i]) for i in sources]
        needed = {i for step in later if step.whole or step.branches for i in step.ins}
        kept = [self._layout(i, None if i in needed else self._ends.get(i)) for i in results]
        parts = self._plan.pin([values[i] for i in sources], places)
        if ends[:-1] and self.in_order:
            parts, _ = jax.lax.optimization_barrier((parts, ends[-2]))

        def on_device(parts: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
            wholes = publish_leaves(parts, places, BUFFER_MAX_SIZE, "optimizer")
            own = {**literals, **dict(zip((*copies, *given), (*wholes, *arrays), strict=True))}
            for step in steps:
                step.run(own)
            return [own[i] for i in results]

        found = jax.shard_map(
            on_device,
            mesh=self._plan.mesh,
            in_specs=([place.spec for place in places], jax.P()),
            out_specs=jax.P(),
            check_vma=False,
        )(parts, [values[i] for i in given])
        # Without these barriers XLA takes the part where it is read, maybe after a norm of all of
        # them, and so keeps every whole until then.
        found = jax.lax.optimization_barrier(found)
        found = jax.lax.optimization_barrier(self._plan.pin(found, kept))
        ends.append(found)
        cut = (place.cut(x) for place, x in zip(kept, found, strict=True))
        values.update(zip(results, cut, strict=True))
        return later

    def _layout(self, i: int, dim: Dim) -> Layout:
        aval, dim = self._traced.avals[i], None if dim == UNKNOWN else dim
        return Layout("", aval.shape, aval.dtype, dim, self._plan.group, None, "")
