"""Tables, bars and the style sheet of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gshard._util.html import Markup, el, joined
from gshard._util.text import bytes_of


def amount(count: int | None) -> Markup:
    """Formats bytes for people, with the exact number for programs and as a tooltip."""
    if count is None:
        return el("span", "?")
    return el("data", bytes_of(count), value=count, title=f"{count:,} B")


def bars(
    rows: Mapping[str, Mapping[str, int]],
    marks: Mapping[str, int | None],
    limit: int | None,
    colors: Mapping[str, str],
) -> Markup:
    """Returns one bar of stacked amounts for each row, all drawn to one scale, and a legend.

    Args:
      rows: bytes by name of the row, and then by what takes them.
      marks: bytes at which a line crosses the row's bar; None for no line.
      limit: bytes at which a dashed line crosses all bars; None for no line.
      colors: the color of what takes the bytes, by name.
    """
    ends = [sum(of.values()) for of in rows.values()]
    ends += [at for at in (limit, *marks.values()) if at is not None]
    scale = max(ends) / 98 or 1  # percent of the width

    def line(kind: str, at: int | None) -> Markup | None:
        return None if at is None else el("i", class_=kind, style=f"left:{at / scale:.2f}%")

    drawn = []
    for name, of in rows.items():
        shown = {key: count for key, count in of.items() if count}
        areas = [
            el(
                "span",
                title=f"{key}: {bytes_of(count)} ({count:,} B)",
                style=f"width:{count / scale:.2f}%;background:{colors[key]}",
            )
            for key, count in shown.items()
        ]
        words = ", ".join(f"{key} {bytes_of(count)}" for key, count in shown.items())
        lines = line("peak", marks.get(name)), line("limit", limit)
        bar = el("div", areas, lines, class_="bar", role="img", aria_label=f"{name}: {words}")
        drawn.append(joined([el("p", el("strong", name), f" {bytes_of(sum(of.values()))}"), bar]))
    used = [key for key in colors if any(of.get(key) for of in rows.values())]
    squares = [el("span", class_="square", style=f"background:{colors[key]}") for key in used]
    legend = [el("li", *item) for item in zip(squares, used, strict=True)]
    return joined([el("ul", legend, class_="legend"), drawn])


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    """Returns a table whose first column names the rows. It scrolls by itself if it is too wide.

    Args:
      caption: what the table contains.
      columns: the headings.
      rows: texts and elements; amounts are aligned on the right.
    """
    rows = list(rows)
    sides = ["number" if any(str(row[i]).startswith("<data") for row in rows) else None
             for i in range(len(columns))]  # fmt: skip
    head = [el("th", x, scope="col", class_=side) for x, side in zip(columns, sides, strict=True)]
    body = []
    for row in rows:
        cells = [el("td", x, class_=side) for x, side in zip(row[1:], sides[1:], strict=True)]
        body.append(el("tr", el("th", row[0], scope="row"), cells))
    parts = el("caption", caption), el("thead", el("tr", head)), el("tbody", body)
    table = el("table", parts)
    # The keyboard can scroll it, too.
    return el("div", table, class_="scroll", role="region", aria_label=caption, tabindex=0)


def records_table(caption: str, rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Returns a table of dicts with a column for each key that one of them has."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    names = [key.replace("_", " ") for key in keys]
    return html_table(caption, names, [[shown_value(k, row.get(k)) for k in keys] for row in rows])


def facts(named: Mapping[str, Any]) -> Markup:
    """Returns a list of names with their values."""
    return el("dl", [[el("dt", name), el("dd", value)] for name, value in named.items()])


def shown_value(key: str, value: Any) -> Any:
    """Formats a JSON value; keys in `needs`, `has`, or that end with `bytes` contain bytes."""
    of_bytes = key in ("needs", "has") or key.endswith("bytes")
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


STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem 1.25rem 3rem;
  font: 15px/1.45 system-ui, "Helvetica Neue", Arial, sans-serif; }
h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 2px solid gray; }
h1, dd, p { overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .4rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dd { margin: 0; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; list-style: none; padding: 0; }
.square { display: inline-block; width: .9rem; height: .9rem; margin-right: .35rem; }
figure { margin: 0 0 1rem; }
.bar { position: relative; display: flex; height: 1.7rem; margin-bottom: .8rem; }
.bar i { position: absolute; top: -.25rem; bottom: -.25rem; border-left: 3px double CanvasText; }
.bar .limit { border-left: 2px dashed CanvasText; }
.scroll { overflow-x: auto; margin: .6rem 0 1.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; vertical-align: top;
  border-bottom: 1px solid gray; }
.number { text-align: right; }
td.number { white-space: nowrap; }
tbody th { font-weight: 400; min-width: 7rem; overflow-wrap: anywhere; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  details::details-content { content-visibility: visible; display: block; }
  .bar, tr { break-inside: avoid; }
  .scroll { overflow: visible; }
  span { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
