"""Checks that all processes step with the same hyperparameters, which each sets by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from gshard._util.errors import GShardError
from gshard.distributed.agree import by_value, find_differences, first_difference, spans_processes
from gshard.pytorch.param_group import ParamGroup
from gshard.sharding.plan import Plan


class SameHyperparameters:
    """Compares those of all steps so far in the steps 1, 2, 4, 8, ... of one optimizer.

    So the cost vanishes in a long training, and a difference is found before the training is twice
    as long.
    """

    def __init__(self) -> None:
        self._steps, self._so_far = 0, hashlib.blake2b(digest_size=8)

    def check(self, plan: Plan, groups: Iterable[ParamGroup]) -> None:
        """Counts a step, and compares where it is due; nothing in one process.

        Raises:
          GShardError: the processes differ, on all of them.
        """
        if not spans_processes(plan):
            return
        lines = [
            f"{name}={value!r} in group {i}"
            for i, group in enumerate(groups)
            for name, value in group.traced().items()
        ]
        self._so_far.update("\n".join(lines).encode())
        self._steps += 1
        if self._steps & (self._steps - 1):
            return
        every = [*lines, f"others in an earlier step (checksum {self._so_far.hexdigest()})"]
        mesh: Any = plan.mesh
        if not find_differences("step", {"values": every}, mesh):
            return
        differing = by_value(first_difference(every, mesh))
        raise GShardError(
            f"step {self._steps} of the ZeroRedundancyOptimizer: the processes have different "
            f"hyperparameters: {differing}. Set those of param_groups on all processes alike."
        )
