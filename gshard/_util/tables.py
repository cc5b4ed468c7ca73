"""Tables as plain text, the same in a terminal, a log and a file."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table


def text_table(
    title: str | None,
    columns: Iterable[str],
    amounts: Iterable[str] = (),
    rows: Iterable[Iterable[str]] = (),
) -> Table:
    """A table with left-aligned columns of names, then right-aligned columns of amounts.

    Args:
      title: printed above the table; None for none.
      columns: headers of the names.
      amounts: headers of the amounts.
      rows: cells, one for each name and each amount. `add_row` of the result adds more.
    """
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name)
    for name in amounts:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def text_of(parts: Iterable[Table | str], width: int = 160) -> str:
    """Renders tables and lines as plain text, without spaces at the ends of lines."""
    out = io.StringIO()
    console = Console(  # names are the user's: `[/b]` and `:tv:` are no markup
        file=out, width=width, color_system=None, highlight=False, markup=False, emoji=False
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())
