"""The version of gshard, which the build reads and the package exports, and of what it uses."""

from __future__ import annotations

import platform
import shlex
from importlib import metadata
from pathlib import Path

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


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra, such as `"s3"`.

    It names the packages, which an index has from wherever gshard was installed.
    """
    try:
        wanted = metadata.requires("gshard") or []
    except metadata.PackageNotFoundError:  # gshard is on the path, in a folder that pip can install
        return shlex.join(["pip", "install", "-e", f"{Path(__file__).parents[2]}[{extra}]"])
    parts = [text.replace('"', "'").partition(";") for text in wanted]
    packages = [name.strip() for name, _, marker in parts if f"extra == '{extra}'" in marker]
    return shlex.join(["pip", "install", *packages])
