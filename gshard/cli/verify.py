"""The command `gshard verify`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from gshard._util.errors import GShardError
from gshard.checkpoint.checksums import Damage, size_of, verify_step
from gshard.checkpoint.directory import (
    DESCRIPTION,
    MANIFEST,
    StepInfo,
    as_directory,
    existing_step,
    steps_in,
)
from gshard.cli.common import NO, NO_ANSWER, YES, print_answer

_EXAMPLE = """example:
  gshard verify checkpoints
  gshard verify checkpoints --step 300 --json

Exits with 0 when every step is as it was written, with 1 when one is damaged, and with 2 when
there is nothing to verify. Nothing is changed."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gshard verify",
        description="Reads every byte of checkpoints and compares it with their checksums.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("directory", help="what gshard.Checkpointer was given")
    parser.add_argument("--step", type=int, help="this step alone (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    given = parser.parse_args(words)
    try:
        directory = as_directory(given.directory)
        if (directory / MANIFEST).exists() and directory.name.isdigit():  # a step itself
            given.step, directory = int(directory.name), directory.parent
        if not directory.is_dir():
            raise GShardError(f"{directory} does not exist.")
        steps = steps_in(directory)
        if given.step is not None:
            steps = [existing_step(directory, given.step, steps)]
        if not steps:
            raise GShardError(f"{directory} holds no checkpoint.")
        found = _verified(directory, steps)
    except GShardError as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_ANSWER
    if given.json:
        text = json.dumps({"directory": str(directory), "steps": [_row(*x) for x in found]})
    else:
        text = "\n".join(_line(*x) for x in found)
    return print_answer(text, NO if any(bad for _, _, bad in found) else YES)


def _verified(directory: Path, steps: list[int]) -> list[tuple[int, Path, list[Damage]]]:
    """Verifies each step, with progress on a terminal; returns its number, folder and damages."""
    folders = [directory / str(step) for step in steps]
    found = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=sum(map(size_of, folders)))
        for step, folder in zip(steps, folders, strict=True):
            bar.update(task, description=f"step {step}")
            try:
                bad = verify_step(folder, progress=lambda count: bar.advance(task, count))
            except GShardError as error:  # of a later format
                bad = [Damage(DESCRIPTION, str(error))]
            found.append((step, folder, bad))
    return found


def _row(step: int, folder: Path, bad: list[Damage]) -> dict[str, Any]:
    rows = [{"file": x.file, "what": x.what, "arrays": list(x.arrays)} for x in bad]
    return {"step": step, "ok": not bad, "bytes": size_of(folder), "damages": rows}


def _line(step: int, folder: Path, bad: list[Damage]) -> str:
    """Returns the verdict on a step, and a line for each damage."""
    if bad:
        return "\n".join([f"[fail] step {step}", *(f"       {x}" for x in bad)])
    about = StepInfo.read(folder)
    made = about.made_by
    size = size_of(folder) / 1e6
    return (
        f"[ok]   step {step}: {size:,.1f} MB, {len(about.arrays)} arrays, level {made['level']}, "
        f"{about.processes} process{'es' if about.processes > 1 else ''}, saved {made['saved_at']}"
    )
