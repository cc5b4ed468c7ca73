"""The same training twice: on one device as Flax does it, and sharded with gshard."""

from __future__ import annotations

import time

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import gshard
from examples import gpt
from examples.checkpoints import Checkpoints
from examples.config import Arguments, Config
from examples.measure import (
    KINDS,
    PARTS,
    Run,
    bytes_on_first_device,
    carried_by_micro_batch_loop,
)
from examples.report import RunMeter


def make_model(config: Config) -> gpt.GPT:
    o = config.arguments
    return gpt.GPT(o.width, o.layers, o.heads, o.scan, o.remat, o.experts, o.chosen, o.capacity)


def make_state(config: Config) -> tuple[gpt.GPT, TrainState]:
    """An ordinary Flax model and train state, on one device."""
    o, model = config.arguments, make_model(config)
    bytes_1xT = np.zeros((1, o.sequence), np.uint8)
    params = jax.jit(model.init)(jax.random.key(config.seed), bytes_1xT)["params"]
    rate = optax.warmup_cosine_decay_schedule(
        0.0, o.learning_rate, o.warmup_steps, max(config.steps, o.warmup_steps + 1)
    )
    tx = optax.chain(
        optax.clip_by_global_norm(o.clip),
        # eps: with the usual 1e-8, a gradient that is zero but for rounding still moves its
        # parameter by a whole step, and no two orders of summation agree on it.
        optax.adamw(rate, b2=0.95, eps=1e-5, weight_decay=o.weight_decay),
    )
    return model, TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def setup(**arguments) -> gshard.TrainSetup:
    """What `gshard plan configs/demo.toml` and `configs/moe.toml` plan, from their arguments."""
    config = Config(arguments=Arguments(**arguments))
    model = make_model(config)
    return gshard.TrainSetup(
        state=lambda: make_state(config)[1],
        loss_fn=lambda params, batch_BxT1: gpt.next_byte_loss(model, params, batch_BxT1),
        batch=jax.ShapeDtypeStruct((1, config.arguments.sequence + 1), np.uint8),
        shard=shard_options(config),
    )


def train_on_one_device(model, state, batch_of, config: Config, meter: RunMeter) -> Run:
    """The ordinary Flax loop, without gshard: what all others are compared with."""

    def train_step(state, batch_BxT1):
        loss, grads = jax.value_and_grad(
            lambda params: gpt.next_byte_loss(model, params, batch_BxT1)
        )(state.params)
        return state.apply_gradients(grads=grads), loss

    run = Run("one device")
    with meter.phase("compiling"):
        step = jax.jit(train_step).lower(state, batch_of(0)).compile()
    run.bytes = {
        "params": bytes_on_first_device(state.params),
        "optimizer": bytes_on_first_device(state.opt_state),
    }
    clock = time.monotonic()
    for i in range(config.steps):
        state, loss = step(state, batch_of(i))
        run.losses.append(float(loss))
        run.tokens_per_second = tokens(config) * (i + 1) / (time.monotonic() - clock)
        meter.step(i + 1, run.losses[-1], run.tokens_per_second)
    return run


def train_at(level: str, mesh, model, start, own_rows, config: Config, meter: RunMeter):
    """The same with gshard: two calls, and a loop that looks like the one above.

    If the mesh has an axis `expert`, experts stay on its devices, as the model's metadata says. The
    run and its folder of checkpoints have the name of its meter.
    """

    def loss_fn(params, batch_BxT1):
        return gpt.next_byte_loss(model, params, batch_BxT1)

    with meter.phase("sharding"):
        state, plan = gshard.shard_train_state(start, mesh, level, **shard_options(config))
        step = gshard.make_train_step(loss_fn, plan, micro_batches=config.micro_batches)
    with meter.phase("compiling"):
        run = measured(meter.name, step, state, own_rows(0))

    with Checkpoints(config, run, meter.say) as checkpoints:
        state = checkpoints.restore(state)
        first, clock = len(run.losses), time.monotonic()
        for i in checkpoints.steps_left():
            state, metrics = step(state, own_rows(i))
            run.losses.append(float(metrics["loss"]))
            run.tokens_per_second = tokens(config) * (i + 1 - first) / (time.monotonic() - clock)
            meter.step(i + 1, run.losses[-1], run.tokens_per_second)
            checkpoints.after_step(state)
            time.sleep(config.pause)

    # Of the arrays after training: a layout that drifted would show.
    run.bytes |= {
        "params": bytes_on_first_device(state.params),
        "optimizer": bytes_on_first_device(state.opt_state),
    }
    return run, state


def measured(name: str, step, state, batch) -> Run:
    """What the compiled step carries and communicates, and its budget. Nothing runs yet."""
    audit = gshard.audit(step, state, batch)
    budget = audit.budget
    sent = [row for row in audit.collectives if not row.scalar]
    return Run(
        name,
        bytes={"gradients": carried_by_micro_batch_loop(step.lower(state, batch).compile())},
        budget_bytes={part: budget.resident[part] for part in PARTS},
        moved={kind: audit.elements(kind) for kind in KINDS},
        budget_elements={kind: budget.elements(kind) for kind in KINDS},
        sent=sum(row.wire_bytes for row in sent),
        exchanged=sum(row.wire_bytes for row in sent if row.kind == "all-to-all"),
        at_most=tuple(moved.kind for moved in budget.communicated if moved.at_most),
    )


def shard_options(config: Config) -> dict:
    # A scanned stack of layers is sharded inside a layer, never between layers.
    scan_axes = {"^blocks/": 0} if config.arguments.scan else None
    return {"min_shard_size": config.arguments.min_shard_size, "scan_axes": scan_axes}


def tokens(config: Config) -> int:
    return config.batch_size * config.arguments.sequence
