"""Trainings that are killed while they save: nothing that was on the disk is lost."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gshard
from tests.checkpoint.soak_checkpoints import Life, random_life, soak
from tests.jobs import ROOT, launch, running
from tests.tiers import quick

SCRIPT = ROOT / "tests" / "checkpoint" / "saves_and_ends.py"
DRAW = random.Random(3)
QUICK = [
    Life(1, 4, "p_g_os", "unlink 5", 0),
    Life(1, 2, "os", "renamed 1", 0),
    Life(2, 4, "dp", "manifest 1", 1),  # where the second has nothing to write
]
MORE = [Life(2, 2, "os_g", f"random {DRAW.uniform(0.3, 1):.3f}", -1)]
SOAKS = [QUICK, MORE, *([random_life(DRAW) for _ in range(12)] for _ in range(3))]


@pytest.mark.parametrize("number", quick(range(len(SOAKS)), [0]))
def test_killed_trainings_go_on_from_what_they_saved(number, tmp_path):
    soak(SOAKS[number], tmp_path)


# ---- how a program ends -------------------------------------------------------------------------

ENDS = [(1, "of itself"), (1, "raises"), (1, "is interrupted"), (1, "exits")]
ENDS += [*((2, how) for _, how in ENDS), (1, "forks"), (1, "fails")]


@pytest.mark.parametrize(
    "processes, how", quick(ENDS, [(1, "of itself"), (1, "raises"), (2, "raises")])
)
def test_a_program_that_ends_waits_for_its_last_save(processes, how, tmp_path):
    """Nobody has closed the checkpointer, nor waited."""
    words = (SCRIPT, tmp_path / "steps", how)
    command = [sys.executable, *map(str, words)]
    if processes > 1:
        command = launch("--nproc_per_node", processes, *words)
    codes = {"of itself": 0, "raises": 1, "is interrupted": 130, "exits": 7}
    codes |= {"forks": 0, "fails": 0}
    with running(command, tmp_path) as job:
        code = job.code()
        # The shell's 130 is the system's -2.
        assert code % 128 in (codes[how] % 128, -signal.SIGINT % 128), job.err
        job.assert_nobody_left()
    assert ("\ngshard: step 3 was not saved: " in job.err) == (how == "fails"), job.err
    checkpointer = gshard.Checkpointer(tmp_path / "steps")
    assert checkpointer.all_steps() == [1, 2], job.err
    assert not checkpointer.verify(1) and not checkpointer.verify(2)


@pytest.mark.slow
def test_a_save_in_an_exit_function_says_when_to_save(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "steps"), "saves at exit"]
    with running(command, tmp_path) as job:
        job.code()
    assert "Python is ending" in job.err and "Save before the script ends" in job.err, job.err
    assert not (tmp_path / "steps" / "1").exists()


@pytest.mark.parametrize("kills", quick(["5", "5 6 9"], ["5"]))
def test_a_job_that_is_killed_and_restarted_ends_as_one_that_never_was(kills, tmp_path):
    """Every loss and every bit of every state, though a process was killed while it saved."""
    logs = {}
    for name, at in (("undisturbed", []), ("killed", kills.split())):
        folder = tmp_path / name
        folder.mkdir()
        words = ("--nproc_per_node", 2, "--max_restarts", 3, SCRIPT, folder, "trains", *at)
        with running(launch(*words), folder) as job:
            assert job.code() == 0, job.err
            job.assert_nobody_left()
            assert job.err.count("was killed by SIGKILL") >= len(at)
        logs[name] = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    assert len(logs["killed"]) > len(logs["undisturbed"]) == 12  # some steps were done again
    assert dict(logs["killed"]) == dict(logs["undisturbed"])


# ---- power ---------------------------------------------------------------------------------------


def test_all_is_on_the_disk_before_the_rename_that_commits(tmp_path):
    """The calls of a real save, as the system sees them."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    log, directory = tmp_path / "calls", tmp_path / "new" / "steps"
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2"
    command = ["strace", "-f", "-y", "-e", calls, "-o", log, sys.executable, SCRIPT, directory]
    done = subprocess.run([*command, "of itself"], cwd=ROOT, capture_output=True, text=True)
    if "PTRACE" in done.stderr:
        pytest.skip(f"strace may not look: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    before, after, moved, draft = _around_the_commit(log, directory)
    step = directory / "2"
    for path in [*step.rglob("*"), step]:
        name = os.path.normpath(f"{draft}/{path.relative_to(step)}")
        assert {name, moved.get(name)} & before, f"{name} is not on the disk"
    assert str(directory) in after
    # And so are the folders that the first save made.
    assert {str(directory.parent), str(tmp_path)} <= before


def _around_the_commit(
    log: Path, directory: Path
) -> tuple[set[str], set[str], dict[str, str], str]:
    """Paths that were synced before step 2 is one, and after; old names by new ones; its draft."""
    before: set[str] = set()
    after: set[str] = set()
    moved: dict[str, str] = {}
    begun: dict[str, str] = {}
    synced, draft = before, ""
    for line in log.read_text().splitlines():
        pid, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[pid] = call.removesuffix("<unfinished ...>").rstrip()
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>", call):
            call = begun.pop(pid) + call[resumed.end() :]
        if sync := re.match(r"f(?:data)?sync\(\d+<(.*?)>\)\s+= 0", call):
            synced.add(sync[1])
        elif re.match(r"rename", call) and call.endswith("= 0"):
            old, new = re.findall(r'"(.*?)"', call)
            moved[new] = old
            if new == f"{directory}/2":
                synced, draft = after, old
    assert synced is after, "no rename has committed"
    return before, after, moved, draft
