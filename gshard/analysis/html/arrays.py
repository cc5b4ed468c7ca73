"""Shows the arrays of a train state: by size for each level, and by device on a mesh grid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from gshard.analysis.forecast import Forecast
from gshard.analysis.html.markup import Markup, amount, el, html_table, joined, scrolling
from gshard.analysis.html.pictures import FILLS, Tile, legend, treemap
from gshard.sharding.budget import accumulation
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan, describe_layout

_TILES, _LISTED = 150, 40  # how many leaves are drawn, and listed; the rest is one entry
_SMALL = 0.0005  # of all bytes: the smallest area that can be seen


@dataclass(frozen=True)
class StoredLeaf:
    """One array of a train state, as it is stored between steps.

    Attributes:
      part: readable name of the part of the state.
      kind: its category in the forecast, a key of `FILLS`.
      layout: its layout.
      reason: why it has this layout.
    """

    part: str
    kind: str
    layout: Layout
    reason: str

    @property
    def bytes(self) -> int:
        """Bytes on one device, padding included."""
        return self.layout.bytes_per_device


def leaves_of(plan: Plan) -> list[StoredLeaf]:
    """Returns every array of the state as stored between steps, largest first."""
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
    """Returns a section with the leaves of one level, which can be collapsed.

    Args:
      name: the name of the level.
      plan: the plan of the level.
      shown: whether the section is open at first.
    """
    leaves = leaves_of(plan)
    tiles = _tiles(leaves)
    kinds = [kind for kind in ("params", "optimizer", "non_trainable", "host")
             if any(tile.kind == kind for tile in tiles)]  # fmt: skip
    title = f"Arrays of the train state on one device at level {name}, by stored bytes"
    if any("*" in tile.name for tile in tiles):
        title += "; * stands for any number"
    areas = treemap(f"leaves-{name}", title, tiles)
    figure = el("figure", el("figcaption", title), legend(kinds), areas)
    count = f"{len(leaves):,} array{'s' * (len(leaves) != 1)}, "
    line = el("summary", el("h3", name), " ", count, amount(sum(x.bytes for x in leaves)))
    return el("details", line, figure, _table(name, leaves), open=shown, id=f"level-{name}")


def _tiles(leaves: Sequence[StoredLeaf]) -> list[Tile]:
    """Returns a tile for each array; if there are very many, paths that differ in numbers share."""
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
    """Returns the label of the items that are not shown one by one."""
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
        for x in leaves[:_LISTED]
    ]
    caption = f"Arrays at level {name}, the largest first"
    if rest := leaves[_LISTED:]:
        caption += f": {len(rows)} of {len(leaves):,}"
        rows.append((others(len(rest)), "", "", "", "", amount(_sum(rest)), ""))
    columns = ("path", "part of", "shape", "dtype", "layout", "bytes on one device", "reason")
    return html_table(caption, columns, rows, class_="leaves")


def _sum(leaves: Iterable[StoredLeaf]) -> int:
    return sum(x.bytes for x in leaves)


# How many are shown: all up to the first number, else so many at the beginning and at the end.
_COLUMNS, _ROWS = (8, 4, 2), (4, 2, 1)
_BAR, _TALL = 16, 36  # width and height in pixels of a leaf in a device
_LEAST = 3  # pixels of a part that would be too thin to see


def mesh_grid(found: Forecast, per_host: int | None) -> Markup | None:
    """Shows which shard of one leaf each device stores; None for a state without parameters.

    Args:
      found: the forecast.
      per_host: number of devices of one host, if the mesh does not have it.
    """
    held = _held(found)
    if not held:
        return None
    plan = next(iter(found.plans.values()))
    ids, hosts = _devices(plan, per_host)
    layouts = [x.local() for of in held.values() for x in of.values()]
    divided = next((x for x in layouts if x.dim is not None), layouts[0])
    columns, rows = _some(ids.shape[1], *_COLUMNS), _some(ids.shape[0], *_ROWS)
    head = [el("th", "level", scope="col"), el("th", "copy", scope="col")]
    head += [el("th", _part_in_words(divided, i), scope="col") for i in columns]
    bodies = []
    for name, of in held.items():
        words = el(
            "th", el("strong", name), _held_in_words(of), scope="rowgroup", rowspan=len(rows)
        )
        lines = [
            el(
                "tr",
                words if r == rows[0] else None,
                el("th", _or_dots(r), scope="row"),
                [_cell(of, r, i, ids, hosts) for i in columns],
            )
            for r in rows
        ]  # fmt: skip
        bodies.append(el("tbody", lines))
    caption = f"What each device holds of {divided.path} ({list(divided.shape)}, {divided.dtype})"
    grid = el("table", el("caption", caption), el("thead", el("tr", head)), bodies, class_="mesh")
    kinds = list(dict.fromkeys(kind for of in held.values() for kind in of))
    about = el("p", _mesh_in_words(plan, ids, hosts))
    return joined([about, legend(kinds), scrolling(grid, caption)])


def _held(found: Forecast) -> dict[str, dict[str, Layout]]:
    """Returns, for each level, one leaf's layouts as parameter, gradient and optimizer state.

    The leaf is the largest one that is sharded at some level, or else the largest of all.
    """
    reduced = {name: jax.tree.leaves(plan.grads) for name, plan in found.plans.items()}
    columns = list(zip(*reduced.values(), strict=True))
    if not columns:
        return {}
    at = max(
        range(len(columns)),
        key=lambda i: (any(x.dim is not None for x in columns[i]), columns[i][0].size),
    )
    held = {}
    for name, plan in found.plans.items():
        leaf, gradient = jax.tree.leaves(plan.params)[at], reduced[name][at]
        way = accumulation(plan, found.choices.micro_batches, found.choices.accumulate)
        of = {"params": leaf, "gradients": gradient.replicated() if way == "local" else gradient}
        for x in jax.tree.leaves(plan.layouts.opt_state):
            if x.shape == leaf.shape and x.path.endswith(leaf.path):
                of["optimizer"] = x
                break
        held[name] = of
    return held


def _devices(plan: Plan, per_host: int | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the mesh indices of devices by replica and shard, and their hosts (None if unknown).

    Of the user's own axes only index 0 is shown.
    """
    mesh, group = plan.mesh, plan.group
    own = [name for name in mesh.axis_names if name not in group.axes]
    order = [mesh.axis_names.index(name) for name in (*group.axes, *own)]

    def in_order(values: np.ndarray) -> np.ndarray:
        of = values.reshape(mesh.axis_sizes).transpose(order)
        return of.reshape(group.replicas, group.size, -1)[:, :, 0]

    ids = in_order(np.arange(mesh.size))
    if per_host is not None:
        return ids, ids // per_host
    if isinstance(mesh, Mesh):
        hosts = in_order(np.array([device.process_index for device in mesh.devices.flat]))
        return ids, hosts if hosts.max() > 0 else None
    return ids, None


