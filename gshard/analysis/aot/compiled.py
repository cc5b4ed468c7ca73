"""A step compiled ahead of time in a process of its own, which may abort without harm to this one.

found = compile_for({"model": "my_model:setup", "target": "h100:32x8", "level": "p_g_os"})
found["fits"], found["needs"], found["has"]
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from gshard._util.errors import GShardError
from gshard.analysis.aot.target import Target, parse_target
from gshard.distributed.launch.guardian import Guardian, kill_group, kill_rest

Report = Callable[[str, float], None]
_LINES = 400  # of stderr, enough for a stack trace of C++ below the message


def compile_for(
    request: Mapping[str, Any], timeout: float = 1800, report: Report | None = None
) -> dict[str, Any]:
    """Compiles the step of a model for a machine that is not there. Nothing is initialised.

    Args:
      request: `model` (`module:function`, see `gshard.analysis.setup.load_setup`), its `arguments`,
        `target` and `level`; `replica` (1), and the attributes of `Choices` where they are not
        their defaults. All of it must go into JSON.
      timeout: seconds.
      report: called with what is going on and the seconds since the start, once a second and when
        that changes. By default a terminal shows it.

    Returns:
      `fits`, None of a CPU; `needs` and `has`, bytes of one device, and `largest`, the buffers that
      are alive where memory peaks (`bytes` of each, `count`, `shape`, `what`); `memory` by use and
      `collectives`, as `gshard.audit` has them; `wire_bytes` and `asynchronous_bytes` by kind; the
      `mesh`, `versions`, `lowering_seconds` and `compile_seconds`. Being too large is a verdict,
      not an error.

    Raises:
      GShardError: one line that says why it does not compile.
    """
    target = parse_target(request["target"])
    check_json(request.get("arguments") or {})
    what = f"{request['model']} at {request['level']} for {target.text}"
    return ask("gshard.analysis.aot.child", request, target, what, timeout, report)


def check_json(arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of a model that the process which compiles cannot be told.

    Raises:
      GShardError: names the one that is no JSON.
    """
    for name, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise GShardError(
                f"arguments.{name}={value!s} cannot be passed to the process that compiles: "
                f"{error}. Give it as a text, or compile without --target."
            ) from error


def ask(
    module: str,
    request: Mapping[str, Any],
    target: Target,
    what: str,
    timeout: float,
    report: Report | None = None,
) -> dict[str, Any]:
    """Runs a module that answers a request (see `child.answer`) until it has a result.

    Args:
      module: run as by `python -m`, with the current folder on its path.
      request: what it reads, as JSON.
      target: whose compiler it needs.
      what: it compiles, for people.
      timeout: seconds.
      report: as in `compile_for`.

    Raises:
      GShardError: one line that says why there is none.
    """
    start = time.monotonic()
    with _started(module, target) as (process, lines, errors), _shown(what, report) as show:
        pipe: Any = process.stdin
        with suppress(BrokenPipeError), pipe:  # it may end before it reads; how, is said below
            pipe.write(json.dumps(request))
        stage = "importing"
        while True:
            seconds = time.monotonic() - start
            show(stage, seconds)
            if seconds > timeout:
                raise GShardError(
                    f"{what}: not compiled after {timeout:.0f} s ({stage}). Give it more time, or "
                    "compile fewer layers: those of a jax.lax.scan compile once."
                )
            try:
                line = lines.get(timeout=min(1.0, max(0.0, timeout - seconds) + 0.01))
            except queue.Empty:
                continue
            if line is None:
                break
            if "result" in line:
                return line["result"]
            if "error" in line:
                raise GShardError(line["error"])
            if "failed" in line:
                raise GShardError(f"{what}: {reason(line['failed'], 1)}")
            stage = line["stage"]
        code = process.wait()
        errors.complete.join()
        raise GShardError(f"{what}: {reason(''.join(errors.lines), code)}")


class _Lines(NamedTuple):
    """Lines that a thread collects."""

    lines: deque[str]
    complete: threading.Thread


@contextmanager
def _started(
    module: str, target: Target
) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[dict[str, Any] | None], _Lines]]:
    """The process, what it says on stdout (None at the end), and its last lines of stderr.

    It ends with this block, and with this process, however that ends.
    """
    said: queue.Queue[dict[str, Any] | None] = queue.Queue()
    errors: deque[str] = deque(maxlen=_LINES)

    def read() -> None:
        for line in process.stdout or ():
            if line.endswith("\n"):  # not one that its end cut short
                said.put(json.loads(line))
        said.put(None)

    guardian = Guardian()
    folder = tempfile.TemporaryDirectory(prefix="gshard-", ignore_cleanup_errors=True)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=_environment(target) | {"TMPDIR": folder.name},  # it may not clear up itself
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # it leads a group, with the ptxas and nvlink that it starts
        )
        guardian.watch(process.pid)
        threads = [
            threading.Thread(target=read, daemon=True),
            threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield process, said, _Lines(errors, threads[1])
        finally:
            (kill_group if process.poll() is None else kill_rest)(process.pid)
            for thread in threads:
                thread.join()
            with process:  # waits, and closes its pipes
                guardian.forget(process.pid)
    finally:
        guardian.close()
        folder.cleanup()


def _environment(target: Target) -> dict[str, str]:
    here = str(Path(__file__).parents[3])  # the same gshard, however this process found it
    more = target.environment | {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # it keeps no buffers
    more["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), here)))
    if "XLA_FLAGS" in more:  # of two of the same, the later counts
        more["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more['XLA_FLAGS']}".strip()
    return os.environ | more


@contextmanager
def _shown(what: str, report: Report | None) -> Iterator[Report]:
    """Where the progress goes: to `report`, or to a terminal."""
    console = Console(stderr=True)
    if report is not None:
        yield report
    elif not console.is_terminal:
        yield lambda stage, seconds: None
    else:
        with console.status(Text(what)) as status:  # no markup
            yield lambda stage, seconds: status.update(Text(f"{what}: {stage}, {seconds:.0f} s"))


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
