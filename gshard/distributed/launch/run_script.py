"""Runs a script as `python script.py` would, in a process of a launched job.

What Python itself does not offer: when the script fails, also by `sys.exit(1)`, the process ends
without waiting for the others, so that they learn of it. This file runs by its path and imports
nothing of gshard or JAX, so that the script can still set their variables.

    python script.py (file|module) TARGET [ARGUMENTS ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import suppress
from types import TracebackType

PREEMPTED_EXIT_CODE = 75  # that of gshard, which is not imported here


def main() -> None:
    """Runs the script or module that the command line names."""
    status = os.environ.get("GSHARD_STATUS_FILE", "")  # gshard takes it from the environment
    kind, target, *_ = sys.argv[1:]
    del sys.argv[:2]
    _write_lines()
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(target)) if kind == "file" else os.getcwd()
    try:
        if kind == "file":
            runpy.run_path(os.path.abspath(target), run_name="__main__")
        else:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if code not in (0, PREEMPTED_EXIT_CODE):
            _leave_with(code)
        else:
            _tell_end(status)
        raise
    except BaseException as error:
        # The frames of this file and of runpy say nothing about the script.
        error = error.with_traceback(_of_the_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _leave_with(code)
        sys.exit(code)
    _tell_end(status)


def _tell_end(status: str) -> None:
    """Tells the launcher that the script has ended; threads and exit functions may go on."""
    if status:
        with suppress(OSError), open(status, "ab") as file:
            file.write(b'\n{"event": "end"}\n')


def _write_lines() -> None:
    """Makes Python write a line with its end at once: C++ threads write to the same pipes.

    Unbuffered, `print` writes the end of a line by itself, and what comes between joins the line.
    As on a terminal, what has no end yet waits for it, and is lost with a process that is killed.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=False, line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]


def _leave_with(code: int) -> None:
    leaving = sys.modules.get("gshard.distributed.exit")
    if leaving is not None:
        leaving.at_exit_with(code)


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    own, at = (__file__, runpy.__file__, "<frozen runpy>"), traceback
    while at is not None and at.tb_frame.f_code.co_filename in own:
        at = at.tb_next
    return at or traceback


if __name__ == "__main__":
    main()
