"""`partition="even"`: every tensor of the optimizer state divided over all devices, by the core.

The gradients are scattered, each device updates its own part, and new parameters are published: 2Ψ
elements on the wire (ZeRO, Rajbhandari et al., section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from gshard.buckets import BUFFER_MAX_SIZE
from gshard.gradients import Options, end_reduction
from gshard.host import to_host
from gshard.optimizer import GShardState, update_and_publish
from gshard.pytorch.grouped import Labels, group_states, grouped
from gshard.pytorch.own_state import keep_of, parameter_of
from gshard.pytorch.param_group import ParamGroup
from gshard.pytorch.parameters import Tree
from gshard.pytorch.state_dict import refuse_other_parts
from gshard.shard import place, shard_train_state
from gshard.tree import flatten
from gshard.unreduced import Unreduced


class Even:
    """State and step of an optimizer whose every tensor is divided.

    Attributes:
      plan: where everything lies, level `os`.
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
        """`buckets`: several parameters are sent together."""
        self._target, self._groups, self._labels = target, groups, labels
        state, self.plan = shard_train_state(
            target.pair(grouped(groups, labels)),
            mesh,
            "os",
            segment_size=0,
            replica_axes=replica_axes,
        )
        self._state: GShardState = target.start(state, self.plan).opt_state
        self._size = BUFFER_MAX_SIZE if buckets else 0
        self._of = self._parameter_of()
        values = jax.tree.map(_abstract, target.values())
        trees = [target.group_tree(values, labels, g) for g in range(len(groups))]
        self._structures = [  # of the plain optimizer's states: the same leaves, nothing left out
            jax.tree.structure(jax.eval_shape(group.tx().init, tree))
            for group, tree in zip(groups, trees, strict=True)
        ]
        self._step = jax.jit(self._run, static_argnums=0, donate_argnums=2)

    def step(self, grads: Any, values: Any, skipped: tuple[int, ...]) -> None:
        """One step; leaves of `skipped` stay what they are, with their state."""
        self.accept(
            *self._step(skipped, self._target.values(), self._state, self._given(grads), values)
        )

    def updated(self, params: Any, grads: Any, state: Any, values: Any) -> tuple[Any, Any]:
        """New parameters and state, traced, of gradients that lie as the plan says."""
        grads = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(grads))
        extra = {"hyperparameters": values}
        return update_and_publish(self.plan, grads, state, params, extra, None, self._size)

    def accept(self, new: Any, state: GShardState) -> None:
        """Takes what `updated` returned."""
        self._state = state
        self._target.write(new)

    def mark(self) -> Any:
        """An object that is another one after a step or a load."""
        return self._state

    @property
    def state(self) -> GShardState:
        """The state as it lies; a step gives its arrays away."""
        return self._state

    def lower(self, grads: Any, values: Any, skipped: tuple[int, ...]) -> jax.stages.Lowered:
        """The step, lowered."""
        params = self._target.values()
        return self._step.lower(skipped, params, self._state, self._given(grads), values)

    def states(self) -> list[Any]:
        """The state of each group, whole, in host memory."""
        whole = to_host(self._state.inner, self.plan.opt_state)
        found = group_states(whole, self._groups, self._labels)
        return [
            jax.tree.unflatten(structure, jax.tree.leaves(state))
            for structure, state in zip(self._structures, found, strict=True)
        ]

    def load(self, states: Sequence[Any]) -> None:
        """Sets the state of each group from whole arrays, in the trees of `states`."""
        own = group_states(self.plan.opt_state, self._groups, self._labels)
        new = {
            id(layout): place(x, layout, self.plan)
            for tree, layouts in zip(states, own, strict=True)
            for x, layout in zip(jax.tree.leaves(tree), jax.tree.leaves(layouts), strict=True)
        }
        leaves, structure = jax.tree.flatten(self._state.inner)
        layouts = jax.tree.leaves(self.plan.opt_state)
        leaves = [new.get(id(at), x) for x, at in zip(leaves, layouts, strict=True)]
        self._state = self._state._replace(inner=jax.tree.unflatten(structure, leaves))

    def parts(self) -> list[dict[str, dict[str, np.ndarray]]]:
        """Of each group, by path and place, what lies on this process's devices, with padding."""
        found = []
        for tree in group_states(self._state.inner, self._groups, self._labels):
            paths, leaves, _ = flatten(tree)
            found.append({path: _by_place(x) for path, x in zip(paths, leaves, strict=True)})
        return found

    def load_parts(self, parts: Sequence[Any]) -> None:
        """Sets what `parts` returned of the same division."""
        refuse_other_parts(parts, self.parts())
        new = {}
        trees = group_states(self._state.inner, self._groups, self._labels)
        for own, tree in zip(parts, trees, strict=True):
            for path, x in zip(*flatten(tree)[:2], strict=True):
                of: Any = partial(_at, own[path])
                new[id(x)] = jax.make_array_from_callback(x.shape, x.sharding, of)
        leaves, structure = jax.tree.flatten(self._state.inner)
        inner = jax.tree.unflatten(structure, [new.get(id(x), x) for x in leaves])
        self._state = self._state._replace(inner=inner)

    def loads(self) -> list[int]:
        """Elements of parameters that each device updates, padding included."""
        parts = [
            math.prod(x.part_shape)
            for x, label in zip(jax.tree.leaves(self.plan.grads), self._labels, strict=True)
            if label is not None
        ]
        return [sum(parts)] * self.plan.group.size

    def state_bytes(self) -> int:
        """Of optimizer state on one device."""
        return sum(x.bytes_per_device for x in jax.tree.leaves(self.plan.opt_state))

    def published(self) -> int:
        """Elements that are gathered on every device in a step, padding included."""
        return sum(x.stored_size for x in jax.tree.leaves(self.plan.grads) if x.dim is not None)

    def _parameter_of(self) -> list[int | None]:
        """Of every leaf of the optimizer's state the position of its parameter, if it has one."""
        params, structure = jax.tree.flatten(self.plan.params)
        found: dict[int, int | None] = {}
        states = group_states(self.plan.opt_state, self._groups, self._labels)
        for g, tree in enumerate(states):
            own = [i for i, label in enumerate(self._labels) if label == g]
            masked = [x if i in own else optax.MaskedNode() for i, x in enumerate(params)]
            of = parameter_of(tree, jax.tree.unflatten(structure, masked))
            for layout, i in zip(jax.tree.leaves(tree), of, strict=True):
                found[id(layout)] = None if i is None else own[i]
        return [found.get(id(layout)) for layout in jax.tree.leaves(self.plan.opt_state)]

    def _given(self, grads: Any) -> Any:
        """Gradients as they are compiled for: on the mesh."""
        if isinstance(grads, Unreduced):
            return grads
        whole = self.plan.sharding()
        return [x if _on(self.plan.mesh, x) else jax.device_put(x, whole) for x in grads]

    def _run(
        self, skipped: tuple[int, ...], params: Any, state: GShardState, grads: Any, values: Any
    ) -> tuple[Any, GShardState]:
        if isinstance(grads, Unreduced):
            grads = end_reduction(grads, self.plan, Options(buffer_max_size=self._size)).grads
        else:
            grads, like = list(grads), jax.tree.leaves(params)
            for i in skipped:
                grads.insert(i, jnp.zeros(like[i].shape, like[i].dtype))
        new, after = self.updated(params, grads, state, values)
        if skipped:
            leaves, old = jax.tree.leaves(new), jax.tree.leaves(params)
            leaves = [old[i] if i in skipped else x for i, x in enumerate(leaves)]
            new = jax.tree.unflatten(jax.tree.structure(new), leaves)
            after = after._replace(inner=keep_of(self._of, skipped, after.inner, state.inner))
        return new, after


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _by_place(x: jax.Array) -> dict[str, np.ndarray]:
    return {_place(shard.index): np.array(shard.data) for shard in x.addressable_shards}


def _at(parts: Any, index: tuple[slice, ...]) -> np.ndarray:
    return np.array(parts[_place(index)])


def _place(index: tuple[slice, ...]) -> str:
    """Where a part begins, as a name."""
    return "at " + ",".join(str(part.start or 0) for part in index)


def _on(mesh: Any, x: Any) -> bool:
    return (
        isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
        and getattr(x.sharding, "mesh", None) == mesh
    )
