"""Gradients that are not reduced yet, which accumulate over separate calls."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from gshard._util.errors import GShardError
from gshard._util.pytree import flatten
from gshard._util.validation import shown
from gshard.train.aux_metrics import add_sums


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalGradients:
    """Gradients that are not reduced yet: sums over the examples that each device has seen.

    They add up (`total = total + more`). Every array has a leading axis over the devices of the
    data axes, so that each device keeps its own. `gshard.reduce_gradients(total, plan)` reduces
    them; an optimizer refuses them.

    Attributes:
      grads: a tree like the parameters: full gradients, or with `accumulate="scatter"` the local
        shard, summed over the shard group.
      loss: float32 `(devices,)`.
      weight: float32 `(devices,)`, by which the sums are divided in the end.
      aux: the loss's auxiliary output in a form that adds up, or None.
      accumulate: `local` or `scatter`.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> _, local = gshard.value_and_grad(loss_fn, plan, sync=False)(state.params, batch)
      >>> local.grads["w"].shape
      (8, 64, 32)
    """

    grads: Any
    loss: jax.Array
    weight: jax.Array
    aux: Any
    accumulate: str = field(metadata={"static": True})

    def __add__(self, other: LocalGradients) -> LocalGradients:
        if not isinstance(other, LocalGradients):
            self._refuse(shown(other))
        if jax.tree.structure(other) != jax.tree.structure(self):
            self._refuse(f"others ({other.accumulate})")
        bare = [dataclasses.replace(x, aux=None) for x in (self, other)]
        return dataclasses.replace(jax.tree.map(jnp.add, *bare), aux=add_sums(self.aux, other.aux))

    def __radd__(self, other: Any) -> LocalGradients:
        """`sum([...])` begins with 0."""
        if not isinstance(other, int) or other:
            self._refuse(shown(other))
        return self

    def _refuse(self, other: str) -> NoReturn:
        raise GShardError(
            f"LocalGradients gradients ({self.accumulate}) were added to {other}. Add those of one "
            "value_and_grad(sync=False): of the same tree, aux and accumulation."
        )

    def __contains__(self, _: Any) -> NoReturn:
        """Flax's `apply_gradients` asks whether a gradient contains fp8 statistics."""
        raise GShardError(_REFUSAL)


def refuse_local_gradients(grads: Any, known: list[str]) -> None:
    """Refuses gradients that are not reduced, also as the `nnx.State` that NNX converts them to.

    Args:
      grads: what was passed as gradients.
      known: the paths of the parameters.

    Raises:
      GShardError: they are `LocalGradients`.
    """
    if isinstance(grads, LocalGradients):
        raise GShardError(_REFUSAL)
    paths = flatten(grads)[0]
    own = {path.removeprefix("grads/") for path in paths if path.startswith("grads/")}
    if not set(known) <= set(paths) and set(known) <= own:
        raise GShardError(_REFUSAL)


_REFUSAL = (
    "these gradients are LocalGradients (value_and_grad(sync=False)): every device has its "
    "own. End "
    "them first: loss, grads = gshard.reduce_gradients(grads, plan)."
)
