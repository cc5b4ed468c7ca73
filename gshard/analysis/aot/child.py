"""Compiles one step for a target machine in a separate process, and reads what XLA reports.

Run as `python -m gshard.analysis.aot.child`: some compilers abort their process, and libtpu takes
locks. The request is one JSON object on stdin (see `gshard.analysis.aot.compiled.compile_for`). The
answer is JSON on stdout, one object a line: `{"stage": ...}` for progress, and at last one of
`{"result": ...}`, `{"error": ...}` (a user can fix it) and `{"failed": ...}` (what a library
raised).

Memory is read from files that XLA dumps, since a TPU program that is too large leaves no compiled
program to ask: the buffer assignment (allocations, and which values share one), the live ranges
(which values are alive at the peak), and the optimized program (which operation makes a value).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from gshard._util.durable import make_folder, write_file
from gshard._util.errors import GShardError
from gshard._util.pytree import flatten
from gshard._util.version import versions
from gshard.analysis.aot.target import Target, parse_target
from gshard.analysis.audit import collective_rows, compiled_memory
from gshard.analysis.audit_report import sum_known
from gshard.analysis.hlo import Collective, CompiledProgram, read_program
from gshard.analysis.hlo.parser import read_module
from gshard.analysis.setup import Choices, batch_of, load_setup, sharded_setup, step_of
from gshard.sharding.mesh import make_mesh
from gshard.sharding.nodes import Nodes, nodes_of

Say = Callable[[str], None]
_FORMAT = 3  # of the results that are kept: those of another one are not read
_TOO_LARGE = re.compile(
    r"\((?P<needs>[\d.]+[KMGT]?)\) exceeds available HBM|memory space hbm\. Used (?P<used>\S+) of"
)
_DUMPS = ("-buffer-assignment.txt", "-live-range.txt", ".txt")  # names of the three files end so
_ALLOCATION = re.compile(r"allocation (\d+): size (\d+),(.*)")
_VALUE = re.compile(
    r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_ALIVE = re.compile(r"    (\S+?)\{([\d,]*)\}: (\d+) bytes")
_COLOR = re.compile(r"color (\d+)")
_LAYOUT = re.compile(r"\{[^}]*\}")
_NAMED = re.compile(r'loc\("([^"]+)"\(')  # the name of an operation, not its file
_CALL = re.compile(r"jit\(\w+\)/(shard_map/)?")
# A TPU's main memory has color 0, its memories on the chip have others. All colors of a GPU are
# its main memory. The host's memory is 5 on both.
_HOST = 5


class _Slice(NamedTuple):
    """The part of an allocation that a value occupies."""

    allocation: int
    offset: int
    size: int
    shape: str


@dataclass(frozen=True)
class CompiledMemory:
    """The bytes of a compiled program on one device, in its arguments and in all allocations.

    `largest` has the values that are alive at the peak, largest first: `bytes` of each, `count`,
    `shape` such as `f32[16,4096]`, and `what`: the operation that makes them, or the name of the
    argument. `text` is the optimized program.
    """

    arguments: int
    peak: int
    largest: list[dict[str, Any]]
    text: str


def read_dumped_memory(
    folder: Path, platform: str, names: Mapping[str, str]
) -> CompiledMemory | None:
    """Reads the files that XLA dumped for one program into a folder; None if it dumped none.

    `names` has readable names of arguments, by their names in the program, such as `leaves[2]`.
    """
    files = [sorted(folder.glob(f"*after_optimizations{end}")) for end in _DUMPS]
    if not all(files):
        return None
    assignment, ranges, program = (found[-1].read_text() for found in files)
    arguments, peak, number = 0, 0, -1
    slices: dict[tuple[str, str], _Slice] = {}  # by the value's name and index
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            number, size, rest = int(found[1]), int(found[2]), found[3]
            color = _COLOR.search(rest)
            space = int(color[1]) if color else 0
            on_device = space != _HOST if platform == "gpu" else space == 0
            if "thread-local" not in rest and on_device:
                peak += size
                arguments += size if " parameter " in rest else 0
            else:
                number = -1
        elif (found := _VALUE.match(line)) and number >= 0:
            name, index, size, offset, shape = found.groups()
            slice_ = _Slice(number, int(offset), int(size), _LAYOUT.sub("", shape))
            slices[name, (index or "{}")[1:-1]] = slice_
    return CompiledMemory(arguments, peak, _alive_at_peak(ranges, slices, program, names), program)


def _alive_at_peak(
    ranges: str, slices: Mapping[tuple[str, str], _Slice], program: str, names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns the values alive at the peak; those that share a slice of memory count once."""
    computations = read_module(program).computations.values()
    origins = {x.name: x.op_name for of in computations for x in of.instructions}
    _, _, rest = ranges.partition("(peak):\n")
    alive: dict[tuple[int, int], _Slice] = {}
    made_by: dict[_Slice, list[str]] = {}
    for line in rest.splitlines():
        found = _ALIVE.match(line)
        if not found:
            break
        if slice_ := slices.get((found[1], found[2])):
            known = alive.setdefault(slice_[:2], slice_)
            alive[slice_[:2]] = max(known, slice_, key=lambda x: x.size)
            made_by.setdefault(slice_, []).append(found[1])
    sharing: dict[_Slice, list[str]] = {}
    for (name, _), slice_ in slices.items():
        sharing.setdefault(slice_, []).append(name)
    counts = Counter[tuple[int, str, str]]()
    for slice_ in alive.values():
        candidates = [_origin(name, origins) for name in made_by[slice_]]
        if all(map(_is_indirect, candidates)):
            candidates += [_origin(name, origins) for name in sharing[slice_]]
        what = min(candidates, key=lambda what: (_is_indirect(what), -len(what)))
        counts[slice_.size, slice_.shape, names.get(what, what)] += 1
    found = [
        {"bytes": size, "count": count, "shape": shape, "what": what}
        for (size, shape, what), count in counts.items()
    ]
    return sorted(found, key=lambda x: -x["bytes"] * x["count"])


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """Returns the user's operation that made a value, or else the compiler's name for it."""
    origin = _CALL.sub("", origins.get(name, ""))
    return origin if "/" in origin or "[" in origin else (origin or name).split(".")[0]


