"""One device that owns whole tensors: their optimizer state, and the program that updates them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from gshard._util.pytree import flatten
from gshard.pytorch.own_state import keep_of, parameter_of
from gshard.pytorch.param_group import ParamGroup


class Owner:
    """The state of some tensors on one device.

    Attributes:
      device: where everything is.
      mine: positions of its tensors among all.
      states: of each group; None where it owns nothing of it.
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
          device: where everything is to be.
          params: its tensors by position, on the device.
          groups: of all parameters.
          trees: of each group, with positions for leaves.
          pack: what is sent of new tensors, beside them.
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
        """New tensors by position, and what was packed; of `skipped` everything stays.

        Args:
          skipped: positions.
          params: of all, by device.
          grads: of all, by device.
          values: hyperparameters of each group.
        """
        if not self.mine:
            return {}, self._nothing
        own = ([of[i][self.device] for i in self.mine] for of in (params, grads))
        new, self.states, rows = self._update(skipped, *own, self.states, values)
        return dict(zip(self.mine, new, strict=True)), rows

    def state(self, g: int) -> dict[str, jax.Array]:
        """Of a group by path."""
        return dict(zip(*flatten(self.states[g])[:2], strict=True))

    def placed(self, g: int, values: Mapping[str, Any]) -> Any:
        """The state of a group of copies of these values, by path."""
        paths, leaves, structure = flatten(self.states[g])
        copies = [np.array(values[p], x.dtype) for p, x in zip(paths, leaves, strict=True)]
        return jax.tree.unflatten(structure, [jax.device_put(x, self.device) for x in copies])

    def _own(self, g: int, own: Mapping[int, Any]) -> Any:
        """A group's tree with these leaves, the others left out."""
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
