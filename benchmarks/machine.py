"""A benchmark's machine-readable file, what it ran with, and the target that this machine is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gshard._util.chips import chip_of
from gshard._util.version import versions
from gshard.analysis.aot.target import Target


def write_cells(path: Path, cells: Iterable[Any], machine: dict[str, Any], **more: Any) -> None:
    """Every cell (a named tuple) as JSON, and what it was measured on and with."""
    rows = [cell._asdict() for cell in cells]
    found = {"machine": machine | versions(), **more, "cells": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


def target_of(device: Any, count: int) -> Target | None:
    """One host with so many such devices; None if their data sheet is not known."""
    chip = chip_of(device)
    if chip is None:
        return None
    sizes = (1, count) if device.platform == "gpu" else (count // chip.per_chip,)
    return Target(chip.name, sizes)
