"""The one place that holds the version: the build reads it, the package re-exports it."""

from __future__ import annotations

__version__ = "0.1.0"
