"""Draws the diagrams of docs/architecture.md.

    python scripts/draw_architecture.py [FOLDER]

writes `step-by-level.svg` and `gather-at-first-use.svg` (to docs/images by default). The output
depends on this file alone, so a test compares it with the committed files byte for byte.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

SANS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, MUTED, LINE, PAPER, BAND = "#1f2328", "#57606a", "#8c959f", "#ffffff", "#f3f4f6"
# What a box is: (fill, border). Text is dark on all of them, in dark mode too.
COMPUTE = ("#ffffff", "#6e7781")
GATHER = ("#cfe3ff", "#1f6feb")
SCATTER = ("#ffdfb6", "#bc6c00")
REDUCE = ("#e6d6ff", "#8250df")
STORED = ("#d8f0dd", "#2da44e")


class Drawing:
    """An SVG with a background of its own, so that it reads the same in light and dark mode."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height = width, height
        self.items = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{SANS}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker>'
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]

    def rect(self, x: float, y: float, w: float, h: float, fill: str, border: str = "none") -> None:
        self.items.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" fill="{fill}" '
            f'stroke="{border}" stroke-width="1.5"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        anchor: str = "start",
        color: str = INK,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        family = f' font-family="{MONO}"' if mono else ""
        self.items.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}{family}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        lines: list[str],
        kind: tuple[str, str],
        size: float = 13,
    ) -> None:
        """A box with centred lines of text; refuses text that is wider than the box."""
        for line in lines:
            if 0.62 * size * len(line) > w:
                raise ValueError(f"{line!r} does not fit into {w} pixels: widen the box.")
        self.rect(x, y, w, h, *kind)
        first = y + h / 2 + 0.36 * size - (len(lines) - 1) * 0.6 * size
        for i, line in enumerate(lines):
            color = INK if i == 0 else MUTED
            self.text(x + w / 2, first + 1.2 * size * i, line, size, "middle", color)

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.items.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{MUTED}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def legend(self, x: float, y: float, entries: list[tuple[str, tuple[str, str]]]) -> None:
        for name, kind in entries:
            self.rect(x, y - 11, 14, 14, *kind)
            self.text(x + 20, y, name, 12, color=MUTED)
            x += 40 + 7.2 * len(name)

    def svg(self) -> str:
        return "\n".join([*self.items, "</svg>", ""])


# ---- one step at each level ----------------------------------------------------------------------

# Left edge and width of each stage; the first five run once per micro-batch.
STAGES = [(200, 88), (302, 88), (404, 88), (506, 88), (608, 116), (754, 116), (884, 116)]
STAGES += [(1014, 100)]
# Name, other names, shares of parameters, gradients and optimizer state, elements, stages.
LEVELS = [
    (
        "dp",
        "DDP",
        (1, 1, 1),
        "2Ψ",
        {
            1: (["forward"], COMPUTE),
            3: (["backward"], COMPUTE),
            4: (["add gradients", "full"], COMPUTE),
            5: (["all-reduce", "gradients"], REDUCE),
            6: (["optax update", "all parameters"], COMPUTE),
        },
    ),
    (
        "os",
        "ZeRO-1",
        (1, 1, 0),
        "2Ψ",
        {
            1: (["forward"], COMPUTE),
            3: (["backward"], COMPUTE),
            4: (["add gradients", "full"], COMPUTE),
            5: (["reduce-scatter", "gradients"], SCATTER),
            6: (["optax update", "1/N"], COMPUTE),
            7: (["all-gather", "parameters"], GATHER),
        },
    ),
    (
        "os_g",
        "ZeRO-2",
        (1, 0, 0),
        "(k+1)Ψ",
        {
            1: (["forward"], COMPUTE),
            3: (["backward"], COMPUTE),
            4: (["reduce-scatter", "then add 1/N"], SCATTER),
            6: (["optax update", "1/N"], COMPUTE),
            7: (["all-gather", "parameters"], GATHER),
        },
    ),
    (
        "p_g_os",
        "ZeRO-3, FSDP",
        (0, 0, 0),
        "at most 3kΨ",
        {
            0: (["all-gather", "by layer"], GATHER),
            1: (["forward"], COMPUTE),
            2: (["re-gather", "by layer"], GATHER),
            3: (["backward"], COMPUTE),
            4: (["reduce-scatter", "then add 1/N"], SCATTER),
            6: (["optax update", "1/N"], COMPUTE),
        },
    ),
]


