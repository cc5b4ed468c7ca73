"""`ZeroRedundancyOptimizer`: PyTorch's optimizer with sharded state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import core

from gshard._util.errors import (
    ArgumentTypeError,
    CallOrderError,
    GShardError,
    MissingAttributeError,
    did_you_mean,
    some,
    warn,
)
from gshard._util.pytree import differences, flatten
from gshard._util.text import bytes_of
from gshard._util.validation import check_integer, flag, shown
from gshard.pytorch.even import Even
from gshard.pytorch.greedy import Greedy
from gshard.pytorch.param_groups import ParamGroup, Tree, factory_of, options_of, parameters
from gshard.pytorch.state_dict import entries, matched
from gshard.train.gradients import LocalGradients
from gshard.wrapped.arguments import mesh_of

_PARTITIONS: dict[str, Callable[..., Any]] = {"even": Even, "greedy": Greedy}
_INSTEAD = {  # of attributes that PyTorch's optimizers have
    "defaults": "The hyperparameters of group i are opt.param_groups[i], by name.",
    "state": "Call opt.state_dict(): ['state'][i] is the state of group i.",
    "optim": "Call opt.state_dict(whole=False) for what is on the devices of this process.",
}


class ZeroRedundancyOptimizer:
    """An optimizer whose state is sharded over devices; parameters stay replicated.

    `step(grads)` takes averaged gradients, those of `gshard.value_and_grad(loss_fn, opt.plan)`, or
    the ones that the `backward` of a `gshard.pytorch.DataParallel` has accumulated.

    Attributes:
      plan: the layout of every array, as a `gshard.Plan`.
      param_groups: the groups of parameters, each with hyperparameters that can be changed.

    Example:
      >>> opt = gshard.pytorch.ZeroRedundancyOptimizer(params, optax.adam, lr=1e-3)
      >>> loss, grads = jax.jit(gshard.value_and_grad(loss_fn, opt.plan))(params, batch)
      >>> params = opt.step(grads)
      >>> opt.param_groups[0]["lr"] = 1e-4
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Any],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: str = "even",
        **defaults: Any,
    ):
        """Makes an optimizer and shards its state.

        Args:
          params: an NNX module, a `gshard.pytorch.DataParallel` or its `parameters()`, a tree or an
            iterable of arrays, or a list of groups: dictionaries of `"params"` and hyperparameters.
          optimizer_class: an optax factory, such as `optax.adamw`.
          process_group: devices from `gshard.distributed.new_group`, or a mesh. Default: all
            devices, or those of the `DataParallel`.
          parameters_as_bucket_view: all-gather updated parameters in buckets, not one by one.
          overlap_with_ddp: with a `DataParallel`, `backward` also updates the parameters, in one
            compiled program. `parameters_as_bucket_view` has no effect then.
          partition: `"even"` shards every tensor; `"greedy"` assigns full tensors to devices, as
            PyTorch does.
          **defaults: hyperparameters for groups that do not set them; `lr` is `learning_rate`.

        Raises:
          ArgumentTypeError: the parameters or the optimizer have a wrong type.
          GShardError: there are no parameters, one is given twice, or an argument is invalid.
        """
        if partition not in _PARTITIONS:
            raise GShardError(
                f"partition={shown(partition)} is not 'even' or 'greedy'."
                f"{did_you_mean(partition, _PARTITIONS)}"
            )
        flag("parameters_as_bucket_view", parameters_as_bucket_view)
        flag("overlap_with_ddp", overlap_with_ddp)
        self._factory, self._defaults = factory_of(optimizer_class), defaults
        self._make = _PARTITIONS[partition]
        self._buckets = parameters_as_bucket_view
        self._target, self._labels, own = parameters(params)
        self._mesh = self._mesh_of(process_group)
        self.param_groups: tuple[ParamGroup, ...] = ()
        self.param_groups = tuple(self._group(i, options) for i, options in enumerate(own))
        self._overlaps = overlap_with_ddp
        self._consolidated: tuple[Any, list[Any]] = (None, [])
        self._warn_of_useless()
        self._engine = self._shard_state()

    def __getattr__(self, name: str) -> Any:
        if name not in _INSTEAD:
            return object.__getattribute__(self, name)  # raises what Python says
        raise MissingAttributeError(
            f"ZeroRedundancyOptimizer has no attribute {name!r}. {_INSTEAD[name]}"
        )

    @property
    def plan(self) -> Any:
        """The layout of every array; `print(opt.plan)` shows a table."""
        return self._engine.plan

    @property
    def ddp(self) -> Any:
        """The `DataParallel` whose gradients it takes, or None."""
        keep = self._target.accumulation
        return None if keep is None else keep.model

    @property
    def step(self) -> OptimizerStep:
        """`opt.step(grads)` updates the parameters and returns them; see `OptimizerStep`."""
        return OptimizerStep(self._now)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of a `DataParallel`; other gradients belong to the caller."""
        del set_to_none
        if self._target.accumulation is not None:
            self._target.accumulation.clear()

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Adds parameters; existing parameters keep their state and their owner.

        Args:
          param_group: a dictionary of `"params"` and hyperparameters.
        """
        if not isinstance(param_group, Mapping) or "params" not in param_group:
            raise ArgumentTypeError(
                f"add_param_group({shown(param_group)}): pass a dictionary with 'params'."
            )
        states = self._engine.states()
        before = (self._target, self._labels, self.param_groups)
        try:
            self._target, self._labels = self._target.with_group(self._labels, param_group)
            group = self._group(len(states), options_of(param_group))
            self.param_groups = (*self.param_groups, group)
            engine = self._shard_state()
        except BaseException:
            self._target, self._labels, self.param_groups = before
            raise
        engine.load([*states, engine.states()[-1]])
        self._engine = engine

    def state_dict(self, whole: bool = True) -> dict[str, Any]:
        """Returns a snapshot: the state of each group, and the groups' hyperparameters.

        `["state"][i]` is what `optimizer_class(**hyperparameters)` keeps for the parameters of
        group i, in host memory: a plain optimizer takes it as it is. Steps do not change it.

        Args:
          whole: with several processes all of them call it, but for the one that
            `consolidate_state_dict` named, until the next step. False: what lies on this process's
            devices, as `["parts"]`, for the same division; nothing is sent.
        """
        flag("whole", whole)
        groups = [
            {**group.saved(), "params": flatten(group.tree)[0]} for group in self.param_groups
        ]
        if not whole:
            return {"parts": self._engine.parts(), "param_groups": groups}
        mark, states = self._consolidated
        fresh = mark is self._engine.mark()
        state = jax.tree.map(np.array, states) if fresh else self._engine.states()
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Any) -> None:
        """Sets the state; what is given is not changed. Numbers that groups may change come too.

        Args:
          state_dict: what `state_dict` returned on any number of devices, also as `load`
            read it; or the state of a plain optimizer, of several groups a list of them.

        Raises:
          GShardError: names the entries that are missing, unknown or of another shape; nothing is
            changed.
        """
        given: Any = state_dict if isinstance(state_dict, Mapping) else {}
        ours = bool(given) and {*given} <= {"state", "parts", "param_groups"}
        values = self._saved_values(given["param_groups"]) if "param_groups" in given else []
        if ours and "parts" in given:
            self._engine.load_parts(entries(given["parts"], len(self.param_groups)))
        else:
            wanted = [group.state for group in self.param_groups]
            plain = [state_dict] if len(wanted) == 1 else state_dict
            self._engine.load(matched(given.get("state", {}) if ours else plain, wanted))
        for group, saved in zip(self.param_groups, values, strict=bool(values)):
            for name, value in saved.items():
                group[name] = value

    def _saved_values(self, given: Any) -> list[dict[str, Any]]:
        """Returns the live hyperparameters of the groups in a state dict, after checking them."""
        saved = entries(given, len(self.param_groups))
        count = len(saved) if isinstance(saved, Sequence) else 0
        if count != len(self.param_groups) or not all(isinstance(x, Mapping) for x in saved):
            raise GShardError(
                f"load_state_dict: param_groups={shown(given)} are not those of "
                f"{len(self.param_groups)} groups. Nothing was changed."
            )
        found = []
        for i, (group, of) in enumerate(zip(self.param_groups, saved, strict=True)):
            group.check(of, f"load_state_dict: group {i}")
            found.append({name: x for name, x in of.items() if name in group.live})
        return found

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the state for one process, leaf by leaf; all processes call it.

        That process may then call `state_dict` alone, until the next step. (Others, and one
        process by itself, need it not: kept for scripts that have it.)

        Args:
          to: rank of the process.
        """
        if check_integer("to", to, 0) >= jax.process_count():
            raise GShardError(
                f"consolidate_state_dict: to={to} is no rank of {jax.process_count()} processes."
            )
        states = self._engine.states()
        mine = jax.process_index() == to
        self._consolidated = (self._engine.mark(), states) if mine else (None, [])

    def join_hook(self, **kwargs: Any) -> None:
        """Does nothing: under `gshard.pytorch.Join` every device takes part in every step."""

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Lists, for each device, the groups of parameters that it owns, as in PyTorch."""
        owners = getattr(self._engine, "owners", None)
        if owners is None:
            raise GShardError(
                "partition='even' divides every tensor over all devices; only partition='greedy' "
                "gives whole ones to a device."
            )
        leaves = jax.tree.leaves(self._target.values())
        every = list(zip(leaves, owners, self._labels, strict=True))
        return [
            [
                {"params": [x for x, owner, label in every if (owner, label) == (place, g)]}
                for g in range(len(self.param_groups))
            ]
            for place in range(len(self._engine.loads()))
        ]

    def __repr__(self) -> str:
        engine, places = self._engine, zip(self._labels, self._sizes(), strict=True)
        loads, whole = engine.loads(), sum(n for label, n in places if label is not None)
        padding = sum(loads) - whole
        fullest = (max(loads) * len(loads) - padding) / whole
        return (
            f"ZeroRedundancyOptimizer({self._make.__name__.lower()}, groups: "
            f"{len(self.param_groups)}, devices: {len(loads)}; the fullest updates "
            f"{max(loads):,} elements, {fullest:.2f} of the mean, and keeps "
            f"{bytes_of(engine.state_bytes())} of state; padding: {padding:,} elements; "
            f"all-gathered: {engine.all_gathered_elements():,})"
        )

    def _now(self) -> tuple[Any, Any, Any]:
        """Returns what a step needs: the engine, the parameters and the hyperparameters."""
        return self._engine, self._target, self._values()

    def _mesh_of(self, process_group: Any) -> tuple[Any, Any]:
        ddp = self._target.accumulation
        if ddp is None:
            return mesh_of(process_group, argument="process_group")
        mesh: Any = ddp.plan.mesh
        if process_group is not None:
            given, _ = mesh_of(process_group, argument="process_group")
            if given.devices.tolist() != mesh.devices.tolist():
                raise GShardError(
                    "process_group= names other devices than those of the DataParallel, whose "
                    "group= decides. Leave it out."
                )
        return mesh, ddp.plan.group.replica or None

    def _warn_of_useless(self) -> None:
        ddp = self._target.accumulation is not None
        if self._overlaps and (not ddp or self._make is not Even):
            why = (
                "updates on each owner's device" if ddp else "is for a gshard.pytorch.DataParallel"
            )
            what = f"partition='greedy' {why}" if ddp else f"it {why}"
            warn(f"overlap_with_ddp changes nothing: {what}. Leave it out.")
            self._overlaps = False
        elif self._overlaps and self._buckets:
            warn(
                "parameters_as_bucket_view is ignored with overlap_with_ddp, where parameters are "
                "sent in buckets anyway. Leave it out."
            )

    def _sizes(self) -> list[int]:
        return [x.size for x in jax.tree.leaves(self._target.values())]

    def _shard_state(self) -> Any:
        buckets = self._buckets or self._overlaps
        made = self._make(self._target, self.param_groups, self._labels, *self._mesh, buckets)
        ddp = self._target.accumulation
        if ddp is not None:
            ddp.stepped_by = made
            ddp.updating = OverlappedUpdate(made, self._values) if self._overlaps else None
        return made

    def _values(self) -> list[dict[str, Any]]:
        return [group.traced() for group in self.param_groups]

    def _group(self, i: int, options: Mapping[str, Any]) -> ParamGroup:
        me = weakref.ref(self)  # a plan holds its groups, and a class of models its plan

        def params() -> list[Any]:
            opt = me()
            if opt is None:
                return []
            return jax.tree.leaves(opt._target.group_tree(opt._target.values(), opt._labels, i))

        values = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._target.values()
        )
        tree = self._target.group_tree(values, self._labels, i)
        return ParamGroup(self._factory, self._defaults, options, tree, params)


