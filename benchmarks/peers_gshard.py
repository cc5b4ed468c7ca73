"""One process of gshard for `benchmarks.peers`, one device each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax.traverse_util import unflatten_dict

import gshard
from benchmarks.groups import memory, on_own_cores, serve, size
from benchmarks.models import Problem
from benchmarks.processes import connect
from benchmarks.programs import by_gshard
from examples.gpt import GPT, next_byte_loss

PARTITIONS = {"ZRO even": "even", "ZRO greedy": "greedy"}


def make(level: str, problem: str, heads: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    on_own_cores()
    connect(size())
    stored = np.load(problem)
    batch = stored["batch"]
    flat = {name: stored[name] for name in stored.files if name != "batch"}
    layers = len({name.partition("/")[0] for name in flat if name.startswith("block_")})
    width = flat["Embed_0/embedding"].shape[1]
    before = memory()
    model = GPT(width, layers, heads=heads, scan=False)
    loss_fn = partial(next_byte_loss, model)
    given = Problem(loss_fn, unflatten_dict(flat, sep="/"), lambda examples: batch[:examples])
    if level in PARTITIONS:
        return _by_optimizer(given, batch, PARTITIONS[level]), lambda: memory() - before
    made = by_gshard(given, len(batch), level, gshard.make_mesh())
    return made.run, lambda: memory() - before


def _by_optimizer(problem: Problem, batch: np.ndarray, partition: str) -> Callable[[], float]:
    """PyTorch's class: each device's gradients, which `step` reduces."""
    opt = gshard.pytorch.ZeroRedundancyOptimizer(
        problem.params,
        optax.adamw,
        parameters_as_bucket_view=True,
        partition=partition,
        lr=1e-3,
    )
    run = gshard.value_and_grad(problem.loss_fn, opt.plan, sync=False, accumulate="local")
    gradient, mean = jax.jit(run), jax.jit(jax.numpy.mean)
    own_batch = gshard.shard_batch(np.array_split(batch, size())[jax.process_index()], opt.plan)
    params = problem.params

    def step() -> float:
        nonlocal params
        losses, grads = gradient(params, own_batch)
        params = jax.block_until_ready(opt.step(grads))
        return float(mean(losses))

    return step


if __name__ == "__main__":
    serve(lambda: make(sys.argv[1], sys.argv[2], int(sys.argv[3])))
