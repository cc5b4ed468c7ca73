"""`partition="greedy"`: full tensors are assigned to devices, largest first, as PyTorch does.

Gradients are averaged in full. Then one program for each owner updates its tensors on its device,
and the updated parameters are all-gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, SingleDeviceSharding

from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten
from gshard.pytorch.coupling import refuse_coupled
from gshard.pytorch.from_owners import FromOwners
from gshard.pytorch.param_group import ParamGroup
from gshard.pytorch.parameters import Parameters
from gshard.pytorch.state_dict import keep_of, parameter_of, placed, refuse_other_shards, with_zeros
from gshard.sharding.group import data_group
from gshard.train.gradients import LocalGradients
from gshard.train.options import StepOptions
from gshard.train.shard_train_state import shard_train_state
from gshard.train.value_and_grad import finish_reduction
from gshard.wrapped.arguments import first_process


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

    It has the methods of `Even`.

    Attributes:
      target: the parameters.
      plan: the layouts of parameters and gradients, at level `dp`.
      owners: each parameter's owner, as an index of a device in the group; None for a parameter
        that is not optimized.
      state: for each device of this process, by that index, the state of each group; None for a
        group of which it owns nothing. A step or a load replaces it.
    """

    def __init__(
        self,
        target: Parameters,
        groups: Sequence[ParamGroup],
        mesh: Mesh,
        replica_axes: Any,
        buckets: bool,
    ):
        """Makes the state; `buckets` asks for one collective per dtype, not one per tensor."""
        model_axes = data_group(mesh, None, replica_axes).model_axes
        if model_axes:
            raise GShardError(
                "partition='greedy' works on data axes only, but this mesh also has "
                f"{some(name for name, _ in model_axes)}. Use partition='even'."
            )
        for group in groups:
            refuse_coupled(group.tx(), group.tree, group.name)
        self.target: Parameters = target
        self._groups = groups
        state, self.plan = shard_train_state(
            target.pair(optax.identity()),
            mesh,
            "dp",
            replica_axes=replica_axes,
            broadcast_from=first_process(mesh),
        )
        leaves, self._structure = jax.tree.flatten(target.start(state, self.plan).params)
        indices = self._structure.unflatten(range(len(leaves)))
        self._trees = [target.group_tree(indices, g) for g in range(len(groups))]
        order = [mesh.axis_names.index(axis) for axis in self.plan.group.axes]
        devices = list(np.transpose(mesh.devices, order).flat)
        self.owners: list[int | None] = self._assign([x.size for x in leaves], len(devices))
        self._from_owners = FromOwners(self.plan, devices, self.owners, buckets)
        self._own = {
            place: Owner(
                device,
                [i for i, owner in enumerate(self.owners) if owner == place],
                groups,
                self._trees,
                self._from_owners.pack,
            )
            for place, device in self._from_owners.local.items()
        }
        at = list(map(by_device, leaves))
        self.state = {place: owner.init(at) for place, owner in self._own.items()}
        self._reduce = jax.jit(
            lambda sums: jax.tree.leaves(finish_reduction(sums, self.plan, StepOptions()).grads)
        )

    def step(self, grads: Any, skipped: tuple[int, ...]) -> None:
        full = self.plan.sharding()
        params = placed(jax.tree.leaves(self.target.values()), full, "the parameters")
        if isinstance(grads, LocalGradients):
            grads = self._reduce(grads)
        else:
            grads = placed(with_zeros(grads, skipped, params), full, "the gradients")
        old, given = list(map(by_device, params)), list(map(by_device, grads))
        new, rows, state = {}, {}, {}
        values = [group.traced() for group in self._groups]
        for place, owner in self._own.items():
            found = owner.step(skipped, old, given, self.state[place], values)
            new[place], rows[place], state[place] = found
        self.state = state
        self.target.write(self._structure.unflatten(self._from_owners.send(params, new, rows)))

    def lower(self, grads: Any, skipped: tuple[int, ...]) -> jax.stages.Lowered:
        """Returns the lowered all-gather of the updated parameters; nothing runs."""
        del grads, skipped
        return self._from_owners.lower()

    def states(self) -> list[Any]:
        return [self._group_state(g) for g in range(len(self._groups))]

    def load(self, states: Sequence[Any]) -> None:
        values = list(map(_by_path, states))
        self._set({place: values for place in self._own})

    def shards(self) -> list[dict[str, dict[str, np.ndarray]]]:
        """Returns each group's state on this process's devices, by owner and path."""
        return [
            {
                str(place): jax.tree.map(np.array, _by_path(states[g]))
                for place, states in self.state.items()
            }
            for g in range(len(self._groups))
        ]

    def load_shards(self, shards: Sequence[Any]) -> None:
        refuse_other_shards(shards, self.shards())
        # Files that were written without empty entries are read too.
        self._set({i: [group.get(str(i), {}) for group in shards] for i in self._own})

    def loads(self) -> list[int]:
        loads = [0] * len(self._from_owners.devices)
        for x, owner in zip(jax.tree.leaves(self.plan.params), self.owners, strict=True):
            if owner is not None:
                loads[owner] += x.size
        return loads

    def state_bytes(self) -> int:
        """Returns the bytes of optimizer state on the device of this process that has most."""
        return max(sum(x.nbytes for x in jax.tree.leaves(own)) for own in self.state.values())

    def all_gathered_elements(self) -> int:
        """Returns the elements sent to every device in a step, padding of rows included."""
        return self._from_owners.elements

    def _assign(self, sizes: Sequence[int], count: int) -> list[int | None]:
        """Returns owners. By group, so that a group that is added later moves no other tensor."""
        owners: list[int | None] = [None] * len(sizes)
        loads = [0] * count
        for tree in self._trees:
            mine = jax.tree.leaves(tree)
            for i, owner in zip(mine, sorted_greedy([sizes[i] for i in mine], loads), strict=True):
                owners[i] = owner
        return owners

    def _set(self, values: dict[int, list[dict[str, Any]]]) -> None:
        """Sets the state of every owner to copies of these values, which are given by path."""

        def placed(state: Any, values: dict[str, Any], device: Any) -> Any:
            paths, leaves, structure = flatten(state)
            copies = [np.array(values[p], x.dtype) for p, x in zip(paths, leaves, strict=True)]
            return structure.unflatten(jax.device_put(copies, device))

        self.state: dict[int, list[Any]] = {
            place: [
                placed(state, of, owner.device)
                for state, of in zip(self.state[place], values[place], strict=True)
            ]
            for place, owner in self._own.items()
        }

    def _group_state(self, g: int) -> Any:
        """Returns a group's state, each leaf from its owner, and shared leaves from the first."""
        owners = [self.owners[i] or 0 for i in jax.tree.leaves(self._trees[g])]
        paths, leaves, structure = flatten(self._groups[g].state)
        of = parameter_of(self._groups[g].state, self._groups[g].tree)
        here = {place: _by_path(states[g]) for place, states in self.state.items()}
        found = []
        for path, like, i in zip(paths, leaves, of, strict=True):
            owner = min(owners) if i is None else owners[i]
            found.append(self._from_owners.one(owner, here.get(owner, {}).get(path), like))
        return structure.unflatten(found)


