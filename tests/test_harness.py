"""What runs the tests: processes that several tests share, the record, the environment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import processes


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
