"""Ctrl-C in a loop of steps: the last state that a step returned is `step.latest`."""

from __future__ import annotations

import gc
import signal
import threading
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard.train.latest_state import LatestState

BATCH = np.ones((8, 32), np.float32)


def linen():
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    made = gshard.shard_train_state(
        ({"w": jnp.ones((32, 32))}, optax.adam(1e-3)), gshard.make_mesh(), "os", min_shard_size=0
    )
    return made[0], gshard.make_train_step(loss_fn, made[1])


def pair():
    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    made = gshard.shard_train_state(state, gshard.make_mesh(), "os", min_shard_size=0)
    return made[0], gshard.make_train_step(lambda m, batch: jnp.mean(m(batch) ** 2), made[1])


def latest_of(step) -> Any:
    return step.latest


def number_of(state) -> int:
    return int(state[1].step[...] if isinstance(state, tuple) else state.step)


def interrupted_loop(step, state) -> int:
    """Trains until Ctrl-C comes; returns how many calls returned before it."""
    over, calls = threading.Event(), 0

    def interrupt():
        over.wait(0.03)
        while not over.wait(0.1):  # one that comes in a callback of the collector is swallowed
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            while True:
                out = step(*state, BATCH) if isinstance(state, tuple) else step(state, BATCH)
                state = state if isinstance(state, tuple) else out[0]
                calls += 1
        finally:
            over.set()
    thread.join()
    return calls


def test_an_interrupt_while_a_later_call_begins_waits_and_a_second_one_does_not():
    """The arrays may be donated and not say so yet: Python code may run in the middle of it."""
    state, step = linen()
    state, _ = step(state, BATCH)
    jitted, waits = step.jitted, []

    def begins(*args):
        waits.extend(step._latest.interrupt() for _ in range(2))
        return jitted(*args)

    step.jitted = begins
    with pytest.raises(KeyboardInterrupt):
        step(state, BATCH)
    assert waits == [True, False]
    assert number_of(latest_of(step)) == 2


@pytest.mark.parametrize("make", [linen, pair])
def test_an_interrupted_loop_loses_no_state(make):
    state, step = make()
    assert latest_of(step) is None
    if make is pair:
        step(*state, BATCH)
    else:
        state, _ = step(state, BATCH)
    for _ in range(5):
        before = number_of(state)
        calls = interrupted_loop(step, state)
        if make is linen:
            with pytest.raises(gshard.DonatedStateError, match=r"step\.latest has it"):
                step(state, BATCH)
        state = latest_of(step)
        assert number_of(state) - before in (calls, calls + 1)
    if make is pair:
        step(*state, BATCH)  # the pair itself, changed in place
        latest = latest_of(step)
        assert latest[0] is state[0] and latest[1] is state[1]
    else:
        state, _ = step(state, BATCH)
        assert step.latest is state
    del step.latest
    assert step.latest is None


def test_the_latest_state_holds_no_memory():
    state, step = linen()
    state, metrics = step(state, BATCH)
    first = state
    state, metrics = step(state, BATCH)
    assert step.latest is state
    del state, first, metrics
    assert step.latest is None
    state, step = linen()
    step(state, BATCH)  # donated and not kept
    assert step.latest is None


@pytest.mark.parametrize("make", [linen, pair])
def test_an_interrupt_in_a_function_of_the_user_loses_no_state(make):
    """The loop of a function that is left by Ctrl-C was the only one that had the state."""
    given, step = make()
    given = list(given) if make is pair else [given]

    def train():
        state = step(*given, BATCH)[0] if make is linen else tuple(given)
        if make is pair:
            step(*state, BATCH)
        given.clear()
        signal.raise_signal(signal.SIGINT)
        assert state is not None

    with suppress(KeyboardInterrupt):
        train()
    gc.collect()
    assert not given and number_of(latest_of(step)) == 1


def test_an_interrupt_between_donation_and_result_waits():
    """The state of the caller is gone then, and the new one exists nowhere else."""
    state, step = linen()
    kind, leaves, structure = step.plan.kind, *jax.tree.flatten(step.plan.kind.split(state))
    latest = LatestState(kind)

    def program(leaves, structure):
        new = jax.jit(lambda x: x, donate_argnums=0)(leaves)
        signal.raise_signal(signal.SIGINT)
        return new, None, None

    with pytest.raises(KeyboardInterrupt):
        latest.run(program, state, leaves, structure)
    assert number_of(latest.get()) == 0
    again = latest.get()
    leaves = jax.tree.leaves(kind.split(again))

    def interrupted_before(leaves, structure):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("Ctrl-C waited although nothing was donated")

    with pytest.raises(KeyboardInterrupt):
        latest.run(interrupted_before, again, leaves, structure)
    assert latest.get() is again


def test_a_handler_of_the_user_stays():
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        own = signal.getsignal(signal.SIGINT)
        state, step = linen()
        step(state, BATCH)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
