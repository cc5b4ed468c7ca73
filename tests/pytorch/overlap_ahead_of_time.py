"""Compiles gradients, update and all-gather in one program for devices that are not there; JSON.

What `DataParallel.backward` runs with `overlap_with_ddp=True`; started by
`tests/pytorch/test_zero_redundancy_optimizer.py`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import gshard
from gshard.analysis.aot.target import parse_target
from gshard.analysis.hlo.parser import read_module
from gshard.train.gradients import GradientStage
from gshard.train.optim.optimizer import update_and_all_gather
from gshard.train.options import StepOptions

LAYERS, WIDTH, ROWS = 8, 2048, 512


def loss(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"])
    return (x**2).mean()


def main() -> None:
    mesh = gshard.make_mesh(devices=parse_target(sys.argv[1]).described_devices())
    kernel, bias = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, WIDTH), (WIDTH,)))
    params = {f"layer_{i}": {"kernel": kernel, "bias": bias} for i in range(LAYERS)}
    state, plan = gshard.shard_train_state((params, optax.adam(1e-3)), mesh, "os", min_shard_size=0)
    parts = plan.kind.split(state)
    pure = plan.kind.loss(loss, (), parts.static)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        own = dataclasses.replace(parts, params=params)
        found = GradientStage(pure, plan, StepOptions()).reduced(own, batch, None)
        new = update_and_all_gather(plan, found.grads, opt_state, params, {}, None, WIDTH**2)
        return found.loss, new

    rows = NamedSharding(mesh, plan.batch_spec)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=rows)
    abstract = plan.abstract_components()
    lowered = jax.jit(step, donate_argnums=1).lower(abstract.params, abstract.opt_state, x)
    module = read_module(lowered.compile().as_text())
    order = module.computations[module.entry].instructions
    scatters = [i for i, x in enumerate(order) if x.opcode.startswith("reduce-scatter")]
    beside = 0
    for i, one in enumerate(order):
        if one.opcode == "all-gather-start":
            end = next(j for j, x in enumerate(order) if j > i and one.name in x.operands)
            beside += any(x.opcode == "fusion" for x in order[i:end])
    between = sum(x.opcode == "fusion" for x in order[scatters[0] : scatters[-1]])
    print(json.dumps({"scatters": len(scatters), "between": between, "gathers_beside": beside}))


if __name__ == "__main__":
    main()
