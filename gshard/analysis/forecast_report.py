"""A forecast: its amounts, whether a level fits, and its report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from gshard._util.errors import GShardError
from gshard._util.html import html_of
from gshard._util.text import bytes_of, count_of, text_of, text_table
from gshard.analysis.memory.footprint import MARGIN
from gshard.analysis.setup import Choices
from gshard.sharding.level import parse_level
from gshard.sharding.plan import Plan


@dataclass(frozen=True)
class LevelForecast:
    """The memory and traffic of one device at one level; all amounts are bytes.

    Attributes:
      params: stored parameters.
      gradients: gradients that the micro-batches of a step carry.
      optimizer: optimizer state, with master copies and all step counts.
      non_trainable: frozen parameters, batch statistics, averaged parameters.
      host: how much of these is in the host's memory.
      batch: the examples of one step.
      gathered: the largest layer of all-gathered parameters, or all of them where the forward pass
        keeps them; 0 if parameters are replicated.
      wire: sent in one step by the traced program. If it was not traced, an upper bound of what is
        sent of parameters and gradients: activations over a sequence, an expert or a model-parallel
        axis are sent in addition.
      network: how much of this goes to other nodes: the mean over the devices of a node.
      peak: estimated peak of device memory during a step, +-20 %, from its trace; None if it was
        not traced.

    Example:
      >>> setup = gshard.TrainSetup((params, tx), loss_fn, batch, shard={"min_shard_size": 0})
      >>> level = gshard.forecast(setup, devices=8).levels["p_g_os"]
      >>> level.params == (64 * 32 + 32) * 4 // 8  # float32 over 8 devices
      True
    """

    params: int
    gradients: int
    optimizer: int
    non_trainable: int
    host: int
    batch: int
    gathered: int
    wire: int
    network: int
    peak: int | None = None

    @property
    def stored(self) -> int:
        """Bytes of the state in device memory between steps."""
        return self.params + self.optimizer + self.non_trainable

    @property
    def needs(self) -> int:
        """Bytes that a step needs, without activations."""
        return self.stored + self.gradients + self.gathered + self.batch

    @property
    def activations(self) -> int | None:
        """Bytes at the peak beyond `needs`; None if the step was not traced."""
        return None if self.peak is None else max(0, self.peak - self.needs)

    def as_dict(self) -> dict[str, Any]:
        """Everything as dicts, tuples, strings and numbers, ready for JSON."""
        return {**dataclasses.asdict(self), "activations": self.activations}


@dataclass(frozen=True)
class Forecast:
    """The memory and traffic of a train step at every level; print it for a report.

    Attributes:
      parameters: number of trained elements (Psi).
      devices: number of devices.
      replica: number of replicas of the sharded state.
      choices: options of the step.
      levels: forecasts by name of the level.
      plans: plans by name of the level.
      target: name of the machine, if it is known.
      usable: bytes of one device's memory that programs can use, if they are known.
      host_usable: bytes of its host's memory for each device, if they are known.
      nodes: number of nodes, whose devices share fast links (NVLink, or those of a TPU slice).
      sequence: devices that share the sequence of an example.
      experts: devices of the axis that parameters are kept on; 1 if none are.

    Example:
      >>> setup = gshard.TrainSetup((params, tx), shard={"min_shard_size": 0})
      >>> found = gshard.forecast(setup, devices=8, levels=["dp", "zero1", "zero3"])
      >>> list(found.levels), found.parameters
      (['dp', 'os', 'p_g_os'], 2080)
      >>> found.levels["os"].stored < found.levels["dp"].stored
      True
    """

    parameters: int
    devices: int
    replica: int
    choices: Choices
    levels: dict[str, LevelForecast]
    plans: dict[str, Plan] = field(repr=False, compare=False)
    target: str | None = None
    usable: int | None = None
    host_usable: int | None = None
    nodes: int = 1
    sequence: int = 1
    experts: int = 1

    def fits(self, level: str) -> bool | None:
        """Whether a level fits the memory of a device and its host; None if that is not known.

        The peak is an estimate, +-20 %: a level fits if 1.2 times its estimate does. None if the
        device is unknown, or if the step was not traced and fits without activations.

        Raises:
          GShardError: the level was not forecast.
        """
        name = parse_level(level).name
        if name not in self.levels:
            raise GShardError(
                f"level {name} was not forecast, only {', '.join(self.levels)}: add it to levels=."
            )
        of = self.levels[name]
        if self.host_usable is not None and of.host > self.host_usable:
            return False
        if self.usable is None or (of.peak is None and of.needs <= self.usable):
            return None
        return (of.needs if of.peak is None else MARGIN * of.peak) <= self.usable

    def as_dict(self) -> dict[str, Any]:
        """Everything but the plans as dicts, tuples, strings and numbers, ready for JSON."""
        names = ("parameters", "devices", "replica", "sequence", "experts")
        names += ("target", "usable", "host_usable", "nodes")
        return {name: getattr(self, name) for name in names} | {
            "choices": dataclasses.asdict(self.choices),
            "levels": {
                name: level.as_dict() | {"fits": self.fits(name)}
                for name, level in self.levels.items()
            },
        }

    def __str__(self) -> str:
        return text_of(_report(self))

    def _repr_html_(self) -> str:
        """What a notebook shows: the same as `print(forecast)`."""
        return html_of(_report(self))


def _report(found: Forecast) -> list[Table | str]:
    """Returns tables of the memory of one device and of what it sends, level by level."""
    title = (
        f"{count_of(found.parameters)} parameters on {found.devices} devices{axes_of(found)}; a "
        f"step of {found.choices.examples(found.sequence)}"
    )
    columns = {sent_column(found): "wire"}
    if found.nodes > 1:
        columns[f"between {found.nodes} nodes"] = "network"
    wire = text_table(
        "Sent by one device in one step",
        ("level",),
        tuple(columns),
        [
            (name, *(bytes_of(getattr(level, of)) for of in columns.values()))
            for name, level in found.levels.items()
        ],
    )
    return [title, _memory_table(found), wire]


def axes_of(found: Forecast) -> str:
    """Readable axes of the mesh but the one that is always there, after a comma."""
    replicas = f", {found.replica:,} replicas of the sharded state" if found.replica > 1 else ""
    model = [f", {size:,} along {name!r}" for name, size in _model_axes(found)]
    experts = f", experts kept on an axis of {found.experts}" * (found.experts > 1)
    return "".join([replicas, *model, experts])


def sent_column(found: Forecast) -> str:
    """Heading of what a step sends: what was traced, or what the bound of an untraced step is."""
    if all(level.peak is not None for level in found.levels.values()):
        return "sent"
    others = found.sequence * found.experts > 1 or _model_axes(found)
    return "sent at most, without activations" if others else "sent at most"


def _model_axes(found: Forecast) -> tuple[tuple[str, int], ...]:
    return next(iter(found.plans.values())).group.model_axes


def about(peak: float) -> str:
    """Formats an estimated peak, such as `about 5.67 GB, +-20 %`."""
    return f"about {bytes_of(peak)}, +-{MARGIN - 1:.0%}".replace("%", " %")


def _memory_table(found: Forecast) -> Table:
    """Returns a table with a row per level, without columns that are 0 at every level."""
    levels = found.levels.values()
    names = {
        "parameters": "params",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "non_trainable": "non_trainable",
        "batch": "batch",
        "gathered": "gathered",
        **(
            {"activations": "activations", "peak": "peak"}
            if all(x.peak is not None for x in levels)
            else {"without activations": "needs"}
        ),
        "stored on the host": "host",
    }
    amounts = {title: [getattr(x, name) for x in levels] for title, name in names.items()}
    amounts = {title: column for title, column in amounts.items() if any(column)}
    title, known = "Memory of one device", found.usable is not None
    if found.usable is not None:
        title += f"; {found.target} has {bytes_of(found.usable)} for programs"
        if found.host_usable is not None and any(x.host for x in levels):
            title += f", and {bytes_of(found.host_usable)} on the host"
    made = text_table(title, ("level",), (*amounts, *(("forecast",) if known else ())))
    for name, *row in zip(found.levels, *amounts.values(), strict=True):
        said = {True: "fits", False: "does not fit", None: "not known"}[found.fits(name)]
        cells = [
            about(x) if of == "peak" else bytes_of(x) for of, x in zip(amounts, row, strict=True)
        ]
        made.add_row(name, *cells, *((said,) if known else ()))
    return made
