"""The result of a check, probes in a process of their own, and text for both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gshard.distributed import env_vars
from gshard.distributed.launch.exit_status import Readable, in_words
from gshard.distributed.launch.guardian import Guardian, kill_group

GIB = 2**30


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
      name: what was checked.
      ok: `"ok"`; `"warn"` for what works, but probably not as intended; `"fail"`.
      found: what was found, on one line.
      fix: how to fix it, on one line; empty where nothing is wrong.
    """

    name: str
    ok: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


def size(count: float) -> str:
    """Formats bytes: `1.5 GiB`, `64 MiB`."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.0f} MiB"


_RUN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
_RUN += "from gshard.cli.doctor import probes; probes.main(*sys.argv[2:])"
# A probe runs alone, so it must not see this process's position in a job.
_NOT_PASSED = (
    env_vars.COORDINATOR, env_vars.NUM_PROCESSES, env_vars.PROCESS_ID,
    env_vars.LOCAL_PROCESS_ID, env_vars.PORT_IS_KEPT, env_vars.RESTARTS,
)  # fmt: skip
_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_GLOG = re.compile(r"^[IWEF]\d{4} [\d:.]+\s+\d+ \S+\] ")
_FATAL = re.compile(r"F\d{4} ")
_TELLING = re.compile(r"^F\d{4} |Unknown flag|Check failed|\b\w*(Error|Exception)\b|[Ff]ailed")
_LONGEST = 240  # characters of a line


class Answer(NamedTuple):
    """What a probe found, or why it did not answer, and the most useful line of its log."""

    result: dict[str, Any] | None
    trouble: str = ""
    log: str = ""


def ask(probe: str, seconds: float, **arguments: Any) -> Answer:
    """Runs a function of `gshard.cli.doctor.probes` in a new process for at most `seconds`."""
    told = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
    # Other programs on the GPUs keep their memory.
    told |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    words = [sys.executable, "-c", _RUN, json.dumps(sys.path), probe, json.dumps(arguments)]
    guardian = Guardian()
    process = subprocess.Popen(
        words,
        env=told,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        guardian.watch(process.pid)
        out, log = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raw = error.stderr or b""
        log = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        return Answer(None, f"timed out: it had not ended after {seconds:g} s", telling(log))
    finally:
        if process.poll() is None:
            kill_group(process.pid)
            with suppress(subprocess.TimeoutExpired):  # one that the kernel cannot kill
                process.communicate(timeout=5)
        guardian.forget(process.pid)
        guardian.close()
    if process.returncode:
        return Answer(None, f"it {in_words(process.returncode)}", telling(log))
    found = json.loads(out)
    if "error" in found:
        return Answer(None, one_line(found["error"]), telling(log))
    return Answer(found, log=telling(log))


def telling(log: str) -> str:
    """Returns the line of a log that says what went wrong; empty if none does."""
    readable = Readable()
    lines = [line for line in _CODES.sub("", log).splitlines() if readable.shows(line)]
    found = [line for line in lines if _TELLING.search(line)]
    fatal = [line for line in found if _FATAL.match(line)]  # with which C++ ends a process
    return one_line(_GLOG.sub("", (fatal or found or [""])[-1]))


def one_line(text: str) -> str:
    """Shortens a text and removes its line ends and terminal codes."""
    text = " ".join(_CODES.sub("", text).split())
    text = "".join(c for c in text if c.isprintable())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
