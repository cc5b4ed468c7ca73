"""What `gshard advise` prints: the options in their order, and where the time of each goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from gshard._util.text import bytes_of, seconds_of, text_of, text_table
from gshard.analysis.calibration import Calibration
from gshard.analysis.config import Config
from gshard.analysis.expert_axes import ExpertAxis, expert_axes_table
from gshard.analysis.fewer_bits import FewerBits, fewer_bits_table
from gshard.analysis.memory.footprint import MARGIN
from gshard.analysis.setup import on_each
from gshard.analysis.tune import TIE, Verdict, best_of_each


def base_of(found: Sequence[Verdict], axes: Sequence[ExpertAxis] = ()) -> float:
    """Seconds per step of the first option, the unit of times without a calibration.

    Where nothing fits: those of the nearest option, with which `axes` are compared.
    """
    return next((x.cost.step for x in found if x.cost), axes[0].seconds[0] if axes else 1.0)


def _time(seconds: float, base: float | None) -> str:
    return seconds_of(seconds) if base is None else f"{seconds / base:.2f}x"


def advice_text(
    config: Config,
    found: Sequence[Verdict],
    every: bool = False,
    measured: Calibration | None = None,
    bits: Sequence[FewerBits] = (),
    axes: Sequence[ExpertAxis] = (),
) -> str:
    """A report: options that fit, fastest first, and of the others the nearest to fitting.

    Of options that differ only in replicas and micro-batches it has the fastest, or all with
    `every`. `bits` are what fewer bits would give the first option, and `axes` expert axes.
    """
    fit, others = [x for x in found if x.fits], [x for x in found if not x.fits]
    examples = config.choices.micro_batch_size * config.choices.micro_batches
    machine = "" if config.target is None else f" on {config.target.text}"
    parts: list[Table | str] = [
        f"{config.model}{machine}: {examples} examples {on_each(config.sequence)} in a "
        f"step, {bytes_of(found[0].has)} for programs"
    ]
    if fit:
        shown = fit if every else best_of_each(fit)
        parts.append(_ranked(shown, measured))
        if len(fit) > len(shown):
            parts.append(f"Each with its best micro-batches and replicas; --all shows {len(fit)}.")
    else:
        parts.append("Nothing fits.")
    if others:
        rows = []
        for x in others[:3]:
            on_host = x.needs <= x.has and config.target and x.host > config.target.chip.host_memory
            missing = math.ceil(MARGIN * x.needs) - x.has
            missing = "the host's memory" if on_host else bytes_of(missing)
            rows.append((*x.names.values(), bytes_of(x.needs), missing))
        title = f"Does not fit: {len(others)}; the nearest"
        parts.append(text_table(title, others[0].names, ("needs at least", "too much by"), rows))
    parts += [*expert_axes_table(axes), *fewer_bits_table(bits)]
    parts.append(
        (
            "Times are relative to the first option. They are estimates, meant for ranking, and "
            "their order was compared with runs on one GPU, and not on several or on TPUs."
            if measured is None
            else "Times are estimates, based on the rates in the calibration."
        )
        + f" Options within {TIE - 1:.0%} are ties, and the simpler comes "
        f"first. An option fits if {MARGIN} times its estimated peak does. balance: examples of a "
        "micro-batch below which communication is the bottleneck."
    )
    return text_of(parts)


def _ranked(fit: Sequence[Verdict], measured: Calibration | None) -> Table:
    made = text_table(
        "Fits, fastest first",
        ("", *fit[0].names, "bound by"),
        ("step", "compute", "memory", "wire", "starts", "update", "peak", "of it", "balance"),
    )
    base = None if measured else base_of(fit)
    for rank, x in enumerate(fit, 1):
        if x.cost is None:
            continue
        seconds = (x.cost.step, x.cost.compute, x.cost.memory,
                   x.cost.wire + x.cost.all_gather_params, x.cost.starts,
                   x.cost.update + x.cost.host)  # fmt: skip
        made.add_row(
            str(rank),
            *x.names.values(),
            x.cost.binding,
            *(_time(amount, base) for amount in seconds),
            bytes_of(x.needs),
            f"{x.needs / x.has:.0%}",
            "-" if x.balance is None else f"{x.balance:.3g}",
        )
    return made


def advice_rows(
    found: Sequence[Verdict], measured: Calibration | None = None
) -> list[dict[str, Any]]:
    """One flat dict for each option, for a page."""
    base = None if measured else base_of(found)
    return [
        {
            **x.names,
            "fits": "yes" if x.fits else "no",
            "step": "" if x.cost is None else _time(x.cost.step, base),
            "bound by": "" if x.cost is None else x.cost.binding,
            "needs bytes": x.needs,
            "usable bytes": x.has,
        }
        for x in found
    ]
