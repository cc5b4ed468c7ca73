"""Pytest plugin (`pytest -p tests.record`): records full runs in docs/development/test-record.md.

One row per test file, from its last complete run. A full run takes more than an hour, so files can
be run one by one.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "development" / "test-record.md"
OUTCOMES = ("passed", "failed", "error", "skipped")
COLUMNS = ("file", *OUTCOMES, "seconds", "date", "commit", "Python", "JAX")
HEAD = f"""# Record of full test runs

Written by `make test-all`, on {os.cpu_count()} cores; running one file
(`make test-all ARGS=tests/train/test_numbers.py`) replaces its row. Seconds are summed over the
tests of a file and their fixtures; several tests run in parallel. Two commits are those at the
beginning and at the end of a run.

| {" | ".join(COLUMNS)} |
{"|---" * len(COLUMNS)}|
"""
NARROWING = ("keyword", "markexpr", "lf", "stepwise", "deselect")
BEGUN = pytest.StashKey[str]()  # the commit


def pytest_configure(config):
    """Reads the commit before the first test; hours may pass until the last."""
    config.stash[BEGUN] = commit()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Replaces the rows of the files that ran; a narrowed run (-k, --lf) writes nothing."""
    given = vars(config.option)
    narrowed = any(given.get(name) for name in NARROWING) or exitstatus not in (0, 1)
    stopped = exitstatus and given["maxfail"]
    if narrowed or stopped or any("::" in argument for argument in config.args):
        terminalreporter.write_line(f"{RECORD.name} not written: this was not a full run")
        return
    counts: dict[str, Counter[str]] = {}
    for outcome in ("", *OUTCOMES):  # "": fixtures, before a test and after it
        for report in terminalreporter.stats.get(outcome, []):
            count = counts.setdefault(report.nodeid.split("::")[0], Counter())
            count[outcome] += 1
            count["seconds"] += getattr(report, "duration", 0.0)  # none of a skipped module
    begun, ended = config.stash[BEGUN], commit()
    where = (
        date.today().isoformat(),
        ended if ended == begun else f"{begun} to {ended}",
        platform.python_version(),
        importlib.metadata.version("jax"),
    )
    rows = {
        file: (file, *(count[outcome] for outcome in OUTCOMES), f"{count['seconds']:.0f}", *where)
        for file, count in counts.items()
    }
    kept = {file: row for file, row in old_rows().items() if (ROOT / file).exists()}
    lines = {**kept, **{file: f"| {' | '.join(map(str, row))} |" for file, row in rows.items()}}
    RECORD.write_text(HEAD + "".join(f"{lines[file]}\n" for file in sorted(lines)))
    terminalreporter.write_line(f"wrote {RECORD.relative_to(ROOT)}")


def old_rows() -> dict[str, str]:
    """The rows of the record by file."""
    text = RECORD.read_text() if RECORD.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith("| tests/")]
    return {line.split("|")[1].strip(): line for line in lines}


def commit() -> str:
    """The commit that ran, with a `+` when the tree had other changes."""
    changed = git("status", "--porcelain", "--", ".", f":!{RECORD.relative_to(ROOT)}")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def git(*arguments: str) -> str:
    """What git prints; empty where there is no repository, or no git."""
    run = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(run, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
