"""A forecast as text, the same in a terminal, a log and a file."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from gshard._util.units import bytes_of, count_of

if TYPE_CHECKING:
    from gshard.analysis.forecast import Forecast


def report(found: Forecast) -> str:
    """Memory of one device by level, and what it sends."""
    choices = found.choices
    copies = f", {found.replica} copies" if found.replica > 1 else ""
    title = (
        f"{count_of(found.parameters)} parameters on {found.devices} devices{copies}; a step of "
        f"{choices.micro_batches} x {choices.micro_batch_size} rows on each"
    )
    wire = table("Sent by one device in one step", ("level",), (
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
        "extras": [x.extras for x in levels],
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
    made = table(title, ("level",), (*amounts, *(("forecast",) if known else ())))
    for name, *row in zip(found.levels, *amounts.values(), strict=True):
        fits = ("fits" if found.fits(name) else "does not fit",) if known else ()
        made.add_row(name, *map(bytes_of, row), *fits)
    return made


def table(title: str, names: Iterable[str], amounts: Iterable[str]) -> Table:
    """An empty table: columns of names on the left, of amounts on the right."""
    made = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD)
    for name in names:
        made.add_column(name)
    for name in amounts:
        made.add_column(name, justify="right")
    return made


def text_of(parts: Iterable[Table | str], width: int = 160) -> str:
    """Tables and lines as plain text."""
    out = io.StringIO()
    console = Console(  # names are the user's: `[/b]` and `:tv:` are no markup
        file=out, width=width, color_system=None, highlight=False, markup=False, emoji=False
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())
