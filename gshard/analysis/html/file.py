"""The page as a file that a command writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from gshard.analysis.config import Config
from gshard.analysis.forecast import Forecast
from gshard.analysis.html.page import page
from gshard.checkpoint.safetensors.save import NewFile, file_path


def place(file: str | None) -> contextlib.AbstractContextManager[NewFile | None]:
    """The file of a page, opened before the work: a place that cannot be written is refused."""
    if file is None:
        return contextlib.nullcontext()
    return NewFile(file_path(file, "--html"), "--html")


def page_of(
    config: Config,
    found: Forecast,
    compiled: Mapping[str, Mapping[str, Any]] | None = None,
    advice: Iterable[Mapping[str, Any]] | None = None,
) -> str:
    """The page of a forecast, with what is known of the target."""
    target = config.target
    return page(
        found,
        model=config.model if target is None else f"{config.model} for {target.text}",
        compiled=compiled,
        advice=advice,
        capacity=None if target is None else target.chip.usable,
        # A host of a TPU slice is a tile of its torus: not devices in a row.
        per_host=target.devices_per_host if target and target.platform == "gpu" else None,
    )
