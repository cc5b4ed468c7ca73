"""Tiers and shards: every test runs somewhere, once, and a wrong word is one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests import conftest, tiers
from tests.tiers import is_in_shard, parse_shard, stale, workers

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_file_is_in_one_shard_of_its_share(count):
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    shards = [[x for x in files if is_in_shard(x, (i + 1, count))] for i in range(count)]
    assert sorted(file for shard in shards for file in shard) == sorted(files)
    assert min(map(len, shards)) > 0.7 * len(files) / count


def test_a_shard_is_read():
    assert parse_shard("2/4") == (2, 4)
    for text in ("5/4", "0/4", "1", "1/0", "a/b", "-1/4", "1/4/2"):
        with pytest.raises(pytest.UsageError, match=rf"SHARD={text} is no shard .*SHARD=1/4"):
            parse_shard(text)


def test_the_command_refuses_a_wrong_shard_in_one_line():
    command = [sys.executable, "-m", "pytest", "tests/test_tiers.py", "--shard", "5/4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4
    assert done.stderr.strip().splitlines() == [
        "ERROR: SHARD=5/4 is no shard of a test run. Write SHARD=1/4 for the first of four."
    ]


def test_listed_cases_are_slow_and_unknown_ones_are_found():
    ids = ["tests/a.py::test_x[1]", "tests/a.py::test_x[2]", "tests/b.py::test_y"]
    listed = ["tests/a.py::test_x[1]", "tests/a.py::test_z", "tests/b.py::test_y", "tests/c.py::t"]
    assert stale(listed, ids) == ["tests/a.py::test_z"]


@pytest.mark.parametrize("last_failed", [False, True])
def test_some_tests_of_a_file_are_no_reason_to_call_the_list_stale(monkeypatch, last_failed):
    listed = {"tests/a.py::test_z"}
    monkeypatch.setattr(conftest, "slow_cases", lambda: listed)
    config = SimpleNamespace(args=["tests"], getoption={"lf": last_failed, "--shard": None}.get)
    items = [SimpleNamespace(nodeid="tests/a.py::test_x")]
    if last_failed:
        conftest.pytest_collection_modifyitems(config, items)
    else:
        with pytest.raises(pytest.UsageError, match="lists no test: tests/a.py::test_z"):
            conftest.pytest_collection_modifyitems(config, items)


def test_whole_tests_and_single_cases_are_listed(monkeypatch):
    monkeypatch.setattr(tiers, "slow_cases", lambda: {"a.py::test_x[1]", "a.py::test_y"})
    assert tiers.is_slow_case("a.py::test_x[1]") and not tiers.is_slow_case("a.py::test_x[2]")
    assert tiers.is_slow_case("a.py::test_y[3]") and tiers.is_slow_case("a.py::test_y")


@pytest.mark.parametrize(
    ("available", "limit", "quota", "most"),
    [
        (16e9, None, "max 100000", 10),
        (4e9, None, "", 2),
        (1e9, None, "", 1),
        (16e9, 4e9, "", 2),
        (4e9, 16e9, "", 2),
        (16e9, None, "150000 100000", 3),
    ],
)
def test_workers_fit_the_memory_and_the_container(
    monkeypatch, tmp_path, available, limit, quota, most
):
    free = psutil.virtual_memory()._replace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setattr("gshard._util.cgroup.memory_limit", lambda: limit)
    monkeypatch.setattr(tiers, "CPU_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(quota)
    assert workers() == most


@pytest.mark.parametrize("asked_for", [True, False])
def test_a_number_of_workers_that_was_asked_for_is_compared_with_the_memory(monkeypatch, asked_for):
    monkeypatch.setattr(tiers, "free_memory", lambda: 3.1e9)
    config = SimpleNamespace(getoption={"numprocesses": 3}.get, stash={})
    if not asked_for:
        conftest.pytest_xdist_auto_num_workers(config)
    said = conftest.pytest_report_header(config)
    assert bool(said) == asked_for
    if asked_for:
        assert "3 workers (JOBS= or -n) may need 4.5 GB of memory, and 3.1 GB are" in said[0]
    assert not tiers.too_many(2)


@pytest.mark.slow
def test_a_run_says_how_large_its_workers_became():
    command = [sys.executable, "-m", "pytest", "tests/test_tiers.py", "-n", "1", "-k", "is_read"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = r"^largest worker that finished: ([\d.]+) GB of memory"
    (most,) = re.findall(said, done.stdout, re.MULTILINE)
    assert 0.1 < float(most) < 1.5
