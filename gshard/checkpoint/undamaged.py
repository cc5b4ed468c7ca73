"""Finds the step to restore: the newest that is undamaged, the same on every process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import jax

from gshard._util.errors import GShardError, warn
from gshard.checkpoint.checksums import Damage, DamagedCheckpointError
from gshard.checkpoint.store import Store
from gshard.distributed.agree import all_gather_text, run_on_all

_SHOWN = 5  # damages of a step that a message lists


def find_undamaged(
    store: Store, asked: int | None, damages_of: Callable[[int], list[Damage]]
) -> tuple[int, set[int]]:
    """The step to read, the same on every process, and the steps that were found damaged.

    With `asked=None` that is the newest undamaged step. If another job deletes a step during this
    call, the next one is tried. `damages_of` returns the damages of a step that this process finds.
    """
    bad: dict[int, list[Damage]] = {}
    while True:
        steps = steps_everywhere(store) if asked is None else [asked]
        left = [step for step in steps if step not in bad]
        if not left:
            break
        found = _damages_found_together(left[-1], damages_of)
        if not found:
            if bad:
                warn(f"{_list_damages(store, bad)}\nStep {left[-1]} is restored instead.")
            return left[-1], set(bad)
        if left[-1] in steps_everywhere(store):
            bad[left[-1]] = found
        elif asked is not None:
            raise GShardError(f"step {asked} was deleted from {store} while it was read.")
    if not bad:
        raise GShardError(f"restore: {store} {store.why_empty()}")
    fix = (
        "No step is undamaged; verify=False reads what can be read."
        if asked is None
        else "Without step= the newest step that is undamaged is restored."
    )
    raise DamagedCheckpointError(f"{_list_damages(store, bad)}\n{fix}", bad)


def steps_everywhere(store: Store) -> list[int]:
    """The steps of a store as the first process sees them."""
    own = run_on_all(lambda: store.steps() if jax.process_index() == 0 else [], call="restore")
    return json.loads(all_gather_text(json.dumps(own), what="restore")[0])


def _damages_found_together(step: int, damages_of: Callable[[int], list[Damage]]) -> list[Damage]:
    """The damages of a step that all processes find."""
    own = run_on_all(lambda: damages_of(step), call=f"restore of step {step}")
    said = all_gather_text(json.dumps([[x.file, x.what, x.arrays] for x in own]), what="restore")
    found = [Damage(f, w, tuple(x)) for text in said.values() for f, w, x in json.loads(text)]
    return list(dict.fromkeys(found))


def _list_damages(store: Store, damages: Mapping[int, list[Damage]]) -> str:
    """A message with a line for each damage."""
    lines = []
    for step, found in damages.items():
        lines.append(f"step {step} in {store} is damaged:")
        lines += [f"  {damage}" for damage in found[:_SHOWN]]
        lines += [f"  and {len(found) - _SHOWN} more files"] if len(found) > _SHOWN else []
    return "\n".join(lines)
