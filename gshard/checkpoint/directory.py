"""The directory of a run: its steps, what each says about itself, and which of them are kept.

A step is a folder named by its number. It is written under another name and renamed when it is
complete, and renamed before it is deleted, so a folder with a number is always a complete step.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from gshard._util.durable import read_regular, remove_folder, rename, write_file
from gshard._util.errors import GShardError
from gshard._util.validation import check_integer, shown
from gshard._util.version import __version__
from gshard.checkpoint.arrays import ArrayInfo
from gshard.sharding.plan import Plan
from gshard.train.optim.optimizer_info import optimizer_info

SAVING, DELETED, DAMAGED = ".saving", ".deleted", ".damaged"
_STEP = re.compile(r"0|[1-9][0-9]*")
_DEBRIS = re.compile(rf"({_STEP.pattern})((\.\d+)?{re.escape(SAVING)}|{re.escape(DELETED)})")
WRITTEN_LAST = MANIFEST, DESCRIPTION = "manifest.json", "gshard.json"
DATA = "data_state"
FORMAT = 2
MOST = 2**28  # bytes of a description or a data state


class DamagedInfoError(GShardError):
    """The description of a step is not what gshard writes."""


def as_directory(path: Any) -> Path:
    """The absolute path of a directory that exists or can be made."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise GShardError(f"directory={shown(path)} must be the path of a directory.")
    try:
        folder = Path(path).expanduser().absolute()
        is_file = folder.exists() and not folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise GShardError(f"directory={shown(path)} cannot be used: {error}.") from error
    if "://" in str(path):
        raise GShardError(
            f"directory={str(path)!r} is an address. gshard writes to file systems: mount the "
            "bucket, and give the path."
        )
    if is_file:
        raise GShardError(f"directory={str(path)!r} is a file. Choose another path.")
    return folder


