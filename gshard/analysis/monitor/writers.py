"""Where metrics go: JSON lines, a terminal line, TensorBoard, W&B, and writers of the user's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError, did_you_mean, warn
from gshard._util.events import now
from gshard._util.validation import shown
from gshard._util.version import install_command

Scalars = Mapping[str, float]


class SafeWriter:
    """A writer whose failure is a warning, the first time, and never stops the training."""

    def __init__(self, writer: Any, name: str):
        self._writer, self._name, self._has_warned = writer, name, False
        self.is_terminal: bool = isinstance(writer, Terminal)

    def write(self, step: int, scalars: Scalars) -> None:
        """Writes the scalars of a step."""
        write = getattr(self._writer, "write_scalars", self._writer)
        self._try(lambda: write(step, dict(scalars)))

    def close(self) -> None:
        """Flushes, and closes what gshard has opened."""
        for name in ("flush", "close") if isinstance(self._writer, _Own) else ("flush",):
            if callable(call := getattr(self._writer, name, None)):
                self._try(call)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                failed = getattr(self._writer, "has_failed", False)
                later = "nothing more is written" if failed else "so do later attempts to write"
                warn(
                    f"gshard.Metrics: {self._name} could not write: {type(error).__name__}: "
                    f"{error}. Training goes on, and {later}."
                )


class _Own:
    """A writer that gshard opens and closes."""


class JsonLines(_Own):
    """Appends a JSON object per call to a file; values that are not finite become null."""

    def __init__(self, path: Path):
        self._path, self._file = path, -1

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        """Appends one line, or nothing if the disk is full."""
        if self._file < 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        values = {name: x if math.isfinite(x) else None for name, x in scalars.items()}
        own = {"time": now(), "step": step}
        line = json.dumps(own | values | own).encode() + b"\n"
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # a crash has cut the last line
            line = b"\n" + line
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(f"no space left for {self._path}")
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class Terminal(_Own):
    """Prints a line per call, the same in a terminal and in a log."""

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        """Prints the line."""
        print(line_of(step, scalars), flush=True)


class TensorBoard(_Own):
    """Writes event files for TensorBoard, by tensorboardX."""

    def __init__(self, folder: Path):
        self._folder, self._writer = folder, None

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        """Adds the scalars of a step."""
        if self._writer is None:
            from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

            self._writer = SummaryWriter(str(self._folder))
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Writes what is buffered."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


class WandB(_Own):
    """Logs to the run of Weights & Biases that is active, or to a new one, which it finishes."""

    def __init__(self, folder: Path | None):
        self._folder, self._run, self._is_mine = folder, None, False
        self.has_failed = False

    def write_scalars(self, step: int, scalars: Scalars) -> None:
        """Logs the scalars of a step; nothing once a run could not begin, which takes long."""
        if self.has_failed:
            return
        import wandb  # pyright: ignore[reportMissingImports]

        if self._run is None:
            self._run, self._is_mine = wandb.run, wandb.run is None
        if self._run is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            self.has_failed = True
            self._run = wandb.init(dir=self._folder)
            self.has_failed = False
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Finishes the run, if it was begun here."""
        if self._run is not None and self._is_mine:
            self._run.finish()
        self._run = None


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
_KNOWN = ("terminal", *_PACKAGES)


def writer_of(given: Any, folder: Path | None) -> SafeWriter:
    """A writer by its name, or one of the user's.

    Raises:
      GShardError: it is neither, or its package is not installed.
    """
    if not isinstance(given, str):
        if not callable(given) and not callable(getattr(given, "write_scalars", None)):
            raise GShardError(
                f"writers= holds {shown(given)}. A writer is one of {', '.join(_KNOWN)}, a "
                "function (step, scalars), or an object with write_scalars(step, scalars)."
            )
        return SafeWriter(given, getattr(given, "__name__", type(given).__name__))
    if given not in _KNOWN:
        raise GShardError(
            f"writers= holds {given!r}, which is none of {', '.join(_KNOWN)}."
            f"{did_you_mean(given, _KNOWN)}"
        )
    package = _PACKAGES.get(given)
    if package and find_spec(package) is None:
        raise GShardError(
            f"the writer {given!r} needs the package {package}: {install_command(given)}"
        )
    if given == "tensorboard":
        if folder is None:
            raise GShardError(
                "the writer 'tensorboard' needs a directory: gshard.Metrics(directory, ...)."
            )
        return SafeWriter(TensorBoard(folder), "TensorBoard")
    return SafeWriter(WandB(folder), "W&B") if package else SafeWriter(Terminal(), "the terminal")


def line_of(step: int, scalars: Scalars) -> str:
    """The line of a terminal, such as `step 40  loss 1.2345  12.3 ms/step`."""
    known = dict(scalars)
    steps, step_time = known.pop("steps", 1), known.pop("step_time", 0.0)
    wall = steps * step_time
    words = [f"step {step}"]
    words += [f"{name.replace('_', ' ')} {known.pop(name):.4g}" for name in _FIRST if name in known]
    words.append(f"{1e3 * step_time:.3g} ms/step" if step_time < 1 else f"{step_time:.3g} s/step")
    for name, unit in (("examples", "examples/s"), ("tokens", "tokens/s")):
        if (rate := known.pop(f"{name}_per_second", None)) is not None:
            words.append(f"{_amount(rate)} {unit}")
    if (mfu := known.pop("mfu", None)) is not None:
        words.append(f"MFU {100 * mfu:.1f} %")
    for name in ("device_memory", "host_memory"):
        if (size := known.pop(name, None)) is not None:
            words.append(f"{name.replace('_', ' ')} {size / 1e9:.3g} GB")
    for name in ("data", "checkpoint", "compile"):
        share = known.pop(f"{name}_time", 0.0) / wall if wall else 0.0
        words += [f"{name} {100 * share:.0f} %"] if share >= 0.01 else []
    if not known.get("skipped_steps", 1):
        del known["skipped_steps"]
    for name in _HIDDEN:
        known.pop(name, None)
    words += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in known.items()]
    return "  ".join(words)


_FIRST = ("loss", "grad_norm")
_HIDDEN = ("device_memory_peak", "goodput")


def _amount(x: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.3g}{letter}"
    return f"{x:.3g}"
