"""HTML and SVG elements, tables and the style sheet of a page.

Everything that is not an element is escaped, so that no text can add markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gshard._util.units import bytes_of

_VOID = {"meta", "link", "br", "hr", "col"}


class Markup(str):
    """Text that is already markup; made by `el` and `joined`, or a literal of the program."""

    __slots__ = ()


def el(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Returns one element.

    Args:
      name: the name of the element.
      *children: elements stay as they are, an iterable gives its members, None gives nothing, and
        everything else becomes text, escaped.
      **attributes: `class_` is `class`, `stroke_width` is `stroke-width`; one that is None or False
        is left out, and one that is True has no value.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{html.escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Markup(start if name in _VOID else f"{start}{joined(children)}</{name}>")


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


_BYTES = ("needs", "has", "host")


def amount(count: int | None) -> Markup:
    """Formats bytes for people, with the exact number for programs and as a tooltip."""
    if count is None:
        return el("span", "?")
    return el("data", bytes_of(count), value=count, title=f"{count:,} B")


def html_table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], **more: Any
) -> Markup:
    """Returns a table whose first column names the rows. It scrolls by itself if it is too wide.

    Args:
      caption: what the table contains.
      columns: the headings.
      rows: texts and elements; amounts are aligned on the right.
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
    """Wraps content that may be too wide in a region that the keyboard can scroll."""
    return el("div", content, class_="scroll", role="region", aria_label=name, tabindex=0)


def records_table(caption: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> Markup:
    """Returns a table of dicts with a column for each key that one of them has."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    names = [key.replace("_", " ") for key in keys]
    cells = [[shown_value(key, row.get(key)) for key in keys] for row in rows]
    return html_table(caption, names, cells, **more)


def shown_value(key: str, value: Any) -> Any:
    """Formats a JSON value; keys in `_BYTES` or that end with `bytes` have amounts in bytes."""
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
    """Returns the class of a column that contains numbers."""
    return "number" if any(str(x).startswith("<data") for x in column) else None


STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #555; --paper: #fff; --line: #999;
  --band: #f3f3f3; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #eee; --soft: #bbb; --paper: #181818; --line: #888; --band: #262626; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem 1.25rem 3rem; color: var(--ink);
  background: var(--paper); font: 15px/1.45 system-ui, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-bottom: .2rem;
  border-bottom: 2px solid var(--line); }
h3 { font-size: 1rem; margin: 1rem 0 .4rem; }
summary { cursor: pointer; padding: .4rem 0; }
summary h3 { display: inline; margin: 0 .6rem 0 0; }
p, dd, figcaption { overflow-wrap: anywhere; }
nav ul, .legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; list-style: none; padding: 0;
  margin: .5rem 0; }
a { color: inherit; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); }
dd { margin: 0; }
figure { margin: .5rem 0 1rem; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
.legend svg { vertical-align: -3px; margin-right: .35rem; }
.defs { position: absolute; }
.scroll { overflow-x: auto; margin: .6rem 0 1.2rem; }
table { border-collapse: collapse; min-width: min(100%, 30rem);
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid var(--ink); vertical-align: bottom; }
tbody th { font-weight: 600; }
.number { text-align: right; }
td.number { white-space: nowrap; }
table.leaves { font-size: 13px; width: 100%; }
table.leaves tbody th { font-weight: 400; min-width: 11rem; overflow-wrap: anywhere; }
table.leaves td:nth-child(2), table.leaves td:nth-child(3),
table.leaves td:nth-child(5) { white-space: nowrap; }
table.leaves td:nth-child(7) { min-width: 10rem; }
table.mesh { font-size: 12px; }
table.mesh td, table.mesh thead th { min-width: 5.6rem; padding: .3rem .5rem; }
table.mesh tbody { border-bottom: 2px solid var(--ink); }
table.mesh tbody th[scope=rowgroup] { font-weight: 400; min-width: 9rem; }
table.mesh span { display: block; white-space: nowrap; }
table.mesh td.dots { text-align: center; vertical-align: middle; min-width: 2rem; }
table.mesh td.host { border-left: 4px double var(--ink); }
svg { display: block; overflow: visible; }
.legend svg { display: inline; }
.edge { stroke: var(--paper); stroke-width: 1; }
.outline { fill: none; stroke: var(--ink); }
.mark { stroke: var(--ink); stroke-width: 3; stroke-dasharray: 10 18; }
.limit { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 6 4; }
text { font: 12px system-ui, "Helvetica Neue", Arial, sans-serif; }
.free { fill: var(--ink); font-size: 13px; }
.name { font-weight: 700; }
.label { stroke-width: 6; stroke-linejoin: round; paint-order: stroke; pointer-events: none; }
.narrow { display: none; }
@media screen and (max-width: 699px) {
  .wide { display: none; }
  .narrow { display: inline; }
}
@media print {
  @page { margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  details::details-content { content-visibility: visible; display: block; }
  figure, tr, table.mesh tbody, svg { break-inside: avoid; }
  h2, h3, summary, caption, figcaption { break-after: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; }
  table.leaves { font-size: 8pt; }
  table.mesh { font-size: 7pt; }
  table.mesh td, table.mesh thead th { min-width: 0; padding: .2rem .25rem; }
  svg, svg * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
