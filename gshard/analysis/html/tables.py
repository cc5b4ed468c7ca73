"""Tables and amounts of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from gshard._util.units import bytes_of
from gshard.analysis.html.bars import legend
from gshard.analysis.html.markup import Markup, el
from gshard.analysis.html.treemap import Tile, treemap
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan, describe_layout

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


_TILES, _ROWS = 150, 40  # how many leaves are drawn, and listed; the rest is one entry
_SMALL = 0.0005  # of all bytes: the smallest area that can be seen


@dataclass(frozen=True)
class StoredLeaf:
    """One array of a train state at rest.

    Attributes:
      part: of the state, for people.
      kind: what it counts as in the forecast: a key of `FILLS`.
      layout: where it lies.
      reason: why.
    """

    part: str
    kind: str
    layout: Layout
    reason: str

    @property
    def bytes(self) -> int:
        """On one device, padding included."""
        return self.layout.bytes_per_device


def leaves_of(plan: Plan) -> list[StoredLeaf]:
    """Every array of the state at rest, the largest first."""
    level, found = plan.level, []
    for part, kind, tree, sharded in (
        ("parameters", "params", plan.params, level.shards_params),
        (
            "optimizer",
            "optimizer",
            plan.layouts.opt_state._replace(master={}),
            level.shards_opt_state,
        ),
        ("master copy", "optimizer", plan.master, level.shards_opt_state),
        ("step", "optimizer", plan.layouts.step, False),
        ("non_trainable", "non_trainable", plan.non_trainable, level.shards_params),
    ):
        for x in jax.tree.leaves(tree):
            # A parameter has the reason of its gradient, which the level may shard alone.
            reason = x.reason if sharded else f"replicated at {level.name}"
            found.append(StoredLeaf(part, "host" if x.on_host else kind, x, reason))
    return sorted(found, key=lambda x: -x.bytes)


def leaves_of_level(name: str, plan: Plan, shown: bool) -> Markup:
    """The leaves of one level, to be folded away.

    Args:
      name: of the level.
      plan: of the level.
      shown: whether it is not folded to begin with.
    """
    leaves = leaves_of(plan)
    tiles = _tiles(leaves)
    kinds = [kind for kind in ("params", "optimizer", "non_trainable", "host")
             if any(tile.kind == kind for tile in tiles)]  # fmt: skip
    title = f"Arrays of the train state on one device at level {name}, by bytes at rest"
    if any("*" in tile.name for tile in tiles):
        title += "; * stands for any number"
    areas = treemap(f"leaves-{name}", title, tiles)
    figure = el("figure", el("figcaption", title), legend(kinds), areas)
    count = f"{len(leaves):,} array{'s' * (len(leaves) != 1)}, "
    line = el("summary", el("h3", name), " ", count, amount(sum(x.bytes for x in leaves)))
    return el("details", line, figure, _table(name, leaves), open=shown, id=f"level-{name}")


def _tiles(leaves: Sequence[StoredLeaf]) -> list[Tile]:
    """An area for each array; of very many, for those together that differ in numbers alone."""
    many = len(leaves) > _TILES
    sums: dict[tuple[str, str], int] = {}
    for x in leaves:
        name = re.sub(r"(?<!^)\d+", "*", x.layout.path) if many else x.layout.path
        key = (x.kind, name if x.part != "master copy" else f"{x.part}/{name}")
        sums[key] = sums.get(key, 0) + x.bytes
    total = sum(sums.values())
    ranked = sorted(sums.items(), key=lambda item: -item[1])
    large = [item for item in ranked[:_TILES] if item[1] > _SMALL * total]
    tiles = [Tile(name, count, kind) for (kind, name), count in large]
    for kind in dict.fromkeys(x.kind for x in leaves):
        small = [count for (of, _), count in ranked[len(large) :] if of == kind]
        if sum(small):
            tiles.append(Tile(others(len(small)), sum(small), kind))
    return tiles


def others(count: int) -> str:
    """The name of what is not shown one by one."""
    return f"{count:,} other{'s' * (count != 1)}"


def _table(name: str, leaves: Sequence[StoredLeaf]) -> Markup:
    rows = [
        (
            x.layout.path,
            x.part,
            " x ".join(map(str, x.layout.shape)) or "scalar",
            str(x.layout.dtype),
            describe_layout(x.layout),
            amount(x.bytes),
            x.reason,
        )
        for x in leaves[:_ROWS]
    ]
    caption = f"Arrays at level {name}, the largest first"
    if rest := leaves[_ROWS:]:
        caption += f": {len(rows)} of {len(leaves):,}"
        rows.append((others(len(rest)), "", "", "", "", amount(_sum(rest)), ""))
    columns = ("path", "part of", "shape", "dtype", "at rest", "bytes on one device", "reason")
    return table(caption, columns, rows, class_="leaves")


def _sum(leaves: Iterable[StoredLeaf]) -> int:
    return sum(x.bytes for x in leaves)
