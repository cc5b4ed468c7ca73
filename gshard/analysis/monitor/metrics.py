"""`Metrics`: what a training loop does and how fast, in rows of a few steps each."""

from __future__ import annotations

import atexit
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax

from gshard._util import activity, events
from gshard._util.errors import ArgumentTypeError, CallOrderError, GShardError, warn
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import check_integer, shown
from gshard.analysis.monitor.mfu import chip_of_step, kind_of, model_flops, seconds_at_peak
from gshard.analysis.monitor.step_calls import Program, StepCalls, batch_of, steps_of
from gshard.analysis.monitor.window import Window, memory, scalars_of, sizes_of
from gshard.analysis.monitor.writers import JsonLines, SafeWriter, writer_of
from gshard.checkpoint.disk import as_directory
from gshard.sharding.validate import refuse_traced
from gshard.train.train_step import TrainStep
from gshard.train_state.nonfinite import LATE

_EXIT_TIMEOUT = 10.0  # seconds for which the end of a script waits for the devices
_open = WeakValueDictionary[str, "Metrics"]()  # by file


class Metrics:
    """Writes what a training loop does: loss, speed, MFU, memory, and where time goes.

    Call `step` after every train step. A row is written for each `every` steps, two steps later:
    by then the devices have finished it, so that no step waits for the copy. Nothing is compiled
    or communicated for it. In several processes all make the same calls, and the first one writes.

    A row has the means of the scalars that the steps returned (integers, such as `skipped_steps`:
    the last one), `steps` (how many it covers), `step_time` (seconds of wall time, all included),
    `examples_per_second`, `tokens_per_second`, `mfu` (model FLOPs utilization, from 0 to 1), bytes
    of `device_memory` and `device_memory_peak` (of the fullest device of the first process; where
    the backend does not say, as on CPU, `host_memory` of the process), `data_time`,
    `checkpoint_time` and `compile_time` (seconds in which the loop waited for `gshard.DataLoader`,
    in `gshard.Checkpointer`, for the compiler) and `goodput` (share of the wall time without
    these).

    Args:
      directory: a directory, made if missing, whose `metrics.jsonl` gets a JSON object per row; a
        resumed run appends. None for no file.
      every: steps per row.
      writers: where else rows go: `"terminal"` (a line each), `"tensorboard"`, `"wandb"`,
        functions `(step, scalars)`, or objects with `write_scalars(step, scalars)`, such as those
        of `clu.metric_writers`. One that fails warns once, and training goes on.
      tokens: tokens of an example. None: the length, if the batch is a matrix of integers, or a
        dictionary with one as `tokens` or `input_ids`.
      peak_flops: FLOP/s that a device can reach. None: from the data sheet, in the dtypes that the
        step multiplies; there is no MFU for devices that gshard does not know, nor on CPU.

    Raises:
      GShardError: an argument is not valid, or a writer's package is not installed.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=16)
      >>> step = gshard.make_train_step(loss_fn, plan)
      >>> with gshard.Metrics("run", every=2, writers=[]) as metrics:
      ...     for _ in range(4):
      ...         state, info = step(state, batch)
      ...         metrics.step(info)
      >>> import pathlib
      >>> pathlib.Path("run/metrics.jsonl").read_text().count('"loss"')
      2
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        every: int = 10,
        writers: Iterable[Any] = ("terminal",),
        tokens: int | None = None,
        peak_flops: float | None = None,
    ):
        folder = None if directory is None else as_directory(directory)
        self._every = check_integer("every", every, 1, " of steps")
        self._tokens = None if tokens is None else check_integer("tokens", tokens, 1)
        if peak_flops is not None and not _is_positive(peak_flops):
            raise GShardError(f"peak_flops={shown(peak_flops)} must be above 0, in FLOP/s.")
        self._peak = None if peak_flops is None else float(peak_flops)
        if isinstance(writers, str) or not isinstance(writers, Iterable):
            raise ArgumentTypeError(
                f"writers={shown(writers)} must be a list, such as ['terminal', 'tensorboard']."
            )
        self._writers = [writer_of(x, folder) for x in writers]
        if folder is not None:
            path = folder / "metrics.jsonl"
            if (before := _open.get(str(path))) is not None:
                before.close()  # as of a cell of a notebook that runs again
            _open[str(path)] = self
            self._writers.insert(0, SafeWriter(JsonLines(path), str(path)))
        self._window, self._due = Window(), deque[tuple[int, Window]]()
        self._count, self._is_closed, self._has_said_why = 0, False, False
        self._has_warned = False
        self._began, self._spent = time.monotonic(), dict(activity.spent)
        self._now = self._began, self._spent  # at the last step
        # By step, which it does not keep alive, and by the form of the batch.
        self._seconds_at_peak = WeakKeyDictionary[TrainStep, dict[Any, float]]()
        self._calls = StepCalls()
        events.observers.append(self._calls)
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        return f"Metrics(every={self._every}, {self._count} steps)"

    @short_traceback
    def step(
        self, info: Mapping[str, Any], batch: Any = None, *, number: int | None = None
    ) -> None:
        """Records a step. Every process calls it.

        Args:
          info: what the step returned next to the state: numbers, and arrays on the devices that
            are not donated. Nested ones are named by their path; arrays with several entries are
            left out. Add your own: `{**info, "learning_rate": schedule(n)}`.
          batch: its batch. Not needed after a step of `make_train_step`, whose batch is known. Of
            arrays on the host each process is taken to have other examples: where processes share
            sequences, pass what `shard_batch` returned.
          number: the number of the step. None: that of the train state; without `make_train_step`,
            how often this was called.

        Raises:
          ArgumentTypeError: `info` is not a dictionary.
          CallOrderError: the metrics are closed.
        """
        if self._is_closed:
            raise CallOrderError("these Metrics are closed. Make new ones.")
        if not isinstance(info, Mapping):
            raise ArgumentTypeError(
                f"metrics.step(info): info={shown(info)} is not a dictionary. Pass what the step "
                "returns next to the state: state, info = step(state, batch)."
            )
        refuse_traced(jax.tree.leaves([*info.values()]), "metrics.step")
        if not self._is_first():
            return
        self._count += 1
        info = scalars_of(info)
        window, skips, programs = self._window, self._calls.skips_of(info), self._calls.take()
        if self._calls.calls is not None and not programs and batch is None and number is None:
            self._warn_of_second_call()
        examples, tokens = self._sizes(batch, programs)
        window.add(info, skips, examples, tokens, steps_of(programs))
        window.number = self._count if number is None else check_integer("number", number, 0)
        window.calls = None if number is not None else self._calls.calls
        window.programs.update(programs)
        self._now = time.monotonic(), dict(activity.spent)
        if len(window.infos) == self._every:
            self._end_window()
        while self._due and self._count >= self._due[0][0]:
            self._write(self._due.popleft()[1])

    def _warn_of_second_call(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                "metrics.step was called again, and gshard saw no train step in between. Each call "
                "counts as a step, so step_time is too small, and there are no examples per "
                "second. Pass everything in one call: metrics.step({**info, **evaluated}). A step "
                "inside your own jax.jit is not seen: pass its batch and number= too."
            )

    def close(self) -> None:
        """Writes what is left, waiting for the devices, and closes the writers.

        A `with` block, new `Metrics` of the same directory and the end of the script call it too.
        """
        self._close(math.inf)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._close(math.inf if error is None else _EXIT_TIMEOUT)

    def _at_exit(self) -> None:
        # Another process may have ended, and with it the collectives of the last steps.
        self._close(_EXIT_TIMEOUT)

    def _is_first(self) -> bool:
        if jax.process_index() == 0:
            return True
        if self._calls in events.observers:
            events.observers.remove(self._calls)
        return False

    def _sizes(self, batch: Any, programs: Counter[Program]) -> tuple[int | None, int | None]:
        if programs:
            batch = batch_of(list(programs)[-1])
        return (None, None) if batch is None else sizes_of(batch, self._tokens)

    def _end_window(self) -> None:
        window, (now, spent) = self._window, self._now
        began, before = self._began, self._spent
        if self._count == len(window.infos) and self._calls.began is not None:
            began, before = self._calls.began  # not when the metrics were made
        window.seconds = now - began
        window.spent = {name: x - before.get(name, 0.0) for name, x in spent.items()}
        self._began, self._spent, self._window = now, spent, Window()
        self._due.append((self._count + LATE, window))

    def _write(self, window: Window) -> None:
        try:
            number, scalars = window.row()
        except RuntimeError as error:
            warn(
                f"gshard.Metrics lost {len(window.infos)} steps, because their values could not "
                "be read. The info that a step returns must not be donated to a later step. "
                f"({error})"
            )
            return
        at_peak, why = self._at_peak(window)
        if at_peak:
            scalars["mfu"] = at_peak / window.seconds
        scalars |= memory()
        for writer in self._writers:
            writer.write(number, scalars)
        if why and not self._has_said_why:
            self._has_said_why = True
            if any(writer.is_terminal for writer in self._writers):
                with suppress(OSError, ValueError):  # nobody reads, or the disk is full
                    print(f"no MFU: {why}", flush=True)

    def _at_peak(self, window: Window) -> tuple[float, str]:
        """The time that the arithmetic of a window takes at the devices' peak, or why it is 0."""
        total, why = 0.0, ""
        if not window.programs:
            why = "it needs a step of gshard.make_train_step, and none ran"
        for program, times in window.programs.items():
            step, form = program[0], program[1:]
            known = self._seconds_at_peak.setdefault(step, {})
            if form not in known:
                found, peak = 0.0, self._peak or chip_of_step(step)
                try:
                    if peak is not None:
                        flops = model_flops(step, batch_of(program))
                        found = seconds_at_peak(flops, peak)
                except Exception as error:  # a metric, for which no training stops
                    why = f"{type(error).__name__}: {error}"
                known[form] = found
            total += times * known[form]
            if not total and not why:
                why = "the step multiplies no matrices"
                if self._peak is None and chip_of_step(step) is None:
                    why = f"the peak of {kind_of(step)} is not known; "
                    why += "peak_flops= gives it, in FLOP/s"
        return total, why

    def _close(self, patience: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        if self._calls in events.observers:
            events.observers.remove(self._calls)
        if self._window.infos:
            self._end_window()
        end = time.monotonic() + patience
        for _, window in self._due:
            while math.isfinite(end) and not window.is_ready() and time.monotonic() < end:
                time.sleep(0.01)
            if not math.isfinite(end) or window.is_ready():
                self._write(window)
        if self._count:
            for writer in self._writers:
                writer.close()


def _is_positive(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and 0 < float(x) < math.inf
