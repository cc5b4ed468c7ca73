"""A command whose stderr is a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def on_terminal(*words: str) -> tuple[int, str, str]:
    """`gshard WORDS`: its exit code, its stdout, which is a pipe, and what the terminal got."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gshard", *words],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT), "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while block := os.read(ours, 4096):
            shown += block
    except OSError:  # it has ended
        pass
    os.close(ours)
    out, _ = process.communicate()
    return process.returncode, out, shown.decode()
