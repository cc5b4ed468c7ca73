"""What a train step of Llama 2 7B sends over the wire, against theory and against GSPMD.

    python -m benchmarks.wire --target h100:32x8 --level p_g_os [--dump DIR] [--json FILE]

Everything is compiled ahead of time, each program in a process of its own, on no accelerator; what
is reported is read off the compiled programs: bytes that one device sends in one step by the ring
algorithms, how much of that goes to other nodes and overlaps with computation, and the compiler's
own account of memory.
With --wire gshard's parameters and gradients are sent in these dtypes, over an axis of the nodes
and one of the GPUs of each; theory and the baselines stay in bfloat16.
`theory` is the budget of gshard, with each leaf gathered no more often than this model needs. GB
are 1e9 bytes. XLA_FLAGS are passed on, and noted in the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.llama import Sizes
from gshard._util.errors import GShardError
from gshard.analysis.aot.compiled import ask
from gshard.analysis.aot.target import Target, parse_target

LEVELS = ("dp", "os", "os_g", "p_g_os")
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
BASELINES = ("gspmd", "gspmd, gathered weights")
_SAME = ("mesh", "parameters", "versions", "budget_bytes", "theory_bytes")  # whatever the program
_SAID = Console(stderr=True)


def compiled(
    program: str,
    target: Target,
    level: str,
    sizes: Sizes,
    dump: Path,
    timeout: float,
    wire: str = "",
    reshard: int = 0,
) -> dict[str, Any]:
    """What `benchmarks.wire_compile` finds.

    `{"program", "error"}` where it does not compile, or its bytes are not known.
    """
    what, start = f"{program} at {level} for {target.text}", time.monotonic()
    request = {"program": program, "target": target.text, "level": level, "dump": str(dump)}
    request |= {"sizes": dataclasses.asdict(sizes), "wire": wire, "reshard": reshard}
    try:
        found = ask("benchmarks.wire_compile", request, target, what, timeout)
    except GShardError as error:
        return {"program": program, "error": str(error)}
    if unknown := [kind for kind, amount in found["wire_bytes"].items() if amount is None]:
        said = f"{what}: {', '.join(unknown)} in a loop of unknown length, so its bytes are unknown"
        return {"program": program, "error": said}
    _SAID.print(f"compiled {what} in {time.monotonic() - start:.0f} s", highlight=False)
    return found


def total(found: dict[str, Any]) -> int:
    """Wire bytes of all kinds."""
    return sum(found["wire_bytes"].values())


def better(baselines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The baseline that counts: the one that sends less, of equals the one that needs less memory.

    Equal is what differs by less than a thousandth.
    """
    ran = [found for found in baselines if "error" not in found]
    least = min(map(total, ran), default=0)
    equals = [found for found in ran if total(found) <= 1.001 * least]
    return min(equals, key=lambda found: found["memory_bytes"]["peak_memory"] or 0, default=None)


