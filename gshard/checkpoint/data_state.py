"""The position in the data, a file of each process within a step."""

from __future__ import annotations

import base64
import json
from typing import Any

import jax

from gshard._util.errors import GShardError, warn
from gshard.checkpoint.checksums import DamagedFileError, read_combined_manifest
from gshard.checkpoint.step_files import StepFiles, why
from gshard.checkpoint.step_info import DATA, MOST, json_values


def data_state_name(process: int) -> str:
    """The file of one process's data state, within a step."""
    return f"{DATA}/process_{process}.json"


def packed_data_state(data_state: Any) -> bytes:
    """A data state, JSON values or bytes, as the content of its file."""
    if isinstance(data_state, bytes):
        return json.dumps({"base64": base64.b64encode(data_state).decode()}).encode()
    return json.dumps({"json": json_values("data_state", data_state)}).encode()


def read_data_state(step: StepFiles, processes: int) -> Any:
    """This process's data state; after a change of their number, the one that all processes had.

    It reads one data state and, after a change, the combined manifest with all checksums.
    """
    now = jax.process_count()
    names = [data_state_name(rank) for rank in range(processes)]
    if processes != now:
        try:
            listed = read_combined_manifest(step)
        except DamagedFileError as error:
            warn(f"{step}/{DATA} cannot be compared, and none is restored: {error}.")
            return None
        if any(listed.get(name) != listed.get(names[0]) for name in names):
            warn(
                f"{step}/{DATA} holds a different data state for each of the {processes} "
                f"processes that wrote it, but there are {now} processes now, so none is "
                "restored. The state of a gshard.DataLoader is valid for any number of processes."
            )
            return None
    name = names[jax.process_index() if processes == now else 0]
    try:
        table = json.loads(step.read(name, MOST))
        return base64.b64decode(table["base64"]) if "base64" in table else table["json"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GShardError(f"{step}/{DATA} cannot be read: {why(error)}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise GShardError(
            f"{step}/{DATA}, the position in the data, is damaged. Restore another step: `gshard "
            "verify DIRECTORY` says which are undamaged."
        ) from error
