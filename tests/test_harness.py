"""What runs the tests: processes that several tests share, the record, the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import browser, processes, record

ROOT = Path(__file__).parents[1]


def test_shared_processes_that_fail_run_once(monkeypatch, tmp_path):
    runs = []

    def run_workers(folder, module):
        runs.append(module)
        raise AssertionError("exit codes [None, 1]")

    monkeypatch.setattr(processes, "run_workers", run_workers)
    factory = SimpleNamespace(getbasetemp=lambda: tmp_path / "gw0")
    (tmp_path / "gw0").mkdir()
    for _ in range(3):
        with pytest.raises(AssertionError, match=r"exit codes \[None, 1\]"):
            processes.run_workers_once(factory, "group", "module")
    assert runs == ["module"]


def test_processes_know_nothing_of_what_is_around_the_tests(monkeypatch):
    names = ("SLURM_PROCID", "RANK", "WORLD_SIZE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    for name in (*names, "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, "1")
        assert name not in processes.clean_environment()


def test_a_browser_that_hangs_is_not_waited_for(monkeypatch, tmp_path):
    hangs = tmp_path / "chromium"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(browser, "find", lambda: str(hangs))
    monkeypatch.setattr(browser, "LIMIT", 0.2)
    with pytest.raises(AssertionError, match=r"Chromium has not answered in 0\.2 s"):
        browser.Browser(tmp_path / "profile")


# ---- the record ---------------------------------------------------------------------------------

RECORDED = """
import time
import pytest

@pytest.fixture
def slow():
    time.sleep(0.3)
    yield
    time.sleep(0.3)

def test_one(slow):
    pass

def test_two():
    assert False
"""
PLUGIN = """
from pathlib import Path
from tests import record
from tests.record import pytest_configure, pytest_terminal_summary

record.ROOT = Path(__file__).parent
record.RECORD = record.ROOT / "record.md"
commits = iter(["abc", "def"])
record.commit = lambda: next(commits)
"""


def test_the_record_has_fixtures_and_both_commits(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(RECORDED)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    own = ["-q", "-p", "plugin", "-p", "no:hypothesispytest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *own, "-o", f"pythonpath={tmp_path} {ROOT}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    row = (tmp_path / "record.md").read_text().splitlines()[-1].split(" | ")
    file, passed, failed, _, _, seconds, _, commits, *_ = row
    assert (file, passed, failed) == ("| tests/test_x.py", "1", "1")
    assert (seconds, commits) == ("1", "abc to def")


@pytest.mark.parametrize("option", ["keyword", "markexpr", "lf", "stepwise", "deselect", "maxfail"])
def test_a_part_of_a_file_is_not_recorded(option, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORD", tmp_path / "record.md")
    reports = [SimpleNamespace(nodeid="tests/test_x.py::test_one", duration=1.0)]
    reporter = SimpleNamespace(stats={"passed": reports}, write_line=print)
    given = SimpleNamespace(**{"maxfail": 0, option: 1})
    config = SimpleNamespace(option=given, args=["tests"], stash={record.BEGUN: "abc"})
    record.pytest_terminal_summary(reporter, 1, config)
    assert not record.RECORD.exists()


def test_the_commit_is_unknown_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert record.commit() == "unknown"
