"""Kill a training run at a random moment, start it again, and compare with one that never stopped.

    python -m examples.kill_and_resume [configs/demo.toml] [--steps 50] ...

The one that never stopped is what `python -m examples.train_gpt` of the same settings left in its
output folder. The same program runs here in processes of its own, at the last of its levels. What
the kill left on disk is also resumed at another level, on half of the devices.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gshard
from examples.config import Config, ConfigError, parse

COMPARED = 20  # steps after the kill, at least


class TrainingError(RuntimeError):
    """A training run that ended otherwise than it should."""


class Training:
    """`examples.train_gpt` in a process of its own, at one level, with its checkpoints."""

    def __init__(self, folder: Path, level: str, **settings):
        self.folder, self.said = folder / level, folder / "said"
        folder.mkdir(exist_ok=True)
        settings |= {"levels": level, "checkpoints": folder, "output": folder / "output"}
        options = [f"--{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "examples.train_gpt", *sys.argv[1:], *options]
        with self.said.open("w") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()

    def newest(self) -> int:
        """The newest step that is complete on the disk, or 0."""
        return gshard.Checkpointer(self.folder).latest_step() or 0

    def wait_until(self, step: int) -> None:
        """Until a checkpoint of this step is there, or the process has ended."""
        while self.newest() < step and self.process.poll() is None:
            time.sleep(0.02)

    def end(self) -> str:
        """How it ended, and the newest step that is saved."""
        code = self.process.wait()
        if code not in (0, gshard.distributed.PREEMPTED_EXIT_CODE):
            raise TrainingError(f"the training ended with {code}:\n{self.said.read_text()}")
        how = f"SIGTERM: saved, exit code {code}" if code else "its end"
        return f"from step {self.went_on_from()} to {self.newest()} ({how})"

    def went_on_from(self) -> int:
        """The step from which it resumed, as it printed it."""
        found = re.search(r"resumes from step (\d+)", self.said.read_text())
        if found is None:
            raise TrainingError(f"it started from the beginning:\n{self.said.read_text()}")
        return int(found[1])

    def losses(self) -> list[float]:
        """Of every step so far, which the newest checkpoint holds."""
        return gshard.Checkpointer(self.folder).metadata()["losses"]


def never_stopped(config: Config) -> list[float]:
    """The losses of the run that `examples.train_gpt` made."""
    path = Path(config.output) / "results.json"
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    results = json.loads(path.read_text()) if path.exists() else {}
    if results.get("settings") != settings:
        raise ConfigError(
            f"{path} is not of these settings: run examples.train_gpt with them first"
        )
    return results["runs"][-1]["losses"]


def half(config: Config) -> dict[str, int]:
    """Settings of half of the devices, of which as many share the experts as can."""
    fewer = config.devices // 2 if config.devices % 2 == 0 else 1
    return {"devices": fewer, "expert": math.gcd(config.expert, fewer)}


def main(config: Config, folder: Path) -> bool:
    """Whether the losses were identical."""
    began, unbroken = time.monotonic(), never_stopped(config)
    level, steps = config.levels[-1], config.steps
    other = "os" if level == "os_g" else "os_g"
    fewer = half(config)
    common = {"one_device": "false", "save_every": max(1, steps // 50)}
    print(f"\nKilled and started again, at {level} on {config.devices} devices:\n", flush=True)

    # ---- a kill at a random moment; the pause is for models whose steps take milliseconds --------

    with Training(folder / "first", level, pause=2 / steps, **common) as killed:
        killed.wait_until(random.randint(max(1, steps // 25), max(1, steps // 10)))
        time.sleep(random.random())
        killed.process.kill()
        if killed.process.wait() != -signal.SIGKILL:
            raise TrainingError(f"it ended before it was killed:\n{killed.said.read_text()}")
    start = killed.newest()
    there = sorted((x.name for x in killed.folder.glob("[0-9]*")), key=lambda x: (len(x), x))
    print(f" kill -9  on the disk: {', '.join(there)}; the newest complete step is {start}")

    # ---- the same command once more, and also at another level, on half of the devices -----------

    shutil.copytree(folder / "first", folder / "second")
    (folder / "second" / level).rename(folder / "second" / other)  # checkpoints are of no level
    until = min(start + COMPARED, steps)
    with (
        Training(folder / "first", level, **common) as again,
        Training(folder / "second", other, **fewer, **common) as moved,
    ):
        for training in (again, moved):
            training.wait_until(until)
            if until < steps:
                training.process.terminate()
        print(f" again    {again.end()}")
        print(f" moved    {moved.end()}, to {other} on {fewer['devices']} devices")

    losses = again.losses()
    same = losses == unbroken[: len(losses)]
    pairs = zip(moved.losses()[start:until], unbroken[start:until], strict=True)
    off = max((abs(x - y) / y for x, y in pairs), default=0.0)
    print(
        f"\nlosses identical bit by bit, steps 1 to {len(losses)}: {'yes' if same else 'NO'}\n"
        f"largest relative difference where moved, steps {start + 1} to {until}: {off:.1e}\n"
        f"{time.monotonic() - began:.0f} s in all"
    )
    return same


if __name__ == "__main__":
    try:
        with tempfile.TemporaryDirectory() as folder:
            identical = main(parse(description=__doc__.splitlines()[0]), Path(folder))
    except (ConfigError, TrainingError, gshard.GShardError) as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if identical else 1)
