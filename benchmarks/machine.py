"""What a benchmark ran with, for its machine-readable file."""

from __future__ import annotations

import platform
from importlib import metadata

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
