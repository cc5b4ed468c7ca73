"""The compiled functions of a wrapped model, and checks of the losses that they are compiled for.

They keep no state: `accumulation` does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gshard._util.closure import OutsideValues
from gshard._util.errors import GShardError, some, warn
from gshard._util.jaxpr_dataflow import inputs_used
from gshard._util.pytree import differences, flatten
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.gradients import GradientStage, LocalGradients
from gshard.train.loss import Weighted
from gshard.train.non_trainable import non_trainable_layouts
from gshard.train.optim.offload import to_device
from gshard.train.optim.skip_update import keep_unless
from gshard.train.options import StepOptions
from gshard.train.padding_mask import MaskCheck
from gshard.train.same_program import ProgramCheck
from gshard.train.value_and_grad import mean_non_trainable, reduce_gradients, value_and_grad

_GRAPHS = (nnx.Module, nnx.Rngs, nnx.Variable)
_MANY = {float: 4, int: 16}  # values of a number; integers may be the lengths of loops
LossFn = Callable[..., Any]
Grads = nnx.State[Any, Any] | None
Pending = LocalGradients | None


def split_inputs(inputs: Any) -> tuple[list[Any], Any]:
    """Splits the inputs of a model into arrays and a hashable rest, a key for compilation."""
    graphs = jax.tree.leaves(inputs, is_leaf=lambda x: isinstance(x, _GRAPHS))
    if any(isinstance(x, _GRAPHS) for x in graphs):
        raise GShardError(
            "the model is called with an nnx.Rngs, a module or a Variable, whose changes would be "
            "lost. Give the model its own, when it is made."
        )
    leaves, structure = jax.tree.flatten(inputs)
    is_array = [isinstance(x, (jax.Array, np.ndarray, np.generic)) for x in leaves]
    pairs = zip(leaves, is_array, strict=True)
    # With the type, since True == 1 == 1.0 are one key.
    rest = structure, tuple(None if yes else (type(x), x) for x, yes in pairs)
    try:
        hash(rest)
    except TypeError as error:
        raise GShardError(
            f"the model is called with an argument that cannot be hashed ({error}), so gshard "
            "cannot look up whether it is compiled already. Pass arrays, numbers, strings and "
            "tuples."
        ) from error
    return [x for x, yes in zip(leaves, is_array, strict=True) if yes], rest


@dataclass(frozen=True)
class Phases:
    """The compiled phases of a wrapped model and its optimizer.

    Reduced gradients are an `nnx.State` like the trained parameters, sharded as in the plan. Those
    of one device are `LocalGradients`, sums of means over its examples.

    Attributes:
      plan: the layout of every array.
      sizes: bucket sizes in elements: `bucket_size` and `end_bucket_size`.
      options: further options of `gshard.value_and_grad`.
      numbers: the values of Python's numbers that the model was compiled for, by their type.
    """

    plan: Plan
    sizes: dict[str, int]
    options: dict[str, Any]
    numbers: dict[type, set[Any]] = field(default_factory=lambda: {float: set(), int: set()})

    def forward(self, model: Any, arrays: list[Any], rest: Any) -> Any:
        """Returns the model's output for split inputs, and writes the changes of its own state."""
        plan, (structure, fixed), given = self.plan, rest, iter(arrays)
        self._warn_of_numbers(rest)
        inputs = structure.unflatten([next(given) if x is None else x[1] for x in fixed])
        parts = plan.kind.split_target(model, {})
        refuse_other_parameters(parts.params, plan, full=True)
        # A Variable that was added after wrapping is not in the plan.
        known = non_trainable_layouts(parts.non_trainable, plan)
        stored, layouts = (parts.params, parts.non_trainable), (plan.params, known)
        stored = to_device(stored, layouts)
        params, others = jax.tree.map(lambda x, layout: layout.unpad(x), stored, layouts)
        call = lambda model, given: model(*given[0], **given[1])  # noqa: E731
        pure = plan.kind.loss(call, (), parts.static, what="model(...)")
        out, changed = pure(params, others, inputs, None)
        changed = {path: plan.pin(x, known[path]) for path, x in changed.items()}
        plan.kind.absorb(model, parts, changed)
        return out

    def _warn_of_numbers(self, rest: Any) -> None:
        """Warns of a number, such as a rate, for whose every value the model is compiled."""
        for kind, seen in self.numbers.items():
            values = tuple(x if x and x[0] is kind else None for x in rest[1])
            if not any(values) or values in seen:
                continue
            seen.add(values)
            if len(seen) == _MANY[kind]:
                warn(
                    f"the model was called with {len(seen)} values of a Python {kind.__name__}, "
                    "and each was compiled. Pass what changes as an array, such as "
                    "np.float32(rate) or np.int32(step), unless shapes or branches depend on it."
                )

    def backward(
        self, loss_fn: LossFn, model: nnx.Module, batch: Any, pending: Pending, grads: Grads
    ) -> tuple[jax.Array, nnx.State[Any, Any]]:
        """Returns the loss, and its gradient and pending ones reduced and added to `grads`."""
        if pending is None:
            semantics = "per_device"  # DataParallel and DDP average the losses of the devices
            run = value_and_grad(
                loss_fn, self.plan, loss_semantics=semantics, **self.sizes, **self.options
            )
            loss, new = run(model, batch)
        else:
            own, _ = self._own(loss_fn, model, batch)
            total = dataclasses.replace(_added(pending, own), loss=own.loss)
            loss, new = reduce_gradients(total, self.plan, **self.sizes)
        return loss, _sum(grads, new)

    def backward_and_update(
        self, loss_fn: LossFn, updated: Callable[..., Any], model: nnx.Module, *args: Any
    ) -> tuple[jax.Array, Any, Any]:
        """Returns loss, new parameters and state; updates do not wait for all gradients.

        `args` are those of `backward`, then the optimizer's state and hyperparameters.
        """
        params = self.plan.kind.split_target(model, {}).params
        loss, grads = self.backward(loss_fn, model, *args[:3])
        return loss, *updated(params, grads, *args[3:])

    def local(
        self, loss_fn: LossFn, model: nnx.Module, batch: Any, pending: Pending, buffers: Any
    ) -> tuple[jax.Array, LocalGradients, dict[str, Any]]:
        """Returns each device's loss, its gradient added to the pending ones, and its buffers.

        `buffers` are the ones that the losses have changed, with a leading axis over the devices.
        """
        own, buffers = self._own(loss_fn, model, batch, buffers)
        return own.loss, _added(pending, own), buffers

    def reduce(self, pending: LocalGradients, grads: Grads) -> nnx.State[Any, Any]:
        """Returns the pending gradients, reduced and added to `grads`."""
        return _sum(grads, reduce_gradients(pending, self.plan, **self.sizes)[1])

    def padded(self, grads: Grads) -> dict[str, Layout]:
        """Returns the layouts of the gradients with padding whose parameters have none, by path."""
        paths, leaves, _ = flatten(grads)
        shapes = {path: x.shape for path, x in zip(paths, leaves, strict=True)}
        pairs = zip(
            jax.tree.leaves(self.plan.grads), jax.tree.leaves(self.plan.params), strict=True
        )
        more = [g for g, p in pairs if g.padding and not p.padding]
        return {g.path: g for g in more if shapes.get(g.path) == g.stored_shape}

    def unpad(self, grads: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
        """Returns the gradients in the shapes of the parameters, those in `padded` all-gathered."""
        padded, full = self.padded(grads), {x.path: x for x in jax.tree.leaves(self.plan.params)}
        paths, leaves, structure = flatten(grads)
        return structure.unflatten(
            self.plan.pin(padded[path].unpad(x), full[path]) if path in padded else x
            for path, x in zip(paths, leaves, strict=True)
        )

    def settle(self, model: nnx.Module, buffers: dict[str, Any]) -> None:
        """Combines the buffers of all devices into one value each, and writes it into the model."""
        parts = self.plan.kind.split_target(model, {})
        options = StepOptions(**self.options)
        self.plan.kind.absorb(model, parts, mean_non_trainable(buffers, self.plan, options))

    def _own(
        self, loss_fn: LossFn, model: nnx.Module, batch: Any, buffers: Any = None
    ) -> tuple[LocalGradients, dict[str, Any]]:
        """Returns each device's gradient of the mean over its examples, with weight 1, and buffers.

        Without `buffers`, those that the loss changes are combined and written into the model.
        """

        def plain(model: nnx.Module, batch: Any) -> Any:
            loss = loss_fn(model, batch)
            if isinstance(loss, Weighted):
                raise GShardError(
                    "no_sync: the loss is a gshard.Weighted, which is divided by the weight of all "
                    "devices, and no_sync does not communicate. Call backward outside it, or use "
                    "make_train_step(micro_batches=...)."
                )
            return loss

        plan, options = self.plan, StepOptions(accumulate="local", **self.options)
        parts = plan.kind.split_target(model, {})
        stage = GradientStage(plan.kind.loss(plain, (), parts.static), plan, options)
        sums, changed = stage.local(parts, batch, None, buffers)
        if buffers is None:
            plan.kind.absorb(model, parts, changed)
        return dataclasses.replace(sums, grads=plan.kind.gradients(sums.grads, model, {})), changed


def update(model: Any, optimizer: Any, grads: Any, finite: jax.Array | None) -> None:
    """Runs one step of the optimizer; if `finite` is given and false, it changes nothing."""
    before = [nnx.as_pure(nnx.state(x)) for x in (model, optimizer)]
    optimizer.update(model, grads)
    if finite is None:
        return
    after = [nnx.as_pure(nnx.state(x)) for x in (model, optimizer)]
    for target, new in zip((model, optimizer), keep_unless(finite, after, before), strict=True):
        nnx.update(target, new)


def unscale(grads: nnx.State[Any, Any], scale: jax.Array) -> tuple[nnx.State[Any, Any], jax.Array]:
    """Returns the gradients divided by the scale, and whether every entry is finite."""
    new = jax.tree.map(lambda g: (g * (1 / scale)).astype(g.dtype), grads)
    return new, jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(new)]))


