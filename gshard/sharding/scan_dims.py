"""Which dimension of a leaf a scan over layers walks, as the user or Flax's metadata says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gshard._util import validation
from gshard._util.errors import GShardError
from gshard._util.validation import dimension, shown
from gshard.train_state import SCAN_NAMES

ScanAxes = Mapping[str, int] | Sequence[str] | None


def check_scan_axes(scan_axes: ScanAxes, params: Mapping[str, Any]) -> None:
    """Refuses `scan_axes` that are no names and no dimensions of the parameters they match."""
    if scan_axes is not None and not isinstance(scan_axes, (Mapping, Sequence)):
        raise GShardError(
            f"scan_axes={shown(scan_axes)} must map path patterns to dimensions, such as "
            "{'^layers/': 0}, or be the names that Flax's metadata uses."
        )
    if not isinstance(scan_axes, Mapping):
        return
    for path, leaf in params.items():
        found = _pattern_for(path, scan_axes)
        if found is not None and dimension(scan_axes[found], len(leaf.shape)) is None:
            raise GShardError(
                f"scan_axes[{found!r}]={shown(scan_axes[found])} is no dimension of {path} "
                f"{leaf.shape}."
            )


def scan_dim_of(
    path: str, leaf: Any, names: Sequence[str | None] | None, scan_axes: ScanAxes
) -> int | None:
    """The dimension that a scan walks; a pattern that fits a field by chance does not count."""
    known = SCAN_NAMES if scan_axes is None else scan_axes
    if isinstance(scan_axes, Mapping):
        found = _pattern_for(path, scan_axes)
        if found is not None:
            return dimension(scan_axes[found], len(leaf.shape))
        known = SCAN_NAMES
    known = (known,) if isinstance(known, str) else known
    return next((d for d, name in enumerate(names or ()) if name in known), None)


def _pattern_for(path: str, scan_axes: Mapping[str, Any]) -> str | None:
    matches = (p for p in scan_axes if validation.pattern(p, "scan_axes").search(path))
    return next(matches, None)