def _is_indirect(what: str) -> bool:
    """Whether an origin is only the loop around a value, or nothing that a user wrote."""
    return what.endswith("/while") or not ("/" in what or "[" in what)


def wire_traffic(program: CompiledProgram | None, nodes: Nodes) -> dict[str, dict[str, int | None]]:
    """Bytes that one device sends in one step by the ring algorithms, by kind of collective.

    `asynchronous_bytes` are those that overlap with computation, `network_bytes` those that go to
    other nodes. None for a kind with a collective in a loop of unknown length. No kinds without a
    program.
    """
    every = program.collectives if program else ()
    found = [x for x in every if x.group_size > 1]
    amounts: dict[str, Callable[[Collective], int | None]] = {
        "wire_bytes": lambda x: x.wire_bytes,
        "asynchronous_bytes": lambda x: x.wire_bytes if x.asynchronous else 0,
        "network_bytes": lambda x: x.network_bytes(nodes),
    }
    return {
        name: {
            kind: sum_known(amount(x) for x in found if x.kind == kind)
            for kind in dict.fromkeys(x.kind for x in found)
        }
        for name, amount in amounts.items()
    }


def compile_step(request: dict[str, Any], say: Say) -> dict[str, Any]:
    """Lowers and compiles the step of a request; returns the result, ready for JSON."""
    target = parse_target(request["target"])
    axes = {name: request.get(name, 1) for name in ("replica", "sequence", "expert")}
    mesh = make_mesh(devices=target.described_devices(), **axes)
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
    paths = {f"leaves[{i}]": path for i, path in enumerate(flatten(plan.layouts)[0])}
    known = _cached(lowered, target, paths)
    if kept := read_kept(known, target):
        return {**kept, "level": request["level"], "cached": True}
    say("compiling")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gshard-") as folder:
        compiled, said = _compile(lowered, folder)
        compiling = time.perf_counter() - start
        say("reading the program")
        buffers = read_dumped_memory(Path(folder), target.platform, paths)
    text = compiled.as_text() if compiled else buffers and buffers.text
    nodes = nodes_of(mesh, target.devices_per_node)
    program = read_program(text) if text else None
    rows = collective_rows(program, mesh, nodes) if program else ()
    found = {
        "target": target.text,
        "devices": target.devices,
        "nodes": nodes.count,
        "mesh": dict(mesh.shape),
        "level": request["level"],
        "versions": versions(),
        "lowering_seconds": round(lowering, 1),
        "compile_seconds": round(compiling, 1),
        "collectives": list(map(dataclasses.asdict, rows)),
        "flops": program and program.flops,
        **wire_traffic(program, nodes),
        **_memory(target, compiled, buffers, said),
    }
    if known is not None:
        with contextlib.suppress(OSError, GShardError):  # a cache that cannot be written is none
            make_folder(known.parent)
            write_file(known, json.dumps(found).encode())
            remove_oldest(known.parent)
    return found