class Owner:
    """Updates the tensors that one device owns."""

    def __init__(
        self,
        device: Any,
        mine: Sequence[int],
        groups: Sequence[ParamGroup],
        trees: Sequence[Any],
        pack: Callable[[Mapping[int, jax.Array]], list[jax.Array]],
    ):
        """`mine` are the positions of its tensors; `trees` have the positions of each group's.

        `pack` computes from new tensors what is sent, in addition to the tensors.
        """
        self.device: Any = device
        self._mine, self._pack = mine, pack
        self._groups, self._trees = groups, trees
        # A device that owns nothing has no argument that says where to run.
        self._at = SingleDeviceSharding(device)
        self._update = jax.jit(
            self._run, static_argnums=0, donate_argnums=3, out_shardings=self._at
        )

    def init(self, params: Sequence[Mapping[Any, jax.Array]]) -> list[Any]:
        """Returns the state of each group, from all parameters by device."""
        own = {i: params[i][self.device] for i in self._mine}
        return [
            None
            if own.keys().isdisjoint(jax.tree.leaves(tree))
            else jax.jit(group.tx().init, out_shardings=self._at)(_subtree(tree, own))
            for group, tree in zip(self._groups, self._trees, strict=True)
        ]

    def step(
        self,
        skipped: tuple[int, ...],
        params: Sequence[Mapping[Any, jax.Array]],
        grads: Sequence[Mapping[Any, jax.Array]],
        states: list[Any],
        values: Any,
    ) -> tuple[dict[int, jax.Array], list[jax.Array], list[Any]]:
        """Returns new tensors by position, what was packed, and new states.

        `params` and `grads` are all, by device; those at the positions `skipped` do not change.
        """
        own = ({i: of[i][self.device] for i in self._mine} for of in (params, grads))
        return self._update(skipped, *own, states, values)

    def _run(
        self,
        skipped: tuple[int, ...],
        params: dict[int, Any],
        grads: dict[int, Any],
        states: list[Any],
        values: Any,
    ) -> tuple[dict[int, jax.Array], list[jax.Array], list[Any]]:
        new, after = dict(params), list(states)
        for g, (group, tree) in enumerate(zip(self._groups, self._trees, strict=True)):
            if states[g] is None or set(jax.tree.leaves(tree)) <= set(skipped):
                continue
            before = _subtree(tree, params)
            update = group.tx(values[g]).update
            updates, state = update(_subtree(tree, grads), states[g], before)
            indices = [i for i in jax.tree.leaves(tree) if i in params]
            moved = jax.tree.leaves(optax.apply_updates(before, updates))
            new |= dict(zip(indices, moved, strict=True))
            of = [None if i is None else indices[i] for i in parameter_of(state, before)]
            after[g] = keep_of(of, skipped, state, states[g])
        new |= {i: params[i] for i in skipped if i in params}
        return new, self._pack(new), after


def _subtree(tree: Any, leaves: Mapping[int, Any]) -> Any:
    """Returns a tree of positions with only these leaves."""
    return jax.tree.map(lambda i: leaves.get(i, optax.MaskedNode()), tree)


def by_device(x: jax.Array) -> dict[Any, jax.Array]:
    """Returns the shard of an array on each device of this process."""
    return {shard.device: shard.data for shard in x.addressable_shards}


def _by_path(state: Any) -> dict[str, Any]:
    return dict(zip(*flatten(state)[:2], strict=True))
