"""Tables and amounts as plain text, the same in a terminal, a log and a file.

GB are 1e9 bytes, as in the ZeRO paper and on data sheets.
"""

from __future__ import annotations

import io
import re
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

    Each row has a cell for each name and each amount; `add_row` of the result adds more.
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


def bytes_of(count: float) -> str:
    """Bytes with three significant digits: `1.87 GB`, `640 MB`, `12 B`."""
    return _amount(count, ("TB", "GB", "MB", "kB")) or f"{count:.0f} B"


def count_of(count: float) -> str:
    """A count with three significant digits: `7.50 B`, `124 M`."""
    return _amount(count, ("T", "B", "M", "k")) or f"{count:.0f}"


def _amount(count: float, units: tuple[str, ...]) -> str:
    for power, unit in zip((4, 3, 2, 1), units, strict=True):
        if float(f"{count:.3g}") >= 1000**power:  # the rounded number: 999.6 MB is 1.00 GB
            return f"{_three(count / 1000**power)} {unit}"
    return ""


def _three(x: float) -> str:
    return f"{x:.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"


def seconds_of(seconds: float) -> str:
    """A duration: `1.23 s`, `45.6 ms`, `0 s`."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.9995 or (unit == "us" and seconds > 0):
            return f"{_three(seconds * factor)} {unit}"
    return "0 s"


def pattern_without(left_out: Iterable[str], paths: Iterable[str]) -> str:
    """A regular expression that all these paths contain but some of them: `^(?!head/)`."""
    left = sorted(left_out)
    others = {*paths}.difference(left)
    found = dict[str, None]()  # in order
    for path in left:
        names = path.split("/")
        above = ("".join(f"{name}/" for name in names[:i]) for i in range(1, len(names)))
        whole = next((x for x in above if not any(o.startswith(x) for o in others)), None)
        found[re.escape(path) + "$" if whole is None else re.escape(whole)] = None
    return f"^(?!{'|'.join(found)})"
