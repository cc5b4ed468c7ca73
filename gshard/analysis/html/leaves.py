"""What lies on one device at one level, leaf by leaf: as areas, and as a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax

from gshard.analysis.html.fills import legend
from gshard.analysis.html.markup import Markup, el
from gshard.analysis.html.tables import amount, table
from gshard.analysis.html.treemap import Tile, treemap
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan, described

_TILES, _ROWS = 150, 40  # how many leaves are drawn, and listed; the rest is one entry
_SMALL = 0.0005  # of all bytes: the smallest area that can be seen


@dataclass(frozen=True)
class Leaf:
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


def leaves_of(plan: Plan) -> list[Leaf]:
    """Every array of the state at rest, the largest first."""
    level, found = plan.level, []
    for part, kind, tree, sharded in (
        ("parameters", "params", plan.params, level.divides_params),
        ("optimizer", "optimizer", plan.layouts.opt_state._replace(master={}), level.divides_state),
        ("master copy", "optimizer", plan.master, level.divides_state),
        ("step", "optimizer", plan.layouts.step, False),
        ("extras", "extras", plan.extras, level.divides_params),
    ):
        for x in jax.tree.leaves(tree):
            # A parameter has the reason of its gradient, which the level may shard alone.
            reason = x.reason if sharded else f"replicated at {level.name}"
            found.append(Leaf(part, "host" if x.on_host else kind, x, reason))
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
    kinds = [kind for kind in ("params", "optimizer", "extras", "host")
             if any(tile.kind == kind for tile in tiles)]  # fmt: skip
    title = f"Arrays of the train state on one device at level {name}, by bytes at rest"
    if any("*" in tile.name for tile in tiles):
        title += "; * stands for any number"
    areas = treemap(f"leaves-{name}", title, tiles)
    figure = el("figure", el("figcaption", title), legend(kinds), areas)
    count = f"{len(leaves):,} array{'s' * (len(leaves) != 1)}, "
    line = el("summary", el("h3", name), " ", count, amount(sum(x.bytes for x in leaves)))
    return el("details", line, figure, _table(name, leaves), open=shown, id=f"level-{name}")


def _tiles(leaves: Sequence[Leaf]) -> list[Tile]:
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


def _table(name: str, leaves: Sequence[Leaf]) -> Markup:
    rows = [
        (
            x.layout.path,
            x.part,
            " x ".join(map(str, x.layout.shape)) or "scalar",
            str(x.layout.dtype),
            described(x.layout),
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


def _sum(leaves: Iterable[Leaf]) -> int:
    return sum(x.bytes for x in leaves)
