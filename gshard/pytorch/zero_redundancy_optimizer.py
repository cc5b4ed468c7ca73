"""`ZeroRedundancyOptimizer`: PyTorch's optimizer with sharded state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from gshard._util.arguments import named_arguments
from gshard._util.arrays import is_key
from gshard._util.errors import (
    ArgumentTypeError,
    GShardError,
    MissingAttributeError,
    did_you_mean,
    warn,
)
from gshard._util.pytree import flatten
from gshard._util.text import bytes_of
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import check_integer, flag, shown
from gshard.pytorch.even import Even
from gshard.pytorch.greedy import Greedy
from gshard.pytorch.param_group import ParamGroup
from gshard.pytorch.param_state import ParamStates
from gshard.pytorch.parameters import Parameters, options_of, parameters
from gshard.pytorch.state_dict import compare, entries, matched
from gshard.pytorch.step import OptimizerStep
from gshard.sharding.plan import Plan
from gshard.wrapped.arguments import mesh_of
from gshard.wrapped.same_hyperparameters import SameHyperparameters

_PARTITIONS = {"even": Even, "greedy": Greedy}
_MISSING = {"optimizer_class": "Pass a factory, such as optax.adamw, and its arguments by name."}
_INSTEAD = {  # of attributes that PyTorch's optimizers have
    "defaults": "The hyperparameters of group i are opt.param_groups[i], by name.",
    "optim": "Call opt.state_dict(full=False) for the shards on the devices of this process.",
}


class ZeroRedundancyOptimizer:
    """An optimizer whose state is sharded over devices; parameters stay replicated.

    `step(grads)` takes averaged gradients, those of `gshard.value_and_grad(loss_fn, opt.plan)`, or
    the ones that the `backward` of a `gshard.pytorch.DistributedDataParallel` has accumulated.

    Attributes:
      plan: the layout of every array, as a `gshard.Plan`.

    Example:
      >>> opt = gshard.pytorch.ZeroRedundancyOptimizer(params, optax.adam, lr=1e-3)
      >>> loss, grads = jax.jit(gshard.value_and_grad(loss_fn, opt.plan))(params, batch)
      >>> params = opt.step(grads)
      >>> opt.param_groups[0]["lr"] = 1e-4
    """

    @named_arguments(_MISSING)
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
          params: an NNX module, a `gshard.pytorch.DistributedDataParallel` or its `parameters()`, a
            tree or an iterable of arrays, or a list of groups: dictionaries of `"params"` and
            hyperparameters.
          optimizer_class: an optax factory, such as `optax.adamw`.
          process_group: devices from `gshard.distributed.new_group`, or a mesh. Default: all
            devices, or those of the `DistributedDataParallel`.
          parameters_as_bucket_view: all-gather updated parameters in buckets, not one by one.
          overlap_with_ddp: with a `DistributedDataParallel`, `backward` also updates the
            parameters, in one compiled program. `parameters_as_bucket_view` has no effect then.
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
        self._factory, self._defaults = optimizer_class, defaults
        self._make = _PARTITIONS[partition]
        target, own = parameters(params)
        self._mesh = self._mesh_of(target, process_group)
        self._overlaps = self._can_overlap(target) if overlap_with_ddp else False
        if self._overlaps and parameters_as_bucket_view:
            warn(
                "parameters_as_bucket_view is ignored with overlap_with_ddp, which all-gathers "
                "parameters in buckets anyway. Leave it out."
            )
        self._buckets = parameters_as_bucket_view or self._overlaps
        self._consolidated: tuple[Any, list[Any]] = (None, [])
        self._same = SameHyperparameters(
            "step of the ZeroRedundancyOptimizer",
            "Set those of param_groups on all processes alike.",
        )
        self._shard(target, tuple(self._group(target, i, x) for i, x in enumerate(own)))

    def __getattr__(self, name: str) -> Any:
        if name not in _INSTEAD:
            return object.__getattribute__(self, name)  # raises what Python says
        raise MissingAttributeError(
            f"ZeroRedundancyOptimizer has no attribute {name!r}. {_INSTEAD[name]}"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ArgumentTypeError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled: it updates the model that it "
            "was made for. Keep opt.state_dict(), and give it to the load_state_dict of another."
        )

    @property
    def param_groups(self) -> tuple[ParamGroup, ...]:
        """The groups of parameters, each with hyperparameters that can be changed.

        It cannot be replaced: `add_param_group` adds one.
        """
        return self._groups

    @param_groups.setter
    def param_groups(self, value: Any) -> NoReturn:
        raise GShardError(
            f"param_groups={shown(value)}: the groups cannot be replaced. Set the hyperparameters "
            'of one, such as opt.param_groups[0]["lr"] = 1e-4, or call opt.add_param_group.'
        )

    @property
    def plan(self) -> Plan:
        """The layout of every array; `print(opt.plan)` shows a table."""
        return self._engine.plan

    @property
    def ddp(self) -> Any:
        """The `DistributedDataParallel` whose gradients it uses, or None."""
        keep = self._target.accumulation
        return None if keep is None else keep.model

    @property
    def step(self) -> OptimizerStep:
        """`opt.step(grads)` updates the parameters and returns them; see `OptimizerStep`."""
        return OptimizerStep(lambda: self._engine, self._compare)

    @property
    def state(self) -> ParamStates:
        """The state of each parameter, such as `opt.state["w"]["exp_avg"]`: a snapshot.

        It all-gathers the state: all processes must read it.
        """
        return ParamStates(self.param_groups, self._engine.states())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of its `ddp`, if any; other gradients belong to the caller."""
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
        target = self._target.with_group(param_group)
        group = self._group(target, len(states), options_of(param_group))
        self._shard(target, (*self.param_groups, group))
        self._engine.load([*states, self._engine.states()[-1]])

    def state_dict(self, full: bool = True) -> dict[str, Any]:
        """Returns a snapshot: the state of each group, and the groups' hyperparameters.

        `["state"][i]` is what `optimizer_class(**hyperparameters)` keeps for the parameters of
        group i, in host memory: a plain optimizer takes it as it is. Steps do not change it.

        Args:
          full: True all-gathers the state: all processes must call it, except that after
            `consolidate_state_dict` one process may call it alone, until the next step. False
            returns, as `["shards"]`, only the shards on this process's devices, without
            communication; they can be loaded on the same number of devices.
        """
        groups = [
            {**group.saved(), "params": flatten(group.tree)[0]} for group in self.param_groups
        ]
        if not flag("full", full):
            return {"shards": self._engine.shards(), "param_groups": groups}
        of, states = self._consolidated
        fresh = of is self._engine.state
        if not fresh:
            self._same.compare(self.plan)
        if fresh:
            states = jax.tree.map(lambda x: x if is_key(x) else np.array(x), states)
        else:
            states = self._engine.states()
        return {"state": states, "param_groups": groups}

    @short_traceback
    def load_state_dict(self, state_dict: Any) -> None:
        """Sets the state, and the hyperparameters that may change. The argument is not changed.

        Args:
          state_dict: what `state_dict` returned on any number of devices, also as `load`
            read it; or the state of a plain optimizer, of several groups a list of them.

        Raises:
          GShardError: names the entries that are missing, unknown, of another shape, or different
            on another process; nothing is changed.
        """
        given: Any = state_dict if isinstance(state_dict, Mapping) else {}
        ours = bool(given) and {*given} <= {"state", "shards", "param_groups"}
        for name, entry in given.items():
            if not ours and isinstance(entry, Mapping) and "param_groups" in entry:
                raise GShardError(
                    f"load_state_dict: this is not the state of an optimizer, but its entry "
                    f"{name!r} is: pass that entry. Nothing was changed."
                )
        saved = self._saved_values(given["param_groups"]) if "param_groups" in given else []
        if ours and "shards" in given:
            self._engine.load_shards(entries(given["shards"], len(self.param_groups)))
        else:
            wanted = [group.state for group in self.param_groups]
            plain = [state_dict] if len(wanted) == 1 else state_dict
            states = matched(given.get("state", {}) if ours else plain, wanted)
            compare(states, wanted, self.plan)
            self._engine.load(states)
        for group, values in zip(self.param_groups, saved, strict=bool(saved)):
            group.restore(values)

    def _saved_values(self, given: Any) -> Sequence[Mapping[str, Any]]:
        """Returns the hyperparameters of each group in a state dict, after checking them."""
        saved = entries(given, len(self.param_groups))
        count = len(saved) if isinstance(saved, Sequence) else 0
        if count != len(self.param_groups) or not all(isinstance(x, Mapping) for x in saved):
            raise GShardError(
                f"load_state_dict: param_groups={shown(given)} are not those of "
                f"{len(self.param_groups)} groups. Nothing was changed."
            )
        for i, (group, values) in enumerate(zip(self.param_groups, saved, strict=True)):
            group.check(values, f"load_state_dict: group {i}")
        return saved

    @named_arguments({"recipient_rank": "It is to= here."})
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the state, leaf by leaf; all processes call it.

        Any of them may then call `state_dict` alone, until the next step. It is not needed if all
        processes call `state_dict`, or if there is only one.

        Args:
          to: rank of a process, as in PyTorch; every process keeps the state until the next step.
        """
        if check_integer("to", to, 0) >= jax.process_count():
            raise GShardError(
                f"consolidate_state_dict: to={to} is not a rank of {jax.process_count()} processes."
            )
        self._same.compare(self.plan)
        self._consolidated = self._engine.state, self._engine.states()

    def _compare(self) -> None:
        """Compares the hyperparameters of this step and the earlier ones, where it is due."""
        self._consolidated = None, []
        lines = [
            f"{name}={value!r} in group {i}"
            for i, group in enumerate(self.param_groups)
            for name, value in {"optimizer_class": group.name, **group.saved()}.items()
        ]
        self._same.add(self.plan, [f"parameters_as_bucket_view={self._buckets}", *lines])

    def join_hook(self, **kwargs: Any) -> None:
        """Does nothing: under `gshard.pytorch.Join` every device takes part in every step."""

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Lists, for each device, the groups of parameters that it owns, as in PyTorch."""
        if not isinstance(self._engine, Greedy):
            raise GShardError(
                "partition='even' shards every tensor over all devices; only partition='greedy' "
                "assigns full tensors to devices."
            )
        leaves = jax.tree.leaves(self._target.values())
        every = list(zip(leaves, self._engine.owners, self._target.labels, strict=True))
        return [
            [
                {"params": [x for x, *at in every if at == [device, g]]}
                for g in range(len(self.param_groups))
            ]
            for device in range(len(self._engine.loads()))
        ]

    def __repr__(self) -> str:
        engine, target = self._engine, self._target
        pairs = zip(jax.tree.leaves(target.values()), target.labels, strict=True)
        loads, size = engine.loads(), sum(x.size for x, label in pairs if label is not None)
        padding = sum(loads) - size
        fullest = (max(loads) * len(loads) - padding) / size
        return (
            f"ZeroRedundancyOptimizer({self._make.__name__.lower()}, groups: "
            f"{len(self.param_groups)}, devices: {len(loads)}; the fullest updates "
            f"{max(loads):,} elements, {fullest:.2f} of the mean, and keeps "
            f"{bytes_of(engine.state_bytes())} of state; padding: {padding:,} elements; "
            f"all-gathered: {engine.all_gathered_elements():,})"
        )

    def _mesh_of(self, target: Parameters, process_group: Any) -> tuple[Any, Any]:
        ddp = target.accumulation
        if ddp is None:
            return mesh_of(process_group, argument="process_group")
        mesh: Any = ddp.plan.mesh
        if process_group is not None:
            given, _ = mesh_of(process_group, argument="process_group")
            if given.devices.tolist() != mesh.devices.tolist():
                raise GShardError(
                    "process_group= names other devices than those of the wrapped model, which "
                    "decide. Leave it out."
                )
        return mesh, ddp.plan.group.replica or None

    def _can_overlap(self, target: Parameters) -> bool:
        why = ""
        if target.accumulation is None:
            why = "it needs a DistributedDataParallel"
        elif self._make is not Even:
            why = "partition='greedy' updates on each owner's device"
        if why:
            warn(f"overlap_with_ddp changes nothing: {why}. Leave it out.")
        return not why

    def _shard(self, target: Parameters, groups: tuple[ParamGroup, ...]) -> None:
        """Makes the state of these groups."""
        engine = self._make(target, groups, *self._mesh, self._buckets)
        self._target, self._groups, self._engine = target, groups, engine
        ddp = target.accumulation
        if ddp is not None:
            ddp.stepped_by = engine
            ddp.updating = engine if self._overlaps and isinstance(engine, Even) else None

    def _group(self, target: Parameters, i: int, options: Mapping[str, Any]) -> ParamGroup:
        me = weakref.ref(self)  # a plan holds its groups, and a class of models its plan

        def params() -> list[Any]:
            opt = me()
            now = None if opt is None else opt._target
            return [] if now is None else jax.tree.leaves(now.group_tree(now.values(), i))

        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), target.values())
        return ParamGroup(
            self._factory, self._defaults, options, target.group_tree(shapes, i), params
        )
