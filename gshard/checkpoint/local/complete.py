"""Which local steps the machines have together; it reads no values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from gshard._util.errors import some
from gshard.checkpoint.local.shards import Index, Key, covered, key_of
from gshard.checkpoint.local.store import LocalStore
from gshard.checkpoint.step_info import StepInfo
from gshard.checkpoint.undamaged import steps_everywhere
from gshard.distributed.agree import all_gather_text, run_on_all


class Save(NamedTuple):
    """The save of a step that the machines have most of, the newest if there are several.

    Attributes:
      parts: those on this machine.
      noted: what the part of the first process that has one notes.
      info: the description of the step.
      is_whole: whether all parts that were written are there.
    """

    parts: list[Index]
    noted: Mapping[str, Any]
    info: StepInfo
    is_whole: bool


def find_save(store: LocalStore, step: int, call: str) -> Save | None:
    """The save of a step to read, the same on all processes; None if no part can be read."""
    parts = run_on_all(lambda: store.parts(step), call=call)
    own = [[x.noted["token"], x.noted["rank"], x.noted["at"], x.noted["of"]] for x in parts]
    told = all_gather_text(json.dumps(own), what=call)
    ranks: dict[str, set[int]] = {}  # by token, of the parts that somebody has
    found: dict[str, tuple[bool, float]] = {}  # whether they are all, and when they were written
    holders: dict[str, int] = {}
    for holder, text in sorted(told.items()):
        for token, rank, at, count in json.loads(text):
            ranks.setdefault(token, set()).add(rank)
            found[token] = len(ranks[token]) == count, at
            holders.setdefault(token, holder)
    if not found:
        return None
    token = max(found, key=lambda x: found[x])
    mine = [x for x in parts if x.noted["token"] == token]
    holder = holders[token]
    own_noted = json.dumps(mine[0].noted) if holder == jax.process_index() else ""
    noted = json.loads(all_gather_text(own_noted, what=call)[holder])
    info = StepInfo.of_table(json.loads(noted["info"]))
    return Save(mine, noted, info, found[token][0])


def local_steps(store: LocalStore, newest: int) -> tuple[dict[int, Save], dict[int, str]]:
    """The steps that the machines have together, and why others cannot be restored.

    All processes must call it, and have the same steps. `newest` is that of the directory, or -1.
    """
    complete: dict[int, Save] = {}
    others: dict[int, str] = {}
    for step in steps_everywhere(store):
        call = f"local step {step}"
        if (save := find_save(store, step, call)) is None:
            others[step] = "no part of it can be read"
        elif save.noted["after"] > newest:
            others[step] = (
                f"it was saved after step {save.noted['after']} of {store.run}, which no longer "
                "exists"
            )
        elif not save.is_whole and (lost := _lost(save, call)):
            others[step] = f"no machine has all of {some(lost)}"
        else:
            complete[step] = save
    return complete, others


def _lost(save: Save, call: str) -> list[str]:
    """The arrays that have an entry that is on no machine; replicas may have all."""
    own = sorted(key for part in save.parts for key in part.shards)
    told = all_gather_text(json.dumps(own), what=call)
    by_path: dict[str, set[Key]] = {path: set() for path in save.info.arrays}
    for text in told.values():
        for path, bounds in json.loads(text):
            by_path[path].add(key_of(path, bounds))
    shapes = {path: x.shape for path, x in save.info.arrays.items()}
    return [path for path, keys in by_path.items() if not _has_all(path, shapes[path], keys)]


def _has_all(path: str, shape: tuple[int, ...], keys: set[Key]) -> bool:
    if 0 in shape:
        return True  # nothing is written of it
    # The data of random keys have one dimension more, which is on every device.
    further = next(iter(keys)).bounds[len(shape) :] if keys else ()
    return covered(Key(path, (*((0, size) for size in shape), *further)), keys)
