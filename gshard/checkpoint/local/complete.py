"""Which local steps the machines have together; it reads no values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from gshard._util.errors import some
from gshard.checkpoint.local.shards import Index, Key, covered, key_of
from gshard.checkpoint.local.store import LocalStore
from gshard.checkpoint.undamaged import steps_everywhere
from gshard.distributed.agree import all_gather_text, run_on_all


class Save(NamedTuple):
    """The save of a step that the machines have most of, the newest if there are several.

    Attributes:
      token: that of its parts.
      parts: those on this machine.
      first: the first process that has a part.
      noted: what that part notes.
      is_whole: whether all parts that were written are there.
    """

    token: str
    parts: list[Index]
    first: int
    noted: Mapping[str, Any]
    is_whole: bool


def find_save(store: LocalStore, step: int, call: str) -> Save | None:
    """The save of a step to read, the same on all processes; None if no part can be read."""
    parts = run_on_all(lambda: store.parts(step), call=call)
    own = [[x.noted["token"], x.noted["rank"], x.noted["at"], x.noted["of"]] for x in parts]
    told = all_gather_text(json.dumps(own), what=call)
    ranks: dict[str, set[int]] = {}
    of_token: dict[str, tuple[bool, float]] = {}
    holders: dict[str, int] = {}
    for holder, text in sorted(told.items()):
        for token, rank, at, count in json.loads(text):
            ranks.setdefault(token, set()).add(rank)
            of_token[token] = len(ranks[token]) == count, at
            holders.setdefault(token, holder)
    if not of_token:
        return None
    token = max(of_token, key=lambda x: of_token[x])
    mine = [x for x in parts if x.noted["token"] == token]
    first = holders[token]
    own_noted = json.dumps(mine[0].noted) if first == jax.process_index() else ""
    noted = json.loads(all_gather_text(own_noted, what=call)[first])
    return Save(token, mine, first, noted, of_token[token][0])


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
            others[step] = f"it follows step {save.noted['after']} of {store.run}, which is gone"
        elif not save.is_whole and (lost := _lost(save, call)):
            others[step] = f"no machine has all of {some(lost)}"
        else:
            complete[step] = save
    return complete, others


def _lost(save: Save, call: str) -> list[str]:
    """The arrays that have an entry that is on no machine; replicas may have all."""
    arrays: dict[str, Any] = json.loads(save.noted["info"])["arrays"]
    own = sorted(key for part in save.parts for key in part.shards)
    told = all_gather_text(json.dumps(own), what=call)
    by_path: dict[str, set[Key]] = {path: set() for path in arrays}
    for text in told.values():
        for path, bounds in json.loads(text):
            by_path[path].add(key_of(path, bounds))
    return [path for path, keys in by_path.items() if not _has_all(path, arrays[path][0], keys)]


def _has_all(path: str, shape: list[int], keys: set[Key]) -> bool:
    if 0 in shape:
        return True  # nothing is written of it
    # The data of random keys have one dimension more, which is on every device.
    further = next(iter(keys)).bounds[len(shape) :] if keys else ()
    return covered(Key(path, (*((0, size) for size in shape), *further)), keys)
