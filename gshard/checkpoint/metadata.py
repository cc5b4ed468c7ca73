"""What a step says about itself, in JSON, and the data states of its processes."""

from __future__ import annotations

import base64
import datetime
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard._util.durable import write_file
from gshard._util.errors import GShardError, warn
from gshard._util.validation import shown
from gshard._util.version import __version__
from gshard.checkpoint.arrays import ArrayInfo
from gshard.checkpoint.directory import DESCRIPTION
from gshard.sharding.plan import Plan

DATA = "data_state"
FORMAT = 1


@dataclass(frozen=True)
class StepInfo:
    """What `gshard.json` says about a step.

    Attributes:
      step: the step's number.
      arrays: shape and dtype of each array, by path.
      made_by: level, mesh and versions, for people only.
      metadata: what the user passed to `save`.
      processes: how many processes wrote the step.
    """

    step: int
    arrays: Mapping[str, ArrayInfo]
    made_by: Mapping[str, Any]
    metadata: Mapping[str, Any]
    processes: int

    @classmethod
    def of(
        cls, step: int, arrays: Mapping[str, ArrayInfo], plan: Plan, metadata: Mapping[str, Any]
    ) -> StepInfo:
        """The description of a step that is about to be written."""
        made_by = {
            "level": plan.level.name,
            "mesh": dict(plan.mesh.shape),
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "gshard": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        }
        return cls(step, arrays, made_by, metadata, jax.process_count())

    def write(self, folder: Path) -> None:
        """Writes it into the folder of its step."""
        table = {
            "format": FORMAT,
            "step": self.step,
            "processes": self.processes,
            "made_by": self.made_by,
            "metadata": self.metadata,
            "arrays": {path: [list(x.shape), x.dtype] for path, x in self.arrays.items()},
        }
        write_file(folder / DESCRIPTION, json.dumps(table, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> StepInfo:
        """Reads the description of a step.

        Raises:
          GShardError: it is missing, damaged, or of a later format.
        """
        path = folder / DESCRIPTION
        try:
            table = json.loads(path.read_bytes())
            if table["format"] > FORMAT:
                raise GShardError(
                    f"{folder} was written by a later gshard, {table['made_by'].get('gshard')} "
                    f"(format {table['format']}, this one reads {FORMAT}). Update gshard."
                )
            arrays = {p: ArrayInfo(tuple(s), d) for p, (s, d) in table["arrays"].items()}
            return cls(
                table["step"], arrays, table["made_by"], table["metadata"], table["processes"]
            )
        except GShardError:
            raise
        except FileNotFoundError:
            raise GShardError(f"{path} is missing.") from None
        except OSError as error:
            raise GShardError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GShardError(f"{path} is damaged.") from error


def as_metadata(metadata: Any) -> dict[str, Any]:
    """The user's metadata as JSON values; scalar arrays become numbers.

    Raises:
      GShardError: it is not a dictionary, or holds what JSON cannot.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise GShardError(f"metadata={shown(metadata)} must be a dictionary.")
    return json.loads(_json("metadata", dict(metadata)))


def data_state_name(process: int) -> str:
    """The file of one process's data state, within a step."""
    return f"{DATA}/process_{process}.json"


def packed_data_state(data_state: Any) -> bytes:
    """A data state, JSON values or bytes, as the content of its file.

    Raises:
      GShardError: it is neither.
    """
    if isinstance(data_state, bytes):
        return json.dumps({"base64": base64.b64encode(data_state).decode()}).encode()
    return json.dumps({"json": json.loads(_json("data_state", data_state))}).encode()


def read_data_state(folder: Path, processes: int) -> Any:
    """This process's data state; after a change of their number, the one that all processes had."""
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
        if own is None:
            return None
        table = json.loads(own)
        return base64.b64decode(table["base64"]) if "base64" in table else table["json"]
    except (ValueError, KeyError, TypeError) as error:
        raise GShardError(f"{folder / DATA} is damaged.") from error


def _json(name: str, value: Any) -> str:
    def number(x: Any) -> Any:
        if isinstance(x, (np.generic, np.ndarray, jax.Array)) and np.size(x) == 1:
            return np.asarray(x).item()
        raise GShardError(
            f"{name} holds {shown(x)}, which is not JSON: use numbers, strings, booleans, lists "
            "and dictionaries of these."
        )

    def keys(x: Any) -> None:
        if isinstance(x, Mapping):
            if wrong := [key for key in x if not isinstance(key, str)]:
                raise GShardError(f"{name} has the key {shown(wrong[0])}, which is not a string.")
            for item in x.values():
                keys(item)
        elif isinstance(x, (list, tuple)):
            for item in x:
                keys(item)

    try:
        keys(value)
        return json.dumps(value, default=number)
    except GShardError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise GShardError(f"{name} is not JSON: {error}.") from error
