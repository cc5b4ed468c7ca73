"""How many machines an elastic job may have, and which of these numbers divide its global batch."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard.distributed import env_vars


class Machines(NamedTuple):
    """The numbers of machines with which an elastic job may run.

    Attributes:
      least: the smallest of them.
      most: the largest.
      devices: those of one machine, or its processes if the devices are not known.
      batch_size: examples of the global batch; None if it is not known.
    """

    least: int
    most: int
    devices: int = 1
    batch_size: int | None = None

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"

    @property
    def fitting(self) -> list[int]:
        """The numbers whose devices divide the global batch."""
        size = self.batch_size or 0
        return [n for n in range(self.least, self.most + 1) if size % (n * self.devices) == 0]

    def of(self, here: int) -> int:
        """The number of machines with which the job can start when `here` have joined; or 0."""
        return max((n for n in self.fitting if n <= here), default=0)


def parse_machines(text: str) -> Machines | int:
    """Reads `--nnodes`: a number, or a range `MIN:MAX`."""
    if re.fullmatch(r"\d+", text, re.ASCII) and int(text):
        return int(text)
    found = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    if found is None:
        raise GShardError(
            f"--nnodes {shown(text)} must be a number of machines, such as 4, or MIN:MAX for an "
            "elastic job, such as 2:4."
        )
    least, most = int(found[1]), int(found[2])
    if not least:
        raise GShardError(f"--nnodes {text}: a job has at least one machine. Write 1:{most or 1}.")
    if least > most:
        raise GShardError(
            f"--nnodes {text}: {least}, the fewest machines, is more than {most}, the most. Write "
            f"{most}:{least}."
        )
    return Machines(least, most)


def check_batch_size(machines: Machines) -> None:
    """Refuses a global batch that no number of machines divides."""
    if not machines.fitting:
        each = machines.devices
        raise GShardError(
            f"no number of machines in --nnodes {machines}, of {each} devices each, divides "
            f"--batch_size {machines.batch_size}. Make it a multiple of {machines.least * each}, "
            f"for {machines.least} machines."
        )


def advice(batch_size: int, devices: int) -> str:
    """With how many machines a batch would fit, for errors in a process of an elastic job."""
    found = re.fullmatch(r"(\d+) of (\d+):(\d+)", os.environ.get(env_vars.MACHINES, ""))
    here, least, most = map(int, found.groups()) if found else (0, 0, 0)
    if not here or devices % here:
        return ""
    each = devices // here
    fitting = Machines(least, most, each, batch_size).fitting
    if not fitting:
        return f" No number of machines from {least} to {most}, of {each} devices each, divides it."
    return (
        f" The job has {here} machines of {each} devices, and {batch_size} examples fit "
        f"{' or '.join(map(str, fitting))} machines: gshard launch --batch_size {batch_size} keeps "
        "to these."
    )