def step_by_level() -> str:
    """What each level computes and communicates in one step, on one row per level."""
    d = Drawing(1140, 610, "One training step at the levels dp, os, os_g and p_g_os")
    d.text(24, 36, "One training step at each level", 18, bold=True)
    d.legend(
        430,
        34,
        [
            ("on each device", COMPUTE),
            ("all-gather", GATHER),
            ("reduce-scatter", SCATTER),
            ("all-reduce", REDUCE),
        ],
    )
    top, row = 96, 112
    d.rect(190, 56, 544, top + 4 * row - 62, BAND)
    d.rect(744, 56, 380, top + 4 * row - 62, BAND)
    d.text(462, 78, "for each of k micro-batches", 13, "middle", MUTED, bold=True)
    d.text(934, 78, "once per step", 13, "middle", MUTED, bold=True)
    for i, (name, aliases, shares, elements, stages) in enumerate(LEVELS):
        y = top + i * row
        d.text(24, y + 14, name, 15, bold=True, mono=True)
        d.text(24 + 10 * len(name) + 10, y + 14, aliases, 13, color=MUTED)
        names = ("parameters", "gradients", "optimizer")
        for j, (what, full) in enumerate(zip(names, shares, strict=True)):
            y_bar = y + 24 + 18 * j
            d.text(24, y_bar + 11, what, 12, color=MUTED)
            d.rect(100, y_bar, 76, 13, PAPER, LINE)
            d.rect(100, y_bar, 76 if full else 15, 13, *STORED)
        d.text(24, y + 92, f"communicates {elements}", 12, color=MUTED)
        middle, edge = y + 46, None
        for place, (lines, kind) in stages.items():
            x, w = STAGES[place]
            if edge is not None:
                d.arrow(edge + 2, middle, x - 3, middle)
            d.box(x, middle - 24, w, 48, lines, kind)
            edge = x + w
    notes = [
        "Green: what one device stores (gradients: between micro-batches). A short bar is 1/N "
        "of it; N devices in the shard group, Ψ parameters, elements times (N-1)/N.",
        "With k = 1 the gradients of os are also reduce-scattered where they are produced: os and "
        "os_g are then the same program.",
    ]
    for i, note in enumerate(notes):
        d.text(24, 572 + 20 * i, note, 12, color=MUTED)
    return d.svg()


# ---- gather at first use -------------------------------------------------------------------------

EQUATIONS = [
    ("convert_element_type", "cast the shard, so that the compute dtype travels"),
    ("reshape, transpose", "note the view; apply it after the all-gather"),
    ("jit", "enter it, and evaluate its body in the same way"),
    ("checkpoint", "rebuild it with the all-gather inside: recomputing gathers again"),
    ("scan", "rebuild it: the body takes one layer's shard and gathers it"),
    ("any other equation", "all-gather the sharded operands, then run it unchanged"),
]
# Communication and computation of a model with three layers: (from, to, words, kind), in columns.
NETWORK = [
    (0, 1, ["gather 1"], GATHER),
    (1, 2, ["gather 2"], GATHER),
    (2, 3, ["gather 3"], GATHER),
    (4, 5, ["re-gather 2"], GATHER),
    (5, 6, ["scatter 3"], SCATTER),
    (6, 7, ["re-gather 1"], GATHER),
    (7, 8, ["scatter 2"], SCATTER),
    (9, 10, ["scatter 1"], SCATTER),
]
DEVICE = [
    (1, 2, ["forward 1"], COMPUTE),
    (2, 3, ["forward 2"], COMPUTE),
    (3, 4, ["forward 3"], COMPUTE),
    (4, 5, ["backward 3"], COMPUTE),
    (5, 7, ["backward 2"], COMPUTE),
    (7, 9, ["backward 1"], COMPUTE),
]
FULL = [
    (0, 2, ["layer 1"], STORED),
    (1, 3, ["layer 2"], STORED),
    (2, 5, ["layer 3"], STORED),
    (4, 7, ["layer 2 again"], STORED),
    (6, 9, ["layer 1 again"], STORED),
]


