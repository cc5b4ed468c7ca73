"""The stages of a train step, as the one function that `make_train_step` compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from gshard.sharding.plan import Plan
from gshard.train.batch_numbers import with_scalars
from gshard.train.global_loss.transfers import Transfer
from gshard.train.gradients import GradientStage
from gshard.train.non_trainable import warn_of_lost_updates
from gshard.train.optim.optimizer import update_and_all_gather
from gshard.train.optim.skip_update import keep_unless
from gshard.train.options import TrainStepOptions, skips_nonfinite
from gshard.train.post_update import apply_post_update
from gshard.train.random_keys import fold_keys
from gshard.train.tracing import paused_collector
from gshard.train_state import Components
from gshard.train_state.components import ShardedOptState
from gshard.train_state.nonfinite import GradScaler, Guard


class Stages:
    """Gradients, update and all-gather, of a list of leaves: `jit` passes it faster than a tree.

    Args:
      loss_fn: the user's loss.
      plan: the layout of every array.
      options: those of the step.
      name: the loss in messages.

    Attributes:
      scaler: that of the loss, unless it is turned off.
      loss_transfers: what the loss communicates in its forward pass; None before the first trace.
      forward_passes: number of forward passes before the gradients, for sums over micro-batches.
    """

    def __init__(
        self, loss_fn: Callable[..., Any], plan: Plan, options: TrainStepOptions, name: str
    ):
        self._loss_fn, self._plan, self._options, self._name = loss_fn, plan, options, name
        self._skip_nonfinite = skips_nonfinite(plan, options)
        given = options.scaler
        self.scaler: GradScaler | None = given if given is not None and given.enable else None
        self.loss_transfers: tuple[Transfer, ...] | None = None
        self.forward_passes: int = 0

    def train_step(  # the name of the program in profiles
        self, leaves: list[Any], structure: Any, batch: Any, rng: Any, row: Any = None
    ) -> tuple[list[Any], dict[str, Any], Guard, Any, Any]:
        """Returns the leaves of the new state, the metrics, and what the host checks later.

        Args:
          leaves: of the `Components` of the state, in storage shapes.
          structure: their tree.
          batch: the global batch.
          rng: the key of `make_train_step`, or None.
          row: the numbers of the batch (`BatchNumbers`), or None.
        """
        # XLA names the arguments of the program after these parameters: the report of a compiled
        # step finds the path of `leaves[2]`. The pause is no decorator, which warnings would name.
        with paused_collector():
            return self._of_leaves(leaves, structure, batch, rng, row)

    def _of_leaves(
        self, leaves: list[Any], structure: Any, batch: Any, rng: Any, row: Any
    ) -> tuple[list[Any], dict[str, Any], Guard, Any, Any]:
        plan, options, size = self._plan, self._options, self._options.bucket_size
        parts: Components = jax.tree.unflatten(structure, leaves)
        before: ShardedOptState = parts.opt_state
        loss = plan.kind.loss(self._loss_fn, options.mutable, parts.static)
        if rng is not None:
            rng = jax.random.fold_in(rng, parts.step)
        if plan.kind.counts_draws and options.loss_semantics != "per_device":
            now = dataclasses.replace(parts, step=None)  # the keys of one device, as they are
        else:  # a key that the loss does not change would draw the same at every step
            own = {k: x for k, x in parts.non_trainable.items() if k not in options.mutable}
            keys = {**parts.non_trainable, **fold_keys(own, parts.step)}
            now = dataclasses.replace(parts, non_trainable=keys)
        if row is not None:
            row = with_scalars(row, parts, batch, plan)
        scale = None if self.scaler is None else self.scaler.scale(before.scaler)
        stage = GradientStage(loss, plan, options, self._name)
        result = stage.reduced(now, batch, rng, scale, row, parts.step)
        self.loss_transfers = tuple(stage.loss_transfers)
        self.forward_passes = len(stage.forward_passes)
        updates = result.weight != 0
        if self._skip_nonfinite:
            updates = result.finite & updates
        params, opt_state = update_and_all_gather(
            plan, result.grads, before, parts.params, {"value": result.loss}, updates, size
        )
        guard = before.guard.after(result.finite, updates, parts.step)
        opt_state = opt_state._replace(guard=guard)
        metrics = {"loss": result.loss, "grad_norm": result.norm, "skipped_steps": guard.skipped}
        if self.scaler is not None:
            scaled = self.scaler.after(before.scaler, result.finite)
            scaler = keep_unless(result.weight != 0, scaled, before.scaler)
            opt_state = opt_state._replace(scaler=scaler)
            metrics["loss_scale"] = scale
        if options.has_aux:
            metrics["aux"] = result.aux
            warn_of_lost_updates(result.aux, parts.non_trainable, options.mutable)
        non_trainable = {name: parts.non_trainable[name] for name in result.updates}
        new = Components(
            params,
            opt_state,
            parts.step + updates.astype(parts.step.dtype),
            {**parts.non_trainable, **keep_unless(updates, result.updates, non_trainable)},
        )
        if options.post_update is not None:
            new = apply_post_update(options.post_update, new, parts.static, plan, updates)
        return jax.tree.leaves(new), metrics, guard, result.numbers, result.finite_leaves