def _added(pending: Pending, own: LocalGradients) -> LocalGradients:
    """Adds the means of several calls; the weight remains that of one call."""
    return own if pending is None else dataclasses.replace(pending + own, weight=own.weight)


def _sum(grads: Grads, new: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
    """Adds gradients; where the user set one, or those of a part, to None, `new` alone counts.

    Those that the user set may lack the padding.
    """

    def sum_of(ours: jax.Array, theirs: jax.Array) -> jax.Array:
        if ours.shape != theirs.shape:
            pairs = zip(theirs.shape, ours.shape, strict=True)
            ours = jnp.pad(ours, [(0, stored - size) for stored, size in pairs])
        return ours + theirs

    def add(ours: Any, theirs: Any) -> Any:
        return theirs if ours is None else jax.tree.map(sum_of, ours, theirs)

    return jax.tree.map(add, grads, new, is_leaf=lambda x: x is None)


class OnModel:
    """A compiled `fun(model, *args)` that writes its changes of the model's own state.

    Args:
      fun: a function of a model and arrays, and of `fixed` if that is given.
      wrt: the filter of the parameters, which `fun` does not change.
      donated: which of `args` are donated.
      check: compares the program with those of other processes before it runs.
      outside: warns of what the user's function reads from outside, where that has changed.
      mask: warns of a batch, the first of `args`, of which examples are used without their mask.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        wrt: Any,
        donated: tuple[int, ...] = (),
        check: ProgramCheck | None = None,
        outside: OutsideValues | None = None,
        mask: MaskCheck | None = None,
    ):
        self.wrt: Any = wrt
        self._fun, self._check, self._outside, self._mask = fun, check, outside, mask
        numbers = tuple(3 + i for i in donated)
        self._jitted: Any = jax.jit(self._run, static_argnums=0, donate_argnums=numbers)

    def __call__(self, model: nnx.Module, *args: Any, fixed: Any = None) -> Any:
        """Runs the function; it is compiled once for each value of `fixed`, which is hashable."""
        static, params, rest = self._split(model, fixed)
        given = static, params, rest, *args
        if self._outside is not None:
            self._outside.look(args)
        try:
            if self._mask is not None:
                first = len(jax.tree.leaves((params, rest)))
                self._mask(args[0], lambda: self._jitted.trace(*given), first)
            if self._check is None:
                out, changed = self._jitted(*given)
            else:
                self._check(static, given[1:], lambda: self._jitted.trace(*given))
                out, changed = self._check.run(self._jitted, *given)
        except ValueError:
            _refuse_other_devices(model)
            raise
        if changed:
            leaves = [changed.get(i, x) for i, x in enumerate(rest)]
            nnx.update(model, jax.tree.unflatten(static[0], leaves)[1])
        return out

    def clear(self) -> None:
        """Drops the compiled programs."""
        self._jitted.clear_cache()

    def lower(self, model: nnx.Module, *args: Any, fixed: Any = None) -> jax.stages.Lowered:
        """Returns the function lowered for these arguments; nothing runs."""
        return self._jitted.lower(*self._split(model, fixed), *args)

    def _split(self, model: nnx.Module, fixed: Any) -> tuple[tuple[Any, Any], Any, list[Any]]:
        """Returns what is static, the parameters, and the leaves of the rest."""
        graph, params, rest = nnx.split(model, self.wrt, ...)
        # A structure has a hash even where an attribute of the model, such as a list, has none.
        leaves, structure = jax.tree.flatten((graph, rest))
        return (structure, fixed), params, leaves

    def _run(self, static: tuple[Any, Any], params: Any, rest: Any, *args: Any) -> Any:
        structure, fixed = static
        graph, others = jax.tree.unflatten(structure, rest)
        model = nnx.merge(graph, params, others, copy=True)
        out = self._fun(model, *args, *(() if fixed is None else (fixed,)))
        after = jax.tree.leaves(nnx.split(model, self.wrt, ...)[2])
        pairs = enumerate(zip(after, rest, strict=True))
        return out, {i: new for i, (new, old) in pairs if new is not old}


def _refuse_other_devices(model: Any) -> None:
    """Raises a `GShardError` if arrays of a wrapped model were moved to other devices."""
    devices = set(model.plan.mesh.devices.flat)
    paths, leaves, _ = flatten(nnx.state(model))
    moved = [
        path
        for path, x in zip(paths, leaves, strict=True)
        if getattr(x, "committed", False) and x.sharding.device_set != devices
    ]
    if moved:
        raise GShardError(
            f"{some(moved, 3)}: these arrays of the model are on other devices than model.plan "
            "says. Set full values with model.set_state_dict(values), by the names of "
            "model.state_dict(): it places them."
        )


def refuse_other_parameters(params: Any, plan: Plan, full: bool = False) -> None:
    """Raises a `GShardError` if the parameters of a wrapped model are no longer those of its plan.

    Args:
      params: those of the model, arrays or abstract.
      plan: made for it.
      full: whether they may also have the shapes without padding.
    """
    layouts = jax.tree.leaves(plan.params)
    paths, leaves, _ = flatten(params)
    known = [layout.path for layout in layouts]
    if paths != known:
        raise GShardError(
            "the parameters of the model are not those that were wrapped: "
            f"{differences(paths, known)}. Change a model before it is wrapped."
        )
    wrong = [
        f"{y.path} is {list(x.shape)}, stored as {list(y.stored_shape)}"
        for x, y in zip(leaves, layouts, strict=True)
        if x.shape != y.stored_shape and not (full and x.shape == y.shape)
    ]
    if wrong:
        raise GShardError(
            f"parameters are not stored as model.plan says: {some(wrong, 3)}. Set full values with "
            "model.set_state_dict(values), by the names of model.state_dict()."
        )


def unused_params(loss_fn: LossFn, plan: Plan, wrt: Any, batch: Any) -> list[str]:
    """Returns the paths of the parameters (`wrt`) that `loss_fn(model, batch)` does not depend on.

    The loss may communicate over the axes of the mesh, as a synchronized BatchNorm does.
    """
    graph, params, rest = nnx.split(plan.template[0], wrt, ...)

    def loss(params: Any, rest: Any, batch: Any) -> Any:
        return loss_fn(nnx.merge(graph, params, rest, copy=True), batch)

    axes = list(plan.mesh.shape.items())
    jaxpr = jax.make_jaxpr(loss, axis_env=axes)(params, rest, batch).jaxpr
    used = frozenset().union(*inputs_used(jaxpr))
    return [path for i, path in enumerate(flatten(params)[0]) if i not in used]
