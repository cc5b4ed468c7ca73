"""Ways to train with the same rows in a step: what `advise` looks at."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gshard.analysis.aot.target import Target
from gshard.analysis.choices import Choices
from gshard.analysis.config import Config
from gshard.sharding.level import LEVELS, Level


@dataclass(frozen=True)
class Option:
    """One way to train.

    Attributes:
      level: its name.
      replica: copies of the divided state.
      choices: of the step.
      arguments: of the model's function, those that were varied.
    """

    level: str
    replica: int
    choices: Choices
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def beside(self) -> str:
        """What was chosen beside level, copies and micro-batches, in words."""
        more = [f"{name} {value}" for name, value in self.arguments.items()]
        if self.choices.offload:
            more.append("offload")
        if self.choices.reshard_after_forward is False:
            more.append("kept for backward")
        return ", ".join(more)

    @property
    def kind(self) -> tuple[str, str]:
        """What options that differ in copies and micro-batches alone have in common."""
        return self.level, self.beside


def options_of(config: Config) -> Iterator[Option]:
    """Every way that is worth a look.

    Copies as the config says. Micro-batches: all ways to take the rows of a device in equal parts.
    Whether what was gathered is kept, where parameters rest divided. What `vary` lists. Offloading
    and copies come later, for what does not fit and what does.
    """
    chosen = config.choices
    rows = chosen.micro_batch_size * chosen.micro_batches
    tried = [[(name, value) for value in values] for name, values in config.vary.items()]
    for arguments, name in itertools.product(itertools.product(*tried), config.levels):
        for k in (k for k in range(1, rows + 1) if rows % k == 0):
            for reshard in _reshards(chosen, LEVELS[name]):
                choices = dataclasses.replace(
                    chosen,
                    micro_batches=k,
                    micro_batch_size=rows // k,
                    reshard_after_forward=reshard,
                )
                replica = config.replica if LEVELS[name].divides_state else 1
                yield Option(name, replica, choices, dict(arguments))


def _reshards(chosen: Choices, level: Level) -> tuple[bool | int, ...]:
    """Where parameters rest divided both ways are tried, unless one was asked for."""
    if not level.divides_params:
        return (True,)
    asked = chosen.reshard_after_forward
    return (True, False) if asked is True else (asked,)


def copies_of(option: Option, target: Target) -> Iterator[Option]:
    """The same with copies of the divided state, so that a shard group is some of the hosts.

    Not where a number of copies was asked for.
    """
    if LEVELS[option.level].divides_state and option.replica == 1:
        for replica in replicas_of(target)[1:]:
            yield dataclasses.replace(option, replica=replica)


def replicas_of(target: Target) -> tuple[int, ...]:
    """Copies of the divided state that suit a machine.

    A TPU slice is one group, divided axis by axis of its torus.
    """
    if target.platform != "gpu":
        return (1,)
    return tuple(n for n in range(1, target.hosts + 1) if target.hosts % n == 0)
