"""Kills trainings that save every step: any number; `tests/checkpoint/test_faults.py` does a few.

    python -m tests.checkpoint.soak_checkpoints [COUNT] [SEED]

All trainings follow each other in one directory, each on another mesh and level, in one process or
two. SIGKILL comes at a random moment, to one process or to all, or at a chosen call of a save, a
commit or a deletion. The next training is a fresh process: it finds the newest step at or after
the last one that was known to be on the disk, every step undamaged and equal in every bit to what
was saved, and nothing else in the directory after its first save.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.checkpoint.checkpoint_worker import ARMED_AFTER, CALLS, KEEP, LOCK
from tests.jobs import ROOT, Job, launch, running
from tests.processes import fast_compilation

WORKER = ROOT / "tests" / "checkpoint" / "checkpoint_worker.py"
HEARTBEAT = 4  # seconds
LEVELS = ("dp", "os", "os_g", "p_g_os")
DEVICES = {1: (1, 2, 4, 8), 2: (1, 2, 4)}  # of each process
MOST = {
    "mkdir": 5,
    "fsync": 40,
    "renamed": 2,
    "manifest": 1,
    "commit": 1,
    "delete": 1,
    "unlink": 14,
    "rmdir": 7,
}
SAVE = 120  # milliseconds that a save takes at most, with its deletion


class Life(NamedTuple):
    """A training until its end.

    Attributes:
      processes: 1 or 2.
      devices: virtual ones of each process.
      level: of the train state.
      point: a call at which a process kills itself; `random SECONDS` after the first step; `none`.
      victim: the rank that ends so; -1: all of them.
    """

    processes: int
    devices: int
    level: str
    point: str
    victim: int

    def __str__(self) -> str:
        who = "all" if self.victim < 0 else f"rank {self.victim}"
        place = f"{self.processes} x {self.devices} devices at {self.level}"
        return f"{place}, {who} of them at {self.point}"


def random_life(draw: random.Random) -> Life:
    processes = draw.choice((1, 2))
    devices, level = draw.choice(DEVICES[processes]), draw.choice(LEVELS)
    if draw.random() < 0.4:
        point, victim = f"random {draw.uniform(0, 1.5):.3f}", draw.randrange(-1, processes)
    elif draw.random() < 0.3:
        point, victim = f"write {draw.uniform(0, SAVE):.0f}", draw.randrange(processes)
    else:
        call = draw.choice(list(CALLS))
        # The first process alone makes folders, commits and deletes.
        victim = draw.randrange(processes) if call in ("fsync", "manifest") else 0
        most = MOST[call] // 3 if victim else MOST[call]
        point = f"{call} {draw.randint(1, max(most, 1))}"
    return Life(processes, devices, level, point, victim)


def live(life: Life, run: Path) -> Counter[str]:
    """Runs a training to its end; what it left in the directory, when it was killed."""
    at_random = life.point.startswith("random")
    own = "none" if at_random else life.point
    steps = ARMED_AFTER + 1 if own == "none" and not at_random else 10**6
    words = (WORKER, run, life.level, steps, own, max(life.victim, 0))
    flags = f"--xla_force_host_platform_device_count={life.devices} {fast_compilation()}"
    with running(_command(life, words), run, XLA_FLAGS=flags) as job:
        if at_random:
            job.wait_until(lambda: "goes on from" in job.out, "it trains")
            time.sleep(float(life.point.split()[1]))
            _kill(life, job)
        code = job.code()
        job.assert_nobody_left()
        said = f"{life}\n{job.out}\n{job.err}"
        if own == "none" and not at_random:
            assert code == 0 and "all steps" in job.out, said
            return Counter()
        if life.processes > 1 and not (at_random and life.victim < 0):
            assert f"rank {life.victim} was killed by SIGKILL" in job.err, said
        assert code in (-signal.SIGKILL, 128 + signal.SIGKILL), said
    return debris(run / "steps")


def debris(directory: Path) -> Counter[str]:
    """What a kill left behind, by the part of a save in which it fell."""
    names = set(os.listdir(directory) if directory.exists() else ()) - {LOCK}
    found: Counter[str] = Counter()
    for name in names:
        if name.endswith(".saving"):
            whole = (directory / name / "manifest.json").exists()
            found["before its commit" if whole else "while a step was written"] += 1
        elif name.endswith(".deleted"):
            found["while a step was deleted"] += 1
        else:
            assert name.isdigit(), names
    if not found:
        kept = len(names) <= KEEP
        found["between two saves" if kept else "between commit and deletion"] += 1
    return found


def _command(life: Life, words: tuple[object, ...]) -> list[str]:
    if life.processes == 1:
        return [sys.executable, *map(str, words)]
    options = ("--nproc_per_node", life.processes, "--heartbeat_timeout", HEARTBEAT)
    return launch(*options, *words)


def _kill(life: Life, job: Job) -> None:
    if life.processes == 1:
        return job.process.kill()
    ranks = job.ranks()
    for rank, pid in ranks.items():
        if life.victim in (-1, rank):
            os.kill(pid, signal.SIGKILL)


def soak(lives: list[Life], run: Path) -> dict[int, Counter[str]]:
    """All of them in one directory, and one more that ends in peace; what was found, by processes.

    The last one compares what the last kill left.
    """
    found: dict[int, Counter[str]] = {1: Counter(), 2: Counter()}
    for number, life in enumerate(lives, 1):
        began = time.monotonic()
        left = live(life, run)
        found[life.processes] += left
        what, took = ", ".join(left), time.monotonic() - began
        print(f"{number} of {len(lives)}: {life}: {what}; {took:.1f} s", flush=True)
    live(Life(1, 4, "p_g_os", "none", 0), run)
    return found


def main(count: int = 50, seed: int = 0) -> None:
    draw = random.Random(seed)
    lives = [random_life(draw) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        found = soak(lives, Path(folder))
    for processes, phases in found.items():
        kills = sum(life.processes == processes for life in lives)
        table = ", ".join(f"{n} {phase}" for phase, n in phases.most_common())
        print(f"{kills} kills of {processes} process{'es'[: 2 * processes - 2]}: {table}")
    print(f"{count} kills, every step as it was saved, 0 failures")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
