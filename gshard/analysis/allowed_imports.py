"""Which code a configuration file may name: people mail such files to each other.

A model is imported and called with arguments of the file, so `model = "os:system"` would run
anything. Words of the command line are the user's own and are not restricted.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError, without_partial

_SHIPPED = "gshard.models"


class ModelOfFile(str):
    """A `module:function` that a file names, where it may; nothing is imported.

    `allowed` are names of modules and packages that the user trusts.
    """

    def __new__(cls, model: str, allowed: Sequence[str] = ()) -> ModelOfFile:
        """Raises a `GShardError` if the module may be any code."""
        made = super().__new__(cls, model)
        made._module, made._allowed = model.partition(":")[0], allowed
        is_there = _places(made._module.partition(".")[0]) is not None  # else load_setup says so
        if is_there and not _may_be_named(made._module, allowed):
            raise _refusal(model, made._module)
        return made

    _module: str
    _allowed: Sequence[str]

    def check(self, function: Callable[..., Any]) -> None:
        """Raises a `GShardError` for a function that the module has from elsewhere."""
        function = without_partial(function)
        name = getattr(function, "__module__", None) or type(function).__module__
        if not (_is_one_of(self._module, self._allowed) or _may_be_named(name, self._allowed)):
            raise _refusal(self, name)


def find_modules_here() -> None:
    """Lets modules be imported from the current folder."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _refusal(model: str, name: str) -> GShardError:
    return GShardError(
        f"the file names the model {model!r}, which comes from {name}, outside the current folder. "
        "It was not called, because it could be any code. If you trust it, pass --allow-import "
        f"{name}, or give the model as module:function on the command line."
    )


def _may_be_named(name: str, allowed: Sequence[str]) -> bool:
    if _is_one_of(name, allowed):
        return True
    places = _places(name.partition(".")[0])
    if _is_one_of(name, [_SHIPPED]) and places == [Path(__file__).resolve().parents[1]]:
        return True
    return bool(places and all(map(_is_own, places)))


def _is_one_of(name: str, allowed: Sequence[str]) -> bool:
    return any(name == x or name.startswith(f"{x}.") for x in allowed)


def _places(top: str) -> list[Path] | None:
    """The folders of a top-level package, or the file of a module; without importing it.

    None if there is no such module.
    """
    find_modules_here()
    try:
        spec = find_spec(top) if top else None  # of a path such as ./model.py
    except (ImportError, ValueError):
        return []
    if spec is None:
        return None
    found = spec.submodule_search_locations
    if found is None:
        found = [spec.origin] if spec.origin and spec.has_location else []
    return [Path(x).resolve() for x in found]


def _is_own(place: Path) -> bool:
    """Whether a place is in the current folder, and not among the packages installed there."""
    installed = [Path(x).resolve() for x in {*sysconfig.get_paths().values(), sys.prefix}]
    here = Path.cwd()
    inside = [x for x in installed if x != here and here in x.parents]
    return here in place.parents and not any(x in place.parents for x in inside)
