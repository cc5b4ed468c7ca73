"""Advice as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from gshard._util.tables import text_of, text_table
from gshard._util.units import bytes_of, seconds_of
from gshard.analysis.config import Config
from gshard.analysis.cost_model import COMPUTE_SHARE, MEMORY_SHARE
from gshard.analysis.tune import Verdict, best_of_each


def advice(config: Config, found: Sequence[Verdict], every: bool = False) -> str:
    """Those that fit, fastest first, and what is nearest to fitting of the others.

    Of those that differ in copies and micro-batches alone the fastest, unless `every` is wanted.
    """
    fit, others = [x for x in found if x.fits], [x for x in found if not x.fits]
    rows = config.choices.micro_batch_size * config.choices.micro_batches
    machine = "" if config.target is None else f" on {config.target.text}"
    has = bytes_of(found[0].has)
    title = f"{config.model}{machine}: {rows} rows on each device in a step, {has} for programs"
    parts: list[Table | str] = [title]
    if fit:
        shown = fit if every else best_of_each(fit)
        parts.append(_ranked(shown))
        if len(fit) > len(shown):
            parts.append(
                f"Each with the micro-batches and copies that suit it; --all shows {len(fit)}."
            )
    else:
        parts.append("Nothing fits.")
    if others:
        made = text_table(
            f"Does not fit: {len(others)}; the nearest",
            ("level", "replica x shard", "micro-batches", "with"),
            ("needs", "too much by"),
        )
        for x in others[:3]:
            made.add_row(*_names(x), bytes_of(x.needs), _missing(x))
        parts.append(made)
    parts.append(
        f"A model, good for an order: {COMPUTE_SHARE:.0%} of the chip's peak, {MEMORY_SHARE:.0%} "
        "of its memory's bandwidth, no latency. balance: rows of a micro-batch below which the "
        "wire binds."
    )
    return text_of(parts)


def _ranked(fit: Sequence[Verdict]) -> Table:
    made = text_table(
        "Fits, fastest first",
        ("", "level", "replica x shard", "micro-batches", "with", "bound by"),
        ("step", "compute", "memory", "wire", "update", "peak", "of it", "balance"),
    )
    for place, x in enumerate(fit, 1):
        if x.cost is None:
            continue
        cost = x.cost
        made.add_row(
            str(place),
            *_names(x),
            cost.binding,
            *map(seconds_of, (cost.step, cost.compute, cost.memory)),
            seconds_of(cost.wire + cost.all_gather_params),
            seconds_of(cost.update + cost.host),
            bytes_of(x.needs),
            f"{x.needs / x.has:.0%}",
            "-" if x.balance is None else f"{x.balance:.3g}",
        )
    return made


def _names(x: Verdict) -> tuple[str, str, str, str]:
    option = x.option
    return (
        option.level,
        f"{option.replica} x {x.devices // option.replica}",
        f"{option.choices.micro_batches} x {option.choices.micro_batch_size}",
        option.beside,
    )


def _missing(x: Verdict) -> str:
    return bytes_of(x.needs - x.has) if x.needs > x.has else "the host's memory"


def as_rows(found: Sequence[Verdict]) -> list[dict[str, Any]]:
    """The same of each kind as flat rows, for a page."""
    keys = ("level", "replica x shard", "micro-batches", "with")
    return [
        {
            **dict(zip(keys, _names(x), strict=True)),
            "fits": "yes" if x.fits else "no",
            "step": "" if x.cost is None else seconds_of(x.cost.step),
            "bound by": "" if x.cost is None else x.cost.binding,
            "needs bytes": x.needs,
            "usable bytes": x.has,
        }
        for x in found
    ]
