"""A forecast as text, the same in a terminal, a log and a file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from gshard._util.tables import text_of, text_table
from gshard._util.units import bytes_of, count_of
from gshard.analysis.memory.footprint import TracedBuffer
from gshard.analysis.setup import Choices
from gshard.sharding.plan import Plan


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
    non_trainable: int
    host: int
    batch: int
    gathered: int
    wire: int
    wire_by_flavour: dict[str, int]
    peak: int | None = None
    largest: tuple[TracedBuffer, ...] = ()

    @property
    def at_rest(self) -> int:
        """What lies in the device's memory between steps."""
        return self.params + self.optimizer + self.non_trainable

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


@dataclass(frozen=True)
class Forecast:
    """What every level takes and sends.

    Attributes:
      parameters: elements that are trained (Psi).
      devices: in all.
      replica: copies of the divided state.
      choices: of the step.
      levels: by name.
      plans: by name of the level, where every leaf lies.
      target: name of the machine, where it is known.
      usable: bytes of one of its devices that programs can use.
    """

    parameters: int
    devices: int
    replica: int
    choices: Choices
    levels: dict[str, LevelForecast]
    plans: dict[str, Plan] = field(repr=False, compare=False)
    target: str | None = None
    usable: int | None = None

    def fits(self, level: str) -> bool | None:
        """Whether a level fits a device by this forecast; None where the device is not known."""
        of = self.levels[level]
        return None if self.usable is None else (of.peak or of.needs) <= self.usable

    def as_dict(self) -> dict[str, Any]:
        """Everything but the plans in dicts, lists, strings and numbers, ready for JSON."""
        return {
            "parameters": self.parameters,
            "devices": self.devices,
            "replica": self.replica,
            "target": self.target,
            "usable": self.usable,
            "choices": dataclasses.asdict(self.choices),
            "levels": {
                name: level.as_dict() | {"fits": self.fits(name)}
                for name, level in self.levels.items()
            },
        }

    def __str__(self) -> str:
        return report(self)


def report(found: Forecast) -> str:
    """Memory of one device by level, and what it sends."""
    choices = found.choices
    copies = f", {found.replica} copies" if found.replica > 1 else ""
    title = (
        f"{count_of(found.parameters)} parameters on {found.devices} devices{copies}; a step of "
        f"{choices.micro_batches} x {choices.micro_batch_size} rows on each"
    )
    wire = text_table("Sent by one device in one step", ("level",), (
        "as chosen", *(next(iter(found.levels.values())).wire_by_flavour),
    ))  # fmt: skip
    for name, level in found.levels.items():
        wire.add_row(name, *map(bytes_of, (level.wire, *level.wire_by_flavour.values())))
    notes = (
        "local, scatter, sync: ways to accumulate micro-batches; kept: what was gathered stays for "
        "the backward pass. Where parameters are gathered, at most: what the backward pass does "
        "not need is gathered once."
    )
    return text_of([title, _memory(found), wire, notes])


def _memory(found: Forecast) -> Table:
    """A row for each level; what no level has is left out."""
    levels = found.levels.values()
    traced = all(x.peak is not None for x in levels)
    amounts = {
        "parameters": [x.params for x in levels],
        "gradients": [x.gradients for x in levels],
        "optimizer": [x.optimizer for x in levels],
        "non_trainable": [x.non_trainable for x in levels],
        "batch": [x.batch for x in levels],
        "layer gathered": [x.gathered for x in levels],
        **(
            {"activations": [x.activations for x in levels], "peak": [x.peak for x in levels]}
            if traced
            else {"without activations": [x.needs for x in levels]}
        ),
        "at rest on the host": [x.host for x in levels],
    }
    amounts = {name: column for name, column in amounts.items() if any(column)}
    known = found.usable is not None
    title = "Memory of one device"
    if found.usable is not None:
        title += f"; {found.target} has {bytes_of(found.usable)} for programs"
    made = text_table(title, ("level",), (*amounts, *(("forecast",) if known else ())))
    for name, *row in zip(found.levels, *amounts.values(), strict=True):
        fits = ("fits" if found.fits(name) else "does not fit",) if known else ()
        made.add_row(name, *map(bytes_of, row), *fits)
    return made
