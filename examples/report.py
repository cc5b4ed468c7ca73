"""What the user sees: progress while it runs, one table and one picture at the end."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.measure import KINDS, PARTS, Run

TABLE_WIDTH = 112  # columns
SECONDS_BETWEEN_LINES = 5.0  # where the output is not a terminal


class Meter:
    """A line per run: phase, bar, loss and tokens/s; plain lines where there is no terminal."""

    def __init__(self, console: Console):
        self.console = console
        self.bars = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> Meter:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def run(self, name: str, steps: int) -> RunMeter:
        return RunMeter(self, name, steps)


class RunMeter:
    """The line of one run."""

    def __init__(self, meter: Meter, name: str, steps: int):
        self.meter, self.name, self.steps = meter, name, steps
        self.plain = not meter.console.is_terminal
        if not self.plain:
            self.task = meter.bars.add_task(f"{name:<10} ...", total=steps, note="")
        self.started = self.printed = time.monotonic()

    @contextlib.contextmanager
    def phase(self, doing: str):
        """Say what is going on while there is no step to count."""
        if self.plain:
            self.say(f"{doing} ...")
        else:
            self.meter.bars.update(self.task, description=f"{self.name:<10} {doing}")
        yield
        self.started = self.printed = time.monotonic()
        if not self.plain:
            self.meter.bars.update(self.task, description=f"{self.name:<10} training")

    def say(self, text: str) -> None:
        self.meter.console.print(f"{self.name:<10} {text}")

    def step(self, done: int, loss: float, tokens_per_second: float) -> None:
        note = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        if not self.plain:
            self.meter.bars.update(self.task, completed=done, note=note)
        elif done == self.steps or time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self.printed = time.monotonic()
            self.say(f"step {done}/{self.steps}  {note}")
        if done == self.steps and not self.plain:
            self.meter.bars.update(self.task, description=f"{self.name:<10} done")


# ---- the table ----------------------------------------------------------------------------------


def table(reference: Run | None, runs: list[Run], micro_batches: int) -> Table:
    """Two rows per level, measured and budget; the run on one device above them."""
    found = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title="Bytes on one device; elements that one device communicates in a step",
        title_justify="left",
        caption="parameters, optimizer: shards of the real arrays on the first device. gradients: "
        f"what the loop over {micro_batches} micro-batches carries in the compiled program. "
        "all-gather, reduce-scatter, all-reduce: counted in the compiled program, losses and norms "
        "left out. off by: largest difference of a loss from one device, over all steps.",
        caption_justify="left",
        title_style="bold",
    )
    found.add_column("", no_wrap=True)
    for name in ("parameters", "gradients", "optimizer", *KINDS, "last loss", "off by", "tokens/s"):
        found.add_column(name.replace("-", "-\n").replace(" ", "\n"), justify="right", no_wrap=True)
    for run in ([reference] if reference else []) + runs:
        found.add_row(
            run.name,
            *(size(run.bytes.get(part)) for part in PARTS),
            *(count(run.moved.get(kind)) for kind in KINDS),
            f"{run.losses[-1]:.5f}",
            f"{run.off_by(reference):.1e}" if reference and run is not reference else "",
            f"{run.tokens_per_second:,.0f}",
        )
        if run is reference:
            continue
        found.add_row(
            " budget",
            *(size(run.budget_bytes[part]) for part in PARTS),
            *(("<= " if k in run.at_most else "") + count(run.budget_elements[k]) for k in KINDS),
            style="dim",
        )
    return found


def size(bytes_: int | None) -> str:
    return "" if bytes_ is None else f"{bytes_:,}"


def count(elements: int | None) -> str:
    return "" if elements is None else f"{elements:,}"


# ---- the picture --------------------------------------------------------------------------------

COLORS = {"params": "#4c78a8", "gradients": "#f58518", "optimizer": "#54a24b"}
MIB = 2**20


def write_picture(path: Path, reference: Run | None, runs: list[Run], console: Console) -> None:
    """Draw memory per level and the loss curves, or say what is missing to do so."""
    try:
        import matplotlib
    except ImportError:
        console.print("no picture: matplotlib is missing (pip install matplotlib)")
        return
    matplotlib.use("agg")  # a file, never a window
    from matplotlib import pyplot as plt

    figure, (memory, loss) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw_memory(memory, runs)
    draw_losses(loss, reference, runs)
    for axes in (memory, loss):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    console.print(f"picture: {path}")


def draw_memory(axes, runs: list[Run]) -> None:
    """Stacked bars of measured bytes, with the budget as an outline around each part."""
    for i, run in enumerate(runs):
        top = budget_top = 0.0
        for part, color in COLORS.items():
            height = (run.bytes[part] or 0) / MIB
            budgeted = run.budget_bytes[part] / MIB
            axes.bar(i, height, 0.6, top, color=color, label=None if i else part)
            axes.bar(i, budgeted, 0.7, budget_top, fill=False, edgecolor="black")
            top, budget_top = top + height, budget_top + budgeted
        axes.text(i, max(top, budget_top), f"{top:.2f}", ha="center", va="bottom")
    axes.bar(0, 0, fill=False, edgecolor="black", label="budget")  # for the legend, last
    axes.set_xticks(range(len(runs)), [run.name for run in runs])
    axes.set_ylabel("MiB on one device")
    axes.set_title("Train state, measured and budget")
    axes.margins(y=0.1)
    axes.legend(frameon=False)


def draw_losses(axes, reference: Run | None, runs: list[Run]) -> None:
    """The curves coincide: a wide one below, the others as alternating dashes on top of it."""
    steps = range(1, len(runs[0].losses) + 1)
    if reference:
        axes.plot(steps, reference.losses, color="0.8", linewidth=6, label=reference.name)
    for i, run in enumerate(runs):
        (line,) = axes.plot(steps, run.losses, label=run.name)
        line.set_linestyle((4 * i, (4, 4 * (len(runs) - 1))) if len(runs) > 1 else "-")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("Loss: every level" + (" and one device" if reference else ""))
    for handle in axes.legend(frameon=False).get_lines():
        handle.set_linestyle("-")
