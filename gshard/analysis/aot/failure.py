"""Why a compilation failed, in one line, from what the process said and how it ended."""

from __future__ import annotations

import re
import signal

_MOST = 400  # characters
_RAISED = re.compile(r"[\w.]+(Error|Exception)\b(?!:?\s*$)")
_CHECK = re.compile(r"F\d{4} [\d:.]+ +\d+ (\S+)\] (.*)")
_NO_MEMORY = (
    "the computer that compiles has too little memory for it. Compile on a larger one, or fewer "
    "layers: those of a jax.lax.scan compile once."
)


def reason(said: str, code: int) -> str:
    """Why a compilation failed.

    Args:
      said: the message of its error, or the last lines that its process wrote.
      code: the exit code of the process, or the negative number of the signal that ended it.
    """
    tool = re.search(r"Couldn't find a suitable version of (\w+)", said)
    if tool:
        return f"XLA finds no {tool[1]}: pip install nvidia-cuda-nvcc, of 'gshard[aot-gpu]'."
    if "No space left on device" in said or "Errno 28" in said:
        return "the disk is full: make room, or set TMPDIR to a folder where there is some."
    if code == -signal.SIGKILL:
        return f"the kernel killed the compiler (SIGKILL): probably {_NO_MEMORY}"
    if "std::bad_alloc" in said or "MemoryError" in said:
        return _NO_MEMORY
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    check = next((found for line in reversed(lines) if (found := _CHECK.match(line))), None)
    if check:
        return f"the compiler aborted: {check[2]} ({check[1]})"[:_MOST]
    raised = next((line for line in reversed(lines) if _RAISED.match(line)), None)
    last = raised or (lines or ["it said nothing"])[-1]
    if code < 0:
        return f"the compiler was ended by {signal.Signals(-code).name}: {last}"[:_MOST]
    return f"the compiler ended with code {code}: {last}"[:_MOST]
