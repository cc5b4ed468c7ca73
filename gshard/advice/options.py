"""Ways to train with the same rows in a step: what `advise` looks at."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gshard.forecast.choices import Choices
from gshard.forecast.config import Config
from gshard.levels import LEVELS
from gshard.targets.target import Target


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


def options_of(config: Config, target: Target) -> Iterator[Option]:
    """Every way that is worth a look.

    Micro-batches: all ways to take the rows of a device in equal parts. Copies of the divided
    state: so that a shard group is one host, a power of two of them, or everything. Whether what
    was gathered is kept, where parameters rest divided. Offloading is tried later, for what does
    not fit.
    """
    chosen = config.choices
    rows = chosen.micro_batch_size * chosen.micro_batches
    tried = [[(name, value) for value in values] for name, values in config.vary.items()]
    for arguments, name in itertools.product(itertools.product(*tried), config.levels):
        level = LEVELS[name]
        for replica in replicas_of(target) if level.divides_state else (1,):
            for k in (k for k in range(1, rows + 1) if rows % k == 0):
                for reshard in (True, False) if level.divides_params else (True,):
                    choices = dataclasses.replace(
                        chosen,
                        micro_batches=k,
                        micro_batch_size=rows // k,
                        reshard_after_forward=reshard,
                    )
                    yield Option(name, replica, choices, dict(arguments))


def replicas_of(target: Target) -> tuple[int, ...]:
    """Copies of the divided state that suit a machine.

    A TPU slice is one group, divided axis by axis of its torus.
    """
    if target.platform != "gpu":
        return (1,)
    hosts = target.hosts
    return tuple(n for n in range(1, hosts + 1) if hosts % n == 0 and n & (n - 1) == 0)
