"""A benchmark's machine-readable file, and what it ran with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gshard._util.version import versions


def write_cells(path: Path, cells: Iterable[Any], machine: dict[str, Any], **more: Any) -> None:
    """Every cell (a named tuple) as JSON, and what it was measured on and with."""
    rows = [cell._asdict() for cell in cells]
    found = {"machine": machine | versions(), **more, "cells": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")
