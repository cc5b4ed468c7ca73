"""Imports Orbax, without the 20 lines that it logs at INFO for every save."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

_LOGGER = "absl"  # all of Orbax logs to it


def orbax_module() -> Any:
    """Returns `orbax.checkpoint`, whose import takes most of a second.

    A script that turns on INFO for its own logs would get more lines of Orbax than of itself.
    Warnings and errors are kept, and `logging.getLogger("absl").setLevel(logging.DEBUG)` keeps all.
    """
    import orbax.checkpoint as ocp

    logging.getLogger(_LOGGER).addFilter(_is_wanted)  # adding it again changes nothing
    return ocp


def _is_wanted(record: logging.LogRecord) -> bool:
    if record.levelno > logging.INFO or logging.getLogger(_LOGGER).isEnabledFor(logging.DEBUG):
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None:  # not `record.pathname`: that of absl, if its logger is older than it
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("gshard", "logging", "absl"):
            return module != "orbax"
        frame = frame.f_back
    return True
