"""`partition="even"`: every tensor of the optimizer state is sharded over all devices.

Gradients are reduce-scattered, each device updates its shard, and the result is all-gathered: 2Ψ
elements on the wire (ZeRO, Rajbhandari et al., section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from gshard._util.arrays import is_key
from gshard._util.errors import CallOrderError, DonatedStateError
from gshard._util.pytree import flatten
from gshard.pytorch.coupling import warn_of_coupled
from gshard.pytorch.param_group import ParamGroup
from gshard.pytorch.parameters import Labels, Parameters
from gshard.pytorch.state_dict import keep_of, parameter_of, placed, refuse_other_shards, with_zeros
from gshard.sharding.host_arrays import full_on_host
from gshard.train.comm.buckets import BUCKET_SIZE
from gshard.train.gradients import LocalGradients
from gshard.train.optim.optimizer import update_and_all_gather
from gshard.train.options import StepOptions
from gshard.train.shard_train_state import shard_leaf, shard_train_state
from gshard.train.value_and_grad import finish_reduction
from gshard.train_state.components import ShardedOptState
from gshard.wrapped.arguments import first_process


class Even:
    """The state and the step of an optimizer that shards every tensor.

    With `overlap_with_ddp`, the model's `backward` runs `updated` with `arguments` in its program.

    Attributes:
      target: the parameters.
      plan: the layout of every array, at level `os`.
      state: the state as stored; a step donates its arrays, and a step or a load replaces it.
    """

    def __init__(
        self,
        target: Parameters,
        groups: Sequence[ParamGroup],
        mesh: Mesh,
        replica_axes: Any,
        buckets: bool,
    ):
        """Shards the state; `buckets` says whether to all-gather several parameters together."""
        for group in groups if len(groups) > 1 else ():
            warn_of_coupled(group.tx(), group.tree, group.name)
        self.target: Parameters = target
        self._groups = groups
        pair = target.pair(grouped(groups, target.labels))
        state, self.plan = shard_train_state(
            pair,
            mesh,
            "os",
            min_shard_size=0,
            replica_axes=replica_axes,
            broadcast_from=first_process(mesh),
        )
        self.state: ShardedOptState = target.start(state, self.plan).opt_state
        self._updated = False
        self._bucket_size = BUCKET_SIZE if buckets else 0
        self._layouts, structure = jax.tree.flatten(self.plan.opt_state)
        # Of each group: the positions of its state's leaves among all, by path.
        self._indices: list[dict[str, int]] = []
        self._parameter_of: list[int | None] = [None] * len(self._layouts)
        self._group_of: list[int | None] = [None] * len(self._layouts)
        indices = _group_states(structure.unflatten(range(len(self._layouts))), groups, target)
        for g, (group, tree) in enumerate(zip(groups, indices, strict=True)):
            own = [i for i, label in enumerate(target.labels) if label == g]
            paths, leaves = flatten(group.state)[0], jax.tree.leaves(tree)
            self._indices.append(dict(zip(paths, leaves, strict=True)))
            of = parameter_of(group.state, group.tree)
            for i, at in zip(leaves, of, strict=True):
                self._parameter_of[i] = None if at is None else own[at]
                self._group_of[i] = g
        self._step = jax.jit(self._run, static_argnums=0, donate_argnums=2)

    def step(self, grads: Any, skipped: tuple[int, ...]) -> None:
        """Runs one step; the leaves in `skipped` and their state do not change.

        If these are all leaves of a group, its entire state stays, such as a step count.
        """
        self.accept(*self._step(*self._inputs(grads, skipped)))

    def lower(self, grads: Any, skipped: tuple[int, ...]) -> jax.stages.Lowered:
        """Returns the lowered step."""
        return self._step.lower(*self._inputs(grads, skipped))

    def arguments(self) -> tuple[Any, Any]:
        """Returns the state, which an update donates, and the traced hyperparameters."""
        if any(x.is_deleted() for x in jax.tree.leaves(self.state)):
            raise DonatedStateError(
                "step: an earlier call, which was interrupted or failed, has used up the state of "
                "the optimizer. Make the optimizer again, and load a state dict that you have kept."
            )
        return self.state, [group.traced() for group in self._groups]

    def updated(self, params: Any, grads: Any, state: Any, values: Any) -> tuple[Any, Any]:
        """Returns new parameters and state from gradients in the plan's layouts, while tracing."""
        grads = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(grads))
        extra = {"hyperparameters": values}
        size = self._bucket_size
        return update_and_all_gather(self.plan, grads, state, params, extra, None, size)

    def accept(self, new: Any, state: ShardedOptState) -> None:
        """Stores what `updated` returned."""
        self.state, self._updated = state, True
        self.target.write(new)

    def end(self) -> None:
        """Finishes `step()` after `backward` has updated the parameters."""
        if not self._updated:
            raise CallOrderError("step: there are no gradients. Call backward(loss_fn, batch).")
        self._updated = False

    def states(self) -> list[Any]:
        """Returns the full state of each group, in host memory."""
        full = jax.tree.leaves(full_on_host(self.state.inner, self.plan.opt_state))
        return [
            jax.tree.unflatten(jax.tree.structure(group.state), [full[i] for i in own.values()])
            for group, own in zip(self._groups, self._indices, strict=True)
        ]

    def load(self, states: Sequence[Any]) -> None:
        """Sets the state of each group from full arrays, in the trees of `states`."""
        new = {
            i: shard_leaf(x, self._layouts[i], self.plan)
            for tree, own in zip(states, self._indices, strict=True)
            for x, i in zip(jax.tree.leaves(tree), own.values(), strict=True)
        }
        self._set(new)

    def shards(self) -> list[dict[str, dict[str, np.ndarray]]]:
        """Returns each group's shards on this process's devices, padded, by path and offset.

        Of PRNG keys these are the data, which can be saved.
        """
        leaves = list(map(_data, jax.tree.leaves(self.state.inner)))
        return [
            {
                path: {_offset(x.index): np.array(x.data) for x in leaves[i].addressable_shards}
                for path, i in own.items()
            }
            for own in self._indices
        ]

    def load_shards(self, shards: Sequence[Any]) -> None:
        """Sets the shards that `shards` returned for a state that was sharded in the same way."""
        refuse_other_shards(shards, self.shards())
        leaves, new = jax.tree.leaves(self.state.inner), {}
        for group, own in zip(shards, self._indices, strict=True):
            for path, i in own.items():
                new[i] = _of_shards(group[path], leaves[i])
        self._set(new)

    def loads(self) -> list[int]:
        """Returns the parameter elements that each device updates, padding included."""
        sizes = [
            math.prod(x.shard_shape)
            for x, label in zip(jax.tree.leaves(self.plan.grads), self.target.labels, strict=True)
            if label is not None
        ]
        return [sum(sizes)] * self.plan.group.size

    def state_bytes(self) -> int:
        """Returns the bytes of optimizer state on one device."""
        return sum(x.bytes_per_device for x in self._layouts)

    def all_gathered_elements(self) -> int:
        """Returns the elements that each device all-gathers in a step, padding included."""
        return sum(x.stored_size for x in jax.tree.leaves(self.plan.grads) if x.dim is not None)

    def _set(self, new: dict[int, jax.Array]) -> None:
        """Sets leaves of the state by position."""
        leaves, structure = jax.tree.flatten(self.state.inner)
        inner = structure.unflatten([new.get(i, x) for i, x in enumerate(leaves)])
        self.state = self.state._replace(inner=inner)

    def _inputs(self, grads: Any, skipped: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns the arguments of `_run`, with parameters and gradients on the plan's mesh."""

        def on_mesh(x: Any, what: str, *layout: Any) -> Any:
            mesh = getattr(getattr(x, "sharding", None), "mesh", None)
            return x if mesh == self.plan.mesh else placed(x, self.plan.sharding(*layout), what)

        if not isinstance(grads, LocalGradients):
            grads = [on_mesh(x, "the gradients") for x in grads]
        params, structure = jax.tree.flatten(self.target.values())
        layouts = jax.tree.leaves(self.plan.params)
        params = [
            on_mesh(x, "the parameters", layout) for x, layout in zip(params, layouts, strict=True)
        ]
        state, values = self.arguments()
        return skipped, structure.unflatten(params), state, grads, values

    def _run(
        self, skipped: tuple[int, ...], params: Any, state: ShardedOptState, grads: Any, values: Any
    ) -> tuple[Any, ShardedOptState]:
        if isinstance(grads, LocalGradients):
            options = StepOptions(bucket_size=self._bucket_size)
            grads = finish_reduction(grads, self.plan, options).grads
        else:
            grads = with_zeros(grads, skipped, jax.tree.leaves(params))
        new, after = self.updated(params, grads, state, values)
        if skipped:
            new = keep_of(range(len(self.target.labels)), skipped, new, params)
            inner = keep_of(self._parameter_of, skipped, after.inner, state.inner)
            moving = {g for i, g in enumerate(self.target.labels) if i not in skipped}
            idle = set(range(len(self._groups))) - moving
            inner = keep_of(self._group_of, idle, inner, state.inner)
            after = after._replace(inner=inner)
        return new, after


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if is_key(x) else x


def _of_shards(shards: Mapping[str, Any], like: jax.Array) -> jax.Array:
    """Returns an array like another, of the shards that `Even.shards` returned of it."""
    data = _data(like)

    def at(index: Any) -> np.ndarray:
        return np.array(shards[_offset(index)], data.dtype)

    new = jax.make_array_from_callback(data.shape, data.sharding, at)
    return jax.random.wrap_key_data(new, impl=jax.random.key_impl(like)) if is_key(like) else new


def _offset(index: tuple[slice, ...]) -> str:
    """Returns the offset of a shard, as a name."""
    return "at " + ",".join(str(dim.start or 0) for dim in index)


def grouped(groups: Sequence[ParamGroup], labels: Labels) -> optax.GradientTransformationExtraArgs:
    """Combines the groups' optimizers into one for a tree whose leaves have these labels.

    Its state is that of the optimizer where there is one group of all leaves, else that of
    `optax.multi_transform`. `update` accepts `hyperparameters`: for each group the traced ones.
    """

    def together(values: Sequence[Any]) -> Any:
        made = [group.tx(v) for group, v in zip(groups, values, strict=True)]
        if set(labels) == {0}:
            return made[0]
        by_label: Any = {str(i): tx for i, tx in enumerate(made)} | {"None": optax.set_to_zero()}
        return optax.multi_transform(
            by_label, lambda tree: jax.tree.unflatten(jax.tree.structure(tree), map(str, labels))
        )

    def update(
        updates: Any, state: Any, params: Any = None, *, hyperparameters: Any = None, **extra: Any
    ) -> Any:
        values = hyperparameters or [{} for _ in groups]
        return together(values).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(together([{} for _ in groups]).init, update)


def _group_states(state: Any, groups: Sequence[ParamGroup], target: Parameters) -> list[Any]:
    """Returns the state of each group's optimizer, from that of `grouped`."""
    if set(target.labels) == {0}:
        return [state]
    return [state.inner_states[str(i)].inner_state for i in range(len(groups))]
