"""A plan as a table to read."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from gshard.sharding.layout import Layout

if TYPE_CHECKING:
    from gshard.sharding.plan import Plan


def table(plan: Plan) -> str:
    """A table of the parameters and extras, and a line of totals."""
    rows = Table(box=box.SIMPLE_HEAD)
    for name in ("parameter", "shape", "at rest", "gradient", "bytes per device", "reason"):
        rows.add_column(name, justify="right" if name.startswith("bytes") else "left")
    for stored, reduced in zip(
        jax.tree.leaves(plan.params), jax.tree.leaves(plan.grads), strict=True
    ):
        rows.add_row(
            stored.path,
            f"{stored.dtype}{list(stored.shape)}",
            described(stored),
            described(reduced),
            f"{stored.bytes_per_device:,}",
            reduced.reason,
        )
    for layout in jax.tree.leaves(plan.extras):
        rows.add_row(
            layout.path,
            f"{layout.dtype}{list(layout.shape)}",
            described(layout),
            "none",
            f"{layout.bytes_per_device:,}",
            layout.reason,
        )
    out = io.StringIO()
    paths = [layout.path for layout in jax.tree.leaves((plan.params, plan.extras))]
    width = 120 + max(map(len, paths), default=0)
    console = Console(file=out, width=width, markup=False, emoji=False)
    sizes = ", ".join(f"{name} {n:,} B" for name, n in plan.bytes_per_device.items())
    console.print(
        f"level {plan.level.name}: {plan.group.size} devices {plan.group.shard} x "
        f"{plan.group.copies} copies"
        + "".join(f", your own axis {name!r} of {size}" for name, size in plan.group.user)
    )
    console.print(rows)
    console.print(f"per device at rest: {sizes}")
    try:
        groups = plan.fetched_at_once
    except (TypeError, ValueError):  # it needs arguments that only the user's own loop has
        groups = ()
    if groups:
        console.print(
            f"an update fetches what is on the host in {len(groups)} group"
            f"{'s' if len(groups) > 1 else ''}, the largest of {max(groups):,} B"
        )
    return out.getvalue()


def described(layout: Layout) -> str:
    """What of a leaf lies on one device: `dim 0 / 8`, `whole`, and whether on the host."""
    pad = f" + {layout.padding} padded" if layout.padding else ""
    own = [] if layout.dim is None else [f"dim {layout.dim} / {layout.group.size}{pad}"]
    over = [f"dim {d} over {', '.join(names)}" for d, names in enumerate(layout.user) if names]
    return ", ".join([*own, *over] or ["whole"]) + (", on host" if layout.on_host else "")
