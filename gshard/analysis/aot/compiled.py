"""Compiles a step ahead of time in a child process, which may abort without harm; the report of it.

found = compile_for({"model": "my_model:setup", "target": "h100:32x8", "level": "p_g_os"})
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
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gshard._util.errors import GShardError
from gshard._util.text import bytes_of, text_of, text_table
from gshard.analysis.aot.target import Target, parse_target
from gshard.analysis.audit_report import sum_known
from gshard.analysis.forecast_report import Forecast
from gshard.distributed.launch.guardian import Guardian, kill_group, kill_rest

Report = Callable[[str, float], None]  # called with the stage and the seconds since the start
_LINES = 400  # of stderr that are kept: enough for a C++ stack trace below the message


def compile_for(
    request: Mapping[str, Any], timeout: float = 1800, report: Report | None = None
) -> dict[str, Any]:
    """Compiles the step of a model for a machine that is not there. Nothing is initialized.

    Args:
      request: the `model` (`module:function`, see `gshard.analysis.setup.load_setup`) and its
        `arguments`, the `target` and the `level`; optionally `replica`, `sequence`, `expert` and
        the fields of `Choices`.
        All values must be JSON.
      timeout: seconds until compilation is given up.
      report: called with the stage and the seconds since the start, every second and when the stage
        changes. By default a terminal shows them.

    Returns:
      `fits`, None if it is not known; `needs` and `has`, bytes of one device; `largest`, the
      buffers that are alive at the peak; `memory`, `collectives` and `nodes` as in `gshard.audit`;
      `wire_bytes`, `asynchronous_bytes` and `network_bytes` by kind; and more. A step that is too
      large is a result, not an error. `cached` if the result is that of an earlier call for the
      same program.

    Raises:
      GShardError: the step does not compile; one line says why.
    """
    target = parse_target(request["target"])
    check_json(request.get("arguments") or {})
    what = f"{request['model']} at {request['level']} for {target.text}"
    return ask("gshard.analysis.aot.child", request, target, what, timeout, report)


def check_json(arguments: Mapping[str, Any]) -> None:
    """Checks that arguments of a model are JSON, for the process that compiles."""
    for name, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise GShardError(
                f"arguments.{name}={value!s} cannot be passed to the process that compiles: "
                f"{error}. Give it as a text, or plan with --estimate."
            ) from error


def ask(
    module: str,
    request: Mapping[str, Any],
    target: Target,
    what: str,
    timeout: float,
    report: Report | None = None,
) -> dict[str, Any]:
    """Runs a module, like `python -m`, that answers a request (see `child.answer_request`).

    The module needs the compiler of `target`; `what` it compiles is for messages.
    """
    start = time.monotonic()
    with _started(module, target) as (process, lines, errors), _shown(what, report) as show:
        pipe: Any = process.stdin
        with suppress(BrokenPipeError), pipe:  # it may end before it reads; see below
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
        raise GShardError(f"{what}: {reason(''.join(errors), process.wait())}")


@contextmanager
def _started(
    module: str, target: Target
) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[dict[str, Any] | None], deque[str]]]:
    """The process, its lines of stdout (None at the end), and then the last lines of its stderr.

    The process ends with this block, and with this process, however that ends.
    """
    answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
    errors: deque[str] = deque(maxlen=_LINES)

    def read() -> None:
        for line in process.stdout or ():
            with suppress(ValueError):  # a part of a line, or what the start of Python printed
                if isinstance(answer := json.loads(line), dict):
                    answers.put(answer)
        collecting.join()
        answers.put(None)

    guardian = Guardian()
    folder = tempfile.TemporaryDirectory(prefix="gshard-", ignore_cleanup_errors=True)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=_environment(target) | {"TMPDIR": folder.name},  # it may leave files behind
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # one process group with the ptxas and nvlink that it starts
        )
        guardian.watch(process.pid)
        collecting = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
        reading = threading.Thread(target=read, daemon=True)
        collecting.start()
        reading.start()
        try:
            yield process, answers, errors
        finally:
            (kill_group if process.poll() is None else kill_rest)(process.pid)
            reading.join()
            with process:  # waits for it and closes its pipes
                guardian.forget(process.pid)
    finally:
        guardian.close()
        folder.cleanup()


def _environment(target: Target) -> dict[str, str]:
    here = str(Path(__file__).parents[3])  # the same gshard as in this process
    paths = [path for path in (os.environ.get("PYTHONPATH"), here) if path]
    more = target.environment | {"PYTHONPATH": os.pathsep.join(paths)}
    more["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # cached programs have no dumps
    if "XLA_FLAGS" in more:  # the last of two equal flags counts
        more["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more['XLA_FLAGS']}".strip()
    return os.environ | more


@contextmanager
def _shown(what: str, report: Report | None) -> Iterator[Report]:
    """The function to call with progress: `report`, or one that shows it in a terminal."""
    console = Console(stderr=True)
    if report is not None or not console.is_terminal:
        yield report or (lambda stage, seconds: None)
        return
    with console.status(Text(what)) as status:  # `Text` is not read as markup
        yield lambda stage, seconds: status.update(Text(f"{what}: {stage}, {seconds:.0f} s"))


_MOST = 400  # characters
_RAISED = re.compile(r"[\w.]+(Error|Exception)\b(?!:?\s*$)")
_CHECK = re.compile(r"F\d{4} [\d:.]+ +\d+ (\S+)\] (.*)")
_NO_MEMORY = (
    "the computer that compiles has too little memory for it. Compile on a larger one, or fewer "
    "layers: those of a jax.lax.scan compile once."
)


def reason(said: str, code: int) -> str:
    """A readable reason why a compilation failed, from what the process wrote.

    The code is its exit code, or the negative number of the signal that ended it.
    """
    if tool := re.search(r"Couldn't find a suitable version of (\w+)", said):
        return f"XLA finds no {tool[1]}: pip install nvidia-cuda-nvcc, which has it."
    if re.search(r"No space left on device|Errno 28\b|Disk quota exceeded", said):
        return "the disk is full: free some space, or set TMPDIR to a folder on another disk."
    if code == -signal.SIGKILL:
        return f"the kernel killed the compiler (SIGKILL): probably {_NO_MEMORY}"
    if "std::bad_alloc" in said or "MemoryError" in said:
        return _NO_MEMORY
    lines = [line.strip() for line in reversed(said.splitlines()) if line.strip()]
    if check := next(filter(None, map(_CHECK.match, lines)), None):
        return f"the compiler aborted: {check[2]} ({check[1]})"[:_MOST]
    last = next(filter(_RAISED.match, lines), (lines or ["it said nothing"])[0])
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"the compiler {ended}: {last}"[:_MOST]


_KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def compiled_report(target: str, forecast: Forecast, found: Mapping[str, Mapping[str, Any]]) -> str:
    """A report of compiled levels (`compile_for`, or `{"error": ...}`): memory and collectives.

    Of a level that is too large, it lists the largest buffers.
    """
    known = {name: of for name, of in found.items() if "error" not in of}
    parts: list[Table | str] = []
    if known:
        parts += [_memory_table(target, forecast, known), _wire_table(known)]
    for name, of in found.items():
        if "error" in of:
            parts.append(f"{name}: not compiled, only estimated: {of['error']}")
        elif of["fits"] is False:
            parts.append(_too_large(name, of))
    return text_of(parts)


def _memory_table(target: str, forecast: Forecast, found: Mapping[str, Mapping[str, Any]]) -> Table:
    made = text_table(
        f"Compiled for {target}: memory of one device",
        ("level", "verdict"),
        ("arguments", "temporaries", "peak", "of it usable", "on the host", "forecast", "ratio",
         "compiled in"),
    )  # fmt: skip
    for name, of in found.items():
        memory, needs, expected = of["memory"], of["needs"], forecast.levels[name].peak
        amounts = (memory.get("argument"), memory.get("temp"), needs, of["has"],
                   memory.get("host_argument", 0), expected)  # fmt: skip
        made.add_row(
            name,
            {True: "fits", False: "does not fit", None: "-"}[of["fits"]],
            *("-" if count is None else bytes_of(count) for count in amounts),
            f"{expected / needs:.3f}" if expected and needs else "-",
            "earlier" if of.get("cached") else f"{of['compile_seconds']:.0f} s",
        )
    return made


def _wire_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    nodes = max(of["nodes"] for of in found.values())
    between = (f"between {nodes} nodes",) if nodes > 1 else ()
    made = text_table(
        "Sent by one device in one step, as compiled",
        ("level",),
        (*_KINDS, "others", "in all", *between, "overlapped", "collectives"),
    )
    for name, of in found.items():
        wire = of["wire_bytes"]
        others = sum_known(wire[kind] for kind in wire if kind not in _KINDS)
        in_all, overlapped = sum_known(wire.values()), sum_known(of["asynchronous_bytes"].values())
        network = (sum_known(of["network_bytes"].values()),) if between else ()
        share = "-" if in_all == 0 else "?"
        if overlapped is not None and in_all:
            share = f"{overlapped / in_all:.0%}"
        made.add_row(
            name,
            *("?" if count is None else bytes_of(count)
              for count in (*(wire.get(kind, 0) for kind in _KINDS), others, in_all, *network)),
            share,
            str(sum(row["count"] for row in of["collectives"])),
        )  # fmt: skip
    return made


def _too_large(name: str, of: Mapping[str, Any]) -> str:
    over = bytes_of(of["needs"] - of["has"]) if of["needs"] else "more than it has"
    lines = [f"{name} does not fit: too much by {over}. Largest buffers at the peak:"]
    for buffer in of["largest"][:8]:
        times = f" x {buffer['count']}" if buffer["count"] > 1 else ""
        lines.append(f"  {bytes_of(buffer['bytes'])}{times}  {buffer['shape']}  {buffer['what']}")
    return "\n".join(lines)
