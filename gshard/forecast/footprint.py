"""What one device needs for a train step, from its trace alone: nothing is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from gshard.forecast.liveness import peak_of
from gshard.forecast.program import program_of
from gshard.plan import Plan
from gshard.step import TrainStep


@dataclass(frozen=True)
class Buffer:
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    what: str


@dataclass(frozen=True)
class Footprint:
    arguments: int
    temporaries: int
    peak: int
    largest: tuple[Buffer, ...]


def trace_step(step: TrainStep, state: Any, batch: Any) -> Any:
    state = state if isinstance(state, tuple) else (state,)
    return step.trace(*state, batch)


def footprint(traced: Any, plan: Plan, platform: str) -> Footprint:
    """The estimate."""
    program = device_program(traced, plan, platform)
    (state, batch, rng), _ = traced.in_avals
    sizes = [program.values[i].bytes for i in program.inputs]
    found = peak_of(program, platform)
    rows = sorted(found.live, key=lambda row: -row[0])
    largest = tuple(_buffer(*row) for row in rows[:40])
    return Footprint(sum(sizes), found.bytes, sum(sizes) + found.bytes, largest)


def device_program(traced: Any, plan: Plan, platform: str) -> Any:
    (leaves, batch, rng), _ = traced.in_avals
    shardings: list[Any] = [x.sharding for x in jax.tree.leaves(plan.abstract_parts())]
    rows = plan.sharding().update(spec=plan.batch_spec)
    shardings += [rows if x.shape else None for x in jax.tree.leaves(batch)]
    shardings += [None for _ in jax.tree.leaves(rng)]
    program = program_of(traced.jaxpr, shardings, platform != "cpu")
    if 0 in traced.donate_argnums:
        program.kept = [(k, k) for k in range(len(leaves))]
    return program


def _buffer(size: int, i: int, kernel: Any, program: Any) -> Buffer:
    value = program.values[i]
    return Buffer(size, value.shape, str(value.dtype), f"{kernel.op.name} {kernel.op.where}")