def results(
    target: Target,
    level: str,
    sizes: Sizes,
    gshard_only: bool,
    dump: Path | None,
    timeout: float,
    wire: str = "",
    reshard: int = 0,
) -> dict[str, Any]:
    """Compiles gshard and the baselines; everything that is known, ready for JSON.

    Raises:
      GShardError: gshard's own step does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        texts = {p: Path(folder, f"{i}.txt") for i, p in enumerate(("gshard", *BASELINES))}
        own = texts["gshard"]
        gshard = compiled("gshard", target, level, sizes, own, timeout, wire, reshard)
        if "error" in gshard:
            raise GShardError(gshard["error"])
        names = () if gshard_only else BASELINES if level == "p_g_os" else BASELINES[:1]
        baselines = [compiled(p, target, level, sizes, texts[p], timeout) for p in names]
        best = better(baselines)
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            for name, found in (("gshard", gshard), ("gspmd", best)):
                if found is not None:
                    text = texts[found["program"]].read_text()
                    (dump / f"{name}.hlo.txt").write_text(text)
    known = [found for found in (gshard, *baselines) if "error" not in found]
    same = {name: [found.pop(name) for found in known][0] for name in _SAME}
    theory = sum(same["theory_bytes"].values())
    return {
        "target": target.text,
        "devices": target.devices,
        "level": level,
        "wire": wire,
        "reshard": reshard,
        "model": dataclasses.asdict(sizes) | {"parameters": same.pop("parameters")},
        **same,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "programs": [gshard, *baselines],
        "best_baseline": best and best["program"],
        "gshard_to_theory": total(gshard) / theory,
        "gshard_to_baseline": best and total(gshard) / total(best),
    }


def table(found: dict[str, Any]) -> Table:
    """One row for the budget, for theory and for every program."""
    model = found["model"]
    sent = "".join(f", {name} {found[name]}" for name in ("wire", "reshard") if found[name])
    shown = Table(
        title=f"{found['target']}, {found['level']}{sent}: "
        f"{model['parameters'] / 1e9:.3f} B parameters, {model['layers']} layers, "
        f"{found['devices']} devices; GB per device and step",
        title_justify="left",
    )
    names = [*KINDS, "others", "total", "of theory", "between nodes", "overlapped"]
    names += ["arguments", "temporary", "peak", "compile"]
    shown.add_column("program")
    for name in names:
        shown.add_column(name, justify="right")
    theory = sum(found["theory_bytes"].values())
    for name in ("budget", "theory"):
        wire = found[f"{name}_bytes"]
        mark = "<= " if name == "budget" and found["level"] == "p_g_os" else ""
        shown.add_row(name, *_wire_cells(wire, theory, mark))
    notes = ["* the baseline that counts"] if found["best_baseline"] else []
    for program in found["programs"]:
        mark = " *" if program["program"] == found["best_baseline"] else ""
        if "error" in program:
            shown.add_row(program["program"])
            notes.append(f"{program['program']}: {program['error']}")
            continue
        share = sum(program["asynchronous_bytes"].values()) / max(1, total(program))
        memory = program["memory_bytes"]
        shown.add_row(
            program["program"] + mark,
            *_wire_cells(program["wire_bytes"], theory),
            _gigabytes(sum(program["network_bytes"].values())),
            f"{share:.0%}",
            *(_gigabytes(memory[use]) for use in ("argument_size", "temp_size", "peak_memory")),
            f"{program['compile_seconds']:.0f} s",
        )
    if found["target"].startswith("cpu"):
        notes.append("XLA on CPU moves bfloat16 as float32")
    shown.caption, shown.caption_justify = "\n".join(notes) or None, "left"
    return shown


def _wire_cells(wire: dict[str, int], theory: int, mark: str = "") -> list[str]:
    all_kinds = sum(wire.values())
    parts = [wire.get(kind, 0) for kind in KINDS]
    cells = [_gigabytes(amount) for amount in (*parts, all_kinds - sum(parts))]
    return [*cells, mark + _gigabytes(all_kinds), f"{all_kinds / theory:.3f}"]


def _gigabytes(amount: int | None) -> str:
    return "-" if amount is None else f"{amount / 1e9:.3f}"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked: `target` is a `Target` and `sizes` are `Sizes`.

    Raises:
      GShardError: one line that says what is possible.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire", allow_abbrev=False)
    parser.description = __doc__.splitlines()[0]
    parser.add_argument("--target", required=True, help="h100:32x8, tpu-v5e:16x16, cpu:8, ...")
    parser.add_argument("--level", default="p_g_os", help=", ".join(LEVELS))
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument(
        "--wire",
        default="",
        metavar="GATHER[,SCATTER]",
        help="dtypes in which gshard sends parameters and gradients, such as int8 or int8,int4",
    )
    parser.add_argument(
        "--reshard", type=int, default=0, help="reshard_after_forward of gshard; 0: True"
    )
    parser.add_argument("--gshard-only", action="store_true", help="no baselines")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="for gshard and gspmd .hlo.txt")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one program")
    args = parser.parse_args(given)
    args.target = parse_target(args.target)
    if args.level not in LEVELS:
        raise GShardError(f"level {args.level!r} is unknown. Choose one of {', '.join(LEVELS)}.")
    args.sizes = Sizes(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Sizes)})
    return args


def main() -> None:
    """Compiles, prints the table, writes what was asked for."""
    try:
        args = arguments()
        found = results(
            args.target,
            args.level,
            args.sizes,
            args.gshard_only,
            args.dump,
            args.timeout,
            args.wire,
            args.reshard,
        )
    except GShardError as error:
        raise SystemExit(f"wire: {error}") from None
    Console(width=None if sys.stdout.isatty() else 160).print(table(found))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
