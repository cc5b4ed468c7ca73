"""What the compiler for a target says, as text, beside the forecast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from gshard._util.tables import text_of, text_table
from gshard._util.units import bytes_of
from gshard.analysis.audit_report import total

if TYPE_CHECKING:
    from gshard.analysis.forecast_report import Forecast

_KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def compiled_report(target: str, forecast: Forecast, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Memory and collectives of every level that was compiled, and what is too large and why.

    Args:
      target: the machine.
      forecast: for the comparison.
      found: by level, what `compile_for` returns, or `{"error": ...}`.
    """
    known = {name: of for name, of in found.items() if "error" not in of}
    parts: list[Table | str] = []
    if known:
        parts += [_memory(target, forecast, known), _wire(known)]
    for name, of in found.items():
        if "error" in of:
            parts.append(f"{name}: {of['error']}")
        elif of["fits"] is False:
            parts.append(_too_large(name, of))
    return text_of(parts)


def verdict(of: Mapping[str, Any]) -> str:
    """Whether it fits, in a word."""
    return {True: "fits", False: "does not fit", None: "-"}[of["fits"]]


def _memory(target: str, forecast: Forecast, found: Mapping[str, Mapping[str, Any]]) -> Table:
    made = text_table(
        f"Compiled for {target}: memory of one device",
        ("level", "verdict"),
        ("arguments", "temporaries", "peak", "of it usable", "on the host", "forecast", "ratio",
         "compiled in"),
    )  # fmt: skip
    for name, of in found.items():
        memory, expected = of["memory"], forecast.levels[name].peak
        needs, has = of["needs"], of["has"]
        made.add_row(
            name,
            verdict(of),
            _bytes(memory.get("argument")),
            _bytes(memory.get("temp")),
            _bytes(needs),
            _bytes(has),
            _bytes(memory.get("host_argument", 0)),
            _bytes(expected),
            f"{expected / needs:.3f}" if expected and needs else "-",
            f"{of['compile_seconds']:.0f} s",
        )
    return made


def _wire(found: Mapping[str, Mapping[str, Any]]) -> Table:
    made = text_table(
        "Sent by one device in one step, as compiled",
        ("level",),
        (*_KINDS, "others", "in all", "overlapped", "collectives"),
    )
    for name, of in found.items():
        wire = of["wire_bytes"]
        others = [wire[kind] for kind in wire if kind not in _KINDS]
        whole, beside = total(wire.values()), total(of["asynchronous_bytes"].values())
        amounts = (*(wire.get(kind, 0) for kind in _KINDS), total(others), whole)
        made.add_row(
            name,
            *("?" if x is None else bytes_of(x) for x in amounts),
            "?" if whole is None or beside is None else f"{beside / whole:.0%}" if whole else "-",
            str(sum(row["count"] for row in of["collectives"])),
        )
    return made


def _too_large(name: str, of: Mapping[str, Any]) -> str:
    over = bytes_of(of["needs"] - of["has"]) if of["needs"] else "more than it has"
    lines = [f"{name} does not fit: too much by {over}. What is alive where memory peaks:"]
    for buffer in of["largest"][:8]:
        times = f" x {buffer['count']}" if buffer["count"] > 1 else ""
        lines.append(f"  {bytes_of(buffer['bytes'])}{times}  {buffer['shape']}  {buffer['what']}")
    return "\n".join(lines)


def _bytes(count: int | None) -> str:
    return "-" if count is None else bytes_of(count)
