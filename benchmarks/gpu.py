"""What works on GPUs, what it costs, and how planned figures compare.

    make gpu-check                       # or: python -m benchmarks.gpu [--output gpu-check]

Every section runs in a process of its own with a limit of seconds; one that fails is recorded with
its error and the rows that it had, and the others go on. All sections end within 25 minutes.
`report.md` and `report.json` are written after each section; of an earlier report of the same
machine and versions they keep the sections that are not run. Without an accelerator it uses small
models and eight virtual devices, which shows that everything runs; the figures then say nothing
about GPUs. Exits with 1 if a section fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from gshard._util.text import seconds_of
from gshard.analysis.calibration import SCHEMA
from gshard.cli.doctor.devices import run_probe

TOTAL = 1500.0  # seconds of all sections
SECTIONS = {  # name: title, limit in seconds
    "machine": ("machine", 90),
    "calibration": ("calibration", 90),
    "correctness": ("levels match plain jit", 300),
    "step_time": ("step time and memory next to plain jit", 300),
    "planned": ("planned next to measured", 360),
    "offload": ("offload to host memory", 150),
    "processes": ("processes", 180),
    "ranks": ("four processes on one device match plain jit", 300),
    "overlap": ("overlap of collectives with computation", 150),
    "dtypes": ("bfloat16 and float8", 240),
}


def main() -> None:
    """Runs the sections and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-check"), metavar="DIR")
    parser.add_argument("--small", action="store_true", help="small models, as without a GPU")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--devices", type=int, default=8, help="virtual, without an accelerator")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    about = {"schema": SCHEMA, "machine": None, "small": args.small, "calibration": None}
    done: dict[str, dict[str, Any]] = {}
    flags, on_cpu = os.environ.get("XLA_FLAGS", ""), False
    deadline = time.monotonic() + TOTAL
    names = [name for name in SECTIONS if name in ("machine", *args.sections)]
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as cache:
        # A program that two sections have is compiled once.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
        for i, name in enumerate(names, 1):
            if on_cpu and name != "calibration":  # nearly all of the time goes to the compiler
                os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
            seconds = min(SECTIONS[name][1], deadline - time.monotonic())
            found = section(name, seconds, about["small"], args.devices)
            if name == "machine" and not found.get("machine"):  # GPUs may start slowly once
                found = section(name, seconds, about["small"], args.devices)
            about |= {key: found.pop(key) for key in ("machine", "calibration") if key in found}
            done[name] = found
            said = f"{found['error'] or 'ok'}, {seconds_of(found['seconds'])}"
            print(f"[{i}/{len(names)}] {found['title']}: {said}", flush=True)
            if name == "machine":
                if about["machine"] is None:
                    raise SystemExit("The machine is not known, so no other section is run.")
                on_cpu = about["machine"]["platform"] == "cpu"
                about["small"] |= on_cpu
                kept = earlier(args.output, about)
                if about["small"]:
                    print("small models: the figures say nothing about GPUs", flush=True)
            calibration = about["calibration"] or kept.get("calibration")
            sections = {one["name"]: one for one in kept.get("sections", [])} | done
            ordered = [sections[x] for x in SECTIONS if x in sections]
            write(args.output, about | {"calibration": calibration, "sections": ordered})
    print(f"written: {args.output / 'report.md'}, {args.output / 'report.json'}")
    if any(found["error"] for found in done.values()):
        raise SystemExit(1)


def earlier(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The report that is there already, if it is of the same machine, versions and sizes."""
    try:
        found = json.loads((folder / "report.json").read_text())
        varies = {"memory": about["machine"]["memory"]}  # what can be allocated
        known = found["schema"], found["small"], found["machine"] | varies
        if known == (about["schema"], about["small"], about["machine"]):
            return found
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or only a part of one
        return {}
    kept = folder / time.strftime("report-%Y%m%d-%H%M%S.json")
    (folder / "report.json").replace(kept)
    with contextlib.suppress(FileNotFoundError):
        (folder / "report.md").replace(kept.with_suffix(".md"))
    print(
        f"The earlier report is of another machine, other versions or other sizes: kept as {kept}."
    )
    return {}


def section(name: str, limit: float, small: bool, devices: int) -> dict[str, Any]:
    """The result of a section: what it has found, and its error if it did not end well."""
    began, until = time.monotonic(), time.time() + limit
    found, trouble = {}, "left out: earlier sections took all the time"
    if limit > 0:
        given = {"section": name, "small": small, "devices": devices, "until": until}
        found, trouble, _ = run_probe("benchmarks.gpu_sections:run", limit, **given)
    wrong = found.pop("wrong", None)
    return {
        "name": name,
        "title": SECTIONS[name][0],
        "seconds": time.monotonic() - began,
        "limit": limit,
        "error": "; ".join(filter(None, (trouble, wrong))) or None,
        "note": found.pop("note", None),
        "rows": found.pop("rows", []),
        **found,
    }


def write(folder: Path, report: dict[str, Any]) -> None:
    """Writes `report.json` and `report.md`."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """The report as one page: a table for each section."""
    lines = ["# GPU check", ""]
    if report["small"]:
        lines += ["Small models: the figures say nothing about GPUs.", ""]
    for found in report["sections"]:
        lines += [f"## {found['title']}", ""]
        lines += [f"**{found['error']}**", ""] if found["error"] else []
        lines += [f"{found['note']}.", ""] if found["note"] else []
        if found["rows"]:
            heads = list(dict.fromkeys(key for row in found["rows"] for key in row))
            lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
            rows = [[_cell(row.get(key)) for key in heads] for row in found["rows"]]
            lines += ["| " + " | ".join(row) + " |" for row in rows]
            lines.append("")
        lines += [f"{seconds_of(found['seconds'])} of at most {found['limit']:.0f} s.", ""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """A figure with four digits; a ratio with its bounds; `|` does not end the cell."""
    if isinstance(value, list) and len(value) == 3:
        return "{:.2f} ({:.2f} to {:.2f})".format(*value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
