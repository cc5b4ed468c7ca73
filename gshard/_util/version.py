"""The version of gshard, which the build reads and the package exports, and of what it uses."""

from __future__ import annotations

import platform
from importlib import metadata

__version__ = "0.1.0"


_PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


def versions() -> dict[str, str]:
    """The versions of gshard, Python and the installed packages that it uses, by name."""
    found = {"gshard": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
