"""Says that a process waits for the others, where it waits long."""

from __future__ import annotations

import sys
import threading
import time

from gshard._util.errors import user_place
from gshard.distributed import env_vars

REMIND = 30.0  # seconds after which a process says that it waits
_AGAIN = 60.0  # seconds after which it says so again


class waiting_for_others:  # noqa: N801
    """A context that prints a line with the user's call while it waits long for other processes.

    It never gives up, since the others may be writing to a slow disk.
    """

    def __enter__(self) -> None:
        self._ended = threading.Event()
        args = user_place(), env_vars.read_position().process_id
        threading.Thread(target=self._remind, args=args, name="gshard-waiting", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _remind(self, place: str, rank: int | None) -> None:
        began, pause = time.monotonic(), REMIND
        while not self._ended.wait(pause):
            pause = _AGAIN
            print(
                f"gshard: {'this process' if rank is None else f'process {rank}'} has waited "
                f"{time.monotonic() - began:.0f} s for the others, at {place}. All processes must "
                "make this call. See what the others do: a call under `if rank == 0`, an error, or "
                "a slow disk.",
                file=sys.stderr,
                flush=True,
            )
