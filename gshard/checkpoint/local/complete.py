"""Which local steps the machines have together; it reads no values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from gshard._util.errors import some
from gshard.checkpoint.local.shards import Index, Key, covered, key_of
from gshard.checkpoint.local.store import LocalStore
from gshard.checkpoint.undamaged import steps_everywhere
from gshard.distributed.agree import all_gather_text, run_on_all


def incomplete_steps(store: LocalStore) -> dict[int, str]:
    """Why each step cannot be restored of which some machine has a part, or an empty string.

    All processes must call it, and have the same result.
    """
    return {step: _what_is_missing(store, step) for step in steps_everywhere(store)}


def _what_is_missing(store: LocalStore, step: int) -> str:
    call = f"local step {step}"
    parts = run_on_all(lambda: [*store.parts(step)], call=call)
    own = [[part.noted["token"], part.noted["rank"]] for part in parts]
    told = all_gather_text(json.dumps(own), what=call)
    found = {(token, rank) for text in told.values() for token, rank in json.loads(text)}
    if not found:
        return "no part of it can be read"
    if len({token for token, _ in found}) > 1:
        return "its parts are of several saves"
    first = min(rank for rank, text in told.items() if text != "[]")
    mine = parts[0].noted["info"] if first == jax.process_index() else ""
    info = json.loads(all_gather_text(mine, what=call)[first])
    if len(found) == info["processes"]:
        return ""
    lost = _lost(parts, info["arrays"], call)  # replicas may have all that is missing
    return f"no machine has all of {some(lost)}" if lost else ""


def _lost(parts: Iterable[Index], arrays: Mapping[str, Any], call: str) -> list[str]:
    """The arrays that have an entry that is on no machine."""
    own = sorted(key for part in parts for key in part.shards)
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
