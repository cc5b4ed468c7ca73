"""Runs the matrix products of an optimizer on gathered operands.

XLA shards every product of sharded matrices in its own way and gathers for each: fifteen times in
Newton-Schulz. Here the update is traced. What its products need is gathered once, and the equations
between there and the last product run replicated on every device, in a `shard_map`, where XLA
cannot shard them again; each device keeps its shard of the result. All else is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from gshard._util.errors import some, warn
from gshard._util.jaxpr import opened, primitives, product_flops
from gshard._util.jaxpr_dataflow import PRODUCTS, UNKNOWN, Dim, back, join, sharded_dims
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan, UpdateProducts
from gshard.train.comm.buckets import BUCKET_SIZE
from gshard.train.comm.collectives import all_gather_updated
from gshard.train.optim.chains import Chain, chains_of, in_waves
from gshard.train.optim.owned_chains import OwnedGroup, groups_of
from gshard.train.optim.skip_update import SkippableUpdate
from gshard.train.optim.traced_update import TracedEquation, TracedUpdate


class GatheredUpdate:
    """A traced update for which it is decided what is gathered and which equations run replicated.

    `dims` are the sharded dimensions of its inputs, `gathered` positions of inputs that are
    gathered already, `ends` the dimensions on which its outputs will be sharded, and `read`
    positions of outputs that later products need gathered.
    """

    # Buckets wait for each other. Buckets of offloaded state wait for their copies (`offload`), and
    # an order of their own would tie these together.
    in_order = True

    def __init__(
        self,
        traced: TracedUpdate,
        dims: Sequence[Dim],
        gathered: Sequence[int],
        ends: Sequence[Dim],
        read: Sequence[int],
        plan: Plan,
    ):
        self._plan, self._traced = plan, traced
        self._steps, self._outputs = traced.steps, traced.outputs
        self._dims: dict[int, Dim] = dict.fromkeys(range(len(traced.avals)))
        self._dims.update(zip(traced.inputs, dims, strict=True))
        self._trace_back(ends, read)
        self._decide({traced.inputs[i] for i in gathered})

    def _trace_back(self, ends: Sequence[Dim], read: Sequence[int]) -> None:
        """Finds the values that products are computed from, and the final layouts of the others."""
        self._product_inputs = {self._outputs[i] for i in read}
        self._ends = dict(zip(self._outputs, ends, strict=True))
        for step in reversed(self._steps):
            if self._feeds_product(step):
                self._product_inputs.update(step.ins)
            elif len(step.outs) == 1:
                before = zip(step.ins, back(step.eqn, self._ends.get(step.outs[0])), strict=True)
                self._ends.update((i, dim) for i, dim in before if dim is not None)

    def _feeds_product(self, step: TracedEquation) -> bool:
        """Whether the equation is a product, or a product is computed from its results."""
        return step.has_product or not self._product_inputs.isdisjoint(step.outs)

    def _decide(self, gathered: set[int]) -> None:
        """Decides what is gathered and which equations run replicated."""
        found: set[int] = set()
        while not (wanted := self._find_wanted(gathered | found)) <= found:
            found |= wanted
        made = {i for step in self._steps if step.replicated for i in step.outs}
        copies = {i: self._traced.add_value(self._traced.avals[i]) for i in sorted(found - made)}
        # Gathered copies of values.
        self.sources: dict[int, int] = {copy: i for i, copy in copies.items()}
        for step in self._steps:
            if step.replicated or step.branches or step.has_product:
                step.ins = [copies.get(i, i) for i in step.ins]
        self._chains: list[Chain] = []
        self.owned: list[OwnedGroup] = self._find_owned() if self._plan.group.size > 1 else []

    def _find_owned(self) -> list[OwnedGroup]:
        """Returns the groups of equal chains, which are not gathered but sent to owners."""
        traced, steps, literals = self._traced, self._steps, self._traced.literals
        chains = chains_of(steps, self.sources, set(literals), self._outputs)
        known = {*traced.inputs, *traced.consts, *literals}
        needed = {i for step in steps if step.branches for i in step.ins}
        needed.update(*(chain.given for chain in chains))
        self._chains, wanted = chains, self._wanted_dims()

        def program(chain: Chain) -> Callable[..., list[Any]]:
            def run(*arrays: Any) -> list[Any]:
                values = dict(zip((*chain.copies, *chain.given), arrays, strict=True)) | literals
                for step in chain.steps:
                    step.run(values)
                return [values[i] for i in chain.results]

            return run

        return groups_of(
            in_waves(chains, steps, self.sources, known),
            program,
            traced.avals,
            lambda i: self._layout(i, self._dims[i]),
            lambda i: self._layout(i, None if i in needed else wanted.get(i)),
        )

    def _wanted_dims(self) -> dict[int, Dim]:
        """The sharded dimensions in which values are wanted: at the end, else by who reads them."""
        found: dict[int, Dim] = {}
        for step in self._steps:
            if len(step.outs) == 1 and not step.replicated:
                before = back(step.eqn, self._dims[step.outs[0]])
                for i, dim in zip(step.ins, before, strict=True):
                    found[i] = join(found.get(i), dim)
        return found | self._ends

    def _find_wanted(self, known: set[int]) -> set[int]:
        """Follows the sharded dimensions, given the gathered values; returns what else to gather.

        For an operand this is what it is computed from, unless that is larger: so a transposed and
        a scaled copy of one matrix are gathered once.
        """
        traced, wanted = self._traced, set()
        self._gathered = set(known)
        origins = {i: {i} for i in traced.inputs}
        unknown_layout = set(traced.unknown_layout)
        summed: dict[frozenset[int], float] = {}
        for step in self._steps:
            gathered = [i in self._gathered for i in step.ins]
            dims = self._dims_of(step)
            sharded = [i for i, dim in zip(step.ins, dims, strict=True) if dim is not None]
            makers = set().union(*(origins[i] for i in sharded))
            outs, moved = sharded_dims(step.eqn, dims)
            follows = any(gathered) and self._feeds_product(step)
            step.replicated, step.branches = False, ()
            if not unknown_layout.isdisjoint(step.ins):  # left to XLA, with its results
                unknown_layout.update(i for i in step.outs if traced.avals[i].size > 1)
            elif step.eqn.primitive.name == "cond" and sharded and (moved or follows):
                outs = self._into_branches(step, dims[1:], gathered[1:])
            elif moved == math.inf and (one := self._operand_to_gather(step, dims)) is not None:
                wanted |= origins[one]  # a small factor; the others stay sharded
                self._gathered.add(one)
                outs, _ = sharded_dims(step.eqn, self._dims_of(step))
            elif step.can_be_mapped and (moved == math.inf or (follows and not sharded)):
                # XLA would gather, maybe often; or all operands are gathered
                step.replicated = True
                wanted |= makers
                self._gathered.update(sharded, step.outs)
            elif step.can_be_mapped and moved:  # a sum over devices, unless all sums send more
                summed[frozenset(makers)] = summed.get(frozenset(makers), 0) + moved
            for i, dim in zip(step.outs, outs, strict=True):
                self._dims[i] = dim
                smaller = step.can_be_mapped and traced.bytes(*makers) <= traced.bytes(i)
                origins[i] = makers if smaller else {i}
        for makers, moved in summed.items():
            if moved > sum(traced.avals[i].size for i in makers):
                wanted |= makers
        return wanted

    def _dims_of(self, step: TracedEquation) -> list[Dim]:
        return [None if i in self._gathered else self._dims.get(i) for i in step.ins]

    def _operand_to_gather(self, step: TracedEquation, dims: Sequence[Dim]) -> int | None:
        """The operand that is enough to gather: a small factor of a matrix with sharded rows."""
        for i in sorted(step.ins, key=self._traced.bytes):
            rest = [None if j == i else dim for j, dim in zip(step.ins, dims, strict=True)]
            if step.eqn.primitive.name == "dot_general" and not sharded_dims(step.eqn, rest)[1]:
                return i
        return None

    def _into_branches(
        self, step: TracedEquation, dims: Sequence[Dim], gathered: Sequence[bool]
    ) -> list[Dim]:
        """Gathers inside the branches of a `cond`, since not every training step takes them."""
        given = [i for i, w in enumerate(gathered) if w]
        ends = [None if i in self._product_inputs else self._ends.get(i) for i in step.outs]
        read = [n for n, i in enumerate(step.outs) if i in self._product_inputs]
        found = [
            GatheredUpdate(TracedUpdate(*opened(branch)), dims, given, ends, read, self._plan)
            for branch in step.eqn.params["branches"]
        ]
        step.branches = found
        outs: list[Dim] = []
        for out, *ends in zip(step.outs, *(b._outputs for b in found), strict=True):
            ways = list(zip(found, ends, strict=True))
            outs.append(join(*(None if end in b._gathered else b._dims[end] for b, end in ways)))
            if outs[-1] is None and any(end in b._gathered for b, end in ways):
                self._gathered.add(out)
        return outs

    def products(self, layouts: Sequence[Layout] = ()) -> UpdateProducts:
        """Counts the matrix products; `layouts` are those of the inputs."""
        group, kept, paths = self._plan.group, self._kept(layouts), [x.path for x in layouts]
        found = [UpdateProducts(x.flops, 0, x.sent) for x in self.owned]
        shared = {id(x) for group in self.owned for chain in group.chains for x in chain.steps}
        for step in self._steps:
            if step.branches:
                branches = (x.products() for x in step.branches if isinstance(x, GatheredUpdate))
                found.append(max(branches, key=lambda x: x.one_device))
            elif step.has_product:
                count = product_flops(step.eqn)
                sharded = any(dim is not None for dim in self._dims_of(step))
                devices = group.size if sharded else 1
                own = count // (devices if kept.isdisjoint(step.ins) else group.experts)
                found.append(UpdateProducts(0 if id(step) in shared else own, count))
        alone = [x for x in self._chains if id(x.steps[0]) not in shared]
        named = [(self._name(x, paths), sum(product_flops(s.eqn) for s in x.steps)) for x in alone]
        return UpdateProducts(
            sum(x.flops for x in found),
            sum(x.one_device for x in found),
            sum(x.sent for x in found),
            (*named, *(pair for x in found for pair in x.unshared)),
        )

    def _kept(self, layouts: Sequence[Layout]) -> set[int]:
        """The values that XLA leaves sharded over the axis that parameters are kept on alone."""
        dims: dict[int, Dim] = {
            i: x.kept.dim
            for i, x in zip(self._traced.inputs, layouts, strict=False)
            if x.kept is not None and x.dim is None
        }
        for step in self._steps if dims else ():
            outs, _ = sharded_dims(step.eqn, [dims.get(i) for i in step.ins])
            dims.update(zip(step.outs, outs, strict=True))
        return {i for i, dim in dims.items() if dim not in (None, UNKNOWN)}

    def _name(self, chain: Chain, paths: Sequence[str]) -> str:
        """Names a chain after the inputs that it is computed from: parameters, or else shapes."""
        made, seen = {i: step for step in self._steps for i in step.outs}, set(chain.sources)
        rest = list(seen)
        while rest:
            step = made.get(rest.pop())
            rest += [i for i in (step.ins if step else ()) if i not in seen]
            seen.update(rest)
        shapes = [self._traced.avals[i].shape for i in chain.sources]
        named = zip(self._traced.inputs, paths, strict=False)
        found = {x for i, x in named if i in seen and self._traced.avals[i].shape in shapes and x}
        # Of a gradient and a moment with its path at the end, the gradient.
        found = [x for x in found if not any(x.endswith(f"/{other}") for other in found)]
        return some(sorted(found)) if found else f"a matrix of shape {shapes[0]}"

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the update on arguments in the global view."""
        inputs = zip(self._traced.inputs, args, strict=True)
        values = {**self._traced.literals, **self._traced.consts, **dict(inputs)}
        owned, ends = list(self.owned), []
        of_owners = [chain for group in owned for chain in group.chains]
        elsewhere = {id(step) for chain in of_owners for step in chain.steps}
        rest = [step for step in self._steps if id(step) not in elsewhere]
        # What other equations read as well is gathered for them.
        of_chains = {i for chain in of_owners for i in chain.copies}
        of_chains -= {i for step in rest for i in step.ins}
        waiting = sorted(self.sources.keys() - of_chains)
        while rest or owned:
            before, later = (len(rest), len(owned), len(values)), list[TracedEquation]()
            for step in rest:
                if step.replicated or any(i not in values for i in step.ins):
                    later.append(step)
                else:
                    step.run(values)
            group = next((x for x in owned if x.reads <= values.keys()), None)
            if group is None:
                rest = self._run_replicated(later, values, waiting, ends, owned)
            else:
                owned.remove(group)
                rest = later
                self._run_owned(group, values, ends)
            if before == (len(rest), len(owned), len(values)):
                raise AssertionError(f"{len(rest)} equations of the update wait for each other.")
        return [values[i] for i in self._outputs]

    def _run_owned(self, group: OwnedGroup, values: dict[int, Any], ends: list[Any]) -> None:
        """Runs a group of equal chains; two are in progress at most."""
        after = ends[-2] if ends[:-1] and self.in_order else None
        found = group(values, self._plan, after)
        ends.append(list(found.values()))
        values.update(found)

    def _run_replicated(
        self,
        rest: Sequence[TracedEquation],
        values: dict[int, Any],
        waiting: list[int],
        ends: list[Any],
        owned: Sequence[OwnedGroup],
    ) -> list[TracedEquation]:
        """Gathers a bucket, runs what it enables and returns the rest; two are gathered at most.

        `owned` groups run later.
        """
        copies, size = [], 0
        for i in [i for i in waiting if self.sources[i] in values]:
            size += self._traced.avals[i].size
            if copies and size > BUCKET_SIZE:
                break
            copies.append(i)
            waiting.remove(i)
        made, steps, later = set(copies), [], []
        for step in rest:
            if step.replicated and all(i in made or i in values for i in step.ins):
                steps.append(step)
                made.update(step.outs)
            else:
                later.append(step)
        literals = self._traced.literals
        given = sorted({i for step in steps for i in step.ins} - made - set(literals))
        given_later = {i for group in owned for chain in group.chains for i in chain.given}
        results = {i for step in later for i in step.ins}.union(self._outputs, given_later)
        results = sorted(made & results)
        if not results:
            return later
        sources = [self.sources[i] for i in copies]
        layouts = [self._layout(i, self._dims[i]) for i in sources]
        needed = {i for step in later if step.replicated or step.branches for i in step.ins}
        needed |= given_later
        kept = [self._layout(i, None if i in needed else self._ends.get(i)) for i in results]
        shards = self._plan.pin([values[i] for i in sources], layouts)
        if ends[:-1] and self.in_order:
            shards, _ = jax.lax.optimization_barrier((shards, ends[-2]))

        def on_device(shards: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
            full = all_gather_updated(shards, layouts, BUCKET_SIZE, "optimizer")
            known = {**literals, **dict(zip((*copies, *given), (*full, *arrays), strict=True))}
            for step in steps:
                step.run(known)
            return [known[i] for i in results]

        found = jax.shard_map(
            on_device,
            mesh=self._plan.mesh,
            in_specs=([layout.spec for layout in layouts], jax.P()),
            out_specs=jax.P(),
            check_vma=False,
        )(shards, [values[i] for i in given])
        # Without these barriers XLA takes the shard where it is read, maybe after a norm of all
        # results, and so keeps every full result until then.
        found = jax.lax.optimization_barrier(found)
        found = jax.lax.optimization_barrier(self._plan.pin(found, kept))
        ends.append(found)
        cut = (layout.unpad(x) for layout, x in zip(kept, found, strict=True))
        values.update(zip(results, cut, strict=True))
        return later

    def warn_of_kept(self, layouts: Sequence[Layout]) -> None:
        """Warns of kept parameters whose products need them on other devices.

        Where no other axis shards them, XLA leaves the products of each expert on its device.
        """
        pairs = zip(self._traced.inputs, layouts, strict=True)
        needed = [x for i, x in pairs if i in self._product_inputs]
        paths = {x.path: x.kept.axis for x in needed if x.kept is not None and x.dim is not None}
        for axis in set(paths.values()):
            warn(
                f"the optimizer multiplies matrices computed from {some(sorted(paths))}, which are "
                f"kept on {axis!r} and sharded over other axes too: they are sent to the devices "
                "that multiply them, or gathered on all of them (step.budget.products). Give the "
                "experts another optimizer, "
                "optax.partition({'experts': optax.adamw(1e-3), ...}, labels)."
            )

    def _layout(self, i: int, dim: Dim) -> Layout:
        aval, dim = self._traced.avals[i], None if dim == UNKNOWN else dim
        return Layout("", aval.shape, aval.dtype, dim, self._plan.group, None, "")


def with_gathered_operands(
    fun: Callable[..., Any],
    plan: Plan,
    args: Sequence[Any],
    layouts: Sequence[Layout],
    results: Sequence[Layout],
    record: Callable[[UpdateProducts], None] | None = None,
) -> Any:
    """Updates in the global view, with the matrix products of the update on gathered operands.

    `fun` and `args` are those of `SkippableUpdate`; `record` gets what is known of the products, if
    there are any.
    """
    # Traced without a mesh in its types: a derivative inside the `shard_map` meets another there.
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            weak_type=getattr(x, "weak_type", False),  # NumPy has none
        ),
        args,
    )
    skippable, flat = SkippableUpdate(fun, abstract), jax.tree.leaves(args)
    if primitives(skippable.jaxpr).isdisjoint(PRODUCTS):
        return skippable.results(flat, skippable.run(flat))
    traced = TracedUpdate(skippable.jaxpr, skippable.consts)
    ends = [layout.dim for layout in results]
    update = GatheredUpdate(traced, [layout.dim for layout in layouts], [], ends, [], plan)
    update.warn_of_kept(layouts)
    on_host = (i for i, x in zip(traced.inputs, layouts, strict=True) if x.on_host)
    update.in_order = traced.computed_from(on_host).isdisjoint(update.sources.values())
    if record is not None:
        record(update.products(layouts))
    gathers = update.sources or any(step.branches for step in traced.steps)
    return skippable.results(flat, update(flat) if gathers else skippable.run(flat))