def gather_at_first_use() -> str:
    """How a loss on full parameters is evaluated with sharded ones, and what then runs."""
    d = Drawing(1140, 690, "How parameters are all-gathered at their first use at level p_g_os")
    d.text(24, 36, "All-gather at first use (level p_g_os)", 18, bold=True)

    d.text(24, 70, "1. Trace the loss once, with full shapes", 14, bold=True)
    d.box(24, 84, 200, 52, ["loss_fn(params, batch)", "the model is unchanged"], COMPUTE)
    d.arrow(226, 110, 280, 110)
    d.box(284, 84, 200, 52, ["jaxpr", "a list of equations"], COMPUTE)
    d.text(520, 70, "Inputs of the evaluation, on each device", 14, bold=True)
    d.box(520, 84, 190, 52, ["local shard", "1/N of a parameter"], STORED)
    d.box(724, 84, 190, 52, ["gradient sink", "zeros, one shard"], STORED)
    d.box(928, 84, 188, 52, ["micro-batch", "this device's examples"], STORED)

    heading = "2. Evaluate it equation by equation. Where an operand is still sharded:"
    d.text(24, 176, heading, 14, bold=True)
    d.rect(24, 190, 1092, 172, BAND)
    for i, (name, action) in enumerate(EQUATIONS):
        y = 215 + 26 * i
        d.text(44, y, name, 13, mono=True)
        d.arrow(236, y - 5, 262, y - 5)
        d.text(276, y, action, 13)
    d.box(
        790, 206, 306, 62, ["forward: all-gather(shard)", "one gather, however often used"], GATHER
    )
    d.box(790, 284, 306, 62, ["backward: reduce-scatter", "its gradient reaches the sink"], SCATTER)

    d.text(24, 400, "3. What then runs, for three layers", 14, bold=True)
    left, unit = 140, 97.6
    lanes = [
        ("network", 420, 40, NETWORK),
        ("computation", 472, 40, DEVICE),
    ]
    for name, y, h, entries in lanes:
        d.text(24, y + h / 2 + 5, name, 13, color=MUTED)
        for start, end, lines, kind in entries:
            d.box(left + unit * start, y, unit * (end - start) - 4, h, lines, kind)
    d.text(24, 540, "full layers", 13, color=MUTED)
    d.text(24, 557, "in memory", 13, color=MUTED)
    for i, (start, end, lines, kind) in enumerate(FULL):
        y = 524 + 30 * (i % 2)
        d.box(left + unit * start, y, unit * (end - start) - 4, 24, lines, kind)
    d.arrow(left, 596, left + 10 * unit - 4, 596)
    d.text(left, 614, "time", 12, color=MUTED)
    notes = [
        "A barrier ties each all-gather to earlier computation, so that compilers do not gather "
        "many layers ahead. With prefetch=False it also waits for the computation just before its "
        "use.",
        "Nothing gathered is saved for the backward pass except the last layer of the forward "
        "pass, which the backward pass uses first. In a scan or checkpoint it is gathered again "
        "too.",
    ]
    for i, note in enumerate(notes):
        d.text(24, 644 + 20 * i, note, 12, color=MUTED)
    return d.svg()


DRAWINGS = {"step-by-level.svg": step_by_level, "gather-at-first-use.svg": gather_at_first_use}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / name).write_text(draw(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "docs" / "images"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
