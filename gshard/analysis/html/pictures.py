"""Draws SVG pictures: stacked horizontal bars, and treemaps (sizes as areas).

Lengths are percentages of the picture's width, and the font size is in pixels: a narrow screen gets
narrow bars, not small text. Treemaps are squarified: Bruls, Huizing and van Wijk (2000).
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
      name: the text above it.
      parts: bytes by key of `FILLS`, from left to right.
      total: the text next to the name.
      mark: bytes where a short line crosses the bar, with its name; None for no such line.
    """

    name: str
    parts: Mapping[str, int]
    total: str
    mark: tuple[int, str] | None = None


def bars(key: str, title: str, rows: Sequence[Bar], limit: tuple[int, str] | None = None) -> Markup:
    """Returns a picture of bars, drawn to one scale.

    Args:
      key: the prefix of the picture's ids.
      title: the title of the picture.
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
    """Returns an SVG of full width, with a title and a description for screen readers."""
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
    """Returns the class of a label on `share` of a picture's width; None if it does not fit."""
    needed = len(text) * LETTER + 8
    return "" if share * NARROW >= needed else "wide" if share * WIDE >= needed else None


def label(text: str, fill: Fill, x: str, y: float, room: str, **more: str) -> Markup:
    """Returns text on a fill, with a halo of the fill's colour."""
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
      name: the readable name.
      colour: the colour of the area, and of a halo around labels, so that no line crosses a letter.
      ink: the colour of labels and lines on it.
      lines: the name of the hatching.
    """

    key: str
    name: str
    colour: str
    ink: str
    lines: str

    @property
    def paint(self) -> str:
        """The value of a `fill=` attribute."""
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
    """Returns the definitions of the patterns, which all pictures of a page share."""
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
    """Returns a legend of the fills of a picture."""
    return el(
        "ul", [el("li", swatch(FILLS[key]), FILLS[key].name) for key in keys], class_="legend"
    )


def swatch(fill: Fill) -> Markup:
    """Returns a small square with one fill."""
    square = el("rect", x=0.5, y=0.5, width=15, height=15, fill=fill.paint, class_="edge")
    return el("svg", square, width=16, height=16, aria_hidden="true")


_WIDTH, _HEIGHT = 900.0, 340.0  # pixels for which rectangles are made nearly square
_SHORTEST = 8  # letters of a key that says something though it is cut
_LINE = 14  # height in pixels of a line of letters


@dataclass(frozen=True)
class Rectangle:
    """A rectangle: left, top, width and height."""

    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        """Width times height."""
        return self.width * self.height


@dataclass(frozen=True)
class Tile:
    """One item of a treemap: its name, its bytes, and its kind (a key of `FILLS`)."""

    name: str
    amount: int
    kind: str


def squarified(sizes: Sequence[float], room: Rectangle) -> list[Rectangle]:
    """Returns rectangles in proportion to sizes that fill `room` and are as square as possible.

    Args:
      sizes: positive sizes, in descending order.
      room: the rectangle to fill.
    """
    found: list[Rectangle] = []
    per_size = room.area / sum(sizes) if sizes else 0
    areas = [size * per_size for size in sizes]
    while areas:
        short = min(room.width, room.height)
        count, taken = 1, areas[0]
        while count < len(areas):
            longer = taken + areas[count]
            if _worst(areas[0], areas[count], longer, short) > _worst(
                areas[0], areas[count - 1], taken, short
            ):
                break
            count, taken = count + 1, longer
        row, areas = areas[:count], areas[count:]
        placed, room = _row(row, taken, room)
        found += placed
    return found


def _worst(largest: float, smallest: float, total: float, side: float) -> float:
    """Returns the largest aspect ratio in a row of rectangles along `side`."""
    depth = total / side
    return max(largest / depth**2, depth**2 / smallest)


def _row(areas: list[float], total: float, room: Rectangle) -> tuple[list[Rectangle], Rectangle]:
    """Returns rectangles along the shorter side of `room`, and the rest of the room."""
    placed: list[Rectangle] = []
    at = 0.0
    if room.width >= room.height:
        depth = total / room.height
        for area in areas:
            placed.append(Rectangle(room.x, room.y + at, depth, area / depth))
            at += area / depth
        left = Rectangle(room.x + depth, room.y, max(room.width - depth, 0), room.height)
    else:
        depth = total / room.width
        for area in areas:
            placed.append(Rectangle(room.x + at, room.y, area / depth, depth))
            at += area / depth
        left = Rectangle(room.x, room.y + depth, room.width, max(room.height - depth, 0))
    return placed, left


def treemap(key: str, title: str, tiles: Sequence[Tile]) -> Markup:
    """Returns a picture of tiles, grouped by kind.

    Args:
      key: the prefix of the picture's ids.
      title: the title of the picture.
      tiles: tiles of more than 0 bytes, in any order.
    """
    kinds: dict[str, list[Tile]] = {}
    for tile in sorted(tiles, key=lambda x: -x.amount):
        kinds.setdefault(tile.kind, []).append(tile)
    sums = {kind: sum(x.amount for x in members) for kind, members in kinds.items()}
    order = sorted(sums, key=lambda kind: -sums[kind])
    rooms = squarified([sums[kind] for kind in order], Rectangle(0, 0, _WIDTH, _HEIGHT))
    shapes: list[Markup] = []
    for kind, room in zip(order, rooms, strict=True):
        places = squarified([x.amount for x in kinds[kind]], room)
        shapes += [_tile(x, place) for x, place in zip(kinds[kind], places, strict=True)]
    words = "; ".join(f"{FILLS[kind].name} {bytes_of(sums[kind])}" for kind in order)
    return picture(key, title, words, shapes, _HEIGHT)


def _tile(tile: Tile, place: Rectangle) -> Markup:
    fill = FILLS[tile.kind]
    x, share = place.x / _WIDTH, place.width / _WIDTH
    tooltip = f"{tile.name} ({fill.name}): {bytes_of(tile.amount)}, {tile.amount:,} B"
    shapes = [
        el("rect", el("title", tooltip), x=f"{x:.3%}", y=f"{place.y:.2f}", width=f"{share:.3%}",
           height=f"{place.height:.2f}", fill=fill.paint, class_="edge")
    ]  # fmt: skip
    for text, room in _texts(tile, place, share):
        for i, line in enumerate(text, 1):
            y = place.y + i * _LINE
            shapes.append(label(line, fill, f"{x:.3%}", y, room, dx="5"))
    return el("g", shapes)


def _texts(tile: Tile, place: Rectangle, share: float) -> list[tuple[list[str], str]]:
    """Returns the lines of a label with its class; one entry if phones show the same label."""
    most = int((place.height - 4) // _LINE)
    narrow, wide = (
        _lines(tile, int((share * pixels - 8) / LETTER), most) for pixels in (NARROW, WIDE)
    )
    return [(wide, "")] if narrow == wide else [(wide, "wide"), (narrow, "narrow")]


def _lines(tile: Tile, letters: int, most: int) -> list[str]:
    """Splits the end of a path into lines of `letters` letters; a spare line shows the bytes."""
    lines: list[str] = []
    for key in reversed(tile.name.split("/")):
        joined = f"{key}/{lines[0]}" if lines else key
        if lines and len(joined) <= letters:
            lines[0] = joined
        elif len(key) <= letters - bool(lines) and len(lines) < most:
            lines.insert(0, f"{key}/" if lines else key)
        elif len(lines) < most and letters >= _SHORTEST:
            lines.insert(0, f"{key[: letters - 1]}…")
            break
        else:
            break
    size = bytes_of(tile.amount)
    return [*lines, size] if lines and len(lines) < most and len(size) <= letters else lines
