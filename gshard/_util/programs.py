"""Other programs, such as a driver's, which may hang."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress


def output_of(words: Sequence[str], seconds: float) -> tuple[str, int]:
    """Returns what a program prints, and its exit code.

    Unlike `subprocess.run` it does not wait for a program that cannot be killed, such as that of a
    driver that hangs.

    Raises:
      OSError: it cannot run.
      subprocess.TimeoutExpired: it runs longer than this.
    """
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        return process.communicate(timeout=seconds)[0], process.returncode
    except BaseException:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if process.stdout is not None:
            process.stdout.close()
        raise
