"""Sizes as areas: a squarified treemap.

Source: Bruls, Huizing and van Wijk (2000), "Squarified Treemaps".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gshard._util.units import bytes_of
from gshard.analysis.html.bars import FILLS, LETTER, NARROW, WIDE, label, picture
from gshard.analysis.html.markup import Markup, el

_WIDTH, _HEIGHT = 900.0, 340.0  # pixels for which rectangles are made nearly square
_SHORTEST = 8  # letters of a key that says something though it is cut
_LINE = 14  # height in pixels of a line of letters


@dataclass(frozen=True)
class Rectangle:
    """Left, top, width and height."""

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
    """One thing of a treemap: its name, its bytes, and where it belongs (a key of `FILLS`)."""

    name: str
    amount: int
    kind: str


def squarified(sizes: Sequence[float], room: Rectangle) -> list[Rectangle]:
    """Rectangles with areas in proportion to sizes that fill a room, as square as it goes.

    Args:
      sizes: more than 0, in descending order.
      room: what is filled.
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
    """The ratio of sides of the longest rectangle of a row along `side`."""
    depth = total / side
    return max(largest / depth**2, depth**2 / smallest)


def _row(areas: list[float], total: float, room: Rectangle) -> tuple[list[Rectangle], Rectangle]:
    """Rectangles along the shorter side of a room, and the room that is left."""
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
    """A picture of tiles, those of one kind together.

    Args:
      key: begins the ids of the picture.
      title: of the picture.
      tiles: without those of 0 bytes; in any order.
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
    """The lines of a label with its class: once if it is the same on a telephone."""
    most = int((place.height - 4) // _LINE)
    narrow, wide = (
        _lines(tile, int((share * pixels - 8) / LETTER), most) for pixels in (NARROW, WIDE)
    )
    return [(wide, "")] if narrow == wide else [(wide, "wide"), (narrow, "narrow")]


def _lines(tile: Tile, letters: int, most: int) -> list[str]:
    """The end of a path in lines of so many letters, and the bytes where there is a line left."""
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
