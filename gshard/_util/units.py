"""Amounts as readable text. GB are 1e9 bytes, as in the ZeRO paper and on data sheets."""

from __future__ import annotations


def bytes_of(count: float) -> str:
    """Bytes with three significant digits: `1.87 GB`, `640 MB`, `12 B`."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        # The rounded number decides: 999.6 MB is 1.00 GB.
        if float(f"{count:.3g}") >= 1000**power:
            return f"{_three(count / 1000**power)} {unit}"
    return f"{count:.0f} B"


def count_of(count: float) -> str:
    """A count with three significant digits: `7.50 B`, `124 M`."""
    for power, unit in ((4, "T"), (3, "B"), (2, "M"), (1, "k")):
        if float(f"{count:.3g}") >= 1000**power:
            return f"{_three(count / 1000**power)} {unit}"
    return f"{count:.0f}"


def _three(x: float) -> str:
    return f"{x:.0f}" if x >= 99.95 else f"{x:.1f}" if x >= 9.995 else f"{x:.2f}"


def seconds_of(seconds: float) -> str:
    """A duration: `1.23 s`, `45.6 ms`, `0 s`."""
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.9995 or (unit == "us" and seconds > 0):
            return f"{_three(seconds * factor)} {unit}"
    return "0 s"