class OptimizerStep:
    """`opt.step(grads)` or `opt.step(closure=...)`; with a `DataParallel`, `opt.step()`."""

    def __init__(self, now: Callable[[], tuple[Any, Tree, Any]]):
        """`now` returns the engine, the parameters and the hyperparameters of now."""
        self._now = now

    @property
    def plan(self) -> Any:
        """The layout of every array."""
        return self._now()[0].plan

    def __call__(self, grads: Any = None, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters.

        Args:
          grads: a tree like the parameters: full averaged arrays, or sharded as in the plan, or
            `LocalGradients`. None for a leaf: it and its state stay what they are, and what is of
            all parameters, such as a count, goes on.
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
          grads: as passed to a call; by default abstract arrays in the plan's layouts.
        """
        engine, target, values = self._now()
        if grads is None:
            divided = jax.tree.leaves(jax.tree.map(self.plan.abstract, self.plan.grads))
            return engine.lower(divided, values, ())
        taken, skipped = self._taken(grads, target)
        return engine.lower(taken, values, skipped)

    def _taken(self, grads: Any, target: Tree) -> tuple[Any, tuple[int, ...]]:
        """Returns gradients as leaves, and the positions of leaves without a gradient."""
        keep = target.accumulation
        if keep is not None and keep.updating is not None:
            raise GShardError(
                "step: overlap_with_ddp=True takes the gradients of backward, which has updated "
                "with them. Pass none."
            )
        if grads is None and keep is None:
            raise GShardError(
                "step needs gradients: step(grads), or step(closure=...) whose closure returns "
                "(loss, grads). Without them it takes those of a gshard.pytorch.DataParallel."
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
        if isinstance(grads, LocalGradients):
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
    """Returns the loss and gradients of a closure; None for gradients of `backward`."""
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
    """Whether a gradient is the one that `jax.grad(allow_int=True)` makes for an integer."""
    return getattr(x, "dtype", None) == jax.dtypes.float0


class OverlappedUpdate:
    """The update that `DataParallel.backward` runs after the gradients."""

    def __init__(self, engine: Even, values: Callable[[], Any]):
        """`values` returns the hyperparameters of now."""
        self.updated, self._engine, self._values = engine.updated, engine, values
        self._done = False

    def arguments(self) -> tuple[Any, Any]:
        """Returns the optimizer's state, which is donated, and its hyperparameters."""
        return self._engine.state, self._values()

    def accept(self, new: Any, state: Any) -> None:
        """Stores new parameters and state."""
        self._engine.accept(new, state)
        self._done = True

    def end(self) -> None:
        """Finishes `step()` after `backward` has updated the parameters.

        Raises:
          CallOrderError: `backward` has not been called since the last one.
        """
        if not self._done:
            raise CallOrderError("step: there are no gradients. Call backward(loss_fn, batch).")
        self._done = False
