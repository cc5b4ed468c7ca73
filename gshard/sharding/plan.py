"""The plan: the layouts of all arrays of a train state, decided once and used everywhere."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from rich.table import Table

from gshard._util.errors import GShardError, some, warn
from gshard._util.html import html_of
from gshard._util.pytree import flatten, map_leaves, same_leaves
from gshard._util.text import text_of, text_table
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import shown
from gshard.sequence.order import Order
from gshard.sharding.batch_specs import SequenceDims, sequence_dims, spec_of
from gshard.sharding.group import Group
from gshard.sharding.host_arrays import full_on_host
from gshard.sharding.layout import DEVICE, Layout, all_replicated
from gshard.sharding.level import Level, LevelChoice
from gshard.sharding.master_copies import latest_copies
from gshard.sharding.precision import Precision
from gshard.sharding.quantized import BlockCodes
from gshard.sharding.quantized_array import decoded, encoded, quantized_arrays
from gshard.sharding.state_dtype import decoded_layouts
from gshard.train_state import Components, Kind, kind_of
from gshard.train_state.components import ShardedOptState


@dataclass(frozen=True)
class UpdateProducts:
    """The matrix products of an optimizer in one update, as for Muon or Shampoo.

    Sharded matrices that are equal are shared among the devices: each is computed by one of them.
    Decompositions (`eigh`, `qr`, ...) are not counted.

    Attributes:
      flops: FLOP of one device, two for each multiply-add.
      one_device: FLOP without sharding.
      sent: elements that all-to-alls send to the devices that compute and back, per device, and
        once for each mesh axis.
      unshared: pairs of parameters and FLOP, of what every device computes.
    """

    flops: int
    one_device: int
    sent: int = 0
    unshared: tuple[tuple[str, int], ...] = ()


class ShardedTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that carries the plan it follows."""

    plan: Plan
    fetch_sizes: Callable[[], tuple[int, ...]]  # returns `plan.fetched_at_once`
    products: Callable[[], UpdateProducts | None]  # returns `plan.update_products`

    def __deepcopy__(self, _: dict[int, Any]) -> ShardedTransformation:
        return self  # it has no arrays

    def __copy__(self) -> ShardedTransformation:
        return self

    def __reduce__(self) -> NoReturn:
        raise GShardError(
            "a sharded train state cannot be pickled: it belongs to the devices of this process. "
            "Save it with gshard.Checkpointer, or pickle gshard.full_params(state)."
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """How every array of a train state is stored; `shard_train_state` makes one.

    `print(plan)` shows a table of the parameters with bytes per device and reasons.

    Attributes:
      level: what is sharded.
      mesh: the device mesh; abstract when planning without devices.
      group: the shard, replica and model-parallel axes of the mesh.
      params: a tree of `Layout`s of the parameters.
      grads: a tree of `Layout`s of the reduced gradients, which are also the layouts of the local
        shards that a device updates.
      opt_state: layouts of the user's optimizer state. A `QuantizedArray` has those of its codes
        and scales.
      master: layouts of the master copies that the optimizer updates, by path of the parameter.
      non_trainable: layouts of everything else, by name.
      precision: dtypes to compute and reduce in; None for the dtypes of the user's state.
      kind: the kind of train state, which converts it to `Components` and back.
      tx: the user's own optimizer.
      template: the user's state with abstract arrays of logical shape.
      at_level: makes the plan of the same state, with the same options, at another level.
      wrap: wraps the user's optimizer so that it follows a plan.
      not_quantized: with a `state_dtype`, why arrays of the optimizer state that belong to a
        parameter keep their dtype, by path.
      sequence_order: which slices of a sequence a device computes, over a sequence axis.
      named_sequence_dims: the dimension of the sequence of arrays of a batch, by path patterns.

    Example:
      >>> state, plan = gshard.shard_train_state(
      ...     (params, tx), gshard.make_mesh(), "zero3", min_shard_size=0)
      >>> plan.params["w"].stored_shape, plan.params["w"].shard_shape
      ((64, 32), (8, 32))
      >>> plan.unwrap(state).params["w"].shape
      (64, 32)
    """

    level: Level
    mesh: Mesh | AbstractMesh
    group: Group
    params: Any
    grads: Any
    opt_state: Any
    master: dict[str, Layout]
    non_trainable: dict[str, Any]
    precision: Precision | None
    kind: Kind
    tx: optax.GradientTransformation
    template: Any
    at_level: Callable[[LevelChoice], Plan]
    wrap: Callable[[Plan], ShardedTransformation]
    not_quantized: Mapping[str, str] = field(default_factory=dict)
    sequence_order: Order = "contiguous"
    named_sequence_dims: SequenceDims = field(default_factory=dict)

    def __copy__(self) -> Plan:
        return self  # it is never changed

    def __deepcopy__(self, _: dict[int, Any]) -> Plan:
        return self

    def __reduce__(self) -> NoReturn:
        raise GShardError(
            "a plan cannot be pickled, nor a step or a loader that holds one. Make it in the "
            "process that uses it."
        )

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Mesh axes that examples are sharded over, for `axis_name=` of a synchronized norm."""
        return self.group.batch_axes

    @property
    def batch_spec(self) -> jax.P:
        """The `PartitionSpec` of examples, on dimension 0; see `batch_specs` for sequences."""
        return jax.P(self.group.batch_axes)

    def batch_specs(self, batch: Any) -> Any:
        """Returns the `PartitionSpec` of each array of a batch.

        Examples are sharded over the data axes and, if the mesh has a sequence axis, dimension 1
        over it, or the dimension that `sequence_dims=` names.

        Args:
          batch: the global batch; shapes alone are read.
        """
        leaves, structure = jax.tree.flatten(batch)
        pairs = zip(leaves, self.sequence_dims(batch), strict=True)
        return structure.unflatten(spec_of(x, dim, self.group) for x, dim in pairs)

    def sequence_dims(self, batch: Any) -> list[int | None]:
        """Returns the dimension of each array of a batch that the sequence axis shards, or None."""
        slices = 2 if self.sequence_order == "zigzag" else 1
        return sequence_dims(batch, self.group, slices, self.named_sequence_dims)

    @property
    def device_spec(self) -> jax.P:
        """The `PartitionSpec` of an array with one entry for each device of the data axes."""
        return jax.P(self.group.axes)

    @functools.cached_property
    def optimizer(self) -> ShardedTransformation:
        """The user's optimizer, wrapped so that it follows this plan."""
        return self.wrap(self)

    @functools.cached_property
    def fetched_at_once(self) -> tuple[int, ...]:
        """Bytes per device of each group of arrays that an update fetches from the host.

        There is a single group if the optimizer computes across parameters.
        """
        return self.optimizer.fetch_sizes() if self.bytes_per_device["host"] else ()

    @functools.cached_property
    def update_products(self) -> UpdateProducts | None:
        """The matrix products of an update; None for an optimizer without any.

        Also None for an optimizer that needs arguments which a train step does not give.
        """
        try:
            return self.optimizer.products()
        except (GShardError, TypeError, ValueError, AttributeError, LookupError):
            return None

    def sharding(self, layout: Layout | None = None) -> NamedSharding:
        """Returns the `NamedSharding` of a layout, with its memory; replicated without a layout."""
        if layout is None:
            return NamedSharding(self.mesh, jax.P())
        memory = layout.memory if layout.on_host else None  # None: the backend's default
        return NamedSharding(self.mesh, layout.spec, memory_kind=memory)

    @property
    def layouts(self) -> Components:
        """The layouts of all components of the state."""
        new = ShardedOptState(None, {})
        step = self.kind.split(self.template).step
        step, scaler, guard = (all_replicated(x, self.group) for x in (step, new.scaler, new.guard))
        opt_state = ShardedOptState(self.opt_state, self.master, scaler, guard)
        return Components(self.params, opt_state, step, self.non_trainable)

    @functools.cached_property
    def decoded_opt_state(self) -> Any:
        """The layouts of the optimizer state while it is updated, without quantized arrays."""
        return decoded_layouts(self.opt_state)

    @property
    def shardings(self) -> Components:
        """The sharding of every array of the state."""
        return jax.tree.map(self.sharding, self.layouts)

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes stored per device: by component in device memory, and in total on the `host`."""
        found: dict[str, int] = {"params": 0, "opt_state": 0, "non_trainable": 0, "host": 0}
        layouts = self.layouts
        for name in ("params", "opt_state", "non_trainable"):
            for x in jax.tree.leaves(getattr(layouts, name)):
                found["host" if x.on_host else name] += x.bytes_per_device
        return found

    @property
    def gathers(self) -> bool:
        """Whether the loss needs any all-gather: of parameters or non-trainable state."""
        return any(x.dim is not None for x in jax.tree.leaves((self.params, self.non_trainable)))

    @property
    def rounds_at_random(self) -> bool:
        """Whether gradients are sent with stochastic rounding, which needs the step number."""
        sent = (x.scattered_as for x in jax.tree.leaves(self.grads) if x.dim is not None)
        return any(how is not None and how.stochastic for how in sent)

    def pin(self, tree: Any, layouts: Any) -> Any:
        """Pads logical arrays inside a jitted program and constrains them to their layouts."""
        return self._constrained(map_leaves(lambda x, p: p.pad(x), tree, layouts), layouts)

    def encode(self, inner: Any, before: Any = None) -> Any:
        """Encodes an optimizer state in storage shapes, and constrains codes and scales.

        What has not changed since the encoded state `before` keeps its codes.
        """
        new = encoded(inner, self.opt_state, before)
        return inner if new is inner else self._constrained(new, self.opt_state)

    def _constrained(self, tree: Any, layouts: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        shardings = [self.sharding(x.in_memory(DEVICE)) for x in jax.tree.leaves(layouts)]
        # one call for all, of which each takes long
        return structure.unflatten(jax.lax.with_sharding_constraint(leaves, shardings))

    def abstract_components(self) -> Components:
        """Returns every array of the state as stored, abstract, with its sharding."""
        return jax.tree.map(self.abstract, self.layouts)

    def abstract(self, layout: Layout) -> jax.ShapeDtypeStruct:
        """Returns one array as stored, abstract, with its sharding."""
        sharding = self.sharding(layout)
        return jax.ShapeDtypeStruct(layout.stored_shape, layout.dtype, sharding=sharding)

    def with_master(self, parts: Components) -> Components:
        """Adds master copies to the components of a plain state, in the user's dtypes."""
        leaves = dict(zip(*flatten(parts.params)[:2], strict=True))
        master = {path: leaves[path] for path in self.master}
        return dataclasses.replace(parts, opt_state=ShardedOptState(parts.opt_state, master))

    def master_params(self, params: Any, opt_state: ShardedOptState) -> tuple[Any, Any]:
        """Returns the parameters, or their master copies where there are any, and their layouts.

        A parameter that was replaced takes precedence over its old master copy.
        """
        paths, leaves, structure = flatten(params)
        master = latest_copies(self, params, opt_state.master)
        leaves = [master.get(p, x) for p, x in zip(paths, leaves, strict=True)]
        layouts = jax.tree.map(lambda x: self.master.get(x.path, x), self.params)
        return structure.unflatten(leaves), layouts

    def output(self, tree: Any) -> Any:
        """Casts auxiliary and evaluation outputs to the output dtype."""
        return tree if self.precision is None else self.precision.output(tree)

    def abstract_state(self) -> Any:
        """Returns the sharded train state with abstract arrays, as the target of a restore."""
        static = self.kind.split(self.template).static
        parts = dataclasses.replace(self.abstract_components(), static=static)
        return self.kind.merge(parts, self.template, self.optimizer)

    @short_traceback
    def unwrap(self, state: Any) -> Any:
        """Returns the user's plain state: host arrays of logical shape and the user's optimizer.

        Args:
          state: a sharded train state of this plan.

        Raises:
          GShardError: the state is of another kind or another plan, or is plain already.
        """
        check_state(state, self, "plan.unwrap(state)")
        parts, layouts = self.kind.split(state), self.layouts
        if not isinstance(parts.opt_state, ShardedOptState):
            raise GShardError("plan.unwrap(state): the state is plain already. Use it as it is.")
        for what, tree, wanted in (
            ("parameters are", parts.params, self.params),
            ("optimizer state is", parts.opt_state.inner, self.opt_state),
            ("further fields are", parts.non_trainable, self.non_trainable),
        ):
            same_leaves(tree, flatten(wanted)[0], f"plan.unwrap(state): the {what}")
        full = Components(
            full_on_host(*self.master_params(parts.params, parts.opt_state)),
            decoded(full_on_host(parts.opt_state.inner, self.opt_state)),
            full_on_host(parts.step, layouts.step),
            full_on_host(parts.non_trainable, layouts.non_trainable),
            parts.static,
        )
        return self.kind.plain(self.kind.merge(full, state, self.kind.plain_tx(self.tx)))

    def __repr__(self) -> str:
        return f"Plan(level={self.level.name!r}, group={self.group}, {self.bytes_per_device})"

    def __str__(self) -> str:
        """A table of the parameters and non-trainable state, and a line of totals."""
        paths = [x.path for x in jax.tree.leaves((self.params, self.non_trainable))]
        return text_of(self._report(), 120 + max(map(len, paths), default=0))

    def _repr_html_(self) -> str:
        """What a notebook shows: the same as `print(plan)`."""
        return html_of(self._report())

    def _report(self) -> list[Table | str]:
        names = ("parameter", "shape", "stored", "gradient", "reason")
        table = text_table(None, names, ("bytes per device",))
        trained = zip(jax.tree.leaves(self.params), jax.tree.leaves(self.grads), strict=True)
        others = [(layout, None) for layout in jax.tree.leaves(self.non_trainable)]
        for stored, reduced in [*trained, *others]:
            table.add_row(
                stored.path,
                f"{stored.dtype}{list(stored.shape)}",
                describe_sent(stored, stored.gathered_as),
                describe_sent(reduced, reduced.scattered_as) if reduced else "none",
                (reduced or stored).reason,
                f"{stored.bytes_per_device:,}",
            )
        group = self.group
        axes = "".join(f", model axis {name!r} of {size}" for name, size in group.model_axes)
        sizes = ", ".join(f"{name} {n:,} B" for name, n in self.bytes_per_device.items())
        parts: list[Table | str] = [
            f"level {self.level.name}: {group.size} devices {group.shard} x "
            f"{group.replicas} replicas{axes}",
            table,
            f"stored per device: {sizes}",
        ]
        if found := quantized_arrays(self.opt_state):
            reasons = [f"{path} ({why})" for path, why in self.not_quantized.items()]
            kept = f"; not {some(reasons, most=3)}" if reasons else ""
            parts.append(f"in 8 bits: {len(found)} arrays of the optimizer state{kept}")
        try:
            fetched = self.fetched_at_once
        except Exception:  # the optimizer needs arguments of the user's own loop
            fetched = ()
        if fetched:
            parts.append(
                f"an update fetches what is on the host in {len(fetched)} group"
                f"{'s' if len(fetched) > 1 else ''}, the largest of {max(fetched):,} B"
            )
        return parts


def check_call(fn: Any, plan: Any, call: str) -> None:
    """Refuses arguments that are missing or swapped."""
    if not callable(fn) or not isinstance(plan, Plan):
        raise GShardError(
            f"{call} was called with ({shown(fn)}, {shown(plan)}). Pass a function, and the plan "
            "that gshard.shard_train_state returned."
        )


# Of each plan, the state or NNX model that it was made for, which its steps do not train.
_originals: weakref.WeakKeyDictionary[Plan, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def remember_original(state: Any, plan: Plan) -> None:
    """Notes the user's state, or NNX `(model, optimizer)`, which `plan` was made for."""
    try:
        _originals[plan] = weakref.ref(_model_of(state))
    except TypeError:  # a tuple of parameters and optimizer is no state for a step anyway
        return


def _model_of(state: Any) -> Any:
    return state[0] if isinstance(state, tuple) and state else state


def original_of(plan: Plan) -> Any:
    """Returns the user's state, or NNX model, which `plan` was made for; None if it is gone."""
    return _originals.get(plan, lambda: None)()


def refuse_original(state: Any, plan: Plan, call: str) -> None:
    """Refuses the state that `plan` was made for: where nothing is sharded, it would fit."""
    original = original_of(plan)
    if original is not None and _model_of(state) is original:
        names = plan.kind.arguments
        returned = names[0] if len(names) == 1 else f"({', '.join(names)})"
        raise GShardError(
            f"{call}: this is the {names[0]} that you gave to gshard.shard_train_state. Steps "
            f"train a copy of it: use the one that shard_train_state returned, {returned}, plan = "
            f"gshard.shard_train_state({returned}, ...). To evaluate the values from before "
            "training too, call shard_train_state a second time and pass what that call returned."
        )


def check_state(state: Any, plan: Plan, call: str, inference: bool = False) -> None:
    """Refuses a state of another kind than the plan's."""
    if inference and plan.kind.is_inference(state):
        return
    try:
        fits = type(kind_of(state)) is type(plan.kind)
    except GShardError:
        fits = False
    if not fits:
        other = inference and "state" in plan.kind.arguments
        raise GShardError(
            f"{call}: state is {shown(state)}. Pass what gshard.shard_train_state returned with "
            "this plan, in this order."
            + (" For other parameters pass state.replace(params=...)." if other else "")
        )


def check_optimizer(state: Any, plan: Plan, call: str) -> None:
    """Refuses a state whose optimizer was replaced, since the plan's would be used instead."""
    tx, same = plan.kind.tx(state), plan.kind.trains_the_same(state)
    if not isinstance(tx, ShardedTransformation) or not same:
        what = "optimizer" if same else "wrt= of the optimizer"
        raise GShardError(
            f"{call}: the {what} of this state was replaced, and the plan's would be used. Keep "
            "the one that gshard.shard_train_state returned; for another optimizer shard "
            "plan.unwrap(state).replace(tx=...) again; with NNX model, _ = plan.unwrap((model, "
            "optimizer)), then (model, nnx.Optimizer(model, tx, wrt=...)). (A learning rate can "
            "change inside optax.inject_hyperparams.)"
        )
    ours, given = ((x.init, x.update) for x in (plan.tx, tx.plan.tx))
    if given != ours:
        warn(
            f"{call}: the state was sharded with another optimizer than this plan's, whose state "
            "has the same structure; the plan's optimizer is used. To silence this, give both "
            "calls of gshard.shard_train_state the same optimizer object."
        )


def describe_sent(layout: Layout, sent: BlockCodes | None) -> str:
    """Describes what one device stores, and in which codes a collective sends it."""
    stored = describe_layout(layout)
    return stored if sent is None or layout.dim is None else f"{stored}, sent as {sent}"


def describe_layout(layout: Layout) -> str:
    """Describes what one device stores: `dim 0 / 8` or `replicated`, and whether on the host."""
    pad = f" + {layout.padding} padded" if layout.padding else ""
    own, kept = [], layout.kept
    if kept is not None:
        own.append(f"kept on {kept.axis}, dim {kept.dim} / {kept.devices}")
    if layout.dim is not None:
        own.append(f"dim {layout.dim} / {layout.group.size}{pad}")
    over = [
        f"dim {d} over {', '.join(names)}" for d, names in enumerate(layout.model_axes) if names
    ]
    return ", ".join([*own, *over] or ["replicated"]) + (", on host" if layout.on_host else "")
