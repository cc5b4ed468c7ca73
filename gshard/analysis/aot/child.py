"""Compiles one step for a machine that is not there: `python -m gshard.analysis.aot.child`.

A process of its own: some compilers abort theirs for what they cannot do, and libtpu takes locks.
It is given one JSON object on stdin (see `gshard.analysis.aot.compiled.compile_for`) and writes
JSON objects to stdout, one a line: `{"stage": ...}` as it goes on, and at last one of
`{"result": ...}`, `{"error": ...}` (what a user can mend) and `{"failed": ...}` (what a library
said).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from gshard._util.errors import GShardError
from gshard._util.pytree import flatten
from gshard._util.version import versions
from gshard.analysis.aot.buffers import CompiledMemory, read_buffers, traffic
from gshard.analysis.aot.target import Target, parse_target
from gshard.analysis.audit import memory_of, rows_of
from gshard.analysis.setup import Choices, batch_of, load_setup, sharded_setup, step_of
from gshard.sharding.mesh import make_mesh

Say = Callable[[str], None]
_TOO_LARGE = re.compile(
    r"\((?P<needs>[\d.]+[KMGT]?)\) exceeds available HBM|memory space hbm\. Used (?P<used>\S+) of"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_step(request: dict[str, Any], say: Say) -> dict[str, Any]:
    """Lowers and compiles the step of a request; what is known of it, ready for JSON."""
    target = parse_target(request["target"])
    mesh = make_mesh(devices=target.described_devices(), replica=request.get("replica", 1))
    say("importing the model")
    setup = load_setup(request["model"], request.get("arguments"))
    names = [field.name for field in dataclasses.fields(Choices)]
    choices = Choices(**{name: request[name] for name in names if name in request})
    say("tracing and lowering")
    start = time.perf_counter()
    state, plan = sharded_setup(setup, mesh, request["level"], choices)
    step = step_of(setup, plan, choices)
    lowered = step.lower(*step.arguments(state, batch_of(setup, plan, choices)))
    lowering = time.perf_counter() - start
    say("compiling")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gshard-") as folder:
        compiled, said = _compiled(lowered, folder)
        compiling = time.perf_counter() - start
        say("reading the program")
        paths = {f"leaves[{i}]": path for i, path in enumerate(flatten(plan.layouts)[0])}
        buffers = read_buffers(Path(folder), target.platform, paths)
    text = compiled.as_text() if compiled else buffers and buffers.text
    return {
        "target": target.text,
        "devices": target.devices,
        "mesh": dict(mesh.shape),
        "level": request["level"],
        "versions": versions(),
        "lowering_seconds": round(lowering, 1),
        "compile_seconds": round(compiling, 1),
        "collectives": [dataclasses.asdict(row) for row in rows_of(text, mesh)] if text else [],
        **(traffic(text) if text else {"wire_bytes": {}, "asynchronous_bytes": {}}),
        **_memory(target, compiled, buffers, said),
    }


def _compiled(lowered: jax.stages.Lowered, folder: str) -> tuple[jax.stages.Compiled | None, str]:
    """The compiled program, or why the target's memory is too small for it."""
    try:
        return lowered.compile(compiler_options={"xla_dump_to": folder}), ""
    except jax.errors.JaxRuntimeError as error:
        if not _TOO_LARGE.search(str(error)):
            raise
        return None, str(error)


def _memory(
    target: Target, compiled: jax.stages.Compiled | None, buffers: CompiledMemory | None, said: str
) -> dict[str, Any]:
    """The verdict: what one device has, what the program needs, and what that is.

    A TPU's compiler refuses what is too large. Others do not, and what they call the peak leaves
    out the temporaries on CPU (JAX 0.10); their buffers are added up.
    """
    memory = memory_of(compiled) if compiled else {}
    if buffers:
        needs = buffers.peak
        if not compiled:
            memory = {"argument": buffers.arguments, "temp": needs - buffers.arguments}
            memory["peak"] = needs
    else:
        needs = _bytes_in(said) if said else memory.get("peak")
    has = target.chip.usable
    fits = False if said else None if has is None or needs is None else needs <= has
    largest = buffers.largest[:20] if buffers else ()
    return {
        "memory": memory,
        "needs": needs,
        "has": has,
        "fits": True if compiled and target.platform == "tpu" else fits,
        "largest": [dataclasses.asdict(buffer) for buffer in largest],
    }


def _bytes_in(said: str) -> int | None:
    """What an error says that a program needs, such as `25.00G`."""
    found = _TOO_LARGE.search(said)
    text = (found["needs"] or found["used"]) if found else ""
    number = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    return round(float(number[1]) * _UNITS.get(number[2], 1)) if number else None


def answer(work: Callable[[dict[str, Any], Say], dict[str, Any]]) -> None:
    """Reads a request from stdin, does the work, and says on stdout how it goes and ends.

    What the model prints meanwhile goes to stderr.
    """
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)

        def say(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")

        try:
            say(result=work(request, lambda stage: say(stage=stage)))
        except GShardError as error:
            say(error=str(error))
        except Exception as error:
            traceback.print_exc()
            say(failed=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    answer(compile_step)
