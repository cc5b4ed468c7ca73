"""On one device: the program of plain `jit`, but for the guard and the norm it reads."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import gshard
from benchmarks.models import PROBLEMS
from gshard.analysis.hlo import read_program
from tests.tiers import quick

# What costs something: the guard adds comparisons, selections and sums, which are fused.
HEAVY = ("dot", "convolution", "while", "conditional", "scatter", "gather", "sort", "transpose")
ROWS = 16


def compiled(step, *args):
    program = step.lower(*args).compile()
    return program.as_text(), program.memory_analysis()


def histogram(text):
    return Counter(re.findall(r" = (?:\(.*?\)|\S+) ([\w-]+)\(", text))


def by_jit(problem, guarded):
    """The step without gshard; `guarded` as one would write it: state chosen at the end."""
    tx = optax.adamw(1e-3)

    def step(params, opt_state, count, batch):
        loss, grads = jax.value_and_grad(problem.loss_fn)(params, batch)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state, count + 1
        if guarded:
            norm = optax.tree.norm(grads)
            old = params, opt_state, count
            new = jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(norm), x, y), new, old)
            return new, loss, norm
        return new, loss

    params = jax.tree.map(jnp.asarray, problem.params)
    state = params, tx.init(params), jnp.int32(0)
    return compiled(jax.jit(step, donate_argnums=(0, 1, 2)), *state, problem.batch(ROWS))


@pytest.mark.parametrize(
    ("name", "level"),
    quick(
        itertools.product(PROBLEMS, ["dp", "p_g_os"]),
        [("mlp", "dp"), ("mlp", "p_g_os"), ("gpt-scan", "p_g_os")],
    ),
)
def test_one_device_costs_what_jit_costs(name, level):
    problem = PROBLEMS[name]()
    plain, memory = by_jit(problem, guarded=False)
    _, by_hand = by_jit(problem, guarded=True)
    state = TrainState.create(apply_fn=None, params=problem.params, tx=optax.adamw(1e-3))
    stacks = {f"{stack}/": 0 for stack in problem.stacks} or None
    mesh = gshard.make_mesh(devices=jax.devices()[:1])
    state, plan = gshard.shard_train_state(state, mesh, level, scan_axes=stacks)
    batch = gshard.shard_batch(problem.batch(ROWS), plan)
    ours, own = compiled(gshard.make_train_step(problem.loss_fn, plan), state, batch)

    assert not read_program(ours).collectives
    counts, expected = histogram(ours), histogram(plain)
    assert expected["dot"] and bool(expected["while"]) == bool(problem.stacks)
    assert {op: counts[op] for op in HEAVY} == {op: expected[op] for op in HEAVY}
    assert counts["copy"] <= expected["copy"] + 4
    few = 256  # bytes: the counts of the guard and the scaler
    assert own.argument_size_in_bytes <= memory.argument_size_in_bytes + few
    whole = sum(x.nbytes for x in jax.tree.leaves(gshard_arrays(state)))
    assert whole <= own.alias_size_in_bytes <= whole + few  # all of the state is donated
    # A guard knows all gradients before it updates with the first of them, and plain jit does not.
    gradients = sum(x.nbytes for x in jax.tree.leaves(problem.params))
    assert own.temp_size_in_bytes <= 1.02 * memory.temp_size_in_bytes + gradients
    assert own.temp_size_in_bytes < 0.96 * by_hand.temp_size_in_bytes


def gshard_arrays(state):
    return state.params, state.opt_state.inner
