"""Which values of a traced update its products need whole, and which steps run on whole values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gshard._util.jaxpr import opened
from gshard._util.jaxpr_dataflow import PRODUCTS, Dim, back, flow, join
from gshard.train.optim.traced import Step, Traced

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan


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
            outs, moved = flow(step.eqn, dims)
            follows = any(whole) and self._leads_on(step)
            step.whole, step.branches = False, ()
            if not foreign.isdisjoint(step.ins):  # left to XLA, with all that follows
                foreign.update(i for i in step.outs if traced.avals[i].size > 1)
            elif step.eqn.primitive.name == "cond" and divided and (moved or follows):
                outs = self._into_branches(step, dims[1:], whole[1:])
            elif moved == math.inf and (one := self._enough(step, dims)) is not None:
                wanted |= origins[one]  # a small factor; the rest stays divided
                self._whole.add(one)
                outs, _ = flow(step.eqn, self._dims_of(step))
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
            if step.eqn.primitive.name == "dot_general" and not flow(step.eqn, rest)[1]:
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
