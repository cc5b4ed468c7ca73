"""What one level takes and sends, from its plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from gshard.analysis.choices import Choices
from gshard.analysis.memory.footprint import Buffer
from gshard.sharding.budget import Promise, promise
from gshard.sharding.plan import Plan

# How gradients may accumulate and parameters be kept: arguments of `make_train_step` by name.
FLAVOURS: dict[str, dict[str, Any]] = {
    "local": {"accumulate": "local"},
    "scatter": {"accumulate": "scatter"},
    "sync": {"accumulate": "sync"},
    "kept": {"reshard_after_forward": False},
}


@dataclass(frozen=True)
class LevelForecast:
    """What one level takes on one device, in bytes, and sends.

    Attributes:
      params: parameters at rest.
      gradients: what the micro-batches of a step carry.
      optimizer: its state, with master copies and all counts of steps.
      extras: frozen parameters, batch statistics, an average.
      host: of these, at rest in the host's memory.
      batch: the rows of one step.
      gathered: the largest layer, whole while it is used; 0 where parameters rest whole.
      wire: sent in one step as chosen.
      wire_by_flavour: the same for every way to accumulate (`local`, `scatter`, `sync`), and with
        what was gathered kept for the backward pass (`kept`).
      peak: the most that a device holds during a step, from its trace; None where it was not
        traced.
      largest: what it holds then, the largest first.
    """

    params: int
    gradients: int
    optimizer: int
    extras: int
    host: int
    batch: int
    gathered: int
    wire: int
    wire_by_flavour: dict[str, int]
    peak: int | None = None
    largest: tuple[Buffer, ...] = ()

    @property
    def at_rest(self) -> int:
        """What lies in the device's memory between steps."""
        return self.params + self.optimizer + self.extras

    @property
    def needs(self) -> int:
        """What a step needs besides activations."""
        return self.at_rest + self.gradients + self.gathered + self.batch

    @property
    def activations(self) -> int | None:
        """What a step holds at its peak beyond that; None where it was not traced."""
        return None if self.peak is None else max(0, self.peak - self.needs)

    def as_dict(self) -> dict[str, Any]:
        """Everything in dicts, lists, strings and numbers, ready for JSON."""
        return {**dataclasses.asdict(self), "activations": self.activations}


def of_level(plan: Plan, choices: Choices, batch: int = 0) -> LevelForecast:
    """What the level of a plan takes and sends, with a batch of so many bytes on a device."""

    def promised(**flavour: Any) -> Promise:
        return promise(plan, **{**choices.of_step, **flavour})

    this = promised()
    step = sum(x.bytes_per_device for x in jax.tree.leaves(plan.layouts.step))
    return LevelForecast(
        params=this.resident["params"],
        gradients=this.resident["gradients"],
        optimizer=this.resident["optimizer"] + step,
        extras=this.resident["extras"],
        host=sum(this.host.values()),
        batch=batch,
        gathered=largest_layer(plan),
        wire=this.wire_bytes,
        wire_by_flavour={name: promised(**kwargs).wire_bytes for name, kwargs in FLAVOURS.items()},
    )


def largest_layer(plan: Plan) -> int:
    """Bytes of the largest layer that is gathered: one of a scanned stack, or a leaf by itself."""
    stacks: dict[str, int] = {}
    alone = 0
    for leaf in map(lambda x: x.local(), jax.tree.leaves(plan.params)):
        if leaf.dim is None:
            continue
        size = leaf.stored_size * leaf.dtype.itemsize
        if leaf.scan_dim is None:
            alone = max(alone, size)
        else:
            stack = f"{leaf.path.split('/')[0]} {leaf.shape[leaf.scan_dim]}"
            stacks[stack] = stacks.get(stack, 0) + size // leaf.shape[leaf.scan_dim]
    return max([alone, *stacks.values()])
