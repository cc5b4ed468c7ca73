"""Tables and amounts of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gshard._util.units import bytes_of
from gshard.analysis.html.markup import Markup, el

_BYTES = ("needs", "has", "host")


def amount(count: int | None) -> Markup:
    """Bytes for people, with the exact number for programs and as a tooltip."""
    if count is None:
        return el("span", "?")
    return el("data", bytes_of(count), value=count, title=f"{count:,} B")


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], **more: Any
) -> Markup:
    """A table whose first column names the rows. It scrolls by itself where it is too wide.

    Args:
      caption: what it holds.
      columns: headings.
      rows: texts and elements; amounts stand on the right.
      **more: attributes of the table.
    """
    rows = list(rows)
    sides = [_side(row[i] for row in rows) for i in range(len(columns))]
    head = [el("th", x, scope="col", class_=side) for x, side in zip(columns, sides, strict=True)]
    body = [
        el(
            "tr",
            el("th", row[0], scope="row"),
            [el("td", x, class_=side) for x, side in zip(row[1:], sides[1:], strict=True)],
        )
        for row in rows
    ]
    made = el(
        "table", el("caption", caption), el("thead", el("tr", head)), el("tbody", body), **more
    )
    return scrolling(made, caption)


def scrolling(content: Markup, name: str) -> Markup:
    """What may be wider than the page, in a region that the keyboard reaches too."""
    return el("div", content, class_="scroll", role="region", aria_label=name, tabindex=0)


def records(caption: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> Markup:
    """A table of dicts: a column for each key that one of them has."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    names = [key.replace("_", " ") for key in keys]
    cells = [[shown_value(key, row.get(key)) for key in keys] for row in rows]
    return table(caption, names, cells, **more)


def shown_value(key: str, value: Any) -> Any:
    """A value of JSON for people; a key of `_BYTES`, or that ends with `bytes`, holds bytes."""
    of_bytes = key in _BYTES or key.endswith("bytes")
    if value is None:
        return "?"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return amount(value) if of_bytes else el("data", f"{value:,}", value=value)
    if isinstance(value, float):
        return el("data", f"{value:.4g}", value=repr(value))
    if isinstance(value, Mapping):
        return ", ".join(
            f"{k} {'?' if v is None else bytes_of(v) if of_bytes else v}" for k, v in value.items()
        )
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(value)


def _side(column: Iterable[Any]) -> str | None:
    """The class of a column that holds numbers."""
    return "number" if any(str(x).startswith("<data") for x in column) else None