def _cached(lowered: jax.stages.Lowered, target: Target, paths: Mapping[str, str]) -> Path | None:
    """Returns the file for the result of a program, a target and a compiler; None without a home.

    The names of operations are part of the result: they say what the largest buffers are.
    """
    names = _NAMED.findall(lowered.as_text(debug_info=True))
    of = (_FORMAT, lowered.as_text(), names, target.text, target.memory, paths, versions(),
          os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS"))  # fmt: skip
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without an entry in the password database
        return None
    name = hashlib.sha256(repr(of).encode()).hexdigest()
    return Path(home) / "gshard" / "compiled" / f"{name}.json"


def remove_oldest(folder: Path, keep: int = 1000) -> None:
    """Removes the oldest results in a folder; `keep` remain."""
    for old in sorted(folder.glob("*.json"), key=lambda x: x.stat().st_mtime)[:-keep]:
        old.unlink(missing_ok=True)


def read_kept(known: Path | None, target: Target) -> dict[str, Any] | None:
    """Returns the result that a file keeps; None if there is none, or the file is damaged."""
    if known is None:
        return None
    try:
        kept = json.loads(known.read_text())
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) and kept.get("target") == target.text else None


def _compile(lowered: jax.stages.Lowered, folder: str) -> tuple[jax.stages.Compiled | None, str]:
    """The compiled program, or the message that the target's memory is too small for it."""
    try:
        return lowered.compile(compiler_options={"xla_dump_to": folder}), ""
    except jax.errors.JaxRuntimeError as error:
        if not _TOO_LARGE.search(str(error)):
            raise
        return None, str(error)


def _memory(
    target: Target, compiled: jax.stages.Compiled | None, buffers: CompiledMemory | None, said: str
) -> dict[str, Any]:
    """The bytes that one device has and needs, whether the program fits, and its buffers.

    A TPU's compiler refuses a program that is too large. Others do not, and the peak that XLA:CPU
    reports leaves out temporaries (JAX 0.10), so the buffers are added up.
    """
    memory = compiled_memory(compiled, target.platform) if compiled else {}
    if buffers:
        needs = buffers.peak
        if not compiled:
            memory = {"argument": buffers.arguments, "temp": needs - buffers.arguments}
            memory["peak"] = needs
    else:
        needs = _bytes_in(said) if said else memory.get("peak")
    has = target.memory
    fits = False if said else None if needs is None else needs <= has
    return {
        "memory": memory,
        "needs": needs,
        "has": has,
        "fits": True if compiled and target.platform == "tpu" else fits,
        "largest": buffers.largest[:20] if buffers else [],
    }


def _bytes_in(said: str) -> int | None:
    """Reads from an error message the bytes that a program needs, such as `25.00G`."""
    found = _TOO_LARGE.search(said)
    text = (found["needs"] or found["used"]) if found else ""
    number = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    return round(float(number[1]) * 1024 ** " KMGT".index(number[2] or " ")) if number else None


def answer_request(work: Callable[[dict[str, Any], Say], dict[str, Any]]) -> None:
    """Answers the request on stdin on stdout; what the model prints goes to stderr."""
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
    answer_request(compile_step)
