"""`events.jsonl`: what happens in a job, for programs that watch it; one JSON object per line."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gshard._util.events import FIRST_LINE, JOINED, WIDTH, now, rounded
from gshard.distributed.launch.log_file import LogFile
from gshard.distributed.unfinished import Work


class EventLog:
    """The events of a job's processes on this machine, in the order in which they were learned of.

    Machine 0 writes `events.jsonl`, machine 1 `events-1.jsonl`, and so on: they may share a folder.
    If it cannot be written, one line says so, and the job goes on.
    """

    def __init__(self, folder: Path, machine: int, limit: int):
        self._file: LogFile | None = None
        path = folder / (f"events-{machine}.jsonl" if machine else "events.jsonl")
        try:
            self._file = LogFile(path, limit)
        except OSError as error:
            if folder.is_dir():  # otherwise the logs cannot be written either, which is an error
                _say(f"{path} cannot be written ({error.strerror}): the job runs without it.")
            return
        if not self._file.lock():
            _say(
                f"another job writes into {path} now, and the logs of both are mixed. Give "
                "each job a --log_dir of its own."
            )

    def write(
        self,
        event: str,
        rank: int | None = None,
        step: int | None = None,
        seconds: float | None = None,
        time: str | None = None,
        **more: Any,
    ) -> None:
        """Appends an event of a process, or of the launcher itself."""
        if self._file is not None:
            said = {"time": time or now(), "event": event, "rank": rank}
            found = {"step": step, "seconds": rounded(seconds), **more}
            said |= {name: value for name, value in found.items() if value is not None}
            self._file.write(json.dumps(said).encode() + b"\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def _say(text: str) -> None:
    print(f"gshard: {text}", file=sys.stderr, flush=True)


class Status:
    """The file in which a process tells its events (`gshard._util.events`), for the launcher.

    Its events are passed on to `log`.
    """

    def __init__(self, path: Path, rank: int, log: EventLog):
        self.path: Path = path
        self._rank, self._log = rank, log
        self._work = Work()
        self.left: float | None = None  # when its script ended, by the monotonic clock
        path.write_bytes(FIRST_LINE)
        self._read = path.open("rb", buffering=0)
        self._read.seek(len(FIRST_LINE))
        self._begun = b""  # a line without its end

    def update(self) -> None:
        """Reads what the process has told since."""
        *lines, self._begun = (self._begun + self._read.read()).split(b"\n")
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, AttributeError):  # a stranger's line
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "end":  # of the script; the process exits later
            self.left = time.monotonic()
            return
        self._log.write(**{**event, "rank": self._rank})
        self._work = self._work.after(event)

    @property
    def work(self) -> Work:
        """What the process has to finish, and how far it came."""
        line = os.pread(self._read.fileno(), len(FIRST_LINE), 0)
        step, joined = line[:WIDTH].strip(), line[WIDTH:].strip()
        return self._work._replace(
            step=int(step) if step.isdigit() else None, cut_off=joined == JOINED
        )

    def close(self) -> None:
        """Closes the file."""
        self._read.close()
