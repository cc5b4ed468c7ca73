"""The programs that are timed: plain `jit` on one device, GSPMD by hand, and gshard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import gshard
from benchmarks.gspmd import baseline
from benchmarks.models import Problem


class Program(NamedTuple):
    """One train step: runs one and gives its loss.

    `compiled()` is its program, `state()` the full parameters and the optimizer state as stored,
    `skipped()` the number of steps that were skipped, `train_state()` what a checkpoint takes: both
    of gshard's alone.
    """

    run: Callable[[], float]
    compiled: Callable[[], Any]
    state: Callable[[], tuple[Any, Any]]
    skipped: Callable[[], int] = int
    train_state: Callable[[], Any] = type(None)

    @property
    def temporary(self) -> int:
        """Bytes of temporary memory of its program."""
        return self.compiled().memory_analysis().temp_size_in_bytes


def on_one_device(problem: Problem, examples: int) -> Program:
    """Plain `jit`, the entire batch on one device."""
    tx = optax.adamw(problem.learning_rate)

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(problem.loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params, batch = jax.device_put((_copy(problem.params), problem.batch(examples)), place)
    opt_state = jax.jit(tx.init)(params)
    return _program(jax.jit(step, donate_argnums=(0, 1)), params, opt_state, batch)


def by_gspmd(
    problem: Problem, examples: int, level: str, mesh: Any, gather_weights: bool
) -> Program:
    """The frozen baseline."""
    made = baseline(
        problem.loss_fn,
        optax.adamw(problem.learning_rate),
        problem.params,
        mesh,
        level,
        stacks=problem.stacks,
        gather_weights=gather_weights,
    )
    of_params, _, of_batch = made.shardings
    params = jax.tree.map(jax.device_put, _copy(problem.params), of_params)
    batch = jax.device_put(problem.batch(examples), of_batch)
    return _program(made.step, params, made.init(params), batch)


def by_gshard(problem: Problem, examples: int, level: str, mesh: Any, **shard: Any) -> Program:
    """`make_train_step`, with all that it does by default; `shard` is for `shard_train_state`."""
    params, tx = problem.params, optax.adamw(problem.learning_rate)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    scan_axes = {f"{stack}/": 0 for stack in problem.stacks} or None
    state, plan = gshard.shard_train_state(state, mesh, level, scan_axes=scan_axes, **shard)
    step = gshard.make_train_step(problem.loss_fn, plan)
    own = examples // jax.process_count()  # every process gives its own examples
    first = jax.process_index() * own
    batch = gshard.shard_batch(problem.batch(examples)[first : first + own], plan)

    metrics: dict[str, Any] = {"skipped_steps": 0}

    def run() -> float:
        nonlocal state, metrics
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, state.opt_state))
        return float(metrics["loss"])

    return Program(
        run,
        lambda: step.lower(state, batch).compile(),
        lambda: (gshard.full_params(state), state.opt_state),
        lambda: int(metrics["skipped_steps"]),
        lambda: state,
    )


def _program(step: Any, params: Any, opt_state: Any, batch: Any) -> Program:
    def run() -> float:
        nonlocal params, opt_state
        params, opt_state, loss = step(params, opt_state, batch)
        jax.block_until_ready((params, opt_state))
        return float(loss)

    return Program(
        run,
        lambda: step.lower(params, opt_state, batch).compile(),
        lambda: (params, opt_state),
    )


def _copy(tree: Any) -> Any:
    return jax.tree.map(np.copy, tree)
