"""A benchmark's machine-readable file, and what it ran with."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import gshard

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


def versions() -> dict[str, str]:
    """Versions by name, of what is installed."""
    found = {"gshard": gshard.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_cells(path: Path, cells: Iterable[Any], machine: dict[str, Any], **more: Any) -> None:
    """Every cell (a named tuple) as JSON, and what it was measured on and with."""
    rows = [cell._asdict() for cell in cells]
    found = {"machine": machine | versions(), **more, "cells": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")
