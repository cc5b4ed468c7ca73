"""HTML elements, and tables and lines as the HTML that a notebook shows.

Everything that is not an element is escaped, so that no text can add markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from rich.table import Table

# Colors and fonts are the notebook's, light or dark. A long table scrolls.
_BOX = "overflow:auto;max-height:32em;margin-bottom:1em"
_CAPTION = "text-align:left;white-space:nowrap"
_CELL = "text-align:{};vertical-align:top;padding:.2em .7em"


class Markup(str):
    """Text that is already markup; made by `el` and `joined`, or a literal of the program."""

    __slots__ = ()


def el(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Returns one element.

    Args:
      name: the name of the element.
      *children: elements stay as they are, an iterable gives its members, None gives nothing, and
        everything else becomes text, escaped.
      **attributes: `class_` is `class`, `http_equiv` is `http-equiv`; one that is None or False is
        left out, and one that is True has no value.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{html.escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Markup(start if name == "meta" else f"{start}{joined(children)}</{name}>")


def joined(children: Iterable[Any]) -> Markup:
    """Concatenates elements and texts, which are treated like the children of `el`."""
    return Markup("".join(map(_child, children)))


def _child(child: Any) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, Iterable) and not isinstance(child, str):
        return joined(child)
    return html.escape(str(child))


def html_of(parts: Iterable[Table | str]) -> str:
    """Renders tables of `text_table` and lines as HTML, for `_repr_html_`."""
    return joined(_table(x) if isinstance(x, Table) else el("p", x) for x in parts)


def _table(table: Table) -> Markup:
    styles = [_CELL.format(column.justify) for column in table.columns]
    heads = [column.header for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return el(
        "div",
        el(
            "table",
            None if table.title is None else el("caption", table.title, style=_CAPTION),
            el("thead", _row("th", heads, styles)),
            el("tbody", [_row("td", cells, styles) for cells in rows]),
        ),
        style=_BOX,
    )


def _row(name: str, cells: Iterable[Any], styles: Iterable[str]) -> Markup:
    return el("tr", [el(name, x, style=style) for x, style in zip(cells, styles, strict=True)])
