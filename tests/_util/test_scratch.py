"""Temporary folders: apart for each process, and gone after a kill."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gshard._util import scratch
from gshard._util.errors import GShardError
from gshard._util.scratch import scratch_folder

MAKES = """
import os, sys
from gshard._util.scratch import scratch_folder
folder = scratch_folder("part")
(folder / "file").write_text("x")
if os.fork() == 0:
    print(scratch_folder("child").parent != folder.parent, flush=True)
    os._exit(0)
os.wait()
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """What `TMPDIR` names; no folder of this process is in it yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch._own_folder.cache_clear()
    yield tmp_path / f"gshard-{os.getuid()}"
    scratch._own_folder.cache_clear()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(folder):
    command = [sys.executable, "-c", MAKES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as killed, subprocess.Popen(command, **pipes) as lives:
        assert killed.stdout is not None and lives.stdout is not None
        assert killed.stdout.readline() == lives.stdout.readline() == "True\n"
        theirs = [Path(x.stdout.readline().strip()) for x in (killed, lives) if x.stdout]
        killed.kill()
        killed.wait()
        own = scratch_folder("mine")
        assert own.is_dir() and folder.stat().st_mode & 0o77 == 0
        assert not theirs[0].parent.exists()
        assert (theirs[1] / "file").read_text() == "x"
        lives.communicate()  # it ends by itself, and removes its own
    assert not theirs[1].parent.exists()


@pytest.mark.parametrize("boot", ["5a6b7c8d", ""])  # macOS names none
def test_only_folders_of_this_machine_are_removed(folder, monkeypatch, boot):
    """A lock of another machine may not be seen here."""
    own = scratch_folder("mine").parent.name
    assert own.startswith("-".join((str(os.getpid()), *scratch._machine(), "")))
    monkeypatch.setattr(scratch, "_machine", lambda: (boot, "host-a"))
    scratch._own_folder.cache_clear()
    stays = {
        f"1-{boot}-other-x": not boot,
        "1-00000000-host-a-x": False,
        f"1-{boot}-host-a-x": False,
    }
    stays |= {"1-00000000-other-x": True, "1-00000000-host-x": True, "1-x": True}
    for name in stays:
        (folder / name).mkdir(parents=True)
        (folder / name / "lock").touch()
    scratch_folder("mine")
    assert {name: (folder / name).exists() for name in stays} == stays


def test_a_folder_that_somebody_else_has_put_there_is_refused(folder, tmp_path):
    folder.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(GShardError, match="Set TMPDIR"):
        scratch_folder("x")


def test_a_folder_that_somebody_has_cleaned_is_made_again(folder):
    scratch_folder("x")
    shutil.rmtree(folder)
    assert scratch_folder("x").is_dir()
