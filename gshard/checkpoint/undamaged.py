"""Finds the step to restore: the newest that is undamaged, the same on every process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from gshard._util.errors import GShardError, warn
from gshard.checkpoint.checksums import Damage, DamagedCheckpointError
from gshard.checkpoint.store import Store
from gshard.distributed.agree import all_gather_text, run_on_all

_SHOWN = 5  # damages of a step that a message lists


class Source(NamedTuple):
    """A store to read from.

    Attributes:
      store: it.
      damages: returns what is damaged of a step, the same on every process.
      given_up: steps that are not to be read.
    """

    store: Store
    damages: Callable[[int], list[Damage]]
    given_up: frozenset[int] = frozenset()


def find_undamaged(sources: Sequence[Source], asked: int | None) -> tuple[int, int, list[set[int]]]:
    """The source and the step to read, and of each source the steps that were found damaged.

    With `asked=None` that is the newest undamaged step, of the first source that has it. If another
    job deletes a step during this call, the next one is tried.
    """
    bad: dict[tuple[int, int], list[Damage]] = {}
    while True:
        there = [_steps(x, asked, len(sources) == 1) for x in sources]
        left = [(n, i) for i, steps in enumerate(there) for n in steps if (n, i) not in bad]
        if not left:
            break
        step, i = max(left, key=lambda x: (x[0], -x[1]))
        try:
            found = sources[i].damages(step)
        except GShardError:
            if asked is not None or step in steps_everywhere(sources[i].store):
                raise
            continue  # NFS says of a deleted file that its handle is stale
        if not found:
            if bad:
                warn(f"{_list_damages(sources, bad)}\nStep {step} is restored instead.")
            return i, step, [{n for n, k in bad if k == j} for j in range(len(sources))]
        if step in steps_everywhere(sources[i].store):
            bad[step, i] = found
        elif asked is not None and len(left) == 1:
            raise GShardError(
                f"step {asked} was deleted from {sources[i].store} while it was read."
            )
    if asked is not None and not bad and len(sources) > 1:
        places = " and from ".join(str(x.store) for x in sources)
        raise GShardError(f"restore: step {asked} is gone from {places}.")
    store = sources[0].store
    if not bad:
        raise GShardError(f"restore: {store} {store.why_empty()}")
    fix = (
        "No step is undamaged; verify=False reads what can be read."
        if asked is None
        else "Without step= the newest step that is undamaged is restored."
    )
    raise DamagedCheckpointError(
        f"{_list_damages(sources, bad)}\n{fix}", {step: found for (step, _), found in bad.items()}
    )


def _steps(source: Source, asked: int | None, alone: bool) -> list[int]:
    """The steps to choose from; one that a user asks for was looked up before."""
    if asked is not None and alone:
        return [asked]
    steps = steps_everywhere(source.store)
    return [step for step in steps if asked in (None, step) and step not in source.given_up]


def steps_everywhere(store: Store) -> list[int]:
    """The steps of a store that all processes see, or of the folders of all machines."""
    looks = not store.is_shared or jax.process_index() == 0
    own = run_on_all(lambda: store.steps() if looks else [], call="restore")
    told = all_gather_text(json.dumps(own), what="restore")
    return sorted({step for text in told.values() for step in json.loads(text)})


def find_damages_together(step: int, damages_of: Callable[[int], list[Damage]]) -> list[Damage]:
    """The damages of a step that all processes find, each its own."""
    own = run_on_all(lambda: damages_of(step), call=f"restore of step {step}")
    said = all_gather_text(json.dumps([[x.file, x.what, x.arrays] for x in own]), what="restore")
    found = [Damage(f, w, tuple(x)) for text in said.values() for f, w, x in json.loads(text)]
    return list(dict.fromkeys(found))


def _list_damages(
    sources: Sequence[Source], damages: Mapping[tuple[int, int], list[Damage]]
) -> str:
    """A message with a line for each damage."""
    lines = []
    for (step, i), found in damages.items():
        store = sources[i].store
        lines.append(f"step {step} in {store} is {'damaged' if store.is_shared else 'incomplete'}:")
        lines += [f"  {damage}" for damage in found[:_SHOWN]]
        lines += [f"  and {len(found) - _SHOWN} more files"] if len(found) > _SHOWN else []
    return "\n".join(lines)
