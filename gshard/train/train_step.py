"""`make_train_step`: all stages of a step in one jitted program that keeps the plan's layouts."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gshard._util import events
from gshard._util.arguments import named_arguments
from gshard._util.closure import OutsideValues
from gshard._util.errors import GShardError, place_of, some
from gshard._util.in_flight import limit_in_flight
from gshard._util.text import text_of
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import names_of
from gshard.data.batch import check_examples, refuse_iterator, shard_batch
from gshard.sharding.budget import Budget, budget
from gshard.sharding.level import Accumulate
from gshard.sharding.plan import (
    Plan,
    check_call,
    check_optimizer,
    check_state,
    refuse_original,
)
from gshard.sharding.validate import TreeChecker, placed
from gshard.train import loss_check
from gshard.train.batch_numbers import BatchNumbers
from gshard.train.comm.buckets import BUCKET_SIZE, END_BUCKET_SIZE
from gshard.train.global_loss.transfers import Transfer, transfers_table
from gshard.train.late_checks import late_checks
from gshard.train.latest_state import LatestState
from gshard.train.made_in_loop import MadeInLoop
from gshard.train.nonfinite_leaves import flags_sharding, watch_of
from gshard.train.options import (
    MAX_BAD_STEPS,
    LossSemantics,
    TrainStepOptions,
    check_options,
)
from gshard.train.padding_mask import MaskCheck
from gshard.train.post_update import warn_of_fixed_fields
from gshard.train.random_keys import typed_key
from gshard.train.replicas import ReplicaCheck
from gshard.train.same_program import ProgramCheck
from gshard.train.stages import Stages
from gshard.train.tracing import explain_debug_nans, paused_collector
from gshard.train_state import Components
from gshard.train_state.components import ShardedOptState
from gshard.train_state.nonfinite import GradScaler

State = TypeVar("State")


_INSTEAD = {  # of other libraries' arguments
    "plan": "Pass the plan that shard_train_state returned.",
    "model": "The model is an argument of the loss; a step is called as step(state, batch).",
    "optimizer": "It is part of the state that shard_train_state shards.",
    "loss": "It is loss_fn= here.",
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulation_steps", "accumulate_steps"),
        "It is micro_batches= here: the batch has the examples of all of them.",
    ),
    **dict.fromkeys(
        ("max_grad_norm", "clip_norm", "grad_clip"),
        "Make the optimizer optax.chain(optax.clip_by_global_norm(max_norm), ...).",
    ),
    "donate_argnums": "It is donate= here: True or False.",
}


@named_arguments(_INSTEAD)
def make_train_step(
    loss_fn: Callable[..., Any],
    plan: Plan,
    *,
    has_aux: bool = False,
    mutable: str | Sequence[str] = (),
    rng: jax.Array | None = None,
    scaler: GradScaler | None = None,
    skip_nonfinite: bool | None = None,
    max_bad_steps: int | None = MAX_BAD_STEPS,
    micro_batches: int = 1,
    accumulate: Accumulate = "level",
    reshard_after_forward: bool | int = True,
    prefetch: bool = True,
    sync_buffers: bool = False,
    bucket_size: int = BUCKET_SIZE,
    end_bucket_size: int = END_BUCKET_SIZE,
    loss_semantics: LossSemantics = "global",
    gather_limit: int | None = None,
    post_update: Callable[..., Any] | None = None,
    donate: bool = True,
    check_loss: bool = True,
    check_replicas: int | None = None,
) -> TrainStep:
    """Compiles a training step for a state that `shard_train_state` sharded.

    Write the loss as for one device: it is the loss of the whole batch (`loss_semantics`).

    Linen: `state, metrics = step(state, batch)`. NNX: `metrics = step(model, optimizer, batch)`, in
    place. `metrics` holds device arrays: `loss` and `grad_norm` (float32 scalars
    of the global batch; float64 if the loss, or the gradients, are), `skipped_steps` (int32
    scalar), with `has_aux` `aux`, and with a scaler `loss_scale` (float32 scalar, of this step).

    A step whose gradient norm is not finite, because of any entry on any device, is skipped (see
    `skip_nonfinite`): it changes only the counts of skipped steps and, with a scaler, the scaler's
    state. A step whose loss is a quotient of sums over examples, such as a masked mean, with a
    denominator of 0 is always skipped, and does not change the scaler's state either.

    Args:
      loss_fn: Linen `loss_fn(params, batch)`, NNX `loss_fn(model, batch)`: a floating scalar, or
        `gshard.Weighted(sum, weight)`. A Linen loss that names `rng` or further fields of the state
        (`batch_stats`, ...) as keyword arguments is given them; one that takes `**kwargs` is given
        `rng` and what `mutable=` names.
      plan: the plan of `shard_train_state`.
      has_aux: the loss returns `(loss, aux)`; aux is a tree of numbers and arrays, of the whole
        batch. With `"per_device"` it is floating and averaged, `gshard.Weighted`, or
        `gshard.Reduced(x, by)`: a sum, a maximum, ...
      mutable: fields of the state for which the loss returns new values: `(loss, {name: value})`,
        or `(loss, (aux, {name: value}))`. They are those of the whole batch. With `"per_device"`
        floating values become their mean over devices, others their maximum.
      rng: a key (`jax.random.key(0)`) for a Linen loss that names `rng`; folded with the step. Keys
        in further fields of a Linen state, typed or old-style, are folded too, unless `mutable=`
        names the field. With `"per_micro_batch"` both are also folded with the micro-batch, with
        `"per_device"` with device and micro-batch.
      scaler: a `gshard.GradScaler`, for float16.
      skip_nonfinite: whether a step whose gradient norm is not finite is skipped. With False the
        optimizer gets that gradient, as on one device. None: True, unless the optimizer handles
        such gradients itself (`optax.zero_nans`, `optax.apply_if_finite`, `optax.MultiSteps` with
        `should_skip_update_fn=`) and there is no scaler.
      max_bad_steps: number of skipped non-finite steps in a row after which the step raises a
        `NonFiniteError`, at most two steps late; None for never. With a dynamic loss scale, up to
        ten times as many steps are skipped while it is above 1.
      micro_batches: number of slices in which each device processes its examples, one after the
        other (k).
      accumulate: how gradients accumulate over micro-batches: `"level"` (dp, os: local; os_g,
        p_g_os: scatter; a single micro-batch is scattered), `"local"` (each device adds up its own
        gradients, which are reduced once at the end, small arrays in buckets), `"scatter"` (each is
        reduce-scattered over the shard group and 1/N kept; replicas and replicated parameters are
        summed at the end) or `"sync"` (each is reduced over all devices at once, and only reduced
        gradients are added up).
      reshard_after_forward: at `"p_g_os"`, sharded parameters are all-gathered again in the
        backward pass (`True`), kept unsharded from the forward pass (`False`), or kept sharded over
        sub-groups of this many devices (an int that divides the shard group) and gathered within
        them. What `jax.checkpoint` recomputes is gathered again unless this is `False`.
      prefetch: whether the all-gather of a sharded parameter overlaps with the computation before
        its use; with False it waits for that computation.
      sync_buffers: with `"per_device"`, take the new values of `mutable` from the first device
        instead of their mean.
      bucket_size: elements of one bucket; 0 for no buckets. On CPU, in one process, XLA packs
        all-reduces by default.
      end_bucket_size: elements of the first and of the last all-reduce of full gradients.
      loss_semantics: `"global"`: the loss of the whole batch, as the same code computes it on one
        device; gshard adds collectives where it needs other devices' examples. With several
        micro-batches, a loss that needs all examples at once, such as an RMSE, is refused.
        `"per_micro_batch"`: the loss of each micro-batch over all devices, averaged over the
        micro-batches. `"per_device"`: each device computes the loss of its own examples, and the
        losses are averaged, as in PyTorch's DDP.
      gather_limit: bytes that one operation of a global loss may all-gather; above, the error
        names its line. By default 64 MiB, or 1 % of `gshard.budget(plan).wire_bytes` if that
        is more.
      post_update: runs inside the compiled step, after an update that was not skipped, such as for
        an average of the parameters. Linen: `post_update(state) -> state`, NNX:
        `post_update(model, optimizer)`, in place. It sees the state as `plan.unwrap` gives it: your
        own optimizer's state, logical shapes, and with a `Precision` the master copies. Whatever it
        changes keeps its path, shape, dtype and layout.
      donate: whether the step reuses the memory of the state that it is given.
      check_loss: whether, with `"per_device"`, the first call warns if the loss is not a mean over
        examples (a masked mean, a sum, or a `gshard.Weighted` whose sum is already divided by its
        weight). It evaluates up to 8 examples of each device, forward only. A loss that
        communicates by itself is not checked. GSHARD_CHECK_LOSS=0 in the environment of every
        process turns the check off as well.
      check_replicas: number of steps after which the copies of parameters that several devices
        store are compared bit by bit, such as 100; None for never. If they differ, because a device
        computes or stores something wrong, a step raises at most two steps later, and nothing is
        saved. Inside a `jit` of your own nothing is compared.

    Returns:
      The step: `step(state, batch)` returns `(state, metrics)`; for NNX `step(model, optimizer,
      batch)` returns `metrics`. `step.lower(state, batch)` lowers it, like a `jax.jit` function.

    Raises:
      GShardError: an option is not valid; at the call, the batch or state does not fit the plan.
      DonatedStateError: at the call, the state was given to an earlier step.
      NonFiniteError: at the call, `max_bad_steps` steps in a row had non-finite gradients.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "zero2", min_shard_size=16)
      >>> step = gshard.make_train_step(loss_fn, plan)
      >>> state, metrics = step(state, batch)
      >>> float(metrics["loss"])
      4096.0
    """
    check_call(loss_fn, plan, "make_train_step(loss_fn, plan)")
    plan.kind.check_step(plan.template, loss_fn, rng)
    options = TrainStepOptions(
        has_aux=has_aux,
        micro_batches=micro_batches,
        accumulate=accumulate,
        bucket_size=bucket_size,
        end_bucket_size=end_bucket_size,
        loss_semantics=loss_semantics,
        gather_limit=gather_limit,
        sync_buffers=sync_buffers,
        reshard_after_forward=reshard_after_forward,
        prefetch=prefetch,
        mutable=names_of("mutable", mutable),
        rng=None if rng is None else jnp.copy(typed_key(rng)),  # it may be a field of the state
        scaler=scaler,
        skip_nonfinite=skip_nonfinite,
        max_bad_steps=max_bad_steps,
        post_update=post_update,
        donate=donate,
        check_loss=check_loss,
        check_replicas=check_replicas,
    )
    check_options(plan, options)
    return TrainStep(loss_fn, plan, options)


class TrainStep:
    """The train step that `make_train_step` returns; call it, or `lower` it as a jitted function.

    `print(step)` shows its main options and what its loss communicates.

    Attributes:
      plan: the layout of every array.
      options: those of `make_train_step`.
      jitted: a function of the leaves of the state, their structure, the batch, the key and
        the numbers of the batch.
      numbers: checks that all processes give the batches of the same step.
    """

    def __init__(self, loss_fn: Callable[..., Any], plan: Plan, options: TrainStepOptions):
        self.plan, self.options, self._check_loss = plan, options, loss_check.is_on(options)
        name, wanted = f"the loss {place_of(loss_fn)}", plan.abstract_components()
        self._loss_fn, self._stages = loss_fn, Stages(loss_fn, plan, options, name)
        self._scaler = self._stages.scaler
        self._watch = watch_of(plan, options.max_bad_steps, self._scaler is not None)
        self._latest, self._in_use = LatestState(plan.kind), threading.RLock()
        self._check = TreeChecker(wanted, "the state is", donated=options.donate)
        self._check_program = ProgramCheck(plan, f"the train step of {place_of(loss_fn)}", options)
        self.numbers, self._late_checks = BatchNumbers(plan), late_checks(plan)
        self._replicas = ReplicaCheck(plan, options.check_replicas)
        self._check_mask = MaskCheck(f"the step of {name}", prefix="1/")
        self._outside = [OutsideValues(loss_fn, name)]
        if options.post_update is not None:
            advice = "Keep it in a field of the state, as an array"
            self._outside.append(OutsideValues(options.post_update, "post_update=", advice))
        others = dataclasses.replace(options, rng=None, post_update=None)  # may be new each time
        self._made = MadeInLoop(plan, "make_train_step", loss_fn, repr(others))
        self._told: set[str] = set()  # fixed fields that were warned of
        shardings, same = [x.sharding for x in jax.tree.leaves(wanted)], plan.sharding()
        self._rng = options.rng
        if options.rng is not None and isinstance(plan.mesh, Mesh):  # not copied again in each step
            form = jax.ShapeDtypeStruct((), options.rng.dtype, sharding=same)
            self._rng = placed(options.rng, form, "rng=")
        self.jitted: Any = jax.jit(
            self._stages.train_step,
            static_argnums=1,
            donate_argnums=(0,) if options.donate else (),
            out_shardings=(shardings, same, same, same, flags_sharding(plan)),
        )

    @property
    def loss_transfers(self) -> tuple[Transfer, ...] | None:
        """What the loss communicates in its forward pass; None before the first call."""
        return self._stages.loss_transfers

    @property
    def budget(self) -> Budget:
        """The memory and traffic of this step, computed from its plan and `loss_transfers`."""
        names = ("micro_batches", "accumulate", "reshard_after_forward")
        given: dict[str, Any] = {name: getattr(self.options, name) for name in names}
        given["products"] = self.plan.update_products
        given["forward_passes"] = self._stages.forward_passes
        return budget(self.plan, **given, loss_transfers=self.loss_transfers or ())

    def __deepcopy__(self, _: dict[int, Any]) -> TrainStep:
        return TrainStep(self._loss_fn, self.plan, self.options)

    def __repr__(self) -> str:
        options = self.options
        head = (
            f"TrainStep(level={self.plan.level.name!r}, devices={self.plan.group.devices}, "
            f"micro_batches={options.micro_batches}, loss_semantics={options.loss_semantics!r})"
        )
        if options.loss_semantics == "per_device":
            return head
        if self.loss_transfers is None:
            return f"{head}\nThe first call, or step.lower(...), shows what the loss communicates."
        if not self.loss_transfers:
            return f"{head}\nThe loss needs nothing of other devices' examples."
        return f"{head}\n{text_of([transfers_table(self.loss_transfers)])}"

    @overload
    def __call__(self, state: State, batch: Any, /) -> tuple[State, dict[str, Any]]: ...
    @overload
    def __call__(self, model: Any, optimizer: Any, batch: Any, /) -> dict[str, Any]: ...
    @short_traceback
    def __call__(self, *args: Any, **by_name: Any) -> Any:
        """Runs one step; arguments and result as in `make_train_step`."""
        with self._in_use:  # of two threads with one state, the second is refused
            return self._call(args, by_name)

    def _call(self, args: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
        self._latest.after_interrupt()
        state, parts, (leaves, structure), batch = self._take(args, by_name)
        with jax.transfer_guard_device_to_host("allow"):  # of a few numbers, two calls later
            self._watch.look(parts.opt_state.guard, parts.step)
            self._late_checks.look()
        batch = self._place(batch)
        for outside in self._outside:
            outside.look(batch, leaves if self.options.donate else ())
        if self.options.post_update is not None:
            warn_of_fixed_fields(state, self.plan, self._told)
        jitted, numbers = self.jitted, partial(self.numbers.row, batch, leaf=leaves[0])
        given = leaves, structure, batch, self._rng
        program = self._check_program(structure, batch, lambda: jitted.trace(*given, numbers(0)))
        self._check_mask(batch, lambda: jitted.trace(*given, numbers(0)), len(leaves))
        if self._check_loss:
            self._check_loss = False
            loss = self.plan.kind.loss(self._loss_fn, self.options.mutable, parts.static)
            loss_check.check_mean(loss, parts, batch, self.options, self.plan)
        run = partial(self._check_program.run, jitted, small=lambda x: x[1]["loss"])
        try:
            results = self._latest.run(run, state, *given, numbers(program))
        except RuntimeError as error:
            explain_debug_nans(error)
            raise
        leaves, metrics, guard, sums, flags = results
        self._check.trust(leaves)
        new = jax.tree.unflatten(structure, leaves)
        falls = self._scaler is not None and self._scaler.use_dynamic_loss_scaling
        scale = metrics["loss_scale"] if falls else None
        self._watch.add(guard, new.opt_state.guard, flags, scale)
        self.numbers.add(batch, program, sums)
        self._replicas.after_call(new.params, new.step)
        self._made.count(new.step)
        self._late_checks.end_call()
        if not self.options.donate:  # those of donated states depend on each other
            limit_in_flight(metrics)
        events.ran(self, batch, metrics)
        state = self._latest.complete(new)
        return metrics if state is None else (state, metrics)

    @property
    def latest(self) -> Any:
        """The state that this step returned last, which an interrupt (Ctrl-C) does not lose.

        For NNX the `(model, optimizer)` pair. None if there is none, if a later call took it over,
        or if the caller has dropped it: only an interrupt keeps it, until the next call or `del`.
        """
        return self._latest.get()

    @latest.deleter
    def latest(self) -> None:
        self._latest.release()

    @short_traceback
    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the step for these arguments, concrete or abstract, without running it."""
        with paused_collector():
            return self.trace(*args).lower()

    @short_traceback
    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the step for these arguments; the mesh of the plan may be abstract."""
        *_, (leaves, structure), batch = self._take(args, {}, abstract=True)
        if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
            batch = self._place(batch)
        row = self.numbers.row(batch, 0)
        return self.jitted.trace(leaves, structure, batch, self._rng, row)

    def arguments(self, state: Any, batch: Any) -> tuple[Any, ...]:
        """Returns the arguments of a call of the step; an NNX pair becomes two of them."""
        return (*(state if len(self.plan.kind.arguments) > 1 else (state,)), batch)

    def _place(self, batch: Any) -> Any:
        """Returns the global batch after checking its examples, before anything is compiled."""
        batch = shard_batch(batch, self.plan)
        check_examples(batch, self.plan.group.batch_shards, self.options.micro_batches)
        return batch

    def _take(
        self, args: tuple[Any, ...], by_name: dict[str, Any], abstract: bool = False
    ) -> tuple[Any, Components, tuple[list[Any], Any], Any]:
        """Returns state, components, their leaves and structure, and batch, after checking them."""
        *state, batch = args or (None,)
        wanted = self.plan.kind.arguments
        call = f"step({', '.join((*wanted, 'batch'))})"
        if len(state) != len(wanted) or by_name:
            named = f" and {some(by_name)}= by name" if by_name else ""
            several = len(state) > len(wanted) and not by_name
            advice = (
                " A step takes one batch: put several arrays into a tuple or a dictionary."
                if several
                else ""
            )
            raise GShardError(f"{call} was called with {len(args)} arguments{named}.{advice}")
        state = state[0] if len(state) == 1 else tuple(state)
        check_state(state, self.plan, call)
        refuse_original(state, self.plan, call)
        refuse_iterator(batch)
        parts = self.plan.kind.split(state)
        if not isinstance(parts.opt_state, ShardedOptState):  # a new optimizer of a sharded model?
            shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(parts.params)]
            if all(getattr(x, "mesh", None) == self.plan.mesh for x in shardings):
                check_optimizer(state, self.plan, call)
        leaves = self._check(parts, batch, abstract)
        check_optimizer(state, self.plan, call)
        return state, parts, leaves, batch
