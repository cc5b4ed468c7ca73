"""Which array of a checkpoint a leaf of a state is read from, and whether the two fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gshard._util.errors import GShardError
from gshard.sharding.layout import Layout
from gshard.train_state import FROZEN

PARAMS, MASTER = "params/", "opt_state/master/"
_FROZEN = f"extras/{FROZEN}/"
_SHOWN = 100  # differences that a message lists


@dataclass(frozen=True)
class LeafInfo:
    """What a checkpoint says of one array.

    Attributes:
      shape: logical; for keys of `jax.random` that of the keys.
      dtype: its name; `key<fry>` and the like for keys.
    """

    shape: tuple[int, ...]
    dtype: str


def check_fit(
    stored: Mapping[str, LeafInfo],
    layouts: Mapping[str, Layout],
    sources: Mapping[str, str],
    cast: bool,
) -> None:
    """Refuses a checkpoint of another model, leaf by leaf."""
    used = set(sources.values())
    # A parameter may be read from its master copy, and a master copy may be of no use.
    unused = [p for p in stored if not (p in used or p.startswith(MASTER) or _master(p) in used)]
    wrong = [f"  {p} is in the checkpoint alone" for p in unused]
    wrong += [f"  {p} is not in the checkpoint" for p, s in sources.items() if s not in stored]
    others = []
    for path, source in sources.items():
        info, layout = stored.get(source), layouts[path]
        if info is None:
            continue
        if info.shape != layout.shape:
            wrong.append(f"  {path} has the shape {layout.shape}, in the checkpoint {info.shape}")
        elif info.dtype != str(layout.dtype):
            rounded = path.startswith(PARAMS) and _master(path) in layouts
            if not rounded and not (cast and "key" not in info.dtype + str(layout.dtype)):
                others.append(f"  {path} is {layout.dtype}, in the checkpoint {info.dtype}")
    if not (wrong or others):
        return
    lines = [*wrong, *others]
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    mend = (
        "Pass cast=True to convert them."
        if not wrong
        else "It is of another model or optimizer. Weights alone, by name: "
        "gshard.save_safetensors and "
        "gshard.load_safetensors."
    )
    raise GShardError(
        "\n".join(["the checkpoint does not fit the state:", *lines[:_SHOWN], *more, mend])
    )


def check_same_run(stored: Mapping[str, LeafInfo], own: Mapping[str, LeafInfo], where: str) -> None:
    """Refuses to write beside checkpoints whose parameters are others."""
    theirs, mine = _all_params(stored), _all_params(own)
    if theirs != mine:
        found = differing(theirs, mine)
        raise GShardError(
            f"save: {where} holds checkpoints of another model: {'; '.join(found[:5])}. Nothing "
            "was written. Choose another directory."
        )


def _all_params(leaves: Mapping[str, LeafInfo]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, trained and frozen."""
    names = {p: PARAMS + p.removeprefix(_FROZEN) if p.startswith(_FROZEN) else p for p in leaves}
    return {n: leaves[p].shape for p, n in names.items() if n.startswith(PARAMS)}


def differing(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """What is missing in `mine`, added, or of another shape, in words."""
    found = [f"{p} is missing" for p in theirs if p not in mine]
    found += [f"{p} is added" for p in mine if p not in theirs]
    both = [p for p in theirs if p in mine and theirs[p] != mine[p]]
    return found + [f"{p} has the shape {mine[p]}, there {theirs[p]}" for p in both]


def source_of(path: str, layout: Layout, stored: Mapping[str, LeafInfo]) -> str:
    """The stored array that a leaf is read from.

    Either side may have master copies or frozen parameters that the other has not.
    """
    if path.startswith(_FROZEN) and path not in stored:
        return PARAMS + path.removeprefix(_FROZEN)
    if path.startswith(PARAMS) and path not in stored:
        frozen = _FROZEN + path.removeprefix(PARAMS)
        if frozen in stored:
            return frozen
    if path.startswith(MASTER) and path not in stored:
        return PARAMS + path.removeprefix(MASTER)
    exact = _master(path)
    if path.startswith(PARAMS) and exact in stored:
        info = stored.get(path)
        if info is None or info.dtype != str(layout.dtype):
            return exact
    return path


def _master(path: str) -> str:
    return MASTER + path.removeprefix(PARAMS)


def one_to_one(sources: Mapping[str, str]) -> Iterable[list[str]]:
    """Leaves in groups in which every source comes once."""
    first: dict[str, str] = {}
    for path, source in sources.items():
        first.setdefault(source, path)
    groups = [list(first.values()), [p for p, s in sources.items() if first[s] != p]]
    return [group for group in groups if group]
