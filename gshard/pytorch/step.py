"""`opt.step` of a `ZeroRedundancyOptimizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import core

from gshard._util.errors import ArgumentTypeError, CallOrderError, GShardError, did_you_mean, some
from gshard._util.pytree import differences, flatten, path_of
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import shown
from gshard.pytorch.even import Even
from gshard.pytorch.greedy import Greedy
from gshard.sharding.plan import Plan
from gshard.train.gradients import LocalGradients


class OptimizerStep:
    """`opt.step(grads)` or `opt.step(closure=...)`; with DistributedDataParallel, `opt.step()`."""

    def __init__(self, engine: Callable[[], Even | Greedy], check: Callable[[], None]):
        """`engine` returns the current one: a group that is added makes another.

        `check` is called before an update.
        """
        self._engine, self._check = engine, check

    @property
    def plan(self) -> Plan:
        """The layout of every array."""
        return self._engine().plan

    @short_traceback
    def __call__(self, grads: Any = None, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters.

        Args:
          grads: a tree like the parameters: full averaged arrays, or sharded as in the plan, or
            `LocalGradients`. None for a leaf: the leaf and its state stay unchanged. State of the
            entire group, such as a count, is updated if any of its leaves has a gradient.
          closure: a function that returns `(loss, grads)`, called once; with a
            `DistributedDataParallel` one that calls `backward` and returns the loss.

        Returns:
          The new parameters (a model is changed in place). With a closure the loss, and for a tree
          of arrays `(loss, parameters)`.
        """
        is_function = callable(grads) and jax.tree_util.treedef_is_leaf(jax.tree.structure(grads))
        if is_function and closure is None:  # as PyTorch's, by position
            grads, closure = None, grads
        if closure is not None and grads is not None:
            raise GShardError("step: pass grads or closure, not both.")
        engine = self._engine()
        keep, loss = engine.target.accumulation, None
        if keep is not None and keep.stepped_by is not engine:
            raise CallOrderError(
                "step: another optimizer has been made for this model since. Make one optimizer "
                "with groups: [{'params': ...}, {'params': ...}], or use add_param_group."
            )
        if closure is not None:
            loss, grads = _called(closure, keep)
        if grads is None and keep is not None and keep.updating is not None:
            keep.refuse_waiting()
            self._check()
            keep.updating.end()
        else:
            checked = _checked(grads, engine)
            self._check()
            engine.step(*checked)
        result = engine.target.result()
        if closure is None:
            return result
        return loss if engine.target.in_place else (loss, result)

    def lower(self, grads: Any = None) -> jax.stages.Lowered:
        """Returns the next step, lowered; nothing runs. `gshard.audit(opt.step)`.

        Args:
          grads: as passed to a call; by default abstract arrays in the plan's layouts.
        """
        engine = self._engine()
        if grads is not None:
            return engine.lower(*_checked(grads, engine))
        return engine.lower([engine.plan.abstract(x) for x in jax.tree.leaves(self.plan.grads)], ())


def _checked(grads: Any, engine: Even | Greedy) -> tuple[Any, tuple[int, ...]]:
    """Returns gradients as leaves, and the positions of leaves without a gradient."""
    keep = engine.target.accumulation
    if keep is None and grads is None:
        raise GShardError(
            "step needs gradients: step(grads), or step(closure=...) whose closure returns "
            "(loss, grads). It uses those of backward only if it was made with the parameters of "
            "the wrapped model, ZeroRedundancyOptimizer(ddp.parameters(), ...): ddp is a copy of "
            "the model that it wraps."
        )
    if keep is not None:
        if keep.updating is not None:
            raise GShardError(
                "step: with overlap_with_ddp=True backward has already updated the parameters "
                "with its gradients. Pass no gradients."
            )
        if grads is None:
            keep.refuse_scaled()
            grads = keep.take()
        elif keep.joined is not None:
            raise GShardError(
                "step: within Join the gradients must come from backward, which gives devices "
                "without data no weight. Pass no gradients, or leave the model out of Join "
                "and weight the examples yourself."
            )
        elif keep.grads is not None:
            raise GShardError(
                "step: gradients were passed, but the model has others from backward. Call "
                "zero_grad() before, or step() without gradients."
            )
    if isinstance(grads, LocalGradients):
        return grads, ()
    names, params, _ = flatten(engine.target.values())
    paths, leaves, _ = flatten(grads)
    _check_missing(grads, engine.target.values())
    if paths == [""] and names != [""]:
        raise ArgumentTypeError(
            f"step: grads={shown(grads)} are not a tree like the parameters: {some(names)}."
        )
    if any(isinstance(x, core.Tracer) for x in leaves):
        raise GShardError(
            "step keeps the optimizer's state between calls, and cannot be inside a jitted "
            "function. Compute the gradients there, and call step outside."
        )
    # jax.grad(allow_int=True) returns float0 for integers.
    pairs = zip(paths, leaves, strict=True)
    given = {p: x for p, x in pairs if getattr(x, "dtype", None) != jax.dtypes.float0}
    if not given.keys() <= set(names):
        raise GShardError(
            f"step: the gradients are not a tree like the parameters: {differences(paths, names)}."
        )
    for name, x, layout in zip(names, params, jax.tree.leaves(engine.plan.grads), strict=True):
        shape = np.shape(given[name]) if name in given else x.shape
        if shape not in (x.shape, layout.stored_shape):
            raise GShardError(f"step: the gradient of {name} has shape {shape}, not {x.shape}.")
    skipped = tuple(i for i, name in enumerate(names) if name not in given)
    return [given[name] for name in names if name in given], skipped


def _check_missing(grads: Any, values: Any) -> None:
    """Refuses a None for what is neither a parameter nor a part of the model, such as a typo."""

    def with_none(tree: Any) -> list[tuple[str, Any]]:
        pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
        return [(path_of(keys), x) for keys, x in pairs]

    missing = [path for path, x in with_none(grads) if x is None]
    if not missing:
        return
    names = [path for path, _ in with_none(values)]
    parts = {
        "/".join(keys[:i]) for keys in (x.split("/") for x in names) for i in range(len(keys) + 1)
    }
    for path in missing:
        if path not in parts:
            part = path.replace(".", "/")
            say = f" Write grads[{']['.join(map(repr, part.split('/')))}] = None."
            raise GShardError(
                f"step: the gradient of {path!r} is None, and there is no such part of the model."
                f"{say if part in parts else did_you_mean(path, parts)}"
            )


def _called(closure: Any, keep: Any) -> tuple[Any, Any]:
    """Returns the loss and gradients of a closure; None for gradients of `backward`."""
    if not callable(closure):
        raise ArgumentTypeError(f"step: closure={shown(closure)} is not a function.")
    out: Any = closure()
    if isinstance(out, tuple) and len(out) == 2:
        loss, grads = out
        return loss, None if keep is not None and grads is keep.grads else grads
    if keep is None:
        raise GShardError(f"step: the closure returned {shown(out)}. It must return (loss, grads).")
    return out, None
