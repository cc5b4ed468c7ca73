"""Stacked horizontal bars as SVG.

Lengths are percentages of the picture's width and letters have a size in pixels: a narrow screen
gets narrow bars, not small letters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gshard._util.units import bytes_of
from gshard.analysis.html.markup import Markup, el

NARROW, WIDE = 340, 640  # pixels that a picture has at least, on a telephone and on paper
LETTER = 7.0  # pixels, of the widest usual letters of 12 px
_BAR, _HEAD, _GAP = 30, 20, 14  # heights in pixels


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
      name: what stands above it.
      parts: bytes by key of `FILLS`, from left to right.
      total: what is said beside the name.
      mark: bytes where a short line crosses the bar, with its name; None for no such line.
    """

    name: str
    parts: Mapping[str, int]
    total: str
    mark: tuple[int, str] | None = None


def bars(key: str, title: str, rows: Sequence[Bar], limit: tuple[int, str] | None = None) -> Markup:
    """A picture of bars, drawn to one scale.

    Args:
      key: begins the ids of the picture.
      title: of the picture.
      rows: the bars.
      limit: bytes where a dashed line crosses all of them, with its name.
    """
    ends = [sum(row.parts.values()) for row in rows]
    ends += [row.mark[0] for row in rows if row.mark] + ([limit[0]] if limit else [])
    scale = max(ends) * 1.02 or 1
    top = 22 if limit else 0
    shapes: list[Markup] = []
    for row in rows:
        shapes.append(_bar(row, top, scale))
        top += _HEAD + _BAR + _GAP
    if limit:
        shapes.append(_line(limit, scale, top))
    return picture(key, title, "; ".join(map(_in_words, rows)), shapes, top)


def picture(key: str, title: str, words: str, shapes: Sequence[Markup], height: float) -> Markup:
    """An SVG as wide as there is room, with a title and a description for who cannot see it."""
    return el(
        "svg",
        el("title", title, id=f"{key}-title"),
        el("desc", words, id=f"{key}-desc"),
        shapes,
        width="100%",
        height=f"{height:.0f}",
        role="img",
        aria_labelledby=f"{key}-title {key}-desc",
    )


def room_for(text: str, share: float) -> str | None:
    """The class of a label on `share` of a picture's width; None where there is no room."""
    needed = len(text) * LETTER + 8
    return "" if share * NARROW >= needed else "wide" if share * WIDE >= needed else None


def label(text: str, fill: Fill, x: str, y: float, room: str, **more: str) -> Markup:
    """Letters on a fill, with a halo of its colour."""
    kind = f"label {room}".strip()
    return el(
        "text", text, x=x, y=f"{y:.1f}", fill=fill.ink, stroke=fill.colour, class_=kind, **more
    )


def _bar(row: Bar, top: float, scale: float) -> Markup:
    shapes = [
        el("text", el("tspan", row.name, class_="name"), f" {row.total}", x=0, y=top + 14,
           class_="free")
    ]  # fmt: skip
    x = 0.0
    for key, amount in row.parts.items():
        share, fill = amount / scale, FILLS[key]
        if amount == 0:
            continue
        text = bytes_of(amount)
        tooltip = el("title", f"{fill.name}: {text} ({amount:,} B)")
        shapes.append(
            el("rect", tooltip, x=f"{x:.3%}", y=top + _HEAD, width=f"{share:.3%}", height=_BAR,
               fill=fill.paint, class_="edge")
        )  # fmt: skip
        if (room := room_for(text, share)) is not None:
            middle = f"{x + share / 2:.3%}"
            y = top + _HEAD + _BAR / 2 + 4.5
            shapes.append(label(text, fill, middle, y, room, text_anchor="middle"))
        x += share
    if row.mark:
        at = f"{row.mark[0] / scale:.3%}"
        words = el("title", f"{row.mark[1]}: {bytes_of(row.mark[0])}")
        shapes.append(
            el("line", words, x1=at, x2=at, y1=top + _HEAD - 4, y2=top + _HEAD + _BAR + 4,
               class_="mark")
        )  # fmt: skip
    return el("g", shapes)


def _line(limit: tuple[int, str], scale: float, height: float) -> Markup:
    share = limit[0] / scale
    at = f"{share:.3%}"
    side = {"text_anchor": "end", "dx": -4} if share > 0.5 else {"dx": 4}
    return el(
        "g",
        el("line", x1=at, x2=at, y1=2, y2=height - _GAP + 6, class_="limit"),
        el("text", limit[1], x=at, y=12, class_="free", **side),
    )


def _in_words(row: Bar) -> str:
    parts = [f"{FILLS[key].name} {bytes_of(n)}" for key, n in row.parts.items() if n]
    return f"{row.name}: {row.total} ({', '.join(parts)})"


_LINES = {
    "plain": "",
    "rising": "M0 8L8 0M-2 2L2 -2M6 10L10 6",
    "falling": "M0 0L8 8M-2 6L2 10M6 -2L10 2",
    "flat": "M0 4H8",
    "upright": "M4 0V8",
    "crossed": "M0 4H8M4 0V8",
    "dotted": "M1 2h2M5 6h2",
}


@dataclass(frozen=True)
class Fill:
    """How one kind of memory is drawn.

    Attributes:
      key: what `url(#fill-KEY)` refers to.
      name: for people.
      colour: of the area, and of a halo around labels, so that no line crosses a letter.
      ink: of labels and lines on it.
      lines: name of the hatching.
    """

    key: str
    name: str
    colour: str
    ink: str
    lines: str

    @property
    def paint(self) -> str:
        """What a `fill=` is given."""
        return f"url(#fill-{self.key})"


FILLS = {
    fill.key: fill
    for fill in (
        Fill("params", "parameters", "#0072b2", "#ffffff", "plain"),
        Fill("gradients", "gradients", "#e69f00", "#000000", "rising"),
        Fill("optimizer", "optimizer state", "#56b4e9", "#000000", "dotted"),
        Fill("non_trainable", "non_trainable", "#f0e442", "#000000", "flat"),
        Fill("batch", "batch", "#cc79a7", "#000000", "upright"),
        Fill("gathered", "layer gathered", "#009e73", "#000000", "falling"),
        Fill("activations", "activations", "#d55e00", "#000000", "crossed"),
        Fill("wire", "sent", "#bbbbbb", "#000000", "plain"),
        Fill("host", "on the host", "#dddddd", "#000000", "rising"),
    )
}


def definitions() -> Markup:
    """The patterns, once for all pictures of a page."""
    patterns = [
        el(
            "pattern",
            el("rect", width=8, height=8, fill=fill.colour),
            el("path", d=_LINES[fill.lines], stroke=fill.ink, stroke_opacity=0.45, fill="none"),
            id=f"fill-{fill.key}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for fill in FILLS.values()
    ]
    return el("svg", el("defs", patterns), class_="defs", width=0, height=0, aria_hidden="true")


def legend(keys: list[str]) -> Markup:
    """What the fills of a picture stand for."""
    return el(
        "ul", [el("li", swatch(FILLS[key]), FILLS[key].name) for key in keys], class_="legend"
    )


def swatch(fill: Fill) -> Markup:
    """A small square of one fill."""
    square = el("rect", x=0.5, y=0.5, width=15, height=15, fill=fill.paint, class_="edge")
    return el("svg", square, width=16, height=16, aria_hidden="true")
