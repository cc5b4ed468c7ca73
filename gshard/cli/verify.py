"""The command `gshard verify`."""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from typing import Any

from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

from gshard._util.errors import GShardError
from gshard._util.text import bytes_of
from gshard._util.validation import check_integer
from gshard.checkpoint.checksums import Damage, verify_step
from gshard.checkpoint.open_store import open_step_or_store
from gshard.checkpoint.step_files import (
    Progress,
    StepFiles,
    StoreError,
    size_of,
    store_errors_explained,
)
from gshard.checkpoint.step_info import DESCRIPTION, StepInfo, existing_step
from gshard.cli.common import Answer, command_parser, parsed, progress_bar, respond, value_of
from gshard.cli.output import NO, YES

_EXAMPLES = """example:
  gshard verify checkpoints
  gshard verify checkpoints --step 300 --json

Exits with 0 when every step is as it was written, with 1 when one is damaged, and with 2 when
there is nothing to verify. Nothing is changed."""


def main(words: list[str]) -> int:
    """Runs the command with these words; returns the exit code."""
    about = "Reads every byte of checkpoints and compares it with their checksums."
    parser = command_parser("gshard verify", about, _EXAMPLES)
    directory = "the directory or address that gshard.Checkpointer was given"
    parser.add_argument("directory", metavar="DIRECTORY", help=directory)
    parser.add_argument("--step", help="only this step (default: all)")
    return respond(lambda: (parsed(parser, words), None), _verify)


@store_errors_explained()
def _verify(given: Namespace, _: None) -> Answer:
    asked = None if given.step is None else check_integer("--step", value_of(given.step), 0)
    store, own = open_step_or_store(given.directory)
    steps = store.steps()
    if own is not None and asked not in (None, own):
        raise GShardError(f"{given.directory} is step {own}: leave out --step {asked}.")
    asked = asked if own is None else own
    if asked is not None:
        steps = [existing_step(store, asked, steps)]
    if not steps:
        raise GShardError(f"{store} {store.why_empty()}")
    rows, lines = [], []
    with progress_bar(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    ) as bar:
        task = bar.add_task("", total=sum(_size(store.step(step)) for step in steps))
        for step in steps:
            bar.update(task, description=f"step {step}")
            row, line = dict[str, Any](ok=False), ""
            try:
                row, line = _verdict(store.step(step), lambda count: bar.advance(task, count))
            except (OSError, GShardError, StoreError):
                if step in store.steps():
                    raise
            if not row["ok"] and step not in store.steps():
                row = {"step": step, "gone": True}
                line = f"[gone] step {step}: it was deleted meanwhile"
            rows.append(row)
            lines.append(line)
    verified = [row["ok"] for row in rows if "ok" in row]
    if not verified:
        raise GShardError(f"{store}: all steps that were to be verified were deleted meanwhile.")
    data = {"directory": str(store), "steps": rows}
    return Answer(data, "\n".join(lines), YES if all(verified) else NO)


def _size(folder: StepFiles) -> int:
    with suppress(OSError):  # deleted meanwhile, or it cannot be read, as its verdict says
        return size_of(folder)
    return 0


def _verdict(folder: StepFiles, progress: Progress) -> tuple[dict[str, Any], str]:
    """The entry of a step in `--json`, and its text: a line, and one more for each damage."""
    step = int(folder.name)
    try:
        damages = verify_step(folder, progress=progress)
    except GShardError as error:  # of a later format
        damages = [Damage(DESCRIPTION, str(error))]
    rows = [{"file": x.file, "what": x.what, "arrays": list(x.arrays)} for x in damages]
    row = {"step": step, "ok": not damages, "bytes": _size(folder), "damages": rows}
    return row, _line(step, folder, damages)


def _line(step: int, folder: StepFiles, damages: list[Damage]) -> str:
    """Returns the verdict on a step, and a line for each damage."""
    if damages:
        return "\n".join([f"[fail] step {step}", *(f"       {x}" for x in damages)])
    about = StepInfo.read(folder)
    made = about.made_by
    return (
        f"[ok]   step {step}: {bytes_of(size_of(folder))}, {len(about.arrays)} arrays, "
        f"level {made['level']}, "
        f"{about.processes} process{'es' if about.processes > 1 else ''}, saved {made['saved_at']}"
    )
