"""Reading a step: which one, whether it is undamaged, and what each process gets of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from gshard._util.errors import GShardError, some, warn
from gshard._util.validation import check_integer
from gshard.checkpoint.checksums import Damage, Report, damages
from gshard.checkpoint.directory import DESCRIPTION, steps_in
from gshard.checkpoint.errors import DamagedCheckpointError, report
from gshard.checkpoint.metadata import (
    DATA,
    Description,
    data_state_name,
    unpacked_data_state,
)
from gshard.distributed.agree import tell_processes


def existing(directory: Path, step: Any, steps: Sequence[int]) -> int:
    """A step as a number that is there.

    Raises:
      GShardError: it is not; the nearest are named.
    """
    number = check_integer("step", step, 0)
    if number not in steps:
        near = sorted(sorted(steps, key=lambda x: abs(x - number))[:3])
        known = f"The nearest are {near}." if near else "It holds no checkpoint."
        raise GShardError(f"step={number} is not in {directory}. {known}")
    return number


def undamaged(directory: Path, asked: int | None, verify: bool) -> tuple[int, set[int]]:
    """The step to read, the same on every process, and those that were found damaged.

    A step that another job deletes meanwhile is none; the next one is looked for.

    Args:
      directory: of the run.
      asked: a step; None: the newest that is undamaged.
      verify: whether to compare the files with their checksums.

    Raises:
      DamagedCheckpointError: the step asked for is damaged, or all are.
      GShardError: there is none.
    """
    bad: dict[int, list[Damage]] = {}
    while True:
        steps = steps_everywhere(directory) if asked is None else [asked]
        left = [step for step in steps if step not in bad]
        if not left:
            break
        found = _shared(directory / str(left[-1])) if verify else []
        if not found:
            if bad:
                warn(f"{report(directory, bad)}\nStep {left[-1]} is restored instead.")
            return left[-1], set(bad)
        if left[-1] in steps_everywhere(directory):
            bad[left[-1]] = found
        elif asked is not None:
            raise GShardError(f"step {asked} was deleted from {directory} while it was read.")
    if not bad:
        why = "holds no checkpoint" if directory.is_dir() else "does not exist"
        raise GShardError(f"restore: {directory} {why}.{_orbax_in(directory)}")
    mend = (
        "No step is undamaged; verify=False reads what can be read."
        if asked is None
        else "Without step= the newest step that is undamaged is restored."
    )
    raise DamagedCheckpointError(f"{report(directory, bad)}\n{mend}", bad)


def steps_everywhere(directory: Path) -> list[int]:
    """The steps of a directory as the first process sees them."""
    return json.loads(tell_processes(json.dumps(steps_in(directory)))[0])


def checked(
    step: Path, share: tuple[int, int] = (0, 1), report: Report = lambda count: None
) -> list[Damage]:
    """What `damages` finds, and whether the step has its own number: folders can be copied."""
    found = damages(step, share, report)
    if not found and (number := Description.read(step).step) != int(step.name):
        return [Damage(DESCRIPTION, f"is of step {number}: the folder was renamed or copied")]
    return found


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
    try:
        return None if own is None else unpacked_data_state(own)
    except (ValueError, KeyError, TypeError) as error:
        raise GShardError(f"{folder / DATA} is damaged.") from error


def _shared(step: Path) -> list[Damage]:
    """The damages of a step; each process reads its share of the files."""
    own = checked(step, (jax.process_index(), jax.process_count()))
    said = tell_processes(json.dumps([[x.file, x.what, x.leaves] for x in own]))
    found = [Damage(f, w, tuple(x)) for text in said.values() for f, w, x in json.loads(text)]
    return list(dict.fromkeys(found))


def _orbax_in(directory: Path) -> str:
    """A hint where Orbax's own manager has written."""
    theirs = [x.parent.name for x in directory.glob("*/_CHECKPOINT_METADATA")]
    if not theirs:
        return ""
    return f" Orbax itself wrote {some(theirs)}: read it with gshard.import_orbax."
