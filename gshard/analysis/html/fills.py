"""Colours and hatchings: every kind of memory can be told apart without colours, and on paper.

Colours: Okabe and Ito (2008), "Color Universal Design". Labels on each have a contrast of 4.5 or
more (WCAG 2.2, 1.4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from gshard.analysis.html.markup import Markup, el

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
        Fill("extras", "extras", "#f0e442", "#000000", "flat"),
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
