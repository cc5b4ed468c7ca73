"""`partition="greedy"`: full tensors are assigned to devices, largest first, as PyTorch does.

Gradients are averaged in full. Then one program for each owner updates its tensors on its device,
and the updated parameters are all-gathered: one all-reduce per tensor, or with buckets one
all-gather per dtype, padded to the owner with most elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten
from gshard.pytorch.coupling import refuse_coupled
from gshard.pytorch.param_groups import Labels, ParamGroup, Tree
from gshard.pytorch.state_dict import keep_of, parameter_of, refuse_other_parts, with_zeros
from gshard.sharding.mesh import data_group
from gshard.sharding.plan import Plan
from gshard.train.comm.collectives import all_gather_vector, broadcast_from_owners
from gshard.train.gradients import LocalGradients
from gshard.train.options import StepOptions
from gshard.train.shard_train_state import shard_train_state
from gshard.train.value_and_grad import finish_reduction


def sorted_greedy(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Assigns tensors, largest first, to the device with the least load (the first of equals).

    Returns the owner of each tensor. `loads`, the load of each device, is updated in place. This is
    the "sorted-greedy" algorithm of PyTorch's `ZeroRedundancyOptimizer`.
    """
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[i]] += sizes[i]
    return owners


class Greedy:
    """The state and the step of an optimizer that keeps each tensor's state on one device.

    Attributes:
      plan: the layouts of parameters and gradients, at level `dp`.
      owners: each parameter's owner, as an index of a device in the group; None for a parameter
        that is not optimized.
    """

    def __init__(
        self,
        target: Tree,
        groups: Sequence[ParamGroup],
        labels: Labels,
        mesh: Mesh,
        replica_axes: Any,
        buckets: bool,
    ):
        """Makes the state; `buckets` asks for one collective per dtype, not one per tensor."""
        self._target, self._groups, self._labels = target, groups, labels
        self._refuse(mesh, replica_axes)
        pair = target.pair(optax.identity())
        state, self.plan = shard_train_state(pair, mesh, "dp", replica_axes=replica_axes)
        leaves, self._structure = jax.tree.flatten(target.start(state, self.plan).params)
        everywhere = jax.tree.unflatten(self._structure, range(len(leaves)))
        self._trees = [target.group_tree(everywhere, labels, g) for g in range(len(groups))]
        order = [mesh.axis_names.index(axis) for axis in self.plan.group.axes]
        devices = list(np.transpose(mesh.devices, order).flat)
        self.owners = self._assign([x.size for x in leaves], len(devices))
        self._all_gather = FromOwners(self.plan, devices, self.owners, leaves, buckets)
        at = [by_device(x) for x in leaves]
        self._own = {
            place: Owner(
                device,
                {i: at[i][device] for i, owner in enumerate(self.owners) if owner == place},
                groups,
                self._trees,
                self._all_gather.pack,
            )
            for place, device in enumerate(devices)
            if device in self._all_gather.local
        }
        self._mark = object()
        self._reduced = jax.jit(self._reduce)

    def step(self, grads: Any, values: Any, skipped: tuple[int, ...]) -> None:
        """Runs one step; the leaves in `skipped` and their state do not change."""
        params = self._whole(jax.tree.leaves(self._target.values()))
        if isinstance(grads, LocalGradients):
            given = self._reduced(grads)
        else:
            given = with_zeros(grads, skipped, params)
        old = [by_device(x) for x in params]
        own = [by_device(x) for x in self._whole(given)]
        new, rows = {}, {}
        self._mark = object()
        for owner in self._own.values():
            new[owner.device], rows[owner.device] = owner.step(skipped, old, own, values)
        found = self._all_gather.send(params, old, new, rows)
        self._target.write(jax.tree.unflatten(self._structure, found))

    def lower(self, grads: Any, values: Any, skipped: tuple[int, ...]) -> jax.stages.Lowered:
        """Returns the lowered all-gather of the updated parameters; nothing runs."""
        del grads, values, skipped
        return self._all_gather.lower(self._whole(jax.tree.leaves(self._target.values())))

    def mark(self) -> Any:
        """Returns an object that a step or a load replaces by another one."""
        return self._mark

    def states(self) -> list[Any]:
        """Returns the full state of each group, in host memory."""
        return [self._group_state(g) for g in range(len(self._groups))]

    def load(self, states: Sequence[Any]) -> None:
        """Sets the state of each group from full arrays, in the trees of `states`."""
        values = [dict(zip(*flatten(tree)[:2], strict=True)) for tree in states]
        self._set({place: values for place in self._own})

    def parts(self) -> list[dict[str, dict[str, np.ndarray]]]:
        """Returns each group's state on this process's devices, by path and owner."""
        found: list[dict[str, dict[str, np.ndarray]]] = [{} for _ in self._groups]
        for place, owner in self._own.items():
            for g, group in enumerate(found):
                for path, x in owner.state(g).items():
                    group.setdefault(path, {})[str(place)] = np.array(x)
        return found

    def load_parts(self, parts: Sequence[Any]) -> None:
        """Sets what `parts` returned for a state with the same owners."""
        refuse_other_parts(parts, self.parts())
        self._set(
            {
                place: [
                    {path: of[str(place)] for path, of in group.items() if str(place) in of}
                    for group in parts
                ]
                for place in self._own
            }
        )

    def _set(self, values: dict[int, list[dict[str, Any]]]) -> None:
        """Sets the state of every owner, or of none."""
        new = {
            place: [owner.placed(g, of) for g, of in enumerate(values[place])]
            for place, owner in self._own.items()
        }
        self._mark = object()
        for place, states in new.items():
            self._own[place].states = states

    def loads(self) -> list[int]:
        """Returns the parameter elements that each device updates."""
        sizes = [x.size for x in jax.tree.leaves(self.plan.params)]
        pairs = list(zip(sizes, self.owners, strict=True))
        places = range(len(self._all_gather.devices))
        return [sum(s for s, o in pairs if o == place) for place in places]

    def state_bytes(self) -> int:
        """Returns the bytes of optimizer state on the device of this process that has most."""
        owners = self._own.values()
        return max(sum(x.nbytes for x in jax.tree.leaves(owner.states)) for owner in owners)

    def all_gathered_elements(self) -> int:
        """Returns the elements sent to every device in a step, padding of rows included."""
        return self._all_gather.elements

    def _assign(self, sizes: Sequence[int], count: int) -> list[int | None]:
        """Returns owners, assigned group by group: a group added later moves no earlier tensor."""
        owners: list[int | None] = [None] * len(sizes)
        loads = [0] * count
        for tree in self._trees:
            mine = jax.tree.leaves(tree)
            for i, owner in zip(mine, sorted_greedy([sizes[i] for i in mine], loads), strict=True):
                owners[i] = owner
        return owners

    def _refuse(self, mesh: Mesh, replica_axes: Any) -> None:
        group = data_group(mesh, None, replica_axes)
        if group.model_axes:
            raise GShardError(
                "partition='greedy' is for data axes alone, and this mesh has others: "
                f"{some(name for name, _ in group.model_axes)}. Take partition='even'."
            )
        for of in self._groups:
            refuse_coupled(of.tx(), of.tree, of.name)

    def _reduce(self, sums: LocalGradients) -> list[jax.Array]:
        return jax.tree.leaves(finish_reduction(sums, self.plan, StepOptions()).grads)

    def _whole(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Replicates arrays on every device."""
        sharding = self.plan.sharding()
        same = [isinstance(x, jax.Array) and x.sharding == sharding for x in leaves]
        return [
            x if yes else jax.device_put(x, sharding) for x, yes in zip(leaves, same, strict=True)
        ]

    def _group_state(self, g: int) -> Any:
        """Returns a group's state, each leaf from its owner, and shared leaves from the first."""
        numbers, group = jax.tree.leaves(self._trees[g]), self._groups[g]
        paths, leaves, structure = flatten(group.state)
        of = parameter_of(group.state, group.tree)
        first = min(self.owners[i] or 0 for i in numbers)
        owners = [first if i is None else self.owners[numbers[i]] or 0 for i in of]
        found = []
        for path, like, owner in zip(paths, leaves, owners, strict=True):
            here = self._own[owner].state(g)[path] if owner in self._own else None
            found.append(self._all_gather.one(owner, here, like))
        return jax.tree.unflatten(structure, found)


class Owner:
    """The state of some tensors on one device.

    Attributes:
      device: the device of its tensors and states.
      mine: positions of its tensors among all.
      states: the state of each group; None for a group of which it owns nothing.
    """

    def __init__(
        self,
        device: Any,
        params: Mapping[int, jax.Array],
        groups: Sequence[ParamGroup],
        trees: Sequence[Any],
        pack: Callable[[Mapping[int, jax.Array]], list[jax.Array]],
    ):
        """Makes the state of a new optimizer.

        Args:
          device: the device for its tensors and states.
          params: its tensors by position, on the device.
          groups: the groups of all parameters.
          trees: the tree of each group, with positions as leaves.
          pack: computes from new tensors what is sent, in addition to the tensors.
        """
        self.device, self.mine = device, tuple(params)
        self._groups, self._trees, self._pack = groups, trees, pack
        # Of the parameters only shapes are used: without a sharding all would go to device 0.
        at = SingleDeviceSharding(device)
        self.states: list[Any] = [
            jax.jit(group.tx().init, out_shardings=at)(self._own(g, params))
            if self.has(g)
            else None
            for g, group in enumerate(groups)
        ]
        self._update = jax.jit(self._run, static_argnums=0, donate_argnums=3)
        self._nothing = [] if self.mine else jax.device_put(pack({}), device)

    def has(self, g: int) -> bool:
        """Whether it owns something of a group."""
        return not set(self.mine).isdisjoint(jax.tree.leaves(self._trees[g]))

    def step(
        self,
        skipped: tuple[int, ...],
        params: Sequence[Mapping[Any, jax.Array]],
        grads: Sequence[Mapping[Any, jax.Array]],
        values: Any,
    ) -> tuple[dict[int, jax.Array], list[jax.Array]]:
        """Returns new tensors by position, and what was packed; `skipped` ones do not change.

        Args:
          skipped: positions of the tensors to skip.
          params: all parameters, by device.
          grads: all gradients, by device.
          values: hyperparameters of each group.
        """
        if not self.mine:
            return {}, self._nothing
        own = ([of[i][self.device] for i in self.mine] for of in (params, grads))
        new, self.states, rows = self._update(skipped, *own, self.states, values)
        return dict(zip(self.mine, new, strict=True)), rows

    def state(self, g: int) -> dict[str, jax.Array]:
        """Returns the state of a group, by path."""
        return dict(zip(*flatten(self.states[g])[:2], strict=True))

    def placed(self, g: int, values: Mapping[str, Any]) -> Any:
        """Returns a group's state made of copies of these values, which are given by path."""
        paths, leaves, structure = flatten(self.states[g])
        copies = [np.array(values[p], x.dtype) for p, x in zip(paths, leaves, strict=True)]
        return jax.tree.unflatten(structure, [jax.device_put(x, self.device) for x in copies])

    def _own(self, g: int, own: Mapping[int, Any]) -> Any:
        """Returns a group's tree with only these leaves."""
        return jax.tree.map(lambda i: own.get(i, optax.MaskedNode()), self._trees[g])

    def _run(
        self,
        skipped: tuple[int, ...],
        params: list[Any],
        grads: list[Any],
        states: Any,
        values: Any,
    ) -> Any:
        own = dict(zip(self.mine, params, strict=True))
        of = dict(zip(self.mine, grads, strict=True))
        new, after = dict(own), list(states)
        for g, group in enumerate(self._groups):
            if states[g] is None:
                continue
            before = self._own(g, own)
            updates, after[g] = group.tx(values[g]).update(self._own(g, of), states[g], before)
            moved = optax.apply_updates(before, updates)
            places = [i for i in jax.tree.leaves(self._trees[g]) if i in own]
            new |= dict(zip(places, jax.tree.leaves(moved), strict=True))
            of_leaf = [None if i is None else places[i] for i in parameter_of(after[g], before)]
            after[g] = keep_of(of_leaf, skipped, after[g], states[g])
        new |= {i: own[i] for i in skipped if i in own}
        return [new[i] for i in self.mine], after, self._pack(new)


class FromOwners:
    """Sends new parameters from their owners to all devices.

    Attributes:
      devices: the devices of the group, in the order of owners.
      local: the devices of this process.
      elements: elements sent to every device: all-gathered as padded rows, or else all-reduced at
        twice the cost.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[Any],
        owners: Sequence[int | None],
        leaves: Sequence[jax.Array],
        rows: bool,
    ):
        """Prepares to send some parameters.

        Args:
          plan: a plan at level `dp`.
          devices: the devices of the group.
          owners: the owner of each leaf; None for a leaf that does not change.
          leaves: the parameters.
          rows: True makes an owner's tensors of one dtype one row, and all-gathers the rows at
            once, padded to the longest; False runs one all-reduce per tensor.
        """
        self._plan, self._owners, self.devices = plan, owners, list(devices)
        self.local = [d for d in self.devices if d.process_index == jax.process_index()]
        self._lengths = _row_lengths(leaves, owners) if rows else {}
        sizes = [x.size for x, owner in zip(leaves, owners, strict=True) if owner is not None]
        self.elements = len(self.devices) * sum(self._lengths.values()) if rows else sum(sizes)
        self._send = jax.jit(self._from_rows if rows else self._from_each)
        self._one = jax.jit(self._from_one, static_argnums=0)

    def pack(self, new: Mapping[int, jax.Array]) -> list[jax.Array]:
        """Packs an owner's new tensors into one row `(1, length)` per dtype, if rows are used."""
        rows = []
        for dtype, length in self._lengths.items():
            own = [jnp.zeros(0, dtype), *(x.ravel() for x in new.values() if x.dtype == dtype)]
            row = jnp.concatenate(own)
            rows.append(jnp.pad(row, (0, length - row.size))[None])
        return rows

    def send(
        self,
        params: Sequence[jax.Array],
        old: Sequence[Mapping[Any, jax.Array]],
        new: Mapping[Any, Mapping[int, jax.Array]],
        rows: Mapping[Any, Sequence[jax.Array]],
    ) -> list[jax.Array]:
        """Returns the new parameters on every device.

        Args:
          params: the old ones.
          old: the old parameters, by device.
          new: the new tensors by position, for each device of this process.
          rows: the rows that `pack` made of them, by device.
        """
        return self._send(self._rows(rows) if self._lengths else self._each(old, new), params)

    def lower(self, params: Sequence[jax.Array]) -> jax.stages.Lowered:
        """Returns the lowered collectives."""
        sharding = NamedSharding(self._plan.mesh, self._plan.batch_spec)
        rows = [
            jax.ShapeDtypeStruct((len(self.devices), length), dtype, sharding=sharding)
            for dtype, length in self._lengths.items()
        ]
        return self._send.lower(rows or params, params)

    def one(self, owner: int, x: jax.Array | None, like: Any) -> np.ndarray:
        """Copies one array from its owner into the host memory of every process.

        Args:
          owner: the owner's index among the devices.
          x: the owner's array; None if another process owns it.
          like: the array's shape and dtype.
        """
        if len(self.local) == len(self.devices):
            return np.array(x)
        each: list[Any] = [
            x if d == self.devices[owner] else jax.device_put(np.zeros(like.shape, like.dtype), d)
            for d in self.local
        ]
        whole = jax.make_array_from_single_device_arrays(like.shape, self._plan.sharding(), each)
        return np.array(self._one(owner, whole).addressable_data(0))

    def _rows(self, rows: Mapping[Any, Sequence[jax.Array]]) -> list[jax.Array]:
        sharding = NamedSharding(self._plan.mesh, self._plan.batch_spec)
        return [
            jax.make_array_from_single_device_arrays(
                (len(self.devices), length), sharding, [rows[d][k] for d in self.local]
            )
            for k, length in enumerate(self._lengths.values())
        ]

    def _each(
        self, old: Sequence[Mapping[Any, jax.Array]], new: Mapping[Any, Mapping[int, jax.Array]]
    ) -> list[jax.Array]:
        sharding, found = self._plan.sharding(), []
        for i, of in enumerate(old):
            each = [new[d].get(i, of[d]) for d in self.local]
            found.append(jax.make_array_from_single_device_arrays(each[0].shape, sharding, each))
        return found

    def _on_devices(self, fun: Any, spec: Any, sent: Any, params: Sequence[jax.Array]) -> Any:
        return jax.shard_map(
            fun,
            mesh=self._plan.mesh,
            in_specs=(spec, jax.P()),
            out_specs=jax.P(),
            check_vma=False,
        )(sent, params)

    def _from_each(self, sent: Sequence[jax.Array], params: Sequence[jax.Array]) -> list[jax.Array]:
        owned = [(i, owner) for i, owner in enumerate(self._owners) if owner is not None]

        def on_device(sent: list[jax.Array], params: list[jax.Array]) -> list[jax.Array]:
            out, owners = list(params), [owner for _, owner in owned]
            found = broadcast_from_owners(
                [sent[i] for i, _ in owned], owners, self._plan.group.axes
            )
            for (i, _), x in zip(owned, found, strict=True):
                out[i] = x
            return out

        return self._on_devices(on_device, jax.P(), sent, params)

    def _from_one(self, owner: int, x: jax.Array) -> jax.Array:
        axes = self._plan.group.axes
        return self._on_devices(
            lambda xs, _: broadcast_from_owners(xs, [owner], axes), jax.P(), [x], []
        )[0]

    def _from_rows(self, rows: Sequence[jax.Array], params: Sequence[jax.Array]) -> list[jax.Array]:
        def on_device(rows: list[jax.Array], params: list[jax.Array]) -> list[jax.Array]:
            found = [all_gather_vector(row[0], self._plan.group.axes) for row in rows]
            of = dict(zip(self._lengths, found, strict=True))
            out, begin = list(params), Counter()
            for i, (x, owner) in enumerate(zip(params, self._owners, strict=True)):
                if owner is not None:
                    start = begin[x.dtype, owner]
                    out[i] = of[x.dtype][owner, start : start + x.size].reshape(x.shape)
                    begin[x.dtype, owner] += x.size
            return out

        return self._on_devices(on_device, self._plan.batch_spec, rows, params)


def by_device(x: jax.Array) -> dict[Any, jax.Array]:
    """Returns the shard of an array on each device of this process."""
    return {shard.device: shard.data for shard in x.addressable_shards}


def _row_lengths(leaves: Sequence[jax.Array], owners: Sequence[int | None]) -> dict[Any, int]:
    """Returns, for each dtype, the elements of the owner that has most."""
    totals: Counter[Any] = Counter()
    for x, owner in zip(leaves, owners, strict=True):
        if owner is not None:
            totals[x.dtype, owner] += x.size
    found: dict[Any, int] = {}
    for (dtype, _), size in totals.items():
        found[dtype] = max(found.get(dtype, 0), size)
    return found
