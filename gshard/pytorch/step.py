"""`opt.step`: one source of gradients, and the update; what `gshard.audit` lowers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import core

from gshard._util.errors import ArgumentTypeError, CallOrderError, GShardError, some
from gshard._util.pytree import differences, flatten
from gshard._util.validation import shown
from gshard.pytorch.param_groups import Tree
from gshard.train.local_gradients import Unreduced


class Step:
    """`opt.step(grads)` or `opt.step(closure=...)`; with a `DataParallel`, `opt.step()`."""

    def __init__(self, now: Callable[[], tuple[Any, Tree, Any]]):
        """`now` returns the engine, the parameters and the hyperparameters of now."""
        self._now = now

    @property
    def plan(self) -> Any:
        """Where everything lies."""
        return self._now()[0].plan

    def __call__(self, grads: Any = None, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters.

        Args:
          grads: like the parameters: whole averaged arrays, or as the plan divides them, or
            `Unreduced`. None for a leaf: it and its state stay what they are, and what is of all
            parameters, such as a count, goes on.
          closure: a function that returns `(loss, grads)`, called once; with a `DataParallel` one
            that calls `backward` and returns the loss.

        Returns:
          The new parameters (a model is changed in place); with a closure `(loss, parameters)`.
        """
        if callable(grads) and closure is None:  # as PyTorch's, by position
            grads, closure = None, grads
        if closure is not None and grads is not None:
            raise GShardError("step: pass grads or closure, not both.")
        engine, target, values = self._now()
        keep, loss = target.accumulation, None
        if keep is not None and keep.stepped_by is not engine:
            raise CallOrderError(
                "step: another optimizer was made for this DataParallel since. Make one, with "
                "groups: [{'params': ...}, {'params': ...}], or add_param_group."
            )
        if closure is not None:
            loss, grads = _called(closure, keep)
        if grads is None and keep is not None and keep.updating is not None:
            keep.refuse_waiting()
            keep.updating.end()
        else:
            taken, skipped = self._taken(grads, target)
            engine.step(taken, values, skipped)
        result = target.result()
        return result if closure is None else (loss, result)

    def lower(self, grads: Any = None) -> jax.stages.Lowered:
        """The next step, lowered; nothing runs. `gshard.audit(opt.step)`.

        Args:
          grads: as given to a call; by default as the plan divides them.
        """
        engine, target, values = self._now()
        if grads is None:
            divided = jax.tree.leaves(jax.tree.map(self.plan.abstract, self.plan.grads))
            return engine.lower(divided, values, ())
        taken, skipped = self._taken(grads, target)
        return engine.lower(taken, values, skipped)

    def _taken(self, grads: Any, target: Tree) -> tuple[Any, tuple[int, ...]]:
        """Gradients as leaves, and which leaves have no gradient."""
        keep = target.accumulation
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
        elif keep is not None and keep.joined is not None:
            raise GShardError(
                "step: within Join gradients are those of backward, which weighs devices without "
                "data. Pass none, or leave the DataParallel out of Join and weigh the rows."
            )
        elif keep is not None and keep.grads is not None:
            raise GShardError(
                "step: gradients were passed, and the DataParallel has others from backward. Call "
                "zero_grad() before, or step() without any."
            )
        if isinstance(grads, Unreduced):
            return grads, ()
        names, like, _ = flatten(target.values())
        paths, leaves, _ = flatten(grads)
        if paths == [""] and names != [""]:
            raise ArgumentTypeError(
                f"step: grads={shown(grads)} are no tree like the parameters: {some(names)}."
            )
        if any(isinstance(x, core.Tracer) for x in leaves):
            raise GShardError(
                "step keeps the optimizer's state between calls, and cannot be inside a jitted "
                "function. Compute the gradients there, and call step outside."
            )
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
        return [given[name] for name in names if name in given], skipped


def _called(closure: Any, keep: Any) -> tuple[Any, Any]:
    """Loss and gradients of a closure; None for those of `backward`."""
    if not callable(closure):
        raise ArgumentTypeError(f"step: closure={shown(closure)} is not a function.")
    out: Any = closure()
    pair = isinstance(out, tuple) and len(out) == 2
    if keep is not None:
        loss, grads = out if pair else (out, None)
        return loss, None if grads is not None and grads is keep.grads else grads
    if not pair:
        raise GShardError(f"step: the closure returned {shown(out)}. It returns (loss, grads).")
    return out


def _is_nothing(x: Any) -> bool:
    """What `jax.grad(allow_int=True)` gives for a whole number."""
    return getattr(x, "dtype", None) == jax.dtypes.float0
