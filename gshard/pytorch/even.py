"""`partition="even"`: every tensor of the optimizer state is sharded over all devices.

Gradients are reduce-scattered, each device updates its shard, and the result is all-gathered: 2Ψ
elements on the wire (ZeRO, Rajbhandari et al., section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gshard._util.pytree import flatten
from gshard.pytorch.param_groups import Labels, ParamGroup, Tree, group_states, grouped
from gshard.pytorch.state_dict import keep_of, parameter_of, refuse_other_parts, with_zeros
from gshard.sharding.host_arrays import to_host
from gshard.train.comm.buckets import BUCKET_SIZE
from gshard.train.gradients import LocalGradients
from gshard.train.optim.optimizer import update_and_all_gather
from gshard.train.options import StepOptions
from gshard.train.shard_train_state import shard_leaf, shard_train_state
from gshard.train.value_and_grad import finish_reduction
from gshard.train_state.components import ShardedOptState


class Even:
    """The state and the step of an optimizer that shards every tensor.

    Attributes:
      plan: the layout of every array, at level `os`.
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
        """Shards the state; `buckets` says whether to all-gather several parameters together."""
        self._target, self._groups, self._labels = target, groups, labels
        state, self.plan = shard_train_state(
            target.pair(grouped(groups, labels)),
            mesh,
            "os",
            min_shard_size=0,
            replica_axes=replica_axes,
        )
        self._state: ShardedOptState = target.start(state, self.plan).opt_state
        self._size = BUCKET_SIZE if buckets else 0
        structure = jax.tree.structure(self.plan.opt_state)
        everywhere = structure.unflatten(range(structure.num_leaves))
        self._places = [jax.tree.leaves(tree) for tree in group_states(everywhere, groups, labels)]
        self._of = self._parameter_of()
        self._step = jax.jit(self._run, static_argnums=0, donate_argnums=2)

    def step(self, grads: Any, values: Any, skipped: tuple[int, ...]) -> None:
        """Runs one step; the leaves in `skipped` and their state do not change."""
        self.accept(
            *self._step(skipped, self._target.values(), self._state, self._given(grads), values)
        )

    def updated(self, params: Any, grads: Any, state: Any, values: Any) -> tuple[Any, Any]:
        """Returns new parameters and state from gradients in the plan's layouts, while tracing."""
        grads = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(grads))
        extra = {"hyperparameters": values}
        return update_and_all_gather(self.plan, grads, state, params, extra, None, self._size)

    def accept(self, new: Any, state: ShardedOptState) -> None:
        """Stores what `updated` returned."""
        self._state = state
        self._target.write(new)

    def mark(self) -> Any:
        """Returns an object that a step or a load replaces by another one."""
        return self._state

    @property
    def state(self) -> ShardedOptState:
        """Returns the state as stored; a step donates its arrays."""
        return self._state

    def lower(self, grads: Any, values: Any, skipped: tuple[int, ...]) -> jax.stages.Lowered:
        """Returns the lowered step."""
        params = self._target.values()
        return self._step.lower(skipped, params, self._state, self._given(grads), values)

    def states(self) -> list[Any]:
        """Returns the full state of each group, in host memory."""
        whole = jax.tree.leaves(to_host(self._state.inner, self.plan.opt_state))
        return [
            jax.tree.unflatten(jax.tree.structure(group.state), [whole[i] for i in places])
            for group, places in zip(self._groups, self._places, strict=True)
        ]

    def load(self, states: Sequence[Any]) -> None:
        """Sets the state of each group from full arrays, in the trees of `states`."""
        layouts = jax.tree.leaves(self.plan.opt_state)
        self._set(
            {
                i: shard_leaf(x, layouts[i], self.plan)
                for tree, places in zip(states, self._places, strict=True)
                for x, i in zip(jax.tree.leaves(tree), places, strict=True)
            }
        )

    def parts(self) -> list[dict[str, dict[str, np.ndarray]]]:
        """Returns each group's shards on this process's devices, padded, by path and offset."""
        leaves = jax.tree.leaves(self._state.inner)
        return [
            {path: _by_place(leaves[i]) for path, i in zip(paths, places, strict=True)}
            for paths, places in self._named()
        ]

    def load_parts(self, parts: Sequence[Any]) -> None:
        """Sets the shards that `parts` returned for a state that was sharded in the same way."""
        refuse_other_parts(parts, self.parts())
        leaves, new = jax.tree.leaves(self._state.inner), {}
        for own, (paths, places) in zip(parts, self._named(), strict=True):
            for path, i in zip(paths, places, strict=True):
                of: Any = partial(_at, own[path])
                new[i] = jax.make_array_from_callback(leaves[i].shape, leaves[i].sharding, of)
        self._set(new)

    def _named(self) -> list[tuple[list[str], list[int]]]:
        """Returns, for each group, the paths of its state and their positions among all leaves."""
        names = (flatten(group.state)[0] for group in self._groups)
        return list(zip(names, self._places, strict=True))

    def _set(self, new: dict[int, jax.Array]) -> None:
        """Sets leaves of the state by position."""
        leaves, structure = jax.tree.flatten(self._state.inner)
        leaves = [new.get(i, x) for i, x in enumerate(leaves)]
        self._state = self._state._replace(inner=jax.tree.unflatten(structure, leaves))

    def loads(self) -> list[int]:
        """Returns the parameter elements that each device updates, padding included."""
        parts = [
            math.prod(x.shard_shape)
            for x, label in zip(jax.tree.leaves(self.plan.grads), self._labels, strict=True)
            if label is not None
        ]
        return [sum(parts)] * self.plan.group.size

    def state_bytes(self) -> int:
        """Returns the bytes of optimizer state on one device."""
        return sum(x.bytes_per_device for x in jax.tree.leaves(self.plan.opt_state))

    def all_gathered_elements(self) -> int:
        """Returns the elements that each device all-gathers in a step, padding included."""
        return sum(x.stored_size for x in jax.tree.leaves(self.plan.grads) if x.dim is not None)

    def _parameter_of(self) -> list[int | None]:
        """Returns, for each leaf of the optimizer state, the position of its parameter, or None."""
        found: list[int | None] = [None] * len(jax.tree.leaves(self.plan.opt_state))
        for g, (group, places) in enumerate(zip(self._groups, self._places, strict=True)):
            own = [i for i, label in enumerate(self._labels) if label == g]
            of = parameter_of(group.state, group.tree)
            for i, at in zip(places, of, strict=True):
                found[i] = None if at is None else own[at]
        return found

    def _given(self, grads: Any) -> Any:
        """Places gradients on the mesh, as the compiled step expects them."""
        if isinstance(grads, LocalGradients):
            return grads
        whole = self.plan.sharding()
        return [x if _on(self.plan.mesh, x) else jax.device_put(x, whole) for x in grads]

    def _run(
        self, skipped: tuple[int, ...], params: Any, state: ShardedOptState, grads: Any, values: Any
    ) -> tuple[Any, ShardedOptState]:
        if isinstance(grads, LocalGradients):
            grads = finish_reduction(grads, self.plan, StepOptions(bucket_size=self._size)).grads
        else:
            grads = with_zeros(grads, skipped, jax.tree.leaves(params))
        new, after = self.updated(params, grads, state, values)
        if skipped:
            leaves, old = jax.tree.leaves(new), jax.tree.leaves(params)
            leaves = [old[i] if i in skipped else x for i, x in enumerate(leaves)]
            new = jax.tree.unflatten(jax.tree.structure(new), leaves)
            after = after._replace(inner=keep_of(self._of, skipped, after.inner, state.inner))
        return new, after


def _by_place(x: jax.Array) -> dict[str, np.ndarray]:
    return {_place(shard.index): np.array(shard.data) for shard in x.addressable_shards}


def _at(parts: Any, index: tuple[slice, ...]) -> np.ndarray:
    return np.array(parts[_place(index)])


def _place(index: tuple[slice, ...]) -> str:
    """Returns the offset of a shard, as a name."""
    return "at " + ",".join(str(part.start or 0) for part in index)


def _on(mesh: Any, x: Any) -> bool:
    return (
        isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
        and getattr(x.sharding, "mesh", None) == mesh
    )