def steps_in(directory: Path) -> list[int]:
    """The steps of a directory, ascending; empty if the directory does not exist.

    A folder named by a number is a step if gshard wrote into it.
    """
    try:
        found = [x.name for x in os.scandir(directory) if x.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise GShardError(f"{directory} cannot be read: {error.strerror}.") from error
    numbers = [name for name in found if _STEP.fullmatch(name)]
    own = [x for x in numbers if any(os.path.lexists(directory / x / y) for y in WRITTEN_LAST)]
    return sorted(int(name) for name in own)


def existing_step(directory: Path, step: Any, steps: Sequence[int]) -> int:
    """A user's step as the number of one of `steps`; the error names the nearest ones."""
    number = check_integer("step", step, 0)
    if number not in steps:
        near = sorted(sorted(steps, key=lambda x: abs(x - number))[:3])
        known = f"The nearest are {near}." if near else "It holds no checkpoint."
        raise GShardError(f"step={number} is not in {directory}. {known}")
    return number


def temporary_folder(directory: Path, step: int, failed: int) -> Path:
    """The folder in which a step is written, other than those of saves that failed before."""
    return directory / f"{step}{f'.{failed}' if failed else ''}{SAVING}"


def delete(directory: Path, step: int) -> None:
    """Deletes a step: at once for readers, then file by file."""
    remove_folder(directory / str(step), directory / f"{step}{DELETED}")


def set_aside(directory: Path, step: int) -> Path:
    """Renames a damaged step, so that it can be examined and is no longer a step."""
    aside = directory / f"{step}{DAMAGED}"
    shutil.rmtree(aside, ignore_errors=True)
    rename(directory / str(step), aside)
    return aside


def remove_debris(directory: Path) -> None:
    """Removes what killed or failed saves and deletions left; only the writer may call it."""
    for name in os.listdir(directory):
        if _DEBRIS.fullmatch(name):
            shutil.rmtree(directory / name, ignore_errors=True)


@dataclass(frozen=True)
class StepInfo:
    """What `gshard.json` says about a step."""

    step: int
    arrays: Mapping[str, ArrayInfo]  # by path
    made_by: Mapping[str, Any]  # level, mesh and versions, for people only
    metadata: Mapping[str, Any]  # what the user passed to `save`
    processes: int  # how many wrote the step
    optimizer: Mapping[str, Any] | None = None  # what is known of it

    @classmethod
    def of(
        cls, step: int, arrays: Mapping[str, ArrayInfo], plan: Plan, metadata: Mapping[str, Any]
    ) -> StepInfo:
        """Describes a step that is about to be written."""
        made_by = {
            "level": plan.level.name,
            "mesh": dict(plan.mesh.shape),
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "gshard": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        }
        processes = jax.process_count()
        return cls(step, arrays, made_by, metadata, processes, optimizer_info(plan))

    def write(self, folder: Path) -> None:
        """Writes it into the folder of its step."""
        table = {
            "format": FORMAT,
            "step": self.step,
            "processes": self.processes,
            "made_by": self.made_by,
            "metadata": self.metadata,
            "optimizer": self.optimizer,
            "arrays": {path: [list(x.shape), x.dtype] for path, x in self.arrays.items()},
        }
        write_file(folder / DESCRIPTION, json.dumps(table, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> StepInfo:
        """Reads the description of a step; refuses a missing or damaged one, or another format."""
        path = folder / DESCRIPTION
        try:
            table = json.loads(read_regular(path, MOST))
            if table["format"] > FORMAT:
                raise GShardError(
                    f"{folder} was written by a later gshard, {table['made_by'].get('gshard')} "
                    f"(format {table['format']}, this one reads {FORMAT}). Update gshard."
                )
            if table["format"] < FORMAT:
                raise GShardError(
                    f"{folder} was written by gshard before its first release (format "
                    f"{table['format']}, this one reads {FORMAT}). Restore it with that gshard, "
                    "and take the weights along with gshard.save_safetensors."
                )
            arrays = {p: ArrayInfo(tuple(s), d) for p, (s, d) in table["arrays"].items()}
            info = cls(
                table["step"],
                arrays,
                table["made_by"],
                table["metadata"],
                table["processes"],
                table.get("optimizer"),  # earlier steps have none
            )
            info._check_types()
            return info
        except GShardError:
            raise
        except FileNotFoundError:
            raise DamagedInfoError(f"{path} is missing.") from None
        except OSError as error:
            raise DamagedInfoError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedInfoError(f"{path} is damaged.") from error

    def _check_types(self) -> None:
        """Raises a `TypeError` for values of other types than gshard writes."""
        right = type(self.step) is type(self.processes) is int and self.processes > 0
        right = right and isinstance(self.made_by, dict) and isinstance(self.metadata, dict)
        right = right and isinstance(self.optimizer, dict | None)
        for x in self.arrays.values():
            right = right and isinstance(x.dtype, str) and all(type(n) is int for n in x.shape)
        if not right:
            raise TypeError


def as_metadata(metadata: Any) -> dict[str, Any]:
    """The user's metadata as JSON values; scalar arrays become numbers."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise GShardError(f"metadata={shown(metadata)} must be a dictionary.")
    return json_values("metadata", dict(metadata))


def json_values(name: str, value: Any) -> Any:
    """A value as it would be read from JSON."""

    def number(x: Any) -> Any:
        if isinstance(x, (np.generic, np.ndarray, jax.Array)) and np.size(x) == 1:
            return np.asarray(x).item()
        raise GShardError(
            f"{name} holds {shown(x)}, which is not JSON: use numbers, strings, booleans, lists "
            "and dictionaries of these."
        )

    def check_keys(x: Any) -> None:
        if isinstance(x, Mapping):
            if wrong := [key for key in x if not isinstance(key, str)]:
                raise GShardError(f"{name} has the key {shown(wrong[0])}, which is not a string.")
        for item in x.values() if isinstance(x, Mapping) else x:
            if isinstance(item, (Mapping, list, tuple)):
                check_keys(item)

    try:
        check_keys([value])
        return json.loads(json.dumps(value, default=number))
    except GShardError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise GShardError(f"{name} is not JSON: {error}.") from error


@dataclass(frozen=True)
class RetentionPolicy:
    """Which steps are kept: the newest, and each that any rule selects. Without rules, all.

    The fields are the arguments of `Checkpointer`. Steps without the metric, or with NaN, are not
    among the best.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None:
                check_integer(f"keep_{name}", value, 1, " of steps (None: no such rule)")
        if not isinstance(self.metric, str) or not self.metric:
            raise GShardError(f"metric={shown(self.metric)} must be a key of metadata.")
        if self.mode not in ("min", "max"):
            raise GShardError(f"mode={shown(self.mode)} must be 'min' or 'max'.")

    @property
    def keeps_all(self) -> bool:
        """Whether there are no rules."""
        return self.last is self.every is self.best is None

    def to_delete(self, metadata: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The steps to delete, ascending, given each step's metadata."""
        if self.keeps_all:
            return []
        steps = sorted(metadata)
        kept = set(steps[-(self.last or 1) :])
        kept |= {step for step in steps if self.every and step % self.every == 0}
        known: dict[int, Any] = {step: metadata[step].get(self.metric) for step in steps}
        sign = 1 if self.mode == "min" else -1
        ranked = sorted((sign * x, -s) for s, x in known.items() if _is_number(x) and x == x)
        kept |= {-step for _, step in ranked[: self.best or 0]}
        return [step for step in steps if step not in kept]

    def check(self, metadata: Mapping[str, Any]) -> None:
        """Raises a `GShardError` for metadata without the metric that `best` needs."""
        if self.best and not _is_number(metadata.get(self.metric)):
            raise GShardError(
                f"save: keep_best={self.best} needs the number {self.metric!r} in metadata, which "
                f"has {shown(metadata.get(self.metric))} there. Pass metadata={{{self.metric!r}: "
                "...}, or pass metric= to the Checkpointer."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
