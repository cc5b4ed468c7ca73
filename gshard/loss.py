"""The forms a loss may have, brought into one: a sum, its weight, aux and updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gshard.errors import GShardError, some
from gshard.state import PureLoss
from gshard.tree import flatten


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A loss as a sum and its weight; divided once, by the weight of the global batch.

    Attributes:
      sum: floating scalar, the summed loss of the rows at hand.
      weight: scalar, such as the number of tokens that count. Not differentiated.
    """

    sum: Any
    weight: Any


@dataclass(frozen=True)
class LossForm:
    """Calls a pure loss and brings what it returned into `(sum, (weight, aux, updates))`."""

    loss: PureLoss
    structure: Any
    has_aux: bool

    def __call__(self, leaves: list[jax.Array], extras: Any, batch: Any, rng: Any) -> Any:
        """Takes whole parameter leaves; the loss comes back as float32."""
        params = jax.tree.unflatten(self.structure, leaves)
        out, updates = self.loss(params, extras, batch, rng)
        aux = None
        if self.has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise GShardError(
                    f"has_aux=True: the loss must return (loss, aux); it returned a "
                    f"{type(out).__name__}."
                )
            out, aux = out
        if not isinstance(out, Weighted):
            if isinstance(out, tuple):
                raise GShardError(
                    "the loss returned a tuple: pass has_aux=True for (loss, aux), or mutable= for "
                    "(loss, updates)."
                )
            out = Weighted(out, jnp.ones((), jnp.float32))
        for name, x in (("loss", out.sum), ("weight", out.weight)):
            if jnp.shape(x) != ():
                raise GShardError(
                    f"the {name} must be a scalar; it has shape {jnp.shape(x)}. Return the mean "
                    "over the rows, or gshard.Weighted(sum, weight)."
                )
        if not jnp.issubdtype(jnp.result_type(out.sum), jnp.floating):
            raise GShardError(f"the loss must be floating; it is {jnp.result_type(out.sum)}.")
        _check_aux(aux)
        weight = jax.lax.stop_gradient(jnp.asarray(out.weight, jnp.float32))
        return jnp.asarray(out.sum, jnp.float32), (weight, aux, updates)


def fold_keys(tree: Any, *numbers: Any) -> Any:
    """Every typed PRNG key of a tree, folded with `numbers`: device, micro-batch."""

    def fold(x: Any) -> Any:
        if not _is_key(x):
            return x
        flat = x.reshape(-1)
        for number in numbers:
            flat = jax.vmap(jax.random.fold_in, (0, None))(flat, number)
        return flat.reshape(x.shape)

    return jax.tree.map(fold, tree)


def refuse_keys(updates: Any) -> None:
    """Keys that the loss changes would differ from device to device."""
    paths, leaves, _ = flatten(updates)
    keys = [path for path, x in zip(paths, leaves, strict=True) if _is_key(x)]
    if keys:
        raise GShardError(
            f"the loss changes the PRNG key {some(keys)}, which is folded with the device and "
            "would differ from device to device. Pass rng= to make_train_step instead: it is "
            "folded with step, micro-batch and device."
        )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _check_aux(aux: Any) -> None:
    paths, leaves, _ = flatten(aux)
    for path, x in zip(paths, leaves, strict=True):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise GShardError(
                f"aux {path!r} has dtype {jnp.result_type(x)}: only floating auxiliary outputs are "
                "averaged over the batch. Convert it to float, or leave it out."
            )
