"""What saving and restoring raise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gshard._util.errors import GShardError
from gshard.checkpoint.checksums import Damage

_SHOWN = 5  # damages of a step that a message lists


class DamagedCheckpointError(GShardError):
    """A step that is not as it was written.

    Attributes:
      damages: by step, what is wrong with it.
    """

    def __init__(self, message: str, damages: Mapping[int, list[Damage]]):
        super().__init__(message)
        self.damages = dict(damages)


class SaveFailedError(GShardError, RuntimeError):
    """A step that could not be written; those before it are as they were.

    Attributes:
      step: the one that is not there.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


def report(directory: Path, damages: Mapping[int, list[Damage]]) -> str:
    """Damages of steps in words, a line each."""
    lines = []
    for step, found in damages.items():
        lines.append(f"step {step} in {directory} is damaged:")
        lines += [f"  {damage}" for damage in found[:_SHOWN]]
        lines += [f"  and {len(found) - _SHOWN} more files"] if len(found) > _SHOWN else []
    return "\n".join(lines)
