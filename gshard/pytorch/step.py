"""`opt.step`: one source of gradients, and the update; what `gshard.audit` lowers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gshard.arguments import shown
from gshard.errors import GShardError
from gshard.pytorch.parameters import Tree
from gshard.tree import differences, flatten
from gshard.unreduced import Unreduced


class Step:
    """`opt.step(grads)` or `opt.step(closure=...)`; with a `DataParallel`, `opt.step()`."""

    def __init__(self, engine: Any, target: Tree, values: Callable[[], Any]):
        self.plan, self._engine, self._target, self._values = engine.plan, engine, target, values

    def __call__(self, grads: Any = None, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters.

        Args:
          grads: like the parameters: whole averaged arrays, or as the plan divides them, or
            `Unreduced`. None for a leaf: it and its state stay what they are.
          closure: a function that returns `(loss, grads)`, called once.

        Returns:
          The new parameters (a model is changed in place); with a closure `(loss, parameters)`.
        """
        if closure is not None and grads is not None:
            raise GShardError("step: pass grads or closure, not both.")
        loss, keep = None, self._target.accumulation
        if grads is closure is None and keep is not None and keep.updating is not None:
            keep.refuse_waiting()
            keep.updating.end()
            return self._target.result()
        if closure is not None:
            out = closure()
            if not isinstance(out, tuple) or len(out) != 2:
                raise GShardError(
                    f"step: the closure returned {shown(out)}. It returns (loss, grads)."
                )
            loss, grads = out
        self._engine.step(*self._taken(grads))
        result = self._target.result()
        return result if closure is None else (loss, result)

    def lower(self, grads: Any = None) -> jax.stages.Lowered:
        """The next step, lowered; nothing runs. `gshard.audit(opt.step)`.

        Args:
          grads: as given to a call; by default as the plan divides them.
        """
        if grads is None:
            divided = jax.tree.leaves(jax.tree.map(self.plan.abstract, self.plan.grads))
            return self._engine.lower(divided, self._values(), ())
        return self._engine.lower(*self._taken(grads))

    def _taken(self, grads: Any) -> tuple[Any, Any, tuple[int, ...]]:
        """Gradients as leaves, hyperparameters of now, and which leaves have no gradient."""
        keep = self._target.accumulation
        if keep is not None and keep.updating is not None:
            raise GShardError(
                "step: overlap_with_ddp=True takes the gradients of backward, which has updated "
                "with them. Pass none."
            )
        if grads is None and keep is None:
            raise GShardError(
                "step needs gradients: step(grads), or step(closure=...) whose closure returns "
                "(loss, grads). Without them it takes those of a gshard.DataParallel."
            )
        if keep is not None and grads is None:
            keep.refuse_scaled()
            grads = keep.take()
        elif keep is not None and keep.grads is not None:
            raise GShardError(
                "step: gradients were passed, and the DataParallel has others from backward. Call "
                "zero_grad() before, or step() without any."
            )
        if isinstance(grads, Unreduced):
            return grads, self._values(), ()
        values = self._target.values()
        names, like, _ = flatten(values)
        paths, leaves, _ = flatten(grads)
        given = {p: x for p, x in zip(paths, leaves, strict=True) if not _is_nothing(x)}
        if not given.keys() <= set(names):
            raise GShardError(
                f"step: the gradients are not those of the parameters: {differences(paths, names)}."
            )
        places = jax.tree.leaves(self.plan.grads)
        for name, x, place in zip(names, like, places, strict=True):
            shape = np.shape(given[name]) if name in given else x.shape
            if shape not in (x.shape, place.stored_shape):
                raise GShardError(f"step: the gradient of {name} has shape {shape}, not {x.shape}.")
        skipped = tuple(i for i, name in enumerate(names) if name not in given)
        return [given[name] for name in names if name in given], self._values(), skipped


def _is_nothing(x: Any) -> bool:
    """What `jax.grad(allow_int=True)` gives for a whole number."""
    return getattr(x, "dtype", None) == jax.dtypes.float0
