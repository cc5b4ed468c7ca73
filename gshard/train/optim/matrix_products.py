"""Matrix products of an optimizer, on whole operands.

XLA divides each product of divided matrices anew and gathers for each: fifteen times in
Newton-Schulz. Here the update is traced. What its products need is gathered once, and what follows
from that alone, up to the last product, is computed whole on every device, in a `shard_map`, where
XLA cannot divide it again; each device keeps its part of the result. A product that needs nothing
of other devices (a stack that is divided on its layers) and all else is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax import core as jax_core
from jax.extend import core

from gshard._util.jaxpr import bind, called, in_scope, opened, with_inner
from gshard._util.jaxpr_dataflow import PRODUCTS, UNKNOWN, Dim, back, join, sharded_dims
from gshard.sharding.layout import Layout
from gshard.train.comm.buckets import BUCKET_SIZE
from gshard.train.comm.collectives import all_gather_updated

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan

# Where the user says how something lies, XLA has to see it.
_PLACED = ("sharding_constraint", "shard_map", "reshard")


@dataclass
class Step:
    """One equation.

    Attributes:
      eqn: the equation.
      ins: numbers of its operands.
      outs: numbers of its results.
      free: it may run inside a `shard_map`.
      holds: it is or holds a primitive of those that calls are opened for.
      whole: it is to run on whole values, on every device.
      branches: of a `cond`, to be run in place of its own.
    """

    eqn: Any
    ins: list[int]
    outs: list[int]
    free: bool
    holds: bool
    whole: bool = False
    branches: Sequence[Callable[[Sequence[Any]], Any]] = ()

    def run(self, values: dict[int, Any]) -> None:
        """Adds the results to the values."""
        given = [values[i] for i in self.ins]
        with in_scope(self.eqn):
            results = (
                jax.lax.switch(given[0], self.branches, given[1:])
                if self.branches
                else bind(self.eqn, given)
            )
        values.update(zip(self.outs, results, strict=True))


class Traced:
    """The steps of a jaxpr in order, those of the calls that hold certain primitives among them.

    Attributes:
      steps: of all equations.
      avals: shape and dtype of every value.
      inputs: numbers of the inputs.
      outputs: numbers of the results.
      literals: values that are known.
      consts: arrays that the function closed over.
      foreign: those of them whose layout is not known, such as a batch.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any], opened: Collection[str]):
        self.steps: list[Step] = []
        self.avals: list[Any] = []
        self.literals: dict[int, Any] = {}
        self.consts: dict[int, Any] = {}
        self.foreign: set[int] = set()
        self.inputs = [self.new(v.aval) for v in jaxpr.invars]
        self.outputs = self._open(jaxpr, consts, self.inputs, opened)

    def new(self, aval: Any) -> int:
        """The number of a new value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def bytes(self, *values: int) -> int:
        """Of whole values."""
        return sum(self.avals[i].size * self.avals[i].dtype.itemsize for i in values)

    def computed_from(self, values: Iterable[int]) -> set[int]:
        """These values and all that depends on them."""
        found = set(values)
        for step in self.steps:
            if not found.isdisjoint(step.ins):
                found.update(step.outs)
        return found

    def _open(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int], opened: Collection[str]
    ) -> list[int]:
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(v: Any) -> int:
            if not isinstance(v, core.Literal):
                return known[v]
            i = self.new(v.aval)
            self.literals[i] = v.val
            return i

        for v, const in zip(jaxpr.constvars, consts, strict=True):
            i = known[v] = self.new(v.aval)
            self.consts[i] = const
            if v.aval.size > 1 and isinstance(const, jax_core.Tracer):
                self.foreign.add(i)
        for eqn in jaxpr.eqns:
            ins, body = [read(v) for v in eqn.invars], called(eqn)
            holds = any(inner.primitive.name in opened for inner in with_inner(eqn))
            if body and holds:
                outs = self._open(*body, ins, opened)
            else:
                outs = [self.new(v.aval) for v in eqn.outvars]
                self.steps.append(Step(eqn, ins, outs, _is_free(eqn), holds))
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]


def _is_free(eqn: Any) -> bool:
    return not any(inner.effects or inner.primitive.name in _PLACED for inner in with_inner(eqn))


class Wholes:
    """A traced update, of which it is decided what is gathered and what runs on whole values."""

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs it: see `products`."""
        raise NotImplementedError

    def __init__(
        self,
        traced: Traced,
        dims: Sequence[Dim],
        whole: Sequence[int],
        ends: Sequence[Dim],
        read: Sequence[int],
        plan: Plan,
    ):
        """Decides what is gathered.

        Args:
          traced: the steps.
          dims: the divided dimension of every input.
          whole: inputs that are whole already.
          ends: the dimension on which every output will be divided.
          read: outputs that later products need whole.
          plan: has the devices.
        """
        self._plan, self._traced = plan, traced
        self._steps, self._outputs = traced.steps, traced.outputs
        self._dims: dict[int, Dim] = dict.fromkeys(range(len(traced.avals)))
        self._dims.update(zip(traced.inputs, dims, strict=True))
        self._look_back(ends, read)
        self._settle({traced.inputs[i] for i in whole})

    @property
    def gathers(self) -> bool:
        """Whether anything is to be made whole."""
        return bool(self._sources) or any(step.branches for step in self._steps)

    @property
    def sources(self) -> list[int]:
        """The values that are gathered."""
        return list(self._sources.values())

    def _look_back(self, ends: Sequence[Dim], read: Sequence[int]) -> None:
        """Which values a product is computed from, and how the others will lie at the end."""
        self._read = {self._outputs[i] for i in read}
        self._ends = dict(zip(self._outputs, ends, strict=True))
        for step in reversed(self._steps):
            if self._leads_on(step):
                self._read.update(step.ins)
            elif len(step.outs) == 1:
                before = zip(step.ins, back(step.eqn, self._ends.get(step.outs[0])), strict=True)
                self._ends.update((i, dim) for i, dim in before if dim is not None)

    def _leads_on(self, step: Step) -> bool:
        """Whether it is a product, or one is computed from it."""
        return step.holds or not self._read.isdisjoint(step.outs)

    def _settle(self, whole: set[int]) -> None:
        """Decides what is gathered and which steps run on whole values."""
        found: set[int] = set()
        while not (wanted := self._judge(whole | found)) <= found:
            found |= wanted
        made = {i for step in self._steps if step.whole for i in step.outs}
        copies = {i: self._traced.new(self._traced.avals[i]) for i in sorted(found - made)}
        self._sources = {copy: i for i, copy in copies.items()}
        for step in self._steps:
            if step.whole or step.branches or step.holds:
                step.ins = [copies.get(i, i) for i in step.ins]

    def _judge(self, known: set[int]) -> set[int]:
        """Follows the divided dimensions, given what is whole; returns what else must be.

        That is not an operand itself but what makes it, where that is no larger: a transposed and a
        scaled copy of one matrix are gathered once.
        """
        traced, wanted = self._traced, set()
        self._whole = set(known)
        origins = {i: {i} for i in traced.inputs}
        foreign = set(traced.foreign)
        summed: dict[frozenset[int], float] = {}
        for step in self._steps:
            whole = [i in self._whole for i in step.ins]
            dims = self._dims_of(step)
            divided = [i for i, dim in zip(step.ins, dims, strict=True) if dim is not None]
            makers = set().union(*(origins[i] for i in divided))
            outs, moved = sharded_dims(step.eqn, dims)
            follows = any(whole) and self._leads_on(step)
            step.whole, step.branches = False, ()
            if not foreign.isdisjoint(step.ins):  # left to XLA, with all that follows
                foreign.update(i for i in step.outs if traced.avals[i].size > 1)
            elif step.eqn.primitive.name == "cond" and divided and (moved or follows):
                outs = self._into_branches(step, dims[1:], whole[1:])
            elif moved == math.inf and (one := self._enough(step, dims)) is not None:
                wanted |= origins[one]  # a small factor; the rest stays divided
                self._whole.add(one)
                outs, _ = sharded_dims(step.eqn, self._dims_of(step))
            elif step.free and (moved == math.inf or (follows and not divided)):
                step.whole = True  # XLA would gather, maybe often; or all that it reads is whole
                wanted |= makers
                self._whole.update(divided, step.outs)
            elif step.free and moved:  # summed over devices, unless all sums are more than it
                summed[frozenset(makers)] = summed.get(frozenset(makers), 0) + moved
            for i, dim in zip(step.outs, outs, strict=True):
                self._dims[i] = dim
                smaller = step.free and traced.bytes(*makers) <= traced.bytes(i)
                origins[i] = makers if smaller else {i}
        for makers, moved in summed.items():
            if moved > sum(traced.avals[i].size for i in makers):
                wanted |= makers
        return wanted

    def _dims_of(self, step: Step) -> list[Dim]:
        return [None if i in self._whole else self._dims[i] for i in step.ins]

    def _enough(self, step: Step, dims: Sequence[Dim]) -> int | None:
        """The operand that alone need be whole: a small factor of divided rows."""
        for i in sorted(step.ins, key=self._traced.bytes):
            rest = [None if j == i else dim for j, dim in zip(step.ins, dims, strict=True)]
            if step.eqn.primitive.name == "dot_general" and not sharded_dims(step.eqn, rest)[1]:
                return i
        return None

    def _into_branches(self, step: Step, dims: Sequence[Dim], whole: Sequence[bool]) -> list[Dim]:
        """Gathers inside the branches, which not every step of training takes."""
        given = [i for i, w in enumerate(whole) if w]
        ends = [None if i in self._read else self._ends.get(i) for i in step.outs]
        read = [n for n, i in enumerate(step.outs) if i in self._read]
        found = [
            type(self)(Traced(*opened(branch), PRODUCTS), dims, given, ends, read, self._plan)
            for branch in step.eqn.params["branches"]
        ]
        step.branches = found
        outs: list[Dim] = []
        for out, *ends in zip(step.outs, *(b._outputs for b in found), strict=True):
            ways = list(zip(found, ends, strict=True))
            outs.append(join(*(None if end in b._whole else b._dims[end] for b, end in ways)))
            if outs[-1] is None and any(end in b._whole for b, end in ways):
                self._whole.add(out)
        return outs


def with_gathered_operands(
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
            if copies and size > BUCKET_SIZE:
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
            wholes = all_gather_updated(parts, places, BUCKET_SIZE, "optimizer")
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
        cut = (place.unpad(x) for place, x in zip(kept, found, strict=True))
        values.update(zip(results, cut, strict=True))
        return later

    def _layout(self, i: int, dim: Dim) -> Layout:
        aval, dim = self._traced.avals[i], None if dim == UNKNOWN else dim
        return Layout("", aval.shape, aval.dtype, dim, self._plan.group, None, "")
