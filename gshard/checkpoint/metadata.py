"""What a step says of itself: JSON, for people and for the checks before anything is read."""

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

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard._util.version import __version__
from gshard.checkpoint.directory import DESCRIPTION, write_durably
from gshard.checkpoint.matching import LeafInfo
from gshard.sharding.plan import Plan

DATA = "data_state"
FORMAT = 1


@dataclass(frozen=True)
class Description:
    """Of one step.

    Attributes:
      step: its number.
      leaves: the arrays that it holds, by path.
      made_by: level, mesh, processes and versions: for people, nothing depends on them.
      metadata: the user's.
      processes: how many wrote it.
    """

    step: int
    leaves: Mapping[str, LeafInfo]
    made_by: Mapping[str, Any]
    metadata: Mapping[str, Any]
    processes: int

    @classmethod
    def of(
        cls, step: int, leaves: Mapping[str, LeafInfo], plan: Plan, metadata: Mapping[str, Any]
    ) -> Description:
        """Of a step that is about to be written."""
        made_by = {
            "level": plan.level.name,
            "mesh": dict(plan.mesh.shape),
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "gshard": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        }
        return cls(step, leaves, made_by, metadata, jax.process_count())

    def write(self, folder: Path) -> None:
        """Writes it into the folder of its step."""
        leaves = {path: [list(x.shape), x.dtype] for path, x in self.leaves.items()}
        table = {
            "format": FORMAT,
            "step": self.step,
            "processes": self.processes,
            "made_by": self.made_by,
            "metadata": self.metadata,
            "leaves": leaves,
        }
        write_durably(folder / DESCRIPTION, json.dumps(table, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Reads that of a step.

        Raises:
          GShardError: it is missing, damaged, or of a later format.
        """
        try:
            table = json.loads((folder / DESCRIPTION).read_bytes())
            if table["format"] > FORMAT:
                raise GShardError(
                    f"{folder} was written by a later gshard, {table['made_by'].get('gshard')} "
                    f"(format {table['format']}, this one reads {FORMAT}). Update gshard."
                )
            leaves = {p: LeafInfo(tuple(s), d) for p, (s, d) in table["leaves"].items()}
            return cls(
                table["step"], leaves, table["made_by"], table["metadata"], table["processes"]
            )
        except FileNotFoundError:
            raise GShardError(f"{folder / DESCRIPTION} is missing.") from None
        except OSError as error:
            raise GShardError(
                f"{folder / DESCRIPTION} cannot be read: {error.strerror}."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, GShardError):
                raise
            raise GShardError(f"{folder / DESCRIPTION} is damaged.") from error


def as_metadata(metadata: Any) -> dict[str, Any]:
    """The user's metadata as JSON has it; scalar arrays become numbers.

    Raises:
      GShardError: it is no dictionary, or holds what JSON cannot.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise GShardError(f"metadata={shown(metadata)} must be a dictionary.")
    return json.loads(_json("metadata", dict(metadata)))


def data_state_name(process: int) -> str:
    """The file of one process's data state within a step."""
    return f"{DATA}/process_{process}.json"


def packed_data_state(data_state: Any) -> bytes:
    """A data state as a file: what JSON can hold, or bytes.

    Raises:
      GShardError: it is neither.
    """
    if isinstance(data_state, bytes):
        return json.dumps({"base64": base64.b64encode(data_state).decode()}).encode()
    return json.dumps({"json": json.loads(_json("data_state", data_state))}).encode()


def unpacked_data_state(data: bytes) -> Any:
    """What `packed_data_state` was given."""
    table = json.loads(data)
    return base64.b64decode(table["base64"]) if "base64" in table else table["json"]


def _json(name: str, value: Any) -> str:
    def number(x: Any) -> Any:
        if isinstance(x, (np.generic, np.ndarray, jax.Array)) and np.size(x) == 1:
            return np.asarray(x).item()
        raise GShardError(
            f"{name} holds {shown(x)}, which is no JSON: use numbers, texts, booleans, lists and "
            "dictionaries of these."
        )

    def keys(x: Any) -> None:
        if isinstance(x, Mapping):
            if wrong := [key for key in x if not isinstance(key, str)]:
                raise GShardError(f"{name} has the key {shown(wrong[0])}, which is no text.")
            for item in x.values():
                keys(item)
        elif isinstance(x, (list, tuple)):
            for item in x:
                keys(item)

    try:
        keys(value)
        return json.dumps(value, default=number)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, GShardError):
            raise
        raise GShardError(f"{name} is no JSON: {error}.") from error
