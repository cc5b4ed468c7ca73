"""Pytest plugin (`pytest -p tests.record`): write what a full run saw to docs/test-record.md."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from datetime import date
from pathlib import Path

RECORD = Path(__file__).parents[1] / "docs" / "test-record.md"
SLOWEST = 15
START = time.monotonic()


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Write the record; a run that was narrowed (-k, -m, a path) leaves the old one."""
    if config.option.keyword or config.option.markexpr or config.args_source.name == "ARGS":
        terminalreporter.write_line(f"{RECORD.name} not written: this was not the whole run")
        return
    seconds = time.monotonic() - START
    counts = {
        outcome: len(terminalreporter.stats.get(outcome, []))
        for outcome in ("passed", "failed", "error", "skipped", "xfailed")
    }
    slowest = sorted(
        (report for report in terminalreporter.stats.get("passed", []) if report.when == "call"),
        key=lambda report: -report.duration,
    )[:SLOWEST]
    skips = sorted(
        {f"`{r.nodeid}`: {r.longrepr[2]}" for r in terminalreporter.stats.get("skipped", [])}
    )
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("gshard", "jax", "jaxlib", "flax", "optax", "numpy", "pytest")
    )
    lines = [
        "# Record of the last full test run",
        "",
        "Written by `make test-all`.",
        "",
        "| what | value |",
        "|---|---|",
        f"| date | {date.today().isoformat()} |",
        f"| result | {'passed' if exitstatus == 0 else 'FAILED'} |",
        *(f"| tests {outcome} | {count} |" for outcome, count in counts.items()),
        f"| seconds | {seconds:.0f} |",
        f"| cores | {os.cpu_count()} |",
        f"| Python | {platform.python_version()} |",
        f"| packages | {versions} |",
        "",
        "Slowest tests:",
        "",
        "| seconds | test |",
        "|---|---|",
        *(f"| {report.duration:.1f} | `{report.nodeid}` |" for report in slowest),
    ]
    if skips:
        lines += ["", "Skipped:", "", *(f"- {skip}" for skip in skips)]
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text("\n".join(lines) + "\n")
    terminalreporter.write_line(f"wrote {RECORD.relative_to(RECORD.parents[1])}")
