"""`partition="greedy"`: whole tensors, each with its state on one device, as PyTorch divides them.

Gradients are reduced whole. Then one program for each owner updates its tensors on its device, and
they are published: one all-reduce a tensor, or with buckets one gather a dtype, padded to the owner
that has most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from gshard._util.errors import GShardError, some
from gshard._util.pytree import flatten
from gshard.pytorch.coupling import refuse_coupled
from gshard.pytorch.from_owners import FromOwners, by_device
from gshard.pytorch.grouped import Labels
from gshard.pytorch.own_state import parameter_of, with_zeros
from gshard.pytorch.owner import Owner
from gshard.pytorch.param_group import ParamGroup
from gshard.pytorch.param_groups import Tree
from gshard.pytorch.state_dict import refuse_other_parts
from gshard.sharding.mesh import data_group
from gshard.train.gradients import Options
from gshard.train.local_gradients import Unreduced
from gshard.train.shard_train_state import shard_train_state
from gshard.train.value_and_grad import end_reduction


def sorted_greedy(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """The owner of each tensor: by size, largest first, to who has least (the first of equals).

    `loads` are those of each device before, and are brought up to date (PyTorch,
    `ZeroRedundancyOptimizer`, "sorted-greedy").
    """
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[i]] += sizes[i]
    return owners


class Greedy:
    """State and step of an optimizer whose every tensor is on one device.

    Attributes:
      plan: where parameters and gradients lie, level `dp`.
      owners: of each parameter, by place in the group; None for one that is not optimized.
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
        """`buckets`: one collective a dtype, not one a tensor."""
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
        self._publish = FromOwners(self.plan, devices, self.owners, leaves, buckets)
        at = [by_device(x) for x in leaves]
        self._own = {
            place: Owner(
                device,
                {i: at[i][device] for i, owner in enumerate(self.owners) if owner == place},
                groups,
                self._trees,
                self._publish.pack,
            )
            for place, device in enumerate(devices)
            if device in self._publish.local
        }
        self._mark = object()
        self._reduced = jax.jit(self._reduce)

    def step(self, grads: Any, values: Any, skipped: tuple[int, ...]) -> None:
        """One step; leaves of `skipped` stay what they are, with their state."""
        params = self._whole(jax.tree.leaves(self._target.values()))
        if isinstance(grads, Unreduced):
            given = self._reduced(grads)
        else:
            given = with_zeros(grads, skipped, params)
        old = [by_device(x) for x in params]
        own = [by_device(x) for x in self._whole(given)]
        new, rows = {}, {}
        self._mark = object()
        for owner in self._own.values():
            new[owner.device], rows[owner.device] = owner.step(skipped, old, own, values)
        found = self._publish.send(params, old, new, rows)
        self._target.write(jax.tree.unflatten(self._structure, found))

    def lower(self, grads: Any, values: Any, skipped: tuple[int, ...]) -> jax.stages.Lowered:
        """What is sent, lowered; nothing runs."""
        del grads, values, skipped
        return self._publish.lower(self._whole(jax.tree.leaves(self._target.values())))

    def mark(self) -> Any:
        """An object that is another one after a step or a load."""
        return self._mark

    def states(self) -> list[Any]:
        """The state of each group, whole, in host memory."""
        return [self._group_state(g) for g in range(len(self._groups))]

    def load(self, states: Sequence[Any]) -> None:
        """Sets the state of each group from whole arrays, in the trees of `states`."""
        values = [dict(zip(*flatten(tree)[:2], strict=True)) for tree in states]
        self._set({place: values for place in self._own})

    def parts(self) -> list[dict[str, dict[str, np.ndarray]]]:
        """Of each group, by path and owner, what lies on this process's devices."""
        found: list[dict[str, dict[str, np.ndarray]]] = [{} for _ in self._groups]
        for place, owner in self._own.items():
            for g, group in enumerate(found):
                for path, x in owner.state(g).items():
                    group.setdefault(path, {})[str(place)] = np.array(x)
        return found

    def load_parts(self, parts: Sequence[Any]) -> None:
        """Sets what `parts` returned of the same division."""
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
        """Elements of parameters that each device updates."""
        sizes = [x.size for x in jax.tree.leaves(self.plan.params)]
        pairs = list(zip(sizes, self.owners, strict=True))
        places = range(len(self._publish.devices))
        return [sum(s for s, o in pairs if o == place) for place in places]

    def state_bytes(self) -> int:
        """Of optimizer state, on the device of this process that has most."""
        owners = self._own.values()
        return max(sum(x.nbytes for x in jax.tree.leaves(owner.states)) for owner in owners)

    def published(self) -> int:
        """Elements that are sent to every device in a step, padding of rows included."""
        return self._publish.elements

    def _assign(self, sizes: Sequence[int], count: int) -> list[int | None]:
        """Owners, one group after the other: what is added later moves nothing."""
        owners: list[int | None] = [None] * len(sizes)
        loads = [0] * count
        for tree in self._trees:
            mine = jax.tree.leaves(tree)
            for i, owner in zip(mine, sorted_greedy([sizes[i] for i in mine], loads), strict=True):
                owners[i] = owner
        return owners

    def _refuse(self, mesh: Mesh, replica_axes: Any) -> None:
        group = data_group(mesh, None, replica_axes)
        if group.user:
            raise GShardError(
                "partition='greedy' is for data axes alone, and this mesh has others: "
                f"{some(name for name, _ in group.user)}. Take partition='even'."
            )
        for of in self._groups:
            refuse_coupled(of.tx(), of.tree, of.name)

    def _reduce(self, sums: Unreduced) -> list[jax.Array]:
        return jax.tree.leaves(end_reduction(sums, self.plan, Options()).grads)

    def _whole(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Arrays whole on every device."""
        sharding = self.plan.sharding()
        same = [isinstance(x, jax.Array) and x.sharding == sharding for x in leaves]
        return [
            x if yes else jax.device_put(x, sharding) for x, yes in zip(leaves, same, strict=True)
        ]

    def _group_state(self, g: int) -> Any:
        """The state of a group, each leaf from its owner; what is shared from the first."""
        numbers, group = jax.tree.leaves(self._trees[g]), self._groups[g]
        paths, leaves, structure = flatten(group.state)
        of = parameter_of(group.state, group.tree)
        first = min(self.owners[i] or 0 for i in numbers)
        owners = [first if i is None else self.owners[numbers[i]] or 0 for i in of]
        found = []
        for path, like, owner in zip(paths, leaves, owners, strict=True):
            here = self._own[owner].state(g)[path] if owner in self._own else None
            found.append(self._publish.one(owner, here, like))
        return jax.tree.unflatten(structure, found)
