"""The one place that holds the version: the build reads it, the package re-exports it."""

from __future__ import annotations

import platform
from importlib import metadata

__version__ = "0.1.0"


_PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


def versions() -> dict[str, str]:
    """Versions by name, of what is installed."""
    found = {"gshard": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
