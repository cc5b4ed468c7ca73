"""What a step says about itself, in `gshard.json`, and the metadata that users pass."""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.validation import check_integer, shown
from gshard._util.version import __version__
from gshard.checkpoint.arrays import ArrayInfo
from gshard.checkpoint.step_files import StepFiles, StoreError, may_pass, why
from gshard.sharding.plan import Plan
from gshard.train.optim.optimizer_info import optimizer_info

STEP = re.compile(r"0|[1-9][0-9]*")  # the name of a step
DAMAGED = ".damaged"  # ends the name of a step that was set aside
WRITTEN_LAST = MANIFEST, DESCRIPTION = "manifest.json", "gshard.json"
DATA = "data_state"
FORMAT = 2
MOST = 2**28  # bytes of a description or a data state


class DamagedInfoError(GShardError):
    """The description of a step is not what gshard writes."""


def refuse_step(folder: Any, call: str, only: str = "") -> None:
    """Refuses the folder of a step, a path or a place in a store, that another call reads."""
    if (folder / MANIFEST).is_file():
        run, name = str(folder.parent), folder.name
        raise GShardError(
            f"{call}: {folder} is a step of gshard.Checkpointer. Read it with "
            f"gshard.Checkpointer({run!r}).restore(step={name}, like=...{only})."
        )


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

    def to_json(self) -> bytes:
        """The content of `gshard.json`."""
        table = {
            "format": FORMAT,
            "step": self.step,
            "processes": self.processes,
            "made_by": self.made_by,
            "metadata": self.metadata,
            "optimizer": self.optimizer,
            "arrays": {path: _as_list(x) for path, x in self.arrays.items()},
        }
        return json.dumps(table, indent=1).encode()

    @classmethod
    def read(cls, files: StepFiles) -> StepInfo:
        """Reads the description of a step; refuses a missing or damaged one, or another format.

        Raises:
          StoreError: it cannot be read now.
        """
        path = f"{files}/{DESCRIPTION}"
        try:
            table = json.loads(files.read(DESCRIPTION, MOST))
            if table["format"] > FORMAT:
                raise GShardError(
                    f"{files} was written by a later gshard, {table['made_by'].get('gshard')} "
                    f"(format {table['format']}, this one reads {FORMAT}). Update gshard."
                )
            if table["format"] < FORMAT:
                raise GShardError(
                    f"{files} is in checkpoint format {table['format']}, which this version cannot "
                    "read. Open it with the version that wrote it, and export the weights with "
                    "gshard.save_safetensors."
                )
            return cls.of_table(table)
        except GShardError:
            raise
        except FileNotFoundError:
            raise DamagedInfoError(f"{path} is missing.") from None
        except OSError as error:
            kind = StoreError if may_pass(error) else DamagedInfoError
            raise kind(f"{path} cannot be read: {why(error)}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedInfoError(f"{path} is damaged.") from error

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> StepInfo:
        """What `to_json` wrote; a `KeyError` or the like for something else."""
        info = cls(
            table["step"],
            {path: _of_list(*x) for path, x in table["arrays"].items()},
            table["made_by"],
            table["metadata"],
            table["processes"],
            table["optimizer"],
        )
        info._check_types()
        return info

    def _check_types(self) -> None:
        """Raises a `TypeError` for values of other types than gshard writes."""
        right = type(self.step) is type(self.processes) is int and self.processes > 0
        right = right and isinstance(self.made_by, dict) and isinstance(self.metadata, dict)
        right = right and isinstance(self.optimizer, dict | None)
        for x in self.arrays.values():
            numbers = (*x.shape, *(x.blocks or ()))
            right = right and isinstance(x.dtype, str) and all(type(n) is int for n in numbers)
            right = right and (not x.blocks or 0 <= x.blocks[0] < len(x.shape) and x.blocks[1] > 0)
        if not right:
            raise TypeError


def _as_list(x: ArrayInfo) -> list[Any]:
    return [list(x.shape), x.dtype, *([list(x.blocks)] if x.blocks else [])]


def _of_list(shape: Any, dtype: Any, blocks: Any = None) -> ArrayInfo:
    axis, shards = blocks or (0, 0)
    return ArrayInfo(tuple(shape), dtype, (axis, shards) if blocks else None)


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


def existing_step(where: object, step: Any, steps: Sequence[int]) -> int:
    """A user's step as the number of one of `steps`; the error names the nearest ones."""
    number = check_integer("step", step, 0)
    if number not in steps:
        near = sorted(sorted(steps, key=lambda x: abs(x - number))[:3])
        known = f"The nearest are {near}." if near else "It holds no checkpoint."
        raise GShardError(f"step={number} is not in {where}. {known}")
    return number