def _some(count: int, most: int, first: int, last: int) -> list[int | None]:
    """Returns all numbers below `count`, or the first and last ones with None for the others."""
    if count <= most:
        return list(range(count))
    return [*range(first), None, *range(count - last, count)]


def _or_dots(number: int | None) -> str:
    return "…" if number is None else str(number)


def _cell(
    of: Mapping[str, Layout],
    copy: int | None,
    part: int | None,
    ids: np.ndarray,
    hosts: np.ndarray | None,
) -> Markup:
    """Draws one device: a column for each layout of the leaf, with the local shard filled."""
    if copy is None or part is None:
        return el("td", "…", class_="dots")
    kind, places = None, [f"device {ids[copy, part]}"]
    if hosts is not None:
        places.append(f"host {hosts[copy, part]}")
        first = part == 0 or hosts[copy, part - 1] != hosts[copy, part]
        kind = "host" if first else None
    shapes = []
    for n, (key, layout) in enumerate(of.items()):
        x, whole = n * (_BAR + 4) + 1, layout.dim is None
        tall = _TALL if whole else max(_TALL / layout.group.size, _LEAST)
        y = 0 if whole else min(part / layout.group.size * _TALL, _TALL - tall)
        shapes.append(
            el("rect", x=x, y=f"{y + 1:.2f}", width=_BAR, height=f"{tall:.2f}",
               fill=FILLS[key].paint)
        )  # fmt: skip
        shapes.append(el("rect", x=x, y=1, width=_BAR, height=_TALL, class_="outline"))
    width = len(of) * (_BAR + 4)
    drawn = el("svg", shapes, width=width, height=_TALL + 2, aria_hidden="true")
    return el("td", drawn, [el("span", place) for place in places], class_=kind)


def _part_in_words(layout: Layout, part: int | None) -> str:
    """Describes a shard, such as `part 3: 24 to 31 of dim 0`."""
    if part is None:
        return "…"
    if layout.dim is None:
        return f"part {part}"
    size, whole = layout.shard_shape[layout.dim], layout.shape[layout.dim]
    first, last = part * size, min((part + 1) * size, whole) - 1
    if first > last:
        return f"part {part}: padding"
    which = f"{first}" if first == last else f"{first} to {last}"
    return f"part {part}: {which} of dim {layout.dim}"


def _held_in_words(of: Mapping[str, Layout]) -> str:
    """Describes the local shards of a device: how much it stores of each part of the state."""
    shares = (
        f"{FILLS[key].name} {'whole' if x.dim is None else f'1/{x.group.size}'}"
        for key, x in of.items()
    )
    return f": {', '.join(shares)}"


def _mesh_in_words(plan: Plan, ids: np.ndarray, hosts: np.ndarray | None) -> str:
    sizes = zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)
    copies, parts = ids.shape
    words = [
        f"Mesh {' x '.join(f'{name} {size:,}' for name, size in sizes)}: "
        f"{copies:,} cop{'ies' if copies != 1 else 'y'} of the state, each over {parts:,} "
        f"device{'s' * (parts != 1)}."
    ]
    if plan.group.model_axes:
        words.append("Of the mesh axes of your own the first place is shown.")
    if hosts is not None:
        words.append("A double line begins a host.")
    if None in (*_some(parts, *_COLUMNS), *_some(copies, *_ROWS)):
        words.append("… stands for devices that are not drawn.")
    return " ".join(words)
