"""Reading a step: which one, whether it is undamaged, and what each process gets of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from gshard.arguments import whole_number
from gshard.checkpoint.description import DATA, data_state_name, unpacked_data_state
from gshard.checkpoint.errors import DamagedCheckpointError, report
from gshard.checkpoint.manifest import MANIFEST, Damage, damages
from gshard.errors import GShardError, warn
from gshard.exchange import tell_processes


def existing(directory: Path, step: Any, steps: Sequence[int]) -> int:
    """A step as a number that is there.

    Raises:
      GShardError: it is not; the nearest are named.
    """
    number = whole_number("step", step, 0)
    if number not in steps:
        near = sorted(sorted(steps, key=lambda x: abs(x - number))[:3])
        known = f"The nearest are {near}." if near else "It holds no checkpoint."
        raise GShardError(f"step={number} is not in {directory}. {known}")
    return number


def undamaged(
    directory: Path, asked: int | None, steps: Sequence[int], verify: bool
) -> tuple[int, set[int]]:
    """The step to read, the same on every process, and those that were found damaged.

    Args:
      directory: of the run.
      asked: a step; None: the newest that is undamaged.
      steps: those that are there; the first process's count.
      verify: whether to compare the files with their checksums.

    Raises:
      DamagedCheckpointError: the step asked for is damaged, or all are.
      GShardError: there is none.
    """
    own = json.dumps(list(steps) if asked is None else [asked])
    candidates: list[int] = json.loads(tell_processes(own)[0])
    if not candidates:
        why = "holds no checkpoint" if directory.is_dir() else "does not exist"
        raise GShardError(f"restore: {directory} {why}.")
    bad: dict[int, list[Damage]] = {}
    for number in reversed(candidates):
        found = _shared(directory / str(number)) if verify else []
        if not found:
            if bad:
                warn(f"{report(directory, bad)}\nStep {number} is restored instead.")
            return number, set(bad)
        bad[number] = found
        _refuse_others(directory / str(number))
    mend = (
        "No step is undamaged; verify=False reads what can be read."
        if asked is None
        else "Without step= the newest step that is undamaged is restored."
    )
    raise DamagedCheckpointError(f"{report(directory, bad)}\n{mend}", bad)


def data_state(folder: Path, processes: int) -> Any:
    """This process's data state; where other processes wrote it, the one that all of them had."""
    rank, now = jax.process_index(), jax.process_count()
    files = [folder / data_state_name(i) for i in range(processes)]
    if not any(path.exists() for path in files):
        return None
    found = [path.read_bytes() if path.exists() else None for path in files]
    own = found[rank] if processes == now else found[0]
    if processes != now and any(data != own for data in found):
        warn(
            f"{folder / DATA} holds another data state for each of the {processes} processes that "
            f"wrote it, and there are {now} now: none is restored. A gshard.DataLoader has one "
            "that holds for any number of processes."
        )
        return None
    return None if own is None else unpacked_data_state(own)


def _shared(step: Path) -> list[Damage]:
    """The damages of a step; each process reads its share of the files."""
    own = damages(step, (jax.process_index(), jax.process_count()))
    said = tell_processes(json.dumps([[x.file, x.what, x.leaves] for x in own]))
    found = [Damage(f, w, tuple(x)) for text in said.values() for f, w, x in json.loads(text)]
    return list(dict.fromkeys(found))


def _refuse_others(step: Path) -> None:
    """A step that Orbax's own manager made is no damaged one of gshard's."""
    if not (step / MANIFEST).exists() and (step / "_CHECKPOINT_METADATA").exists():
        raise GShardError(
            f"{step} was written by Orbax itself, not by gshard.Checkpointer. Read it with "
            "gshard.import_orbax."
        )
