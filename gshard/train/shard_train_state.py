"""`shard_train_state`: makes the plan, shards the state and wraps the optimizer."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from gshard._util.arguments import named_arguments
from gshard._util.errors import GShardError, place_of, warn
from gshard._util.pytree import check_fits, flatten, map_leaves, same_leaves
from gshard._util.validation import check_choice, check_takes, flag, shown
from gshard.distributed.initialize import warn_if_not_joined
from gshard.sequence.order import ORDERS, Order
from gshard.sharding.batch_specs import SequenceDims, checked_sequence_dims
from gshard.sharding.group import Group, data_group
from gshard.sharding.keep import Keep
from gshard.sharding.layout import DEVICE, Layout
from gshard.sharding.level import LevelChoice, is_auto, parse_level
from gshard.sharding.make_plan import PlanRequest, plan_state
from gshard.sharding.padded_storage import refuse_padding, remember, warn_of_padded_model
from gshard.sharding.plan import Plan, ShardedTransformation, remember_original
from gshard.sharding.precision import as_precision
from gshard.sharding.quantized_array import (
    QuantizedArray,
    encoded,
    is_quantized,
    quantized_arrays,
)
from gshard.sharding.rules import (
    ScanAxes,
    as_rules,
    by_shape,
    first_of,
    frozen_paths,
    warn_of_unused,
)
from gshard.sharding.state_dtype import decoded_layouts
from gshard.sharding.validate import refuse_traced
from gshard.sharding.wire import as_wire, warn_of_wire
from gshard.train.auto_level import choose_plan
from gshard.train.optim.optimizer import shard_optimizer
from gshard.train.same_program import compare_programs
from gshard.train.same_state import agree_on_state, check_source
from gshard.train_state import Components, abstract, abstract_like, as_state, is_init, kind_of
from gshard.train_state.kind import is_optimizer
from gshard.train_state.linen import TrainState

if TYPE_CHECKING:
    from gshard.train_state.nnx import nnx

State = TypeVar("State", bound=TrainState)
Model = TypeVar("Model", bound="nnx.Module")
Optimizer = TypeVar("Optimizer", bound="nnx.Optimizer")


class Transformation(Protocol):
    """What has `init` and `update`: an `optax.GradientTransformation`, an `optax.MultiSteps`."""

    @property
    def init(self) -> Callable[..., Any]:
        """A function of the parameters that makes the state."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """A function of gradients, state and parameters: updates, and the new state."""
        ...


Plain = tuple[Any, Transformation]


class ShardingOptions(TypedDict, total=False):
    """The keyword arguments of `shard_train_state`, for type checkers."""

    init_args: Sequence[Any]
    min_shard_size: int
    rules: Any
    scan_axes: ScanAxes
    keep: Keep | None
    frozen: Any
    precision: Any
    wire: Any
    offload: bool
    indivisible: Literal["pad", "replicate"]
    shard_axes: str | Sequence[str] | None
    replica_axes: str | Sequence[str] | None
    sequence_order: Order
    sequence_dims: SequenceDims | None
    broadcast_from: int | None


_PAIR = "An NNX model and its optimizer are one argument, (model, optimizer)."
_INSTEAD = {  # of other libraries' arguments
    "mesh": "Pass gshard.make_mesh() for all devices.",
    "level": 'Pass "os" (ZeRO-1), "os_g" (ZeRO-2) or "p_g_os" (ZeRO-3, FSDP).',
    **dict.fromkeys(("stage", "zero_stage"), 'It is level= here, such as "zero3".'),
    **dict.fromkeys(("model", "optimizer"), _PAIR),
    "*": f"Pass options by name, such as min_shard_size=0. {_PAIR}",
    "mixed_precision": 'It is precision= here, such as "bfloat16".',
    "cpu_offload": "It is offload= here.",
}


@overload
def shard_train_state(
    state: tuple[Model, Optimizer] | Callable[..., tuple[Model, Optimizer]],
    mesh: Mesh | AbstractMesh,
    level: LevelChoice,
    **options: Unpack[ShardingOptions],
) -> tuple[tuple[Model, Optimizer], Plan]: ...
@overload
def shard_train_state(
    state: Plain | Callable[..., Plain],
    mesh: Mesh | AbstractMesh,
    level: LevelChoice,
    **options: Unpack[ShardingOptions],
) -> tuple[TrainState, Plan]: ...
@overload
def shard_train_state(
    state: State | Callable[..., State],
    mesh: Mesh | AbstractMesh,
    level: LevelChoice,
    **options: Unpack[ShardingOptions],
) -> tuple[State, Plan]: ...


@named_arguments(_INSTEAD)
def shard_train_state(
    state: Any,
    mesh: Mesh | AbstractMesh,
    level: LevelChoice,
    *,
    init_args: Sequence[Any] = (),
    min_shard_size: int = 2**14,
    rules: Any = None,
    scan_axes: ScanAxes = None,
    keep: Keep | None = None,
    frozen: Any = None,
    precision: Any = None,
    wire: Any = None,
    offload: bool = False,
    indivisible: Literal["pad", "replicate"] = "pad",
    shard_axes: str | Sequence[str] | None = None,
    replica_axes: str | Sequence[str] | None = None,
    sequence_order: Order = "contiguous",
    sequence_dims: SequenceDims | None = None,
    broadcast_from: int | None = None,
) -> tuple[Any, Plan]:
    """Shards a train state over the devices of a mesh.

    Args:
      state: a Flax `TrainState` or a subclass; an NNX `(model, optimizer)` pair; `(params, tx)`;
        any of these with abstract arrays; or a function that makes one, called with `init_args`
        inside a jitted program, so that no device and no host buffer ever holds the full state.
        Several processes must give the same, which they compare before anything is placed.
      mesh: a mesh of `gshard.make_mesh`; with an `AbstractMesh` the result is abstract.
      level: `"zero1"` or `"os"` (the optimizer state is sharded), `"zero2"` or `"os_g"` (gradients
        too), `"zero3"`, `"fsdp"` or `"p_g_os"` (parameters too), `"ddp"` or `"dp"` (nothing is
        sharded); 0 to 3 are `"ddp"`, `"zero1"`, `"zero2"` and `"zero3"`. `"auto"` takes, of the
        levels whose state and gradients fit 70 % of a device's memory, the one whose communication
        and update take the least time. It does not know how much memory activations need;
        `gshard advise` does.
      init_args: arguments of an init function.
      min_shard_size: arrays of at most this many elements are replicated; of stacked layers, one
        layer counts.
      rules: which dimension of an array is sharded: `gshard.by_path`, `gshard.by_predicate`, a
        function of a `gshard.LeafInfo`, a mapping from path pattern to dimension, or a list of
        these. Other arrays follow the default rule, by shape.
      scan_axes: the dimension that a scan over layers iterates over: a mapping from path pattern to
        dimension. It is never sharded, except by a rule of yours at `"os"` and `"os_g"`. Flax's
        metadata (an axis named `layers`, `layer` or `scan`, or one of the names given here) is read
        without it.
      keep: parameters that stay on one of the shard axes, such as experts: a mapping from path
        pattern to the axis and the dimension that is sharded over it, `{"experts/": ("expert",
        0)}`. They are never gathered over this axis, and are sharded over the others as the level
        says (page "Mixtures of experts"). Flax's metadata that names the axis
        `"expert"` is read without it.
      frozen: parameters that are not trained (Linen and plain): a pattern of paths or several, a
        function of a `gshard.LeafInfo`, or a tree of True and False. They have no gradient and no
        optimizer state, and are sharded where parameters are. Integer parameters are always frozen.
        For NNX the optimizer's `wrt=` says what is trained.
      precision: a `gshard.Precision`, or the name of a compute dtype such as `"bfloat16"`:
        `state.params` has that dtype, and the optimizer updates a sharded master copy in float32.
      wire: the dtype in which parameters are all-gathered and gradients reduce-scattered, such as
        `"int8"`: what `gather_dtype=` and `scatter_dtype=` of a `Precision` do, while parameters
        keep their dtype. By default arrays are sent in the dtypes that they have.
      offload: keep the optimizer state with its master copies, and sharded parameters, in host
        memory; they are on the device only while they are used (page "Offload").
      indivisible: what happens to a large array none of whose dimensions is a multiple of the shard
        group: `"pad"` stores it with padding, `"replicate"` leaves it replicated.
      shard_axes: mesh axes to shard over, major to minor; by default those that `make_mesh` names
        (`"shard"`, `"shard_x"`, ...), and where there is none all but the replica axes, with those
        across nodes last. Remaining axes are your own (tensor parallelism).
      replica_axes: mesh axes to replicate over; by default the one named `"replica"`, if any.
      sequence_order: with `make_mesh(sequence=)`, which slices of a sequence a device computes:
        `"zigzag"` gives each two, from both ends, so that all have as much to do in causal
        attention by `gshard.sequence.attention`. Batches, losses and outputs keep their order.
      sequence_dims: with `make_mesh(sequence=)`, the dimension of the sequence of arrays of a batch
        where it is not 1, a mapping from path pattern to dimension: `{"frames": 2}`; None for an
        array without one, which every device of the axis has in full.
      broadcast_from: the rank of a process, usually 0, whose values all processes take where they
        differ, of the state or of `init_args`; as in PyTorch's DDP. None: a difference is an error.

    Returns:
      The state, of the type given (for `(params, tx)` a `TrainState` without `apply_fn`), and the
      plan. Your arrays are copied, never aliased and never freed.

    Raises:
      GShardError: a level, mesh, axis, rule or state is not valid, or the processes do not give the
        same; nothing is changed.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "fsdp", min_shard_size=16)
      >>> plan.level.name
      'p_g_os'
    """
    options = ShardingOptions(
        init_args=init_args,
        min_shard_size=min_shard_size,
        rules=rules,
        scan_axes=scan_axes,
        keep=keep,
        frozen=frozen,
        precision=precision,
        wire=wire,
        offload=offload,
        indivisible=indivisible,
        shard_axes=shard_axes,
        replica_axes=replica_axes,
        sequence_order=sequence_order,
        sequence_dims=sequence_dims,
        broadcast_from=broadcast_from,
    )
    advice = "Lower min_shard_size= of shard_train_state, or shard them with rules=."
    sharded, plan = shard_and_advise(state, mesh, level, options, advice)
    if isinstance(mesh, Mesh) and isinstance(jax.tree.leaves(sharded)[0], jax.Array):
        warn_of_padded_model(plan)
    return sharded, plan


def shard_and_advise(
    state: Any, mesh: Mesh | AbstractMesh, level: LevelChoice, options: ShardingOptions, advice: str
) -> tuple[Any, Plan]:
    """Does what `shard_train_state` does; `advice` ends the warning of replicated parameters."""
    wanted: dict[str, Any] = {**(inspect.unwrap(shard_train_state).__kwdefaults__ or {}), **options}
    init_args, rules = wanted["init_args"], wanted["rules"]
    chosen = None if is_auto(level) else parse_level(level)
    flag("offload", wanted["offload"])
    check_source(wanted["broadcast_from"], mesh)
    group = data_group(mesh, wanted["shard_axes"], wanted["replica_axes"])
    by_size = by_shape(wanted["min_shard_size"], wanted["indivisible"])
    rule = first_of([*as_rules(rules), by_size])
    made_by = state if is_init(state) else None
    if not isinstance(init_args, Sequence):
        raise GShardError(
            f"init_args={shown(init_args)} must be a sequence of arguments, such as (key,)."
        )
    if made_by is None and init_args:
        raise GShardError("init_args= goes with an init function; state is not a function.")
    if made_by is not None:
        check_takes(made_by, "The init function is called with init_args=.", *init_args)
    given = abstract(made_by, *init_args) if made_by else as_state(state)
    kind = kind_of(given)
    template = abstract_like(given)
    kind.check(template)
    tx = kind.tx(template)
    if not is_optimizer(tx):
        raise GShardError(
            f"the optimizer of the state, tx, is {shown(tx)}: pass an optax transformation, such "
            "as TrainState.create(tx=optax.adam(1e-3), ...)."
        )
    if isinstance(tx, ShardedTransformation):
        raise GShardError(
            "this state is already sharded. Convert it to a plain state with plan.unwrap(state) "
            "first."
        )
    kind = kind.freeze(template, wanted["frozen"], frozen_paths)
    given = kind.narrow(given)
    template = abstract_like(given)
    parts = kind.split(given)
    refuse_padding(parts.params)
    refuse_padding(parts.non_trainable)
    tx = kind.tx(template)

    precision = as_precision(wanted["precision"])
    wire = as_wire(precision, wanted["wire"])
    request = PlanRequest(
        template,
        kind,
        tx,
        mesh,
        group,
        rule,
        wrap=shard_optimizer,
        scan_axes=wanted["scan_axes"],
        keep=wanted["keep"],
        precision=precision,
        wire=wire,
        offload=wanted["offload"],
        sequence_order=_checked_order(wanted["sequence_order"], group),
        sequence_dims=checked_sequence_dims(wanted["sequence_dims"], group),
        advice=advice,
    )
    plan_at = partial(plan_state, request=request)
    plan = choose_plan(plan_at, mesh) if chosen is None else plan_at(chosen)
    leaves = jax.tree.leaves((plan.params, plan.opt_state, plan.non_trainable))
    warn_of_unused("rules", rules, [layout.path for layout in leaves])
    sent = (jax.tree.leaves(tree) for tree in (plan.params, plan.grads))
    warn_of_wire(*sent, wire=wire, level=plan.level)
    if isinstance(mesh, Mesh):
        warn_if_not_joined()
        remember(plan)
    source = wanted["broadcast_from"]
    if made_by is not None and isinstance(mesh, Mesh):
        init_args = agree_on_state(plan, tuple(init_args), "init_args=", source)
        traced = trace_init(made_by, init_args, plan)
        compare_programs(plan, f"the init function {place_of(made_by)}", traced)
        parts = traced.lower().compile()()
    else:
        split = agree_on_state(plan, kind.split(given), "the train state", source)
        if isinstance(mesh, AbstractMesh) or any(
            isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(given)
        ):
            return plan.abstract_state(), plan
        refuse_traced(jax.tree.leaves(split), "shard_train_state")
        parts = shard_leaves(plan.with_master(split), plan)
    static = kind.split(template).static
    parts = dataclasses.replace(parts, static=static)
    remember_original(state, plan)
    return kind.merge(parts, given, plan.optimizer), plan


def _checked_order(order: Any, group: Group) -> Order:
    """Refuses an unknown order, and warns of one that changes nothing."""
    check_choice("sequence_order", order, ORDERS)
    if order != "contiguous" and group.sequence == 1:
        warn(
            f"sequence_order={order!r} changes nothing on a mesh without a sequence axis. Leave it "
            "out, or make one: gshard.make_mesh(sequence=4)."
        )
    return order


def trace_init(init: Callable[..., Any], init_args: Sequence[Any], plan: Plan) -> Any:
    """Traces the jitted init function, which makes every array directly in its layout."""

    def make() -> Components:
        parts = plan.with_master(plan.kind.split(plan.kind.narrow(as_state(init(*init_args)))))
        layouts = decoded_layouts(plan.layouts)
        same_leaves(parts, flatten(layouts)[0], "what the init function makes is")
        map_leaves(lambda p, x: check_fits(x, p.dtype, p.path), layouts, parts)
        parts = map_leaves(lambda p, x: p.pad(jnp.asarray(x, p.dtype)), layouts, parts)
        if quantized_arrays(plan.opt_state):
            # Moments begin as zeros, and XLA would spend seconds on computing their codes itself.
            opt_state = jax.lax.optimization_barrier(parts.opt_state)
            parts = dataclasses.replace(parts, opt_state=opt_state)
        return encoded(parts, plan.layouts)

    return jax.jit(make, out_shardings=plan.shardings).trace()


def shard_leaves(parts: Components, plan: Plan) -> Components:
    """Copies every leaf to the layout that the plan gives it."""
    layouts, structure = jax.tree.flatten(plan.layouts, is_leaf=is_quantized)
    pairs = zip(jax.tree.leaves(parts), layouts, strict=True)
    with jax.transfer_guard("allow"):  # these are asked for
        return structure.unflatten(shard_array(x, layout, plan) for x, layout in pairs)


def shard_array(x: Any, layout: Any, plan: Plan) -> Any:
    """Copies one array to its layout, as a `QuantizedArray` if that is one of two layouts."""
    if not is_quantized(layout):
        return shard_leaf(x, layout, plan)
    return encode_array(
        shard_leaf(x, decoded_layouts(layout).in_memory(DEVICE), plan), layout, plan
    )


def encode_array(x: jax.Array, layout: QuantizedArray, plan: Plan) -> QuantizedArray:
    """Encodes an array, in storage shape, into the layouts of its codes and scales."""
    shardings = plan.sharding(layout.codes), plan.sharding(layout.scales)
    return _encoder(*shardings, layout.axis, layout.shards, layout.dtype)(x)


@lru_cache(maxsize=256)
def _encoder(codes: Any, scales: Any, *blocks: Any) -> Callable[[jax.Array], QuantizedArray]:
    shardings = QuantizedArray(codes, scales, *blocks)
    return jax.jit(lambda x: QuantizedArray.encode(x, *blocks), out_shardings=shardings)


def shard_leaf(x: Any, layout: Layout, plan: Plan) -> jax.Array:
    """Copies one leaf; `device_put` would share its buffer, which donating the result deletes."""
    if jnp.issubdtype(layout.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        layout = dataclasses.replace(layout, shape=data.shape, dtype=data.dtype)
        return jax.random.wrap_key_data(shard_leaf(data, layout, plan), impl=jax.random.key_impl(x))
    sharding = plan.sharding(layout)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:

        def copy(x: jax.Array) -> jax.Array:
            return layout.pad(jnp.copy(x).astype(layout.dtype))

        with jax.disable_jit(False):  # else it stays where it is
            return jax.jit(copy, out_shardings=sharding)(x)
    check_fits(x, layout.dtype, layout.path or "the step number")
    host = layout.pad(np.asarray(x, dtype=layout.dtype))
    return jax.make_array_from_callback(
        layout.stored_shape, sharding, lambda index: np.array(host[index])
    )
